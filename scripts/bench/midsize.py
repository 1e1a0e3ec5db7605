"""A mid-size checkpoint of random weights, in the dialect that transformers writes and both runtimes read.

515 million parameters of the published architecture, 1 GB in bf16: large enough that matrix products take their share,
small enough for one CPU core. transformers makes it and is no dependency of this project: `make test` installs it.
"""

import importlib
import importlib.util
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.errors import ConfigError
from runtime.tensorfile import system_errors

RATIOS = (0, 0, 4, 128, 4, 128, 4, 128)
LAYER_TYPES = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
MIDSIZE: dict[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "moe_intermediate_size": 512,
    "num_hidden_layers": len(RATIOS),
    "layer_types": [LAYER_TYPES[ratio] for ratio in RATIOS],
    "num_attention_heads": 16,
    "head_dim": 128,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 512,
    "o_groups": 4,
    "o_lora_rank": 256,
    "index_n_heads": 16,
    "index_head_dim": 64,
    "index_topk": 256,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "num_hash_layers": 3,
    "sliding_window": 128,
    "max_position_embeddings": 1 << 20,
    "rope_parameters": {  # as published
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "num_nextn_predict_layers": 0,
}


def transformers() -> Any:
    """Import the library; ConfigError with one line where it is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("transformers is not installed, and is the other side here: `make test` installs it")
    return importlib.import_module("transformers")


@torch.no_grad()
def write(folder: Path, config: dict[str, Any], seed: int) -> None:
    """Write a checkpoint of this config, every parameter and table drawn from `seed`.

    Matrices are bf16; norms, sinks, biases and mHC are float32, as DeepSeek publishes them and transformers keeps them.
    """
    library = transformers()
    with torch.device("meta"):
        model = library.DeepseekV4ForCausalLM(library.DeepseekV4Config(**config)).to(torch.bfloat16)
    g = torch.Generator().manual_seed(seed)
    for name, part in [*model.named_parameters(), *model.named_buffers()]:
        owner, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        if "inv_freq" in leaf:  # made from the config when it is loaded
            continue
        value = _drawn(name, part, config["n_routed_experts"], g)
        if leaf in owner._parameters:  # noqa: SLF001 -- the only way to replace what is on the meta device
            setattr(owner, leaf, torch.nn.Parameter(value, requires_grad=False))
        else:
            setattr(owner, leaf, value)
    with system_errors(folder):
        model.save_pretrained(folder)
    for path in folder.glob("*.safetensors"):  # as readable as the files that safetensors did not write
        path.chmod((folder / "config.json").stat().st_mode)


def _drawn(name: str, part: Tensor, experts: int, g: torch.Generator) -> Tensor:
    """Values of a parameter, or rows of a table of experts: of a scale that gives logits of about unit scale."""
    leaf = name.rpartition(".")[2]
    if leaf == "tid2eid":
        return torch.rand(part.shape[0], experts, generator=g).argsort(-1)[:, : part.shape[1]].contiguous()
    noise = torch.randn(part.shape, generator=g)
    if "norm" in name:
        return 1 + 0.1 * noise
    if part.ndim == 1:  # sinks, biases, mHC's base and scale
        return 0.5 * noise
    if leaf == "position_bias":
        return noise
    if "hc" in name:
        return noise / math.sqrt(part.shape[-1])
    return (noise if "embed" in name else noise / math.sqrt(part.shape[-1])).bfloat16()
