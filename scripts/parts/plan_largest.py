"""What `scripts.plan` does without a context: the largest one that fits, by number of ranks or by GPU."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from rich.table import Table

from fathom.model.architectures import Config
from fathom.model.config import ModelConfig
from fathom.runtime.options import DEMO, check_options, check_ranks
from fathom.runtime.output import write_json
from fathom.runtime.plan.gpus import GPUS
from fathom.scripts.console import Console
from fathom.scripts.flags import UNITS, run_options
from fathom.scripts.parts.plan_tables import (
    DOES_NOT_FIT,
    GIB,
    TELL,
    by_ranks,
    check_prompt,
    chosen,
    fits_from,
    memory_of_rank,
    ranked,
    read_subject,
    said,
)

CONTEXTS: Final = (1 << 13, 1 << 17)  # and all positions of the model


def show_largest(args: argparse.Namespace, config: Config) -> int:
    """Show what fits for a model of this config; returns the exit status."""
    options = run_options(args)
    check_options(config, options, where := args.config or args.model or DEMO)
    check_ranks(config, args.ranks or 1, where)
    prompted = check_prompt(args, options, config, config.max_position_embeddings)
    subject = read_subject(args.model, args.config, args.expert_dtype, args.headers, options.draft, args.prompt_tokens)
    most = subject.config.max_position_embeddings
    planners = by_ranks(args, subject, options)
    if args.ranks:
        choice = chosen(args, subject, options, args.ranks)
        told = options if choice is None else replace(options, experts=choice.way)
        planners = iter([(args.ranks, ranked(subject, told, args.ranks)[0])])
    contexts = sorted({context for context in CONTEXTS if (args.prompt_tokens or 0) <= context < most} | {most})
    rows = []
    for ranks, planner in planners:
        memory = memory_of_rank(args, options, ranks)
        rows.append(
            {
                "ranks": ranks,
                "experts": planner.sharding.experts if ranks > 1 and isinstance(config, ModelConfig) else None,
                "weights": planner.plan(1).own_weights,
                "needed": {context: planner.plan(context).needed for context in contexts},
                "memory": memory,
                "largest_context": None if memory is None else planner.largest_context(memory),
            }
        )
    data = {
        "config_fingerprint": subject.config.fingerprint,
        "weights_from": subject.source,
        "options": options.to_json(),
        "by_ranks": rows,
        "prompt": args.prompt_tokens,
        "prompted": prompted,
        "gpus": None if rows[0]["memory"] is not None else _gpus(rows, contexts),
    }
    console = Console()
    console.print(_ranks_table(data, contexts) if data["gpus"] is None else _gpu_table(data, contexts))
    console.say(*_fitting(data, contexts))
    if args.json is not None:
        write_json(args.json, data)
    return DOES_NOT_FIT if data["gpus"] is None and not any(row["largest_context"] for row in rows) else 0


def _gpus(rows: Sequence[Mapping[str, Any]], contexts: Sequence[int]) -> dict[str, dict[int, int | None]]:
    """By GPU and context, from how many ranks on that fits."""
    return {
        name: {n: fits_from({row["ranks"]: row["needed"][n] for row in rows}, int(gpu.gib * GIB)) for n in contexts}
        for name, gpu in GPUS.items()
    }


def _ranks_table(data: dict[str, Any], contexts: Sequence[int]) -> Table:
    """What each number of ranks has room for."""
    title = f"each rank, in calls of {data['options']['prefill_chunk']:,} tokens"
    table = Table("ranks", "experts", "memory", "weights", title=title)
    for context in contexts:
        table.add_column(f"needed for {_short(context)}", justify="right")
    table.add_column("largest context", justify="right")
    for row in data["by_ranks"]:
        needed = [said(size) for size in row["needed"].values()]
        largest = f"{row['largest_context']:,}" if row["largest_context"] else "none"
        experts = row["experts"] or "-"
        table.add_row(str(row["ranks"]), experts, said(row["memory"]), said(row["weights"]), *needed, largest)
    return table


def _gpu_table(data: dict[str, Any], contexts: Sequence[int]) -> Table:
    """From how many of each GPU on a context fits."""
    table = Table("GPU", "memory", title=f"GPUs that it takes, in calls of {data['options']['prefill_chunk']:,} tokens")
    for context in contexts:
        table.add_column(f"for {_short(context)}", justify="right")
    for name, by_context in data["gpus"].items():
        table.add_row(name, f"{GPUS[name].gib:.2f} GiB", *("-" if n is None else str(n) for n in by_context.values()))
    return table


def _fitting(data: dict[str, Any], contexts: Sequence[int]) -> list[str]:
    rows, caches = data["by_ranks"], f"caches: {' '.join(data['options']['kv']) or 'all=full'}"
    if data["prompt"] is not None:
        caches += f", for a prompt of {data['prompt']:,} tokens"
    elif data["prompted"]:
        caches += f", at each context for the prompt that takes most; {TELL}"
    lines = [f"weights: {data['weights_from']}", caches]
    tried = ", ".join(str(row["ranks"]) for row in rows)
    if data["gpus"] is not None:
        return [*lines, f"tried on {tried} ranks; --gpu or --memory-gib asks for the largest context"]
    memory = said(rows[0]["memory"])
    if not any(row["largest_context"] for row in rows):
        return [*lines, f"no context fits in {memory}, on none of {tried} ranks"]
    if len(rows) == 1:
        return lines
    lines.append(f"tried on {tried} ranks")
    for context in contexts:
        ranks = fits_from({row["ranks"]: row["needed"][context] for row in rows}, rows[0]["memory"])
        told = "on none of them" if ranks is None else f"from {ranks} ranks on"
        lines.append(f"{context:,} positions fit in {memory} each {told}")
    return lines


def _short(context: int) -> str:
    """As 128K."""
    for unit, size in reversed(UNITS.items()):
        if context % size == 0:
            return f"{context // size}{unit}"
    return f"{context:,}"
