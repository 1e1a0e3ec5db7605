"""Rows of a cache in compiled loops, straight from the stored bytes.

A decoded number is that of `kernels.formats.rows_reference.decode`, bit for bit. A loop that reads rows is compiled
once: which form they have is asked row by row, which takes little beside decoding one.
"""

from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numba import types
from torch import Tensor

from fathom.kernels.compiled import address, compiled, each_of, loop, numbers
from fathom.kernels.formats.cpu import e8m0
from fathom.kernels.formats.groups import INDEX_GROUP, KV_GROUP
from fathom.kernels.formats.stored import Fp4Keys, Fp8Entries, Fp8Keys, Rows
from fathom.kernels.lanes import interleaved, load, load_e2m1, load_some, splat, store, store_some

BF16, FP32, FP8_ENTRIES, FP8_KEYS, FP4_KEYS = range(5)


class RowArrays(NamedTuple):
    """Planes of rows by their types, flat; a plane that a form has not is nowhere."""

    form: int
    width: int  # values in a row
    nope: int  # of these, in FP8
    scales: int  # in a row, padding included
    narrow: Any  # bfloat16: rows, or their rope dims
    wide: Any  # float32: rows, or their scales
    codes: Any  # E4M3, or two E2M1 a byte
    scale: Any  # E8M0


KIND: Final = types.UniTuple(types.int64, 8)  # `RowArrays` with addresses for arrays


def readable(rows: Rows) -> bool:
    """Whether compiled loops read rows in this form, where they are."""
    if isinstance(rows, Tensor):
        return rows.device.type == "cpu" and rows.dtype in {torch.bfloat16, torch.float32}
    return isinstance(rows, Fp8Entries | Fp8Keys | Fp4Keys) and rows[0].device.type == "cpu"


def addresses(rows: Rows) -> tuple[tuple[int, ...], Rows]:
    """Return rows as `row_arrays` takes them, and what the caller keeps: planes that lay apart are copied."""
    if isinstance(rows, Tensor):
        rows = rows.contiguous()
    elif isinstance(rows, Fp8Entries | Fp8Keys | Fp4Keys) and not all(plane.is_contiguous() for plane in rows):
        rows = type(rows)(*(plane.contiguous() for plane in rows))
    match rows:
        case Tensor():
            d, at = rows.shape[1], rows.data_ptr()
            return (
                (BF16, d, 0, 0, at, 0, 0, 0) if rows.dtype == torch.bfloat16 else (FP32, d, 0, 0, 0, at, 0, 0)
            ), rows
        case Fp8Entries(values, rope, scale):
            nope = values.shape[1]
            sizes = FP8_ENTRIES, nope + rope.shape[1], nope, scale.shape[1]
            return (*sizes, rope.data_ptr(), 0, values.data_ptr(), scale.data_ptr()), rows
        case Fp8Keys(values, scale):
            return (FP8_KEYS, values.shape[1], 0, 1, 0, scale.data_ptr(), values.data_ptr(), 0), rows
        case Fp4Keys(packed, scale):
            return (FP4_KEYS, rows.shape[1], 0, scale.shape[1], 0, 0, packed.data_ptr(), scale.data_ptr()), rows
        case _:
            raise NotImplementedError(f"compiled loops read no {type(rows).__name__}")


@loop
def row_arrays(given):
    """What `addresses` gave, as arrays."""
    form, width, nope, scales, narrow, wide, codes, scale = given
    return RowArrays(
        form, width, nope, scales, numbers(narrow, np.uint16), numbers(wide, np.float32), numbers(codes, np.uint8),
        numbers(scale, np.uint8),
    )  # fmt: skip


@loop
def decode_row(rows, row, out, to, step):
    """Decode a row to `out` from `to` on: every sixteen columns `step` behind those before them.

    `step` is an int64: of a number that stands in the code, another loop would be compiled.
    """
    width, form = rows.width, rows.form
    if form == BF16:
        _copied(rows.narrow, row * width, width, out, to, step)
    elif form == FP32:
        _copied(rows.wide, row * width, width, out, to, step)
    elif form == FP8_ENTRIES:
        nope = rows.nope
        for group in range(nope // KV_GROUP):
            begin = row * nope + group * KV_GROUP
            s = splat(e8m0(rows.scale[row * rows.scales + group]))
            for i in range(0, KV_GROUP, 16):
                store(out, to, load(rows.codes, begin + i) * s)
                to += step
        _copied(rows.narrow, row * (width - nope), width - nope, out, to, step)
    elif form == FP8_KEYS:
        s, begin, whole = splat(rows.wide[row]), row * width, width // 16 * 16
        for i in range(0, whole, 16):
            store(out, to, load(rows.codes, begin + i) * s)
            to += step
        if whole < width:
            store_some(out, to, load_some(rows.codes, begin + whole, width - whole) * s, width - whole)
    else:
        for group in range(width // INDEX_GROUP):
            s = splat(e8m0(rows.scale[row * rows.scales + group]))
            even, odd = load_e2m1(rows.codes, (row * width + group * INDEX_GROUP) // 2)
            one, other = interleaved(even * s, odd * s)
            store(out, to, one)
            store(out, to + step, other)
            to += 2 * step


@loop
def _copied(data, begin, count, out, to, step):
    whole = count // 16 * 16
    for i in range(0, whole, 16):
        store(out, to, load(data, begin + i))
        to += step
    if whole < count:
        store_some(out, to, load_some(data, begin + whole, count - whole), count - whole)


@loop
def _decode_rows(low, high, rows, out):
    for row in range(low, high):
        decode_row(rows, row, out, row * rows.width, np.int64(16))


@compiled((KIND, types.int64, types.int64))
def _decode(given, count, out):
    rows, to = row_arrays(given), numbers(out, np.float32)
    each_of(_decode_rows, count, count * rows.width, (rows, to))


def decoded(rows: Rows) -> Tensor:
    """All rows [n, d] float32, in which every value is exact."""
    given, kept = addresses(rows)
    out = torch.empty(rows.shape, dtype=torch.float32)
    _decode(given, kept.shape[0], address(out))
    return out
