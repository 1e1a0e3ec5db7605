"""The routed experts of one rank in five launches, however many experts there are and however tokens fall on them.

Pairs of a token and one of its slots are sorted by expert; a block of pairs of one expert is multiplied by that
expert's matrices. How many pairs each expert gets stays on the device: the grid has as many blocks as the worst case
needs, a program finds its expert from the counts, and those that find none return at once. A slot's output is kept for
itself, so that the sum over a token's slots runs in ascending order of experts, whatever finishes first.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.experts.reference import ExpertOutputs, Experts
from kernels.formats.groups import LINEAR_GROUP
from kernels.formats.stored import Apart, Fp4, Fp8, Stack, Weight, members
from kernels.formats.triton import E4M3_LARGEST, E4M3_SMALLEST, encoded, simulated
from kernels.formats.triton_rounding import UPCAST, rounded
from kernels.linear.triton import FEW, PROGRAMS, linear
from kernels.linear.weight_tiles import (
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
    summed,
)
from kernels.quantise.triton import fp8_codes, simulate_fp8
from kernels.swiglu.triton import activation, swiglu
from kernels.target import blackwell

ROWS = 128  # of a matrix per program: one block of `deployed` rounding, whose largest number must be known
CHUNK = 1024  # pairs that are counted and sorted at once
_APART = Experts(linear, swiglu, simulate_fp8)  # matrices of several forms, which no launch takes together
_APART_OUTPUTS = ExpertOutputs(linear, swiglu, simulate_fp8)


@triton.jit(do_not_specialize=["pairs"])
def _sort(ids, order, starts, counts, pairs, first, CHUNK: tl.constexpr):
    """Pairs of this program's expert, ascending, behind those of the experts before it."""
    expert = tl.program_id(0)
    before, own = 0, 0
    for chunk in range(0, pairs, CHUNK):
        pair = chunk + tl.arange(0, CHUNK)
        local = tl.load(ids + pair, pair < pairs, first - 1) - first
        before += tl.sum(((local >= 0) & (local < expert)).to(tl.int32))
        own += tl.sum((local == expert).to(tl.int32))
    tl.store(starts + expert, before)
    tl.store(counts + expert, own)
    if own > 0:
        for chunk in range(0, pairs, CHUNK):
            pair = chunk + tl.arange(0, CHUNK)
            found = tl.load(ids + pair, pair < pairs, first - 1) - first == expert
            tl.store(order + before + tl.cumsum(found.to(tl.int32)) - 1, pair, found)
            before += tl.sum(found.to(tl.int32))


@triton.jit
def _located(block, starts, counts, experts, EXPERTS: tl.constexpr, TOKENS: tl.constexpr):
    """Expert of a block of pairs, and which of the sorted pairs are its own: expert >= experts where there is none."""
    number = tl.arange(0, EXPERTS)
    blocks = (tl.load(counts + number, number < experts, 0) + TOKENS - 1) // TOKENS
    past = tl.cumsum(blocks) <= block
    expert = tl.sum(past.to(tl.int32))
    held = expert < experts
    start = tl.load(starts + expert, held, 0)
    place = start + (block - tl.sum(tl.where(past, blocks, 0))) * TOKENS + tl.arange(0, TOKENS)
    return expert, place, place < start + tl.load(counts + expert, held, 0)


@triton.jit(do_not_specialize=["slots", "pairs"])
def _gate_up(
    x, powers, weights, order, starts, counts, data1, scale1, global1, data3, scale3, global3, out, out_powers,
    parts, counters, pairs, slots, experts, rows, columns, width, scale_width, jump, stride, scale_jump, scale_stride,
    each, limit,
    SPLIT: tl.constexpr, FORM: tl.constexpr, ROUND: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, OPERAND: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    expert, place, inside = _located(tl.program_id(1), starts, counts, experts, EXPERTS, TOKENS)
    if expert >= experts:
        return
    pair = tl.load(order + place, inside, 0)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there, wide = row < rows, expert.to(tl.int64)
    token = (pair // slots).to(tl.int64) * columns
    data1, data3 = data1 + wide * jump, data3 + wide * jump
    scale1, scale3 = scale1 + wide * scale_jump, scale3 + wide * scale_jump
    gate, up = tl.zeros([ROWS, TOKENS], tl.float32), tl.zeros([ROWS, TOKENS], tl.float32)
    begin = tl.program_id(2) * each
    for step in range(begin, tl.minimum(tl.cdiv(columns, BLOCK), begin + each)):
        part = inputs(x, token, inside, columns, step, BLOCK, OPERAND)
        power = input_powers(powers, token, inside, columns, step, BLOCK) if part.dtype == tl.uint8 else None
        gate = multiplied(
            gate, part, power, data1, scale1, row, there, width, scale_width, stride, scale_stride, step,
            FORM, BLOCK, OPERAND, UPCAST,
        )  # fmt: skip
        up = multiplied(
            up, part, power, data3, scale3, row, there, width, scale_width, stride, scale_stride, step,
            FORM, BLOCK, OPERAND, UPCAST,
        )  # fmt: skip
    at, mask = place.to(tl.int64)[None, :] * rows + row[:, None], there[:, None] & inside[None, :]
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
            target = place.to(tl.int64)[None, :] * (rows // 128) + tl.program_id(0)
            tl.store(out_powers + target, exponent, inside[None, :])
        else:
            if ROUND:
                inner = simulated(inner, 0, E4M3_SMALLEST, E4M3_LARGEST, 3, 7)
            tl.store(out + at, rounded(inner, DTYPE, UPCAST), mask)


@triton.jit(do_not_specialize=["pairs"])
def _down(
    x, powers, order, starts, counts, data, scale, global_scale, out, parts, counters,
    pairs, experts, rows, columns, width, scale_width, jump, stride, scale_jump, scale_stride, each,
    SPLIT: tl.constexpr, FORM: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr, OPERAND: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    expert, place, inside = _located(tl.program_id(1), starts, counts, experts, EXPERTS, TOKENS)
    if expert >= experts:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there, wide = row < rows, expert.to(tl.int64)
    data, scale = data + wide * jump, scale + wide * scale_jump
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    begin, start = tl.program_id(2) * each, place.to(tl.int64) * columns
    for step in range(begin, tl.minimum(tl.cdiv(columns, BLOCK), begin + each)):
        part = inputs(x, start, inside, columns, step, BLOCK, OPERAND)
        power = input_powers(powers, start, inside, columns, step, BLOCK) if part.dtype == tl.uint8 else None
        total = multiplied(
            total, part, power, data, scale, row, there, width, scale_width, stride, scale_stride, step,
            FORM, BLOCK, OPERAND, UPCAST,
        )  # fmt: skip
    if FORM == "nvfp4":
        total *= tl.load(global_scale + expert)
    pair = tl.load(order + place, inside, 0).to(tl.int64)
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


@triton.jit
def _sum_slots(y, ids, out, slots, first, experts, columns, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.arange(0, SLOTS)
    local = tl.load(ids + token * slots + slot, slot < slots, first - 1) - first
    held = (local >= 0) & (local < experts)
    earlier = (local[None, :] < local[:, None]) | ((local[None, :] == local[:, None]) & (slot[None, :] < slot[:, None]))
    rank = tl.sum((earlier & held[None, :]).to(tl.int32), 1)  # how many of this token's come before
    total = tl.zeros([BLOCK], tl.float32)
    for turn in range(tl.sum(held.to(tl.int32))):
        own = tl.sum(tl.where(held & (rank == turn), slot, 0))
        total += tl.load(y + (token * slots + own) * columns + column, column < columns, 0.0).to(tl.float32)
    tl.store(out + token * columns + column, total, column < columns)


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Stack, w3: Stack, w2: Stack, limit: float, first: int,
    *, deployed: bool,
) -> Tensor:  # fmt: skip
    """Sum of this rank's experts' weighted outputs: `kernels.experts.reference.Experts`."""
    if isinstance(w1, Apart) or isinstance(w3, Apart) or isinstance(w2, Apart):
        return _APART(x, ids, weights, w1, w3, w2, limit, first, deployed=deployed)
    (t, hidden), slots, held = x.shape, ids.shape[1], members(w1)
    out = torch.empty(t, hidden, dtype=torch.float32, device=x.device)
    if not ids.numel():
        return out.zero_()
    ids = ids.contiguous()
    y = x.new_empty(t, slots, hidden)
    _write_outputs(y, x, ids, weights, w1, w3, w2, limit, first, deployed=deployed)
    block = min(1024, triton.next_power_of_2(hidden))
    _sum_slots[t, triton.cdiv(hidden, block)](
        y, ids, out, slots, first, held, hidden, SLOTS=triton.next_power_of_2(slots), BLOCK=block, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


def expert_outputs(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Stack, w3: Stack, w2: Stack, limit: float, first: int,
    *, deployed: bool,
) -> Tensor:  # fmt: skip
    """Each of this rank's experts' weighted outputs, in its slot: `kernels.experts.reference.ExpertOutputs`."""
    if isinstance(w1, Apart) or isinstance(w3, Apart) or isinstance(w2, Apart):
        return _APART_OUTPUTS(x, ids, weights, w1, w3, w2, limit, first, deployed=deployed)
    y = x.new_zeros(*ids.shape, x.shape[1])
    if ids.numel():
        _write_outputs(y, x, ids.contiguous(), weights, w1, w3, w2, limit, first, deployed=deployed)
    return y


def _write_outputs(
    y: Tensor, x: Tensor, ids: Tensor, weights: Tensor, w1: Weight, w3: Weight, w2: Weight, limit: float, first: int,
    *, deployed: bool,
) -> None:  # fmt: skip
    """Write the weighted outputs of this rank's experts to their slots of y [t, k, hidden]; the others' stay."""
    (t, hidden), slots, (inner, columns) = x.shape, ids.shape[1], w1.shape
    assert hidden == columns, f"x has {hidden} columns, w1 {columns}"
    assert (w3.shape, w2.shape) == ((inner, hidden), (hidden, inner)), f"w1 {w1.shape}, w3 {w3.shape}, w2 {w2.shape}"
    assert type(w1) is type(w3), f"w1 is {type(w1).__name__}, w3 {type(w3).__name__}"
    assert weights.shape == ids.shape == (t, slots), f"{t} tokens, ids {tuple(ids.shape)}"
    weights, held, pairs = weights.contiguous(), members(w1), t * slots
    order, starts, counts = (
        torch.empty(n, dtype=torch.int32, device=x.device) for n in (pairs, held, held)
    )  # each an allocation of its own: a pointer's alignment is part of what is compiled
    chunk = 64 if pairs <= 64 else CHUNK  # two sizes, for each is compiled
    _sort[held,](ids, order, starts, counts, pairs, first, CHUNK=chunk, num_warps=4, enable_fp_fusion=False)
    tokens = _tokens(pairs, held)
    where = order, starts, counts
    blocks = min(pairs, (pairs + held * (tokens - 1)) // tokens)  # a block may lack all but one of its tokens
    gate, up, down = planes(w1), planes(w3), planes(w2)
    assert _layout(gate) == _layout(up), "w1 and w3 lie differently"
    rounds, rounds_inner = (deployed and isinstance(w, Fp8 | Fp4) for w in (w1, w2))
    assert not rounds_inner or inner % LINEAR_GROUP == 0, f"{inner} columns are no multiple of {LINEAR_GROUP}"
    first_constants, constants = (
        _constants(x, w, form, held, tokens) for w, form in ((w1, gate.form), (w2, down.form))
    )
    first_cut = _cut(t, slots, inner, hidden, first_constants["BLOCK"])
    cut = _cut(t, slots, hidden, inner, constants["BLOCK"])
    assert blocks * triton.cdiv(max(inner, hidden), ROWS) <= COUNTERS or first_cut.splits == cut.splits == 1
    size = max(2 * inner * first_cut.sums, hidden * cut.sums)
    sums = torch.empty(pairs * size, dtype=torch.float32, device=x.device)
    if rounds and _as_codes(x, w1):
        given, powers = fp8_codes(x, LINEAR_GROUP)
    else:
        given = powers = simulate_fp8(x, LINEAR_GROUP) if rounds else x.contiguous()
    if rounds_inner and _as_codes(x, w2):
        middle, middle_powers = (
            torch.empty(pairs, wide, dtype=torch.uint8, device=x.device) for wide in (inner, inner // LINEAR_GROUP)
        )
    else:
        middle = middle_powers = x.new_empty(pairs, inner)
    tiles = counters(x.device)
    _gate_up[triton.cdiv(inner, ROWS), blocks, first_cut.splits](
        given, powers, weights, *where, *gate[1:], *up[1:], middle, middle_powers, sums, tiles, pairs, slots, held,
        inner, hidden, *_layout(gate), first_cut.steps, float(limit), SPLIT=first_cut.splits > 1, ROUND=rounds_inner,
        **first_constants,
    )  # fmt: skip
    _down[triton.cdiv(hidden, ROWS), blocks, cut.splits](
        middle, middle_powers, *where, *down[1:], y, sums, tiles, pairs, held, hidden, inner, *_layout(down),
        cut.steps, SPLIT=cut.splits > 1, **constants,
    )  # fmt: skip


def experts_scratch(
    tokens: int, slots: int, experts: int, hidden: int, inner: int, form: str, item: int, *, deployed: bool
) -> int:
    """Bytes allocated in `experts`: what `expert_outputs` does, and the sum."""
    return (
        expert_outputs_scratch(tokens, slots, experts, hidden, inner, form, item, deployed=deployed)
        + tokens * hidden * 4
    )


def expert_outputs_scratch(
    tokens: int, slots: int, experts: int, hidden: int, inner: int, form: str, item: int, *, deployed: bool
) -> int:
    """Bytes allocated in `expert_outputs` of up to so many tokens; where inputs are codes it is less.

    Sorted pairs, rounded inputs, both products of every pair, and of few tokens the sums of split columns.
    """
    pairs, few = tokens * slots, min(tokens, FEW)
    block = 32 if item == 4 or form in ("F16", "F32") else 64 if form == "BF16" else 128
    up, down = _cut(few, slots, inner, hidden, block), _cut(few, slots, hidden, inner, block)
    rounded_inputs = tokens * hidden * item if deployed and form in ("FP8", "FP8_F32", "FP4") else 0
    sums = few * slots * max(2 * inner * up.sums, hidden * down.sums) * 4
    whole = (pairs + 2 * experts) * 4 + rounded_inputs + pairs * (inner + hidden) * item
    return whole + sums if tokens <= FEW else max(whole, whole + sums - (pairs - few * slots) * (inner + hidden) * item)


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

    So the numbers of a token of a few do not depend on how many others there are. Rows of one expert each, which other
    ranks send, are never split: how many they are is the other ranks' affair.
    """
    steps = triton.cdiv(columns, block)
    splits = min(triton.cdiv(PROGRAMS, triton.cdiv(rows, ROWS) * slots), steps // 4) if t <= FEW and slots > 1 else 1
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
