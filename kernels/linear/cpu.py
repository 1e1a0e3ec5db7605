"""Matrix products with weights in their stored form.

For a few tokens every row of the weight is decoded in registers and multiplied at once: what a token takes is the time
in which memory gives the stored bytes. For more, sixteen rows are decoded to fp32 in the core's first cache and
multiplied by four tokens after the other. For many, larger tiles are decoded and multiplied by torch's product, which
is the fastest where it has as much to do.
"""

from typing import Final

import numpy as np
import torch
from numba import types
from torch import Tensor

from kernels.compiled import address, aligned, compiled, each, each_of, loop, numbers
from kernels.formats.cpu import FORMS, ZERO, arrays, convert, decode_part, decode_rows, fetch_part, lay_out, row_times
from kernels.formats.stored import Dense, NvFp4, Weight
from kernels.lanes import add_products, splat, store, store_some, totals

FEW = 4  # tokens up to which rows are multiplied as they are decoded
SOME = 48  # tokens up to which a few rows are
TILE: Final = 1 << 20  # weights of a decoded tile: 4 MiB of fp32
SIXTEEN: Final = 16  # rows that are decoded at once
PART: Final = 256  # columns of these: 16 KiB
SUMS: Final = SIXTEEN * SIXTEEN * 4  # numbers that products of four tokens with these add up in
_INT: Final = types.int64


@loop
def _few_rows(low, high, weight, rows, columns, x, tokens, groups, factor, out):
    for row in range(low, high):
        for t in range(tokens):
            at = (t * groups + row // (rows // groups)) * columns
            out[t * rows + row] = row_times(weight, row, columns, x, at) * np.float32(factor)


@loop
def _lay_rows(low, high, weight, x, apart, columns, narrow, wide, out):
    for row in range(low, high):
        if narrow:
            lay_out(weight, numbers(x, np.uint16), row * apart, columns, out, row * wide)
        else:
            lay_out(weight, numbers(x, np.float32), row * apart, columns, out, row * wide)


@compiled(*((form, _INT, _INT, _INT, _INT, _INT, types.float64, types.boolean, _INT) for form in FORMS.values()))
def _few(weight, rows, columns, x, tokens, groups, factor, narrow, out):
    """``out[t, r] = factor W[r] . x[t, group of r]``; x and out lie at addresses, in bfloat16 where `narrow`."""
    laid, wide = np.empty(tokens * groups * columns, np.float32), np.empty(tokens * rows, np.float32)
    _lay_rows(0, tokens * groups, weight, x, columns, columns, narrow, columns, laid)
    given = (weight, rows, columns, laid, tokens, groups, factor, wide)
    each_of(_few_rows, rows, rows * columns * tokens, given)
    if narrow:
        convert(wide, 0, tokens * rows, numbers(out, np.uint16), 0)
    else:
        convert(wide, 0, tokens * rows, numbers(out, np.float32), 0)


@loop
def _keep(out, at, x, count, narrow):
    if narrow:
        store_some(numbers(out, np.uint16), at, x, count)
    else:
        store_some(numbers(out, np.float32), at, x, count)


@loop
def _some_rows(low, high, weight, rows, columns, x, tokens, groups, wide, factor, narrow, out):
    """Sixteen rows of a group, of as many blocks, times all tokens, filled up to fours; rows of `x` are `wide`."""
    part, sums = aligned(SIXTEEN * PART), aligned((tokens + 3) // 4 * SUMS)
    rank, row, scale = rows // groups, groups * wide, splat(np.float32(factor))
    blocks = (rank + SIXTEEN - 1) // SIXTEEN  # of a group
    for block in range(low, high):
        group, first = block // blocks, block // blocks * rank + block % blocks * SIXTEEN
        some = min(SIXTEEN, (group + 1) * rank - first)
        for i in range(0, len(sums), 16):
            store(sums, i, splat(ZERO))
        for begin in range(0, columns, PART):
            width = min(PART, columns - begin)
            if width % 16:  # what a last sixteen lacks counts nothing
                for i in range(width // 16 * 256, width // 16 * 256 + 256, 16):
                    store(part, i, splat(ZERO))
            for r in range(some):
                fetch_part(weight, first + SIXTEEN + r, columns, begin, begin + width)  # else reading begins too late
                decode_part(weight, first + r, columns, begin, begin + width, part, r * 16, np.int64(256))
            for t in range(0, tokens, 4):
                add_products(x, t * row + group * wide + begin, row, part, (width + 15) // 16, sums, t // 4 * SUMS)
        for t in range(0, tokens, 4):
            a, b, c, d = totals(sums, t // 4 * SUMS)
            _keep(out, t * rows + first, a * scale, some, narrow)
            if t + 1 < tokens:
                _keep(out, (t + 1) * rows + first, b * scale, some, narrow)
            if t + 2 < tokens:
                _keep(out, (t + 2) * rows + first, c * scale, some, narrow)
            if t + 3 < tokens:
                _keep(out, (t + 3) * rows + first, d * scale, some, narrow)


@compiled(*((form, _INT, _INT, _INT, _INT, _INT, types.float64, types.boolean, _INT) for form in FORMS.values()))
def _some(weight, rows, columns, x, tokens, groups, factor, narrow, out):
    """`_few` of more tokens."""
    wide, blocks = (columns + 15) // 16 * 16, groups * ((rows // groups + SIXTEEN - 1) // SIXTEEN)
    laid = aligned((tokens + 3) // 4 * 4 * groups * wide)
    each(_lay_rows, tokens * groups, (weight, x, columns, columns, narrow, wide, laid))
    each(_some_rows, blocks, (weight, rows, columns, laid, tokens, groups, wide, factor, narrow, out))


def linear(x: Tensor, weight: Weight) -> Tensor:
    """``x @ W^T``: `kernels.linear.reference.linear`."""
    return grouped_linear(x[:, None], weight, 1)[:, 0]


def grouped_linear(x: Tensor, weight: Weight, groups: int) -> Tensor:
    """Each group by its own rows of W: `kernels.linear.reference.grouped_linear`."""
    t, (height, columns) = x.shape[0], weight.shape
    assert x.shape[1:] == (groups, columns), f"x is {tuple(x.shape)}, want [t, {groups}, {columns}]"
    assert height % groups == 0, f"{height} rows in {groups} groups"
    assert x.dtype in {torch.bfloat16, torch.float32}, f"x is {x.dtype}, want bfloat16 or float32"
    x = x.contiguous()
    if t > SOME:
        return _by_tiles(x, weight, groups)
    out = torch.empty(t, groups, height // groups, dtype=x.dtype)
    factor = float(weight.global_scale) if isinstance(weight, NvFp4) else 1.0
    run = _few if t <= FEW else _some
    run(arrays(weight), height, columns, address(x), t, groups, factor, x.dtype == torch.bfloat16, address(out))
    return out


@compiled(*((form, _INT, _INT, _INT, _INT, types.boolean, _INT) for form in FORMS.values()))
def _lay(weight, columns, x, apart, vectors, narrow, out):
    """Vectors that begin `apart` in fp32, in the order of `lay_out`; x and out lie at addresses."""
    each(_lay_rows, vectors, (weight, x, apart, columns, narrow, columns, numbers(out, np.float32)))


def _by_tiles(x: Tensor, weight: Weight, groups: int) -> Tensor:
    """[t, groups, in] to [t, groups, out], with torch's product."""
    t, (height, columns) = x.shape[0], weight.shape
    rank, step = height // groups, max(1, TILE // columns)
    out, laid = torch.empty(t, height, dtype=x.dtype), torch.empty(t, columns)
    tile, made = torch.empty(min(step, rank), columns), torch.empty(t, min(step, rank))
    for group in range(groups):
        begin = address(x) + group * columns * x.itemsize
        _lay(arrays(weight), columns, begin, groups * columns, t, x.dtype == torch.bfloat16, address(laid))
        for low in range(group * rank, (group + 1) * rank, step):
            part = slice(low, min(low + step, (group + 1) * rank))
            product = torch.mm(laid, _tile(weight, part, tile).T, out=made[:, : part.stop - low])
            out[:, part] = product * weight.global_scale if isinstance(weight, NvFp4) else product
    return out.view(t, groups, rank)


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
    made = tokens * rows
    if tokens <= FEW:
        return made * item
    if tokens <= SOME:
        return made * item + -(-tokens // 4) * 4 * groups * -(-columns // 16) * 16 * 4
    tile = min(max(1, TILE // columns), rows // groups)
    parts = 2 if form == "NVFP4" else 1  # of results, with the scale of the matrix and without
    return made * item + (tokens * columns + tile * columns + parts * tokens * tile) * 4
