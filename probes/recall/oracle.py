"""The indexer's scores in float64, and how a selection compares with them. Nothing of `kernels` is used here."""

from typing import NamedTuple

import torch
from torch import Tensor

TILE = 1 << 22  # numbers in a tile of per-head scores, float64


def exact_scores(q: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
    """Score every key for every token: ``s[t, n] = sum_h w[t, h] relu(q[t, h] . k[n])``.

    Source: DeepSeek `Indexer.forward`, paper section 2.3.1, eq. 16; one key for all heads.

    Parameters
    ----------
    q
        [t, h, d].
    head_weights
        [t, h].
    keys
        [n, d].

    Returns
    -------
    Tensor
        [t, n] float64.

    """
    t, h, _ = q.shape
    queries, weights = q.double().flatten(0, 1), head_weights.double()
    out = torch.empty(t, keys.shape[0], dtype=torch.float64)
    step = max(1, TILE // (t * h))
    for low in range(0, keys.shape[0], step):
        per_head = (queries @ keys[low : low + step].double().T).relu_()  # [t * h, m]
        out[:, low : low + step] = torch.einsum("th,thm->tm", weights, per_head.unflatten(0, (t, h)))
    return out


def rounding_error(q: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
    """How far a score that was summed in fp32, in any order, can be from the exact one; [t, 1] float64.

    A sum of d products, then one of h: at most ``(d + h + 4) 2^-24`` of the sum of absolute terms, which Cauchy and
    Schwarz bound by ``sum_h |w_h| |q_h| max_n |k_n|``.
    """
    _, h, d = q.shape
    largest = keys.double().norm(dim=1).max()
    terms = (head_weights.double().abs() * q.double().norm(dim=2)).sum(1, keepdim=True) * largest
    bound: Tensor = (d + h + 4) * 2.0**-24 * terms
    return bound


def hadamard_matrix(d: int) -> Tensor:
    """Walsh-Hadamard matrix, ``H[i, j] = (-1)^popcount(i & j) d^-0.5``: symmetric, orthogonal; [d, d] float64."""
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(d)] for i in range(d)]
    matrix: Tensor = torch.tensor(signs, dtype=torch.float64) * d**-0.5
    return matrix


class Comparison(NamedTuple):
    """A selection against the exact scores, row by row; each [t] float64, see `compare`."""

    recall: Tensor  # share of the row's k that are as good as the k-th best, ties with it included
    ties: Tensor  # of the selected: below the k-th best, but by at most one ulp of fp32; they count as recalled
    passed_over: Tensor  # of the selected: below the k-th best by more than fp32's rounding explains
    kept: Tensor  # score kept: 1 for the k best entries, 0 for entries of average score


def compare(selected: Tensor, scores: Tensor, visible: Tensor, k: int, error: Tensor | None = None) -> Comparison:
    """Compare what was selected with the k best of `scores`.

    Parameters
    ----------
    selected
        [t, >= k] entries, -1 where there is none. One that is named twice counts once.
    scores
        [t, n] float64, an oracle's.
    visible
        [t] how many entries each row may see, more than k each.
    error
        [t, 1] what the score that was used can be off `scores`, or None where rounding is not what is asked about:
        then everything below the k-th best is passed over.

    """
    n = scores.shape[1]
    hidden = torch.arange(n) >= visible[:, None]
    scores = scores.nan_to_num(nan=-torch.inf).masked_fill(hidden, -torch.inf)
    chosen = torch.zeros(len(scores), n + 1, dtype=torch.bool)
    chosen.scatter_(1, torch.where((selected >= 0) & (selected < n), selected, n).long(), value=True)
    chosen = chosen[:, :n]
    best = scores.topk(k).values
    last = best[:, -1:]
    single = last.float().abs()
    ulp = (torch.nextafter(single, torch.tensor(torch.inf)) - single).double()
    tied = chosen & (scores < last) & (scores >= last - ulp)
    slack = ulp if error is None else torch.maximum(ulp, 2 * error)  # both of two scores are off
    low = chosen & (scores < last - slack)
    mean = scores.masked_fill(hidden, 0).sum(1) / visible
    above = (scores - mean[:, None]).masked_fill(~chosen | hidden, 0).sum(1)
    return Comparison(
        recall=((chosen & (scores >= last)) | tied).sum(1) / k,
        ties=tied.sum(1).double(),
        passed_over=low.sum(1).double(),
        kept=above / (best.sum(1) - k * mean).clamp(min=torch.finfo(torch.float64).tiny),
    )


def correlations(a: Tensor, b: Tensor, visible: Tensor) -> Tensor:
    """Correlation of two rows of scores over the entries visible; 0 where either is constant. [t] float64."""
    seen = torch.arange(a.shape[1]) < visible[:, None]
    a, b = (_centred(x, seen) for x in (a, b))
    scale = a.norm(dim=1) * b.norm(dim=1)
    return torch.where(scale > 0, (a * b).sum(1) / scale.clamp(min=torch.finfo(torch.float64).tiny), 0)


def _centred(x: Tensor, seen: Tensor) -> Tensor:
    mean = x.masked_fill(~seen, 0).sum(1, keepdim=True) / seen.sum(1, keepdim=True)
    return (x - mean).masked_fill(~seen, 0)
