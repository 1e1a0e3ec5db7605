"""The indexer for a few tokens: scores of all visible keys, decoded once for all of them, and the exact k best.

A score adds up in one order, whatever stands around the key and the token: equal keys have equal scores. The k-th best
is found digit by digit, as in `kernels.indexer.topk`; what is above it is taken, and the first of what is equal to it.
"""

from typing import Final

import numpy as np
import torch
from numba import types
from torch import Tensor

from fathom.kernels.compiled import address, aligned, compiled, each_of, loop, numbers
from fathom.kernels.formats.cpu_rows import KIND, addresses, decode_row, row_arrays
from fathom.kernels.formats.rows import length
from fathom.kernels.formats.stored import Rows
from fathom.kernels.lanes import bits, dots, fma, load_splat, relu, splat, store

BLOCK: Final = 16  # keys that are scored side by side
_ZERO: Final = np.float32(0)
_UPPER: Final = np.uint32(1 << 31)
_DIGITS: Final = 1 << 11  # of a score's bits: 11, 11 and 10
_I64: Final = types.int64


def select_few(q: Tensor, head_weights: Tensor, keys: Rows, first: int, ratio: int, k: int) -> Tensor:
    """`kernels.indexer.reference.select` of a few tokens, in one compiled call."""
    t, h, d = q.shape
    n = length(keys)
    (queries, given), (stored, kept) = addresses(q.reshape(t * h, d)), addresses(keys)
    head_weights, out = head_weights.contiguous(), torch.empty(t, min(k, n), dtype=torch.int32)
    scores = torch.empty(t * columns(min((first + t) // ratio, n)))
    _select(queries, address(head_weights), stored, t, h, first, ratio, n, min(k, n), address(scores), address(out))
    del given, kept  # copies lay where their addresses said, until now
    return out


def scores_few(q: Tensor, head_weights: Tensor, keys: Rows, count: int) -> Tensor:
    """`kernels.indexer.reference.index_scores` of a few tokens with the first `count` keys: [t, count]."""
    t, h, d = q.shape
    (queries, given), (stored, kept) = addresses(q.reshape(t * h, d)), addresses(keys)
    head_weights, scores = head_weights.contiguous(), torch.empty(t, columns(count))
    _score_all(queries, address(head_weights), stored, t, h, count, address(scores))
    del given, kept  # copies lay where their addresses said, until now
    return scores[:, :count]


def columns(entries: int) -> int:
    """Scores of a token, those that fill up the last block among them."""
    return -(-entries // BLOCK) * BLOCK


@loop
def _scores(low, high, queries, weights, keys, tokens, heads, count, scores):
    """Score blocks of sixteen keys for all tokens."""
    wide, four = (keys.width + 15) // 16 * 16, (heads + 3) // 4 * 4
    block, q = aligned(BLOCK * wide, scores), aligned(tokens * four * wide, scores)
    width = (count + BLOCK - 1) // BLOCK * BLOCK
    for token in range(tokens):
        for head in range(heads):
            decode_row(queries, token * heads + head, q, (token * four + head) * wide, np.int64(16))
    for begin in range(low * BLOCK, min(high * BLOCK, count), BLOCK):
        for i in range(min(BLOCK, count - begin)):
            decode_row(keys, begin + i, block, i * 16, np.int64(256))
        for token in range(tokens):
            score = splat(_ZERO)
            for head in range(0, heads, 4):
                at = token * heads + head
                a, b, c, d = dots(q, (token * four + head) * wide, wide, block, wide // 16)
                score = fma(load_splat(weights, at), relu(a), score)
                if head + 1 < heads:  # else the row is none of this token
                    score = fma(load_splat(weights, at + 1), relu(b), score)
                if head + 2 < heads:
                    score = fma(load_splat(weights, at + 2), relu(c), score)
                if head + 3 < heads:
                    score = fma(load_splat(weights, at + 3), relu(d), score)
            store(scores, token * width + begin, score)


@loop
def _score(queries, weights, keys, tokens, heads, count, scores):
    blocks = (count + BLOCK - 1) // BLOCK
    work = count * keys.width * heads * tokens // 4
    each_of(_scores, blocks, work, (queries, weights, keys, tokens, heads, count, scores))


@compiled((KIND, _I64, KIND, _I64, _I64, _I64, _I64))
def _score_all(queries, weights, keys, tokens, heads, count, scores):
    scored = numbers(scores, np.float32)
    _score(row_arrays(queries), numbers(weights, np.float32), row_arrays(keys), tokens, heads, count, scored)


@loop
def _pick(scores, begin, seen, k, out, to):
    """Write the k best of `seen` scores, more than k: ascending."""
    ordered = numbers(scores, np.uint32)
    floats = numbers(scores, np.float32)
    counts = np.zeros(_DIGITS, np.int64)
    for i in range(begin, begin + seen):  # -0.0 + 0.0 is 0.0: the two zeros are equal scores
        word = bits(floats[i] + _ZERO)
        word = np.uint32(~word) if word & _UPPER else np.uint32(word | _UPPER)
        ordered[i] = word
        counts[word >> np.uint32(21)] += 1
    prefix, left = _digit(counts, k)
    for shift, size in ((10, 11), (0, 10)):
        counts[:] = 0
        above, mask = np.uint32(shift + size), np.uint32((1 << size) - 1)
        for i in range(begin, begin + seen):
            if ordered[i] >> above == prefix:
                counts[(ordered[i] >> np.uint32(shift)) & mask] += 1
        digit, left = _digit(counts, left)
        prefix = np.uint32(prefix << np.uint32(size) | digit)
    for i in range(seen):
        word = ordered[begin + i]
        if word > prefix or (word == prefix and left > 0):
            left -= word == prefix
            out[to] = i
            to += 1


@loop
def _digit(counts, k):
    """The digit of the k-th largest, and how many of those that have it are among the k largest."""
    digit = len(counts) - 1
    while counts[digit] < k:
        k -= counts[digit]
        digit -= 1
    return np.uint32(digit), k


@loop
def _picks(low, high, first, ratio, n, k, width, scores, out):
    for token in range(low, high):
        seen = min((first + token + 1) // ratio, n)
        if seen > k:
            _pick(scores, token * width, seen, k, out, token * k)
            continue
        for i in range(k):
            out[token * k + i] = i if i < seen else -1


@compiled((KIND, _I64, KIND, _I64, _I64, _I64, _I64, _I64, _I64, _I64, _I64))
def _select(queries, weights, keys, tokens, heads, first, ratio, n, k, scores, out):
    most = min((first + tokens) // ratio, n)
    if most > k:
        _score(
            row_arrays(queries), numbers(weights, np.float32), row_arrays(keys), tokens, heads, most,
            numbers(scores, np.float32),
        )  # fmt: skip
    given = (first, ratio, n, k, (most + BLOCK - 1) // BLOCK * BLOCK, scores, numbers(out, np.int32))
    each_of(_picks, tokens, np.int64(tokens - 1) * most, given)
