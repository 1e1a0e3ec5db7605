"""V4.1's candidates in tiles: one layer opens blocks of entries for each token, among which later layers select.

To open blocks, every visible entry is scored, and of a block the best score is kept. To select, a token's open blocks
alone are read, however long the context is. A few tokens have the scores of `kernels.indexer.cpu_few`, which no other
token of a call moves by a bit.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fathom.kernels.formats import rows
from fathom.kernels.formats.cpu_rows import readable
from fathom.kernels.formats.rows import Rows
from fathom.kernels.indexer.cpu import FEW, KEYS, PER_HEAD, ROWS
from fathom.kernels.indexer.cpu_few import columns, scores_few
from fathom.kernels.indexer.reference import best_places, index_scores, opened, peaks, visible_entries


def open_blocks(q: Tensor, head_weights: Tensor, keys: Rows, first: int, ratio: int, size: int, count: int) -> Tensor:
    """`kernels.indexer.reference.open_blocks`; as long as there are no more than may be open, nothing is scored."""
    (t, h, d), entries = q.shape, rows.length(keys)
    blocks, found = -(-entries // size), []
    if blocks <= count:
        seen = visible_entries(first, t, ratio, q.device)[:, None]
        every = torch.arange(blocks, device=q.device, dtype=torch.int32)
        return torch.where(every * size < seen, every, -1)
    if t <= FEW and readable(keys):
        seen = visible_entries(first, t, ratio, q.device)[:, None]
        scores = scores_few(q, head_weights, keys, min((first + t) // ratio, entries))
        scores.masked_fill_(torch.arange(scores.shape[1]) >= seen, float("-inf"))
        best = peaks(scores, size)
        unseen = blocks - best.shape[1]
        return opened(torch.nn.functional.pad(best, (0, unseen), value=float("-inf")), seen, size, count)
    step = _keys_of_a_tile(h, d, size)
    for part in _tokens_of_a_tile(t, h):
        seen = visible_entries(first + part.start, len(q[part]), ratio, q.device)[:, None]
        most = torch.full((len(seen), blocks), float("-inf"), device=q.device)
        end = min((first + part.stop) // ratio, entries)
        for low in range(0, end, step):
            high = min(low + step, end)
            scores = index_scores(q[part], head_weights[part], rows.read(keys, low, high))
            scores.masked_fill_(torch.arange(low, high, device=q.device) >= seen, float("-inf"))
            most[:, low // size : -(-high // size)] = peaks(scores, size)
        found.append(opened(most, seen, size, count))
    return torch.cat(found)


def select_open(
    q: Tensor, head_weights: Tensor, keys: Rows, first: int, ratio: int, k: int, blocks: Tensor, size: int
) -> Tensor:
    """`kernels.indexer.reference.select_open`."""
    (t, h), width, found = q.shape[:2], min(k, rows.length(keys)), []
    for part in _tokens_of_a_tile(t, h):
        seen = visible_entries(first + part.start, len(q[part]), ratio, q.device)[:, None]
        some = blocks[part].long()[..., None]
        at = (some * size + torch.arange(size, device=q.device)).flatten(1)  # [n, m], ascending where open
        closed = (some < 0).expand(-1, -1, size).flatten(1) | (at >= seen)
        at.masked_fill_(closed, 0)
        given = q[part], head_weights[part], keys, at
        scores = _scores_few(*given) if t <= FEW and readable(keys) else _scores_of(*given)
        places = best_places(scores.masked_fill_(closed, float("-inf")), width).long()
        chosen = at.gather(1, places.clamp_min(0)).masked_fill(places < 0, -1)
        found.append(torch.nn.functional.pad(chosen, (0, width - chosen.shape[1]), value=-1).to(torch.int32))
    return torch.cat(found)


def _scores_few(q: Tensor, head_weights: Tensor, keys: Rows, at: Tensor) -> Tensor:
    """`_scores_of` of a few tokens, one after the other."""
    scores = torch.empty(at.shape)
    for token, places in enumerate(at):
        one = slice(token, token + 1)
        scores[one] = scores_few(q[one], head_weights[one], rows.take(keys, places), len(places))
    return scores


def _scores_of(q: Tensor, head_weights: Tensor, keys: Rows, at: Tensor) -> Tensor:
    """Scores [n, m] of each token with keys of its own, at [n, m]."""
    scores = torch.empty(at.shape, device=q.device)
    step = max(1, KEYS // (len(at) * q.shape[2]))
    for low in range(0, at.shape[1], step):
        some = at[:, low : low + step]
        read = rows.take(keys, some.flatten()).float().view(*some.shape, -1)
        scores[:, low : low + step] = torch.einsum("th,thn->tn", head_weights, (q.float() @ read.mT).relu_())
    return scores


def _tokens_of_a_tile(tokens: int, heads: int) -> Iterator[slice]:
    step = max(1, ROWS // heads)
    return (slice(start, min(start + step, tokens)) for start in range(0, tokens, step))


def _keys_of_a_tile(heads: int, width: int, size: int) -> int:
    """Whole blocks."""
    return max(1, min(PER_HEAD // (max(1, ROWS // heads) * heads), KEYS // width) // size) * size


def open_blocks_scratch(tokens: int, heads: int, width: int, entries: int, size: int, count: int) -> int:
    """Bytes alive at most in `open_blocks`, the result included: a tile's queries, keys and scores, best and order."""
    blocks, rows_ = -(-entries // size), min(tokens, max(1, ROWS // heads))
    if blocks <= count:
        return tokens * blocks * 16
    if tokens <= FEW:
        return tokens * (columns(entries) * 4 + entries * 5 + blocks * 24) + entries * 8
    step = min(entries, _keys_of_a_tile(heads, width, size))
    tile = rows_ * heads * (width * 4 + step * 8) + step * width * 4 + rows_ * step * 8
    return tokens * min(count, blocks) * 4 + rows_ * blocks * 4 + max(tile, rows_ * blocks * 24)


def select_open_scratch(
    tokens: int, heads: int, width: int, entries: int, k: int, blocks: int, size: int, item: int
) -> int:
    """Bytes alive at most in `select_open`, the result included: a tile's places, queries, keys and scores, order.

    `item` is of a number of a key as it is read.
    """
    rows_, places = min(tokens, max(1, ROWS // heads)), blocks * size
    step = min(places, max(1, KEYS // (rows_ * width)))
    tile = rows_ * (heads * (width * 4 + step * 8) + step * (width * 8 + 8))
    if tokens <= FEW:
        tile = places * width * item + tokens * columns(places) * 8
    return tokens * min(k, entries) * 4 + rows_ * places * 13 + max(tile, rows_ * places * 24)
