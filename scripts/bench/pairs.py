"""Two ways to compute the same, timed in turn, round after round, so that whatever else the machine does falls on both.

Times are processor time of the one thread, or by the clock on the wall where a pair says so. What counts is the ratio
of each round: its median, and the smallest and largest beside it.
"""

import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

from torch import Tensor


class Pair(NamedTuple):
    """Two ways to compute the same: a label, and a name and a call for each."""

    label: str
    first: str
    run_first: Callable[[], Tensor | None]
    second: str
    run_second: Callable[[], Tensor | None] | None  # None: not installed
    wall: bool = False  # time by the clock on the wall, as where several threads work


class Timing(NamedTuple):
    """What a pair took: milliseconds of each round, of the first and, where there is one, of the second."""

    pair: Pair
    rounds: list[tuple[float, ...]]

    def side(self, which: int) -> list[float]:
        """Milliseconds of one side, 0 or 1, in every round; empty where it was not timed."""
        return [times[which] for times in self.rounds if which < len(times)]

    @property
    def ratio(self) -> tuple[float, float, float] | None:
        """Second / first over the rounds: median, smallest, largest. Above 1 the first is the faster."""
        ratios = sorted(times[1] / times[0] for times in self.rounds if len(times) > 1)
        return (median(ratios), ratios[0], ratios[-1]) if ratios else None

    def to_json(self) -> dict[str, Any]:
        """JSON values: every round, and what is read off them."""
        return {
            "label": self.pair.label,
            "first": self.pair.first,
            "first_ms": self.side(0),
            "second": self.pair.second,
            "second_ms": self.side(1),
            "ratio": self.ratio,
        }


def processor_ms(call: Callable[[], object]) -> float:
    """Milliseconds of processor time of one call."""
    start = time.thread_time()
    call()
    return 1e3 * (time.thread_time() - start)


def wall_ms(call: Callable[[], object]) -> float:
    """Milliseconds of one call by the clock on the wall."""
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def measure(pair: Pair, seconds: float, least: int, most: int) -> Timing:
    """Time a pair for about `seconds`, within `least` to `most` rounds, after one round that does not count."""
    calls = [call for call in (pair.run_first, pair.run_second) if call is not None]
    timed = wall_ms if pair.wall else processor_ms
    warm = sum(timed(call) for call in calls)
    rounds = int(min(most, max(least, 1e3 * seconds // max(warm, 1e-3))))
    return Timing(pair, [tuple(timed(call) for call in calls) for _ in range(rounds)])
