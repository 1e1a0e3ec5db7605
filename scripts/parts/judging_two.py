"""What `scripts.compare --against` does: hold two recordings of one prompt against each other."""

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict

import torch

from fathom.model.config import ModelConfig
from fathom.model.errors import ConfigError
from fathom.probes.judge.causes import Place, places
from fathom.probes.judge.checks import Judged, Progress
from fathom.probes.judge.oracle import LOGPROB_IDS, LOGPROBS
from fathom.probes.judge.pairs import Apart, Pairs, Side, check_prompts
from fathom.probes.judge.recording import CHOICES, OF_ENTRIES
from fathom.probes.verdict import (
    Run,
    dtype_name,
    identified,
    ids_alike,
    judge_layers,
    layers_needed,
    opened,
    rows_of,
    verdict_of,
    weights_of,
)
from fathom.runtime.allocator import keep_memory
from fathom.runtime.hub import fetch
from fathom.runtime.output import write_json
from fathom.scripts.console import Console
from fathom.scripts.parts.judging import (
    calls_of,
    explain_names,
    file_json,
    many,
    not_looked_for,
    of_file,
    recording_of,
    saying,
    show,
    show_sites,
    verdict_json,
)
from fathom.scripts.paths import told

FIRST, SECOND = "--recording", "--against"


def judge_two(args: argparse.Namespace, config: ModelConfig) -> int:
    """Say which numbers of two recordings are the same, and what the others are; returns the exit status."""
    torch.set_num_threads(1)
    keep_memory()
    one, other = (
        recording_of(args, path, names, config)
        for path, names in ((args.recording, args.map), (args.against, args.against_map))
    )
    if args.explain_names:
        explain_names(Console(), one, other)
        return 0
    check_prompts(one, other)
    if args.hub is not None and args.gguf is None:
        needed = layers_needed(one, args.layers) | layers_needed(other, args.layers)
        fetch(args.hub, needed, ends=args.layers is None or 0 in needed)
    started = time.perf_counter()
    out, err = Console(), Console(stderr=True)
    with saying(err) as said:
        weights = weights_of(args.model, config, args.gguf, args.numerics)
        alike = ids_alike(args.model, config)
        first, second = (opened(each, weights, args.dtype, args.numerics, said, alike) for each in (one, other))
        rows = rows_of(args.rows, max(one, other, key=lambda recording: len(recording.tokens)))
        unlooked = not_looked_for(args, first.census)
        pairs = Pairs(Side(one, first.setting), Side(other, second.setting), rows)
        results = judge_layers(pairs, args.layers, said)
        if not results:
            raise ConfigError(f"{one.path} and {other.path}: no row of any site is in both")
        unlike = [pairs.unlike[judged.name] for judged in results]
        off, found = None, list[Place]()
        if places(results):
            off = pairs.off(places(results)[0])
            if not unlooked:
                found = _identified(args, first, second, pairs, results, off, said)
    out.say(*_head(args, first, second, unlike, time.perf_counter() - started))
    whose = [] if off is None else [_whose(off)]
    legend = (
        f"worst: distance of {SECOND} from what it would be if it were as {FIRST} is, over the length of a row. In rows"
        " of several sites: over the bound."
    )
    show_sites(out, results, config, (), legend)
    show(out, results, found, (), (SECOND, f"as {FIRST} is"), unlooked=unlooked, whose=whose)
    if args.json is not None:
        write_json(args.json, _report(args, (first, second), results, unlike, found, off))
    return 0 if verdict_of(results) == "agrees" else 1


def _identified(
    args: argparse.Namespace,
    first: Run,
    second: Run,
    pairs: Pairs,
    results: Sequence[Judged],
    off: tuple[float, float] | None,
    said: Progress,
) -> list[Place]:
    """What explains the step: a fault of the run that is off the oracle; the second where that is neither, or both."""
    differing, found = places(results), list[Place]()
    of_first = [one for n, one in enumerate(differing) if _of_the_first(pairs.off(one) if n else off)]
    of_second = [one for one in differing if one not in of_first]
    for run, judge, some in ((first, pairs.swapped(), of_first), (second, pairs, of_second)):
        if some:
            calls = calls_of(args, run.recording)
            found += identified(run, some, calls, args.identify_seconds, said, {}, judge.gap)
    return sorted(found, key=lambda place: differing.index(place.judged))


def _of_the_first(off: tuple[float, float] | None) -> bool:
    return off is not None and off[0] > 1 >= off[1]


def _whose(off: tuple[float, float]) -> str:
    """Which of the two runs the difference is of."""
    first, second = off
    told = f"Off the oracle there, in units of what rounding explains: {FIRST} {first:.2g}, {SECOND} {second:.2g}."
    if first > 1 and second > 1:
        return f"{told} Both are wrong there, and not alike."
    if first <= 1 and second <= 1:
        return f"{told} Neither is wrong by itself."
    return f"{told} It is {FIRST if first > 1 else SECOND} that is wrong."


def _head(args: argparse.Namespace, first: Run, second: Run, unlike: Sequence[Apart], seconds: float) -> list[str]:
    """What was compared, how, and which numbers are the same."""
    tokens = min(len(first.recording.tokens), len(second.recording.tokens))
    what = f"{len(unlike)} {many(len(unlike))} of {tokens} tokens; {seconds:.0f} s"
    lines = [f"{args.recording} and {args.against}, both runs of {told(args.gguf or args.model)}: {what}"]
    for flag, run in ((FIRST, first), (SECOND, second)):
        how = f"{run.numerics.rounding.numerics} numerics, {dtype_name(run.setting.noise.dtype)}"
        lines.append(f"{flag}: {how}")
        lines += [f"{flag}: {line}" for line in of_file(run.recording)]
    alone = [
        f"{len(names)} in {flag} alone ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
        for flag, names in (
            (FIRST, [name for name in first.recording.tensors if name not in second.recording.tensors]),
            (SECOND, [name for name in second.recording.tensors if name not in first.recording.tensors]),
        )
        if names
    ]
    if args.layers is None:
        compared = {one.name: len(one.at) for one in unlike}
        for name in first.recording.tensors:
            if name not in second.recording.tensors or name in (LOGPROB_IDS, *compared):
                continue
            alone.append(f"{name}, of which no row is in both")
        if LOGPROBS in compared:
            rows = min(run.recording.tensors[LOGPROBS].shape[0] for run in (first, second))
            if others := rows - compared[LOGPROBS]:
                alone.append(f"{others} {'row' if others == 1 else 'rows'} of {LOGPROBS}, of other ids or positions")
    if alone:
        lines.append(f"Not compared: {'; '.join(alone)}.")
    same, rows = [one for one in unlike if not len(one.other)], sum(len(one.at) for one in unlike)
    if len(same) == len(unlike):
        return [*lines, f"The same numbers: all {rows} rows of all {len(unlike)} {many(len(unlike))}."]
    equal = rows - sum(len(one.other) for one in unlike)
    start = next(one for one in unlike if len(one.other))
    at = f"{'entry' if start.site in OF_ENTRIES else 'position'} {int(start.other[0])}"
    far = float(start.distance[start.distance > 0][0])
    by = "other ids" if start.site in CHOICES else f"{far:.2g} of the row's length"
    lines.append(
        f"The same numbers: {len(same)} of {len(unlike)} {many(len(unlike))}, {equal} of {rows} rows. They part first"
        f" at {start.name}, {at}: {by}."
    )
    return lines


def _report(
    args: argparse.Namespace,
    runs: tuple[Run, Run],
    results: Sequence[Judged],
    unlike: Sequence[Apart],
    found: Sequence[Place],
    off: tuple[float, float] | None,
) -> dict[str, object]:
    """What --json writes."""
    parts = next((one for one in unlike if len(one.other)), None)
    return {
        "recording": str(args.recording),
        "against": str(args.against),
        "rounding": [asdict(run.setting.rounding) for run in runs],
        "dtype": [dtype_name(run.setting.noise.dtype) for run in runs],
        "tokens": [len(run.recording.tokens) for run in runs],
        "same": {
            "sites": sum(not len(one.other) for one in unlike),
            "of_sites": len(unlike),
            "rows": sum(len(one.at) - len(one.other) for one in unlike),
            "of_rows": sum(len(one.at) for one in unlike),
        },
        "parts": None if parts is None else {"layer": parts.layer, "site": parts.site, "position": int(parts.other[0])},
        "off": None if off is None else dict(zip(("recording", "against"), map(str, off), strict=True)),
        "explained_in": "recording" if _of_the_first(off) else "against",
        **verdict_json(results, found, runs[0].setting.config),
        "files": [file_json(run.recording) for run in runs],
    }
