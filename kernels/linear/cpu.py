"""Matrix products with weights in their stored form.

For a few tokens every row of the weight is decoded in registers and multiplied at once: what a token takes is the time
in which memory gives the stored bytes. For more, as many rows as registers have sums for are decoded to fp32 in the
core's first cache and multiplied by sixteen tokens that lie side by side. For many, larger tiles are decoded and
multiplied by torch's product, which is the fastest where it has as much to do.
"""

from typing import Final

import numpy as np
import torch
from numba import types
from torch import Tensor

from kernels.compiled import address, array, compiled, each, each_of, loop, numbers
from kernels.formats.cpu import FORMS, arrays, convert, decode_part, decode_rows, lay_out, row_times
from kernels.formats.stored import Dense, NvFp4, Weight
from kernels.lanes import ROWS, add_products

FEW = 4  # tokens up to which rows are multiplied as they are decoded
SOME = 48  # tokens up to which a few rows are
TILE: Final = 1 << 18  # weights of a decoded tile: 1 MiB of fp32
SIDE: Final = 16  # tokens side by side
LEAST: Final = 16  # rows of which some are taken at once, on every processor
PART: Final = 512  # columns of ROWS rows that are decoded at once: 16 KiB
_INT, _F32 = types.int64, types.float32[::1]


@loop
def _few_rows(low, high, weight, rows, columns, x, tokens, groups, factor, out):
    for row in range(low, high):
        for t in range(tokens):
            at = (t * groups + row // (rows // groups)) * columns
            out[t * rows + row] = row_times(weight, row, columns, x, at) * np.float32(factor)


@compiled(*((form, _INT, _INT, _INT, _INT, _INT, types.float64, types.boolean, _INT) for form in FORMS.values()))
def _few(weight, rows, columns, x, tokens, groups, factor, narrow, out):
    """``out[t, r] = factor W[r] . x[t, group of r]``; x and out lie at addresses, in bfloat16 where `narrow`."""
    laid, wide = np.empty(tokens * groups * columns, np.float32), np.empty(tokens * rows, np.float32)
    for at in range(0, tokens * groups * columns, columns):
        if narrow:
            lay_out(weight, numbers(x, np.uint16), at, columns, laid)
        else:
            lay_out(weight, numbers(x, np.float32), at, columns, laid)
    given = (weight, rows, columns, laid, tokens, groups, factor, wide)
    each_of(_few_rows, rows, rows * columns * tokens, given)
    if narrow:
        convert(wide, 0, tokens * rows, numbers(out, np.uint16), 0)
    else:
        convert(wide, 0, tokens * rows, numbers(out, np.float32), 0)


@loop
def _some_rows(low, high, weight, rows, columns, x, side, groups, out):
    part = np.empty(ROWS * PART, np.float32)
    rank = rows // groups
    blocks = (rank + ROWS - 1) // ROWS  # of a group; the last one begins so early that it is whole
    for block in range(low, high):
        group, first = block // blocks, block // blocks * rank + min(block % blocks * ROWS, rank - ROWS)
        for begin in range(0, columns, PART):
            width = min(PART, columns - begin)
            for r in range(ROWS):
                decode_part(weight, first + r, columns, begin, begin + width, part, r * PART)
            for t in range(0, side, 16):
                place = (group * columns + begin) * side + t
                add_products(part, PART, width, x, place, side, out, first * side + t, side, begin > 0)


@compiled(*((form, _INT, _INT, _F32, _INT, _INT, _F32) for form in FORMS.values()))
def _some(weight, rows, columns, x, side, groups, out):
    """``out[r, t] = W[r] . x[group of r, :, t]`` of tokens that lie side by side, a multiple of sixteen."""
    each(_some_rows, groups * ((rows // groups + ROWS - 1) // ROWS), (weight, rows, columns, x, side, groups, out))


def linear(x: Tensor, weight: Weight) -> Tensor:
    """``x @ W^T``: `kernels.linear.reference.linear`."""
    if x.shape[0] <= FEW:
        return _rows_of_few(x, weight, 1)
    return grouped_linear(x[:, None], weight, 1)[:, 0]


def grouped_linear(x: Tensor, weight: Weight, groups: int) -> Tensor:
    """Each group by its own rows of W: `kernels.linear.reference.grouped_linear`."""
    t, (height, columns) = x.shape[0], weight.shape
    assert x.shape[1:] == (groups, columns), f"x is {tuple(x.shape)}, want [t, {groups}, {columns}]"
    if t <= FEW:
        return _rows_of_few(x, weight, groups).view(t, groups, height // groups)
    wide = _side_by_side(x, weight, groups)
    if isinstance(weight, NvFp4):
        wide *= weight.global_scale
    out = wide.contiguous().to(x.dtype)  # one pass each takes a third of the time of both in one
    return out.view(t, groups, height // groups)


def _rows_of_few(x: Tensor, weight: Weight, groups: int) -> Tensor:
    """[t, ..., in] to [t, out] in the dtype of x."""
    t, (height, columns) = x.shape[0], weight.shape
    assert x.shape[-1] == columns, f"x is {tuple(x.shape)}, want columns of the weight {columns}"
    out = torch.empty(t, height, dtype=x.dtype)
    factor, x = float(weight.global_scale) if isinstance(weight, NvFp4) else 1.0, x.contiguous()
    narrow = x.dtype == torch.bfloat16
    _few(arrays(weight), height, columns, address(x), t, groups, factor, narrow, address(out))
    return out


def _side_by_side(x: Tensor, weight: Weight, groups: int) -> Tensor:
    """[t, groups, in] to [t, out] float32, of tokens filled up to a multiple of SIDE with zeros."""
    t, (height, columns) = x.shape[0], weight.shape
    rank, step = height // groups, max(1, TILE // columns)
    side = torch.zeros(groups, columns, -(-t // SIDE) * SIDE)
    side[..., :t] = x.permute(1, 2, 0)
    out = torch.empty(height, side.shape[2])
    if _in_parts(t, rank):
        _some(arrays(weight), height, columns, array(side), side.shape[2], groups, array(out))
    else:
        buffer = torch.empty(min(step, rank), columns)
        for group in range(groups):
            for low in range(group * rank, (group + 1) * rank, step):
                part = slice(low, min(low + step, (group + 1) * rank))
                torch.mm(_tile(weight, part, buffer), side[group], out=out[part])
    return out[:, :t].T


def _in_parts(tokens: int, rank: int) -> bool:
    return tokens <= SOME and rank >= LEAST


def _tile(weight: Weight, part: slice, buffer: Tensor) -> Tensor:
    """Some rows of a weight in fp32, in the buffer where they are not stored so."""
    if isinstance(weight, Dense) and weight.data.dtype == torch.float32:
        return weight.data[part]
    return decode_rows(weight, part.start, buffer[: part.stop - part.start])


def linear_scratch(tokens: int, rows: int, columns: int, form: str, item: int, device: torch.device) -> int:
    """Bytes alive at most in `linear`, the result included; see `grouped_linear_scratch`."""
    return grouped_linear_scratch(tokens, rows, columns, 1, form, item, device)


def grouped_linear_scratch(
    tokens: int, rows: int, columns: int, groups: int, form: str, item: int, device: torch.device
) -> int:
    """Bytes alive at most in `grouped_linear`, the result included: inputs in fp32, fp32 results, a decoded tile.

    `form` is how the weight is stored: BF16, F16, F32, FP8 (E8M0 scales), FP8_F32 (those in F32), FP4 or NVFP4.
    """
    del device
    if tokens <= FEW:
        return tokens * rows * item
    given, out = groups * columns * 4, rows * (4 + item)
    side, rank = -(-tokens // SIDE) * SIDE, rows // groups
    tile = 0 if _in_parts(tokens, rank) else min(max(1, TILE // columns), rank) * columns * 4
    return side * rows * 4 + max(side * given + tile, tokens * (out if item < 4 else rows * 4))
