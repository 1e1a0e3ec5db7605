"""What the runs of a comparison say: ratios of pairs, targets, and whether both sides computed the same.

A ratio is theirs / ours of the two runs of one pair, which followed each other: above 1 ours is the faster, or the
smaller. Its median over the pairs counts, smallest and largest beside it.
"""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

from torch import Tensor

JSON = dict[str, Any]
OURS, THEIRS = "ours", "theirs"

# How far apart logits may be: the norm of the difference over that of theirs, for the logits after the prompt and after
# each decoded token. bf16 rounds with an error of 2^-9 / sqrt(3) of a value; 8 layers round some 130 times in series,
# on both sides, which adds up to sqrt(260) 2^-9 / sqrt(3) = 0.018. Where a rounding moves an expert or an entry across
# the threshold of a selection, a row is further off: so the median row is bounded with room, and every row well below
# the sqrt(2) of unrelated logits.
MEDIAN_APART = 0.1
ROW_APART = 0.5


def apart(ours: Tensor, theirs: Tensor) -> JSON:
    """How far the logits [rows, vocab] of a pair are apart; the first row is the one after the prompt."""
    rows = ((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).tolist()
    return {
        "relative": rows,
        "prompt_max_abs": (ours[0] - theirs[0]).abs().max().item(),
        "prompt_argmax_equal": bool(ours[0].argmax() == theirs[0].argmax()),
        "argmax_equal": int((ours.argmax(1) == theirs.argmax(1)).sum()),
        "rows": len(rows),
        "same": median(rows) <= MEDIAN_APART and max(rows) <= ROW_APART,  # NaN is not
    }


def peak(run: JSON) -> float:
    """Peak resident bytes, mapped weights included."""
    return float(run["memory"]["VmHWM"])


def peak_anon(run: JSON) -> float:
    """Peak bytes that no file backs, sampled."""
    return float(run["sampled_peak_anon"])


MEASURES: dict[str, tuple[str, Callable[[JSON], float]]] = {  # name -> unit, value of a run
    "load": ("s", lambda run: run["load_s"]),
    "prefill": ("tokens/s", lambda run: run["context"] / run["prefill_s"]),
    "decode": ("ms/token", lambda run: median(run["decode_ms"])),
    "peak memory": ("GB", lambda run: peak(run) / 1e9),
    "of it not file-backed": ("GB", lambda run: peak_anon(run) / 1e9),
}
RATES = frozenset({"prefill"})  # more is better: the ratio is ours / theirs


class Spread(NamedTuple):
    """Median, smallest and largest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least one value."""
        return cls(median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{short(self.median)} ({short(self.low)} .. {short(self.high)})"


def short(value: float) -> str:
    """A number with three digits, or all of those before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def values(runs: Sequence[JSON], side: str, context: int, measure: str) -> list[float]:
    """A measure of every run of one side at one context."""
    _, value = MEASURES[measure]
    return [value(run) for run in runs if run["side"] == side and run["context"] == context and "pair" in run]


def ratios(runs: Sequence[JSON], context: int, measure: str) -> list[float]:
    """How many times ours is better, of each pair."""
    _, value = MEASURES[measure]
    by_pair: dict[int, dict[str, float]] = {}
    for run in runs:
        if run["context"] == context and "pair" in run:
            by_pair.setdefault(run["pair"], {})[run["side"]] = value(run)
    whole = [pair for pair in by_pair.values() if len(pair) == 2]
    return [pair[OURS] / pair[THEIRS] if measure in RATES else pair[THEIRS] / pair[OURS] for pair in whole]


def contexts(runs: Sequence[JSON]) -> list[int]:
    """Contexts that both sides read, ascending."""
    return sorted({run["context"] for run in runs if run["side"] == THEIRS})


class Target(NamedTuple):
    """What was asked for, and what was found."""

    what: str
    context: int
    least: float
    found: Spread

    @property
    def reached(self) -> bool:
        """Whether the median is at least what was asked for."""
        return self.found.median >= self.least


WANTED = {("prefill", 8192): 2.5, ("prefill", 16384): 3.5, ("decode", 8192): 3.0}
WANTED_ANYWHERE = {"load": 5.0, "peak memory": 2.0}
FLAT = (8192, 16384)  # decode takes as long after the one as after the other:
FLAT_LEAST = 0.9  # speed kept, where runs of one side spread by 10 to 20 %


def targets(runs: Sequence[JSON]) -> list[Target]:
    """Every target whose contexts were run."""
    there = contexts(runs)
    wanted = [(what, n, least) for (what, n), least in WANTED.items() if n in there]
    wanted += [(what, n, least) for n in there for what, least in WANTED_ANYWHERE.items()]
    found = [Target(what, n, least, Spread.of(ratios(runs, n, what))) for what, n, least in wanted]
    if set(FLAT) <= set(there):
        short, long = (values(runs, OURS, n, "decode") for n in FLAT)
        kept = [a / b for a, b in zip(short, long, strict=True)]
        found.append(Target(f"decode speed kept from {FLAT[0]} on", FLAT[1], FLAT_LEAST, Spread.of(kept)))
    return found
