"""Random valid tiny checkpoints in official naming, written with the safetensors library.

The quantisers here are part of the tests: they round with torch's own types and share no code with what reads them.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fathom.model.checkpoint.mtp import Head, head_parameters
from fathom.model.checkpoint.names import Parameter, parameters, vision_tensors
from fathom.model.config import ModelConfig

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FORMATS = ("official", "base", "nvfp4", "bf16", "f32")


def tiny_config(**overrides: Any) -> dict[str, Any]:
    """A config.json in DeepSeek's dialect: small, and legal for every format and for deployed numerics.

    Four layers: SWA with a hash gate, CSA, HCA, CSA. Pass `num_hidden_layers` together with `compress_ratios`.
    """
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "compress_ratios": [0, 4, 128, 4],
        "compress_rope_theta": 160000,
        "eos_token_id": 1,
        "hc_eps": 1e-06,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "head_dim": 80,
        "hidden_act": "silu",
        "hidden_size": 256,
        "index_head_dim": 32,
        "index_n_heads": 4,
        "index_topk": 8,
        "initializer_range": 0.02,
        "max_position_embeddings": 1048576,
        "model_type": "deepseek_v4",
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hash_layers": 1,
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": 0,
        "o_groups": 2,
        "o_lora_rank": 64,
        "q_lora_rank": 128,
        "qk_rope_head_dim": 16,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": 16,
        "swiglu_limit": 10.0,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 512,
    } | overrides


DSPARK = {
    "dspark_block_size": 5,
    "dspark_noise_token_id": 510,
    "dspark_target_layer_ids": [1, 2, 3],
    "dspark_markov_rank": 32,
}  # of `tiny_config`


def micro_config(**overrides: Any) -> dict[str, Any]:
    """A config of an SWA and a CSA layer, a few KB of weights: for tests of files, not of values."""
    return (
        tiny_config(
            compress_ratios=[0, 4],
            head_dim=32,
            hidden_size=64,
            hc_mult=2,
            index_n_heads=2,
            moe_intermediate_size=32,
            n_routed_experts=4,
            num_attention_heads=2,
            num_hidden_layers=2,
            o_lora_rank=32,
            q_lora_rank=32,
            qk_rope_head_dim=8,
            vocab_size=16,
        )
        | overrides
    )


def v41_config() -> dict[str, Any]:
    """A config.json of DeepSeek-V4.1, small, with a layer of every role.

    Those of 0 and 1 have a window alone, 1 with n-grams before it; 2 and 4 make entries; 4 publishes candidates, among
    which 6 selects; 3 and 5 read what others made.
    """
    first = 307
    primes = [n for n in range(first, 400) if all(n % d for d in range(2, 20))][:6]
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": 127,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": {
            "model_type": "deepseek_v41_text",
            "vocab_size": 128,
            "hidden_size": 64,
            "moe_intermediate_size": 32,
            "num_hidden_layers": 7,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 96,
            "qk_rope_head_dim": 32,
            "q_lora_rank": 32,
            "o_lora_rank": 32,
            "o_groups": 2,
            "hidden_act": "silu",
            "swiglu_limit": 1.0,
            "rms_norm_eps": 1e-20,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "max_position_embeddings": 1024,
            "rope_theta": 10000,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 16,
                "beta_fast": 32,
                "beta_slow": 1,
                "original_max_position_embeddings": 64,
            },
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.5,
            "sliding_window": 24,
            "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 0, 0, 0],
            "compress_rope_theta": 160000,
            "kv_source_layer_ids": [2, 4],
            "index_source_layer_ids": [2, 4, 6],
            "index_n_heads": 8,
            "index_head_dim": 64,
            "index_topk": 10,
            "candidate_source_layer_id": 4,
            "candidate_topk_blocks": 5,
            "candidate_block_size": 4,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-06,
            "engram_layer_ids": [1],
            "engram_num_embeddings": [sum(primes)],
            "engram_max_ngram_size": 4,
            "engram_vocab_size": first,
            "engram_n_heads": 2,
            "engram_head_dim": 32,
            "engram_pad_token_id": 2,
            "engram_compressed_vocab_size": 100,
            "num_nextn_predict_layers": 3,
            "dspark_block_size": 3,
            "dspark_noise_token_id": 126,
            "dspark_target_layer_ids": [4, 5, 6],
            "dspark_markov_rank": 32,
            "dspark_n_routed_experts": 4,
            "dspark_num_experts_per_tok": 2,
        },
        "vision_config": {
            "num_hidden_layers": 1,
            "hidden_size": 32,
            "intermediate_size": 48,
            "patch_size": 2,
            "downsample_ratio": 3,
        },
    }


def random_values(name: str, parameter: Parameter, experts: int, generator: torch.Generator) -> Tensor:
    """Values that keep activations and logits near unit scale; float32, or int64 for a table."""
    shape, leaf = parameter.shape, name.removesuffix(".weight").rpartition(".")[2]
    if parameter.kind == "i64":  # distinct experts in each row
        return torch.rand(shape[0], experts, generator=generator).argsort(1)[:, : shape[1]].clone()
    if leaf.startswith("hc_") and leaf.endswith("scale"):
        return 0.1 + 0.9 * torch.rand(shape, generator=generator)
    noise = torch.randn(shape, generator=generator)
    if len(shape) == 1 and leaf.endswith("norm"):
        return 1 + 0.1 * noise
    of_leaf = {"embed": 1, "markov_w1": 1, "attn_sink": 1, "ape": 0.5, "bias": 0.2}
    if leaf.endswith("base"):  # of mHC
        return 0.5 * noise
    return of_leaf.get(leaf, shape[-1] ** -0.5) * noise  # most are linears, and so is hc_*_fn


def power_of_two(amax: Tensor, largest: float) -> Tensor:
    """The least power of two s with amax / s <= largest, 1 for a block of zeros."""
    return torch.where(amax > 0, torch.exp2(torch.ceil(torch.log2(amax.double() / largest))), 1.0).float()


def fp8(values: Tensor, block: int = 128) -> tuple[Tensor, Tensor]:
    """[out, in] -> E4M3 values and one power of two for each square block, float32."""
    rows, columns = values.shape
    padded = torch.zeros(-(-rows // block) * block, -(-columns // block) * block)
    padded[:rows, :columns] = values
    blocks = padded.unflatten(0, (-1, block)).unflatten(2, (-1, block))  # [rows/block, block, columns/block, block]
    scale = power_of_two(blocks.abs().amax((1, 3)), 448)
    data = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]
    return data.to(torch.float8_e4m3fn).contiguous(), scale


def fp8_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, width] -> E4M3 values and one E8M0 scale for each 32 columns of a row."""
    blocks = values.unflatten(1, (-1, 32))
    scale = power_of_two(blocks.abs().amax(2), 448)
    return (blocks / scale[..., None]).flatten(1).to(torch.float8_e4m3fn), scale.to(torch.float8_e8m0fnu)


def pack_e2m1(values: Tensor) -> Tensor:
    """[out, in] within [-6, 6] -> nearest E2M1 codes, two in each byte, the even column low; uint8 [out, in / 2]."""
    code = (values.abs()[..., None] - E2M1).abs().argmin(-1) + 8 * (values < 0)
    return (code[:, 0::2] | code[:, 1::2] << 4).to(torch.uint8)


def fp4(values: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> packed E2M1 as int8, and one E8M0 scale for each 32 columns."""
    blocks = values.unflatten(1, (-1, 32))
    scale = power_of_two(blocks.abs().amax(2), 6)
    return pack_e2m1((blocks / scale[..., None]).flatten(1)).view(torch.int8), scale.to(torch.float8_e8m0fnu)


def nvfp4(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[out, in] -> packed E2M1 as uint8, E4M3 scales of 16 columns, float32 scale of the matrix, 0-d."""
    overall = values.abs().amax() / (6 * 448)
    blocks = values.unflatten(1, (-1, 16))
    scale = (blocks.abs().amax(2) / (6 * overall)).clamp_min(2**-6).to(torch.float8_e4m3fn)
    return pack_e2m1((blocks / (scale.float() * overall)[..., None]).flatten(1).clamp(-6, 6)), scale, overall


def stored(name: str, parameter: Parameter, values: Tensor, formats: str, block: int = 128) -> dict[str, Tensor]:
    """The tensors in which a checkpoint of one of `FORMATS` stores a parameter."""
    assert formats in FORMATS, formats
    if parameter.kind == "i64":
        return {name: values}
    if parameter.kind == "rows":
        data, scale = fp8_rows(values)
        return {name: data, f"{name.removesuffix('.weight')}.scale": scale}
    if formats in ("bf16", "f32") or parameter.kind != "matrix":
        narrow = formats == "bf16" or (parameter.kind != "f32" and formats != "f32")
        return {name: values.to(torch.bfloat16 if narrow else torch.float32)}
    base = name.removesuffix(".weight")
    if ".ffn.experts." in name and formats == "official":
        data, scale = fp4(values)
        return {name: data, f"{base}.scale": scale}
    if ".ffn.experts." in name and formats == "nvfp4":
        data, scale, overall = nvfp4(values)
        return {
            name: data,
            f"{base}.weight_scale": scale,
            f"{base}.weight_scale_2": overall,
            f"{base}.input_scale": torch.tensor(0.01),
        }
    data, scale = fp8(values, block)
    return {name: data, f"{base}.scale": scale if formats == "base" else scale.to(torch.float8_e8m0fnu)}


def make_tensors(
    config: Mapping[str, Any],
    *,
    seed: int,
    formats: str = "official",
    adjust: Callable[[str, Tensor], Tensor] = lambda _, values: values,
    head: Head | None = None,
) -> dict[str, Tensor]:
    """Every tensor of a random checkpoint in official naming; see `write_checkpoint`."""
    checked = ModelConfig.from_json(config, "tiny config")
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    wanted = parameters(checked) | ({} if head is None else head_parameters(head, checked))
    for name, parameter in wanted.items():
        values = adjust(name, random_values(name, parameter, checked.n_routed_experts, generator))
        tensors |= stored(name, parameter, values, formats, checked.fp8_block)
    return tensors | {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in vision_tensors(checked).items()}


def write_tensors(directory: Path, tensors: Mapping[str, Tensor], *, shards: int) -> None:
    """Write model.safetensors (one shard), or shards of alternating tensors and their index."""
    if shards == 1:
        save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {
        name: f"model-{place % shards + 1:05}-of-{shards:05}.safetensors" for place, name in enumerate(tensors)
    }
    for shard in sorted(set(weight_map.values())):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == shard}, directory / shard)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write_checkpoint(
    directory: Path,
    config: Mapping[str, Any],
    *,
    seed: int,
    formats: str = "official",
    shards: int = 2,
    adjust: Callable[[str, Tensor], Tensor] = lambda _, values: values,
    head: Head | None = None,
) -> None:
    """Write config.json and a random valid checkpoint.

    Parameters
    ----------
    directory
        Made when it does not exist.
    config
        As `tiny_config` returns it.
    seed
        The same seed gives the same values, whatever the formats.
    formats
        "official" (FP8 with E8M0 scales, FP4 experts), "base" (FP8 with F32 scales, experts too), "nvfp4" (NVFP4
        experts, FP8 for the rest), "bf16", or "f32".
    shards
        1 writes model.safetensors without an index.
    adjust
        ``adjust(name, values) -> values``, called on every parameter before it is stored.
    head
        A draft head that the checkpoint has too; the model's values are the same without it.

    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    write_tensors(directory, make_tensors(config, seed=seed, formats=formats, adjust=adjust, head=head), shards=shards)
