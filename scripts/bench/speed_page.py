"""What the benches of cache variants share: their flags, the tables of their pages, and what a processor allows."""

import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import torch

from runtime.report import commit
from scripts.bench.pairs import Pair, Timing, measure, processor_ms
from scripts.bench.record import markdown

HEADS = ("case", "variant, ms", "other", "other, ms", "ratio, median", "from .. to", "rounds")
LIMIT_HEADS = ("case", "10^9 products", "at that rate, ms", "other side, ms", "largest ratio")
ALLOWED = "What the processor allows"


class Limit(NamedTuple):
    """How fast something could be at most, from its multiplications."""

    label: str
    products: float  # multiplications and additions, in 10^9
    other_ms: float

    def row(self, rate: float) -> tuple[str, ...]:
        """Cells: products, what they take at `rate` of them (in 10^9 a second), and the largest ratio that leaves."""
        least = 1e3 * self.products / rate
        times = (f"{least:.1f}", f"{self.other_ms:.1f}", f"{self.other_ms / least:.2f}")
        return (self.label, f"{self.products:.2f}", *times)


def settle() -> None:
    """One thread; numbers too small for fp32's exponents become zero, which `coda-gqa-l` needs for its speed."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)


def timed(pairs: Sequence[Pair], seconds: float) -> list[Timing]:
    """Time the pairs of a table."""
    return [measure(pair, seconds, 5, 30) for pair in pairs]


def rate(seconds: float = 0.5) -> float:
    """Multiplications a second of a large fp32 product, in 10^9: the best of the calls within `seconds`."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    best, stop = float("inf"), time.thread_time() + seconds
    while time.thread_time() < stop:
        best = min(best, processor_ms(lambda: a @ b))
    return 1024**3 / best / 1e6


def cells(timing: Timing) -> tuple[str, ...]:
    """One row of a table; times are the best and the median of the rounds."""
    both = [f"{min(ms):.2f} / {median(ms):.2f}" for ms in map(timing.side, (0, 1)) if ms]
    ratio = ("", "") if timing.ratio is None else (f"{timing.ratio[0]:.2f}", "{1:.2f} .. {2:.2f}".format(*timing.ratio))
    other = both[1] if len(both) > 1 else ""
    return (timing.pair.label, both[0], timing.pair.second, other, *ratio, str(len(timing.rounds)))


def reached(timings: Sequence[Timing], other: str, least: float, *, prompts: bool) -> str:
    """In how many cases the variant was `least` times as fast as the other side."""
    asked = [t for t in timings if t.pair.second == other and t.ratio]
    ratios = [t.ratio[0] for t in asked if t.ratio and (prompts or "prompt" not in t.pair.label)]
    return f"in {sum(ratio >= least for ratio in ratios)} of {len(ratios)} cases"


def between(timings: Sequence[Timing], other: str, part: str = "") -> str:
    """The medians that were found, smallest and largest of a kind; one number where they are one."""
    ratios = [t.ratio[0] for t in timings if t.ratio and t.pair.second == other and part in t.pair.label]
    ends = dict.fromkeys(f"{end(ratios):.2f}" for end in (min, max)) if ratios else ["not measured"]
    return " to ".join(ends)


def page(
    command: str,
    opening: Sequence[str],
    tables: Mapping[str, tuple[Sequence[Timing], str]],
    limits: Sequence[Limit],
    speed: float,
) -> str:
    """The whole run as Markdown.

    Parameters
    ----------
    command
        That makes it again.
    opening
        Lines of the title and of what was asked for and found.
    tables
        By title: the rows, and what the table says beside its numbers.
    limits, speed
        What could be reached at most, at so many 10^9 multiplications a second.

    """
    lines = [
        "---",
        f"command: {command}",
        f"commit: {commit()}",
        "ops: cpu",
        "device: cpu, one thread of a machine that other work shared",
        f"torch: {torch.__version__.split('+', maxsplit=1)[0]}",
        "---",
        "",
        *opening,
        "",
        "Both sides of a row ran in turn; times are processor time, the best and the median of the rounds. The ratio",
        "is other over variant, round by round: above 1 the variant is the faster. Denormals were flushed.",
        "",
    ]
    for title, (timings, meaning) in tables.items():
        lines += [*markdown(title, HEADS, [cells(timing) for timing in timings]), meaning, ""]
    lines += markdown(ALLOWED, LIMIT_HEADS, [limit.row(speed) for limit in limits])
    lines.append(
        f"A product of two matrices of 1024 x 1024 ran at {speed:.1f} x 10^9 multiplications a second, in fp32."
    )
    return "\n".join([*lines, ""])
