"""Stored weights in compiled loops: a piece of a row decoded, straight from the stored bytes.

A decoded number is that of `kernels.formats.reference.decode`, bit for bit. Products take it as fp32; or as bfloat16,
where the activations are, bfloat16 holds every number of the matrix, and the processor multiplies it.

Loops are written once for all forms: what they call, `taken` and `lay_out`, has an implementation for each.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numba import types
from numba.extending import overload
from torch import Tensor

from fathom.kernels.compiled import array, compiled, each, kept_array, loop, moved
from fathom.kernels.formats.groups import FP4_BLOCK, NVFP4_BLOCK
from fathom.kernels.formats.stored import Dense, Fp4, Fp8, NvFp4, Weight
from fathom.kernels.lanes import (
    PIECE,
    apart,
    as_piece,
    at_most,
    e2m1_pairs,
    fetch_line,
    first,
    highest,
    load,
    load_e2m1,
    load_piece,
    load_some,
    load_some_e2m1,
    maximum,
    piece,
    size,
    splat,
    splat_e4m3,
    store,
    store_some,
)  # fmt: skip

ZERO: Final = np.float32(0)
BYTES: Final = 16  # that `load_e2m1` takes: 32 columns, two groups of NVFP4
LEAST: Final = 9 - 126  # exponent of scales: E4M3 begins at 2^-9, numbers that are not subnormal at 2^-126
MOST: Final = 127 - 9  # E4M3 ends at 448
_POWERS: Final = np.append(np.ldexp(np.float32(1), np.arange(255) - 127), np.float32(np.nan))  # by code of E8M0
_ASKED: Final = "held_in_bfloat16"  # the attribute of a tensor


class DenseArrays(NamedTuple):
    """BF16, F16 or F32, flat."""

    data: Any


class Fp8Arrays(NamedTuple):
    """E4M3, flat, and the scales of square blocks."""

    data: Any
    scale: Any
    power: Any  # rows and columns of a block are 2 to this


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
    "FP8": ((_U8, _U8, types.int64), Fp8Arrays),
    "FP8_F32": ((_U8, _F32, types.int64), Fp8Arrays),
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
            return Fp8Arrays(kept_array(data), kept_array(scale), weight.block.bit_length() - 1)
        case Fp4(data, scale):
            return Fp4Arrays(kept_array(data), kept_array(scale))
        case NvFp4(data, scale, _):
            return NvFp4Arrays(kept_array(data), kept_array(scale))


def held_in_bfloat16(weight: Weight) -> bool:
    """Whether a matrix may be multiplied as bfloat16: that has all its numbers, and no subnormal one among them.

    Of `Dense` the numbers are looked at; else the scales, which must be powers of two (of NVFP4 E4M3) of a common size.
    It is found out once for a tensor. Where a matrix is cut over ranks, each finds it out for its rows: only then, and
    with such numbers in some rows alone, may sums of others be rounded otherwise than on one rank.
    """
    match weight:
        case Dense(data):
            return data.dtype == torch.bfloat16 and _once(data, _no_subnormal)
        case Fp8(_, scale):
            return _once(scale, _powers_of_two if scale.dtype == torch.float32 else _ordinary)
        case Fp4(_, scale):
            return _once(scale, _ordinary)
        case NvFp4(_, _, factor):  # two bits times four
            return _once(factor, _of_a_common_size)


def _once(x: Tensor, asked: Callable[[Tensor], bool]) -> bool:
    """What is asked of a parameter, kept with its tensor until that is changed."""
    version = 0 if x.is_inference() else x._version  # noqa: SLF001
    found: tuple[int, bool] | None = getattr(x, _ASKED, None)
    if found is None or found[0] != version:
        found = version, asked(x)
        setattr(x, _ASKED, found)
    return found[1]


def _of_a_common_size(factor: Tensor) -> bool:
    """Whether a sum that counts as 0 before it, below 2^-126, is next to nothing behind it too."""
    return 2.0**-64 <= float(factor) <= 2.0**64


def _ordinary(scale: Tensor) -> bool:
    """Whether every scale in E8M0 is from 2^LEAST to 2^MOST: no number is subnormal with it, infinite, or NaN."""
    if scale.numel() == 0:
        return True
    lowest, highest = torch.aminmax(scale.view(torch.uint8))
    return bool(lowest >= LEAST + 127) and bool(highest <= MOST + 127)


def _powers_of_two(scale: Tensor) -> bool:
    """The same of scales in fp32, and whether they are powers of two."""
    fraction, exponent = torch.frexp(scale)  # of a power of two 1/2 of the next
    return bool(((fraction == 0.5) & (exponent > LEAST) & (exponent <= MOST + 1)).all())


def _no_subnormal(data: Tensor) -> bool:
    found = np.zeros(1, np.int64)
    _find_subnormal(array(data.contiguous()), data.numel(), found)
    return not found[0]


@loop
def _subnormal_in(low, high, data, count, found):
    """Set a mark where one of these sixteens has a number between 0 and the smallest normal one."""
    one, most = splat(np.float32(1)), splat(ZERO)
    for sixteen in range(low, high):
        i = 16 * sixteen
        x = load(data, i) if i + 16 <= count else load_some(data, i, count - i)
        part = at_most(size(x) * splat(np.float32(2.0**126)), one)
        most = maximum(part * (one - part), most)  # NaN is none
    if highest(most) > 0:
        found[0] = 1


@compiled((types.uint16[::1], types.int64, types.int64[::1]))
def _find_subnormal(data, count, found):
    each(_subnormal_in, (count + 15) // 16, (data, count, found))


# --- what a form has of its own


def decoded(weight: Arrays, row: int, columns: int, i: int) -> Any:
    """Columns i to i + 31 of a row in the order of `lay_out`, as two times sixteen numbers; 0 beyond the last."""
    raise NotImplementedError  # of compiled loops alone


def lay_out(weight: Arrays, x: Any, at: int, columns: int, out: Any, to: int) -> None:
    """Copy the vector that begins in x at `at` to `out` from `to` on, in the order in which numbers are decoded.

    That is theirs; where two share a byte, of 32 the sixteen at even places, then the others, of a last 16 eight each
    in its half. What a last piece has beyond the columns stays as it is in `out`.
    """
    raise NotImplementedError


def fetch(weight: Arrays, row: int, columns: int, i: int) -> None:
    """Ask memory for the stored bytes of columns i to i + 31 of a row, which may lie beyond the last; scales too."""
    raise NotImplementedError


def taken(weight: Arrays, row: int, columns: int, i: int, like: Any) -> Any:
    """Columns i to i + 31 of a row as a piece of such an array; one of bfloat16 where `held_in_bfloat16` alone."""
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
        store_some(out, to + whole + 16, odd, 8)


def _dense(weight, row, columns, i):
    at, there = row * columns + i, columns - i
    if there >= 32:
        return load_piece(weight.data, at)
    return load_some(weight.data, at, there), load_some(weight.data, at + 16, there - 16)


def _fp8(weight, row, columns, i):
    at, there, power = row * columns + i, columns - i, weight.power
    blocks = (columns + (1 << power) - 1) >> power
    s = splat(scale_of(weight.scale, np.uint64((row >> power) * blocks + (i >> power))))
    if there >= 32:
        low, high = load_piece(weight.data, at)
        return low * s, high * s
    # what is not there is 0, also under a scale that is not finite
    some, more = load_some(weight.data, at, there) * s, load_some(weight.data, at + 16, there - 16) * s
    return first(some, there, splat(ZERO)), first(more, there - 16, splat(ZERO))


def _fp4(weight, row, columns, i):
    group = (row * columns + i) // FP4_BLOCK
    s = splat(e8m0(weight.scale[np.uint64(group)]))
    even, odd = load_e2m1(weight.data, group * BYTES)
    return even * s, odd * s


def _nvfp4(weight, row, columns, i):
    group = (row * columns + i) // NVFP4_BLOCK
    if columns - i >= 32:
        s = splat_e4m3(weight.scale[np.uint64(group)], weight.scale[np.uint64(group + 1)])
        even, odd = load_e2m1(weight.data, group * 8)
        return even * s, odd * s
    s = splat_e4m3(weight.scale[np.uint64(group)], weight.scale[np.uint64(group)])
    even, odd = load_some_e2m1(weight.data, group * 8, 8)
    return even * s, odd * s


@overload(decoded)
def _decoded(weight, row, columns, i):
    return {DenseArrays: _dense, Fp8Arrays: _fp8, Fp4Arrays: _fp4, NvFp4Arrays: _nvfp4}[weight.instance_class]


def _as_piece(weight, row, columns, i, like):
    low, high = decoded(weight, row, columns, i)
    return as_piece(low, high, like)


def _bfloat16_as_it_is(weight, row, columns, i, like):
    if columns - i >= PIECE:
        return piece(weight.data, row * columns + i)
    low, high = decoded(weight, row, columns, i)
    return as_piece(low, high, like)


def _fp4_by_bits(weight, row, columns, i, like):
    group = (row * columns + i) // FP4_BLOCK
    return e2m1_pairs(weight.data, group * BYTES, weight.scale[np.uint64(group)])


@overload(taken)
def _taken(weight, row, columns, i, like):
    if like.dtype == types.uint16:
        if weight.instance_class == Fp4Arrays:
            return _fp4_by_bits
        if weight.instance_class == DenseArrays and weight[0].dtype == types.uint16:
            return _bfloat16_as_it_is
    return _as_piece


@overload(lay_out)
def _lay_out(weight, x, at, columns, out, to):
    return {
        DenseArrays: _in_order, Fp8Arrays: _in_order, Fp4Arrays: _even_first, NvFp4Arrays: _even_first,
    }[weight.instance_class]  # fmt: skip


def _fetch_alone(weight, row, columns, i):
    fetch_line(weight.data, row * columns + i)


def _fetch_fp4(weight, row, columns, i):
    fetch_line(weight.data, (row * columns + i) // 2)
    fetch_line(weight.scale, (row * columns + i) // FP4_BLOCK)


def _fetch_nvfp4(weight, row, columns, i):
    fetch_line(weight.data, (row * columns + i) // 2)
    fetch_line(weight.scale, (row * columns + i) // NVFP4_BLOCK)


@overload(fetch)
def _fetch(weight, row, columns, i):
    return {
        DenseArrays: _fetch_alone, Fp8Arrays: _fetch_alone, Fp4Arrays: _fetch_fp4, NvFp4Arrays: _fetch_nvfp4,
    }[weight.instance_class]  # fmt: skip


@loop
def e8m0(byte):
    """``2^(byte - 127)``: of 0 a subnormal number, of 255 NaN."""
    return _POWERS[byte]


def placed(weight: Arrays, data: int, scale: int) -> Arrays:
    """A matrix of the same form and shape at other addresses."""
    raise NotImplementedError


@overload(placed)
def _placed(weight, data, scale):
    return {
        DenseArrays: lambda weight, data, scale: DenseArrays(moved(weight.data, data)),
        Fp8Arrays: lambda weight, data, scale: Fp8Arrays(
            moved(weight.data, data), moved(weight.scale, scale), weight.power
        ),
        Fp4Arrays: lambda weight, data, scale: Fp4Arrays(moved(weight.data, data), moved(weight.scale, scale)),
        NvFp4Arrays: lambda weight, data, scale: NvFp4Arrays(moved(weight.data, data), moved(weight.scale, scale)),
    }[weight.instance_class]


def scale_of(scale: Any, index: Any) -> Any:
    """Return a scale of `Fp8`, stored in E8M0 or float32."""
    raise NotImplementedError


@overload(scale_of)
def _scale_of(scale, index):
    if scale.dtype == types.float32:
        return lambda scale, index: scale[index]
    return lambda scale, index: e8m0(scale[index])
