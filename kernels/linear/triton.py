"""Matrix products with weights in their stored form, decoded in registers.

Of up to FEW tokens whole rows are multiplied (`weight_rows`), and of a token alone those of several matrices in one
launch, whatever their forms: it is rounded as their input there. Of more tokens tiles of rows are (`weight_tiles`), on
tensor cores, their columns split where there are few; and of fewer too, where rows are not made of whole words. Of MANY
tokens Fp8 is decoded first, once, to bf16, which holds E4M3 times a power of two exactly from 2^-124 to 2^119.

How many splits there are follows from the shapes alone, and up to FEW tokens from the weight's shape alone: there a
token's numbers do not depend on how many others there are.
"""

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fathom.kernels.formats.groups import LINEAR_GROUP
from fathom.kernels.formats.stored import Dense, Fp8, Weight
from fathom.kernels.formats.triton import e4m3, e8m0
from fathom.kernels.formats.triton_rounding import UPCAST, rounded, widened
from fathom.kernels.linear.reference import FEW, Linears, Product, rounds
from fathom.kernels.linear.weight_rows import (
    UNROLLED,
    Lanes,
    all_words,
    columns_of,
    lanes,
    row_products,
    rows_at_once,
    whole_words,
    words,
)
from fathom.kernels.linear.weight_tiles import (
    COUNTERS,
    Planes,
    arrived_last,
    counters,
    inputs,
    multiplied,
    narrow,
    operand,
    planes,
    summed,
)
from fathom.kernels.position import position
from fathom.kernels.quantise.triton import simulate_fp8

ROWS = 4  # of a program, at most; half as many of several tokens, whose sums all have registers, and of a dense matrix
MANY = 1024  # tokens from which Fp8 is decoded first: of 8192 an H200 took half as long so; of fewer, not measured
DECODED = 4, 1024  # rows and columns that a program decodes
PROGRAMS = 264  # wanted in flight: two for each multiprocessor of an H200
_LAYOUTS = {"FP8": "fp8", "FP8_F32": "fp8", "FP4": "fp4", "NVFP4": "nvfp4"}  # else dense, see `weight_tiles.Planes`


class Tile(NamedTuple):
    """How much of a product one program computes at a time."""

    rows: int  # of W
    tokens: int
    columns: int  # per step
    warps: int
    stages: int


@triton.jit
def _decode(
    data, scale, out, rows, columns, stride, scale_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Fp8 with E8M0 scales in bf16: exactly under those of 2^-124 to 2^119; below, rounded, and beyond, infinite."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask, wide = (row < rows)[:, None] & (column < columns)[None, :], row.to(tl.int64)[:, None]
    code = tl.load(data + wide * stride + column[None, :], mask, 0)
    power = e8m0(tl.load(scale + wide // 128 * scale_stride + column[None, :] // 128, mask, 127))
    tl.store(
        out + wide * columns + column[None, :],
        rounded(e4m3(code, tl.float32, UPCAST) * power, tl.bfloat16, UPCAST),
        mask,
    )


def _decodes(t: int, x: Tensor, weight: Weight) -> bool:
    return t >= MANY and x.dtype == torch.bfloat16 and isinstance(weight, Fp8) and weight.scale.element_size() == 1


def _decoded(weight: Weight) -> Dense:
    (rows, columns), (_, data, scale, _) = weight.shape, planes(weight)
    out = torch.empty(rows, columns, dtype=torch.bfloat16, device=data.device)
    _decode[(triton.cdiv(rows, DECODED[0]), triton.cdiv(columns, DECODED[1]))](
        data, scale, out, rows, columns, data.stride(0), scale.stride(0), ROWS=DECODED[0], COLUMNS=DECODED[1],
        UPCAST=UPCAST, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return Dense(out)


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


@triton.jit(do_not_specialize=["t"])
def _few(
    x, data, scale, global_scale, out, t, rank, columns, width, scale_width, stride, scale_stride, groups,
    FORM: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, STEPS: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Some rows of one group times TOKENS, one after the other: the compiler reads and decodes the rows once.

    Programs of the same rows lie side by side. Numbers of a token are made as those of a token alone, for which axis of
    a tile threads lie along, and so in which order they add, the compiler says for each tile.
    """
    across, tiles = tl.cdiv(t, TOKENS), tl.cdiv(rank, ROWS)
    begin, tile = tl.program_id(0) % across * TOKENS, tl.program_id(0) // across
    group, own = tile // tiles, tile % tiles * ROWS + tl.arange(0, ROWS)
    row, there, token = group * rank + own, own < rank, tl.arange(0, TOKENS)
    found = tl.zeros([TOKENS, ROWS], tl.float32)
    for i in tl.static_range(TOKENS):
        place = (tl.minimum(begin + i, t - 1).to(tl.int64) * groups + group) * columns
        total = row_products(
            x + place, columns, data, scale, row, there, width, scale_width, stride, scale_stride,
            FORM, ROUND=False, ROWS=ROWS, LANES=LANES, STEPS=STEPS, UPCAST=UPCAST,
        )  # fmt: skip
        found = tl.where((token == i)[:, None], total[None, :], found)
    if FORM == "nvfp4":
        found *= tl.load(global_scale)
    token += begin
    target = token.to(tl.int64)[:, None] * (groups * rank) + row[None, :]
    tl.store(out + target, rounded(found, out.dtype.element_ty, UPCAST), (token < t)[:, None] & there[None, :])


@triton.constexpr_function
def constant_of(constants, index):
    """One of several constants, itself a tuple: `constants[index]` in a kernel is no constant to Triton 3.6."""
    return constants[index]


@triton.jit
def _matrix_of(program, matrices, COUNT: tl.constexpr):
    """Which of some matrices a program works at: they begin at programs in their order."""
    begin, rows, data, scale, global_scale, out, beside, period, factor = matrices[0]
    for i in tl.static_range(1, COUNT):
        one = matrices[i]
        own = program >= one[0]
        begin, rows, data = tl.where(own, one[0], begin), tl.where(own, one[1], rows), tl.where(own, one[2], data)
        scale, global_scale = tl.where(own, one[3], scale), tl.where(own, one[4], global_scale)
        out, beside = tl.where(own, one[5], out), tl.where(own, one[6], beside)
        period, factor = tl.where(own, one[7], period), tl.where(own, one[8], factor)
    return begin, rows, data, scale, global_scale, out, beside, period, factor


@triton.jit
def _rows_of_one(x, first, program, kind, HOW: tl.constexpr, ROWS: tl.constexpr, UPCAST: tl.constexpr):
    """Some rows of a matrix of one kind times a token alone."""
    matrices, _, columns, width, scale_width, stride, scale_stride = kind
    COUNT: tl.constexpr = HOW[0]
    FORM: tl.constexpr = HOW[1]
    ROUND: tl.constexpr = HOW[2]
    BIASED: tl.constexpr = HOW[3]
    SCALED: tl.constexpr = HOW[4]
    ADDED: tl.constexpr = HOW[5]
    LANES: tl.constexpr = HOW[6]
    STEPS: tl.constexpr = HOW[7]
    begin, rows, data, scale, global_scale, out, beside, period, factor = _matrix_of(program, matrices, COUNT)
    row = (program - begin) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    total = row_products(
        x, columns, data, scale, row, there, width, scale_width, stride, scale_stride,
        FORM, ROUND, ROWS, LANES, STEPS, UPCAST,
    )  # fmt: skip
    if FORM == "nvfp4":
        total *= tl.load(global_scale)
    if BIASED:
        place = (tl.load(first) % tl.maximum(period, 1)).to(tl.int32)
        biased = period + tl.zeros_like(row) > 0  # the interpreter makes int32 of a scalar's comparison
        added = total + tl.load(beside + place * rows + row, there & biased, 0.0)
        total = tl.where(biased, added, total)
    if ADDED:
        total = tl.load(beside + row, there, 0.0) + widened(rounded(total, x.dtype.element_ty, UPCAST), UPCAST)
    if SCALED:
        narrow = widened(rounded(total, x.dtype.element_ty, UPCAST), UPCAST)
        total = tl.where(factor + tl.zeros_like(total) != 0, narrow * factor, total)
    tl.store(out + row, rounded(total, out.dtype.element_ty, UPCAST), there)


@triton.jit
def _linears(x, first, kinds, HOW: tl.constexpr, ROWS: tl.constexpr, UPCAST: tl.constexpr):
    """Products of a token alone; a program finds its kind of matrix, whose way of being multiplied is in HOW."""
    program = tl.program_id(0)
    for kind in tl.static_range(len(HOW)):
        if (program >= kinds[kind][0][0][0]) & (program < kinds[kind][1]):
            _rows_of_one(x, first, program, kinds[kind], constant_of(HOW, kind), ROWS, UPCAST)


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
    if t <= FEW and (of := words(weight)) is not None:
        along = lanes(of)
        tokens = min(_together(of.form, along), triton.next_power_of_2(t))
        most = ROWS if tokens == 1 and columns_of(of.form) > 8 else ROWS // 2
        at_once = rows_at_once(rows, most, along)
        _few[groups * triton.cdiv(rows // groups, at_once) * triton.cdiv(t, tokens),](
            x, *of[1:], out, t, rows // groups, columns, *of.strides, groups, FORM=of.form, TOKENS=tokens,
            ROWS=at_once, LANES=along.lanes, STEPS=along.steps, UPCAST=UPCAST, num_warps=along.warps,
            enable_fp_fusion=False,
        )  # fmt: skip
        return out
    if _decodes(t, x, weight):
        weight = _decoded(weight)
    stored = planes(weight)
    tile = _tile(stored.form, t, wide=not narrow(x, weight))
    grid, each = _grid(t, groups, rows // groups, columns, tile)
    split = grid[2] > 1
    parts = torch.empty(grid[2], *out.shape, dtype=torch.float32, device=x.device) if split else out
    assert not split or grid[0] * grid[1] <= COUNTERS, f"{grid} tiles"
    constants = {"FORM": stored.form, "ROWS": tile.rows, "TOKENS": tile.tokens, "BLOCK": tile.columns, "UPCAST": UPCAST}
    _linear[grid](
        x, *stored[1:], out, parts, counters(x.device), t, rows // groups, columns, *stored.strides, groups, each,
        SPLIT=split, **constants, OPERAND=operand(x, weight),
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _together(form: str, along: Lanes) -> int:
    """Tokens that a row is decoded for: as many as have registers, of E2M1's 32 columns a thread one."""
    return 1 if columns_of(form) == 32 or along.steps > UNROLLED.value else 4 if along.steps <= 4 else 2


_APART = Linears(linear, simulate_fp8)  # of several tokens, whose rounded input is made once


class _Kind(NamedTuple):
    """What matrices have in common that a program multiplies in the same way."""

    form: str
    rounds: bool
    added: bool
    lanes: Lanes
    dtype: torch.dtype  # of the product
    scales: torch.dtype
    strides: tuple[int, int, int, int]


def linears(x: Tensor, products: Sequence[Product], *, deployed: bool) -> list[Tensor]:
    """Products of several matrices: `kernels.linear.reference.Linears`; those of a token alone in one launch.

    Its numbers are those of `linear`, for a row is added up in the same order.
    """
    stored = all_words(product.weight for product in products) if x.shape[0] == 1 else None
    if not stored:
        return _APART(x, products, deployed=deployed)
    x, kinds = x.contiguous(), _by_kind(x, products, stored, deployed=deployed)
    found: list[Tensor] = [x] * len(products)
    programs, given, how, longest = 0, [], [], max(kind.lanes for kind in kinds)
    at_once = rows_at_once(sum(of.data.shape[-2] for of in stored), ROWS, longest)
    for kind, members in kinds.items():
        matrices = []
        for number in members:
            product, of = products[number], stored[number]
            rows, _ = product.weight.shape
            out = found[number] = torch.empty(1, rows, dtype=kind.dtype, device=x.device)
            beside, period = out if product.added is None else product.added, 0
            if product.bias is not None:
                beside, period = product.bias.table, product.bias.table.shape[0]
            assert beside.is_contiguous(), "rows of what is added to a product lie apart"
            matrices.append((programs, rows, *of[1:], out, beside, period, product.factor or 0.0))
            programs += triton.cdiv(rows, at_once)
        given.append((tuple(matrices), programs, x.shape[1], *kind.strides))
        biased, scaled = (any(products[n][field] is not None for n in members) for field in (2, 3))
        how.append((len(members), kind.form, kind.rounds, biased, scaled, kind.added, *kind.lanes))
    _linears[programs,](
        x, _first(x, products), tuple(given), HOW=tuple(how), ROWS=at_once, UPCAST=UPCAST, num_warps=longest.warps,
        enable_fp_fusion=False,
    )  # fmt: skip
    return found


def _by_kind(
    x: Tensor, products: Sequence[Product], stored: Sequence[Planes], *, deployed: bool
) -> dict[_Kind, list[int]]:
    """Numbers of products, of each kind."""
    kinds: dict[_Kind, list[int]] = {}
    for number, ((weight, wide, bias, factor, added), of) in enumerate(zip(products, stored, strict=True)):
        assert weight.shape[1] == x.shape[1], f"x has {x.shape[1]} columns, the weight {weight.shape[1]}"
        assert bias is None or wide, "a position bias of a product that is rounded"
        assert added is None or not (wide or factor), "something is added to a product that is not rounded again"
        narrow = rounds(weight, deployed=deployed)
        assert not narrow or x.shape[1] % LINEAR_GROUP == 0, f"{x.shape[1]} columns in groups of {LINEAR_GROUP}"
        dtype = torch.float32 if wide or factor is not None else x.dtype
        kind = _Kind(of.form, narrow, added is not None, lanes(of), dtype, of.scale.dtype, of.strides)
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

    Of MANY tokens also Fp8 as it is decoded.

    `form` is how the weight is stored, as `kernels.linear.cpu.grouped_linear_scratch` has it.
    """
    del device
    wide, layout = item == 4 or form in ("F16", "F32"), _LAYOUTS.get(form, "dense")
    more, step, least = 0, _tile(layout, tokens, wide=wide).tokens, FEW if whole_words(form, columns) else 0
    for t in {min(tokens, FEW), *(min(tokens, count * step) for count in range(1, PROGRAMS + 1)), tokens}:
        if t <= least:
            continue
        decoded = form == "FP8" and item == 2 and t >= MANY
        tile = _tile("dense" if decoded else layout, t, wide=wide)
        (_, _, splits), _ = _grid(t, groups, rows // groups, columns, tile)
        more = max(more, (splits * t * rows * 4 if splits > 1 else 0) + decoded * rows * columns * 2)
    return tokens * rows * item + more


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


@lru_cache(maxsize=4096)  # else the host computes it for each launch
def _grid(t: int, groups: int, rank: int, columns: int, tile: Tile) -> tuple[tuple[int, int, int], int]:
    """Tiles of tokens, of rows, and splits of the columns; and the steps of a split."""
    across, down = triton.cdiv(t, tile.tokens), groups * triton.cdiv(rank, tile.rows)
    steps = triton.cdiv(columns, tile.columns)
    splits = max(1, min(triton.cdiv(PROGRAMS, across * down), steps // 4))  # four steps to fill the pipeline
    steps_per_split = triton.cdiv(steps, splits)
    return (across, down, triton.cdiv(steps, steps_per_split)), steps_per_split
