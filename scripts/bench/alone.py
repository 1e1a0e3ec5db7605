"""`prefill`, `decode`, `load` and `rank-tokens`: Fathom alone, and where its time goes."""

import argparse
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final
from unittest import mock

import psutil
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from fathom.kernels.ops import CPU
from fathom.model.checkpoint import filling
from fathom.model.checkpoint.census import census
from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.checkpoint.names import parameters
from fathom.model.checkpoint.weights import CPU as MEMORY
from fathom.model.checkpoint.weights import open_weights
from fathom.model.choices import ALL, OWN
from fathom.model.config import ModelConfig
from fathom.model.errors import ConfigError
from fathom.model.ranks.ranks import Group
from fathom.model.state import State
from fathom.probes.child import call
from fathom.runtime.group.processes import watched_load
from fathom.runtime.group.watchdog import Watch
from fathom.runtime.load import load_any
from fathom.runtime.memory import new_state
from fathom.runtime.options import RunOptions
from fathom.scripts.bench.beside import warm
from fathom.scripts.bench.turns import Case, Clock, Measures, Rounds, Side, wall
from fathom.scripts.flags import run_options


class Alone:
    """A loaded model, the clock around its ops, and tokens to read."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.set_num_threads(args.threads)
        options = run_options(args)
        self.clock, self.chunk = Clock(args.device), options.prefill_chunk
        self.model = load_any(args.model, options, self.clock.watch(CPU)).model
        self.draw = torch.Generator().manual_seed(args.seed)

    def tokens(self, count: int) -> Tensor:
        """Drawn ids [count]."""
        return torch.randint(0, self.model.config.vocab_size, (count,), generator=self.draw).to(self.model.device)

    def state(self, context: int, prompt: int) -> State:
        """Return an empty state for `context` tokens, of which `prompt` are read in calls of the chunk."""
        return new_state(self.model, context, self.chunk, prompt)

    def read(self, tokens: Tensor, state: State, chunk: int) -> None:
        """Take tokens in calls of `chunk`, and compute the logits after each call of one, or after the last."""
        for part in tokens.split(chunk):
            hidden = self.model(part, state)
            if chunk == 1:
                self.model.logits(hidden)
        if chunk > 1:
            self.model.logits(hidden[-1:])

    def timed(self, kind: str, tokens: Tensor, state: State, chunk: int, scale: float) -> tuple[Measures, None]:
        """Read tokens: tokens a second, and ms of `scale` tokens by part."""
        self.clock.start()
        self.read(tokens, state, chunk)
        parts = self.clock.stop(kind, 1e3 * scale / len(tokens))
        return {"tokens/s": 1e3 * scale / parts[f"{kind}: all"], **parts}, None


def prefill(args: argparse.Namespace) -> Iterator[Case]:
    """How fast a prompt is read, and which component takes the time, against the length of the prompt."""
    alone = Alone(args)
    alone.read(alone.tokens(alone.chunk), alone.state(alone.chunk, alone.chunk), alone.chunk)  # touches mapped weights

    def side(context: int) -> tuple[Measures, None]:
        return alone.timed("prefill", alone.tokens(context), alone.state(context, context), alone.chunk, 1000)

    sides = {f"{n} tokens": partial(side, n) for n in dict.fromkeys(args.context)}
    rounds = Rounds.exactly(args.repetitions)
    yield Case("Parts in ms per 1000 tokens", "a prompt of", sides, rounds, warm=False, compared=False)


def decode(args: argparse.Namespace) -> Iterator[Case]:
    """How long a token takes, and which component takes the time, against what is remembered.

    A prompt is read once, and all repetitions go on from it.
    """
    alone = Alone(args)
    states = {}
    for n in dict.fromkeys(args.context):
        states[n] = alone.state(n + args.steps * (args.repetitions + 1), n)
        alone.read(alone.tokens(n), states[n], alone.chunk)

    def side(state: State) -> tuple[Measures, None]:
        return alone.timed("decode", alone.tokens(args.steps), state, 1, 1)

    sides = {f"{n} tokens": partial(side, state) for n, state in states.items()}
    yield Case("Parts in ms per token", "a token after", sides, Rounds.exactly(args.repetitions), compared=False)


def load(args: argparse.Namespace) -> Iterator[Case]:
    """How long a checkpoint takes to load, beside what reading its files takes, from the disk and from memory.

    Each time is of a process of its own, imports not counted. *Fathom* is all that `generate` does before the first
    token: config, census, checks, a model. *safetensors* opens every tensor of the files, and like Fathom maps them
    without reading. *bytes* reads all of the files and does nothing with them. For *cold* the system is asked to forget
    the files first; what came from the disk is counted, because it need not comply.

    *Copies* are those of the matrices of --copies, from cached files into memory of the CPU that was written to before:
    by one thread out of the mapped files plane by plane, or as a load onto a GPU makes them, by threads that read
    pieces into buffers and copy from there. A GPU copies by itself while a thread reads on: *reads* leaves that out.
    """
    model = args.model.resolve()
    if not model.is_dir():
        raise ConfigError(f"{args.model}: no such folder")

    def side(way: str, state: str) -> tuple[Measures, None]:
        warm(model)
        if state == "cold":
            forget(model)
        return call(loaded, way, model, args.numerics), None

    for state in ("cold", "warm"):
        sides = {way: partial(side, way, state) for way in WAYS}
        yield Case("Loading", f"{state} files", sides, Rounds.exactly(args.repetitions), warm=False)
    if args.copies is not None:
        copies = {way: partial(copying, way, args.copies.resolve()) for way in COPIES}
        yield Case("Copies", "matrices, cached files", copies, Rounds.exactly(args.repetitions))


def copying(way: str, model: Path) -> tuple[Measures, None]:
    """Time one of `COPIES` with all files in the page cache."""
    warm(model)
    return call(copied, way, model), None


def forget(folder: Path) -> None:
    """Ask the system to drop a checkpoint's files from the page cache."""
    for path in folder.iterdir():
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


WAYS: Final[dict[str, Callable[[Path, str], object]]] = {
    "Fathom": lambda model, numerics: load_any(model, RunOptions(numerics)),
    "safetensors": lambda model, _: [load_file(path) for path in sorted(model.glob("*.safetensors"))],
    "bytes": lambda model, _: warm(model),
}


def loaded(way: str, model: Path, numerics: str) -> Measures:
    """Load in one of `WAYS`, in a process of its own."""
    process = psutil.Process()
    before, began = process.io_counters().read_bytes, time.perf_counter()
    held = WAYS[way](model, numerics)
    took, after = time.perf_counter() - began, process.io_counters().read_bytes
    del held
    return {"s": took, "MB from disk": (after - before) / 1e6}


def copied(way: str, model: Path) -> Measures:
    """Copy all matrices of a V4 checkpoint in one of the ways of `COPIES`, in a process of its own."""
    checkpoint, config = Checkpoint.open(model), ModelConfig.from_file(model / "config.json")
    weights = open_weights(checkpoint, census(checkpoint.shapes(), config), only=())
    matrices = [name for name, parameter in parameters(config).items() if parameter.kind == "matrix"]
    planes = [plane.flatten().view(torch.uint8) for name in matrices for plane in weights.matrix(name)]
    sources = [source for name in matrices for source in weights.sources(name)]
    targets, (threads, lane) = [torch.ones_like(plane) for plane in planes], COPIES[way]
    began = time.perf_counter()
    if threads is None:
        for target, plane in zip(targets, planes, strict=True):
            target.copy_(plane)
    else:
        sizes = {shard.path: shard.nbytes for shard in checkpoint.shards}
        with (
            mock.patch.object(filling, "HostLane", lane),
            contextlib.closing(filling.Filler(MEMORY, sizes, threads)) as filler,
        ):
            for target, source in zip(targets, sources, strict=True):
                filler.fill(target, [source])
            filler.finish()
    took = time.perf_counter() - began
    return {"s": took, "GB/s": sum(target.nbytes for target in targets) / took / 1e9}


class ReadsAlone(filling.HostLane):
    """Copies nothing."""

    def copy(self, target: Tensor, source: Tensor, ready: torch.cuda.Event | None) -> filling.Done:
        """Leave the buffer as it is."""
        del target, source, ready
        return self


COPIES: Final[dict[str, tuple[int | None, type[filling.HostLane]]]] = {  # threads, and what one does
    "plane by plane": (None, filling.HostLane),
    "1 thread": (1, filling.HostLane),
    "2 threads": (2, filling.HostLane),
    "reads, 1 thread": (1, ReadsAlone),
    "reads, 2 threads": (2, ReadsAlone),
}


def rank_tokens(args: argparse.Namespace, watch: Watch, group: Group) -> Iterator[Case]:
    """What a call costs on several ranks that have all of its tokens between attentions, or only their own.

    Whole calls of the model, from an empty state, in turn, round after round; wall
    time, from when all ranks are there until all are done, because a rank that waits takes none of its processor's.
    """
    torch.set_num_threads(1)
    model = watched_load(watch, args.model, run_options(args), group=group).model

    def side(ids: Tensor, way: str) -> tuple[Measures, None]:
        state = model.new_state(len(ids), len(ids))
        model.arithmetic.ranks.asked = way
        dist.barrier(group=group.processes)
        began = wall()
        model(ids, state)
        dist.barrier(group=group.processes)
        return {"ms": 1e3 * (wall() - began)}, None

    for count in args.tokens:
        draw = torch.Generator().manual_seed(0)
        ids = torch.randint(0, model.config.vocab_size, (count,), generator=draw).to(model.device)
        sides: dict[str, Side] = {way: partial(side, ids, way) for way in (ALL, OWN)}
        yield Case(f"{group.size} ranks", f"{count} tokens", sides, Rounds.exactly(args.rounds))
