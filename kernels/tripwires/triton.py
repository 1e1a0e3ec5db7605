"""What must never happen, measured many at once: a number each, or two, in cells that the host reads after the call.

Of one launch every program measures something else.

The equations are those of `model.observe.invariants`; `model.observe.deferred` says what a cell may hold. Sizes are
compared as bits, where NaN is the largest of all.
"""

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fathom.kernels.compress.triton import planes
from fathom.kernels.formats.stored import Rows
from fathom.kernels.formats.triton import e2m1, e4m3, e8m0
from fathom.kernels.formats.triton_rounding import UPCAST, rounded, widened
from fathom.kernels.linear.triton import constant_of
from fathom.kernels.tripwires.reference import ADDED, FACTOR, mark, words

SPAN: Final = 1 << 14  # numbers of a sum, at most: a program adds them up alone
WORDS: Final = 1024  # of a program of a checksum


@triton.jit
def _largest(x):
    """Bits of the largest size of fp32 numbers [n]."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)


@triton.jit
def _columns(cell, given, STREAMS: tl.constexpr, BLOCK: tl.constexpr):
    comb, tokens = given
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK)[None, :]
    inside, found = (row < STREAMS) & (column < STREAMS), tl.full([], 0, tl.int32)
    for token in range(tokens):
        x = tl.load(comb + token * STREAMS * STREAMS + row * STREAMS + column, inside, 0.0)
        found = tl.maximum(found, _largest(tl.where(tl.arange(0, BLOCK) < STREAMS, tl.sum(x, 0) - 1.0, 0.0)))
    tl.store(cell, found.to(tl.float32, bitcast=True))


@triton.jit
def _routing(cell, given, SLOTS: tl.constexpr):
    ids, weights, tokens, k, experts, scale = given
    slot = tl.arange(0, SLOTS)
    count, found = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for token in range(tokens):
        own = tl.load(ids + token * k + slot, slot < k, -1)
        again = (own[:, None] == own[None, :]) & (slot[None, :] < slot[:, None])  # the same in an earlier slot
        once = (own >= 0) & (own < experts) & (tl.sum(again.to(tl.int32), 1) == 0)
        count += tl.sum(once.to(tl.int32), 0)
        total = tl.sum(tl.load(weights + token * k + slot, slot < k, 0.0), 0)
        found = tl.maximum(found, _largest(total - scale + tl.zeros([1], tl.float32)))
    tl.store(cell, count.to(tl.float32))
    tl.store(cell + 1, found.to(tl.float32, bitcast=True))


@triton.jit
def _selection(cell, given, WIDTH: tl.constexpr):
    selected, first, ratio, entries, width = given
    place = tl.arange(0, WIDTH)
    inside = place < width
    seen = tl.minimum((tl.load(first) + 1) // ratio, entries).to(tl.int32)
    own = tl.load(selected + place, inside, 0)
    before = tl.load(selected + place - 1, inside & (place > 0), -1)
    # Behind the selected entries stand numbers that go on beyond them: all rise, or a rule is broken.
    chain = tl.where(place < seen, own, tl.where(own == -1, seen + place, -2))
    last = tl.where(place <= seen, before, tl.where(before == -1, seen + place - 1, -2))
    last = tl.where(place > 0, last, -1)
    tl.store(cell, tl.sum((inside & (chain <= last)).to(tl.int32), 0).to(tl.float32))
    unfinished = inside & (own >= seen) & (place < seen)
    tl.store(cell + 1, tl.sum(unfinished.to(tl.int32), 0).to(tl.float32))


@triton.jit
def _stored(cell, given, FORM: tl.constexpr, BLOCK: tl.constexpr, UPCAST: tl.constexpr):
    new, values, rope, scales, first, ratio, rows, width, rope_width, scale_width = given
    column = tl.arange(0, BLOCK)
    position = tl.load(first)
    left = (position + 1) % ratio + tl.zeros_like(column)  # the interpreter makes int32 of a scalar's comparison
    inside = (column < width) & (left == 0)  # else no window closes, and the row holds anything
    row = tl.minimum(position // ratio, rows - 1)
    given = tl.load(new + column, inside, 0.0)
    total = tl.sum(given.to(tl.float32), 0)
    if FORM == 0:
        back = tl.load(values + row * width + column, inside, 0.0)
    elif FORM == 1:
        nope = width - rope_width
        code = e4m3(tl.load(values + row * nope + column, inside & (column < nope), 0), tl.float32, UPCAST)
        power = e8m0(tl.load(scales + row * scale_width + column // 64, inside & (column < nope), 127))
        last = tl.load(rope + row * rope_width + column - nope, inside & (column >= nope), 0.0).to(tl.float32)
        back = tl.where(column < nope, code * power, last)
    elif FORM == 2:
        back = e4m3(tl.load(values + row * width + column, inside, 0), tl.float32, UPCAST) * tl.load(scales + row)
    else:
        byte = tl.load(values + row * (width // 2) + column // 2, inside, 0).to(tl.uint32)
        power = e8m0(tl.load(scales + row * scale_width + column // 32, inside, 127))
        back = e2m1(tl.where(column % 2 == 0, byte & 15, byte >> 4)) * power
    KEPT: tl.constexpr = values.dtype.element_ty if FORM == 0 else tl.bfloat16
    back, given = rounded(back.to(tl.float32), KEPT, UPCAST), rounded(given.to(tl.float32), KEPT, UPCAST)
    WHOLE: tl.constexpr = tl.int32 if tl.float32 == KEPT else tl.int16  # bits: zeros have signs
    differs = inside & (back.to(WHOLE, bitcast=True) != given.to(WHOLE, bitcast=True))
    tl.store(cell, total)
    tl.store(cell + 1, tl.sum(differs.to(tl.int32), 0).to(tl.float32))


@triton.jit
def _finite(cell, given, BLOCK: tl.constexpr, UPCAST: tl.constexpr):
    x, start, stop = given
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(start, stop, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        total += widened(tl.load(x + place, place < stop, 0.0), UPCAST)
    tl.store(cell, tl.sum(total, 0))


@triton.jit(do_not_specialize=["first"])
def _measure(cells, first, given, HOW: tl.constexpr, UPCAST: tl.constexpr):
    """HOW: what each program measures, behind how many cells, and constants of that."""
    program = tl.program_id(0)
    for number in tl.static_range(len(HOW)):
        if program == number:
            own: tl.constexpr = constant_of(HOW, number)
            cell = cells + first + own[1]
            if own[0] == "columns":
                _columns(cell, given[number], own[2], own[3])
            elif own[0] == "routing":
                _routing(cell, given[number], own[2])
            elif own[0] == "selection":
                _selection(cell, given[number], own[2])
            elif own[0] == "stored":
                _stored(cell, given[number], own[2], own[3], UPCAST)
            elif own[0] == "finite":
                _finite(cell, given[number], own[2], UPCAST)


class Measure(NamedTuple):
    """What a program measures."""

    what: str  # the kernel's name for it
    cells: int  # that it fills
    given: tuple[Any, ...]  # tensors, which must stay as they are until it runs, and sizes
    how: tuple[int, ...]  # constants


@triton.jit(do_not_specialize=["n", "first", "cell"])
def _checksum(given, sums, cell, n, first, ADDED: tl.constexpr, FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    """Add up this program's words; sums of integers that wrap around do not depend on who comes first."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(given + place, place < n, 0).to(tl.int64) + tl.full([BLOCK], ADDED, tl.int64)
    total = tl.sum(tl.where(place < n, word * ((place + 1) * tl.full([BLOCK], FACTOR, tl.int64) | 1), 0), 0)
    tl.atomic_add(sums + cell, total + tl.where(tl.program_id(0) == 0, first, 0))


def checksums(tensors: list[Tensor]) -> Tensor:
    """A launch for each: `kernels.tripwires.reference.checksums`."""
    sums = torch.zeros(len(tensors), dtype=torch.int64, device=tensors[0].device)
    for cell, x in enumerate(tensors):
        given = words(x)
        _checksum[(max(1, triton.cdiv(len(given), WORDS)),)](
            given, sums, cell, len(given), mark(x), ADDED=ADDED, FACTOR=FACTOR, BLOCK=WORDS, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return sums


def columns(comb: Tensor) -> Measure:
    """By how much a column sum of Sinkhorn's comb [t, s, s] float32 is off 1 at most."""
    t, streams, _ = comb.shape
    return Measure("columns", 1, (comb.contiguous(), t), (streams, triton.next_power_of_2(streams)))


def routing(ids: Tensor, weights: Tensor, scale: float, experts: int) -> Measure:
    """How many of ids [t, k] int64 are known experts and distinct; how far a token's weights are off `scale`."""
    t, k = ids.shape
    given = ids.contiguous(), weights.contiguous(), t, k, experts, float(scale)
    return Measure("routing", 2, given, (triton.next_power_of_2(k),))


def selection(selected: Tensor, first: Tensor, ratio: int, entries: int) -> Measure:
    """Of a selection [1, k] int32 of the token at `first`: how many break the order, how many are not finished yet."""
    width = selected.shape[1]
    return Measure(
        "selection", 2, (selected.contiguous(), first, ratio, entries, width), (triton.next_power_of_2(max(1, width)),)
    )


def stored(new: Tensor, rows: Rows, first: Tensor, ratio: int) -> Measure:
    """Where `first` closes a window: the sum of the new row [1, d], and how many of it come back otherwise."""
    values, rope, scales, form = planes(rows)
    n, width = rows.shape
    given = new.contiguous(), values, rope, scales, first, ratio, n, width, rope.shape[-1], scales.shape[-1]
    return Measure("stored", 2, given, (form, triton.next_power_of_2(width)))


def finite(x: Tensor) -> list[Measure]:
    """Sums of `x`, of any shape, SPAN numbers each, which are finite where its numbers are."""
    x, n = x.contiguous(), x.numel()
    block = min(2048, triton.next_power_of_2(min(n, SPAN)))
    spans = [(start, min(start + SPAN, n)) for start in range(0, n, SPAN)]
    return [Measure("finite", 1, (x, *span), (block,)) for span in spans]


def measure(measures: list[Measure], cells: Tensor, first: int) -> None:
    """Run some of them in one launch, and fill `cells` [n] float32 from `first` on, in their order."""
    how, before = [], 0
    for one in measures:
        how.append((one.what, before, *one.how))
        before += one.cells
    _measure[len(measures),](
        cells, first, tuple(one.given for one in measures), HOW=tuple(how), UPCAST=UPCAST, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
