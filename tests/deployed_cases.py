"""Random tiny checkpoints in FP8 + FP4, and the demo checkpoint, each with a prompt, an oracle and this runtime."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fathom.kernels.ops import Ops
from fathom.model.transformer import Transformer
from fathom.probes.demo_language.prompts import needle_prompts
from fathom.runtime.load import load
from fathom.runtime.options import DEMO, RunOptions
from tests.deepseek_arithmetic import Choices
from tests.deepseek_forward import Forward, read
from tests.make_checkpoint import tiny_config, write_checkpoint

LENGTH = 300  # beyond the window of 128; two HCA entries, 75 CSA entries
SEED = 1
# Several groups of every kind of block: 128 columns of a linear, 64 of a KV entry, 32 of an indexer key, 64 keys of a
# softmax step. The clamp of the experts is low enough to be felt.
WIDTHS: dict[str, Any] = {
    "head_dim": 144,
    "index_head_dim": 64,
    "index_n_heads": 8,
    "moe_intermediate_size": 256,
    "n_routed_experts": 6,
    "o_lora_rank": 128,
    "q_lora_rank": 256,
    "sliding_window": 128,
    "swiglu_limit": 1.0,
}
MODELS: dict[str, dict[str, Any]] = {
    "flash": {"compress_ratios": [0, 4, 128, 4]},
    "csa first": {"compress_ratios": [4, 128, 4, 0], "num_hash_layers": 0, "sliding_window": 16},
    "one of each": {"compress_ratios": [0, 4, 128], "num_hidden_layers": 3},
    "uneven": {"compress_ratios": [128, 4], "num_hidden_layers": 2, "index_topk": 256, "num_hash_layers": 2},
}


def uneven(name: str, values: Tensor) -> Tensor:
    """Makes the second group of every KV entry so small that its scale is the least one, and its values subnormal."""
    if not name.endswith(("kv_norm.weight", "attn.compressor.norm.weight")):
        return values
    return torch.cat((values[:64], values[64:128] * 2**-27, values[128:]))


@dataclass(frozen=True)
class Case:
    directory: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    tokens: Tensor

    def oracle(self, choices: Choices, length: int | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        forward = Forward(self.config, self.tensors, choices)
        return forward.logits(self.tokens[:length]), forward.trace

    def model(self, ops: Ops, numerics: str = "deployed", dtype: str = "bf16") -> Transformer:
        return load(self.directory, RunOptions(numerics, dtype, "cpu"), ops).model

    def run(self, model: Transformer, lengths: tuple[int, ...] | None = None) -> Tensor:
        lengths = (len(self.tokens),) if lengths is None else lengths
        state = model.new_state(sum(lengths), max(lengths))
        return torch.cat([model.logits(model(part, state)) for part in self.tokens[: sum(lengths)].split(lengths)])


def make_case(name: str, directory: Path) -> Case:
    """One of `MODELS`, written to `directory`, or the demo checkpoint."""
    if name == "demo":
        return Case(DEMO, *read(DEMO), torch.tensor(needle_prompts(LENGTH, 1, SEED)[0].ids))
    config = tiny_config(**WIDTHS | MODELS[name])
    write_checkpoint(directory, config, seed=SEED, adjust=uneven if name == "uneven" else lambda _, values: values)
    tokens = torch.randint(0, config["vocab_size"], (LENGTH,), generator=torch.Generator().manual_seed(SEED))
    return Case(directory, *read(directory), tokens)
