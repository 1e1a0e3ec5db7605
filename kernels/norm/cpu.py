"""RMSNorm, a row at a time: twice through the core's cache."""

import numpy as np
import torch
from numba import types
from torch import Tensor

from fathom.kernels.compiled import array, compiled, each_of, kept_array, loop
from fathom.kernels.lanes import fma, load, load_some, splat, store, store_some, total

NONE = np.empty(0, np.float32)  # a weight that there is none of


@loop
def square_sum(x, at, columns):
    """Of a row of x, from `at` on."""
    whole = columns // 16 * 16
    a = b = splat(np.float32(0))
    for i in range(0, whole, 16):
        part = load(x, at + i)
        a, b = b, fma(part, part, a)
    if whole < columns:
        part = load_some(x, at + whole, columns - whole)
        a = fma(part, part, a)
    return total(a + b)


@loop
def norm_row(x, at, columns, weight, eps, out, to):
    """Norm a row of x, from `at` on, to `out` from `to` on; both may be one array. A weight of no numbers is 1."""
    whole = columns // 16 * 16
    factor = splat(np.float32(1) / np.sqrt(square_sum(x, at, columns) / np.float32(columns) + np.float32(eps)))
    for i in range(0, whole, 16):
        part = load(x, at + i) * factor
        store(out, to + i, part * load(weight, i) if len(weight) else part)
    if whole < columns:
        part, rest = load_some(x, at + whole, columns - whole) * factor, columns - whole
        store_some(out, to + whole, part * load_some(weight, whole, rest) if len(weight) else part, rest)


@loop
def _norm_rows(low, high, x, columns, weight, eps, out):
    for row in range(low, high):
        norm_row(x, row * columns, columns, weight, eps, out, row * columns)


@compiled(
    *(
        (kind, types.int64, types.int64, types.float32[::1], types.float64, kind)
        for kind in (types.uint16[::1], types.float32[::1])
    )
)
def _norm(x, rows, columns, weight, eps, out):
    each_of(_norm_rows, rows, rows * columns, (x, columns, weight, eps, out))


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Scale rows to unit mean square: `kernels.norm.reference.rms_norm`."""
    x, columns = x.contiguous(), x.shape[-1]
    out = torch.empty_like(x)
    factors = NONE if weight is None else kept_array(weight)
    _norm(array(x), x.numel() // max(1, columns), columns, factors, eps, array(out))
    return out
