"""V4.1's candidates: one layer opens blocks of entries for each token, among which later layers select.

PyTorch on every device, in tiles of tokens, each with the scores of all entries: no op set has another.
"""

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from fathom.kernels.formats.rows_reference import decode
from fathom.kernels.formats.stored import Rows
from fathom.kernels.indexer.reference import index_scores, visible_entries

SCORES: Final = 1 << 24  # numbers of heads' scores in a tile: 64 MiB


def open_blocks(q: Tensor, head_weights: Tensor, keys: Rows, first: int, ratio: int, size: int, count: int) -> Tensor:
    """The blocks of `size` entries that are open to each token, at most `count`.

    A block counts as its best visible entry does. The one of the newest visible entry is always open. Of equal blocks
    the lower is taken first. As long as there are no more than may be open, nothing is scored. Source: DeepSeek V4.1's
    model.py, `Indexer.forward`.

    Parameters
    ----------
    q, head_weights, keys, first, ratio
        As `kernels.indexer.reference.select` takes them.
    size, count
        `candidate_block_size` and `candidate_topk_blocks`.

    Returns
    -------
    Tensor
        [t, min(count, blocks)] int32, ascending, then -1.

    """
    entries = keys.shape[0]
    blocks = -(-entries // size)
    if blocks <= count:
        seen = visible_entries(first, len(q), ratio, q.device)[:, None]
        every = torch.arange(blocks, device=q.device, dtype=torch.int32)
        return torch.where(every * size < seen, every, -1)
    found = []
    for scores, seen in _tiles(q, head_weights, keys, first, ratio):
        padded = torch.nn.functional.pad(scores, (0, blocks * size - entries), value=float("-inf"))
        best = padded.unflatten(-1, (blocks, size)).amax(-1)
        newest = (seen - 1).clamp_min(0) // size == torch.arange(blocks, device=q.device)
        best = best.masked_fill(newest & (seen > 0), float("inf"))
        ordered = best.sort(dim=-1, descending=True, stable=True)
        chosen = ordered.indices.masked_fill(ordered.values == float("-inf"), blocks)[:, :count].sort(-1).values
        found.append(chosen.masked_fill(chosen == blocks, -1))
    return torch.cat(found).to(torch.int32)


def select_open(
    q: Tensor, head_weights: Tensor, keys: Rows, first: int, ratio: int, k: int, blocks: Tensor, size: int
) -> Tensor:
    """Pick the k best visible entries of open `blocks` [t, n], as `open_blocks` gives them, of `size` entries each.

    All else is `kernels.indexer.reference.select`'s.
    """
    entries, at, found = keys.shape[0], 0, []
    count = -(-entries // size)
    for scores, _ in _tiles(q, head_weights, keys, first, ratio):
        some = blocks[at : at + len(scores)].long()
        at += len(scores)
        is_open = torch.zeros(len(scores), count + 1, dtype=torch.bool, device=q.device)
        is_open.scatter_(1, some.masked_fill(some < 0, count), value=True)
        allowed = is_open[:, :count].repeat_interleave(size, 1)[:, :entries]
        ordered = scores.masked_fill(~allowed, float("-inf")).sort(dim=-1, descending=True, stable=True)
        none = ordered.values == float("-inf")
        best = ordered.indices.masked_fill(none, entries)[:, : min(k, entries)].sort(dim=-1).values
        found.append(best.masked_fill(best == entries, -1))
    return torch.cat(found).to(torch.int32)


def _tiles(q: Tensor, head_weights: Tensor, keys: Rows, first: int, ratio: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Of some tokens after the other, scores [n, entries], -inf where not visible, and how many entries are [n, 1]."""
    whole = decode(keys)
    step = max(1, SCORES // (q.shape[1] * max(1, whole.shape[0])))
    for start in range(0, len(q), step):
        part = slice(start, start + step)
        scores = index_scores(q[part], head_weights[part], whole)
        seen = visible_entries(first + start, len(scores), ratio, q.device)[:, None]
        yield scores.masked_fill(torch.arange(whole.shape[0], device=q.device) >= seen, float("-inf")), seen


def open_blocks_scratch(tokens: int, heads: int, width: int, entries: int, blocks: int) -> int:
    """Bytes alive at most in `open_blocks`, the result of so many blocks a token included."""
    return _scratch(tokens, heads, width, entries) + tokens * blocks * 12


def select_open_scratch(tokens: int, heads: int, width: int, entries: int, k: int) -> int:
    """Bytes alive at most in `select_open`, the result included."""
    return _scratch(tokens, heads, width, entries) + tokens * min(k, entries) * 12


def _scratch(tokens: int, heads: int, width: int, entries: int) -> int:
    """Keys in fp32, and of a tile queries, scores of heads twice, and scores, masks, order and sorted ones."""
    some = min(tokens, max(1, SCORES // (heads * max(1, entries))))
    return entries * width * 4 + some * (heads * (width * 4 + entries * 8) + entries * 40)
