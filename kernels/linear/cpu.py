"""Matrix products with weights in their stored form.

A token alone is multiplied by four rows at once as they are decoded, in registers: what it takes is the time in which
memory gives the stored bytes. For more, sixteen rows are decoded to the core's cache and multiplied by four tokens
after the other. Both add up in one order: a token's numbers do not depend on those beside it, nor on how a prompt is
cut into calls, nor on threads.

Where activations are bfloat16, and the processor multiplies that (AVX512-BF16), so are weights whose numbers it all
holds: products are exact, sums in fp32, as everywhere. An activation or a sum below 2^-126 counts as 0 there, also
beside infinity, as the processor's instruction has it.
"""

from typing import Any, Final

import numpy as np
import torch
from numba import types
from torch import Tensor

from fathom.kernels.compiled import address, aligned, compiled, each_of, loop, numbers
from fathom.kernels.formats.cpu import FORMS, ZERO, arrays, fetch, held_in_bfloat16, lay_out, taken
from fathom.kernels.formats.stored import NvFp4, Weight
from fathom.kernels.lanes import (
    PAIRS,
    PIECE,
    add_products,
    load,
    multiply,
    piece,
    put,
    splat,
    store,
    store_some,
    total,
    totals,
)

SIXTEEN: Final = 16  # rows that are decoded at once
PART: Final = 2048  # bytes of each, before the next part of their columns: 32 KiB, which the first cache holds
SUMS: Final = SIXTEEN * SIXTEEN * 4  # numbers that products of four tokens with these add up in
PANEL = 256  # tokens that are multiplied by them: of a group 2 MiB for 4,096 columns in bfloat16
_INT: Final = types.int64
WIDE, NARROW = np.empty(0, np.float32), np.empty(0, np.uint16)  # what pieces lie in, see `pieces_of`
IN_BFLOAT16: Final = {"BF16", "FP8", "FP8_F32", "FP4", "NVFP4"} if PAIRS else set()
KINDS: Final = [  # the types of a weight and of pieces
    (form, kind)
    for name, form in FORMS.items()
    for kind in ((types.float32[::1], types.uint16[::1]) if name in IN_BFLOAT16 else (types.float32[::1],))
]


def pieces_of(x: Tensor, *weights: Weight) -> Any:
    """An array of the kind in which pieces of x and of weights lie: of bfloat16, or of fp32."""
    if not PAIRS or x.dtype != torch.bfloat16:
        return WIDE
    for weight in weights:
        if not held_in_bfloat16(weight):
            return WIDE
    return NARROW


@loop
def padded(columns):
    """Columns filled up to whole pieces."""
    return (columns + PIECE - 1) // PIECE * PIECE


@loop
def four_rows(weight, row, last, columns, x, at):
    """Four rows from `row` on, up to the last, times the vector that begins in x at `at`, laid out: their products."""
    r1, r2, r3 = min(row + 1, last), min(row + 2, last), min(row + 3, last)
    a = b = c = d = splat(ZERO)
    for i in range(0, columns, PIECE):
        given = piece(x, at + i)
        for ahead in range(8, 12):  # else reading begins too late
            fetch(weight, row + ahead, columns, i)
        a = multiply(taken(weight, row, columns, i, x), given, a)
        b = multiply(taken(weight, r1, columns, i, x), given, b)
        c = multiply(taken(weight, r2, columns, i, x), given, c)
        d = multiply(taken(weight, r3, columns, i, x), given, d)
    return total(a), total(b), total(c), total(d)


@loop
def _keep(out, at, x, count, rounded):
    if rounded:
        store_some(numbers(out, np.uint16), at, x, count)
    else:
        store_some(numbers(out, np.float32), at, x, count)


@loop
def _lay_rows(low, high, weight, x, columns, wide, narrow, out):
    for row in range(low, high):
        if narrow:
            lay_out(weight, numbers(x, np.uint16), row * columns, columns, out, row * wide)
        else:
            lay_out(weight, numbers(x, np.float32), row * columns, columns, out, row * wide)


@loop
def _sixteen_rows(low, high, weight, rows, columns, x, tokens, groups, factor, rounded, out):
    """Sixteen rows of a group, of as many blocks, times all tokens, filled up to fours and to whole pieces."""
    wide, rank, scale, step = padded(columns), rows // groups, splat(np.float32(factor)), PART // x.itemsize
    found, part = np.empty(SIXTEEN, np.float32), aligned(SIXTEEN * step if tokens > 1 else 0, x)
    sums = aligned((tokens + 3) // 4 * SUMS if tokens > 1 else 0, found)
    blocks, stride = (rank + SIXTEEN - 1) // SIXTEEN, groups * wide
    for block in range(low, high):
        group, first = block // blocks, block // blocks * rank + block % blocks * SIXTEEN
        some = min(SIXTEEN, (group + 1) * rank - first)
        if tokens == 1:
            for r in range(0, some, 4):
                four = four_rows(weight, first + r, first + some - 1, columns, x, group * wide)
                found[r], found[r + 1], found[r + 2], found[r + 3] = four
            _keep(out, first, load(found, 0) * scale, some, rounded)
            continue
        for i in range(0, len(sums), 16):
            store(sums, i, splat(ZERO))
        for begin in range(0, columns, step):
            width, following = min(step, wide - begin), begin + step
            ahead = 0 if following < columns else SIXTEEN  # rows; else reading begins too late
            for r in range(some):
                at = r // 4 * 4 * width + r % 4 * PIECE
                for i in range(0, width, PIECE):
                    fetch(weight, first + r + ahead, columns, i if ahead else following + i)
                    put(part, at + 4 * i, taken(weight, first + r, columns, begin + i, x))
            for t in range(0, tokens, 4):
                at = t * stride + group * wide + begin
                add_products(x, at, stride, part, width // PIECE, sums, t // 4 * SUMS)
        for t in range(0, tokens, 4):
            a, b, c, d = totals(sums, t // 4 * SUMS)
            _keep(out, t * rows + first, a * scale, some, rounded)
            if t + 1 < tokens:
                _keep(out, (t + 1) * rows + first, b * scale, some, rounded)
            if t + 2 < tokens:
                _keep(out, (t + 2) * rows + first, c * scale, some, rounded)
            if t + 3 < tokens:
                _keep(out, (t + 3) * rows + first, d * scale, some, rounded)


@compiled(
    *(
        (form, _INT, _INT, _INT, _INT, _INT, types.float64, types.boolean, types.boolean, _INT, kind)
        for form, kind in KINDS
    )
)
def _linear(weight, rows, columns, x, tokens, groups, factor, narrow, rounded, out, like):
    """``out[t, r] = factor W[r] . x[t, group of r]``; x, bfloat16 if `narrow`, and out, if `rounded`, at addresses."""
    wide, blocks = padded(columns), groups * ((rows // groups + SIXTEEN - 1) // SIXTEEN)
    laid = aligned((tokens + 3) // 4 * 4 * groups * wide, like)
    each_of(_lay_rows, tokens * groups, tokens * groups * columns, (weight, x, columns, wide, narrow, laid))
    given = (weight, rows, columns, laid, tokens, groups, factor, rounded, out)
    each_of(_sixteen_rows, blocks, rows * columns * tokens, given)


def linear(x: Tensor, weight: Weight, *, wide: bool = False) -> Tensor:
    """``x @ W^T``: `kernels.linear.reference.linear`."""
    height, columns = weight.shape
    assert x.shape[1:] == (columns,), f"x is {tuple(x.shape)}, want [t, {columns}]"
    return _product(x, weight, 1, torch.empty(x.shape[0], height, dtype=torch.float32 if wide else x.dtype))


def grouped_linear(x: Tensor, weight: Weight, groups: int) -> Tensor:
    """Each group by its own rows of W: `kernels.linear.reference.grouped_linear`."""
    height, columns = weight.shape
    assert x.shape[1:] == (groups, columns), f"x is {tuple(x.shape)}, want [t, {groups}, {columns}]"
    assert height % groups == 0, f"{height} rows in {groups} groups"
    return _product(x, weight, groups, torch.empty(x.shape[0], groups, height // groups, dtype=x.dtype))


def _product(x: Tensor, weight: Weight, groups: int, out: Tensor) -> Tensor:
    assert x.dtype in {torch.bfloat16, torch.float32}, f"x is {x.dtype}, want bfloat16 or float32"
    x, t, item, (height, columns) = x.contiguous(), x.shape[0], x.itemsize, weight.shape
    factor = float(weight.global_scale) if isinstance(weight, NvFp4) else 1.0
    planes, like, narrow = arrays(weight), pieces_of(x, weight), item == 2
    given, made = address(x), address(out)
    for begin in range(0, t, PANEL):
        at, to = given + begin * groups * columns * item, made + begin * height * out.itemsize
        _linear(planes, height, columns, at, min(PANEL, t - begin), groups, factor, narrow, out.itemsize == 2, to, like)
    return out


def linear_scratch(
    tokens: int, rows: int, columns: int, form: str, item: int, device: torch.device, *, wide: bool = False
) -> int:
    """Bytes alive at most in `linear`, the result included; see `grouped_linear_scratch`."""
    more = tokens * rows * (4 - item) if wide else 0
    return grouped_linear_scratch(tokens, rows, columns, 1, form, item, device) + more


def grouped_linear_scratch(
    tokens: int, rows: int, columns: int, groups: int, form: str, item: int, device: torch.device
) -> int:
    """Bytes alive at most in `grouped_linear`: the result, the inputs of a panel, laid out, and each thread's sums.

    `form` is how the weight is stored: BF16, F16, F32, FP8 (E8M0 scales), FP8_F32 (those in F32), FP4 or NVFP4.
    """
    del device
    fours = -(-min(tokens, PANEL) // 4)
    laid = fours * 4 * groups * -(-columns // PIECE) * PIECE
    narrow = item == 2 and form in IN_BFLOAT16 - {"BF16", "FP8_F32"}  # those may be multiplied in fp32
    each_thread = (fours * SUMS * 4 + SIXTEEN * PART) if tokens > 1 else 0
    return tokens * rows * item + laid * (2 if narrow else 4) + torch.get_num_threads() * each_thread
