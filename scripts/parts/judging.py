"""What `scripts.compare` does: judge a recording by the oracle, say what was found, and what explains it."""

import argparse
import contextlib
import re
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fathom.model.choices import NUMERICS
from fathom.model.config import ModelConfig
from fathom.model.rounding import Rounding
from fathom.probes.console import plain
from fathom.probes.finding import Plot, ranges
from fathom.probes.judge.causes import NAMED, NEAREST, Place, of_tokens
from fathom.probes.judge.checks import FOLLOWS, Checks, Difference, Judged, Status
from fathom.probes.judge.checks import Progress as Saying
from fathom.probes.judge.exercised import Unseen, unseen
from fathom.probes.judge.numerics import Found
from fathom.probes.judge.recording import OF_ENTRIES, Recording, read_map
from fathom.probes.verdict import (
    dtype_name,
    explain,
    first_difference,
    ids_alike,
    judge_layers,
    layers_needed,
    opened,
    rests_on,
    rows_of,
    too_large,
    verdict_of,
    weights_of,
)
from fathom.runtime.allocator import keep_memory
from fathom.runtime.hub import fetch
from fathom.runtime.output import write_json, write_text
from fathom.scripts.console import Console, visible
from fathom.scripts.flags import chunk_lengths
from fathom.scripts.paths import told
from fathom.scripts.prompts import read_tokens

if TYPE_CHECKING:
    from fathom.model.checkpoint.census import Census
    from fathom.probes.judge.naming import Line

QUIET: Final = 20  # seconds between lines of progress where there is no terminal to draw on
CURVES: Final = 8  # of the picture: the sites that are furthest off
COLOURS: Final = {Status.AGREES: "green", Status.DIFFERS: "bold red", Status.NOT_JUDGED: "yellow"}


def calls_of(args: argparse.Namespace, recording: Recording) -> list[int]:
    """Lengths of the calls that a recording was made in: as flags say, as it says itself, or one."""
    tokens = len(recording.tokens)
    if recording.calls and args.prefill_chunk is None and args.decode_from is None:
        return list(recording.calls)
    return chunk_lengths(tokens, args.prefill_chunk or tokens, args.decode_from)


def judge(args: argparse.Namespace, config: ModelConfig) -> int:
    """Judge a recording, say what was found and what explains it; returns the exit status."""
    torch.set_num_threads(1)  # float64 of small tensors
    keep_memory()
    recording = recording_of(args, args.recording, args.map, config)
    out, err = Console(record=args.html is not None), Console(stderr=True)
    if args.explain_names:
        explain_names(out, recording)
        return 0
    if args.hub is not None and args.gguf is None:
        needed = layers_needed(recording, args.layers)
        fetch(args.hub, needed, ends=args.layers is None or 0 in needed)
    started = time.perf_counter()
    with saying(err) as said:
        weights = weights_of(args.model, config, args.gguf, args.numerics)
        alike = ids_alike(args.model, config)
        judged_run = opened(recording, weights, args.dtype, args.numerics, said, alike)
        unlooked = not_looked_for(args, judged_run.census)
        setting, numerics = judged_run.setting, judged_run.numerics
        checks = Checks(setting, recording, rows_of(args.rows, recording))
        results = judge_layers(checks, args.layers, said)
        found, others = list[Place](), dict[str, Rounding]()
        if not unlooked:
            calls = calls_of(args, recording)
            found, others = explain(judged_run, results, calls, args.identify_seconds, said)
    hidden = unseen(checks, results)
    out.say(*_head(args, checks, results, numerics, time.perf_counter() - started, seen=judged_run.seen))
    legend = "worst: distance from the oracle over the length of a row. In rows of several sites: over the bound."
    show_sites(out, results, config, _not_exercised(hidden), legend)
    show(out, results, found, others, unlooked=unlooked)
    if args.picture is not None:
        from fathom.probes.pictures import picture

        write_text(args.picture, picture(_picture(results)))
        err.say(f"wrote {args.picture}")
    if args.html is not None:
        from fathom.scripts.parts.verdict_page import html

        title = f"{recording.path.name} against {told(args.model)}: {verdict_of(results)}"
        write_text(args.html, html(title, out, results, _picture(results), names_lines(recording)))
        err.say(f"wrote {args.html}")
    if args.json is not None:
        write_json(args.json, _report(args, checks, results, found, numerics, hidden))
    return 0 if verdict_of(results) == "agrees" else 1


def recording_of(args: argparse.Namespace, path: Path, names: Path | None, config: ModelConfig) -> Recording:
    """A recording that the command line names, with the tokens and the names that it gives."""
    tokens = None if args.tokens is None else torch.tensor(read_tokens(args.tokens, config.vocab_size))
    return Recording(path, config, None if names is None else read_map(names), tokens)


def explain_names(out: Console, *recordings: Recording) -> None:
    """Print what became of each tensor; nothing is wrapped or cut, so that names can be searched and copied."""
    for recording in recordings:
        out.say(f"Tensors of {recording.path}:")
        for line in names_lines(recording):
            out.print(visible(line), soft_wrap=True)
        out.say(*(f"Understood: {line}" for line in recording.told))


def names_lines(recording: Recording) -> list[str]:
    """A line for each tensor of a recording, in columns; those of all layers that are alike in one."""
    alike: dict[tuple[str, str, str], list[tuple[int, Line]]] = {}
    for line in recording.lines:
        theirs, layer = _without_layer(line.theirs)
        site, _ = _without_layer(line.site)
        why = line.why.replace(f"layers.{layer}.", "layers.{l}.")
        alike.setdefault((theirs, site, why), []).append((layer, line))
    rows = [("theirs", "sizes", "ours", "why, or how it was read")]
    for (theirs, site, why), some in sorted(alike.items(), key=lambda one: (not one[0][1], one[0])):
        layers = [layer for layer, _ in some if layer >= 0]
        name = f"{theirs}, layer{'s' * (len(layers) > 1)} {ranges(layers)}" if layers else theirs
        rows.append((name, " x ".join(map(str, some[0][1].shape)), site or "left out", why))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _without_layer(name: str) -> tuple[str, int]:
    """A name with {l} in place of the layer's number, and the number; -1 where there is none."""
    found = re.search(r"(?<=layers\.)\d{1,6}(?=\.|$)|(?<=-)\d{1,6}$", name)
    return (name, -1) if found is None else (f"{name[: found.start()]}{{l}}{name[found.end() :]}", int(found[0]))


@contextlib.contextmanager
def saying(err: Console) -> Iterator[Saying]:
    """Inside the ``with``, a bar on a terminal, and elsewhere a line now and then, say what is being done."""
    started = last = time.perf_counter()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=1.0)

        def said(what: str, share: float) -> None:
            nonlocal last
            bar.update(task, description=what, completed=share)
            if not err.is_terminal and time.perf_counter() - last > QUIET:
                last = time.perf_counter()
                err.say(f"{last - started:.0f} s: {what}")

        yield said


def not_looked_for(args: argparse.Namespace, counted: "Census") -> str:
    """Why no fault is looked for; nothing where one is."""
    if args.no_identify:
        return "--no-identify"
    size = 0.0 if args.gguf is None else too_large(counted)
    return f"a layer of {told(args.gguf)} takes {size:.1f} GiB in float32" if size else ""


# --- the console


def _head(
    args: argparse.Namespace,
    checks: Checks,
    results: Sequence[Judged],
    numerics: Found,
    seconds: float,
    *,
    seen: bool,
) -> list[str]:
    """What was compared, and how; `seen` says whether the recording itself showed the dtype."""
    recording, dtype = checks.recording, dtype_name(checks.setting.noise.dtype)
    tokens, rows = len(recording.tokens), max((judged.rows for judged in results), default=0)
    found = " (as its numbers say)" if seen else " (assumed: nothing recorded shows it, see --dtype)"
    found = "" if args.dtype else found
    sampled = f", {len(checks.sample)} rows of each site" if len(checks.sample) < rows or rows < tokens else ""
    what = f"{len(results)} {many(len(results))} of {tokens} {'token' if tokens == 1 else 'tokens'}{sampled}"
    how = f"{numerics.rounding.numerics} numerics{' (found)' if numerics.rests else ''}, {dtype}{found}"
    weights = told(args.gguf or args.model)
    lines = [f"{recording.path}: {what}, held against {weights} in float64; {how}; {seconds:.0f} s"]
    if numerics.rests:
        forms = asdict(numerics.rounding)
        lines.append(f"Rounding, found from the recording: {', '.join(f'{p}={forms[p]}' for p in numerics.rests)}")
        lines += [f"{place}={forms[place]}: {why}" for place, why in numerics.rests.items()]
    if len(checks.sample) < tokens and recording.positions is None:
        lines.append(
            "Rows judged: both ends, the borders of windows, and one at random from each of as many equal parts."
        )
    if any(judged.free for judged in results):
        lines += [
            (
                "Where the input of a layer is not recorded, it is computed from the embeddings on. Bounds there have"
                " the rounding of all layers before, and may hide a fault: record layers.N.streams of every N."
            )
        ]
    return [*lines, *of_file(recording), *of_tokens(recording.tokens, checks.config)]


def of_file(recording: Recording) -> list[str]:
    """How tensors of a recording were read, and which were not."""
    lines = [f"Understood: {line}" for line in recording.told]
    if recording.others:
        more = f" and {len(recording.others) - 3} more, see --explain-names" if len(recording.others) > 3 else ""
        lines.append(f"Left out: {', '.join(recording.others[:3])}{more}")
    return lines


def show_sites(
    out: Console, results: Sequence[Judged], config: ModelConfig, hidden: Sequence[str], legend: str
) -> None:
    """What was not judged, what bounds and choices leave open, what was not exercised, and the table."""
    out.say(*_not_judged(results), *rests_on(results, config), *hidden)
    out.print(sites_table(results))
    out.say(legend, "")


def show(
    out: Console,
    results: Sequence[Judged],
    found: Sequence[Place],
    others: Collection[str],
    sides: tuple[str, str] = ("theirs", "ours"),
    *,
    unlooked: str = "",
    whose: Sequence[str] = (),
) -> None:
    """The verdict, the first difference and its fault: the answer, which is read at the end."""
    verdict, first = verdict_of(results), first_difference(results)
    counts = _counts(results)
    out.print(
        plain(f"{verdict.upper()}", COLOURS[Status.AGREES] if verdict == "agrees" else COLOURS[Status.DIFFERS])
        + plain(
            ": "
            + ", ".join(f"{count} {many(count)} {_verb(status, count)}" for status, count in counts.items() if count)
        )
    )
    if first is not None:
        why = next((judged.why for judged in results if judged.first is first), "")
        out.say(f"First difference: {told_difference(first, why, sides)}", *whose)
    if any(judged.site == "embedded" and judged.status is Status.DIFFERS for judged in results):
        out.say("embedded is looked up in a table: the tokens, or the checkpoint, may not be those of the run.")
    out.say(*_explained(found))
    named = [place.named for place in found if place.named is not None]
    other = next((fault.name for fault in named if fault.name in others), None)
    if other is not None:
        name = other.removesuffix(" numerics")
        flag = f"--numerics {name}" if name in NUMERICS else f"--rounding {name}"
        out.say(f"The run rounds as {flag} says. Compare it so to find others.")
    several = {fault.name for fault in named}
    if len(several) > 1:
        out.say(f"{len(several)} causes at once: {', '.join(sorted(several))}")
    if unlooked and first is not None:
        out.say(f"No fault was looked for ({unlooked}).")
    for why, some in groupby((place for place in found if not place.looked), key=lambda place: place.why):
        rest = len(list(some))
        out.say(f"{rest} more {many(rest)} {_verb(Status.DIFFERS, rest)}; no fault was looked for there: {why}.")


def _not_judged(results: Sequence[Judged]) -> list[str]:
    """Why sites were not judged, those with one cause together."""
    by_cause: dict[str, list[Judged]] = {}
    for judged in results:
        if judged.status is Status.NOT_JUDGED:
            by_cause.setdefault(judged.why or "nothing to judge it by", []).append(judged)
    lines = [
        f"Not judged: {len(some)} {many(len(some))}, {some[0].name} first: {why}" for why, some in by_cause.items()
    ]
    if left := [judged for judged in results if judged.left and judged.status is not Status.NOT_JUDGED]:
        rows = sum(judged.left for judged in left)
        what = f"{rows} {'row' if rows == 1 else 'rows'} of {len(left)} more {many(len(left))}"
        lines.append(f"Not judged: {what}: {FOLLOWS}")
    return lines


def _not_exercised(hidden: Sequence[Unseen]) -> list[str]:
    """One line of what these rows could not have shown."""
    if not hidden:
        return []
    return [f"Not exercised: {'; '.join(f'{one.what}, shown by {one.needs}' for one in hidden)}."]


def sites_table(results: Sequence[Judged]) -> Table:
    """A row for each site that differs; what cannot be judged together by layer, and what agrees by layers."""
    table = Table("layer", "site")
    for column in ("rows", "worst", "bound"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for judged in results:
        if judged.status is Status.NOT_JUDGED or (judged.status is Status.AGREES and not judged.why):
            continue
        where = "" if judged.layer is None else str(judged.layer)
        table.add_row(
            where,
            plain(judged.site),
            str(judged.rows),
            f"{judged.worst:.2g}",
            f"{judged.bound:.2g}",
            plain(f"{judged.status}{f': {judged.why}' if judged.why else ''}", COLOURS[judged.status]),
        )
    for layer, some in groupby(
        [judged for judged in results if judged.status is Status.NOT_JUDGED], key=lambda judged: judged.layer
    ):
        why = [judged.why for judged in some]
        what = f"{len(why)} {many(len(why))}"
        table.add_row("" if layer is None else str(layer), what, "", "", "", plain(f"not judged: {why[0]}", "yellow"))
    for layers, count, worst in _agreeing(results):
        table.add_row(layers, f"{count} {many(count)}", "", f"{worst:.2f} x", "1", plain("agrees", "green"))
    return table


def _counts(results: Sequence[Judged]) -> dict[Status, int]:
    """How many sites came out each way."""
    return {status: sum(judged.status is status for judged in results) for status in Status}


def _verb(status: Status, count: int) -> str:
    return status if count == 1 or status is Status.NOT_JUDGED else status.removesuffix("s")


def many(count: int) -> str:
    """The noun for so many sites."""
    return "site" if count == 1 else "sites"


def told_difference(first: Difference, why: str, sides: tuple[str, str]) -> str:
    """Where it is, and both values by what their sides are called."""
    theirs, ours = sides
    where = "" if first.layer is None else f"layer {first.layer} "
    at = f"{'entry' if first.site in OF_ENTRIES else 'position'} {first.position}"
    if not first.index:
        ahead = (
            "" if first.bound == 0 else f", passed over by {first.difference:.3g} where a near tie is {first.bound:.3g}"
        )
        return f"{where}{first.site}, {at}: {theirs} {first.theirs:g}, {ours} {first.ours:g}{ahead}"
    index = ", ".join(map(str, first.index))
    if why:
        return f"{where}{first.site}, {at}, [{index}]: {theirs} {first.theirs:.6g}; {why}"
    return (
        f"{where}{first.site}, {at}, [{index}]: {theirs} {first.theirs:.6g}, {ours} {first.ours:.6g};"
        f" the row is {first.difference:.3g} off, rounding explains {first.bound:.3g}"
    )


def _explained(found: Sequence[Place]) -> list[str]:
    """What explains the places, those with one fault together."""
    lines: list[str] = []
    unknown: list[str] = []
    by_fault: dict[tuple[str, ...], list[Place]] = {}
    for place in (place for place in found if place.looked):
        named = [fault for fault in place.faults if fault.share >= NAMED]
        if named:
            by_fault.setdefault(named[0].names, []).append(place)
        elif not place.tried:
            unknown.append(f"{place.judged.name}: no fault could be tried: {place.why}")
        else:
            best = next((fault for fault in place.faults if fault.share >= NEAREST), None)
            near = f"; nearest is {best.name} with {best.share:.0%}, which does not explain it" if best else ""
            more = f" ({place.why})" if place.why else ""
            none = "none of the known faults explains it" if place.ended else "not explained yet"
            longer = "" if place.ended else "; --identify-seconds looks for longer"
            unknown.append(f"{place.judged.name}: {none}{near}{more}{longer}")
    for names, explained in by_fault.items():
        by_site: dict[str, list[int | None]] = {}
        for place in explained:
            by_site.setdefault(place.judged.site, []).append(place.judged.layer)
        where = ", ".join(f"{site}{_of_layers(layers)}" for site, layers in by_site.items())
        least = min(place.faults[0].share for place in explained)
        others = {fault.name: fault.share for place in explained for fault in place.faults[1:] if fault.share >= NAMED}
        also = "".join(f" {name} explains it too, {share:.0%} of it." for name, share in others.items())
        what = explained[0].faults[0].what
        lines.append(
            f"Explained by {' and '.join(names)}, {least:.0%} of the difference in {where}. {what}{also}".rstrip()
        )
    return lines + unknown


def _of_layers(layers: Sequence[int | None]) -> str:
    """As in " of layers 0-3, 7"; nothing where it is of no layer."""
    numbers = sorted(layer for layer in layers if layer is not None)
    return f" of layer{'s' * (len(numbers) > 1)} {ranges(numbers)}" if numbers else ""


def _agreeing(results: Sequence[Judged]) -> list[tuple[str, int, float]]:
    """Layers, number of sites and largest distance over bound of all that agrees, neighbouring layers together."""
    by_layer: dict[int | None, list[Judged]] = {}
    whole: dict[int | None, bool] = {}
    for judged in results:
        whole[judged.layer] = whole.get(judged.layer, True) and judged.status is Status.AGREES
        if judged.status is Status.AGREES and not judged.why:
            by_layer.setdefault(judged.layer, []).append(judged)
    layers = sorted(layer for layer in by_layer if layer is not None)
    rows = []
    for _, run in groupby(enumerate(layers), key=lambda pair: (pair[1] - pair[0], whole[pair[1]])):
        alike = [layer for _, layer in run]
        sites = [judged for layer in alike for judged in by_layer[layer]]
        rows.append((ranges(alike), len(sites), max(judged.excess for judged in sites)))
    if None in by_layer:
        rows.append(("", len(by_layer[None]), max(judged.excess for judged in by_layer[None])))
    return rows


# --- files


def _picture(results: Sequence[Judged]) -> Plot:
    """Distance over bound through the layers, of the sites that are furthest off."""
    series: dict[str, list[tuple[float, float]]] = {}
    for judged in results:
        if judged.layer is not None and judged.status is not Status.NOT_JUDGED:
            series.setdefault(judged.site, []).append((judged.layer, judged.excess))
    worst = sorted(series, key=lambda site: -max(value for _, value in series[site]))[:CURVES]
    return Plot(
        "How far sites are off, layer by layer",
        "layer",
        "distance over bound; above 1 it differs",
        {s: series[s] for s in worst},
        log_y=True,
    )


def _report(
    args: argparse.Namespace,
    checks: Checks,
    results: Sequence[Judged],
    found: Sequence[Place],
    numerics: Found,
    hidden: Sequence[Unseen],
) -> dict[str, object]:
    """What --json writes."""
    return {
        "recording": str(args.recording),
        "numerics": numerics.rounding.numerics,
        "rounding": asdict(numerics.rounding),
        "rounding_rests_on": numerics.rests,
        "dtype": dtype_name(checks.setting.noise.dtype),
        "tokens": len(checks.recording.tokens),
        **verdict_json(results, found, checks.config),
        "not_exercised": [one.to_json() for one in hidden],
        **file_json(checks.recording),
    }


def verdict_json(results: Sequence[Judged], found: Sequence[Place], config: ModelConfig) -> dict[str, object]:
    """The verdict on each site, the first difference, and what explains it."""
    first = first_difference(results)
    return {
        "verdict": verdict_of(results),
        "counts": {status.value: count for status, count in _counts(results).items()},
        "first": None if first is None else first.to_json(),
        "sites": [judged.to_json() for judged in results],
        "faults": _faults_json(found),
        "not_tried": [
            {"layer": place.judged.layer, "site": place.judged.site, "why": place.why} for place in found if place.why
        ],
        "warnings": rests_on(results, config),
    }


def file_json(recording: Recording) -> dict[str, object]:
    """How tensors of a recording were read, and which were not."""
    return {
        "understood": recording.told,
        "left_out": {line.theirs: line.why for line in recording.lines if not line.site},
        "names": {line.site: line.theirs for line in recording.lines if line.site and line.site != line.theirs},
    }


def _faults_json(found: Sequence[Place]) -> list[dict[str, object]]:
    """What explains the places, or is the nearest that is known."""
    return [
        {
            "layer": place.judged.layer,
            "site": place.judged.site,
            "name": fault.name,
            "share": fault.share,
            "explains": fault.share >= NAMED,
            "what": fault.what,
            "plain": fault.plain,
        }
        for place in found
        for fault in place.faults
        if fault.share >= NEAREST
    ]
