"""The small Llama's dimensions and files: as published checkpoints of the family are, and read as strictly."""

from pathlib import Path
from typing import Any

import torch
from tokenizers.processors import TemplateProcessing

from model.checkpoint.checkpoint import Checkpoint
from model.errors import ConfigError
from model.llama.census import HEAD, census, check_tied_head, parameters
from model.llama.config import LlamaConfig
from probes.demo_language.vocabulary import BOS, EOS, PAD, SPECIAL, build_tokenizer, vocabulary_size
from runtime.output import write_json, write_text
from runtime.tensorfile import write_safetensors
from scripts.llama.network import Network


def config_json() -> dict[str, Any]:
    """The config.json of the small Llama."""
    return {
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


def write_checkpoint(network: Network, fields: dict[str, Any], folder: Path) -> int:
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


def read_network(folder: Path) -> Network:
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
    network = Network(config)
    network.load_state_dict(weights)
    return network
