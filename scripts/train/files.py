"""The trained networks as checkpoints in their published formats, and Llama-family checkpoints as networks.

Of a V4 network attention, indexer queries and shared experts become E4M3 with a scale per 128 x 128 block, routed
experts E2M1 (two per byte, the even column in the low nibble) with a scale per 32 input channels, both scales E8M0.
Embedding, head, norms, compressors, routers and `weights_proj` become BF16; sinks, `ape`, hyper-connections and router
biases stay F32; the hash table is I64. One shard for the embedding, one for each layer, one for the head, as DeepSeek
cuts them. A draft head is stored alike, its Markov and confidence heads in BF16, in a shard of its own.
"""

import json
import shutil
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn

from fathom.kernels.formats.groups import FP4_BLOCK
from fathom.kernels.formats.stored import Fp4
from fathom.kernels.quantise.reference import E2M1_MAX, power_of_two_scale, round_e2m1
from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.checkpoint.folder import INDEX
from fathom.model.errors import ConfigError
from fathom.model.llama.census import HEAD, census, check_tied_head, parameters
from fathom.model.llama.config import LlamaConfig
from fathom.model.llama.rope import frequencies
from fathom.model.llama.trained import Trained
from fathom.probes.demo_language.vocabulary import BOS, EOS, PAD, SPECIAL, build_tokenizer, vocabulary_size
from fathom.runtime.options import DEMO
from fathom.runtime.output import write_json, write_text
from fathom.runtime.tensorfile import write_safetensors
from fathom.scripts.train import draft_network as draft
from fathom.scripts.train import llama_network as llama
from fathom.scripts.train import v4_network as v4
from fathom.scripts.train.coda_network import attentions
from fathom.scripts.train.layers import Quantised, fp8_blocks

E2M1: Final = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
DRAFT: Final = "model-mtp.safetensors"
ADAPTERS: Final = "coda_adapters.safetensors"
KEPT_IN_F32: Final = ("attn_sink", "ape", "fn", "base", "scale", "gate.bias")
LLAMA: Final[dict[str, Any]] = {  # config.json of the small Llama
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": vocabulary_size(),
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 1 << 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "torch_dtype": "bfloat16",
}


def fp4_groups(W: Tensor) -> Fp4:
    """W [rows, columns] as E2M1 with an E8M0 scale for each 32 columns of a row."""
    groups = W.unflatten(1, (-1, FP4_BLOCK))
    scale = power_of_two_scale(groups.abs().amax(2, keepdim=True).clamp(min=E2M1_MAX * 2.0**-126), E2M1_MAX)
    values = round_e2m1(groups / scale).flatten(1)
    code = torch.searchsorted(E2M1, values.abs()) + 8 * torch.signbit(values)
    packed = code[:, 0::2] | code[:, 1::2] << 4
    return Fp4(packed.to(torch.uint8).view(torch.int8), scale.squeeze(2).to(torch.float8_e8m0fnu))


def stored_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Every tensor of the checkpoint under its official name: hyper-connections have no module of their own there."""
    quantised = {name for name, module in network.named_modules() if isinstance(module, Quantised)}
    tensors: dict[str, Tensor] = {}
    for name, W in network.state_dict().items():
        owner = name.rpartition(".")[0]
        if name.endswith(("ffn.w1", "ffn.w2", "ffn.w3")):
            for e, expert in enumerate(W):
                stem = f"{owner}.experts.{e}.{name[-2:]}"
                tensors[f"{stem}.weight"], tensors[f"{stem}.scale"] = fp4_groups(expert)
        elif owner in quantised:
            tensors[name], tensors[f"{owner}.scale"] = fp8_blocks(W)
        else:
            wide = W.dtype == torch.int64 or name.endswith(KEPT_IN_F32)
            for site in ("hc_attn", "hc_ffn", "hc_head"):
                name = name.replace(f"{site}.", f"{site}_")  # noqa: PLW2901 -- its official one
            tensors[name] = W.clone() if wide else W.to(torch.bfloat16)
    return tensors


def write_v4(network: v4.Network, folder: Path) -> int:
    """Write config, tokenizer, index and shards into `folder`; the size of the shards in bytes.

    The config.json is that of the shipped demo, whose shape the network must have.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[dict[str, Tensor]] = [{} for _ in range(network.config.num_hidden_layers + 2)]
    for name, tensor in stored_tensors(network).items():
        part = int(name.split(".")[1]) + 1 if name.startswith("layers.") else 0 if name.startswith("embed") else -1
        parts[part][name] = tensor.contiguous()
    files: dict[str, str] = {}
    for i, tensors in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        write_safetensors(folder / file, tensors, {"format": "pt"})
        files |= dict.fromkeys(tensors, file)
    write_index(folder, files, sum(tensor.nbytes for tensors in parts for tensor in tensors.values()))
    write_text(folder / "config.json", (DEMO / "config.json").read_text(encoding="utf-8"))
    write_text(folder / "tokenizer.json", build_tokenizer().to_str(pretty=True))
    return sum((folder / file).stat().st_size for file in set(files.values()))


def write_index(folder: Path, files: dict[str, str], size: int) -> None:
    """Write what says which file each stored name is in; `size` is the bytes of all tensors."""
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
    write_json(folder / INDEX, index, indent=2)


def write_draft(head: draft.Head, source: Path, changes: dict[str, Any], folder: Path) -> int:
    """Write a checkpoint with a draft head in a shard of its own into `folder`; the size of that shard in bytes.

    Everything else is that of the checkpoint `source`, byte for byte; its config.json takes in `changes`.
    """
    checkpoint = Checkpoint.open(source)
    for file in (*(shard.path.name for shard in checkpoint.shards), "tokenizer.json"):
        shutil.copyfile(source / file, folder / file)
    tensors = {name: tensor.contiguous() for name, tensor in stored_tensors(head).items()}
    write_safetensors(folder / DRAFT, tensors, {"format": "pt"})
    files = {name: tensor.shard.name for name, tensor in checkpoint.tensors.items()} | dict.fromkeys(tensors, DRAFT)
    size = sum(tensor.nbytes for tensor in tensors.values())
    write_index(folder, files, size + sum(tensor.nbytes for tensor in checkpoint.tensors.values()))
    fields = json.loads((source / "config.json").read_text(encoding="utf-8"))
    write_json(folder / "config.json", fields | changes, indent=2)
    return (folder / DRAFT).stat().st_size


def write_llama(network: llama.Network, fields: dict[str, Any], folder: Path) -> int:
    """Write config.json, tokenizer.json and the weights in BF16 into `folder`; the size of the weights in bytes.

    The tokenizer puts BOS before a text by its own template, as Llama 3's does: every document of the language has one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in network.state_dict().items()}
    if network.config.tie_word_embeddings:
        del weights[HEAD]
    path = folder / "model.safetensors"
    write_safetensors(path, weights, {"format": "pt"})
    write_json(folder / "config.json", fields, indent=2)
    tokenizer = build_tokenizer()
    tokenizer.post_processor = TemplateProcessing(single=f"{SPECIAL[BOS]} $A", special_tokens=[(SPECIAL[BOS], BOS)])
    write_text(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    return path.stat().st_size


def read_llama(folder: Path) -> llama.Network:
    """A checkpoint of the family as a network in fp32; ConfigError or CheckpointError where the product refuses it too.

    ConfigError for a model with a sliding window, which the network does not have.
    """
    config = LlamaConfig.from_file(folder / "config.json")
    if config.sliding_window is not None:
        raise ConfigError(f"{folder}: sliding_window is {config.sliding_window}; a model without one is trained here")
    checkpoint = Checkpoint.open(folder)
    counted = census(checkpoint.shapes(), config, where=str(folder))
    check_tied_head(checkpoint, counted)
    weights = {name: checkpoint.read(name).float() for name in parameters(config)}
    if config.tie_word_embeddings:
        weights[HEAD] = weights["model.embed_tokens.weight"]
    with torch.device("meta"):  # what is read is not copied into random weights
        network = llama.Network(config)
    network.load_state_dict(weights, assign=True)
    network.freqs = frequencies(config)
    if config.tie_word_embeddings:
        network.lm_head.weight = network.model.embed_tokens.weight
    return network


def write_adapters(network: llama.Network, told: Trained, folder: Path) -> int:
    """Write the CoDA attention of every layer in float32, in the published layout; the size of the file in bytes.

    Its header says what the adapters were trained over and for, so that nothing else is run with them unawares.

    There is no `head_norm.weight`: the head norm is the identity, as in the published adapters for Mistral.
    """
    tensors = {
        f"layer_{i}.coda.{name}": value.detach().to(torch.float32).contiguous()
        for i, layer in enumerate(attentions(network))
        for name, value in layer.state_dict().items()
    }
    write_safetensors(folder / ADAPTERS, tensors, told.metadata())
    return (folder / ADAPTERS).stat().st_size
