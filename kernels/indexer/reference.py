"""The lightning indexer: one shared key per compressed entry, many query heads, top-k entries per token.

In V4.1 one layer opens blocks of entries for each token, and layers behind it select among these.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fathom.kernels.formats.rows_reference import decode
from fathom.kernels.formats.stored import Rows


def index_scores(q: Tensor, head_weights: Tensor, keys: Rows) -> Tensor:
    """Score every entry for every token.

    Equation (paper section 2.3.1, eq. 16): ``s[t, n] = sum_h w[t, h] relu(q[t, h] . k[n])``, in fp32. The key is shared
    by all heads: multi-query, not multi-head.

    Parameters
    ----------
    q
        [t, h, d].
    head_weights
        [t, h] float32.
    keys
        [n, d] in their stored form.

    Returns
    -------
    Tensor
        [t, n] float32.

    """
    per_head = torch.einsum("thd,nd->thn", q.float(), decode(keys)).relu()
    return torch.einsum("th,thn->tn", head_weights, per_head)


def visible_entries(first: int, tokens: int, ratio: int, device: torch.device) -> Tensor:
    """How many entries each token sees: ``(position + 1) // ratio``, whole blocks only. [t] int64."""
    return (torch.arange(first, first + tokens, device=device) + 1) // ratio


def select(q: Tensor, head_weights: Tensor, keys: Rows, first: int, ratio: int, k: int) -> Tensor:
    """Pick the k best visible entries of each token; of equal scores, the lower index.

    Parameters
    ----------
    q, head_weights, keys
        As in `index_scores`.
    first
        Position of the first token; token i stands at ``first + i`` and sees entries ``e < (first + i + 1) // ratio``.
    ratio
        Tokens per entry.
    k
        `index_topk`.

    Returns
    -------
    Tensor
        [t, min(k, n)] int32: each row the selected entries in ascending order, then -1 where fewer are visible.

    """
    scores, seen = _visible_scores(q, head_weights, keys, first, ratio)
    n = scores.shape[1]
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, : min(k, n)]  # stable: lower index first
    best = torch.where(best < seen, best, n).sort(dim=-1).values  # n sorts behind every entry; -inf may be a score
    return torch.where(best < n, best, -1).to(torch.int32)


def _visible_scores(q: Tensor, head_weights: Tensor, keys: Rows, first: int, ratio: int) -> tuple[Tensor, Tensor]:
    """Scores [t, n], -inf where not visible, and how many entries each token sees [t, 1]."""
    scores = index_scores(q, head_weights, keys)
    seen = visible_entries(first, q.shape[0], ratio, q.device)[:, None]
    return scores.masked_fill(torch.arange(scores.shape[1], device=q.device) >= seen, float("-inf")), seen


def best_places(scores: Tensor, k: int) -> Tensor:
    """Where the largest of a row of scores [t, n] are, of equal ones the lower: [t, min(k, n)] int32, ascending.

    What is -inf is none: -1, behind the others.
    """
    ordered, n = scores.sort(dim=-1, descending=True, stable=True), scores.shape[1]
    best = ordered.indices.masked_fill(ordered.values == float("-inf"), n)[:, :k].sort(dim=-1).values
    return best.masked_fill(best == n, -1).to(torch.int32)


def open_blocks(q: Tensor, head_weights: Tensor, keys: Rows, first: int, ratio: int, size: int, count: int) -> Tensor:
    """The blocks of `size` entries that are open to each token, at most `count`.

    A block counts as its best visible entry does. The one of the newest visible entry is always open. Of equal blocks
    the lower is taken first. Source: DeepSeek V4.1's model.py, `Indexer.forward`.

    Parameters
    ----------
    q, head_weights, keys, first, ratio
        As `select` takes them.
    size, count
        `candidate_block_size` and `candidate_topk_blocks`.

    Returns
    -------
    Tensor
        [t, min(count, blocks)] int32, ascending, then -1.

    """
    scores, seen = _visible_scores(q, head_weights, keys, first, ratio)
    return opened(peaks(scores, size), seen, size, count)


def peaks(scores: Tensor, size: int) -> Tensor:
    """The best of each block of scores [t, n]: [t, blocks]."""
    padded = torch.nn.functional.pad(scores, (0, -scores.shape[1] % size), value=float("-inf"))
    most: Tensor = padded.unflatten(-1, (-1, size)).amax(-1)
    return most


def opened(best: Tensor, seen: Tensor, size: int, count: int) -> Tensor:
    """`open_blocks` by the best score of each block [t, blocks], and how many entries each token sees [t, 1]."""
    newest = (seen - 1).clamp_min(0) // size == torch.arange(best.shape[1], device=best.device)
    return best_places(best.masked_fill(newest & (seen > 0), float("inf")), count)


def select_open(
    q: Tensor, head_weights: Tensor, keys: Rows, first: int, ratio: int, k: int, blocks: Tensor, size: int
) -> Tensor:
    """Pick the k best visible entries of open `blocks` [t, n], as `open_blocks` gives them, of `size` entries each.

    All else is `select`'s.
    """
    scores, _ = _visible_scores(q, head_weights, keys, first, ratio)
    return best_places(of_blocks(scores, blocks, size), k)


def of_blocks(scores: Tensor, blocks: Tensor, size: int) -> Tensor:
    """Scores [t, n] with -inf in those of no open block."""
    some, count = blocks.long(), -(-scores.shape[1] // size)
    is_open = torch.zeros(len(scores), count + 1, dtype=torch.bool, device=scores.device)
    is_open.scatter_(1, some.masked_fill(some < 0, count), value=True)
    allowed = is_open[:, :count].repeat_interleave(size, 1)[:, : scores.shape[1]]
    return scores.masked_fill(~allowed, float("-inf"))


@dataclass(frozen=True, slots=True)
class SelectFp8:
    """`select` by queries that are rounded to E4M3 first, with a power of two for each head: an approximation.

    Equation: ``q'[t, h] = s e4m3(q[t, h] / s)`` with ``s = 2^ceil(log2(max(amax |q[t, h]|, 1e-4) / 448))``, then
    `select` of q'. Products with `Fp8Keys` are then those of codes, which tensor cores take at twice the rate of bf16.
    What `round_index` has rounded loses nothing more, unless the largest of some group of 32 columns is less than 2^-14
    of the head's largest, or this is below 1e-4.
    """

    simulate_fp8: Callable[[Tensor, int], Tensor]
    select: Callable[..., Tensor]

    def __call__(self, q: Tensor, head_weights: Tensor, keys: Rows, first: int | Tensor, ratio: int, k: int) -> Tensor:
        """Parameters and result are those of `select`."""
        return self.select(self.simulate_fp8(q, q.shape[-1]), head_weights, keys, first, ratio, k)
