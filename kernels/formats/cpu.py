"""Stored weights in compiled loops: a row times a vector, and parts of rows decoded; straight from the stored bytes.

A decoded number is that of `kernels.formats.reference.decode`, bit for bit. A row's product with a vector adds up in
one order whatever stands around it: a token has the same bits alone and among a few, on every number of threads.

Loops are written once for all forms: what they call, `row_times` and `decode_part`, has an implementation for each.
"""

from typing import Any, Final, NamedTuple

import numpy as np
from numba import types
from numba.extending import overload
from torch import Tensor

from kernels.compiled import array, compiled, each, kept_array, loop, moved
from kernels.formats.groups import FP4_BLOCK, FP8_BLOCK, NVFP4_BLOCK
from kernels.formats.stored import Dense, Fp4, Fp8, NvFp4, Weight
from kernels.lanes import (
    apart,
    bits,
    fetch,
    fma,
    load,
    load_pairs,
    load_some,
    load_some_pairs,
    splat,
    splat_e4m3,
    store,
    store_some,
    total,
)  # fmt: skip

ZERO: Final = np.float32(0)
BYTES: Final = 16  # that `load_pairs` takes: 32 columns, two groups of NVFP4


class DenseArrays(NamedTuple):
    """BF16, F16 or F32, flat."""

    data: Any


class Fp8Arrays(NamedTuple):
    """E4M3, flat, and the scales of blocks of 128 x 128."""

    data: Any
    scale: Any


class Fp4Arrays(NamedTuple):
    """Two E2M1 a byte, flat, and E8M0 scales of 32 columns."""

    data: Any
    scale: Any


class NvFp4Arrays(NamedTuple):
    """Two E2M1 a byte, flat, and E4M3 scales of 16 columns; the scale of the whole matrix is its caller's."""

    data: Any
    scale: Any


Arrays = DenseArrays | Fp8Arrays | Fp4Arrays | NvFp4Arrays
_U8, _F32 = types.uint8[::1], types.float32[::1]
_ARRAYS: Final = {  # the types of a weight's arrays, by the name of its form
    "BF16": ((types.uint16[::1],), DenseArrays),
    "F16": ((types.int16[::1],), DenseArrays),
    "F32": ((_F32,), DenseArrays),
    "FP8": ((_U8, _U8), Fp8Arrays),
    "FP8_F32": ((_U8, _F32), Fp8Arrays),
    "FP4": ((_U8, _U8), Fp4Arrays),
    "NVFP4": ((_U8, _U8), NvFp4Arrays),
}
FORMS: Final = {name: types.BaseTuple.from_types(*planes) for name, planes in _ARRAYS.items()}


def arrays(weight: Weight) -> Arrays:
    """Return a weight as compiled loops take it; of one whose rows lie apart a copy."""
    match weight:
        case Dense(data):
            return DenseArrays(kept_array(data))
        case Fp8(data, scale):
            return Fp8Arrays(kept_array(data), kept_array(scale))
        case Fp4(data, scale):
            return Fp4Arrays(kept_array(data), kept_array(scale))
        case NvFp4(data, scale, _):
            return NvFp4Arrays(kept_array(data), kept_array(scale))


def decode_rows(weight: Weight, first: int, out: Tensor) -> Tensor:
    """Decode rows of a matrix, from `first` on, to `out` [rows, in] float32, in the order of `lay_out`.

    The scale of a whole matrix is not in them.
    """
    _decode(arrays(weight), first, *out.shape, array(out))
    return out


@loop
def _decode_part_rows(low, high, weight, first, columns, out):
    for row in range(low, high):
        decode_part(weight, first + row, columns, 0, columns, out, row * columns, np.int64(16))


@compiled(*((form, types.int64, types.int64, types.int64, _F32) for form in FORMS.values()))
def _decode(weight, first, rows, columns, out):
    each(_decode_part_rows, rows, (weight, first, columns, out))


# --- what a form has of its own


def row_times(weight: Arrays, row: int, columns: int, x: Any, at: int) -> Any:
    """One row times the vector that begins in x at `at`, in the order of `lay_out`."""
    raise NotImplementedError  # of compiled loops alone


def lay_out(weight: Arrays, x: Any, at: int, columns: int, out: Any, to: int) -> None:
    """Copy the vector that begins in x at `at` to `out` from `to` on, in the order in which numbers are decoded.

    That is theirs; where two share a byte, of 32 the sixteen at even places, then the others, of a last 16 eight each.
    """
    raise NotImplementedError


def decode_part(weight: Arrays, row: int, columns: int, low: int, high: int, out: Any, to: int, step: Any) -> None:
    """Decode columns low .. high - 1 of a row to `out` from `to` on, each sixteen `step` numbers after those before.

    Both are multiples of 128, or `high` is the end. The order is that of `lay_out`.
    """
    raise NotImplementedError


def fetch_part(weight: Arrays, row: int, columns: int, low: int, high: int) -> None:
    """Ask memory for the stored bytes of columns low .. high - 1 of a row, of one beyond the last too."""
    raise NotImplementedError


@loop
def convert(x, at, count, out, to):
    """Copy numbers of a flat array, from `at` on, to another of any kind, from `to` on."""
    whole = count // 16 * 16
    for i in range(0, whole, 16):
        store(out, to + i, load(x, at + i))
    if whole < count:
        store_some(out, to + whole, load_some(x, at + whole, count - whole), count - whole)


def _in_order(weight, x, at, columns, out, to):
    convert(x, at, columns, out, to)


def _even_first(weight, x, at, columns, out, to):
    whole = columns // 32 * 32
    for i in range(0, whole, 32):
        even, odd = apart(load(x, at + i), load(x, at + i + 16))
        store(out, to + i, even)
        store(out, to + i + 16, odd)
    if whole < columns:
        even, odd = apart(load(x, at + whole), splat(ZERO))
        store_some(out, to + whole, even, 8)
        store_some(out, to + whole + 8, odd, 8)


def _dense_times(weight, row, columns, x, at):
    data, begin, whole = weight.data, row * columns, columns // 64 * 64
    a = b = c = d = splat(ZERO)
    for i in range(0, whole, 64):
        a = fma(load(data, begin + i), load(x, at + i), a)
        b = fma(load(data, begin + i + 16), load(x, at + i + 16), b)
        c = fma(load(data, begin + i + 32), load(x, at + i + 32), c)
        d = fma(load(data, begin + i + 48), load(x, at + i + 48), d)
    for i in range(whole, columns, 16):
        a = fma(load_some(data, begin + i, columns - i), load_some(x, at + i, columns - i), a)
    return total((a + b) + (c + d))


def _dense_part(weight, row, columns, low, high, out, to, step):
    begin, whole = row * columns, low + (high - low) // 16 * 16
    for i in range(low, whole, 16):
        store(out, to, load(weight.data, begin + i))
        to += step
    if whole < high:
        store_some(out, to, load_some(weight.data, begin + whole, high - whole), high - whole)


def _fp8_times(weight, row, columns, x, at):
    data, begin, blocks = weight.data, row * columns, (columns + FP8_BLOCK - 1) // FP8_BLOCK
    a = b = c = d = splat(ZERO)
    for block in range(blocks):
        s = splat(scale_of(weight.scale, row // FP8_BLOCK * blocks + block))
        high = min((block + 1) * FP8_BLOCK, columns)
        whole = block * FP8_BLOCK + (high - block * FP8_BLOCK) // 64 * 64
        for i in range(block * FP8_BLOCK, whole, 64):
            a = fma(load(data, begin + i) * s, load(x, at + i), a)
            b = fma(load(data, begin + i + 16) * s, load(x, at + i + 16), b)
            c = fma(load(data, begin + i + 32) * s, load(x, at + i + 32), c)
            d = fma(load(data, begin + i + 48) * s, load(x, at + i + 48), d)
        for i in range(whole, high, 16):
            a = fma(load_some(data, begin + i, high - i) * s, load_some(x, at + i, high - i), a)
    return total((a + b) + (c + d))


def _fp8_part(weight, row, columns, low, high, out, to, step):
    blocks = (columns + FP8_BLOCK - 1) // FP8_BLOCK
    for begin in range(low, high, FP8_BLOCK):
        s = splat(scale_of(weight.scale, row // FP8_BLOCK * blocks + begin // FP8_BLOCK))
        i, end = begin, min(begin + FP8_BLOCK, high)
        while i + 16 <= end:
            store(out, to, load(weight.data, row * columns + i) * s)
            i += 16
            to += step
        if i < end:
            store_some(out, to, load_some(weight.data, row * columns + i, end - i) * s, end - i)


def _fp4_times(weight, row, columns, x, at):
    groups = columns // FP4_BLOCK
    a = b = splat(ZERO)
    for group in range(groups):
        s, place = splat(e8m0(weight.scale[row * groups + group])), at + group * FP4_BLOCK
        even, odd = load_pairs(weight.data, (row * groups + group) * BYTES)
        a = fma(even * s, load(x, place), a)
        b = fma(odd * s, load(x, place + 16), b)
    return total(a + b)


def _fp4_part(weight, row, columns, low, high, out, to, step):
    for i in range(low, high, FP4_BLOCK):
        group = (row * columns + i) // FP4_BLOCK
        s = splat(e8m0(weight.scale[group]))
        even, odd = load_pairs(weight.data, group * BYTES)
        store(out, to, even * s)
        store(out, to + step, odd * s)
        to += 2 * step


def _nvfp4_times(weight, row, columns, x, at):
    groups, width = columns // NVFP4_BLOCK, columns // 2
    a = b = splat(ZERO)
    for pair in range(groups // 2):
        group, place = row * groups + 2 * pair, at + 2 * pair * NVFP4_BLOCK
        s = splat_e4m3(weight.scale[group], weight.scale[group + 1])
        even, odd = load_pairs(weight.data, row * width + pair * BYTES)
        a = fma(even * s, load(x, place), a)
        b = fma(odd * s, load(x, place + 16), b)
    if groups % 2:
        group, place = row * groups + groups - 1, at + columns - NVFP4_BLOCK
        s = splat_e4m3(weight.scale[group], weight.scale[group])
        even, odd = load_some_pairs(weight.data, row * width + width - 8, 8)
        a = fma(even * s, load_some(x, place, 8), a)
        b = fma(odd * s, load_some(x, place + 8, 8), b)
    return total(a + b)


def _nvfp4_part(weight, row, columns, low, high, out, to, step):
    for i in range(low, high // 32 * 32, 32):
        group = (row * columns + i) // NVFP4_BLOCK
        s = splat_e4m3(weight.scale[group], weight.scale[group + 1])
        even, odd = load_pairs(weight.data, group * 8)
        store(out, to, even * s)
        store(out, to + step, odd * s)
        to += 2 * step
    if high % 32:
        group = (row * columns + high) // NVFP4_BLOCK - 1
        s = splat_e4m3(weight.scale[group], weight.scale[group])
        even, odd = load_some_pairs(weight.data, group * 8, 8)
        store_some(out, to, even * s, 8)
        store_some(out, to + 8, odd * s, 8)


def _one_each(weight, row, columns, low, high):
    for i in range(low, high, 64 // weight.data.itemsize):
        fetch(weight.data, row * columns + i)


def _two_a_byte(weight, row, columns, low, high):
    for i in range(low, high, 128):
        fetch(weight.data, (row * columns + i) // 2)


@overload(fetch_part)
def _fetch_part(weight, row, columns, low, high):
    return {
        DenseArrays: _one_each, Fp8Arrays: _one_each, Fp4Arrays: _two_a_byte, NvFp4Arrays: _two_a_byte,
    }[weight.instance_class]  # fmt: skip


@overload(row_times)
def _row_times(weight, row, columns, x, at):
    return {
        DenseArrays: _dense_times, Fp8Arrays: _fp8_times, Fp4Arrays: _fp4_times, NvFp4Arrays: _nvfp4_times,
    }[weight.instance_class]  # fmt: skip


@overload(lay_out)
def _lay_out(weight, x, at, columns, out, to):
    return {
        DenseArrays: _in_order, Fp8Arrays: _in_order, Fp4Arrays: _even_first, NvFp4Arrays: _even_first,
    }[weight.instance_class]  # fmt: skip


@overload(decode_part)
def _decode_part(weight, row, columns, low, high, out, to, step):
    return {
        DenseArrays: _dense_part, Fp8Arrays: _fp8_part, Fp4Arrays: _fp4_part, NvFp4Arrays: _nvfp4_part,
    }[weight.instance_class]  # fmt: skip


@loop
def e8m0(byte):
    """``2^(byte - 127)``: 255 is NaN, 0 a subnormal number; both are told from the others by one more bit."""
    code = np.uint32(byte)
    beyond = np.uint32(code - np.uint32(1)) >= np.uint32(254)
    return bits(np.uint32((code << np.uint32(23)) | (np.uint32(beyond) << np.uint32(22))))


def placed(weight: Arrays, data: int, scale: int) -> Arrays:
    """A matrix of the same form and shape at other addresses."""
    raise NotImplementedError


@overload(placed)
def _placed(weight, data, scale):
    return {
        DenseArrays: lambda weight, data, scale: DenseArrays(moved(weight.data, data)),
        Fp8Arrays: lambda weight, data, scale: Fp8Arrays(moved(weight.data, data), moved(weight.scale, scale)),
        Fp4Arrays: lambda weight, data, scale: Fp4Arrays(moved(weight.data, data), moved(weight.scale, scale)),
        NvFp4Arrays: lambda weight, data, scale: NvFp4Arrays(moved(weight.data, data), moved(weight.scale, scale)),
    }[weight.instance_class]


def scale_of(scale: Any, index: int) -> Any:
    """Return a scale of `Fp8`, stored in E8M0 or float32."""
    raise NotImplementedError


@overload(scale_of)
def _scale_of(scale, index):
    if scale.dtype == types.float32:
        return lambda scale, index: scale[index]
    return lambda scale, index: e8m0(scale[index])
