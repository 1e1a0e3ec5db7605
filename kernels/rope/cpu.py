"""Rotary embedding of interleaved pairs, a row at a time; and the norm before it and the rounding behind it."""

import torch
from numba import types
from torch import Tensor

from fathom.kernels.compiled import array, compiled, each_of, kept_array, loop
from fathom.kernels.lanes import apart, copy, interleaved, load, load_some, store, store_some
from fathom.kernels.norm.cpu import NONE, norm_row
from fathom.kernels.quantise.cpu import E4M3, FORM, round_row

_INT, _F32, _KINDS = types.int64, types.float32[::1], (types.uint16[::1], types.float32[::1])


@loop
def rotate_row(x, at, width, cos, sin, turn, half, out, to):
    """Rotate the last `half` pairs of a row of x by angles from `turn` on; x and `out` may be one array."""
    kept = width - 2 * half
    copy(x, at, kept, out, to)
    at, to, whole = at + kept, to + kept, half // 16 * 16
    for i in range(0, whole, 16):
        c, s = load(cos, turn + i), load(sin, turn + i)
        a, b = apart(load(x, at + 2 * i), load(x, at + 2 * i + 16))
        low, high = interleaved(a * c - b * s, a * s + b * c)
        store(out, to + 2 * i, low)
        store(out, to + 2 * i + 16, high)
    if whole < half:
        rest = half - whole
        c, s = load_some(cos, turn + whole, rest), load_some(sin, turn + whole, rest)
        at, to, rest = at + 2 * whole, to + 2 * whole, 2 * rest
        a, b = apart(load_some(x, at, rest), load_some(x, at + 16, rest - 16))
        low, high = interleaved(a * c - b * s, a * s + b * c)
        store_some(out, to, low, rest)
        store_some(out, to + 16, high, rest - 16)


@loop
def _rotate_tokens(low, high, x, width, heads, cos, sin, half, out):
    for t in range(low, high):
        for at in range(t * heads * width, (t + 1) * heads * width, width):
            rotate_row(x, at, width, cos, sin, t * half, half, out, at)


@compiled(*((x, _INT, _INT, _INT, _F32, _F32, _INT, x) for x in _KINDS))
def _rotate(x, tokens, width, heads, cos, sin, half, out):
    each_of(_rotate_tokens, tokens, tokens * heads * width, (x, width, heads, cos, sin, half, out))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the trailing dims by interleaved pairs: `kernels.rope.reference.rotate`."""
    width, (t, half), heads = x.shape[-1], cos.shape, x.shape[1] if x.ndim == 3 else 1
    assert cos.shape == sin.shape, f"cosines {tuple(cos.shape)}, sines {tuple(sin.shape)}"
    assert t == x.shape[0], f"angles of {t} tokens for {x.shape[0]}"
    assert 2 * half <= width, f"{half} pairs in {width} columns"
    x = x.contiguous()
    out = torch.empty_like(x)
    _rotate(array(x), t, width, heads, kept_array(cos), kept_array(sin), half, array(out))
    return out


@loop
def _norm_rotate_tokens(low, high, x, width, heads, weight, eps, cos, sin, half, group, form, out):
    for t in range(low, high):
        for at in range(t * heads * width, (t + 1) * heads * width, width):
            norm_row(x, at, width, weight, eps, out, at)
            rotate_row(out, at, width, cos, sin, t * half, half, out, at)
            if group:
                round_row(out, at, width - 2 * half, group, form, out, at)


@compiled(*((x, _INT, _INT, _INT, _F32, types.float64, _F32, _F32, _INT, _INT, FORM, x) for x in _KINDS))
def _norm_rotate(x, tokens, width, heads, weight, eps, cos, sin, half, group, form, out):
    given = (x, width, heads, weight, eps, cos, sin, half, group, form, out)
    each_of(_norm_rotate_tokens, tokens, tokens * heads * width, given)


def norm_rotate(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, kv_group: int) -> Tensor:
    """Norm, rotate and round rows: `kernels.rope.reference.NormRotate`."""
    width, half, heads = x.shape[-1], cos.shape[1], x.shape[1] if x.ndim == 3 else 1
    assert cos.shape == sin.shape == (x.shape[0], half), f"angles of {cos.shape[0]} tokens for {x.shape[0]}"
    assert 2 * half <= width, f"{half} pairs in {width} columns"
    assert not kv_group or (width - 2 * half) % kv_group == 0, f"{width - 2 * half} columns in groups of {kv_group}"
    x = x.contiguous()
    out, factors = torch.empty_like(x), NONE if weight is None else kept_array(weight)
    _norm_rotate(
        array(x), x.shape[0], width, heads, factors, eps,
        kept_array(cos), kept_array(sin), half, kv_group, E4M3, array(out),
    )  # fmt: skip
    return out
