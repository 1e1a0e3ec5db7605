"""The one clock and the one pairing of every bench: the sides of a case take turns, round after round.

Whatever else the machine does falls on all sides alike, so a ratio is of one round, of calls that followed each other;
its median counts, smallest and largest beside it. The order is turned round in every second round. What the sides
computed is held side by side before any of their times counts: a case whose sides differ has none.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from fathom.kernels.ops import Ops

JSON = dict[str, Any]
Measures = dict[str, float]  # by what was measured, unit included
Side = Callable[[], tuple[Measures, Any]]  # runs once: what it took, and what it computed

OTHER = "other"
UNITS = ("s", "ms", "us")  # measures that are nothing but time
SLOW = 1.0  # seconds of a round from which on each is told


class Rounds(NamedTuple):
    """How many rounds: those of about `seconds`, within `least` to `most`."""

    seconds: float
    least: int
    most: int

    @classmethod
    def exactly(cls, count: int) -> "Rounds":
        """So many, however long they take."""
        return cls(0.0, count, count)


class Case(NamedTuple):
    """What is timed side by side; less is better, and a ratio is another side over the first."""

    table: str  # the heading under which it stands
    label: str
    sides: Mapping[str, Side]
    rounds: Rounds
    agree: Callable[..., JSON] | None = None  # of what the sides computed: {"same": whether it is, and how near}
    asked: Mapping[str, float] | None = None  # by measure: the least ratio of the second side over the first
    at_most: Mapping[str, float] | None = None  # the same, but the largest: where the first is a floor
    warm: bool = True  # whether a round that does not count comes first
    compared: bool = True  # whether a ratio of its sides says anything


class Spread(NamedTuple):
    """Median, smallest and largest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least one value."""
        return cls(median(values), min(values), max(values))

    @property
    def ends(self) -> str:
        """Smallest and largest."""
        return f"{short(self.low)} .. {short(self.high)}"

    def __str__(self) -> str:
        return short(self.median) if short(self.low) == short(self.high) else f"{short(self.median)} ({self.ends})"


def short(value: float) -> str:
    """A number with three digits, or all of those before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def timed(call: Callable[[], Any], now: Callable[[], float] = time.thread_time) -> Side:
    """A side of one measure, the ms of a call: of this thread's processor, or by another clock."""

    def side() -> tuple[Measures, Any]:
        began = now()
        computed = call()
        return {"ms": 1e3 * (now() - began)}, computed

    return side


def constant(**measures: float) -> Side:
    """A side that nothing runs for: a limit that the others are held against."""
    return lambda: (dict(measures), None)


def near(bound: float) -> Callable[..., JSON]:
    """Judge what sides computed: tensors apart from the first side's by at most `bound` of its norm; NaN is further."""

    def agree(first: Any, *rest: Any) -> JSON:
        expected = _numbers(first)
        off = [float((_numbers(other) - expected).norm() / expected.norm()) for other in rest if other is not None]
        return {"same": all(apart <= bound for apart in off), "apart": off, "bound": bound}

    return agree


def _numbers(computed: Any) -> torch.Tensor:
    parts = [computed] if isinstance(computed, torch.Tensor) else computed
    return torch.cat([part.detach().float().flatten() for part in parts])


def wall(device: str = "cpu") -> float:
    """Seconds of the clock on the wall, once all that was asked of a GPU is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


class Clock:
    """Where the time of a run goes: every op of a set with a clock around it, no profiler, wall time.

    An op calls no other op of its set, so what a clock shows is the op's own time; what no op took is `OTHER`:
    embedding, exchanges between ranks, caches, checks, the interpreter. On a CPU the clock costs less than a
    microsecond a call; on a GPU ops no longer overlap, so the whole takes longer.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.spent: dict[str, float] = {}
        self.began = 0.0

    def start(self) -> None:
        """Begin anew."""
        self.spent, self.began = {}, wall(self.device)

    def stop(self, kind: str, scale: float) -> Measures:
        """The whole and its parts, the largest first and OTHER last, as ``kind: part`` and in seconds times `scale`."""
        whole = wall(self.device) - self.began
        parts = dict(sorted(self.spent.items(), key=lambda item: -item[1]))
        spent = {"all": whole, **parts, OTHER: whole - sum(parts.values())}
        return {f"{kind}: {name}": scale * seconds for name, seconds in spent.items()}

    def watch(self, ops: "Ops") -> "Ops":
        """Return the op set with this clock around every op."""
        alone = {name: op for name, op in ops._asdict().items() if callable(op) and name != "compress"}  # calls others
        return ops._replace(**{name: self.around(name, op) for name, op in alone.items()})

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call that calls no other with a clock, with this clock around it as part `name`."""

        def clocked(*given: Any, **named: Any) -> Any:
            began = wall(self.device)
            computed = call(*given, **named)
            part = component(name, given)
            self.spent[part] = self.spent.get(part, 0.0) + wall(self.device) - began
            return computed

        return clocked


def component(op: str, given: tuple[Any, ...]) -> str:
    """What a call counts as: its op, and of attention the kind of layer."""
    if op != "attend":
        return op
    entries, selected = given[4], given[6]
    return f"attend, {'SWA' if entries is None else 'HCA' if selected is None else 'CSA'}"


def run(case: Case) -> JSON:
    """Run the rounds of a case, telling stderr of each that is slow: a row, as it stands in a bench's JSON.

    Returns
    -------
    JSON
        table, case, compared, asked, at most; `rounds`: of each round, by side, what was measured; `agreement`: of
        each round that was judged, what `agree` found. Where one is not the same, the round is the last and `rounds`
        is empty.
    """
    row: JSON = {
        "table": case.table, "case": case.label, "sides": list(case.sides), "compared": case.compared,
        "asked": dict(case.asked or {}), "at most": dict(case.at_most or {}), "agreement": [], "rounds": [],
    }  # fmt: skip
    rounds, began = case.rounds.least, time.perf_counter()
    if case.warm:
        _, computed = _round(case, 0)
        took = max(time.perf_counter() - began, 1e-6)
        rounds = int(min(case.rounds.most, max(rounds, case.rounds.seconds // took)))
        if not _agree(case, computed, row):
            return row
        del computed
    for number in range(rounds):
        began = time.perf_counter()
        measured, computed = _round(case, number)
        if not case.warm and not _agree(case, computed, row):
            row["rounds"] = []
            return row
        row["rounds"].append(measured)
        if time.perf_counter() - began > SLOW:
            _say(f"{case.label}, round {number + 1} of {rounds}: {_told(row, number)}")
    if not row["rounds"] or time.perf_counter() - began <= SLOW:
        _say(f"{case.label}, {rounds} rounds: {_told(row, None)}")
    return row


def _round(case: Case, number: int) -> tuple[dict[str, Measures], list[Any]]:
    order = list(case.sides) if number % 2 == 0 else list(case.sides)[::-1]
    found = {name: case.sides[name]() for name in order}
    return {name: found[name][0] for name in case.sides}, [found[name][1] for name in case.sides]


def _agree(case: Case, computed: Sequence[Any], row: JSON) -> bool:
    if case.agree is None:
        return True
    found = case.agree(*computed)
    row["agreement"].append(found)
    if not found["same"]:
        _say(f"{case.label}: {' and '.join(case.sides)} do not compute the same, so nothing is timed: {found}")
    return bool(found["same"])


def _told(row: JSON, number: int | None) -> str:
    rounds = row["rounds"] if number is None else [row["rounds"][number]]
    shown = {side: headlines({**row, "rounds": rounds}, side) for side in row["sides"]}
    return "; ".join(
        f"{side} {', '.join(f'{name} {short(median(values(row, side, name)))}' for name in names)}"
        for side, names in shown.items()
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# --- what a row says


def differs(row: JSON) -> bool:
    """Whether its sides did not compute the same."""
    return not all(found["same"] for found in row["agreement"])


def measures(row: JSON) -> list[str]:
    """What was measured of any side, in the order of the first that has it."""
    return list(dict.fromkeys(name for side in row["sides"] for taken in row["rounds"] for name in taken[side]))


def headlines(row: JSON, side: str | None = None) -> list[str]:
    """Its measures that are no part of another, of one side or of any."""
    names = [name for name in measures(row) if side is None or values(row, side, name)]
    return [name for name in names if ": " not in name] or [name for name in names if name.endswith(": all")]


def values(row: JSON, side: str, measure: str) -> list[float]:
    """What a side took in each round."""
    return [taken[side][measure] for taken in row["rounds"] if measure in taken[side]]


def ratios(row: JSON, other: str, measure: str) -> list[float]:
    """Another side over the first in each round: above 1 the first is the faster, or the smaller."""
    first = row["sides"][0]
    both = [taken for taken in row["rounds"] if measure in taken[first] and measure in taken[other]]
    return [taken[other][measure] / taken[first][measure] for taken in both if taken[first][measure]]


def others(row: JSON) -> list[str]:
    """Sides that are compared with the first."""
    return row["sides"][1:] if row["compared"] else []


class Asked(NamedTuple):
    """A ratio that was asked for, and the one that was found."""

    label: str
    measure: str
    limit: float
    found: Spread
    at_most: bool  # the limit; else at least

    @property
    def reached(self) -> bool:
        """Whether the median is what was asked for."""
        return self.found.median <= self.limit if self.at_most else self.found.median >= self.limit

    @property
    def told(self) -> str:
        """The limit, and which it is."""
        return f"{'<=' if self.at_most else '>='} {self.limit:g}"


def asked(rows: Sequence[JSON]) -> list[Asked]:
    """Every ratio that was asked for and could be measured; cases of several tables are named with their tables."""
    several = len({row["table"] for row in rows if row["asked"] or row["at most"]}) > 1
    return [
        Asked(f"{row['table']}, {row['case']}" if several else row["case"], measure, limit, Spread.of(found), at_most)
        for row in rows
        for at_most, limits in ((False, row["asked"]), (True, row["at most"]))
        for measure, limit in limits.items()
        if len(row["sides"]) > 1 and (found := ratios(row, row["sides"][1], measure))
    ]


Table = tuple[list[str], list[list[str]]]  # heads, and cells of each row


def tables(rows: Sequence[JSON]) -> dict[str, Table]:
    """By heading: medians and spreads of every measure of every case, and ratios of the sides that are compared."""
    return {
        name: table([row for row in rows if row["table"] == name])
        for name in dict.fromkeys(row["table"] for row in rows)
    }


def table(rows: Sequence[JSON]) -> Table:
    """The cases of one table; what was measured has a column of its own where it is more than one thing."""
    sides = list(dict.fromkeys(side for row in rows for side in row["sides"]))
    held = list(dict.fromkeys(side for row in rows for side in others(row)))
    single = len({name for row in rows for name in measures(row)}) <= 1
    unit = "".join({f", {name}" for row in rows for name in measures(row)}) if single else ""
    heads = ["case", *([] if single else ["what"]), *(f"{side}{unit}" for side in sides)]
    for side in held:
        heads += [f"{side} / {rows[0]['sides'][0]}", "from .. to"]
    heads.append("rounds")
    cells = []
    for row in rows:
        for name in measures(row) or [""]:
            cell = [row["case"], *([] if single else [name])]
            for side in sides:
                taken = values(row, side, name) if side in row["sides"] else []
                cell.append(str(Spread.of(taken)) if taken else "-")
            for side in held:
                found = ratios(row, side, name) if side in others(row) else []
                cell += [short(Spread.of(found).median), Spread.of(found).ends] if found else ["-", "-"]
            cells.append([*cell, "differ" if differs(row) else str(len(row["rounds"]))])
    return heads, cells


def summary(rows: Sequence[JSON]) -> list[str]:
    """What was found, a line each: of a table the ratios of its headlines, or these where sides are not compared."""
    lines = []
    titles = list(dict.fromkeys(row["table"] for row in rows))
    for title in titles:
        cases = [row for row in rows if row["table"] == title]
        for side in dict.fromkeys(side for row in cases for side in others(row)):
            for measure in dict.fromkeys(measure for row in cases for measure in headlines(row)):
                found = [ratios(row, side, measure) for row in cases if side in others(row)]
                if spreads := [Spread.of(ratio) for ratio in found if ratio]:
                    where = [*([title] if len(titles) > 1 else []), "time" if measure in UNITS else measure]
                    lines.append(f"{', '.join(where)}: {side} / {cases[0]['sides'][0]} = {_over_cases(spreads)}")
    for row in rows:
        for side in row["sides"] if row["rounds"] and not row["compared"] else ():
            told = ", ".join(f"{name} {Spread.of(values(row, side, name))}" for name in headlines(row, side))
            lines.append(f"{row['case']} {side}: {told}")
    return lines


def _over_cases(spreads: Sequence[Spread]) -> str:
    if len(spreads) > 1:
        medians = sorted(spread.median for spread in spreads)
        return f"{short(medians[0])} to {short(medians[-1])} ({len(spreads)} cases)"
    (only,) = spreads
    unchanged = ", no change beyond the spread" if only.low <= 1 <= only.high else ""
    return f"{short(only.median)} ({only.ends}){unchanged}"
