"""Clamped SwiGLU, sixteen numbers at a time."""

import numpy as np
import torch
from numba import types
from torch import Tensor

from fathom.kernels.compiled import array, compiled, each_of, loop
from fathom.kernels.lanes import at_least, at_most, exp, load, load_some, splat, store, store_some
from fathom.kernels.norm.cpu import NONE

_INT, _F32, _KINDS = types.int64, types.float32[::1], (types.uint16[::1], types.float32[::1])


@loop
def _activated(gate, up, top, bottom, factor):
    gate = at_most(gate, top)
    silu = gate / (splat(np.float32(1)) + exp(splat(np.float32(0)) - gate))
    return silu * at_least(at_most(up, top), bottom) * factor


@loop
def activate_row(gate, up, at, columns, limit, weight, out):
    """Activate the row that begins at `at` in all three arrays."""
    top, bottom, factor = splat(np.float32(limit)), splat(np.float32(-limit)), splat(weight)
    whole = columns // 16 * 16
    for i in range(at, at + whole, 16):
        store(out, i, _activated(load(gate, i), load(up, i), top, bottom, factor))
    if whole < columns:
        i, rest = at + whole, columns - whole
        store_some(out, i, _activated(load_some(gate, i, rest), load_some(up, i, rest), top, bottom, factor), rest)


@loop
def _activate_rows(low, high, gate, up, columns, limit, weight, out):
    for row in range(low, high):
        activate_row(gate, up, row * columns, columns, limit, weight[row] if len(weight) else np.float32(1), out)


@compiled(*((x, x, _INT, _INT, types.float64, _F32, x) for x in _KINDS))
def _activate(gate, up, rows, columns, limit, weight, out):
    each_of(_activate_rows, rows, rows * columns * 8, (gate, up, columns, limit, weight, out))


def swiglu(gate: Tensor, up: Tensor, limit: float, weight: Tensor | None) -> Tensor:
    """Activate an expert: `kernels.swiglu.reference.swiglu`."""
    assert (gate.shape, gate.dtype) == (up.shape, up.dtype), f"gate is {tuple(gate.shape)}, up {tuple(up.shape)}"
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    factors = NONE if weight is None else array(weight.contiguous())
    _activate(array(gate), array(up), *gate.shape, limit, factors, array(out))
    return out
