"""Matrix products with weights in their stored form: tiles decoded in registers, the columns split where rows are few.

A token alone is multiplied by several matrices in one launch, whatever their forms, and rounded as their input there.

How many splits there are follows from the shapes alone, and up to FEW tokens from the weight's shape alone: there a
token's numbers do not depend on how many others there are.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fathom.kernels.formats.stored import Weight
from fathom.kernels.formats.triton_rounding import UPCAST, rounded, widened
from fathom.kernels.linear.reference import Linears, Product, rounds
from fathom.kernels.linear.weight_tiles import (
    COUNTERS,
    arrived_last,
    counters,
    input_of_one,
    inputs,
    multiplied,
    narrow,
    operand,
    planes,
    summed,
)
from fathom.kernels.position import position
from fathom.kernels.quantise.triton import simulate_fp8

FEW = 16  # tokens that fit the narrowest tile: the time is that of reading the weight
PROGRAMS = 264  # wanted in flight: two for each multiprocessor of an H200
_LAYOUTS = {"FP8": "fp8", "FP8_F32": "fp8", "FP4": "fp4", "NVFP4": "nvfp4"}  # else dense, see `weight_tiles.Planes`


class Tile(NamedTuple):
    """How much of a product one program computes at a time."""

    rows: int  # of W
    tokens: int
    columns: int  # per step
    warps: int
    stages: int


@triton.jit(do_not_specialize=["t"])
def _linear(
    x, data, scale, global_scale, out, parts, counters, t, rank, columns, width, scale_width, stride, scale_stride,
    groups, each,
    SPLIT: tl.constexpr, FORM: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    OPERAND: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    tiles = tl.cdiv(rank, ROWS)
    group = tl.program_id(1) // tiles
    own = tl.program_id(1) % tiles * ROWS + tl.arange(0, ROWS)  # rows of this group's part
    split = tl.program_id(2)
    row, there, inside = group * rank + own, own < rank, token < t
    place = (token.to(tl.int64) * groups + group) * columns
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for step in range(split * each, tl.minimum(tl.cdiv(columns, BLOCK), (split + 1) * each)):
        part = inputs(x, place, inside, columns, step, BLOCK, OPERAND)
        total = multiplied(
            total, part, None, data, scale, row, there, width, scale_width, stride, scale_stride, step,
            FORM, BLOCK, OPERAND, UPCAST,
        )  # fmt: skip
    if FORM == "nvfp4":
        total *= tl.load(global_scale)
    rows = groups * rank
    target, mask = token.to(tl.int64)[None, :] * rows + row[:, None], there[:, None] & inside[None, :]
    if SPLIT:
        size, splits = t * rows, tl.num_programs(2)
        tl.store(parts + split.to(tl.int64) * size + target, total, mask)
        if arrived_last(counters, tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), splits):
            total = summed(parts, target, mask, splits, size)
            tl.store(out + target, rounded(total, out.dtype.element_ty, UPCAST), mask)
    else:
        tl.store(out + target, rounded(total, out.dtype.element_ty, UPCAST), mask)


@triton.constexpr_function
def constant_of(constants, index):
    """One of several constants, itself a tuple: `constants[index]` in a kernel is no constant to Triton 3.6."""
    return constants[index]


@triton.jit
def _matrix_of(program, matrices, COUNT: tl.constexpr):
    """Which of some matrices a program works at: they begin at programs in their order."""
    begin, tiles, splits, each, rows, data, scale, global_scale, out, sums, beside, period, factor = matrices[0]
    for i in tl.static_range(1, COUNT):
        one = matrices[i]
        own = program >= one[0]
        begin, tiles, splits = tl.where(own, one[0], begin), tl.where(own, one[1], tiles), tl.where(own, one[2], splits)
        each, rows, data = tl.where(own, one[3], each), tl.where(own, one[4], rows), tl.where(own, one[5], data)
        scale, global_scale = tl.where(own, one[6], scale), tl.where(own, one[7], global_scale)
        out, sums, beside = tl.where(own, one[8], out), tl.where(own, one[9], sums), tl.where(own, one[10], beside)
        period, factor = tl.where(own, one[11], period), tl.where(own, one[12], factor)
    return begin, tiles, splits, each, rows, data, scale, global_scale, out, sums, beside, period, factor


@triton.jit
def tile_of_one(
    x, first, parts, counters, program, kind, HOW: tl.constexpr, TOKENS: tl.constexpr, UPCAST: tl.constexpr
):  # fmt: skip
    """A tile of rows, or a split of one, of a matrix of one kind; whether this program has stored the tile."""
    matrices, _, columns, width, scale_width, stride, scale_stride = kind
    COUNT: tl.constexpr = HOW[0]
    FORM: tl.constexpr = HOW[1]
    ROUND: tl.constexpr = HOW[2]
    SPLIT: tl.constexpr = HOW[3]
    BIASED: tl.constexpr = HOW[4]
    SCALED: tl.constexpr = HOW[5]
    ADDED: tl.constexpr = HOW[6]
    ROWS: tl.constexpr = HOW[7]
    BLOCK: tl.constexpr = HOW[8]
    OPERAND: tl.constexpr = HOW[9]
    begin, tiles, splits, each, rows, data, scale, global_scale, out, sums, beside, period, factor = _matrix_of(
        program, matrices, COUNT
    )
    tile, split = (program - begin) % tiles, (program - begin) // tiles
    row = tile * ROWS + tl.arange(0, ROWS)
    there = row < rows
    total = tl.zeros([ROWS, TOKENS], tl.float32)
    for step in range(split * each, tl.minimum(tl.cdiv(columns, BLOCK), (split + 1) * each)):
        part = input_of_one(x, columns, step, ROUND, TOKENS, BLOCK, OPERAND, UPCAST)
        total = multiplied(
            total, part, None, data, scale, row, there, width, scale_width, stride, scale_stride, step,
            FORM, BLOCK, OPERAND, UPCAST,
        )  # fmt: skip
    if FORM == "nvfp4":
        total *= tl.load(global_scale)
    mask = there[:, None] & (tl.arange(0, TOKENS) == 0)[None, :]
    target = row[:, None] + tl.zeros_like(mask).to(tl.int32)
    last = True
    if SPLIT:
        parts += sums
        tl.store(parts + split.to(tl.int64) * rows + target, total, mask)
        last = arrived_last(counters, begin + tile, splits)
        if last:
            total = summed(parts, target, mask, splits, rows)
    if last:
        if BIASED:
            place = (tl.load(first) % tl.maximum(period, 1)).to(tl.int32)
            biased = period + tl.zeros_like(target) > 0  # the interpreter makes int32 of a scalar's comparison
            added = total + tl.load(beside + place * rows + target, mask & biased, 0.0)
            total = tl.where(biased, added, total)
        if ADDED:
            total = tl.load(beside + target, mask, 0.0) + widened(rounded(total, x.dtype.element_ty, UPCAST), UPCAST)
        if SCALED:
            narrow = widened(rounded(total, x.dtype.element_ty, UPCAST), UPCAST)
            total = tl.where(factor + tl.zeros_like(total) != 0, narrow * factor, total)
        tl.store(out + target, rounded(total, out.dtype.element_ty, UPCAST), mask)
    return last


@triton.jit
def _linears(x, first, parts, counters, kinds, HOW: tl.constexpr, TOKENS: tl.constexpr, UPCAST: tl.constexpr):
    """Products of a token alone; a program finds its kind of matrix, whose way of being multiplied is in HOW."""
    program = tl.program_id(0)
    for kind in tl.static_range(len(HOW)):
        if (program >= kinds[kind][0][0][0]) & (program < kinds[kind][1]):
            tile_of_one(x, first, parts, counters, program, kinds[kind], constant_of(HOW, kind), TOKENS, UPCAST)


def linear(x: Tensor, weight: Weight, *, wide: bool = False) -> Tensor:
    """``x @ W^T``: `kernels.linear.reference.linear`."""
    return _product(x[:, None], weight, 1, torch.float32 if wide else x.dtype)[:, 0]


def grouped_linear(x: Tensor, weight: Weight, groups: int) -> Tensor:
    """Each group by its own rows of W: `kernels.linear.reference.grouped_linear`."""
    return _product(x, weight, groups, x.dtype)


def _product(x: Tensor, weight: Weight, groups: int, dtype: torch.dtype) -> Tensor:
    t, (rows, columns) = x.shape[0], weight.shape
    assert x.shape[1:] == (groups, columns), f"x is {tuple(x.shape)}, want [t, {groups}, {columns}]"
    assert rows % groups == 0, f"{rows} rows of the weight are no multiple of {groups} groups"
    out = torch.empty(t, groups, rows // groups, dtype=dtype, device=x.device)
    if not out.numel():
        return out
    x = x.contiguous()
    form, data, scale, global_scale = planes(weight)
    tile = _tile(form, t, wide=not narrow(x, weight))
    grid, each = _grid(t, groups, rows // groups, columns, tile)
    split = grid[2] > 1
    parts = torch.empty(grid[2], *out.shape, dtype=torch.float32, device=x.device) if split else out
    assert not split or grid[0] * grid[1] <= COUNTERS, f"{grid} tiles"
    constants = {"FORM": form, "ROWS": tile.rows, "TOKENS": tile.tokens, "BLOCK": tile.columns, "UPCAST": UPCAST}
    _linear[grid](
        x, data, scale, global_scale, out, parts, counters(x.device), t, rows // groups, columns, data.shape[-1],
        scale.shape[-1], data.stride(0), scale.stride(0), groups, each, SPLIT=split, **constants,
        OPERAND=operand(x, weight),
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out


_APART = Linears(linear, simulate_fp8)  # of several tokens, whose rounded input is made once


class _Kind(NamedTuple):
    """What matrices have in common that a program multiplies in the same way."""

    form: str
    rounds: bool
    split: bool
    added: bool
    operand: tl.dtype
    tile: Tile
    dtype: torch.dtype  # of the product
    scales: torch.dtype
    widths: tuple[int, int, int, int]  # columns of data and of scales as stored, and their strides


def linears(x: Tensor, products: Sequence[Product], *, deployed: bool) -> list[Tensor]:
    """Products of several matrices: `kernels.linear.reference.Linears`; those of a token alone in one launch.

    Its numbers are those of `linear`, for tiles and splits are.
    """
    narrow_inputs = x.dtype == torch.bfloat16 or not any(rounds(of.weight, deployed=deployed) for of in products)
    if x.shape[0] != 1 or not narrow_inputs:  # a step of fp32 operands is shorter than a group that is rounded
        return _APART(x, products, deployed=deployed)
    plan = alone(x, products, deployed=deployed)
    _linears[plan.programs,](
        plan.x, _first(x, products), plan.parts, counters(x.device), tuple(plan.kinds), HOW=tuple(plan.how),
        TOKENS=plan.tile.tokens, UPCAST=UPCAST, num_warps=plan.tile.warps, num_stages=plan.tile.stages,
        enable_fp_fusion=False,
    )  # fmt: skip
    return plan.found


class Alone(NamedTuple):
    """What a launch of a token's products is given."""

    x: Tensor
    found: list[Tensor]  # the products, which it fills
    parts: Tensor  # sums of split columns
    kinds: list[tuple[Any, ...]]  # matrices and sizes, of each kind
    how: list[tuple[Any, ...]]  # constants
    programs: int
    tile: Tile  # whose tokens, warps and stages are those of all


def alone(x: Tensor, products: Sequence[Product], *, deployed: bool) -> Alone:
    """Cut up the products of a token alone."""
    x, kinds = x.contiguous(), _by_kind(x, products, deployed=deployed)
    found: list[Tensor] = [x] * len(products)
    programs, sums, given, how = 0, 0, [], []
    for kind, members in kinds.items():
        matrices = []
        for number in members:
            product, form = products[number], planes(products[number].weight)
            rows, columns = product.weight.shape
            (_, tiles, splits), each = _grid(1, 1, rows, columns, kind.tile)
            out = found[number] = torch.empty(1, rows, dtype=kind.dtype, device=x.device)
            beside, period = out if product.added is None else product.added, 0
            if product.bias is not None:
                beside, period = product.bias.table, product.bias.table.shape[0]
            assert beside.is_contiguous(), "rows of what is added to a product lie apart"
            matrices.append(
                (programs, tiles, splits, each, rows, *form[1:], out, sums, beside, period, product.factor or 0.0)
            )
            programs, sums = programs + tiles * splits, sums + (splits * rows if kind.split else 0)
        given.append((tuple(matrices), programs, x.shape[1], *kind.widths))
        biased, scaled = (any(products[n][field] is not None for n in members) for field in (2, 3))
        how.append(
            (len(members), kind.form, kind.rounds, kind.split, biased, scaled, kind.added, kind.tile.rows,
             kind.tile.columns, kind.operand)
        )  # fmt: skip
    assert programs <= COUNTERS, f"{programs} programs"
    parts = torch.empty(sums, dtype=torch.float32, device=x.device)
    tile = min((kind.tile for kind in kinds), key=lambda one: one.stages)
    return Alone(x, found, parts, given, how, programs, tile)


def _by_kind(x: Tensor, products: Sequence[Product], *, deployed: bool) -> dict[_Kind, list[int]]:
    """Numbers of products, of each kind."""
    kinds: dict[_Kind, list[int]] = {}
    for number, (weight, wide, bias, factor, added) in enumerate(products):
        assert weight.shape[1] == x.shape[1], f"x has {x.shape[1]} columns, the weight {weight.shape[1]}"
        assert bias is None or wide, "a position bias of a product that is rounded"
        assert added is None or not (wide or factor), "something is added to a product that is not rounded again"
        form, data, scale, _ = planes(weight)
        tile = _tile(form, 1, wide=not narrow(x, weight))
        (_, _, splits), _ = _grid(1, 1, *weight.shape, tile)
        dtype = torch.float32 if wide or factor is not None else x.dtype
        widths = data.shape[-1], scale.shape[-1], data.stride(0), scale.stride(0)
        rounded_input = rounds(weight, deployed=deployed)
        kind = _Kind(
            form, rounded_input, splits > 1, added is not None, operand(x, weight), tile, dtype, scale.dtype, widths
        )
        kinds.setdefault(kind, []).append(number)
    return kinds


def _first(x: Tensor, products: Sequence[Product]) -> Tensor:
    """Position of the token, where a bias follows it; else nothing is read."""
    firsts = {id(of.bias.first): of.bias.first for of in products if of.bias is not None}
    assert len(firsts) <= 1, "one token stands at several positions"
    return position(next(iter(firsts.values())), x.device) if firsts else x


def linear_scratch(
    tokens: int, rows: int, columns: int, form: str, item: int, device: torch.device, *, wide: bool = False
) -> int:
    """Bytes allocated in `linear` of up to so many tokens: see `grouped_linear_scratch`."""
    more = tokens * rows * (4 - item) if wide else 0
    return grouped_linear_scratch(tokens, rows, columns, 1, form, item, device) + more


@cache
def grouped_linear_scratch(
    tokens: int, rows: int, columns: int, groups: int, form: str, item: int, device: torch.device
) -> int:
    """Bytes allocated in `grouped_linear` of up to so many tokens: the result, and in fp32 the sums of split columns.

    `form` is how the weight is stored, as `kernels.linear.cpu.grouped_linear_scratch` has it.
    """
    del device
    wide, layout = item == 4 or form in ("F16", "F32"), _LAYOUTS.get(form, "dense")
    sums, step = 0, _tile(layout, tokens, wide=wide).tokens
    for t in {min(tokens, FEW), *(min(tokens, count * step) for count in range(1, PROGRAMS + 1))}:
        (_, _, splits), _ = _grid(t, groups, rows // groups, columns, _tile(layout, t, wide=wide))
        sums = max(sums, splits * t * rows * 4 if splits > 1 else 0)
    return tokens * rows * item + sums


def _tile(form: str, t: int, *, wide: bool) -> Tile:
    """Choose the tile of a product of `t` tokens; `wide`: operands in fp32, which no tensor core takes unrounded."""
    if wide:
        return Tile(rows=64, tokens=16 if t <= FEW else 32, columns=32, warps=4, stages=2)
    if t <= FEW:  # 8 to 16 KiB of W a stage, so that enough of it is on its way
        return Tile(rows=64, tokens=16, columns=256 if form in {"fp4", "nvfp4"} else 128, warps=4, stages=4)
    tokens = min(128, triton.next_power_of_2(t))
    return Tile(
        rows=128, tokens=tokens, columns=64 if form == "dense" else 128, warps=8 if tokens > 32 else 4, stages=3
    )


def _grid(t: int, groups: int, rank: int, columns: int, tile: Tile) -> tuple[tuple[int, int, int], int]:
    """Tiles of tokens, of rows, and splits of the columns; and the steps of a split."""
    across, down = triton.cdiv(t, tile.tokens), groups * triton.cdiv(rank, tile.rows)
    steps = triton.cdiv(columns, tile.columns)
    splits = max(1, min(triton.cdiv(PROGRAMS, across * down), steps // 4))  # four steps to fill the pipeline
    steps_per_split = triton.cdiv(steps, splits)
    return (across, down, triton.cdiv(steps, steps_per_split)), steps_per_split
