"""The lightning indexer in tiles: a streaming top-k that never holds more than one tile of scores.

`torch.topk` promises nothing about equal values, and equal scores are common: ReLU sends whole rows to 0.0. So a score
and its entry are packed into one int64 whose order is "higher score, then lower entry". All packed values differ, the
k largest are therefore unique, and any top-k of them is the exact answer.
"""

import torch
from torch import Tensor

ROWS = 1024  # (token, head) pairs per tile
PER_HEAD = 1 << 18  # numbers in a tile of per-head scores: 1 MiB, which stays in a core's L2
MERGED = 1 << 18  # packed scores per merge into the running top-k: 2 MiB
_INVISIBLE = torch.iinfo(torch.int64).min  # below every packed score
_LOW = (1 << 32) - 1


def select(q: Tensor, head_weights: Tensor, keys: Tensor, first: int, ratio: int, k: int) -> Tensor:
    """Pick the k best visible entries of each token; of equal scores, the lower index.

    Contract: `kernels.reference.indexer.select`. Where no token of a tile sees more than k entries nothing is scored:
    the k best of at most k are all of them, whatever their scores, and rows are in ascending order.

    A NaN score leaves open which entries its row selects; they are visible and distinct all the same.
    """
    t, h, _ = q.shape
    n = keys.shape[0]
    width = min(k, n)
    out = torch.empty(t, width, dtype=torch.int32, device=q.device)
    tokens = max(1, ROWS // h)
    for start in range(0, t, tokens):
        stop = min(start + tokens, t)
        position = torch.arange(first + start, first + stop, device=q.device)
        seen = ((position + 1) // ratio).clamp(max=n)[:, None]  # [t, 1]
        most = min((first + stop) // ratio, n)
        if most <= width:
            best = torch.arange(width, device=q.device).expand(stop - start, width)
        else:
            best = _best(q[start:stop].float(), head_weights[start:stop], keys[:most], seen, width)
        out[start:stop] = torch.where(best < seen, best, -1)
    return out


def _best(q: Tensor, head_weights: Tensor, keys: Tensor, seen: Tensor, k: int) -> Tensor:
    """Rows of the k best entries in ascending order, an invisible entry where fewer than k are visible: [t, k]."""
    best = torch.full((q.shape[0], k), _INVISIBLE, device=q.device)
    step = max(k, MERGED // q.shape[0])
    for low in range(0, keys.shape[0], step):
        tile = _pack(_scores(q, head_weights, keys[low : low + step]), low)
        entry = torch.arange(low, low + tile.shape[1], device=q.device)
        tile.masked_fill_(entry >= seen, _INVISIBLE)
        best = torch.cat((best, tile), dim=1).topk(k, dim=1, sorted=False).values
    entries = torch.where(best == _INVISIBLE, keys.shape[0], _LOW - (best & _LOW))
    return entries.sort(dim=1).values


def _scores(q: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
    """`kernels.reference.indexer.index_scores` of one merge, key tile by key tile: [t, n] float32."""
    out = torch.empty(q.shape[0], keys.shape[0], device=q.device)
    step = max(1, PER_HEAD // (q.shape[0] * q.shape[1]))
    for low in range(0, keys.shape[0], step):
        per_head = (q @ keys[low : low + step].float().T).relu_()  # [t, h, m]
        out[:, low : low + step] = (head_weights[:, None] @ per_head)[:, 0]
    return out


def _pack(scores: Tensor, low: int) -> Tensor:
    """Scores [t, n] float32 of entries `low`, `low` + 1, ... as int64: ordered by score, of equals by lower entry."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0: the two zeros are equal scores
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # a negative float's bits grow with its size: flip them
    entry = torch.arange(low, low + scores.shape[1], device=scores.device)
    return (ordered.long() << 32) | (_LOW - entry)
