"""A row that stands out, looked at again alone: with many replicas, and with its near ties taken the other way.

Where a value decides (the scale of a block, the code of a number, the experts or entries that are chosen), rounding may
decide otherwise, seldom, and by far more than it moves anything else: a flip of one scale doubles the step of a whole
block. Fifteen replicas may hold none of it. So what is near a tie is found (`Noted`), within `FACTOR` times what
rounding moves it by, and taken the other way by itself (`Otherwise`); what comes nearest to the row is kept, and the
others are tried on top of it. A row that some of these reach is explained by rounding.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fathom.probes.judge.oracle import FACTOR, REPLICAS, SIGNS, Narrow, Noise

MANY: Final = 4  # times as many replicas as are run at once
FEW_ROWS: Final = 16  # that the row is computed from: with more of them less is run at once
TOGETHER: Final = 4  # of them taken the other way at once
LEAST_GAIN: Final = 0.98  # what a tie must leave of the distance at most, to be one that was taken otherwise
BEYOND: Final = 2.0**-22  # a scale is decided by a product in fp32: so far beyond its tie it is surely the other

Point = tuple[object, ...]  # where in a layer something is decided: for what, and how many were before


class Seen(NamedTuple):
    """What decided at a point: exact numbers [n, ...], how far rounding moves each, and whose rows they are [n]."""

    point: Point
    exact: Tensor
    spread: Tensor
    rows: Tensor
    by: Narrow | int  # the format that it is rounded to, or how many of it are chosen


class Tie(NamedTuple):
    """Numbers at a point that are near a tie, and what takes them to its other side."""

    point: Point
    row: int  # position of the token, or number of the entry
    at: Tensor  # [m] int64, in the flat row
    by: Tensor  # [m]
    size: float  # what this changes, as a share of the row's length


class Noted(Noise):
    """Replicas that keep what decides, and how far apart they are there."""

    def __init__(self, dtype: torch.dtype, replicas: int, first: int) -> None:
        super().__init__(dtype, replicas, first)
        self.seen: list[Seen] = []

    def choosing(self, x: Tensor, count: int, apart: float) -> Tensor:
        """Keep what is chosen by."""
        self._note(x, count)
        return super().choosing(x, count, apart)

    def rounding(self, x: Tensor, form: Narrow, apart: float) -> Tensor:
        """Keep what is rounded."""
        self._note(x, form)
        return super().rounding(x, form, apart)

    def _note(self, x: Tensor, by: Narrow | int) -> None:
        spread = (x[1:] - x[:1]).nan_to_num(0).square().mean(0).sqrt() if len(x) > 1 else torch.zeros_like(x[0])
        self.seen.append(Seen(_point(self), x[0].clone(), spread, self.rows, by))


class Otherwise(Noise):
    """No rounding of a dtype: each replica is the exact run but for ties that it takes the other way."""

    def __init__(self, dtype: torch.dtype, ways: Sequence[Sequence[Tie]]) -> None:
        super().__init__(dtype, len(ways))
        self.ways = ways

    def moved(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """As it is."""
        del dtype
        return x

    def stored(self, x: Tensor) -> Tensor:
        """As it is."""
        return x

    def summed(self, y: Tensor, size: Tensor) -> Tensor:
        """As it is."""
        del size
        return y

    def choosing(self, x: Tensor, count: int, apart: float) -> Tensor:
        """Take the other side of a tie."""
        del count, apart
        return self._otherwise(x)

    def rounding(self, x: Tensor, form: Narrow, apart: float) -> Tensor:
        """Take the other side of a tie."""
        del form, apart
        return self._otherwise(x)

    def _otherwise(self, x: Tensor) -> Tensor:
        point = _point(self)
        ties = [(n, tie) for n, way in enumerate(self.ways, 1) for tie in way if tie.point == point]
        if not ties:
            return x
        x = self.spread(x).clone(memory_format=torch.contiguous_format)
        for n, tie in ties:
            for row in (self.rows == tie.row).nonzero()[:, 0].tolist():
                x[n, row].view(-1)[tie.at] += tie.by
        return x


def _point(noise: Noise) -> Point:
    noise.decided += 1
    return (noise.seed, *noise.what, noise.decided)


# --- what is near a tie


def near_ties(seen: Sequence[Seen], position: int, most: int) -> list[Tie]:
    """What rounding may decide otherwise, at most so much: the row's own first, then by how much it changes."""
    found: list[Tie] = []
    for point, exact, spread, rows, by in seen:
        reach, width = FACTOR * spread, exact.numel() // len(rows)
        for tie in _rounded(exact, reach, by, most) if isinstance(by, Narrow) else _chosen(exact, reach, by, most):
            row = int(rows[int(tie.at[0]) // width])
            found.append(tie._replace(point=point, row=row, at=tie.at % width))
    return sorted(found, key=lambda tie: (tie.row != position, -tie.size))[:most]


def _rounded(exact: Tensor, reach: Tensor, form: Narrow, most: int) -> Iterator[Tie]:
    """Codes and scales of rows [n, ...] that are rounded to a narrow format."""
    blocks, scale = form.scales(exact)
    flat = blocks.reshape(-1, blocks.shape[-1])  # [b, w]
    scale, reach = scale.reshape(-1, 1), reach.reshape(flat.shape)
    whole = exact.norm(dim=-1, keepdim=True).expand(*blocks.shape[:-1]).reshape(-1, 1).clamp_min(2.0**-500)
    yield from _codes(flat, scale, reach, whole, form, most)
    yield from _scales(flat, scale, reach, whole, form)


def _codes(x: Tensor, scale: Tensor, reach: Tensor, whole: Tensor, form: Narrow, most: int) -> Iterator[Tie]:
    """Numbers of blocks [b, w] near the middle of two codes."""
    y = x / scale
    step = form.step(y.clamp(-form.largest, form.largest))
    middle = ((y / step).floor() + 0.5) * step
    up = torch.round(y / step) * step > y  # where it is rounded up, the other side lies below the middle
    beyond = torch.where(up, -1.0, 1.0) * (x.abs() * 2.0**-40 + 2.0**-500)
    by, size = (middle - y) * scale, step * scale / whole
    near = ((by.abs() <= reach) & (y.abs() < form.largest) & (reach > 0)).flatten().nonzero()[:, 0]
    by, size = (by + beyond).flatten(), size.flatten()
    for place in near[size[near].topk(min(most, len(near))).indices]:
        yield Tie((), 0, place[None], by[place][None], float(size[place]))


def _scales(x: Tensor, scale: Tensor, reach: Tensor, whole: Tensor, form: Narrow) -> Iterator[Tie]:
    """Scales of blocks [b, w]: another one as soon as a number is beyond a border, or none is any more."""
    (low, high), width = form.borders(scale), x.shape[1]
    largest, which = x.abs().max(1, keepdim=True)
    above = (high - largest <= reach.gather(1, which)) & (largest > form.least)
    over = x.abs() > low * (1 - BEYOND)
    far = over & (x.abs() - low > reach)
    below = over.any(1, keepdim=True) & ~far.any(1, keepdim=True) & (low > form.least)
    alone = form._replace(block=0)
    for mask, edges in ((above, high * (1 + BEYOND)), (below, low * (1 - BEYOND))):
        for block in mask[:, 0].nonzero()[:, 0].tolist():
            row, edge = x[block], float(edges[block])
            places = which[block] if mask is above else over[block].nonzero()[:, 0]
            moves = row[places].sign() * (edge - row[places].abs())
            other = row.index_add(0, places, moves)
            size = float((alone.rounded(other) - alone.rounded(row)).norm() / whole[block])
            yield Tie((), 0, block * width + places, moves, size)


def _chosen(exact: Tensor, reach: Tensor, count: int, most: int) -> Iterator[Tie]:
    """Choices by scores [n, e]: those that were passed over by little, and those chosen by little."""
    for row, (scores, reaches) in enumerate(zip(exact, reach, strict=True)):
        able = int((~scores.isneginf()).sum())
        if able <= count:
            continue
        order = scores.argsort(descending=True, stable=True)
        last, following = order[count - 1], order[count]
        for places, edge, sign in ((order[count:able], last, 1.0), (order[:count], following, -1.0)):
            gap = (scores[edge] - scores[places]).abs()
            near = gap <= torch.maximum(reaches[places], reaches[edge]) * math.sqrt(2)
            beyond = scores[edge].abs() * 2.0**-40 + 2.0**-500
            for place, move in zip(places[near][:most], gap[near][:most], strict=True):
                yield Tie((), 0, row * exact.shape[1] + place[None], sign * (move + beyond)[None], 1.0)


# --- a row


class Again(NamedTuple):
    """What became of a row that was looked at again."""

    excess: float  # its distance over its bound
    exact: Tensor  # [1, ...] that it is nearest to
    moved: Tensor  # [r, 1, ...] replicas of that
    ties: int  # that were taken the other way
    work: int  # rows of sites that were computed for it, those of each replica
    whole: bool  # whether all was tried that there is


def look(
    values: Callable[[Noise], Tensor],
    excess: Callable[[Tensor, Tensor], float],
    position: int,
    dtype: torch.dtype,
    work: int,
    enough: float = 1.0,
) -> Again:
    """Look at a row again.

    Parameters
    ----------
    values
        What the row is held against, [1 + r, 1, ...], by a noise of r replicas.
    excess
        Of the exact numbers [1, ...] and replicas [r, 1, ...]: distance over bound.
    position
        Of the row.
    dtype
        Of the run.
    work
        Rows of sites that may be computed for it, those of each replica.
    enough
        An excess at which nothing more is tried.

    """
    first = Noted(dtype, REPLICAS, 0)
    runs, seen = [values(first)], first.seen
    at_once = SIGNS if first.work.most <= FEW_ROWS else REPLICAS
    spent, of_run = first.work.rows * (1 + REPLICAS), first.work.rows * (1 + at_once)
    for number in range(REPLICAS, REPLICAS + MANY * at_once, at_once):
        if spent + of_run > work:
            break
        noise = Noted(dtype, at_once, number)
        runs.append(values(noise))
        seen, spent = noise.seen, spent + of_run
    whole, exact = len(runs) > MANY, runs[0][:1]
    off = (torch.cat([run[1:] for run in runs]) - exact).nan_to_num(0, 0, 0)  # of -inf that cannot be chosen
    best = Again(excess(exact[0], exact + off), exact[0], exact + off, 0, spent, whole)
    ties, taken = near_ties(seen, position, SIGNS), list[Tie]()
    while whole and best.excess > enough and ties and len(taken) < TOGETHER:
        found: list[Again] = []
        for low in range(0, len(ties), at_once):
            if not (whole := spent + of_run <= work):
                break
            ways = [[*taken, tie] for tie in ties[low : low + at_once]]
            tried, spent = values(Otherwise(dtype, ways))[1:], spent + of_run
            if len(tried) < len(ways):  # nothing of it reaches the site
                tried = exact.expand(len(ways), *exact.shape[1:])
            found += [Again(excess(one, one + off), one, one + off, len(taken) + 1, 0, whole=True) for one in tried]
        number = min(range(len(found)), key=lambda n: found[n].excess, default=-1)
        if number < 0 or not found[number].excess <= LEAST_GAIN * best.excess:
            break
        best = found[number]
        taken.append(ties.pop(number))
    return best._replace(work=spent, whole=whole)
