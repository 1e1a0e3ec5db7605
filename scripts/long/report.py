"""What the walk found, as findings, tables and plots: from its JSON, so that a page can be made again without it."""

import statistics
from collections.abc import Sequence
from typing import Any

from probes.finding import Finding, HeatMap, Part, Plot, Report, Table, Text, at_most, exactly, judged, measured
from runtime.plan.planner import Plan
from scripts.long.timing import COMPONENTS

MIB = 1 << 20
FULL_TILES = 32768  # tokens from which on every tile is full: nothing but caches may take more
GROWTH = 4.0  # MiB that a call's tensors may grow by all the same
EDGES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)  # ends of the buckets of how far back a code was told

NOT_CLAIMED = """\
Rates are those of this model (four layers, hidden size 128), on one core, while other work shared the machine: wall
times have the spread that is given, processor times leave out waiting but not the cache and the memory bandwidth that
others took.

Codes are found by a model that was trained on documents of up to 2048 tokens of this very kind, with its RoPE scaled
for 65,536: what it finds beyond is extrapolation, and what it misses there is the model's until another runtime
disagrees. One document was read: of two codes told at the same place, one may be found and the other not. That the
selection is exact at every length is for the tests to show, not for this page."""


def report(found: dict[str, Any], by_hand: dict[str, int], plan: Plan) -> Report:
    """Return the report of a walk.

    Parameters
    ----------
    found
        What `scripts.long.probe` wrote.
    by_hand
        Bytes of the caches by component, from the config without asking the runtime.
    plan
        Of the run, by which it would have been refused if it did not fit.

    """
    marks: list[dict[str, Any]] = found["marks"]
    last, context = marks[-1], found["context"]
    full = next((mark for mark in marks if mark["length"] >= FULL_TILES), last)
    grown = (last["peak_bytes"] - full["peak_bytes"]) / MIB
    calls = found["call_bytes"]
    span = f"from {full['length']} tokens to {last['length']}"
    right, asked = sum(map(_right, marks)), sum(len(mark["answers"]) for mark in marks)
    planned = at_most(plan.call.nbytes / MIB)
    findings = [
        judged("position of the state at the end", found["position"], exactly(context)),
        judged("bytes of all caches", sum(found["allocated_bytes"].values()), exactly(sum(by_hand.values())), "B"),
        judged("the same as planned", plan.cache_bytes, exactly(sum(by_hand.values())), "B"),
        judged("tensors of a call, at the mark where they are most", max(calls.values()) / MIB, planned, "MiB"),
        *_grown(calls, full["length"], last["length"], span),
        *([measured(f"the process grew {span}", grown, "MiB")] if full is not last else []),
        measured("peak of the process beyond what it took before", _beyond(found, last), "MiB"),
        measured("peak of the process", last["peak_bytes"] / MIB, "MiB"),
        measured("the same as planned", (plan.needed + plan.mapped_weights) / MIB, "MiB"),
        measured("codes found, all marks", right / max(1, asked), questions=asked),
        *(
            measured(f"codes found at {m['length']} tokens", _right(m) / len(m["answers"]))
            for m in marks
            if m["answers"]
        ),
    ]
    prefill, decode = _rate(found, last, "processor"), 1e3 * statistics.median(last["decode_processor"])
    summary = (
        f"{context} tokens of context in {found['seconds'] / 60:.0f} minutes on one core ({found['processor']}), the"
        f" last {len(last['decode_wall'])} of them decoded. At the end a second of the processor reads {prefill:.0f}"
        f" tokens and a decoded token takes {decode:.0f} ms; of {len(last['answers'])} codes told in the text,"
        f" {_right(last)} are found."
    )
    parts = (
        _rates(found), _rate_plot(found), _decode_plot(found), _components(found, "prefill", "a call"),
        _components(found, "decode", "a decoded token"), _growth(found), _memory(found, plan),
        *_retrieval(marks),
    )  # fmt: skip
    return Report(summary, tuple(findings), parts, NOT_CLAIMED)


def _grown(calls: dict[str, int], full: int, last: int, span: str) -> list[Finding]:
    """By how much the tensors of a call grew; nothing where there is one mark to speak of."""
    if full == last:
        return []
    return [judged(f"and they grew {span}", (calls[str(last)] - calls[str(full)]) / MIB, at_most(GROWTH), "MiB")]


def _right(mark: dict[str, Any]) -> int:
    return sum(answer["rank"] == 0 for answer in mark["answers"])


def _beyond(found: dict[str, Any], mark: dict[str, Any]) -> float:
    return float(mark["peak_bytes"] - found["base_bytes"]) / MIB


def _rate(found: dict[str, Any], mark: dict[str, Any], clock: str) -> float:
    """Median tokens per second of the last calls before a mark; NaN where there were none of full length."""
    times = mark[f"prefill_{clock}"]
    return found["prefill_chunk"] / statistics.median(times) if times else float("nan")


def _spread(values: Sequence[float], scale: float) -> str:
    """Smallest to largest."""
    return f"{scale * min(values):.3g} to {scale * max(values):.3g}" if values else "-"


def _rates(found: dict[str, Any]) -> Table:
    rows = []
    for mark in found["marks"]:
        slow = [found["prefill_chunk"] / seconds for seconds in mark["prefill_wall"]]
        tokens = [_rate(found, mark, clock) for clock in ("processor", "wall")] if slow else [None, None]
        decode = [1e3 * statistics.median(mark[f"decode_{clock}"]) for clock in ("processor", "wall")]
        spans = _spread(slow, 1), _spread(mark["decode_wall"], 1e3)
        rows.append([mark["length"], *tokens, spans[0], *decode, spans[1], mark["seconds"] / 60])
    columns = (
        "tokens", "prefill tokens/s, processor", "wall", "from .. to", "decode ms, processor", "wall", "from .. to",
        "minutes so far",
    )  # fmt: skip
    note = (
        f"Medians of the last calls of {found['prefill_chunk']} tokens before each mark (up to 8) and of the tokens"
        " that are decoded at it (32 or more). Processor: seconds that this process computed. Wall: seconds that"
        f" passed, while other work shared the machine. Minutes include the questions. {overlaps(found['marks'])}"
    )
    return Table("How fast", columns, rows, note.strip())


def overlaps(marks: Sequence[dict[str, Any]]) -> str:
    """Where the spread of a decoded token does not tell a mark from the one before."""
    ends = [(min(mark["decode_wall"]), max(mark["decode_wall"])) for mark in marks]
    alike = [
        str(mark["length"])
        for mark, (low, high), (below, above) in zip(marks[1:], ends[1:], ends, strict=False)
        if low <= above and below <= high
    ]
    if not alike:
        return "" if len(marks) == 1 else "No spread of a decoded token overlaps that of the mark before."
    return (
        f"The spread of a decoded token overlaps that of the mark before at {', '.join(alike)} tokens: there a smaller"
        " or larger median is noise until shown otherwise."
    )


def _rate_plot(found: dict[str, Any]) -> Plot:
    series: dict[str, Sequence[tuple[float, float]]] = {
        clock: [(mark["length"], _rate(found, mark, clock)) for mark in found["marks"] if mark["prefill_wall"]]
        for clock in ("processor", "wall")
    }
    return Plot("Prefill by context", "tokens of context", "tokens per second", series, log_x=True, log_y=True)


def _decode_plot(found: dict[str, Any]) -> Plot:
    series: dict[str, Sequence[tuple[float, float]]] = {
        clock: [(mark["length"], 1e3 * statistics.median(mark[f"decode_{clock}"])) for mark in found["marks"]]
        for clock in ("processor", "wall")
    }
    title, note = "A decoded token by context", overlaps(found["marks"])
    return Plot(title, "tokens of context", "milliseconds", series, log_x=True, log_y=True, note=note)


def _components(found: dict[str, Any], what: str, name: str) -> Table:
    marks = [mark for mark in found["marks"] if mark[f"{what}_components"]]
    rows = [[mark["length"], *(1e3 * mark[f"{what}_components"][part] for part in COMPONENTS)] for mark in marks]
    note = "Medians in milliseconds of the processor, each of its own."
    return Table(f"Where the time of {name} goes", ("tokens", *COMPONENTS), rows, note)


def _growth(found: dict[str, Any]) -> Plot:
    marks = [mark for mark in found["marks"] if mark["prefill_components"]]
    shown = ("select", "attend, CSA", "attend, HCA", "attend, SWA", "linears, FP4 experts", "linears, others")
    series: dict[str, Sequence[tuple[float, float]]] = {
        part: [(mark["length"], 1e3 * mark["prefill_components"][part]) for mark in marks] for part in shown
    }
    note = (
        "The indexer scores every entry, and grows with their number. Attention of HCA layers to all entries of 128"
        " tokens grows as well, 32 times slower. CSA attends to as many as ever."
    )
    y = f"milliseconds of a call of {found['prefill_chunk']} tokens"
    return Plot("What grows with the context", "tokens of context", y, series, log_x=True, log_y=True, note=note)


def _memory(found: dict[str, Any], plan: Plan) -> Table:
    parts, calls = list(found["allocated_bytes"]), found["call_bytes"]
    rows: list[list[float | str | None]] = []
    for mark in found["marks"]:
        filled = [mark["cache_bytes"].get(part, 0) / MIB for part in parts]
        call = calls.get(str(mark["length"]))
        process = mark["peak_bytes"] / MIB, _beyond(found, mark)
        rows.append([mark["length"], *filled, sum(filled), None if call is None else call / MIB, *process])
    caches = [sum(kind.get(part, 0) for kind in plan.caches.values()) / MIB for part in parts]
    whole = (plan.needed + plan.mapped_weights) / MIB
    rows.append(["planned", *caches, plan.cache_bytes / MIB, plan.call.nbytes / MIB, whole, None])
    note = (
        "Of each cache, what is filled at a mark; all of it is allocated, and touched, before the first token. A call:"
        " the tensors that the last full call before the mark holds at once, counted where torch allocates, in a second"
        " run of that call after the walk. The process: its peak so far, and how much of it came after the model was"
        f" loaded; {plan.reserve >> 20} MiB of what is planned for it are no tensors: the interpreter, libraries, and"
        " what the C library keeps of freed memory, as much as the run of a million tokens took."
    )
    columns = ("tokens", *parts, "all caches", "a call", "the process", "after loading")
    return Table("Memory, in MiB", columns, rows, note)


def _retrieval(marks: list[dict[str, Any]]) -> list[Part]:
    asked = [mark for mark in marks if mark["answers"]]
    if not asked:
        return [Text("What is found", "No code was told early enough to be asked for.")]
    names = ("last 1/16", "1/16 to 1/8", "1/8 to 1/4", "1/4 to 1/2", "first half")
    values: list[list[float | None]] = []
    for mark in asked:
        cells: list[list[bool]] = [[] for _ in EDGES]
        for answer in mark["answers"]:
            cells[next(i for i, edge in enumerate(EDGES) if answer["back"] <= edge)].append(answer["rank"] == 0)
        values.append([sum(cell) / len(cell) if cell else None for cell in cells])
    depths = HeatMap(
        "Codes found by depth and length",
        "how far back the code was told, as a share of the text",
        "tokens",
        names,
        tuple(str(mark["length"]) for mark in asked),
        values,
        "Share of right answers. Codes are told in stretches, each of which is as long as all before it.",
    )
    return [_answers(asked), _margins(asked), depths]


def _answers(marks: list[dict[str, Any]]) -> Table:
    rows = []
    for mark in marks:
        answers = mark["answers"]
        wrong = [answer for answer in answers if answer["rank"]]
        rows.append([
            mark["length"], len(answers), len(answers) - len(wrong),
            statistics.median(a["probability"] for a in answers), min(a["probability"] for a in answers),
            min(a["margin"] for a in answers), max(a["rank"] for a in answers), sum(a["planted"] for a in wrong),
        ])  # fmt: skip
    columns = (
        "tokens", "questions", "right", "median probability", "smallest", "smallest margin", "largest rank",
        "wrong, but a code of the document",
    )  # fmt: skip
    note = (
        "Every code that was told at least 128 tokens before is asked for, each from the same state; probability and"
        " rank (0 is right) are of the right code among all tokens, margins in logits above the best other one."
    )
    return Table("What is found", columns, rows, note)


def _margins(marks: list[dict[str, Any]]) -> Plot:
    cuts = {"smallest": 0.0, "median": 0.5, "largest": 1.0}
    series: dict[str, Sequence[tuple[float, float]]] = {
        name: [(mark["length"], _quantile([a["margin"] for a in mark["answers"]], cut)) for mark in marks]
        for name, cut in cuts.items()
    }
    title, y = "By how much the right code leads", "logits above the best other token"
    return Plot(title, "tokens of context", y, series, log_x=True)


def _quantile(values: list[float], cut: float) -> float:
    return sorted(values)[round(cut * (len(values) - 1))]
