"""`torchrun --nproc-per-node N -m scripts.bench_dispatch`: what a call costs by each of the two dispatches.

Whole calls of the model, from an empty state, in turn by all-reduce and by all-to-all, round after round; wall time,
because a rank that waits takes none of its processor's. What counts is the ratio of each round.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from model.errors import ConfigError
from model.ranks import ALL_REDUCE, ALL_TO_ALL, Group
from model.transformer import Transformer
from runtime.group import connected, watched_load
from runtime.load import DEMO
from runtime.watch import Watch
from scripts.cli import arguments, run_on_ranks
from scripts.flags import add_rank_timeout, add_run_options, positive, run_options, writable

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class Cost(NamedTuple):
    """One length of a call: the median time of each dispatch in ms, and all-to-all / all-reduce over the rounds."""

    tokens: int
    all_reduce_ms: float
    all_to_all_ms: float
    ratio: float
    low: float
    high: float
    rounds: int


def main(argv: Sequence[str] | None = None, watch: Watch | None = None) -> int:
    """Run the command line as one of several ranks; returns the exit status."""
    p = argparse.ArgumentParser(prog="torchrun --nproc-per-node N -m scripts.bench_dispatch", description=__doc__)
    p.add_argument("--model", type=Path, default=DEMO, help="checkpoint directory (default: the demo checkpoint)")
    p.add_argument("--tokens", type=positive, nargs="+", default=TOKENS, help="lengths of calls")
    p.add_argument("--rounds", type=positive, default=15, help="of each length (default 15)")
    p.add_argument("--json", type=Path, help="write the timings there as JSON")
    add_run_options(p)
    add_rank_timeout(p)
    args = arguments(p, argv, watch)
    if watch is None:
        raise ConfigError("one rank alone dispatches nothing: start several, with torchrun")
    with connected(watch, args.device, args.rank_timeout) as group:
        if group.rank == 0:
            writable(args.json)
        torch.set_num_threads(1)
        model = watched_load(watch, args.model, run_options(args), group=group).model
        costs = [measure(model, group, tokens, args.rounds) for tokens in args.tokens]
        if group.rank == 0:
            Console().print(table(costs, group.size))
            if args.json is not None:
                args.json.write_text(json.dumps([cost._asdict() for cost in costs], indent=1) + "\n", encoding="utf-8")
    return 0


def measure(model: Transformer, group: Group, tokens: int, rounds: int) -> Cost:
    """Time calls of one length, after one round that does not count."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (tokens,), generator=draw).to(model.device)
    times = [[_call(model, group, ids, way) for way in (ALL_REDUCE, ALL_TO_ALL)] for _ in range(rounds + 1)][1:]
    ratios = sorted(second / first for first, second in times)
    first, second = (median(column) for column in zip(*times, strict=True))
    return Cost(tokens, first, second, median(ratios), ratios[0], ratios[-1], rounds)


def _call(model: Transformer, group: Group, ids: torch.Tensor, way: str) -> float:
    """Milliseconds of one call, from when all ranks are there until all are done."""
    state = model.new_state(len(ids), len(ids))
    model.ranks.dispatch = way
    dist.barrier(group=group.processes)
    start = time.perf_counter()
    model(ids, state)
    dist.barrier(group=group.processes)
    return 1e3 * (time.perf_counter() - start)


def table(costs: Sequence[Cost], ranks: int) -> Table:
    """Render the timings."""
    out = Table("tokens", "all-reduce ms", "all-to-all ms", "ratio", "from .. to", "rounds", title=f"{ranks} ranks")
    for cost in costs:
        spread = f"{cost.low:.3g} .. {cost.high:.3g}"
        first, second = f"{cost.all_reduce_ms:.1f}", f"{cost.all_to_all_ms:.1f}"
        out.add_row(str(cost.tokens), first, second, f"{cost.ratio:.3g}", spread, str(cost.rounds))
    return out


if __name__ == "__main__":
    sys.exit(run_on_ranks(main))
