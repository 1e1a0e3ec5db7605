"""Attention over keys and values in Shard's forms, tile by tile: scratch memory does not grow with the context.

A tile of compressed keys is rebuilt from its coefficients, rotated to its positions, met by the queries, and gone:
``kv heads * d * r`` multiplications a token, where the relative identity (`kernels.shard.reference.relative_scores`)
needs ``query heads * d * r``. Compressed values are added up as they are stored, in the rotated space, and rotated back
once per query.

Segments share one running softmax: largest logit, sum of exponentials, and two sums of values, of those stored as
they are and of those stored rotated. That is the merge of segments by their log-sum-exp, without a division and a
logarithm between them. Everything is computed in fp32.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fathom.kernels.formats import coded_rows, qjl
from fathom.kernels.shard.cpu_middle import MiddleTiles, middle_keys, middle_values
from fathom.kernels.shard.reference import Middle, Stream
from fathom.kernels.softmax import Softmax

__all__ = ["attend", "middle_keys", "middle_values"]

KEYS = 1 << 18  # numbers in a tile of keys: 1 MiB
LOGITS = 1 << 17  # numbers in a tile of logits
TOKENS = 64  # queries per tile


def attend(
    q: Tensor, keys: Tensor, values: Tensor, middle: Middle | None, stream: Stream | None, signs: Tensor | None
) -> Tensor:
    """Attend from each query to all keys of all segments.

    Parameters
    ----------
    q
        [t, h, d], rotary embedding applied; every query sees every key.
    keys, values
        [n, kv heads, d], exact, in any order; n >= 1.
    middle, stream
        Compressed segments, None where there are none.
    signs
        [d] applied before values were rotated, or None: of the middle and the stream alike.

    Returns
    -------
    Tensor
        [t, h, d] in the dtype of `q`.

    """
    out = torch.empty_like(q)
    for start in range(0, q.shape[0], TOKENS):
        part = q[start : start + TOKENS]
        grouped = _grouped(part, keys.shape[1])
        state = _begin(grouped)
        plain, rotated = state.values  # of values stored as they are, and of those stored rotated
        for low, high in _tiles(keys.shape[0], grouped):
            _fold(state, plain, grouped, keys[low:high].float(), values[low:high].float())
        if middle is not None:
            _fold_middle(state, grouped, middle)
        if stream is not None:
            _fold_stream(state, grouped, stream)
        plain.add_(coded_rows.undo_hadamard(rotated, signs))
        out[start : start + TOKENS] = _finished(state, part.shape)
    return out


def attend_scratch(tokens: int, heads: int, kv_heads: int, d: int, rank: int, item: int) -> int:
    """Bytes alive at most in `attend`, the result included: queries and sums, and a tile of rebuilt keys and values."""
    rows, width = min(tokens, TOKENS), kv_heads * d
    tile = max(1, min(KEYS // width, LOGITS // (heads * rows)))
    rebuilt = tile * (3 * rank + 5 * width) * 4 + width * rank * 8
    return tokens * heads * d * item + 5 * rows * heads * d * 4 + rebuilt + 3 * rows * heads * tile * 4


def _fold_middle(state: Softmax, q: Tensor, middle: Middle) -> None:
    """Fold the middle in; nothing stored rotated may have been before it, because its sum is scaled as a whole."""
    n = middle.values.codes.shape[0]
    tiles = MiddleTiles(middle, min(n, _tile(q)))
    paired = tiles.queries(q)
    for low, high in _tiles(n, q):
        _fold(state, state.values[1], paired, tiles.keys(low, high), tiles.values(low, high))
    state.values[1].mul_(tiles.largest)


def _fold_stream(state: Softmax, q: Tensor, stream: Stream) -> None:
    heads = q.shape[0]
    queries = qjl.query(stream.keys, q)
    for low, high in _tiles(stream.tokens, queries):
        rows, shape = (low * heads, high * heads), (high - low, heads)
        keys = qjl.read_hadamard(stream.keys, *rows).unflatten(0, shape)
        values = coded_rows.read_hadamard(stream.values, *rows).unflatten(0, shape)
        _fold(state, state.values[1], queries, keys, values)


def _grouped(q: Tensor, heads: int) -> Tensor:
    """Queries [t, h, d] scaled by d^-0.5, by the KV head they read: [heads, t * h / heads, d] float32."""
    t, h, d = q.shape
    assert h % heads == 0, f"{h} query heads are no multiple of {heads} KV heads"
    scale: float = d**-0.5
    return (q.float() * scale).reshape(t, heads, h // heads, d).transpose(0, 1).reshape(heads, -1, d)


def _begin(q: Tensor) -> Softmax:
    """Softmax of queries [kv heads, rows, d] over nothing."""
    # The peak begins finite, so that no difference of peaks is inf - inf where all logits of a tile are -inf.
    peak = q.new_full(q.shape[:2], torch.finfo(torch.float32).min)
    return Softmax(peak, torch.zeros_like(peak), (torch.zeros_like(q), torch.zeros_like(q)))


def _finished(state: Softmax, shape: torch.Size) -> Tensor:
    """[t, h, d] from the sums in plain space."""
    t, h, d = shape
    out = state.values[0] / state.total[..., None]
    return out.view(-1, t, h // out.shape[0], d).transpose(0, 1).reshape(t, h, d)


def _tile(q: Tensor) -> int:
    """Tokens in a tile for queries `q` [heads, rows, d]."""
    heads, rows, d = q.shape
    return max(1, min(KEYS // (heads * d), LOGITS // (heads * rows)))


def _tiles(n: int, q: Tensor) -> Iterator[tuple[int, int]]:
    """Ranges of tokens, each a tile for queries `q` [heads, rows, d]."""
    step = _tile(q)
    for low in range(0, n, step):
        yield low, min(low + step, n)


def _fold(state: Softmax, into: Tensor, q: Tensor, keys: Tensor, values: Tensor) -> None:
    """Fold one tile into the running softmax of `q` [heads, rows, e].

    `keys` is [m, heads, e] and `values` [m, heads, d], which belong to the sum `into` of `state`.
    """
    logits = q @ keys.permute(1, 2, 0)  # [heads, rows, m]
    masses = state.fold(logits)
    into.add_(masses @ values.transpose(0, 1))
