"""Manifold-constrained hyper-connections: streams are read and written once, their weights come from two launches.

The first launch cuts the residual streams into tiles of tokens and spans of columns. A program holds the same columns
of every stream, and leaves its part of the product with `fn` and of the square sum. The second adds the parts of a
token, in one order whatever ran first, and makes its weights of them; `read_streams` collapses and norms the streams
there too.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fathom.kernels.formats.triton_rounding import UPCAST, rounded, widened
from fathom.kernels.hyper.triton_streams import collapse, expand

__all__ = ["collapse", "expand", "head_weights", "hyper_weights", "read_streams"]

PROGRAMS = 128  # about one for each multiprocessor, of which an H200 has 132 and a B200 148
TOKENS = 16  # of a tile: the least that a dot takes
WIDE_TOKENS = 64  # where there are tiles enough: `fn` is read once for each
READ_WARPS = 8
WEIGHT_TOKENS = 16  # of a program that makes weights: one number of `comb` for each thread
SPLITS = 32  # parts that are added at a time


@triton.jit
def _product(x, w, acc, UPCAST: tl.constexpr, NARROW: tl.constexpr):
    """`acc` and ``x @ w^T`` in fp32: x [TOKENS, BLOCK] fp32, w [N, BLOCK] fp32.

    NARROW: x holds bf16 numbers, and w is cut into three bf16 parts, which are all of its 24 bits. Tensor cores take
    their products exactly, and add them in fp32.
    """
    if NARROW:
        half = x if UPCAST else x.to(tl.bfloat16)
        for _ in tl.static_range(3):
            part = rounded(w, tl.bfloat16, UPCAST)
            w -= widened(part, UPCAST)
            acc = tl.dot(half, tl.trans(widened(part, UPCAST) if UPCAST else part), acc)
    else:
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["tokens"])
def _partials(
    streams, fn, products, squares, tokens, d, span, rows,
    S: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr,
    UPCAST: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    present = token < tokens
    row = tl.arange(0, N)
    acc = tl.zeros([TOKENS, N], tl.float32)
    square = tl.zeros([TOKENS], tl.float32)
    first = tl.program_id(1) * span
    for begin in range(first, tl.minimum(first + span, d), BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = present[:, None] & (column < d)[None, :]
        weighed = (row < rows)[:, None] & (column < d)[None, :]
        place = token[:, None] * (S * d) + column[None, :]
        # A tensor core adds to its sum with truncation, an error to one side that grows with the additions: each block
        # of columns has a sum of its own, and these are added rounded to nearest.
        own = tl.zeros([TOKENS, N], tl.float32)
        for k in tl.static_range(S):
            x = widened(tl.load(streams + place + k * d, inside, 0.0), UPCAST)
            w = tl.load(fn + row[:, None].to(tl.int64) * (S * d) + k * d + column[None, :], weighed, 0.0)
            own = _product(x, w, own, UPCAST, NARROW)
            square += tl.sum(x * x, 1)
        acc += own
    at = tl.program_id(1).to(tl.int64) * tokens + token
    tl.store(products + at[:, None] * N + row[None, :], acc, present[:, None])
    tl.store(squares + at, square, present)


@triton.jit
def _norm(squares, token, present, tokens, splits, columns, eps, T: tl.constexpr, SPLITS: tl.constexpr):
    """Reciprocal of the root mean square of all streams of tokens [T]."""
    total = tl.zeros([T], tl.float32)
    for begin in range(0, splits, SPLITS):
        split = begin + tl.arange(0, SPLITS)[:, None].to(tl.int64)
        total += tl.sum(tl.load(squares + split * tokens + token[None, :], (split < splits) & present[None, :], 0.0), 0)
    return tl.rsqrt(total / columns + eps)


@triton.jit
def _mixes(
    products, token, present, first, tokens, splits, T: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Products of tokens [T] with rows ``first .. first + M - 1`` of `fn`: [T, M]."""
    total = tl.zeros([T, M], tl.float32)
    place = token[:, None] * N + first + tl.arange(0, M)[None, :]
    for begin in range(0, splits, SPLITS):
        split = begin + tl.arange(0, SPLITS)[:, None, None].to(tl.int64)
        inside = (split < splits) & present[None, :, None]
        total += tl.sum(tl.load(products + split * tokens * N + place[None], inside, 0.0), 0)
    return total


@triton.jit
def _sigmoids(
    products, norm, scale, base, token, present, first, tokens, splits, T: tl.constexpr, S: tl.constexpr,
    N: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Sigmoids [T, S] of rows ``first ..`` of `fn`, with the scale at `scale`."""
    mixes = _mixes(products, token, present, first, tokens, splits, T, S, N, SPLITS) * norm[:, None]
    return tl.sigmoid(mixes * tl.load(scale) + tl.load(base + first + tl.arange(0, S))[None, :])


@triton.jit
def _weights(
    products, norm, scale, base, post, comb, token, present, tokens, splits, iterations, eps,
    T: tl.constexpr, S: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Store post and comb of tokens [T]; Sinkhorn runs in the order of `kernels.hyper.reference.sinkhorn`."""
    place = tl.arange(0, S)[None, :]
    found = _sigmoids(products, norm, scale + 1, base, token, present, S, tokens, splits, T, S, N, SPLITS)
    tl.store(post + token[:, None] * S + place, 2 * found, present[:, None])
    place = tl.arange(0, S * S)[None, :]
    mixes = _mixes(products, token, present, 2 * S, tokens, splits, T, S * S, N, SPLITS) * norm[:, None]
    mixes = mixes * tl.load(scale + 2) + tl.load(base + 2 * S + place)
    matrix = tl.reshape(mixes, [T, S, S])
    matrix = tl.exp(matrix - tl.max(matrix, 2)[:, :, None])
    matrix = matrix / tl.sum(matrix, 2)[:, :, None] + eps
    matrix = matrix / (tl.sum(matrix, 1)[:, None, :] + eps)
    for _ in range(1, iterations):
        matrix = matrix / (tl.sum(matrix, 2)[:, :, None] + eps)
        matrix = matrix / (tl.sum(matrix, 1)[:, None, :] + eps)
    tl.store(comb + token[:, None] * (S * S) + place, tl.reshape(matrix, [T, S * S]), present[:, None])


@triton.jit(do_not_specialize=["tokens", "splits"])
def _weigh(
    products, squares, scale, base, pre, post, comb, tokens, splits, columns, iterations, eps, norm_eps,
    HEAD: tl.constexpr, T: tl.constexpr, S: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Weights of tokens [T]; HEAD: those of the head, pre alone."""
    token = tl.program_id(0).to(tl.int64) * T + tl.arange(0, T)
    present = token < tokens
    norm = _norm(squares, token, present, tokens, splits, columns, norm_eps, T, SPLITS)
    found = _sigmoids(products, norm, scale, base, token, present, 0, tokens, splits, T, S, N, SPLITS)
    tl.store(pre + token[:, None] * S + tl.arange(0, S)[None, :], found + eps, present[:, None])
    if not HEAD:
        _weights(
            products, norm, scale, base, post, comb, token, present, tokens, splits, iterations, eps, T, S, N, SPLITS
        )


@triton.jit(do_not_specialize=["tokens", "splits"])
def _read(
    products, squares, scale, base, streams, norm_weight, weights, post, comb, out, tokens, splits, d, iterations, eps,
    norm_eps, norm_out_eps, T: tl.constexpr, S: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The first programs collapse and norm a token each; the rest make post and comb of T tokens, at the same time."""
    program = tl.program_id(0)
    if program < tokens:
        token = program.to(tl.int64) + tl.arange(0, 1)
        present = token < tokens
        norm = _norm(squares, token, present, tokens, splits, S * d, norm_eps, 1, SPLITS)
        pre = _sigmoids(products, norm, scale, base, token, present, 0, tokens, splits, 1, S, N, SPLITS) + eps
        tl.store(weights + program.to(tl.int64) * S + tl.arange(0, S)[None, :], pre)
        column = tl.arange(0, BLOCK)
        x = tl.zeros([BLOCK], tl.float32)
        for k in tl.static_range(S):
            weight = tl.sum(tl.where(tl.arange(0, S)[None, :] == k, pre, 0.0))
            place = (program.to(tl.int64) * S + k) * d + column
            x += weight * widened(tl.load(streams + place, column < d, 0.0), UPCAST)
        x = widened(rounded(x, out.dtype.element_ty, UPCAST), UPCAST)
        x *= tl.rsqrt(tl.sum(x * x) / d + norm_out_eps)
        x *= tl.load(norm_weight + column, column < d, 0.0)
        tl.store(out + program.to(tl.int64) * d + column, rounded(x, out.dtype.element_ty, UPCAST), column < d)
    else:
        tile = (program - tokens).to(tl.int64) * T + tl.arange(0, T)
        norms = _norm(squares, tile, tile < tokens, tokens, splits, S * d, norm_eps, T, SPLITS)
        _weights(
            products, norms, scale, base, post, comb, tile, tile < tokens, tokens, splits, iterations, eps,
            T, S, N, SPLITS,
        )  # fmt: skip


def hyper_weights(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of one sublayer: `kernels.hyper.reference.hyper_weights`; s is a power of two."""
    t, s, _ = streams.shape
    assert fn.shape[0] == (2 + s) * s, f"{fn.shape[0]} rows of fn for {s} streams"
    pre, post, comb = (streams.new_empty(t, *shape, dtype=torch.float32) for shape in ((s,), (s,), (s, s)))
    _weighed(streams, fn, scale, base, (pre, post, comb), iterations, eps, norm_eps, head=False)
    return pre, post, comb


def hyper_weights_scratch(tokens: int, streams: int, hidden: int, item: int) -> int:
    """Bytes allocated in `hyper_weights` of up to so many tokens: the results, and split products and square sums."""
    del item
    return tokens * (2 + streams) * streams * 4 + _parts_scratch(tokens, hidden, (2 + streams) * streams)


def head_weights(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float) -> Tensor:
    """Weights of the head: `kernels.hyper.reference.head_weights`; s is a power of two."""
    t, s, _ = streams.shape
    assert fn.shape[0] == s, f"{fn.shape[0]} rows of fn for {s} streams"
    pre = streams.new_empty(t, s, dtype=torch.float32)
    _weighed(streams, fn, scale, base, (pre, pre, pre), 1, eps, norm_eps, head=True)
    return pre


def _weighed(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, out: tuple[Tensor, Tensor, Tensor],
    iterations: int, eps: float, norm_eps: float, *, head: bool,
) -> None:  # fmt: skip
    t, s, d = streams.shape
    if not t:
        return
    products, squares = _parts(streams.contiguous(), fn)
    constants = {"HEAD": head, "T": WEIGHT_TOKENS, "S": s, "N": products.shape[2], "SPLITS": SPLITS}
    _weigh[(triton.cdiv(t, WEIGHT_TOKENS),)](
        products, squares, scale, base, *out, t, len(products), s * d, iterations, eps, norm_eps,
        **constants, num_warps=READ_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def _parts(streams: Tensor, fn: Tensor) -> tuple[Tensor, Tensor]:
    """Products [splits, t, N] and square sums [splits, t] of the streams."""
    t, s, d = streams.shape
    rows = fn.shape[0]
    assert s & (s - 1) == 0, f"{s} streams are no power of two"
    assert fn.shape == (rows, s * d), f"fn {fn.shape}, want {s * d} columns"
    assert fn.dtype == torch.float32, f"fn: {fn.dtype}, want float32"
    many = t >= PROGRAMS * WIDE_TOKENS // 2
    tile = WIDE_TOKENS if many else TOKENS
    block = 64
    tiles, blocks = triton.cdiv(t, tile), triton.cdiv(d, block)
    span = triton.cdiv(blocks, max(1, min(blocks, PROGRAMS // tiles))) * block
    splits = triton.cdiv(d, span)
    n = max(16, triton.next_power_of_2(rows))
    products = streams.new_empty(splits, t, n, dtype=torch.float32)
    squares = streams.new_empty(splits, t, dtype=torch.float32)
    constants = {"S": s, "TOKENS": tile, "BLOCK": block, "N": n, "UPCAST": UPCAST}
    _partials[(tiles, splits)](
        streams, fn.contiguous(), products, squares, t, d, span, rows,
        **constants, NARROW=streams.dtype == torch.bfloat16, num_warps=8 if many else 4, num_stages=2 if many else 1,
        enable_fp_fusion=False,
    )  # fmt: skip
    return products, squares


def _parts_scratch(tokens: int, hidden: int, rows: int) -> int:
    """Bytes allocated in `_parts` of up to so many tokens: what its tiles of tokens and of columns find."""
    tile = WIDE_TOKENS if tokens >= PROGRAMS * WIDE_TOKENS // 2 else TOKENS
    places: int = max(tokens, min(tokens * triton.cdiv(hidden, 64), PROGRAMS * tile))
    columns: int = max(16, triton.next_power_of_2(rows))
    return places * (columns + 1) * 4


def read_streams_scratch(tokens: int, streams: int, hidden: int, item: int) -> int:
    """Bytes allocated in `read_streams` of up to so many tokens: input and weights, and split products."""
    results = tokens * (hidden * item + (2 + streams) * streams * 4)
    return results + _parts_scratch(tokens, hidden, (2 + streams) * streams)


def read_streams(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, eps: float, norm_eps: float,
    norm: Tensor, norm_out_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Read the streams for a sublayer in two launches: `kernels.hyper.reference.read_streams`; s is a power of two."""
    t, s, d = streams.shape
    assert fn.shape[0] == (2 + s) * s, f"{fn.shape[0]} rows of fn for {s} streams"
    streams = streams.contiguous()
    x = streams.new_empty(t, d)
    pre, post, comb = (streams.new_empty(t, *shape, dtype=torch.float32) for shape in ((s,), (s,), (s, s)))
    if not t:
        return x, pre, post, comb
    products, squares = _parts(streams, fn)
    constants = {"T": WEIGHT_TOKENS, "S": s, "N": products.shape[2], "SPLITS": SPLITS}
    _read[(t + triton.cdiv(t, WEIGHT_TOKENS),)](
        products, squares, scale, base, streams, norm, pre, post, comb, x, t, len(products), d, iterations,
        eps, norm_eps, norm_out_eps, **constants, BLOCK=triton.next_power_of_2(d), UPCAST=UPCAST,
        num_warps=READ_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return x, pre, post, comb
