"""Rounding of activations to E4M3 and E2M1 blocks, and the Hadamard transform, a row at a time.

What is rounded has the numbers of `kernels.quantise.reference` bit for bit, signed zeros included, and NaN stands at
the same places; which of the many NaNs it is is left open.
"""

from typing import Final

import numpy as np
import torch
from numba import types
from torch import Tensor

from fathom.kernels.compiled import array, compiled, each_of, loop
from fathom.kernels.lanes import (
    apart,
    at_least,
    bits,
    larger,
    largest,
    load,
    load_some,
    power,
    signed,
    size,
    splat,
    store,
    store_some,
)  # fmt: skip
from fathom.kernels.quantise import reference
from fathom.kernels.quantise.reference import E2M1_MAX, E4M3_MAX

# A narrow format: the smallest size of a block that its scale follows, the inverse of the largest code, what rounds a
# number between 1 and 2, and the smallest normal number. 1.5 * 2^(23 - m) p is a float32 whose last bit is the spacing
# of m bits of mantissa at a power of two p: adding it rounds, as the hardware rounds, and subtracting it is exact.
E4M3: Final = 1e-4, 1 / E4M3_MAX, 1.5 * 2.0**20, 2.0**-6
E2M1: Final = E2M1_MAX * 2.0**-126, 1 / E2M1_MAX, 1.5 * 2.0**22, 1.0
PACKED: Final = 1 << 16  # numbers that are packed or unpacked at once, in fp32
_INT, FORM = types.int64, types.UniTuple(types.float64, 4)
_KINDS: Final = (types.uint16[::1], types.float32[::1])


@loop
def _power_of_two_scale(amax, form):
    """`kernels.quantise.reference.power_of_two_scale`."""
    if amax < np.float32(form[0]):
        amax = np.float32(form[0])
    ratio = amax * np.float32(form[1])
    if ratio < np.float32(np.inf):
        return bits(np.uint32((bits(ratio) + np.uint32(0x7FFFFF)) & np.uint32(0x7F800000)))
    return np.float32(np.nan)


@loop
def _rounded(x, scale, inverse, step, normal):
    """Nearest even, with the sign of x; no clamp to the largest code, which x exceeds by an ulp at most."""
    x = x * inverse
    shift = at_least(power(x), normal) * step
    return signed((x + shift) - shift, x) * scale


@loop
def round_row(x, at, columns, group, form, out, to):
    """Round columns of a row of x, from `at` on, to `out` from `to` on; both may be one array."""
    step, normal, part = splat(np.float32(form[2])), splat(np.float32(form[3])), group // 16 * 16
    for low in range(0, columns, group):
        whole, high = low + part, low + group
        top = splat(np.float32(0))
        for i in range(low, whole, 16):
            top = larger(top, size(load(x, at + i)))
        if whole < high:
            top = larger(top, size(load_some(x, at + whole, high - whole)))
        one = _power_of_two_scale(largest(top), form)
        scale, inverse = splat(one), splat(np.float32(1) / one)  # exact: both are powers of two
        for i in range(low, whole, 16):
            store(out, to + i, _rounded(load(x, at + i), scale, inverse, step, normal))
        if whole < high:
            numbers = load_some(x, at + whole, high - whole)
            store_some(out, to + whole, _rounded(numbers, scale, inverse, step, normal), high - whole)


@loop
def _round_rows(low, high, x, width, group, form, out):
    for row in range(low, high):
        at = row * width
        round_row(x, at, width, group, form, out, at)


@compiled(*((x, _INT, _INT, _INT, FORM, x) for x in _KINDS))
def _round(x, rows, width, group, form, out):
    each_of(_round_rows, rows, rows * width, (x, width, group, form, out))


@loop
def hadamard_row(x, at, width, near, far, out, to):
    """Transform a row of x, from `at` on, to `out` from `to` on; `near` and `far` have room for 32 more.

    The same step for each bit of an index, sums of neighbours to the first half and differences to the second, is the
    transform: it also turns the bits round by one.
    """
    half, factor = width // 2, splat(np.float32(width**-0.5))
    for i in range(0, width, 16):
        store(near, i, load_some(x, at + i, width - i))
    step = 1
    while step < width:
        for i in range(0, half, 16):
            even, odd = apart(load(near, 2 * i), load(near, 2 * i + 16))
            store(far, i, even + odd)
            store(far, half + i, even - odd)
        near, far, step = far, near, 2 * step
    for i in range(0, width, 16):
        store_some(out, to + i, load(near, i) * factor, width - i)


@loop
def _hadamard_rows(low, high, x, width, group, form, out):
    near, far = np.zeros(width + 32, np.float32), np.zeros(width + 32, np.float32)
    for row in range(low, high):
        at = row * width
        hadamard_row(x, at, width, near, far, out, at)
        if group:
            round_row(out, at, width, group, form, out, at)


@compiled(*((x, _INT, _INT, _INT, FORM, x) for x in _KINDS))
def _hadamard(x, rows, width, group, form, out):
    """Transform rows, and round them where there is a group."""
    each_of(_hadamard_rows, rows, rows * width * 8, (x, width, group, form, out))


def simulate_fp8(x: Tensor, group: int) -> Tensor:
    """Round `x` [..., d] to E4M3 blocks: `kernels.quantise.reference.simulate_fp8`."""
    return _simulated(x, group, E4M3)


def simulate_fp4(x: Tensor, group: int = 32) -> Tensor:
    """Round `x` [..., d] to E2M1 blocks: `kernels.quantise.reference.simulate_fp4`."""
    return _simulated(x, group, E2M1)


def _simulated(x: Tensor, group: int, form: tuple[float, ...]) -> Tensor:
    width = x.shape[-1]
    assert width % group == 0, f"{width} columns are no multiple of the group of {group}"
    x = x.contiguous()
    out = torch.empty_like(x)
    _round(array(x), x.numel() // width, width, group, form, array(out))
    return out


def pack_fp8(x: Tensor, group: int) -> Tensor:
    """Bytes of `x` [n, d] in E4M3 blocks: `kernels.quantise.reference.pack_fp8`, some rows at once."""
    out = x.new_empty(x.shape[0], x.shape[1] + x.shape[1] // group, dtype=torch.uint8)
    rows = max(1, PACKED // x.shape[1])
    for own, given in zip(out.split(rows), x.split(rows), strict=True):
        own.copy_(reference.pack_fp8(given, group))
    return out


def unpack_fp8(packed: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Numbers of such bytes: `kernels.quantise.reference.unpack_fp8`, some rows at once."""
    width = packed.shape[1] // (group + 1) * group
    out, rows = packed.new_empty(packed.shape[0], width, dtype=dtype), max(1, PACKED // width)
    for own, given in zip(out.split(rows), packed.split(rows), strict=True):
        own.copy_(reference.unpack_fp8(given, group, dtype))
    return out


def pack_fp8_scratch(numbers: int, group: int, item: int) -> int:
    """Bytes alive at most in `pack_fp8`: the result, and some rows."""
    some = min(numbers, 2 * PACKED)
    return numbers + numbers // group + reference.pack_fp8_scratch(some, group, item)


def unpack_fp8_scratch(numbers: int, group: int, item: int) -> int:
    """Bytes alive at most in `unpack_fp8`: the result, and some rows."""
    return numbers * item + reference.unpack_fp8_scratch(min(numbers, 2 * PACKED), group, item)


def hadamard(x: Tensor) -> Tensor:
    """Hadamard transform of the last dim: `kernels.quantise.reference.hadamard`, up to the order of its sums."""
    return _transformed(x, 0)


def round_index(x: Tensor, group: int) -> Tensor:
    """Transform `x` [..., d] and round it to E2M1 blocks: `kernels.quantise.reference.RoundIndex`."""
    assert x.shape[-1] % group == 0, f"{x.shape[-1]} columns are no multiple of the group of {group}"
    return _transformed(x, group)


def _transformed(x: Tensor, group: int) -> Tensor:
    width = x.shape[-1]
    assert width & (width - 1) == 0, f"{width} is no power of two"
    x = x.contiguous()
    out = torch.empty_like(x)
    _hadamard(array(x), x.numel() // width, width, group, E2M1, array(out))
    return out
