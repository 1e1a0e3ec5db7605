"""`torchrun --nproc-per-node N -m scripts.bench dispatch`: what a call costs by each of the two dispatches.

Whole calls of the model, from an empty state, in turn by all-reduce and by all-to-all, round after round; wall time,
because a rank that waits takes none of its processor's. What counts is the ratio of each round.
"""

import argparse
import time
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.table import Table

from model.choices import ALL_REDUCE, ALL_TO_ALL
from model.errors import ConfigError
from model.ranks.ranks import Group
from model.transformer import Transformer
from runtime.group.processes import connected, watched_load
from runtime.group.watchdog import Watch
from scripts.bench.record import Record
from scripts.console import Console
from scripts.flags import run_options


class Cost(NamedTuple):
    """One length of a call: milliseconds of each round, by all-reduce and by all-to-all."""

    tokens: int
    all_reduce_ms: list[float]
    all_to_all_ms: list[float]

    @property
    def ratios(self) -> list[float]:
        """All-to-all / all-reduce of each round, ascending."""
        return sorted(second / first for first, second in zip(self.all_reduce_ms, self.all_to_all_ms, strict=True))


def run(args: argparse.Namespace, record: Record, console: Console, watch: Watch | None) -> int:
    """Run the bench as one of several ranks; returns the exit status."""
    if watch is None:
        raise ConfigError("one rank alone dispatches nothing: start several, with torchrun")
    with connected(watch, args.device, args.rank_timeout) as group:
        torch.set_num_threads(1)
        model = watched_load(watch, args.model, run_options(args), group=group).model
        costs = [measure(model, group, tokens, args.rounds) for tokens in args.tokens]
        if group.rank == 0:
            console.print(table(costs, group.size))
            results: dict[str, Any] = {"ranks": group.size, "costs": [cost._asdict() for cost in costs]}
            record.write(results)
    return 0


def measure(model: Transformer, group: Group, tokens: int, rounds: int) -> Cost:
    """Time calls of one length, after one round that does not count."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (tokens,), generator=draw).to(model.device)
    times = [[_call(model, group, ids, way) for way in (ALL_REDUCE, ALL_TO_ALL)] for _ in range(rounds + 1)][1:]
    first, second = (list(column) for column in zip(*times, strict=True))
    return Cost(tokens, first, second)


def _call(model: Transformer, group: Group, ids: torch.Tensor, way: str) -> float:
    """Milliseconds of one call, from when all ranks are there until all are done."""
    state = model.new_state(len(ids), len(ids))
    model.arithmetic.ranks.dispatch = way
    dist.barrier(group=group.processes)
    start = time.perf_counter()
    model(ids, state)
    dist.barrier(group=group.processes)
    return 1e3 * (time.perf_counter() - start)


def table(costs: Sequence[Cost], ranks: int) -> Table:
    """Render the timings."""
    out = Table("tokens", "all-reduce ms", "all-to-all ms", "ratio", "from .. to", "rounds", title=f"{ranks} ranks")
    for cost in costs:
        ratios, sides = cost.ratios, (cost.all_reduce_ms, cost.all_to_all_ms)
        spread = f"{ratios[0]:.3g} .. {ratios[-1]:.3g}"
        times = [f"{median(side):.1f}" for side in sides]
        out.add_row(str(cost.tokens), *times, f"{median(ratios):.3g}", spread, str(len(ratios)))
    return out
