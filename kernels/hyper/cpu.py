"""mHC: a token's streams are read from memory once for its weights, and once for what is read with them.

The weights are sums over all columns of all streams, of which four rows of `fn` and two tokens share what they load.
Each sum has one order, whatever shares its loads: a token has the same bits alone and among others, and from
`hyper_weights` those of `read_streams`.
"""

from typing import Final

import numpy as np
import torch
from numba import types
from torch import Tensor

from fathom.kernels.compiled import array, compiled, each_of, kept_array, loop
from fathom.kernels.lanes import at_least, exp, fma, load, load_some, load_splat, splat, store, store_some, total
from fathom.kernels.norm.cpu import NONE, norm_row, square_sum

PART: Final = 1024  # columns that eight products are carried on by: four rows of them are 16 KiB, of tokens 2 or 4
SIDE: Final = 16  # tokens side by side, between which these rows stay in the core's first cache
_F32, _STREAMS = types.float32[::1], (types.uint16[::1], types.float32[::1])
_INT, _REAL = types.int64, types.float64


# --- sums over all columns


@loop
def _products(x, one, other, fn, r, s, t, u, low, high, sums, to):
    """Carry on the products of tokens that begin at `one` and `other` with rows that begin at r, s, t and u.

    Over columns low .. high - 1, a multiple of 16 but for the last ones; eight sums of 16 lanes lie from `to` on.
    """
    a, b, c, d = load(sums, to), load(sums, to + 16), load(sums, to + 32), load(sums, to + 48)
    e, f, g, h = load(sums, to + 64), load(sums, to + 80), load(sums, to + 96), load(sums, to + 112)
    whole = low + (high - low) // 16 * 16
    for i in range(low, whole, 16):
        y, z = load(x, one + i), load(x, other + i)
        w = load(fn, r + i)
        a, e = fma(w, y, a), fma(w, z, e)
        w = load(fn, s + i)
        b, f = fma(w, y, b), fma(w, z, f)
        w = load(fn, t + i)
        c, g = fma(w, y, c), fma(w, z, g)
        w = load(fn, u + i)
        d, h = fma(w, y, d), fma(w, z, h)
    if whole < high:
        y, z = load_some(x, one + whole, high - whole), load_some(x, other + whole, high - whole)
        w = load_some(fn, r + whole, high - whole)
        a, e = fma(w, y, a), fma(w, z, e)
        w = load_some(fn, s + whole, high - whole)
        b, f = fma(w, y, b), fma(w, z, f)
        w = load_some(fn, t + whole, high - whole)
        c, g = fma(w, y, c), fma(w, z, g)
        w = load_some(fn, u + whole, high - whole)
        d, h = fma(w, y, d), fma(w, z, h)
    store(sums, to, a)
    store(sums, to + 16, b)
    store(sums, to + 32, c)
    store(sums, to + 48, d)
    store(sums, to + 64, e)
    store(sums, to + 80, f)
    store(sums, to + 96, g)
    store(sums, to + 112, h)


@loop
def _mix_tiles(low, high, x, tokens, columns, fn, rows, mixes):
    """Some tokens by four rows of `fn`, or their sums of squares: ``mixes[t, row]``, of which the last is these."""
    sums, blocks = np.empty(SIDE // 2 * 128, np.float32), (rows + 3) // 4
    for tile in range(low, high):
        first, block = tile // (blocks + 1) * SIDE, tile % (blocks + 1)
        count = min(SIDE, tokens - first)
        if block == blocks:
            for t in range(first, first + count):
                mixes[t * (rows + 1) + rows] = square_sum(x, t * columns, columns)
            continue
        r, last = block * 4, rows - 1  # a row that there is none of is the last one once more, and so a token
        sums[:] = 0
        for begin in range(0, columns, PART):
            for t in range(0, count, 2):
                one, other = (first + t) * columns, (first + min(t + 1, count - 1)) * columns
                _products(
                    x, one, other,
                    fn, r * columns, min(r + 1, last) * columns, min(r + 2, last) * columns, min(r + 3, last) * columns,
                    begin, min(begin + PART, columns), sums, t * 64,
                )  # fmt: skip
        for t in range(count):
            for i in range(min(4, rows - r)):
                mixes[(first + t) * (rows + 1) + r + i] = total(load(sums, t * 64 + i * 16))


# --- weights, of the sums; sixteen tokens side by side


@loop
def _sinkhorn(side, at, s, iterations, eps):
    """Push logits [s, s] from `at` on towards a doubly stochastic matrix: rows of the softmax, columns, rows, ..."""
    row, end = 16 * s, at + 16 * s * s
    for i in range(at, end, row):
        top, mass = load(side, i), splat(np.float32(0))
        for j in range(i, i + row, 16):
            top = at_least(top, load(side, j))
        for j in range(i, i + row, 16):
            x = exp(load(side, j) - top)
            store(side, j, x)
            mass = mass + x
        for j in range(i, i + row, 16):
            store(side, j, load(side, j) / mass + eps)
    for step in range(2 * iterations - 1):
        apart, along = (row, 16) if step % 2 else (16, row)  # of lines, and of a line's numbers
        for line in range(at, at + s * apart, apart):
            mass = eps
            for j in range(line, line + s * along, along):
                mass = mass + load(side, j)
            factor = splat(np.float32(1)) / mass
            for j in range(line, line + s * along, along):
                store(side, j, load(side, j) * factor)


@loop
def _weigh(first, count, mixes, rows, columns, scale, base, s, iterations, eps, norm_eps, pre, post, comb, side):
    """Weights of up to sixteen tokens; of the head, which has no more rows than streams, `pre` alone."""
    for lane in range(count):
        at = (first + lane) * (rows + 1)
        factor = np.float32(1) / np.sqrt(mixes[at + rows] / np.float32(columns) + np.float32(norm_eps))
        for row in range(rows):
            side[row * 16 + lane] = mixes[at + row] * factor * scale[min(row // s, 2)] + base[row]
    zero, one, small = splat(np.float32(0)), splat(np.float32(1)), splat(np.float32(eps))
    for row in range(min(rows, 2 * s)):
        x = one / (one + exp(zero - load(side, row * 16)))
        store(side, row * 16, x + small if row < s else x + x)
    if rows > s:
        _sinkhorn(side, 32 * s, s, iterations, small)
    for lane in range(count):
        t = first + lane
        for i in range(s):
            pre[t * s + i] = side[i * 16 + lane]
        if rows > s:
            for i in range(s):
                post[t * s + i] = side[(s + i) * 16 + lane]
            for i in range(s * s):
                comb[t * s * s + i] = side[(2 * s + i) * 16 + lane]


# --- reading and writing


@loop
def _weighted(first, begin, factor, x, at, count, d, factors, place, step, out, to):
    """Sum a row of `first` times `factor` and `count` rows of x times factors that lie `step` apart: one of `out`."""
    whole = d // 16 * 16
    for i in range(0, whole, 16):
        a = load(first, begin + i) * splat(factor)
        for j in range(count):
            a = fma(load(x, at + j * d + i), load_splat(factors, place + j * step), a)
        store(out, to + i, a)
    if whole < d:
        a = load_some(first, begin + whole, d - whole) * splat(factor)
        for j in range(count):
            a = fma(load_some(x, at + j * d + whole, d - whole), load_splat(factors, place + j * step), a)
        store_some(out, to + whole, a, d - whole)


@loop
def _collapse_tokens(low, high, x, s, d, pre, out):
    for t in range(low, high):
        at = t * s * d
        _weighted(x, at, pre[t * s], x, at + d, s - 1, d, pre, t * s + 1, 1, out, t * d)


@compiled(*((x, _INT, _INT, _INT, _F32, x) for x in _STREAMS))
def _collapse(x, tokens, s, d, pre, out):
    each_of(_collapse_tokens, tokens, tokens * s * d, (x, s, d, pre, out))


@loop
def _expand_tokens(low, high, y, x, s, d, post, comb, out):
    for t in range(low, high):
        at, place = t * s * d, t * s * s
        for k in range(s):
            _weighted(y, t * d, post[t * s + k], x, at, s, d, comb, place + k, s, out, at + k * d)


@compiled(*((x, x, _INT, _INT, _INT, _F32, _F32, x) for x in _STREAMS))
def _expand(y, x, tokens, s, d, post, comb, out):
    each_of(_expand_tokens, tokens, tokens * s * d, (y, x, s, d, post, comb, out))


@loop
def _read_tiles(
    low, high, x, tokens, s, d, mixes, rows, scale, base, iterations, eps, norm_eps, pre, post, comb, norm, out_eps, out
):
    side = np.zeros(rows * 16, np.float32)
    for first in range(low * SIDE, min(high * SIDE, tokens), SIDE):
        count = min(SIDE, tokens - first)
        _weigh(first, count, mixes, rows, s * d, scale, base, s, iterations, eps, norm_eps, pre, post, comb, side)
        if len(out):
            for t in range(first, first + count):
                at = t * s * d
                _weighted(x, at, pre[t * s], x, at + d, s - 1, d, pre, t * s + 1, 1, out, t * d)
                norm_row(out, t * d, d, norm, out_eps, out, t * d)


@compiled(
    *(
        (x, _INT, _INT, _INT, _F32, _INT, _F32, _F32, _INT, _REAL, _REAL, _F32, _F32, _F32, _F32, _REAL, x)
        for x in _STREAMS
    )
)
def _read(x, tokens, s, d, fn, rows, scale, base, iterations, eps, norm_eps, pre, post, comb, norm, out_eps, out):
    """Weights of reading and writing, and what is read with them where `out` has room for it."""
    mixes = np.empty(tokens * (rows + 1), np.float32)
    tiles = (tokens + SIDE - 1) // SIDE
    parts = tiles * ((rows + 3) // 4 + 1)
    each_of(_mix_tiles, parts, tokens * rows * s * d, (x, tokens, s * d, fn, rows, mixes))
    given = (x, tokens, s, d, mixes, rows, scale, base, iterations, eps, norm_eps, pre, post, comb, norm, out_eps, out)
    each_of(_read_tiles, tiles, tokens * s * d, given)


# --- the ops


def hyper_weights(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of one sublayer: `kernels.hyper.reference.hyper_weights`."""
    (t, s, d), x = streams.shape, array(streams.contiguous())
    assert fn.shape == ((2 + s) * s, s * d), f"fn is {tuple(fn.shape)}, want [{(2 + s) * s}, {s * d}]"
    pre, post, comb = torch.empty(t, s), torch.empty(t, s), torch.empty(t, s, s)
    _read(
        x, t, s, d, kept_array(fn), len(fn), kept_array(scale), kept_array(base), iterations, eps, norm_eps,
        array(pre), array(post), array(comb), NONE, 0.0, x[:0],
    )  # fmt: skip
    return pre, post, comb


def hyper_weights_scratch(tokens: int, streams: int, hidden: int, item: int) -> int:
    """Bytes alive at most in `hyper_weights`, the result included: weights, and the sums that they are made of."""
    del hidden, item
    return tokens * (2 * (2 + streams) * streams + 1) * 4


def head_weights(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float) -> Tensor:
    """Weights of the head: `kernels.hyper.reference.head_weights`."""
    (t, s, d), x = streams.shape, array(streams.contiguous())
    assert fn.shape == (s, s * d), f"fn is {tuple(fn.shape)}, want [{s}, {s * d}]"
    pre = torch.empty(t, s)
    _read(
        x, t, s, d, kept_array(fn), s, kept_array(scale), kept_array(base), 0, eps, norm_eps,
        array(pre), NONE, NONE, NONE, 0.0, x[:0],
    )  # fmt: skip
    return pre


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Read the streams: `kernels.hyper.reference.collapse`."""
    t, s, d = streams.shape
    out = torch.empty(t, d, dtype=streams.dtype)
    _collapse(array(streams.contiguous()), t, s, d, array(pre.contiguous()), array(out))
    return out


def read_streams(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    iterations: int,
    eps: float,
    norm_eps: float,
    norm: Tensor,
    norm_out_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Read the streams for a sublayer: `kernels.hyper.reference.ReadStreams`."""
    t, s, d = streams.shape
    assert fn.shape == ((2 + s) * s, s * d), f"fn is {tuple(fn.shape)}, want [{(2 + s) * s}, {s * d}]"
    x = torch.empty(t, d, dtype=streams.dtype)
    pre, post, comb = torch.empty(t, s), torch.empty(t, s), torch.empty(t, s, s)
    _read(
        array(streams.contiguous()), t, s, d, kept_array(fn), len(fn), kept_array(scale), kept_array(base),
        iterations, eps, norm_eps,
        array(pre), array(post), array(comb), kept_array(norm), norm_out_eps, array(x),
    )  # fmt: skip
    return x, pre, post, comb


def read_streams_scratch(tokens: int, streams: int, hidden: int, item: int) -> int:
    """Bytes alive at most in `read_streams`, the results included: those of `hyper_weights`, and the input."""
    return hyper_weights_scratch(tokens, streams, hidden, item) + tokens * hidden * item


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Write the streams: `kernels.hyper.reference.expand`."""
    t, s, d = streams.shape
    out = torch.empty(t, s, d, dtype=streams.dtype)
    _expand(
        array(y.contiguous()), array(streams.contiguous()), t, s, d,
        array(post.contiguous()), array(comb.contiguous()), array(out),
    )  # fmt: skip
    return out
