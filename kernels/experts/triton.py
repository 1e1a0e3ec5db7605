"""The routed experts in five launches, however many experts there are and however tokens fall on them.

Pairs of a token and one of its slots are sorted by expert; a block of pairs of one expert is multiplied by that
expert's matrices. How many pairs each expert gets stays on the device: the grid has as many blocks as the worst case
needs, a program finds its expert from the counts, and those that find none return at once. A slot's output is kept for
itself, so that the sum over a token's slots runs in ascending order of experts, whatever finishes first.

A token alone takes two launches: its pairs need no sorting, its input is rounded where it is multiplied, and the last
program of a tile of rows adds up the slots.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fathom.kernels.experts.reference import Experts, ExpertsDown, ExpertsUp
from fathom.kernels.formats.groups import LINEAR_GROUP
from fathom.kernels.formats.stored import Apart, Fp4, Fp8, Stack, Weight, members
from fathom.kernels.formats.triton import E4M3_LARGEST, E4M3_SMALLEST, encoded, simulated
from fathom.kernels.formats.triton_rounding import UPCAST, rounded, widened
from fathom.kernels.linear.triton import FEW, PROGRAMS, linear
from fathom.kernels.linear.weight_tiles import (
    COUNTERS,
    Planes,
    arrived_last,
    counters,
    input_of_one,
    input_powers,
    inputs,
    multiplied,
    narrow,
    operand,
    planes,
    summed,
)
from fathom.kernels.quantise.triton import fp8_codes, simulate_fp8
from fathom.kernels.swiglu.triton import activation, swiglu
from fathom.kernels.target import blackwell

ROWS = 128  # of a matrix per program: one block of `deployed` rounding, whose largest number must be known
CHUNK = 1024  # pairs that are counted and sorted at once
TOKENS_OF_ONE = 16  # the tile of a token alone: the least that tensor cores take
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
def _located(
    block, order, starts, counts, experts, EXPERTS: tl.constexpr, TOKENS: tl.constexpr, ALONE: tl.constexpr
):  # fmt: skip
    """Expert of a block of pairs, and its own pairs: expert >= experts where there is none.

    ALONE: of one token every slot is a block, and `order` has its experts.
    """
    if ALONE:
        found = tl.load(order + block)
        known = (found >= 0) & (found < experts)  # else a tripwire's; all programs of a tile have to arrive
        expert = tl.where(known, found, 0).to(tl.int32)
        pair, inside = block + tl.arange(0, TOKENS), tl.arange(0, TOKENS) == 0
    else:
        number = tl.arange(0, EXPERTS)
        blocks = (tl.load(counts + number, number < experts, 0) + TOKENS - 1) // TOKENS
        past = tl.cumsum(blocks) <= block
        expert = tl.sum(past.to(tl.int32))
        held = expert < experts
        start = tl.load(starts + expert, held, 0)
        place = start + (block - tl.sum(tl.where(past, blocks, 0))) * TOKENS + tl.arange(0, TOKENS)
        inside = place < start + tl.load(counts + expert, held, 0)
        pair = tl.load(order + place, inside, 0)
    return expert, pair, inside


@triton.jit
def _codes_of_one(x, columns, step, TOKENS: tl.constexpr, BLOCK: tl.constexpr, UPCAST: tl.constexpr):
    """`input_of_one` in codes, and `input_powers` of them; BLOCK is a group of 128."""
    column = step * BLOCK + tl.arange(0, BLOCK)[None, :]
    found = widened(tl.load(x + column, column < columns, 0.0), UPCAST)
    codes, exponent = encoded(found, 1, E4M3_SMALLEST, E4M3_LARGEST, 3, 7, 7)
    codes = tl.broadcast_to(tl.trans(codes), [BLOCK, TOKENS])
    return codes, tl.broadcast_to(exponent, [TOKENS, BLOCK // 32])


@triton.jit(do_not_specialize=["slots", "pairs"])
def _gate_up(
    x, powers, weights, order, starts, counts, data1, scale1, global1, data3, scale3, global3, out, out_powers,
    parts, counters, pairs, slots, experts, rows, columns, width, scale_width, jump, stride, scale_jump, scale_stride,
    each, limit,
    SPLIT: tl.constexpr, FORM: tl.constexpr, ROUND: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, OPERAND: tl.constexpr, ALONE: tl.constexpr, GIVEN: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """GIVEN: "rounded" inputs, or numbers or codes that a token alone is rounded to here."""
    expert, pair, inside = _located(tl.program_id(1), order, starts, counts, experts, EXPERTS, TOKENS, ALONE)
    if expert >= experts:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there, wide = row < rows, expert.to(tl.int64)
    token = (pair // slots).to(tl.int64) * columns
    data1, data3 = data1 + wide * jump, data3 + wide * jump
    scale1, scale3 = scale1 + wide * scale_jump, scale3 + wide * scale_jump
    gate, up = tl.zeros([ROWS, TOKENS], tl.float32), tl.zeros([ROWS, TOKENS], tl.float32)
    begin = tl.program_id(2) * each
    for step in range(begin, tl.minimum(tl.cdiv(columns, BLOCK), begin + each)):
        power = None
        if GIVEN == "codes":
            part, power = _codes_of_one(x, columns, step, TOKENS, BLOCK, UPCAST)
        elif GIVEN == "numbers":
            part = input_of_one(x, columns, step, GIVEN == "numbers", TOKENS, BLOCK, OPERAND, UPCAST)
        else:
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
    last = True
    if SPLIT:
        size, splits = pairs * rows, tl.num_programs(2)
        own = parts + tl.program_id(2).to(tl.int64) * size
        tl.store(own + at, gate, mask)
        tl.store(own + splits.to(tl.int64) * size + at, up, mask)
        last = arrived_last(counters, tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), splits)
        if last:
            gate = summed(parts, at, mask, splits, size)
            up = summed(parts + splits.to(tl.int64) * size, at, mask, splits, size)
    if last:
        if FORM == "nvfp4":
            gate *= tl.load(global1 + expert)
            up *= tl.load(global3 + expert)
        DTYPE: tl.constexpr = tl.bfloat16 if out.dtype.element_ty == tl.uint8 else out.dtype.element_ty
        gate, up = rounded(gate, DTYPE, UPCAST).to(tl.float32), rounded(up, DTYPE, UPCAST).to(tl.float32)
        inner = activation(gate, up, limit) * tl.load(weights + pair, inside, 0.0)[None, :]
        if ROUND:
            inner = rounded(inner, DTYPE, UPCAST).to(tl.float32)
        if out.dtype.element_ty == tl.uint8:  # ROWS is the group of 128
            codes, exponent = encoded(inner, 0, E4M3_SMALLEST, E4M3_LARGEST, 3, 7, 7)
            tl.store(out + at, codes, mask)
            target = pair.to(tl.int64)[None, :] * (rows // 128) + tl.program_id(0)
            tl.store(out_powers + target, exponent, inside[None, :])
        else:
            if ROUND:
                inner = simulated(inner, 0, E4M3_SMALLEST, E4M3_LARGEST, 3, 7)
            tl.store(out + at, rounded(inner, DTYPE, UPCAST), mask)


@triton.jit(do_not_specialize=["pairs"])
def _down(
    x, powers, order, starts, counts, data, scale, global_scale, out, total_out, parts, counters,
    pairs, experts, rows, columns, width, scale_width, jump, stride, scale_jump, scale_stride, each,
    SPLIT: tl.constexpr, FORM: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, OPERAND: tl.constexpr, ALONE: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    expert, pair, inside = _located(tl.program_id(1), order, starts, counts, experts, EXPERTS, TOKENS, ALONE)
    if expert >= experts:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there, wide = row < rows, expert.to(tl.int64)
    data, scale = data + wide * jump, scale + wide * scale_jump
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    pair = pair.to(tl.int64)
    begin, start = tl.program_id(2) * each, pair * columns
    for step in range(begin, tl.minimum(tl.cdiv(columns, BLOCK), begin + each)):
        part = inputs(x, start, inside, columns, step, BLOCK, OPERAND)
        power = input_powers(powers, start, inside, columns, step, BLOCK) if part.dtype == tl.uint8 else None
        total = multiplied(
            total, part, power, data, scale, row, there, width, scale_width, stride, scale_stride, step,
            FORM, BLOCK, OPERAND, UPCAST,
        )  # fmt: skip
    if FORM == "nvfp4":
        total *= tl.load(global_scale + expert)
    at, mask = pair[None, :] * rows + row[:, None], there[:, None] & inside[None, :]
    last = True
    if SPLIT:
        size, splits = pairs * rows, tl.num_programs(2)
        tl.store(parts + tl.program_id(2).to(tl.int64) * size + at, total, mask)
        last = arrived_last(counters, tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), splits)
        if last:
            total = summed(parts, at, mask, splits, size)
    if last:
        tl.store(out + at, rounded(total, out.dtype.element_ty, UPCAST), mask)
        if ALONE:  # the last slot of a tile of rows adds up all of them
            tiles = tl.num_programs(0)
            if arrived_last(counters, tl.num_programs(1) * tiles + tl.program_id(0), pairs):
                tl.store(total_out + row, _sum_of_slots(out, order, pairs, row, rows, ROWS, SLOTS), there)


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
    x: Tensor, ids: Tensor, weights: Tensor, w1: Stack, w3: Stack, w2: Stack, limit: float, *, deployed: bool
) -> Tensor:
    """Sum of the experts' weighted outputs: `kernels.experts.reference.Experts`."""
    if isinstance(w1, Apart) or isinstance(w3, Apart) or isinstance(w2, Apart):
        return _APART(x, ids, weights, w1, w3, w2, limit, deployed=deployed)
    if not ids.numel():
        return torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    ids = ids.contiguous()
    pairs, rounds, inner = _sorted(ids, members(w1)), deployed and isinstance(w2, Fp8 | Fp4), w1.shape[0]
    assert not rounds or inner % LINEAR_GROUP == 0, f"{inner} columns are no multiple of {LINEAR_GROUP}"
    if rounds and _as_codes(x, w2):  # w2's input is rounded where it is made
        given = _Given(*(x.new_empty(ids.numel(), n, dtype=torch.uint8) for n in (inner, inner // LINEAR_GROUP)))
    else:
        given = _Given(*2 * (x.new_empty(ids.numel(), inner),))
    _up(given, pairs, x, weights, w1, w3, limit, deployed=deployed, rounds=rounds)
    return _down_and_sum(given, pairs, x, ids, w2)


def experts_up(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Stack, w3: Stack, limit: float, *, deployed: bool
) -> Tensor:
    """What w2 of each of a token's experts is given: `kernels.experts.reference.ExpertsUp`."""
    if isinstance(w1, Apart) or isinstance(w3, Apart):
        return _APART_UP(x, ids, weights, w1, w3, limit, deployed=deployed)
    out = x.new_empty(*ids.shape, w1.shape[0])
    if ids.numel():
        pairs = _sorted(ids.contiguous(), members(w1))
        _up(_Given(out, out), pairs, x, weights, w1, w3, limit, deployed=deployed, rounds=False)
    return out


def experts_down(a: Tensor, ids: Tensor, w2: Stack, *, deployed: bool) -> Tensor:
    """Sum of the experts' outputs: `kernels.experts.reference.ExpertsDown`."""
    if isinstance(w2, Apart):
        return _APART_DOWN(a, ids, w2, deployed=deployed)
    if not ids.numel():
        return torch.zeros(ids.shape[0], w2.shape[0], device=a.device)
    ids = ids.contiguous()
    return _down_and_sum(_given(a.flatten(0, 1), w2, deployed=deployed), _sorted(ids, members(w2)), a, ids, w2)


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
    """Pairs of a token and one of its slots, sorted by expert, and how they are divided into blocks.

    Of a token alone nothing is sorted: `order`, `starts` and `counts` are its experts [pairs] int64.
    """

    order: Tensor  # [pairs] int32
    starts: Tensor  # [experts] int32
    counts: Tensor  # [experts] int32
    slots: int
    tokens: int  # of a block
    blocks: int  # in the worst case: each may lack all but one of its tokens
    alone: bool


def _sorted(ids: Tensor, experts: int) -> _Pairs:
    pairs = ids.numel()
    if ids.shape[0] == 1:
        chosen = ids[0]
        return _Pairs(chosen, chosen, chosen, pairs, TOKENS_OF_ONE, pairs, alone=True)
    return _sort_pairs(ids, experts, _tokens(pairs, experts))


def _sort_pairs(ids: Tensor, experts: int, tokens: int) -> _Pairs:
    """Sort pairs of several tokens, for blocks of `tokens`."""
    pairs = ids.numel()
    order, starts, counts = (
        torch.empty(n, dtype=torch.int32, device=ids.device) for n in (pairs, experts, experts)
    )  # each an allocation of its own: a pointer's alignment is part of what is compiled
    chunk = 64 if pairs <= 64 else CHUNK  # two sizes, for each is compiled
    _sort[experts,](ids, order, starts, counts, pairs, CHUNK=chunk, num_warps=4, enable_fp_fusion=False)
    blocks = min(pairs, (pairs + experts * (tokens - 1)) // tokens)
    return _Pairs(order, starts, counts, ids.shape[1], tokens, blocks, alone=False)


def _up(
    out: _Given, pairs: _Pairs, x: Tensor, weights: Tensor, w1: Weight, w3: Weight, limit: float,
    *, deployed: bool, rounds: bool,
) -> None:  # fmt: skip
    """Write what w2 is given, rounded as its input if `rounds`."""
    (t, hidden), (inner, columns), held = x.shape, w1.shape, members(w1)
    assert hidden == columns, f"x has {hidden} columns, w1 {columns}"
    assert w3.shape == w1.shape, f"w1 {w1.shape}, w3 {w3.shape}"
    assert type(w1) is type(w3), f"w1 is {type(w1).__name__}, w3 {type(w3).__name__}"
    assert weights.shape == (t, pairs.slots), f"{t} tokens of {pairs.slots} slots, weights {tuple(weights.shape)}"
    gate, up = planes(w1), planes(w3)
    rounds_here = pairs.alone and deployed and isinstance(w1, Fp8 | Fp4) and x.dtype == torch.bfloat16
    given = _Given(*2 * (x.contiguous(),)) if rounds_here else _given(x, w1, deployed=deployed)
    how = ("codes" if _as_codes(x, w1) else "numbers") if rounds_here else "rounded"
    assert _layout(gate) == _layout(up), "w1 and w3 lie differently"
    constants, n = _constants(x, w1, gate.form, held, pairs.tokens), len(pairs.order)
    cut = _cut(t, pairs.slots, inner, hidden, constants["BLOCK"])
    _check_counters(pairs, inner, cut)
    sums = torch.empty(n * 2 * inner * cut.sums, dtype=torch.float32, device=x.device)
    _gate_up[triton.cdiv(inner, ROWS), pairs.blocks, cut.splits](
        *given, weights.contiguous(), *pairs[:3], *gate[1:], *up[1:], *out, sums, counters(x.device), n, pairs.slots,
        held, inner, hidden, *_layout(gate), cut.steps, float(limit),
        SPLIT=cut.splits > 1, ROUND=rounds, ALONE=pairs.alone, GIVEN=how, **constants,
    )  # fmt: skip


def _down_and_sum(given: _Given, pairs: _Pairs, like: Tensor, ids: Tensor, w2: Weight) -> Tensor:
    """[t, hidden] float32 of inputs that are rounded already; products are of the dtype of `like`."""
    (t, slots), (hidden, inner), held = ids.shape, w2.shape, members(w2)
    assert given.x.shape == (t * slots, inner), f"given {tuple(given.x.shape)} for {t * slots} pairs, w2 {w2.shape}"
    down, y = planes(w2), like.new_empty(t, slots, hidden)
    constants, n = _constants(like, w2, down.form, held, pairs.tokens), len(pairs.order)
    cut = _cut(t, slots, hidden, inner, constants["BLOCK"])
    _check_counters(pairs, hidden, cut)
    sums = torch.empty(n * hidden * cut.sums, dtype=torch.float32, device=ids.device)
    out = torch.empty(t, hidden, dtype=torch.float32, device=ids.device)
    _down[triton.cdiv(hidden, ROWS), pairs.blocks, cut.splits](
        *given, *pairs[:3], *down[1:], y, out, sums, counters(ids.device), n, held, hidden, inner, *_layout(down),
        cut.steps, SPLIT=cut.splits > 1, ALONE=pairs.alone, SLOTS=triton.next_power_of_2(slots), **constants,
    )  # fmt: skip
    if not pairs.alone:
        block = min(1024, triton.next_power_of_2(hidden))
        _sum_slots[t, triton.cdiv(hidden, block)](
            y, ids, out, slots, hidden, SLOTS=triton.next_power_of_2(slots), BLOCK=block, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _check_counters(pairs: _Pairs, rows: int, cut: "_Cut") -> None:
    tiles = (pairs.blocks + pairs.alone) * triton.cdiv(rows, ROWS)
    used = cut.splits > 1 or pairs.alone
    assert not used or tiles <= COUNTERS, f"{tiles} tiles of split columns, {COUNTERS} counters"


def experts_scratch(
    tokens: int, slots: int, experts: int, hidden: int, inner: int, form: str, item: int, *, deployed: bool
) -> int:
    """Bytes allocated in `experts` of up to so many tokens; where inputs are codes it is less.

    What w2 is given beside the more of both halves.
    """
    middle = tokens * slots * inner * item
    up = experts_up_scratch(tokens, slots, experts, hidden, inner, form, item, deployed=deployed)
    down = experts_down_scratch(tokens, slots, experts, hidden, inner, form, item, deployed=False)
    return max(up, middle + down)


def experts_up_scratch(
    tokens: int, slots: int, experts: int, hidden: int, inner: int, form: str, item: int, *, deployed: bool
) -> int:
    """Bytes allocated in `experts_up`, its result included: sorted pairs, rounded inputs, sums of split columns."""
    taken = _pairs_nbytes(tokens, slots, experts) + tokens * slots * inner * item
    if deployed and form in ("FP8", "FP8_F32", "FP4"):
        taken += tokens * hidden * item
    return taken + _sums_nbytes(tokens, slots, inner, hidden, form, item, 2)


def experts_down_scratch(
    tokens: int, slots: int, experts: int, hidden: int, inner: int, form: str, item: int, *, deployed: bool
) -> int:
    """Bytes allocated in `experts_down`: the same, a product for each pair, and their sum."""
    taken = _pairs_nbytes(tokens, slots, experts) + tokens * hidden * (slots * item + 4)
    if deployed and form in ("FP8", "FP8_F32", "FP4"):
        taken += tokens * slots * inner * item
    return taken + _sums_nbytes(tokens, slots, hidden, inner, form, item, 1)


def _pairs_nbytes(tokens: int, slots: int, experts: int) -> int:
    return (tokens * slots + 2 * experts) * 4


def _sums_nbytes(tokens: int, slots: int, rows: int, columns: int, form: str, item: int, products: int) -> int:
    """Bytes of sums of split columns; of more than FEW tokens there are none, but their plan is no less than of FEW."""
    block = 32 if item == 4 or form in ("F16", "F32") else 64 if form == "BF16" else 128
    return 0 if tokens > FEW else tokens * slots * products * rows * _cut(tokens, slots, rows, columns, block).sums * 4


class _Cut(NamedTuple):
    """How the columns of a product are split."""

    splits: int
    steps: int  # of a split

    @property
    def sums(self) -> int:
        """Sums that are stored for each number."""
        return self.splits if self.splits > 1 else 0


def _cut(t: int, slots: int, rows: int, columns: int, block: int) -> _Cut:
    """Split columns so that one token's programs fill the machine; of up to FEW tokens as of one, of more not at all.

    So the numbers of a token of a few do not depend on how many others there are.
    """
    steps = triton.cdiv(columns, block)
    splits = min(triton.cdiv(PROGRAMS, triton.cdiv(rows, ROWS) * slots), steps // 4) if t <= FEW else 1
    each = triton.cdiv(steps, max(1, splits))
    return _Cut(triton.cdiv(steps, each), each)


def _as_codes(x: Tensor, weight: Weight) -> bool:
    """Whether rounded inputs are multiplied as codes: beside E2M1 by Blackwell's tensor cores, and the interpreter."""
    if not isinstance(weight, Fp4) or x.dtype != torch.bfloat16:
        return False
    return UPCAST or blackwell()


def _tokens(pairs: int, experts: int) -> int:
    """Pairs in a block: what an expert gets if all get the same, of which tensor cores take 16 at least."""
    even = pairs // experts
    return TOKENS_OF_ONE if even <= 16 else 32 if even <= 32 else 64


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
