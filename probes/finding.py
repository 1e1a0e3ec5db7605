"""What was found, as data: findings with a verdict each, and the parts of a page: tables, pictures, prose.

The words for a finding are here too (`Finding.shown`, `rows`), so that page, console and summaries say one number in
one way. Pages are made by `probes.report`, pictures by `probes.pictures`, the console's lines by `probes.console`.
"""

import json
import math
import re
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fathom.model.errors import Tripwire, one_line

JSON = Any  # what `json.dumps` takes
ROOT = Path(__file__).resolve().parents[1]


class Verdict(StrEnum):
    """What became of one finding."""

    PASS = "pass"  # noqa: S105 -- a verdict
    FAIL = "fail"
    VACUOUS = "vacuous"  # the run could not have shown the fault: a failure
    ERROR = "error"  # the probe broke down: a failure
    MEASURED = "measured"  # no bound: a number to know


LONGEST = 160  # characters of one piece of evidence as text; the JSON has all of it
PLACES = 5  # of many, in a finding's evidence
FAILURES = (Verdict.ERROR, Verdict.FAIL, Verdict.VACUOUS)  # the worst first


@dataclass(frozen=True, slots=True)
class Bound:
    """What a measured value has to satisfy."""

    relation: Literal["<=", ">=", "=="]
    value: float

    def holds(self, measured: float) -> bool:
        """Whether `measured` is within the bound; NaN never is."""
        match self.relation:
            case "<=":
                return measured <= self.value
            case ">=":
                return measured >= self.value
            case "==":
                return measured == self.value

    def __str__(self) -> str:
        return f"{self.relation} {number(self.value)}"


def at_most(value: float) -> Bound:
    """``measured <= value``."""
    return Bound("<=", value)


def at_least(value: float) -> Bound:
    """``measured >= value``."""
    return Bound(">=", value)


def exactly(value: float) -> Bound:
    """``measured == value``."""
    return Bound("==", value)


@dataclass(frozen=True, slots=True)
class Finding:
    """One measured number and what to make of it. Build it with `judged`, `measured` or `vacuous`."""

    what: str  # "recall, oracle A, mean over rows": read after the probe's name and the layer
    measured: float | None  # None: nothing was measured, see `verdict`
    unit: str  # "" for counts and ratios
    bound: Bound | None
    verdict: Verdict
    layer: int | None = None
    rank: int = 0
    evidence: dict[str, JSON] = field(default_factory=dict)  # what a reader needs to believe or pursue it

    @property
    def failed(self) -> bool:
        """FAIL, VACUOUS and ERROR all fail a probe."""
        return self.verdict in FAILURES

    @property
    def shown(self) -> str:
        """What was measured, with its unit, "" if nothing was; enough digits to tell it from a bound that it breaks."""
        if self.measured is None:
            return ""
        text = number(self.measured)
        if self.failed and self.bound is not None and text == number(self.bound.value):
            text = repr(self.measured)
        return f"{text} {self.unit}".rstrip()

    @property
    def wanted(self) -> str:
        """The bound with its unit, "" where there is none."""
        return "" if self.bound is None else f"{self.bound} {self.unit}".rstrip()

    @property
    def place(self) -> str:
        """Layer and rank to stand before `what`, "" where it has neither."""
        layer = "" if self.layer is None else f"layer {self.layer}, "
        return layer + (f"rank {self.rank}, " if self.rank else "")

    @property
    def known(self) -> list[tuple[str, str]]:
        """Names and values of the evidence, as text of one line each."""
        return [(name.replace("_", " "), _line(value)) for name, value in self.evidence.items()]

    def to_json(self, probe: str) -> dict[str, JSON]:
        """Every field as JSON values, see `finite`."""
        return {
            "probe": probe,
            "what": self.what,
            "layer": self.layer,
            "rank": self.rank,
            "measured": finite(self.measured),
            "unit": self.unit,
            "bound": None if self.bound is None else str(self.bound),
            "verdict": self.verdict.value,
            "evidence": finite(self.evidence),
        }


def _line(value: JSON) -> str:
    if isinstance(value, str):
        text = " ".join(value.split())
    elif isinstance(value, int | float) and not isinstance(value, bool):
        text = number(value)
    elif isinstance(value, list | tuple) and all(isinstance(item, int | float | str) for item in value):
        text = ", ".join(map(_line, value))
    else:
        text = json.dumps(finite(value))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def judged(
    what: str, value: float, bound: Bound, unit: str = "", *, layer: int | None = None, **evidence: JSON
) -> Finding:
    """A finding with a bound: PASS or FAIL."""
    verdict = Verdict.PASS if bound.holds(value) else Verdict.FAIL
    return Finding(what, value, unit, bound, verdict, layer, evidence=evidence)


def measured(what: str, value: float, unit: str = "", *, layer: int | None = None, **evidence: JSON) -> Finding:
    """A finding without a bound: a number to know. NaN and infinities fail nevertheless."""
    verdict = Verdict.MEASURED if math.isfinite(value) else Verdict.FAIL
    return Finding(what, value, unit, None, verdict, layer, evidence=evidence)


def vacuous(what: str, why: str, *, layer: int | None = None) -> Finding:
    """A finding that could not have come out otherwise: a failure that says why."""
    return Finding(what, None, "", None, Verdict.VACUOUS, layer, evidence={"why": why})


def broken(what: str, why: str, *, layer: int | None = None, **evidence: JSON) -> Finding:
    """A failure with nothing to measure: a tripwire fired, a tensor is missing."""
    return Finding(what, None, "", None, Verdict.FAIL, layer, evidence={"why": why} | evidence)


def some(places: Sequence[str]) -> dict[str, JSON]:
    """Evidence: the first of many places; the count says how many there are."""
    return {"first": list(places[:PLACES])} if places else {}


TRIPWIRE = "tripwire at "  # begins `Finding.what` of a tripwire


def tripped(trip: Tripwire) -> Finding:
    """The failure of a run that a tripwire ended."""
    found = {"position": trip.position, "measured": trip.measured, "expected": trip.expected}
    return broken(f"{TRIPWIRE}{trip.site}", str(trip), layer=trip.layer, **found)


def raised_at(error: Exception) -> str:
    """The last line of this repository that an error came through, as file:line; "" where none of it is there."""
    frames = [
        f"{Path(frame.filename).relative_to(ROOT)}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(ROOT) and "site-packages" not in frame.filename
    ]
    return frames[-1] if frames else ""


def crashed(error: Exception, where: str) -> Finding:
    """The failure of a probe that broke down: the error, and `where` in this repository it came from.

    Of absolute paths only the last part is told: no page names a path of the machine.
    """
    told = re.sub(r"(?<![\w.])/(?:[^\s/:]+/)+", "", one_line(str(error)))
    return Finding(f"{type(error).__name__}: {told}", None, "", None, Verdict.ERROR, evidence={"where": where})


@dataclass(frozen=True, slots=True)
class Findings:
    """The table of findings, worst first; those that pass and differ in the layer alone share a row."""

    findings: Sequence[Finding]
    title: str = "Findings"


@dataclass(frozen=True, slots=True)
class Table:
    """A table; cells are numbers (formatted by `number`), strings, or None for an empty cell."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[float | str | None]]
    note: str = ""  # a sentence or two under the table


@dataclass(frozen=True, slots=True)
class Plot:
    """Curves over a common x axis."""

    title: str
    x: str
    y: str
    series: dict[str, Sequence[tuple[float, float]]]  # name -> points, x ascending; drawn in this order
    log_x: bool = False
    log_y: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Scatter:
    """Points, each with its name written beside it; those of one series have one colour and one marker."""

    title: str
    x: str
    y: str
    points: dict[str, Sequence[tuple[str, float, float]]]  # series -> (label, x, y)
    log_x: bool = False
    log_y: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Bars:
    """A bar for each group; several series are stacked on each other, the first at the bottom."""

    title: str
    y: str
    groups: tuple[str, ...]  # written below the bars
    series: dict[str, Sequence[float]]  # name -> a value for each group; no bar where it is not finite
    spread: Sequence[tuple[float, float]] | None = None  # of one series: low and high for each group, drawn as whiskers
    limits: dict[str, float] = field(default_factory=dict)  # name -> value, drawn as a line across all bars
    log_y: bool = False  # of one series
    note: str = ""

    def __post_init__(self) -> None:
        assert all(len(values) == len(self.groups) for values in self.series.values()), "a value for each group"
        assert self.spread is None or len(self.spread) == len(self.groups), "a spread for each group"
        assert len(self.series) == 1 or (self.spread is None and not self.log_y), "stacks have no spread, no log axis"


@dataclass(frozen=True, slots=True)
class HeatMap:
    """A grid of values in 0 .. 1; rows top to bottom."""

    title: str
    x: str
    y: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    values: Sequence[Sequence[float | None]]  # [rows][columns]
    note: str = ""
    kinds: tuple[
        tuple[float, str, str], ...
    ] = ()  # where values are kinds: value, marker (of matplotlib), what it means


@dataclass(frozen=True, slots=True)
class Text:
    """A section of prose, Markdown; without a title, a paragraph of the section before it."""

    title: str
    text: str


Picture = Plot | Scatter | Bars | HeatMap
Part = Findings | Table | Picture | Text


@dataclass(frozen=True, slots=True)
class Report:
    """What one probe found in one run.

    `summary` is the sentence at which a hurried reader stops: it says what was measured and how it came out, with
    numbers, those of findings as `Finding.shown` has them. `parts` explain; `not_claimed` says what a reader must not
    conclude.
    """

    summary: str
    findings: tuple[Finding, ...]
    parts: tuple[Part, ...] = ()
    not_claimed: str = ""

    @property
    def judged(self) -> list[Finding]:
        """The findings that could fail."""
        return [finding for finding in self.findings if finding.verdict is not Verdict.MEASURED]

    @property
    def failed(self) -> bool:
        """Whether any finding failed, or nothing was judged at all: a probe that cannot fail is a defect."""
        return not self.judged or any(finding.failed for finding in self.judged)

    @property
    def verdict(self) -> Verdict:
        """PASS, or the worst of what failed; FAIL where nothing was judged."""
        if not self.failed:
            return Verdict.PASS
        return next((finding.verdict for finding in worst_first(self.findings) if finding.failed), Verdict.FAIL)


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """Errors, failures, vacuous findings, then the rest, each in the probe's order."""
    return sorted(findings, key=lambda finding: (*FAILURES, finding.verdict).index(finding.verdict))


class Row(NamedTuple):
    """One row of a table of findings: a finding, or several that pass and differ in the layer alone."""

    layer: str
    what: str
    measured: str
    bound: str
    verdict: Verdict


def rows(findings: Iterable[Finding]) -> list[Row]:
    """Rows of a table, worst first; findings that pass and differ in the layer alone share one."""
    alike: dict[object, list[Finding]] = {}
    for at, finding in enumerate(worst_first(findings)):
        alone = finding.failed or finding.layer is None
        key = at if alone else (finding.what, finding.unit, finding.bound, finding.verdict, finding.rank)
        alike.setdefault(key, []).append(finding)
    return [_row(group) for group in alike.values()]


def _row(group: Sequence[Finding]) -> Row:
    first = group[0]
    ends = [end(group, key=lambda finding: finding.measured or 0.0).shown for end in (min, max)]
    shown = ends[0] if ends[0] == ends[1] else " .. ".join(ends)
    layers = ranges([finding.layer for finding in group if finding.layer is not None])
    return Row(layers + (f", rank {first.rank}" if first.rank else ""), first.what, shown, first.wanted, first.verdict)


def ranges(layers: Iterable[int]) -> str:
    """1, 2, 3, 5 as "1-3, 5"."""
    runs = [list(run) for _, run in groupby(enumerate(sorted(layers)), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0][1]}" + (f"-{run[-1][1]}" if len(run) > 1 else "") for run in runs)


def number(value: float) -> str:
    """A number as pages and console show it: integers whole, others with four digits."""
    if isinstance(value, int) or (math.isfinite(value) and value == int(value) and abs(value) < 1e6):
        return f"{int(value)}"
    return f"{value:.4g}"


def finite(value: JSON) -> JSON:
    """JSON values with every NaN and infinity as a string: JSON has no such numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value
