"""What `scripts.evaluate` does once its command line is known to be good."""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch

from fathom.model.architectures import Config
from fathom.model.errors import CapacityError, ConfigError
from fathom.model.ranks.ranks import Group
from fathom.probes.evaluation import Run
from fathom.probes.finding import Text, ranges
from fathom.probes.report import Page, write
from fathom.runtime.group.processes import connected, leads, watched_load_any
from fathom.runtime.group.watchdog import Watch
from fathom.runtime.load import AnyLoaded, read_any_config
from fathom.runtime.op_sets import op_set
from fathom.runtime.output import write_json
from fathom.runtime.process import set_process
from fathom.runtime.report import commit
from fathom.scripts.console import Console, grid, progress
from fathom.scripts.evaluate import Asked
from fathom.scripts.tasks.evaluate_codes import Codes
from fathom.scripts.tasks.evaluate_text import Likelihood


def run(args: argparse.Namespace, asked: Sequence[Asked], watch: Watch | None) -> int:
    """Run the command line, as one of several ranks where there is a watch; returns the exit status."""
    with connected(watch, args.device, args.rank_timeout) as group:
        return _evaluate(args, asked, watch, group)


def _evaluate(args: argparse.Namespace, asked: Sequence[Asked], watch: Watch | None, group: Group) -> int:
    err, began = Console(stderr=True), time.perf_counter()
    configs = [_config(args, one) for one in asked]
    ops = [op_set(one.ops, one.options, config) for one, config in zip(asked, configs, strict=True)]
    task = Codes(args, configs[0]) if args.needle else Likelihood(args, configs[0])
    loaded: list[AnyLoaded] = []
    for one, chosen in zip(asked, ops, strict=True):
        with err.loading(args.model):
            loaded.append(watched_load_any(watch, args.model, one.options, chosen, group, context=task.room))
    set_process(args.threads, loaded[0])
    runs = [Run(one.name, made.model, one.options.prefill_chunk) for one, made in zip(asked, loaded, strict=True)]
    with progress(err, task.work(len(runs))) as advance:
        found = task.measure(runs, advance)
    facts = {
        "commit": str(commit()),
        "command": args.command_line,
        "checkpoint": args.model.resolve().name,
        "config": configs[0].fingerprint,
        "weights": loaded[0].weights_fingerprint,
        "threads": torch.get_num_threads(),
        "ranks": group.size,
        **task.facts(),
    }
    told = [
        {"name": one.name, "ops": one.ops, "options": one.options.to_json()} | values
        for one, values in zip(asked, found, strict=True)
    ]
    if leads(watch):
        _show(args, task, facts, told, time.perf_counter() - began)
    return 0


def _show(
    args: argparse.Namespace,
    task: "Likelihood | Codes",
    facts: dict[str, Any],
    runs: list[dict[str, Any]],
    seconds: float,
) -> None:
    """Print what was found, and write it where the flags say."""
    out, table, said = Console(), task.table(runs), notes(runs) + task.notes(runs)
    out.say(task.headline(runs))
    out.print(grid(table))
    out.say(*said)
    data = facts | {"runs": runs, "seconds": seconds}
    if args.json is not None:
        write_json(args.json, data)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        parts = [*task.pictures(runs), table, *([Text("", "\n".join(f"- {line}" for line in said))] if said else [])]
        page = Page("evaluate", task.title, task.headline(runs), "", [*parts, *task.explained], facts, data)
        write(page, args.out)
        Console(stderr=True).say(f"wrote {args.out / 'evaluate.md'}")


def _config(args: argparse.Namespace, one: Asked) -> Config:
    try:
        return read_any_config(args.model, one.options)
    except (ConfigError, CapacityError) as error:
        several = args.run or args.against is not None
        raise type(error)(f'the run "{one.name}": {error}' if several else str(error)) from error


def notes(runs: Sequence[dict[str, Any]]) -> list[str]:
    """What a number does not show: where a run could not have differed from its reference."""
    reference, out = runs[0], list[str]()
    if len(runs) == 1:
        out.append("Nothing is compared: every run here is the full cache. --kv, --run or --against name another one")
    for one in runs[1:]:
        name, idle, varied = one["name"], one["exact_layers"], one["varied_layers"]
        if (one["options"], one["ops"]) == (reference["options"], reference["ops"]):
            out.append(f"{name}: VACUOUS, its flags are those of the reference")
        if idle and idle == varied:
            more = "longer texts, a smaller --prefill-chunk or --decode show more"
            out.append(f"{name}: VACUOUS, no scored token saw anything evicted or compressed; {more}")
        elif idle:
            out.append(f"{name}: no scored token saw anything evicted or compressed in layers {ranges(idle)}")
        if varied and one["options"]["numerics"] == "deployed":
            rounds = "deployed numerics round the entries of a full cache and not these"
            out.append(f"{name}: {rounds}; --numerics plain compares the caches alone")
        if varied and sum(one["cache_bytes"].values()) >= sum(reference["cache_bytes"].values()):
            out.append(f"{name}: its caches take no less than the reference's, at this length")
    return out
