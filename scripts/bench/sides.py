"""The two sides of a comparison behind one face: load, read a prompt in calls of `chunk` tokens, take one more token.

Both keep their caches themselves and return the logits after the last token, [vocab] float32. Ours computes in bf16,
transformers in bf16 or fp32.
"""

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.ops import CPU, Ops
from runtime.arithmetic import DTYPES
from runtime.load import load
from runtime.options import RunOptions
from scripts.bench.midsize import transformers


class Side(Protocol):
    """A loaded model that holds one sequence."""

    def start(self, context: int) -> None:
        """Begin a sequence of at most `context` tokens."""
        ...

    def read(self, tokens: Tensor) -> Tensor:
        """Take the next tokens [t]."""
        ...


class Ours:
    """Fathom: `plain` numerics, which are what transformers computes."""

    def __init__(self, directory: Path, chunk: int, ops: Ops = CPU) -> None:
        self.chunk = chunk
        self.model = load(directory, RunOptions("plain", "bf16", "cpu", chunk), ops).model
        self.state = self.model.new_state(1, 1)

    def start(self, context: int) -> None:
        """See `Side`."""
        self.state = self.model.new_state(context, self.chunk)

    def read(self, tokens: Tensor) -> Tensor:
        """See `Side`."""
        return self.model.logits(self.model(tokens, self.state)[-1:])[0]


class Theirs:
    """transformers with its own cache and eager attention, the only one that its class for V4 has."""

    def __init__(self, directory: Path, dtype: str) -> None:
        library = transformers()
        self.cache_of: Any = library.DynamicCache
        self.model: Any = library.DeepseekV4ForCausalLM.from_pretrained(
            directory, dtype=DTYPES[dtype], attn_implementation="eager", local_files_only=True
        ).eval()
        self.cache: Any = None

    def start(self, context: int) -> None:
        """See `Side`; the cache grows with what it holds."""
        del context
        self.cache = self.cache_of(config=self.model.config)

    @torch.inference_mode()
    def read(self, tokens: Tensor) -> Tensor:
        """See `Side`."""
        out = self.model(tokens[None], past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        logits: Tensor = out.logits[0, -1].float()
        return logits
