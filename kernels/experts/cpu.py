"""The routed experts of a few tokens, all of them at once: gates and ups in loops over rows, then downs.

Matrices are read where they are: of a mapped checkpoint in its files. The bits are those of one expert after the other.
"""

from typing import Any, Final

import numpy as np
import torch
from numba import types
from torch import Tensor

from kernels.compiled import array, compiled, each, loop
from kernels.experts.reference import Experts
from kernels.formats.cpu import FORMS, arrays, even_first, placed, row_times
from kernels.formats.groups import LINEAR_GROUP
from kernels.formats.stored import Apart, Fp4, Fp8, Stack, Weight, member, members, places
from kernels.lanes import bits
from kernels.linear.cpu import FEW, linear
from kernels.quantise.cpu import simulate_fp8
from kernels.swiglu.cpu import swiglu

several: Final = Experts(linear, swiglu, simulate_fp8)  # of more tokens than FEW
_I64, _F32 = types.int64, types.float32[::1]
_MATRICES: Final = types.int64[::1], _F32  # see `Apart.places`


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: Stack,
    w3: Stack,
    w2: Stack,
    limit: float,
    first: int,
    *,
    deployed: bool,
) -> Tensor:
    """Sum of the weighted outputs of a token's experts: `kernels.experts.reference.Experts`."""
    (t, hidden), k, (inner, _) = x.shape, ids.shape[1], w1.shape
    if t > FEW:
        return several(x, ids, weights, w1, w3, w2, limit, first, deployed=deployed)
    ordered, slots = ids.sort(dim=1)
    chosen = array(ordered - first)
    one, other = member(w1, 0), member(w2, 0)
    products = torch.empty(2, t * k, inner)
    wide = _input(x, one, deployed=deployed)
    for w, out in zip((w1, w3), products, strict=True):
        _each_pair(arrays(one), *_places(w), chosen, k, inner, hidden, wide, array(out))
    gate, up = products.to(x.dtype)
    wide = _input(swiglu(gate, up, limit, weights.gather(1, slots).flatten()), other, deployed=deployed)
    out = torch.empty(t, hidden)
    _summed(arrays(other), *_places(w2), chosen, t, k, hidden, inner, wide, x.dtype == torch.bfloat16, array(out))
    return out


def _input(x: Tensor, weight: Weight, *, deployed: bool) -> Any:
    rounded = simulate_fp8(x, LINEAR_GROUP) if deployed and isinstance(weight, Fp8 | Fp4) else x
    return array(even_first(rounded.float(), weight))


def _places(stacked: Stack) -> tuple[Any, Any]:
    """Addresses, flat, and factors of all matrices."""
    if isinstance(stacked, Apart):
        addresses, factors = stacked.places
    else:
        addresses, factors = places([member(stacked, expert) for expert in range(members(stacked))])
    return array(addresses), array(factors)


@loop
def _pair_rows(low, high, weight, addresses, factors, chosen, k, rows, columns, x, out):
    for item in range(low, high):
        pair, row = item // rows, item % rows
        expert = chosen[pair]
        if 0 <= expert < len(factors):
            matrix = placed(weight, addresses[2 * expert], addresses[2 * expert + 1])
            out[item] = row_times(matrix, row, columns, x, pair // k * columns) * factors[expert]


@compiled(*((form, *_MATRICES, types.int64[::1], _I64, _I64, _I64, _F32, _F32) for form in FORMS.values()))
def _each_pair(weight, addresses, factors, chosen, k, rows, columns, x, out):
    """``out[pair, r] = W_expert[r] . x[token]`` of pairs of a token and one of its k experts."""
    each(_pair_rows, len(chosen) * rows, (weight, addresses, factors, chosen, k, rows, columns, x, out))


@loop
def _sum_rows(low, high, weight, addresses, factors, chosen, tokens, k, rows, columns, x, narrow, out):
    for row in range(low, high):
        for token in range(tokens):
            total = np.float32(0)
            for pair in range(token * k, token * k + k):
                expert = chosen[pair]
                if 0 <= expert < len(factors):
                    matrix = placed(weight, addresses[2 * expert], addresses[2 * expert + 1])
                    value = row_times(matrix, row, columns, x, pair * columns) * factors[expert]
                    total += bfloat16(value) if narrow else value
            out[token * rows + row] = total


@compiled(
    *(
        (form, *_MATRICES, types.int64[::1], _I64, _I64, _I64, _I64, _F32, types.boolean, _F32)
        for form in FORMS.values()
    )
)
def _summed(weight, addresses, factors, chosen, tokens, k, rows, columns, x, narrow, out):
    """``out[token, r] = sum_pairs W_expert[r] . x[pair]``, each product rounded to bfloat16 where `narrow`."""
    each(_sum_rows, rows, (weight, addresses, factors, chosen, tokens, k, rows, columns, x, narrow, out))


@loop
def bfloat16(x):
    """Round to the nearest bfloat16, of two the even one."""
    if x != x:
        return x
    u = bits(x)
    up = np.uint32(0x7FFF) + ((u >> np.uint32(16)) & np.uint32(1))
    return bits(np.uint32(np.uint32(u + up) & np.uint32(0xFFFF0000)))


def experts_scratch(tokens: int, k: int, hidden: int, inner: int, item: int) -> int:
    """Bytes alive at most in `experts` of up to FEW tokens, the result included.

    Gates and ups in fp32 and as they are rounded, what is activated of them, rounded and in fp32 in two orders.
    """
    pairs = tokens * k
    return tokens * hidden * 12 + pairs * (inner * (8 + 3 * item + 12) + 32)
