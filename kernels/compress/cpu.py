"""The pool of a compressor: sixteen channels side by side, and one pass for the largest gate, one for the sums."""

from typing import Final

import numpy as np
import torch
from numba import types
from torch import Tensor

from fathom.kernels.compiled import address, compiled, each_of, loop, numbers
from fathom.kernels.lanes import exp, fma, load_some, maximum, splat, store_some

_ZERO: Final = np.float32(0)
_I64: Final = types.int64
_SERIES: Final = types.UniTuple(_I64, 3)  # address, and how far windows and tokens lie apart


def pool(kv: Tensor, gate: Tensor, previous_kv: Tensor | None, previous_gate: Tensor | None) -> Tensor:
    """Pool each window by a softmax over its tokens: `kernels.compress.reference.pool`."""
    assert kv.dtype == torch.float32, f"kv: {kv.dtype}, want float32"
    n, r, d = kv.shape
    out = torch.empty(n, d)
    given = [x if x is None else side_by_side(x) for x in (kv, gate, previous_kv, previous_gate)]
    _pool(n, r, d, *((0, 0, 0) if x is None else (x.data_ptr(), *x.stride()[:2]) for x in given), address(out))
    return out


def side_by_side(x: Tensor) -> Tensor:
    """With its channels side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


@loop
def _items(low, high, tokens, width, kv, gate, previous_kv, previous_gate, out):
    """Sixteen channels of a window each."""
    columns = (width + 15) // 16
    for item in range(low, high):
        window, column = item // columns, item % columns * 16
        some = width - column
        peak = splat(np.float32(-np.inf))
        if previous_gate[0] != 0:
            peak = _largest(previous_gate, window, tokens, column, some, peak)
        peak = _largest(gate, window, tokens, column, some, peak)
        total, values = splat(_ZERO), splat(_ZERO)
        if previous_gate[0] != 0:
            total, values = _added(previous_kv, previous_gate, window, tokens, column, some, peak, total, values)
        total, values = _added(kv, gate, window, tokens, column, some, peak, total, values)
        store_some(numbers(out, np.float32), window * width + column, values / total, some)


@loop
def _largest(gate, window, tokens, column, some, peak):
    gates, at = numbers(gate[0], np.float32), window * gate[1] + column
    for token in range(tokens):
        peak = maximum(load_some(gates, at + token * gate[2], some), peak)
    return peak


@loop
def _added(kv, gate, window, tokens, column, some, peak, total, values):
    """Masses, and what they weigh. A gate of NaN, or all of -inf, make the mass NaN."""
    gates, at = numbers(gate[0], np.float32), window * gate[1] + column
    numbers_of, begin = numbers(kv[0], np.float32), window * kv[1] + column
    for token in range(tokens):
        mass = exp(load_some(gates, at + token * gate[2], some) - peak)
        total = total + mass
        values = fma(mass, load_some(numbers_of, begin + token * kv[2], some), values)
    return total, values


@compiled((_I64, _I64, _I64, _SERIES, _SERIES, _SERIES, _SERIES, _I64))
def _pool(windows, tokens, width, kv, gate, previous_kv, previous_gate, out):
    items = windows * ((width + 15) // 16)
    work = windows * tokens * width * 2
    each_of(_items, items, work, (tokens, width, kv, gate, previous_kv, previous_gate, out))
