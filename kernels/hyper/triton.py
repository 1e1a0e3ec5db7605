"""Manifold-constrained hyper-connections: streams are read and written once, their weights come from two launches.

The first launch cuts the columns of all streams into spans. A program leaves what its span adds to the products of a
token, or of a tile of tokens, with rows of `fn`, and to its square sum. The second adds these parts of a token, in one
order whatever ran first, and makes its weights of them; `read_streams` collapses and norms the streams there too.

Up to FEW tokens have programs of their own, so that each has the bits that it has alone. Products of more, in bf16,
are by tensor cores, with `fn` cut into three bf16 parts, which are all of its 24 bits; a launch before makes these, of
a few megabytes where the streams are hundreds.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from fathom.kernels.formats.triton_rounding import UPCAST, rounded, widened
from fathom.kernels.hyper.triton_streams import collapse, expand

__all__ = ["collapse", "expand", "head_weights", "hyper_weights", "read_streams"]

PROGRAMS = 128  # about one for each multiprocessor, of which an H200 has 132 and a B200 148
FEW = 16  # tokens, at most, that have programs of their own
SPAN = 128  # columns of their programs, if that makes no more than MOST of them
MOST = 256
TOKENS = 64  # of a tile, of more tokens
BLOCK = 64  # columns that a tile is multiplied by at a time
SPLITS = (8, 32)  # of columns, at least and at most, so that there are programs enough
WEIGHT_TOKENS = 16  # of a program that makes weights of more than FEW
CUT = 1024  # numbers of `fn` that a program cuts up
READ_WARPS = 8


@triton.jit
def _cut(fn, parts, size, BLOCK: tl.constexpr, UPCAST: tl.constexpr):
    """Three bf16 parts [3, size] of float32 numbers [size], each what the ones before leave, rounded."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rest = tl.load(fn + at, at < size, 0.0)
    for i in tl.static_range(3):
        part = rounded(rest, tl.bfloat16, UPCAST)
        tl.store(parts + i * size + at, part, at < size)
        rest -= widened(part, UPCAST)


@triton.jit(do_not_specialize=["tokens"])
def _sums_of_few(streams, fn, parts, tokens, columns, rows, SPAN: tl.constexpr, N: tl.constexpr, UPCAST: tl.constexpr):
    """Of one token and SPAN columns: N sums, products with rows of `fn` and, in the last place, squares."""
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    row = tl.arange(0, N)
    x = widened(tl.load(streams + token * columns + column, column < columns, 0.0), UPCAST)
    weighed = (row < rows)[:, None] & (column < columns)[None, :]
    w = tl.load(fn + row[:, None].to(tl.int64) * columns + column[None, :], weighed, 0.0)
    w = tl.where((row == N - 1)[:, None], x[None, :], w)
    tl.store(parts + (tl.program_id(0) * tokens + token) * N + row, tl.sum(w * x[None, :], 1))


@triton.jit(do_not_specialize=["tokens", "steps"])
def _sums_of_many(
    streams, fn, parts, tokens, columns, rows, steps,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Of TOKENS tokens and `steps` blocks of columns: N sums, as of few; `fn` is the sum of PARTS parts."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    present = token < tokens
    row = tl.arange(0, N)
    acc = tl.zeros([TOKENS, N], tl.float32)
    squares = tl.zeros([TOKENS, BLOCK], tl.float32)
    first = tl.program_id(1) * steps
    for step in range(first, tl.minimum(first + steps, tl.cdiv(columns, BLOCK))):
        column = step * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(streams + token[:, None] * columns + column, present[:, None] & (column < columns)[None, :], 0.0)
        wide = widened(x, UPCAST)
        if UPCAST:
            x = wide
        squares += wide * wide
        # A tensor core adds to its sum with truncation, an error to one side that grows with the additions: each block
        # of columns has a sum of its own, and these are added rounded to nearest.
        own = tl.zeros([TOKENS, N], tl.float32)
        for i in tl.static_range(PARTS):
            place = (i * rows + row)[:, None].to(tl.int64) * columns + column[None, :]
            w = tl.load(fn + place, (row < rows)[:, None] & (column < columns)[None, :], 0.0)
            own = tl.dot(x, tl.trans(widened(w, UPCAST) if UPCAST else w), own, input_precision="ieee")
        acc += own
    acc = tl.where((row == N - 1)[None, :], tl.sum(squares, 1)[:, None], acc)
    at = tl.program_id(1).to(tl.int64) * tokens + token
    tl.store(parts + at[:, None] * N + row[None, :], acc, present[:, None])


@triton.jit
def _found(
    parts, begin, tokens, splits, first, T: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr
):
    """M sums from place `first` on of T tokens from `begin` on, as splits found them: [SPLITS, T, M]."""
    row = tl.arange(0, SPLITS * T)  # of both, as threads next to each other have tokens, not splits, to add up
    split, token = row // T, begin + row % T
    at = (split.to(tl.int64) * tokens + token)[:, None] * N + first + tl.arange(0, M)[None, :]
    return tl.reshape(tl.load(parts + at, ((split < splits) & (token < tokens))[:, None], 0.0), [SPLITS, T, M])


@triton.jit
def _mixes(found, squares, columns, eps):
    """Products [T, M] of what `_found` found, over the root mean square of all streams."""
    return tl.sum(found, 0) * tl.rsqrt(tl.sum(squares, 0) / columns + eps)


@triton.jit
def _sigmoids(mixes, scale, base, M: tl.constexpr):
    return tl.sigmoid(mixes * tl.load(scale) + tl.load(base + tl.arange(0, M))[None, :])


@triton.jit
def _over(matrix, sums, UPCAST: tl.constexpr):
    """`matrix` over `sums`, by reciprocals as a GPU has them: that these are normal numbers is not looked at."""
    return matrix * (1.0 / sums if UPCAST else libdevice.fast_dividef(1.0, sums))


@triton.jit
def _sinkhorn(matrix, iterations, eps, UPCAST: tl.constexpr):
    """In the order of `kernels.hyper.reference.sinkhorn`: of logits [T, S, S]."""
    matrix = tl.exp(matrix - tl.max(matrix, 2, keep_dims=True))
    matrix = _over(matrix, tl.sum(matrix, 2, keep_dims=True), UPCAST) + eps
    matrix = _over(matrix, tl.sum(matrix, 1, keep_dims=True) + eps, UPCAST)
    for _ in range(1, iterations):
        matrix = _over(matrix, tl.sum(matrix, 2, keep_dims=True) + eps, UPCAST)
        matrix = _over(matrix, tl.sum(matrix, 1, keep_dims=True) + eps, UPCAST)
    return matrix


@triton.jit
def _reading(
    parts, scale, base, streams, norm_weight, pre, out, token, tokens, splits, d, eps, norm_eps, norm_out_eps,
    READ: tl.constexpr, S: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Store pre of a token and, READ, its streams collapsed and normed; all is asked for before any is waited for."""
    squares = _found(parts, token, tokens, splits, N - 1, 1, 1, N, SPLITS)
    found = _found(parts, token, tokens, splits, 0, 1, S, N, SPLITS)
    stream, column = tl.arange(0, S), tl.arange(0, BLOCK)
    if READ:
        place = (token * S + stream)[:, None] * d + column[None, :]
        x = tl.load(streams + place, (column < d)[None, :], 0.0)
        norm = tl.load(norm_weight + column, column < d, 0.0)
    weight = _sigmoids(_mixes(found, squares, S * d, norm_eps), scale, base, S) + eps
    tl.store(pre + token * S + stream[None, :], weight)
    if READ:
        x = tl.sum(tl.reshape(weight, [S, 1]) * widened(x, UPCAST), 0)
        x = widened(rounded(x, out.dtype.element_ty, UPCAST), UPCAST)
        x *= tl.rsqrt(tl.sum(x * x) / d + norm_out_eps)
        tl.store(out + token * d + column, rounded(x * norm, out.dtype.element_ty, UPCAST), column < d)


@triton.jit
def _writing(
    parts, scale, base, post, comb, begin, tokens, splits, columns, iterations, eps, norm_eps,
    T: tl.constexpr, S: tl.constexpr, N: tl.constexpr, SPLITS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Store post and comb of T tokens."""
    token = begin + tl.arange(0, T)
    present, row, entry = (token < tokens)[:, None], tl.arange(0, S), tl.arange(0, S * S)
    squares = _found(parts, begin, tokens, splits, N - 1, T, 1, N, SPLITS)
    found = _found(parts, begin, tokens, splits, S, T, S, N, SPLITS)
    logits = _found(parts, begin, tokens, splits, 2 * S, T, S * S, N, SPLITS)
    weight = _sigmoids(_mixes(found, squares, columns, norm_eps), scale + 1, base + S, S)
    tl.store(post + token[:, None] * S + row[None, :], 2 * weight, present)
    mixes = _mixes(logits, squares, columns, norm_eps) * tl.load(scale + 2) + tl.load(base + 2 * S + entry)[None, :]
    matrix = tl.reshape(_sinkhorn(tl.reshape(mixes, [T, S, S]), iterations, eps, UPCAST), [T, S * S])
    tl.store(comb + token[:, None] * (S * S) + entry[None, :], matrix, present)


@triton.jit(do_not_specialize=["tokens", "splits"])
def _weigh(
    parts, scale, base, streams, norm_weight, pre, post, comb, out, tokens, splits, d, iterations, eps,
    norm_eps, norm_out_eps, READ: tl.constexpr, T: tl.constexpr, S: tl.constexpr, N: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The first programs read a token each; the rest make post and comb of T tokens, at the same time."""
    program = tl.program_id(0).to(tl.int64)
    if program < tokens:
        _reading(
            parts, scale, base, streams, norm_weight, pre, out, program, tokens, splits, d, eps, norm_eps, norm_out_eps,
            READ, S, N, SPLITS, BLOCK, UPCAST,
        )  # fmt: skip
    else:
        _writing(
            parts, scale, base, post, comb, (program - tokens) * T, tokens, splits, S * d, iterations, eps, norm_eps,
            T, S, N, SPLITS, UPCAST,
        )  # fmt: skip


def hyper_weights(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights of one sublayer: `kernels.hyper.reference.hyper_weights`; s is a power of two."""
    _, s, _ = streams.shape
    assert fn.shape[0] == (2 + s) * s, f"{fn.shape[0]} rows of fn for {s} streams"
    return _weighed(streams, fn, scale, base, iterations, eps, norm_eps)[1:]


def hyper_weights_scratch(tokens: int, streams: int, hidden: int, item: int) -> int:
    """Bytes allocated in `hyper_weights` of up to so many tokens: the results, and split products and square sums."""
    rows = (2 + streams) * streams
    return tokens * rows * 4 + _parts_scratch(tokens, streams * hidden, rows, item)


def head_weights(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float) -> Tensor:
    """Weights of the head: `kernels.hyper.reference.head_weights`; s is a power of two."""
    _, s, _ = streams.shape
    assert fn.shape[0] == s, f"{fn.shape[0]} rows of fn for {s} streams"
    return _weighed(streams, fn, scale, base, 0, eps, norm_eps)[1]


def _weighed(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, eps: float, norm_eps: float,
    norm: Tensor | None = None, norm_out_eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """What `read_streams` returns; x is empty without a norm, and the last two without rows of `fn` for them."""
    t, s, d = streams.shape
    rest = fn.shape[0] > s
    x = streams.new_empty(0 if norm is None else t, d)
    shapes = (t, s), (rest * t, s), (rest * t, s, s)
    pre, post, comb = (streams.new_empty(shape, dtype=torch.float32) for shape in shapes)
    if t:
        streams = streams.contiguous()
        parts, constants = _parts(streams, fn)
        _weigh[(t + rest * triton.cdiv(t, constants["T"]),)](
            parts, scale, base, streams, base if norm is None else norm, pre, post, comb, x,
            t, len(parts), d, iterations, eps, norm_eps, norm_out_eps,
            READ=norm is not None, S=s, **constants, BLOCK=triton.next_power_of_2(d), UPCAST=UPCAST,
            num_warps=READ_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return x, pre, post, comb


def _parts(streams: Tensor, fn: Tensor) -> tuple[Tensor, dict[str, int]]:
    """Sums [splits, t, N] of the streams: products, and last squares; and the constants of what adds them up."""
    t, s, d = streams.shape
    rows, columns = fn.shape[0], s * d
    assert s & (s - 1) == 0, f"{s} streams are no power of two"
    assert fn.shape == (rows, columns), f"fn {fn.shape}, want {columns} columns"
    assert fn.dtype == torch.float32, f"fn: {fn.dtype}, want float32"
    fn, n = fn.contiguous(), _sums(rows)
    if t <= FEW:
        span = _span(columns)
        splits = triton.cdiv(columns, span)
        parts = streams.new_empty(splits, t, n, dtype=torch.float32)
        _sums_of_few[(splits, t)](
            streams, fn, parts, t, columns, rows, SPAN=span, N=n, UPCAST=UPCAST, num_warps=4, enable_fp_fusion=False
        )
        return parts, {"T": 1, "N": n, "SPLITS": triton.next_power_of_2(splits)}
    narrow = streams.dtype == torch.bfloat16
    if narrow:
        cut = torch.empty(3, *fn.shape, dtype=torch.bfloat16, device=fn.device)
        constants = {"BLOCK": CUT, "UPCAST": UPCAST}
        _cut[(triton.cdiv(fn.numel(), CUT),)](fn, cut, fn.numel(), **constants, num_warps=4, enable_fp_fusion=False)
        fn = cut
    tiles, blocks = triton.cdiv(t, TOKENS), triton.cdiv(columns, BLOCK)
    steps = triton.cdiv(blocks, min(blocks, _splits(tiles)))
    splits = triton.cdiv(blocks, steps)
    parts = streams.new_empty(splits, t, n, dtype=torch.float32)
    _sums_of_many[(tiles, splits)](
        streams, fn, parts, t, columns, rows, steps,
        TOKENS=TOKENS, BLOCK=BLOCK, N=n, PARTS=3 if narrow else 1, UPCAST=UPCAST,
        num_warps=4, num_stages=4 if narrow else 1, enable_fp_fusion=False,
    )  # fmt: skip
    return parts, {"T": WEIGHT_TOKENS, "N": n, "SPLITS": SPLITS[1]}


def _sums(rows: int) -> int:
    """Sums of a token: of each row of `fn`, and in the last place of squares; a dot takes 16 at least."""
    sums: int = max(16, triton.next_power_of_2(rows + 1))
    return sums


def _span(columns: int) -> int:
    """Columns of a program of few tokens."""
    span: int = max(SPAN, triton.next_power_of_2(triton.cdiv(columns, MOST)))
    return span


def _splits(tiles: int) -> int:
    """Programs that a tile of tokens is dealt to, if there are columns for them."""
    least, most = SPLITS
    return min(most, max(least, PROGRAMS // tiles))


def _parts_scratch(tokens: int, columns: int, rows: int, item: int) -> int:
    """Bytes allocated in `_parts` of up to so many tokens: what its programs find, and the parts of `fn`."""
    places: int = min(tokens, FEW) * triton.cdiv(columns, _span(columns))
    if tokens <= FEW:
        return places * _sums(rows) * 4
    least, most = SPLITS
    many = max(min(tokens * most, PROGRAMS * TOKENS), tokens * least)
    places = max(places, min(many, tokens * triton.cdiv(columns, BLOCK)))
    return places * _sums(rows) * 4 + (3 * rows * columns * 2 if item == 2 else 0)


def read_streams_scratch(tokens: int, streams: int, hidden: int, item: int) -> int:
    """Bytes allocated in `read_streams` of up to so many tokens: input and weights, and split products."""
    return tokens * hidden * item + hyper_weights_scratch(tokens, streams, hidden, item)


def read_streams(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, eps: float, norm_eps: float,
    norm: Tensor, norm_out_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Read the streams for a sublayer in two launches: `kernels.hyper.reference.read_streams`; s is a power of two."""
    _, s, _ = streams.shape
    assert fn.shape[0] == (2 + s) * s, f"{fn.shape[0]} rows of fn for {s} streams"
    return _weighed(streams, fn, scale, base, iterations, eps, norm_eps, norm, norm_out_eps)
