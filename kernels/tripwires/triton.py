"""What must never happen, measured many at once: in a cell each, or two, that the host reads after the call.

A cell holds NOTHING, or which row was the first at fault and what was measured there, see `told`. Of one launch a
column of programs measures something else.

The equations are those of `model.observe.invariants`, whose tokens are rows here. Sizes are compared as bits, where NaN
is the largest of all.

Triton compiles anew for other constants, and for integers that are 1, or multiples of 16, where they were none. So what
a model fixes is a constant, and what changes from call to call is given as fp32, which holds it exactly: below 2^24.
"""

import struct
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
SHARE: Final = 16  # tokens of a program that looks at little of each
ALIGNED: Final = 16  # bytes, by which Triton tells pointers apart
WORDS: Final = 1024  # of a program of a checksum
NOTHING: Final = (1 << 63) - 1  # in a cell: no row is at fault


@triton.jit
def _leave(cell, row, value, bad, NOTHING: tl.constexpr):
    """Leave the first of rows [n] that is at fault, above the bits of what was measured of it, fp32."""
    bits = value.to(tl.int32, bitcast=True).to(tl.int64) & tl.full([1], 0xFFFFFFFF, tl.int64)
    none = tl.full([1], NOTHING, tl.int64)
    first = tl.min(tl.where(bad, (row.to(tl.int64) << 32) | bits, none), 0) + tl.zeros([1], tl.int64)
    tl.atomic_min(cell + tl.zeros([1], tl.int32), first, first != none)


@triton.jit
def _whole(x):
    return (tl.full([], 0, tl.float32) + x).to(tl.int32)  # to the interpreter what a tuple holds is no tensor


@triton.jit
def _columns(cell, part, given, STREAMS: tl.constexpr, BLOCK: tl.constexpr, SHARE: tl.constexpr, NOTHING: tl.constexpr):
    comb, tokens, limit, skip = given
    tokens, skip = _whole(tokens), _whole(skip)
    token = part * SHARE + tl.arange(0, SHARE)
    row, column = tl.arange(0, BLOCK)[None, :, None], tl.arange(0, BLOCK)[None, None, :]
    inside = (token[:, None, None] < tokens) & (row < STREAMS) & (column < STREAMS)
    x = tl.load(comb + token[:, None, None] * STREAMS * STREAMS + row * STREAMS + column, inside, 0.0)
    off = tl.where(tl.arange(0, BLOCK)[None, :] < STREAMS, tl.sum(x, 1) - 1.0, 0.0)
    largest = tl.max(off.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
    _leave(cell, skip + token, largest, (token < tokens) & ~(largest <= limit), NOTHING)


@triton.jit
def _routing(
    cell, part, given, K: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr, SHARE: tl.constexpr,
    NOTHING: tl.constexpr,
):  # fmt: skip
    ids, weights, tokens, scale, limit, skip = given
    tokens, skip = _whole(tokens), _whole(skip)
    token, slot = part * SHARE + tl.arange(0, SHARE), tl.arange(0, SLOTS)
    place, inside = token[:, None] * K + slot[None, :], (token[:, None] < tokens) & (slot[None, :] < K)
    own = tl.load(ids + place, inside, -1)
    again = (own[:, :, None] == own[:, None, :]) & (slot[None, None, :] < slot[None, :, None])  # in an earlier slot
    once = (own >= 0) & (own < EXPERTS) & (tl.sum(again.to(tl.int32), 2) == 0)
    count = tl.sum(once.to(tl.int32), 1).to(tl.float32)
    _leave(cell, skip + token, count, (token < tokens) & (count != K), NOTHING)
    off = tl.sum(tl.load(weights + place, inside, 0.0), 1) - scale
    size = (off.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    _leave(cell + 1, skip + token, size, (token < tokens) & ~(size <= limit), NOTHING)


@triton.jit
def _selection(cell, part, given, RATIO: tl.constexpr, WIDTH: tl.constexpr, NOTHING: tl.constexpr):
    selected, first, tokens, gone, entries, width = given
    tokens, gone, entries, width = _whole(tokens), _whole(gone), _whole(entries), _whole(width)
    place = tl.arange(0, WIDTH)
    inside = (place < width) & (part + tl.zeros_like(place) < tokens)
    seen = tl.minimum((tl.load(first) + part + 1) // RATIO - gone, entries).to(tl.int32)
    row = selected + part.to(tl.int64) * width
    own = tl.load(row + place, inside, 0)
    before = tl.load(row + place - 1, inside & (place > 0), -1)
    # Behind the selected entries stand numbers that go on beyond them: all rise, or a rule is broken.
    chain = tl.where(place < seen, own, tl.where(own == -1, seen + place, -2))
    last = tl.where(place <= seen, before, tl.where(before == -1, seen + place - 1, -2))
    last = tl.where(place > 0, last, -1)
    token = part + tl.zeros([1], tl.int32)
    broken = tl.sum((inside & (chain <= last)).to(tl.int32), 0).to(tl.float32) + tl.zeros([1], tl.float32)
    _leave(cell, token, broken, broken > 0, NOTHING)
    unfinished = inside & (own >= seen) & (place < seen)
    count = tl.sum(unfinished.to(tl.int32), 0).to(tl.float32) + tl.zeros([1], tl.float32)
    _leave(cell + 1, token, count, count > 0, NOTHING)


@triton.jit
def _endless(x):
    """Where fp32 numbers are NaN or infinite."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000) == 0x7F800000


@triton.jit
def _stored(
    cell, part, given, RATIO: tl.constexpr, width: tl.constexpr, rope_width: tl.constexpr, scale_width: tl.constexpr,
    FORM: tl.constexpr, BLOCK: tl.constexpr, UPCAST: tl.constexpr, NOTHING: tl.constexpr,
):  # fmt: skip
    new, values, rope, scales, first, tokens, skip, count, rows = given
    tokens, skip, count, rows = _whole(tokens), _whole(skip), _whole(count), _whole(rows)
    column = tl.arange(0, BLOCK)
    position = tl.load(first)
    closed = (position + tokens) // RATIO - position // RATIO - skip + tl.zeros_like(column)  # rows that end here
    number = part + tl.zeros_like(column)  # the interpreter makes int32 of a scalar's comparison
    inside = (column < width) & (number < count) & (number < closed)  # else a row holds anything
    row = tl.minimum(position // RATIO + skip + part, rows - 1)
    given = tl.load(new + part.to(tl.int64) * width + column, inside, 0.0)
    total = tl.sum(given.to(tl.float32), 0) + tl.zeros([1], tl.float32)
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
    count = tl.sum(differs.to(tl.int32), 0).to(tl.float32) + tl.zeros([1], tl.float32)
    number = skip + part + tl.zeros([1], tl.int32)
    _leave(cell, number, total, _endless(total), NOTHING)
    _leave(cell + 1, number, count, count > 0, NOTHING)


@triton.jit
def _finite(
    cell, part, given, width: tl.constexpr, stride: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    UPCAST: tl.constexpr, NOTHING: tl.constexpr,
):  # fmt: skip
    x, rows, skip = given
    rows, skip = _whole(rows), _whole(skip)
    spans: tl.constexpr = (width + SPAN - 1) // SPAN
    row, start = part // spans, part % spans * SPAN
    stop = tl.where(row < rows, tl.minimum(width, start + SPAN), start)
    own = x + row.to(tl.int64) * stride
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(start, stop, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        total += widened(tl.load(own + place, place < stop, 0.0), UPCAST)
    found = tl.sum(total, 0) + tl.zeros([1], tl.float32)
    _leave(cell, skip + row + tl.zeros([1], tl.int32), found, _endless(found), NOTHING)


@triton.jit
def _within(cell, part, given, SHARE: tl.constexpr, NOTHING: tl.constexpr):
    found, allowed, rows, skip = given
    rows, skip = _whole(rows), _whole(skip)
    row = part * SHARE + tl.arange(0, SHARE)
    own = tl.load(found + row, row < rows, 0.0)
    _leave(cell, skip + row, own, (row < rows) & ~(own <= tl.load(allowed + row, row < rows, 0.0)), NOTHING)


@triton.jit(do_not_specialize=["first"])
def _measure(cells, first, given, HOW: tl.constexpr, UPCAST: tl.constexpr, NOTHING: tl.constexpr):
    """HOW: what each column of programs measures, behind how many cells, and constants of that."""
    part, column = tl.program_id(0), tl.program_id(1)
    for number in tl.static_range(len(HOW)):
        if column == number:
            own: tl.constexpr = constant_of(HOW, number)
            cell = cells + first + own[1]
            if own[0] == "columns":
                _columns(cell, part, given[number], own[2], own[3], own[4], NOTHING)
            elif own[0] == "routing":
                _routing(cell, part, given[number], own[2], own[3], own[4], own[5], NOTHING)
            elif own[0] == "selection":
                _selection(cell, part, given[number], own[2], own[3], NOTHING)
            elif own[0] == "stored":
                _stored(
                    cell, part, given[number], own[2], own[3], own[4], own[5], own[6], own[7], UPCAST, NOTHING
                )  # fmt: skip
            elif own[0] == "finite":
                _finite(cell, part, given[number], own[2], own[3], own[4], own[5], UPCAST, NOTHING)
            elif own[0] == "within":
                _within(cell, part, given[number], own[2], NOTHING)


class Measure(NamedTuple):
    """What a column of programs measures."""

    what: str  # the kernel's name for it
    cells: int  # that it may fill
    programs: int
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


def columns(comb: Tensor, limit: float, skip: int = 0) -> Measure:
    """Tokens of which a column sum of Sinkhorn's comb [t, s, s] float32 is off 1 by more than `limit`: by how much.

    Tokens count from `skip`, here and below.
    """
    t, streams, _ = comb.shape
    how = streams, triton.next_power_of_2(streams), SHARE
    return Measure("columns", 1, triton.cdiv(t, SHARE), (comb.contiguous(), float(t), float(limit), float(skip)), how)


def routing(ids: Tensor, weights: Tensor, scale: float, experts: int, limit: float, skip: int = 0) -> Measure:
    """Tokens of ids [t, k] int64 that are not all known and distinct: how many of a token are.

    And by how much weights [t, k] float32 of a token are off `scale`, where that is more than `limit`.
    """
    t, k = ids.shape
    given = ids.contiguous(), weights.contiguous(), float(t), float(scale), float(limit), float(skip)
    return Measure("routing", 2, triton.cdiv(t, SHARE), given, (k, experts, triton.next_power_of_2(k), SHARE))


def selection(selected: Tensor, first: Tensor, ratio: int, entries: int, most: int, gone: int = 0) -> Measure:
    """Of a selection [t, k] int32 of tokens from position `first` [] on: how many break the order, or are unfinished.

    There is room for `entries` entries, those before the first `gone` are not among them; k is `most` at most.
    """
    t, width = selected.shape
    given = selected.contiguous(), first, float(t), float(gone), float(entries), float(width)
    return Measure("selection", 2, t, given, (ratio, triton.next_power_of_2(most)))


def stored(new: Tensor, rows: Rows, first: Tensor, tokens: int, ratio: int, skip: int = 0) -> Measure:
    """Of new rows [n, d] the sums that are not finite, and how many numbers come back otherwise.

    Those of windows that `tokens` from position `first` [] on complete, behind the first `skip` of these; a row of
    another window holds anything. Rows are counted from the first that is completed.
    """
    values, rope, scales, form = planes(rows)
    n, width = rows.shape
    given = new.contiguous(), values, rope, scales, first, float(tokens), float(skip), float(len(new)), float(n)
    how = ratio, width, rope.shape[-1], scales.shape[-1], form, triton.next_power_of_2(width)
    return Measure("stored", 2, len(new), given, how)


def finite(x: Tensor, skip: int = 0) -> Measure:
    """Rows of `x` [t, ...] of which a sum, of SPAN numbers or less, is not finite: that sum. Rows count from `skip`."""
    x = x.flatten(1) if x.ndim > 1 else x[:, None]
    if x.stride(1) != 1:
        x = x.contiguous()
    elif x.data_ptr() % ALIGNED:  # a part of something else: where it begins depends on the tokens
        x = x.clone(memory_format=torch.contiguous_format)
    t, n = x.shape
    block = min(2048, triton.next_power_of_2(min(n, SPAN)))
    how = n, x.stride(0), block, SPAN
    return Measure("finite", 1, t * triton.cdiv(n, SPAN), (x, float(t), float(skip)), how)


def within(found: Tensor, allowed: Tensor, skip: int = 0) -> Measure:
    """Rows of which `found` [n] float32 is not at most `allowed` [n] float32: what was found."""
    given = found.contiguous(), allowed.contiguous(), float(len(found)), float(skip)
    return Measure("within", 1, triton.cdiv(len(found), SHARE), given, (SHARE,))


def measure(measures: list[Measure], cells: Tensor, first: int) -> None:
    """Run some of them in one launch, and fill `cells` [n] int64 from `first` on, in their order."""
    how, before = [], 0
    for one in measures:
        how.append((one.what, before, *one.how))
        before += one.cells
    _measure[max(1, *(one.programs for one in measures)), len(measures)](
        cells, first, tuple(one.given for one in measures), HOW=tuple(how), UPCAST=UPCAST, NOTHING=NOTHING,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def told(cell: int) -> tuple[int, float] | None:
    """Which row was the first at fault, and what was measured of it; None: none was."""
    if cell == NOTHING:
        return None
    (value,) = struct.unpack("f", struct.pack("I", cell & 0xFFFFFFFF))
    return cell >> 32, value
