"""Axes of a plot: which numbers it spans, which of them are written on it, and how."""

import math
from collections.abc import Sequence
from typing import NamedTuple

LARGEST = 1e100  # beyond it (or, on a log axis, below its inverse) ratios overflow: such a number is not drawn
FEW = 12  # whole numbers, such as layers, that are all written
TICKS = 5  # steps that an axis is cut into, about
LABELS = 9  # most powers to write on a log axis
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class Axis(NamedTuple):
    """Numbers from low to high and where they lie on a line of length 1."""

    low: float
    high: float
    log: bool
    ticks: tuple[tuple[float, str], ...]  # value, label

    def place(self, value: float) -> float:
        """Share of the axis, 0 at low and 1 at high."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def drawable(value: float, *, log: bool) -> bool:
    """Whether a number has a place on an axis; `value` may be NaN or infinite."""
    return abs(value) < LARGEST and (not log or value > 1 / LARGEST)


def axis(values: Sequence[float], *, log: bool, tight: bool) -> Axis:
    """Return an axis for drawable `values`, at least one; `tight` ends near the data, else at a tick."""
    return _logarithmic(values, tight=tight) if log else _linear(values, tight=tight)


def _linear(values: Sequence[float], *, tight: bool) -> Axis:
    low, high = min(values), max(values)
    if _constant(low, high) or 0 < low < high / 2:
        low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        high = 1.0
    whole = all(value == int(value) for value in values)
    step = 1.0 if whole and high - low <= FEW else _step((high - low) / TICKS)
    margin = 0.02 * (high - low) if tight else 0.0
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    if tight:
        first, last = math.ceil((low - margin) / step), math.floor((high + margin) / step)
        low, high = low - margin, high + margin
    else:
        low, high = first * step, last * step
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return Axis(low, high, False, tuple((i * step, _fixed(i * step, decimals)) for i in range(first, last + 1)))  # noqa: FBT003


def _constant(low: float, high: float) -> bool:
    """Whether values differ by rounding at most: that is no curve."""
    return high - low <= 1e-9 * max(abs(low), abs(high))


def _step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... times a power of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(times * power for times in (1, 2, 5, 10) if times * power >= least * (1 - 1e-9))


def _fixed(value: float, decimals: int) -> str:
    if decimals > 6 or abs(value) >= 1e6:
        return f"{value:.10g}"
    return f"{value + 0.0:.{decimals}f}" if round(value, decimals) else "0"


def _logarithmic(values: Sequence[float], *, tight: bool) -> Axis:
    low, high = min(values), max(values)
    ticks = _log_ticks(values)
    if tight:
        margin = (high / low) ** 0.02 if high > low else 2.0
        low, high = low / margin, high * margin
    else:
        low, high = ticks[0][0], ticks[-1][0]
    return Axis(low, high, True, tuple(tick for tick in ticks if low <= tick[0] <= high))  # noqa: FBT003


def _log_ticks(values: Sequence[float]) -> Sequence[tuple[float, str]]:
    """Ticks, at least two, that reach from the least to the largest of `values`."""
    low, high = min(values), max(values)
    if all(math.frexp(value)[0] == 0.5 for value in values):  # powers of two: prompt lengths and the like
        return _powers(2, math.log2(low), math.log2(high))
    if high > 100 * low:
        return _powers(10, math.log10(low), math.log10(high))
    if high < 2 * low and not _constant(low, high):
        return _linear(values, tight=False).ticks
    digits = (1, 2, 5) if high > 10 * low else range(1, 10)
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    steps = [digit * 10.0**k for k in decades for digit in digits]
    first = max(i for i, step in enumerate(steps) if step <= low * (1 + 1e-9))
    last = min(i for i, step in enumerate(steps) if step >= high * (1 - 1e-9))
    return [(step, f"{step:g}") for step in steps[first : max(last, first + 1) + 1]]


def _powers(base: int, least: float, largest: float) -> list[tuple[float, str]]:
    first, last = math.floor(least + 1e-9), math.ceil(largest - 1e-9)
    last = max(last, first + 1)
    stride = -(-(last - first) // (LABELS - 1))
    exponents = range(first, last + stride, stride)
    plain = all(0 <= k <= 16 for k in exponents) if base == 2 else all(-3 <= k <= 4 for k in exponents)
    return [
        (float(base) ** k, f"{base**k:g}" if plain else f"{base}{str(k).translate(SUPERSCRIPT)}") for k in exponents
    ]
