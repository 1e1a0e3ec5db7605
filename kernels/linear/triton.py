"""Matrix products with weights in their stored form: tiles decoded in registers, the columns split where rows are few.

How many splits there are follows from the shapes alone, and up to FEW tokens from the weight's shape alone: there a
token's numbers do not depend on how many others there are.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.formats.stored import Weight
from kernels.formats.triton_rounding import UPCAST, rounded
from kernels.linear.weight_tiles import (
    COUNTERS,
    arrived_last,
    counters,
    inputs,
    multiplied,
    narrow,
    operand,
    planes,
    summed,
)

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
