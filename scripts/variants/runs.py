"""The variants that are compared, each with a model of its own: the same weights, other caches."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import torch

from kernels.ops import CPU
from model.architectures import Config, Model
from model.llama.transformer import LlamaTransformer
from model.state import State
from model.variants.grouped import ShardLayer
from runtime.load import load_any
from runtime.options import RunOptions

FULL: Final = "full"

# By rules of --kv. V4's demo has 16-token windows and 1 entry per 4 or 128 tokens: 8 slots are HCA's for 1024 tokens.
V4: Final[dict[str, tuple[str, ...]]] = {
    FULL: (),
    "shard, 8 bits": ("all=shard:bits=8",),
    "shard, 6 bits": ("all=shard",),
    "shard, 4 bits": ("all=shard:bits=4",),
    "coda on HCA, 8 + 4 + 4": ("hca=coda:window=8,exact=4,summary=4",),
    "coda on CSA, 256 + 64 + 64": ("csa=coda",),
    "coda on both, 64 + 16 + 16": ("all=coda:window=64,exact=16,summary=16",),
    "shard on CSA, coda on HCA": ("csa=shard", "hca=coda:window=8,exact=4,summary=4"),
}


def grouped(columns: int) -> dict[str, tuple[str, ...]]:
    """Variants of layers with grouped heads, whose keys have so many columns; 192 of Llama-3.1-8B's 1024 are 3/16."""
    rank, half = columns * 3 // 16 // 2 * 2, columns // 2
    return {
        FULL: (),
        f"shard, rank {rank}, stream 8 bits": (f"all=shard:rank={rank}",),
        f"shard, rank {half}, stream 8 bits": (f"all=shard:rank={half}",),
        f"shard, rank {columns}, stream 8 bits": (f"all=shard:rank={columns}",),
        f"shard, rank {columns}, stream 4 bits": (f"all=shard:rank={columns},bits=4",),
        f"shard, rank {half} by DP, stream 8 bits": (f"all=shard:rank={half},dp=1,group={half // 4}",),
        "coda, 512 + 128 + 128": ("all=coda:window=512,exact=128,summary=128",),
        "coda, 256 + 64 + 64": ("all=coda",),
        "coda, 256 + 64 + 64, published": ("all=coda:published=1",),
        "coda, 64 + 16 + 16": ("all=coda:window=64,exact=16,summary=16,block=64",),
    }


class Run(NamedTuple):
    """One variant."""

    name: str
    rules: tuple[str, ...]
    model: Model

    def state(self, context: int, chunk: int, prompt: int) -> State:
        """Return an empty state; `prompt` of the positions are read before the first token is decoded."""
        if isinstance(self.model, LlamaTransformer):
            return self.model.new_state(context, chunk, prompt)
        return self.model.new_state(context, chunk)


def runs(model: Path, options: RunOptions, variants: dict[str, tuple[str, ...]], adapters: Path | None) -> list[Run]:
    """Load the model once for each variant, full first; with adapters also for CoDA's query mechanism.

    `adapters` are trained for a bounded cache of 64 + 16 + 16 slots (`scripts.train_coda`).
    """
    found = [Run(name, kv, load_any(model, replace(options, kv=kv), CPU).model) for name, kv in variants.items()]
    if adapters is not None:
        trained = replace(options, kv=("all=coda:window=64,exact=16,summary=16,block=64",), coda_adapters=str(adapters))
        found.append(Run("coda, 64 + 16 + 16, trained", trained.kv, load_any(model, trained, CPU).model))
    return found


def held_bytes(run: Run, config: Config, context: int, chunk: int) -> int:
    """Bytes that the caches of a prompt of `context` tokens, read in calls of `chunk`, hold afterwards, in BF16."""
    formats = run.model.arithmetic.formats._replace(dtype=torch.bfloat16)
    state = State(config, context, chunk, formats, torch.device("meta"), context)
    total = sum(state.nbytes().values())
    for cache in state.layers:
        if isinstance(cache, ShardLayer):  # what holds the prompt until it is compressed is let go
            total -= sum(part.nbytes for name, part in cache.shard.buffers().items() if name.startswith("prompt."))
    return total


def calls(tokens: int, chunk: int) -> list[int]:
    """Lengths of the calls that read so many tokens."""
    return [chunk] * (tokens // chunk) + [tokens % chunk] * (tokens % chunk > 0)


def read(run: Run, state: State, ids: Sequence[int], chunk: int) -> torch.Tensor:
    """Run tokens, in calls of `chunk`: the normed output of the last, [1, hidden]."""
    hidden = torch.empty(0)
    for part in torch.tensor(ids, device=run.model.device).split(chunk):
        hidden = run.model(part, state)
    return hidden[-1:]
