"""The routed experts in five launches, however many experts there are and however tokens fall on them.

Pairs of a token and one of its slots are sorted by expert; a block of pairs of one expert is multiplied by that
expert's matrices. How many pairs each expert gets stays on the device: the grid has as many blocks as the worst case
needs, a program finds its expert from the counts, and those that find none return at once. A slot's output is kept for
itself, so that the sum over a token's slots runs in ascending order of experts, whatever finishes first.

Up to FEW tokens take two launches: hardly two of their pairs have one expert, so each pair has programs of its own, in
which whole rows are multiplied (`kernels.linear.weight_rows`), and where some have they run side by side and the cache
reads twice. Nothing is sorted, inputs are rounded where they are multiplied, and the last program of some rows of a
token adds up its slots.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fathom.kernels.experts.reference import FEW, Experts, ExpertsDown, ExpertsUp
from fathom.kernels.formats.groups import LINEAR_GROUP
from fathom.kernels.formats.stored import Apart, Fp4, Fp8, Stack, Weight, members
from fathom.kernels.formats.triton import E4M3_LARGEST, E4M3_SMALLEST, encoded, simulated
from fathom.kernels.formats.triton_rounding import UPCAST, rounded, widened
from fathom.kernels.linear.reference import rounds
from fathom.kernels.linear.triton import linear
from fathom.kernels.linear.weight_rows import (
    UNROLLED,
    all_words,
    input_words,
    lanes,
    of_lanes,
    row_products,
    rows_at_once,
    whole_words,
    with_words,
)
from fathom.kernels.linear.weight_tiles import (
    COUNTERS,
    Planes,
    arrived_last,
    counters,
    input_powers,
    inputs,
    multiplied,
    narrow,
    operand,
    planes,
)
from fathom.kernels.quantise.triton import fp8_codes, simulate_fp8
from fathom.kernels.swiglu.triton import activation, swiglu
from fathom.kernels.target import blackwell

ROWS = 128  # of a matrix per program: one block of `deployed` rounding, whose largest number must be known
CHUNK = 1024  # pairs that are counted and sorted at once
UP_ROWS, DOWN_ROWS = 4, 8  # of a program of few tokens, at most: of two matrices, and of one
_APART = Experts(linear, swiglu, simulate_fp8)  # matrices of several forms, which no launch takes together
_APART_UP, _APART_DOWN = ExpertsUp(linear, swiglu, simulate_fp8), ExpertsDown(linear, swiglu, simulate_fp8)


@triton.jit(do_not_specialize=["pairs"])
def _sort(ids, order, starts, counts, pairs, CHUNK: tl.constexpr):
    """Pairs of this program's expert, ascending, behind those of the experts before it."""
    expert = tl.program_id(0)
    before, own = 0, 0
    for chunk in range(0, pairs, CHUNK):
        pair = chunk + tl.arange(0, CHUNK)
        found = tl.load(ids + pair, pair < pairs, -1)
        before += tl.sum(((found >= 0) & (found < expert)).to(tl.int32))
        own += tl.sum((found == expert).to(tl.int32))
    tl.store(starts + expert, before)
    tl.store(counts + expert, own)
    if own > 0:
        for chunk in range(0, pairs, CHUNK):
            pair = chunk + tl.arange(0, CHUNK)
            found = tl.load(ids + pair, pair < pairs, -1) == expert
            tl.store(order + before + tl.cumsum(found.to(tl.int32)) - 1, pair, found)
            before += tl.sum(found.to(tl.int32))


@triton.jit
def _block(block, starts, counts, experts, EXPERTS: tl.constexpr, TOKENS: tl.constexpr):
    """Expert of a block of pairs, the place of its first pair, and how many it has: expert >= experts if none.

    A block has TOKENS pairs, but that an expert's last has what is left.
    """
    number = tl.arange(0, EXPERTS)
    blocks = (tl.load(counts + number, number < experts, 0) + TOKENS - 1) // TOKENS
    past = tl.cumsum(blocks) <= block
    expert = tl.sum(past.to(tl.int32))
    before = (block - tl.sum(tl.where(past, blocks, 0))) * TOKENS
    held = expert < experts
    start, count = tl.load(starts + expert, held, 0), tl.load(counts + expert, held, 0)
    return expert, start + before, tl.minimum(count - before, TOKENS)


@triton.jit
def _located(block, order, starts, counts, experts, EXPERTS: tl.constexpr, TOKENS: tl.constexpr):
    """Expert of a block of pairs, and its own pairs: expert >= experts where there is none."""
    expert, first, count = _block(block, starts, counts, experts, EXPERTS, TOKENS)
    pair, inside = _pairs(order, first, count, TOKENS)
    return expert, pair, inside


@triton.jit
def _pairs(order, first, count, TOKENS: tl.constexpr):
    """TOKENS pairs of a block, of which it has `count`, and which of them it has."""
    place = tl.arange(0, TOKENS)
    return tl.load(order + first + place, place < count, 0), place < count


@triton.jit
def _activated(gate, up, limit, weight, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """Weighted SwiGLU of products that are rounded first, fp32."""
    gate, up = widened(rounded(gate, DTYPE, UPCAST), UPCAST), widened(rounded(up, DTYPE, UPCAST), UPCAST)
    return activation(gate, up, limit) * weight


@triton.jit(do_not_specialize=["slots"])
def _gate_up(
    x, powers, weights, order, starts, counts, data1, scale1, global1, data3, scale3, global3, out, out_powers,
    slots, experts, rows, columns, width, scale_width, jump, stride, scale_jump, scale_stride, limit,
    FORM: tl.constexpr, ROUND: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr, OPERAND: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    expert, pair, inside = _located(tl.program_id(1), order, starts, counts, experts, EXPERTS, TOKENS)
    if expert >= experts:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there, wide = row < rows, expert.to(tl.int64)
    token = (pair // slots).to(tl.int64) * columns
    data1, data3 = data1 + wide * jump, data3 + wide * jump
    scale1, scale3 = scale1 + wide * scale_jump, scale3 + wide * scale_jump
    gate, up = tl.zeros([ROWS, TOKENS], tl.float32), tl.zeros([ROWS, TOKENS], tl.float32)
    for step in range(tl.cdiv(columns, BLOCK)):
        part = inputs(x, token, inside, columns, step, BLOCK, OPERAND)
        power = input_powers(powers, token, inside, columns, step, BLOCK) if part.dtype == tl.uint8 else None
        gate = multiplied(
            gate, part, power, data1, scale1, row, there, width, scale_width, stride, scale_stride, step,
            FORM, BLOCK, OPERAND, UPCAST,
        )  # fmt: skip
        if power is not None:  # of scales that two products share Triton 3.6 makes no code for Blackwell
            power |= (expert >> 31).to(tl.uint8)  # the same scales, which the compiler cannot know
        up = multiplied(
            up, part, power, data3, scale3, row, there, width, scale_width, stride, scale_stride, step,
            FORM, BLOCK, OPERAND, UPCAST,
        )  # fmt: skip
    at, mask = pair.to(tl.int64)[None, :] * rows + row[:, None], there[:, None] & inside[None, :]
    if FORM == "nvfp4":
        gate *= tl.load(global1 + expert)
        up *= tl.load(global3 + expert)
    DTYPE: tl.constexpr = tl.bfloat16 if out.dtype.element_ty == tl.uint8 else out.dtype.element_ty
    inner = _activated(gate, up, limit, tl.load(weights + pair, inside, 0.0)[None, :], DTYPE, UPCAST)
    if ROUND:
        inner = widened(rounded(inner, DTYPE, UPCAST), UPCAST)
    if out.dtype.element_ty == tl.uint8:  # ROWS is the group of 128
        codes, exponent = encoded(inner, 0, E4M3_SMALLEST, E4M3_LARGEST, 3, 7, 7)
        tl.store(out + at, codes, mask)
        target = pair.to(tl.int64)[None, :] * (rows // 128) + tl.program_id(0)
        tl.store(out_powers + target, exponent, inside[None, :])
    else:
        if ROUND:
            inner = simulated(inner, 0, E4M3_SMALLEST, E4M3_LARGEST, 3, 7)
        tl.store(out + at, rounded(inner, DTYPE, UPCAST), mask)


@triton.jit
def _down(
    x, powers, order, starts, counts, data, scale, global_scale, out,
    experts, rows, columns, width, scale_width, jump, stride, scale_jump, scale_stride,
    FORM: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    OPERAND: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    expert, pair, inside = _located(tl.program_id(1), order, starts, counts, experts, EXPERTS, TOKENS)
    if expert >= experts:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there, wide = row < rows, expert.to(tl.int64)
    data, scale = data + wide * jump, scale + wide * scale_jump
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    pair = pair.to(tl.int64)
    start = pair * columns
    for step in range(tl.cdiv(columns, BLOCK)):
        part = inputs(x, start, inside, columns, step, BLOCK, OPERAND)
        power = input_powers(powers, start, inside, columns, step, BLOCK) if part.dtype == tl.uint8 else None
        total = multiplied(
            total, part, power, data, scale, row, there, width, scale_width, stride, scale_stride, step,
            FORM, BLOCK, OPERAND, UPCAST,
        )  # fmt: skip
    if FORM == "nvfp4":
        total *= tl.load(global_scale + expert)
    at, mask = pair[None, :] * rows + row[:, None], there[:, None] & inside[None, :]
    tl.store(out + at, rounded(total, out.dtype.element_ty, UPCAST), mask)


@triton.jit
def _expert_of(ids, pair, experts):
    """Expert of a pair, and whether there is one; where there is none, the first.

    Where outputs are summed a tripwire sees that, and all programs of a token must arrive.
    """
    found = tl.load(ids + pair)
    known = (found >= 0) & (found < experts)
    return tl.where(known, found, 0), known


@triton.jit(do_not_specialize=["slots"])
def _few_up(
    x, ids, weights, data1, scale1, global1, data3, scale3, global3, out,
    slots, experts, rows, columns, width, scale_width, jump, stride, scale_jump, scale_stride, limit,
    SUMMED: tl.constexpr, FORM: tl.constexpr, ROUND: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    STEPS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Rows of what w2 is given, of a pair: programs of the same rows of all pairs lie side by side."""
    pair = tl.program_id(0)
    expert, known = _expert_of(ids, pair, experts)
    if not SUMMED:  # noqa: SIM102 (it is a constant)
        if not known:
            return
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    x += (pair // slots).to(tl.int64) * columns
    data1, data3 = data1 + expert * jump, data3 + expert * jump
    scale1, scale3 = scale1 + expert * scale_jump, scale3 + expert * scale_jump
    gate, up = tl.zeros([1, ROWS, LANES], tl.float32), tl.zeros([1, ROWS, LANES], tl.float32)
    tl.static_assert(STEPS <= UNROLLED, "rows of experts are longer than 16 bytes for each thread, eight times")
    for step in tl.static_range(STEPS):
        own = input_words(x, columns, step, FORM, ROUND, LANES, UPCAST)
        gate = with_words(
            gate, own, data1, scale1, row, there, width, scale_width, stride, scale_stride, step, FORM, LANES, UPCAST
        )
        up = with_words(
            up, own, data3, scale3, row, there, width, scale_width, stride, scale_stride, step, FORM, LANES, UPCAST
        )
    gate, up = of_lanes(gate), of_lanes(up)
    if FORM == "nvfp4":
        gate *= tl.load(global1 + expert)
        up *= tl.load(global3 + expert)
    DTYPE: tl.constexpr = out.dtype.element_ty
    inner = _activated(gate, up, limit, tl.load(weights + pair), DTYPE, UPCAST)
    tl.store(out + pair.to(tl.int64) * rows + row, rounded(inner, DTYPE, UPCAST), there)


@triton.jit(do_not_specialize=["slots"])
def _few_down(
    x, ids, data, scale, global_scale, out, total_out, counters,
    slots, experts, rows, columns, width, scale_width, jump, stride, scale_jump, scale_stride,
    SUMMED: tl.constexpr, FORM: tl.constexpr, ROUND: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
    STEPS: tl.constexpr, SLOTS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Rows of a pair's product; SUMMED, the last of a token's pairs to have them adds them up."""
    pair, tile = tl.program_id(0), tl.program_id(1)
    expert, known = _expert_of(ids, pair, experts)
    if not SUMMED:  # noqa: SIM102 (it is a constant)
        if not known:
            return
    token = pair // slots
    row = tile * ROWS + tl.arange(0, ROWS)
    there, first = row < rows, token.to(tl.int64) * slots
    total = row_products(
        x + pair.to(tl.int64) * columns, columns, data + expert * jump, scale + expert * scale_jump, row, there,
        width, scale_width, stride, scale_stride, FORM, ROUND, ROWS, LANES, STEPS, UPCAST,
    )  # fmt: skip
    if FORM == "nvfp4":
        total *= tl.load(global_scale + expert)
    tl.store(out + pair.to(tl.int64) * rows + row, rounded(total, out.dtype.element_ty, UPCAST), there)
    if SUMMED:  # noqa: SIM102
        if arrived_last(counters, token * tl.num_programs(1) + tile, slots):
            found = _sum_of_slots(out + first * rows, ids + first, slots, row, rows, ROWS, SLOTS)
            tl.store(total_out + token.to(tl.int64) * rows + row, found, there)


@triton.jit
def _sum_of_slots(y, ids, slots, column, columns, BLOCK: tl.constexpr, SLOTS: tl.constexpr):
    """Outputs [slots, columns] of a token's experts, added in ascending order of experts `ids` [slots]: [BLOCK] fp32.

    From L2, where other programs' stores are.
    """
    slot = tl.arange(0, SLOTS)
    held = slot < slots
    expert = tl.load(ids + slot, held, -1)
    earlier = held[None, :] & (expert[None, :] < expert[:, None])
    rank = tl.sum(earlier.to(tl.int32), 1)  # how many of this token's come before
    total = tl.zeros([BLOCK], tl.float32)
    for turn in range(slots):
        own = tl.sum(tl.where(held & (rank == turn), slot, 0)).to(tl.int64)
        inside = column < tl.where(own < slots, columns, 0)  # of slots with the same expert, which a tripwire sees
        found = tl.load(y + own * columns + column, inside, 0.0, cache_modifier=".cg")
        total += found.to(tl.float32)
    return total


@triton.jit
def _sum_slots(y, ids, out, slots, columns, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    y, ids = y + token * slots * columns, ids + token * slots
    total = _sum_of_slots(y, ids, slots, column, columns, BLOCK, SLOTS)
    tl.store(out + token * columns + column, total, column < columns)


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Stack, w3: Stack, w2: Stack, limit: float, *, deployed: bool,
    summed: bool = True, total: int = 0,
) -> Tensor:  # fmt: skip
    """Sum of the experts' weighted outputs: `kernels.experts.reference.Experts`."""
    if isinstance(w1, Apart) or isinstance(w3, Apart) or isinstance(w2, Apart):
        return _APART(x, ids, weights, w1, w3, w2, limit, deployed=deployed, summed=summed, total=total)
    if not ids.numel():
        return _nothing(x, ids, w2, summed=summed)
    if ids.shape[0] <= FEW:
        a = experts_up(x, ids, weights, w1, w3, limit, deployed=deployed, summed=summed)
        return experts_down(a, ids, w2, deployed=deployed, summed=summed)
    check_up(x, ids, weights, w1, w3)
    ids, inner = ids.contiguous(), w1.shape[0]
    pairs, rounds = _sorted(ids, members(w1), total), deployed and isinstance(w2, Fp8 | Fp4)
    assert not rounds or inner % LINEAR_GROUP == 0, f"{inner} columns are no multiple of {LINEAR_GROUP}"
    if rounds and _as_codes(x, w2):  # w2's input is rounded where it is made
        given = _Given(*(x.new_empty(ids.numel(), n, dtype=torch.uint8) for n in (inner, inner // LINEAR_GROUP)))
    else:
        given = _Given(*2 * (x.new_empty(ids.numel(), inner),))
    _up(given, pairs, x, weights, w1, w3, limit, deployed=deployed, rounds=rounds)
    return _outputs(given, pairs, x, ids, w2, summed=summed)


def _nothing(x: Tensor, ids: Tensor, w2: Weight, *, summed: bool) -> Tensor:
    """What `experts` and `experts_down` of no pairs return."""
    if not summed:
        return x.new_empty(*ids.shape, w2.shape[0])
    return torch.zeros(ids.shape[0], w2.shape[0], device=x.device)


def experts_up(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Stack, w3: Stack, limit: float, *, deployed: bool, summed: bool = True
) -> Tensor:
    """What w2 of each of a token's experts is given: `kernels.experts.reference.ExpertsUp`.

    Where it is not `summed` afterwards, ids may be other ranks', here and in `experts_down`, as in `experts`.
    """
    if isinstance(w1, Apart) or isinstance(w3, Apart):
        return _APART_UP(x, ids, weights, w1, w3, limit, deployed=deployed)
    out = x.new_empty(*ids.shape, w1.shape[0])
    check_up(x, ids, weights, w1, w3)
    if not ids.numel():
        return out
    ids = ids.contiguous()
    if (few := _few(ids, w1, w3)) is not None:
        few_of = partial(_few_given, deployed=deployed, summed=summed)
        return few_of(out, x.contiguous(), ids, weights.contiguous(), few, w1, limit)
    _up(_Given(out, out), _sorted(ids, members(w1)), x, weights, w1, w3, limit, deployed=deployed, rounds=False)
    return out


def experts_down(a: Tensor, ids: Tensor, w2: Stack, *, deployed: bool, summed: bool = True) -> Tensor:
    """Sum of the experts' outputs: `kernels.experts.reference.ExpertsDown`."""
    if isinstance(w2, Apart):
        return _APART_DOWN(a, ids, w2, deployed=deployed)
    if not ids.numel():
        return _nothing(a, ids, w2, summed=summed)
    assert a.shape == (*ids.shape, w2.shape[1]), f"given {tuple(a.shape)} for ids {tuple(ids.shape)}, w2 {w2.shape}"
    ids = ids.contiguous()
    if (few := _few(ids, w2)) is not None:
        return _few_outputs(a.contiguous(), ids, few[0], w2, deployed=deployed, summed=summed)
    given = _given(a.flatten(0, 1), w2, deployed=deployed)
    return _outputs(given, _sorted(ids, members(w2)), a, ids, w2, summed=summed)


def check_up(x: Tensor, ids: Tensor, weights: Tensor, w1: Stack, w3: Stack) -> None:
    """Hold what the first half is given together: AssertionError."""
    assert x.shape[1] == w1.shape[1], f"x has {x.shape[1]} columns, w1 {w1.shape[1]}"
    assert w3.shape == w1.shape, f"w1 {w1.shape}, w3 {w3.shape}"
    assert type(w1) is type(w3), f"w1 is {type(w1).__name__}, w3 {type(w3).__name__}"
    assert len(ids) == len(x), f"{len(x)} tokens, ids {tuple(ids.shape)}"
    assert weights.shape == ids.shape, f"ids {tuple(ids.shape)}, weights {tuple(weights.shape)}"


def _few(ids: Tensor, *matrices: Weight) -> list[Planes] | None:
    """Rows of words, where a call has few tokens; None where it has more, or a matrix other rows or very long ones."""
    found = all_words(matrices) if len(ids) <= FEW else None
    return None if found is None or any(lanes(of).steps > UNROLLED.value for of in found) else found


def _few_given(
    out: Tensor, x: Tensor, ids: Tensor, weights: Tensor, matrices: list[Planes], w1: Weight, limit: float,
    *, deployed: bool, summed: bool,
) -> Tensor:  # fmt: skip
    """`experts_up` by whole rows."""
    (one, three), (inner, hidden) = matrices, w1.shape
    assert _layout(one) == _layout(three), "w1 and w3 lie differently"
    at_once = rows_at_once(inner * ids.shape[1], UP_ROWS, lanes(one))
    _few_up[ids.numel(), triton.cdiv(inner, at_once)](
        x, ids, weights, *one[1:], *three[1:], out, ids.shape[1], members(w1), inner, hidden, *_layout(one),
        float(limit), SUMMED=summed, ROWS=at_once, **_few_constants(one, w1, hidden, deployed=deployed),
    )  # fmt: skip
    return out


def _few_outputs(a: Tensor, ids: Tensor, two: Planes, w2: Weight, *, deployed: bool, summed: bool) -> Tensor:
    """`experts_down` by whole rows."""
    (t, slots), (hidden, inner) = ids.shape, w2.shape
    y = a.new_empty(t, slots, hidden)
    out = torch.empty(t, hidden, dtype=torch.float32, device=a.device) if summed else None
    at_once = rows_at_once(hidden * slots, DOWN_ROWS, lanes(two))
    while FEW * triton.cdiv(hidden, at_once) > COUNTERS:
        at_once *= 2
    tiles = triton.cdiv(hidden, at_once)
    _few_down[t * slots, tiles](
        a, ids, *two[1:], y, out, counters(a.device) if summed else None, slots, members(w2), hidden, inner,
        *_layout(two), SUMMED=summed, ROWS=at_once, SLOTS=triton.next_power_of_2(slots),
        **_few_constants(two, w2, inner, deployed=deployed),
    )  # fmt: skip
    return y if out is None else out


def _few_constants(of: Planes, weight: Weight, columns: int, *, deployed: bool) -> dict[str, Any]:
    """What a kernel of few tokens is compiled for."""
    narrow = rounds(weight, deployed=deployed)
    assert not narrow or columns % LINEAR_GROUP == 0, f"{columns} columns are no multiple of {LINEAR_GROUP}"
    along = lanes(of)
    return {
        "FORM": of.form,
        "ROUND": narrow,
        "LANES": along.lanes,
        "STEPS": along.steps,
        "UPCAST": UPCAST,
        "num_warps": along.warps,
        "enable_fp_fusion": False,
    }


class _Given(NamedTuple):
    """Inputs of a product: numbers, or codes of E4M3 with a power of two for each 128 of them."""

    x: Tensor  # [n, columns], or uint8
    powers: Tensor  # [n, columns / 128] uint8; beside numbers any tensor


def _given(x: Tensor, weight: Weight, *, deployed: bool) -> _Given:
    """Rows as a matrix takes them: rounded where it is of a form that deployed numerics round for."""
    if not (deployed and isinstance(weight, Fp8 | Fp4)):
        x = x.contiguous()
        return _Given(x, x)
    if _as_codes(x, weight):
        return _Given(*fp8_codes(x, LINEAR_GROUP))
    x = simulate_fp8(x, LINEAR_GROUP)
    return _Given(x, x)


class _Pairs(NamedTuple):
    """Pairs of a token and one of its slots, sorted by expert, and how they are divided into blocks."""

    order: Tensor  # [pairs] int32
    starts: Tensor  # [experts] int32
    counts: Tensor  # [experts] int32
    slots: int
    tokens: int  # of a block
    blocks: int  # in the worst case: each may lack all but one of its tokens


def _sorted(ids: Tensor, experts: int, total: int = 0) -> _Pairs:
    """Of experts among which these are, tiles are as large as on one rank: for what one of the `total` gets."""
    return _sort_pairs(ids, experts, _tokens(ids.numel(), total or experts))


def _sort_pairs(ids: Tensor, experts: int, tokens: int) -> _Pairs:
    """Sort pairs of several tokens, for blocks of `tokens`."""
    pairs = ids.numel()
    order, starts, counts = (
        torch.empty(n, dtype=torch.int32, device=ids.device) for n in (pairs, experts, experts)
    )  # each an allocation of its own: a pointer's alignment is part of what is compiled
    _sort[experts,](ids, order, starts, counts, pairs, CHUNK=CHUNK, num_warps=4, enable_fp_fusion=False)
    blocks = min(pairs, (pairs + experts * (tokens - 1)) // tokens)
    return _Pairs(order, starts, counts, ids.shape[1], tokens, blocks)


def _up(
    out: _Given, pairs: _Pairs, x: Tensor, weights: Tensor, w1: Weight, w3: Weight, limit: float,
    *, deployed: bool, rounds: bool,
) -> None:  # fmt: skip
    """Write what w2 is given, rounded as its input if `rounds`."""
    (inner, hidden), held = w1.shape, members(w1)
    gate, up, given = planes(w1), planes(w3), _given(x, w1, deployed=deployed)
    assert _layout(gate) == _layout(up), "w1 and w3 lie differently"
    _gate_up[triton.cdiv(inner, ROWS), pairs.blocks](
        *given, weights.contiguous(), *pairs[:3], *gate[1:], *up[1:], *out, pairs.slots, held, inner, hidden,
        *_layout(gate), float(limit), ROUND=rounds, **_constants(x, w1, gate.form, held, pairs.tokens),
    )  # fmt: skip


def _outputs(given: _Given, pairs: _Pairs, like: Tensor, ids: Tensor, w2: Weight, *, summed: bool) -> Tensor:
    """`experts_down` of inputs that are rounded already; products are of the dtype of `like`."""
    (t, slots), (hidden, inner), held = ids.shape, w2.shape, members(w2)
    down, y = planes(w2), like.new_empty(t, slots, hidden)
    _down[triton.cdiv(hidden, ROWS), pairs.blocks](
        *given, *pairs[:3], *down[1:], y, held, hidden, inner, *_layout(down),
        **_constants(like, w2, down.form, held, pairs.tokens),
    )  # fmt: skip
    return sum_slots(y, ids) if summed else y


def sum_slots(y: Tensor, ids: Tensor) -> Tensor:
    """Sum of outputs [t, k, hidden] of a token's experts: `kernels.experts.reference.sum_slots`, bit for bit."""
    (t, slots, hidden), y, ids = y.shape, y.contiguous(), ids.contiguous()
    if not ids.numel():
        return torch.zeros(t, hidden, device=y.device)
    out, block = torch.empty(t, hidden, dtype=torch.float32, device=y.device), min(1024, triton.next_power_of_2(hidden))
    _sum_slots[t, triton.cdiv(hidden, block)](
        y, ids, out, slots, hidden, SLOTS=triton.next_power_of_2(slots), BLOCK=block, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


def experts_scratch(
    tokens: int, slots: int, experts: int, hidden: int, inner: int, form: str, item: int, *, deployed: bool,
    summed: bool = True,
) -> int:  # fmt: skip
    """Bytes allocated in `experts` of up to so many tokens; where inputs are codes it is less.

    What w2 is given beside the more of both halves.
    """
    middle, few = tokens * slots * inner * item, tokens <= FEW
    up = experts_up_scratch(tokens, slots, experts, hidden, inner, form, item, deployed=deployed)
    sizes = tokens, slots, experts, hidden, inner, form, item
    down = _down_nbytes(*sizes, deployed=deployed and few, summed=summed)
    codes = tokens * slots * (inner + inner // LINEAR_GROUP) if deployed and form == "FP4" and not few else 0
    return max(up + codes, middle + down)


def experts_up_scratch(
    tokens: int, slots: int, experts: int, hidden: int, inner: int, form: str, item: int, *, deployed: bool
) -> int:
    """Bytes allocated in `experts_up`, its result included: sorted pairs, and rounded inputs."""
    sorting = _sorting_nbytes(tokens, slots, experts, hidden, tokens * hidden * item, form, deployed=deployed)
    return tokens * slots * inner * item + sorting


def experts_down_scratch(
    tokens: int, slots: int, experts: int, hidden: int, inner: int, form: str, item: int, *, deployed: bool
) -> int:
    """Bytes allocated in `experts_down`, where its input lies in pieces: a copy of it, and the rest."""
    sizes = tokens, slots, experts, hidden, inner, form, item
    return tokens * slots * inner * item + _down_nbytes(*sizes, deployed=deployed)


def _down_nbytes(
    tokens: int, slots: int, experts: int, hidden: int, inner: int, form: str, item: int, *, deployed: bool,
    summed: bool = True,
) -> int:  # fmt: skip
    """Bytes of the second half: sorted pairs, rounded inputs, a product for each pair, and their sum."""
    sorting = _sorting_nbytes(tokens, slots, experts, inner, tokens * slots * inner * item, form, deployed=deployed)
    return tokens * hidden * (slots * item + 4 * summed) + sorting


def _sorting_nbytes(
    tokens: int, slots: int, experts: int, columns: int, inputs: int, form: str, *, deployed: bool
) -> int:
    """Bytes of sorted pairs and of rounded inputs; whole rows of few tokens are multiplied without either."""
    if tokens <= FEW and whole_words(form, columns):
        return 0
    return (tokens * slots + 2 * experts) * 4 + inputs * (deployed and form in ("FP8", "FP8_F32", "FP4"))


def _as_codes(x: Tensor, weight: Weight) -> bool:
    """Whether rounded inputs are multiplied as codes: beside E2M1 by Blackwell's tensor cores, and the interpreter."""
    if not isinstance(weight, Fp4) or x.dtype != torch.bfloat16:
        return False
    return UPCAST or blackwell()


def _tokens(pairs: int, experts: int) -> int:
    """Pairs in a block: what an expert gets if all get the same, of which tensor cores take 16 at least."""
    even = pairs // experts
    return 16 if even <= 16 else 32 if even <= 32 else 64


def _layout(stored: Planes) -> tuple[int, ...]:
    """Columns as stored, then strides of experts and of rows."""
    _, data, scale, _ = stored
    return data.shape[2], scale.shape[2], data.stride(0), data.stride(1), scale.stride(0), scale.stride(1)


def _constants(x: Tensor, weight: Weight, form: str, experts: int, tokens: int) -> dict[str, Any]:
    """What a kernel is compiled for. fp32 operands, which no tensor core takes unrounded, have narrow steps."""
    wide = not narrow(x, weight)
    return {
        "FORM": form,
        "EXPERTS": triton.next_power_of_2(experts),
        "ROWS": ROWS,
        "TOKENS": tokens,
        "BLOCK": 32 if wide else 64 if form == "dense" else 128,
        "OPERAND": operand(x, weight),
        "UPCAST": UPCAST,
        "num_warps": 8,
        "num_stages": 2 if wide else 4 if tokens == 16 else 3,
        "enable_fp_fusion": False,
    }
