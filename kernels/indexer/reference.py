"""The lightning indexer: one shared key per compressed entry, many query heads, top-k entries per token."""

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
    n = keys.shape[0]
    scores = index_scores(q, head_weights, keys)
    seen = visible_entries(first, q.shape[0], ratio, q.device)[:, None]  # [t, 1]
    entry = torch.arange(n, device=q.device)
    scores = scores.masked_fill(entry >= seen, float("-inf"))
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, : min(k, n)]  # stable: lower index first
    best = torch.where(best < seen, best, n).sort(dim=-1).values  # n sorts behind every entry
    return torch.where(best < n, best, -1).to(torch.int32)


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
