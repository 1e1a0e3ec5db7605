"""The run's `select` at the dimensions of published models, on queries and keys drawn like a model's own.

Published indexers have 64 heads of width 128, a top-k of 512 or 1024, and up to 262144 entries (a million tokens). What
a small model brings forth cannot fill that, so its mean and covariance are kept and more rows are drawn.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from model.transformer import Transformer
from probes.probe import Progress
from probes.recall.oracle import Comparison, compare, exact_scores, rounding_error

HEADS = 64
TILE = 1 << 15  # keys that are drawn, rounded and scored at once


class Spectrum(NamedTuple):
    """Mean and covariance root of a layer's index queries, for each head, and keys, before rounding; its weights."""

    query_mean: Tensor  # [h, d] float64
    query_root: Tensor  # [h, d, d]; normal rows times it have the covariance of the queries
    key_mean: Tensor  # [d]
    key_root: Tensor  # [d, d]
    head_weights: Tensor  # [t, h] as captured; draws pick among them


class Drawn(NamedTuple):
    """One top-k at one number of entries."""

    k: int
    entries: int
    a: Comparison  # against the exact scores of the same rounded queries and keys
    narrow: Comparison  # as `a`, had the scores been rounded to BF16 before the selection
    b: Comparison  # against the exact scores of the unrounded ones


def spectrum(queries: Tensor, keys: Tensor, head_weights: Tensor) -> Spectrum:
    """Spectrum of queries [t, h, d] and keys [n, d], with head weights [t, h]."""
    per_head = [_moments(queries[:, head]) for head in range(queries.shape[1])]
    query_mean, query_root = (torch.stack(parts) for parts in zip(*per_head, strict=True))
    return Spectrum(query_mean, query_root, *_moments(keys), head_weights)


def _moments(rows: Tensor) -> tuple[Tensor, Tensor]:
    rows = rows.double()
    values, directions = torch.linalg.eigh(torch.cov(rows.T))
    return rows.mean(0), (directions * values.clamp(min=0).sqrt()).T


def narrow_selection(scores: Tensor, k: int) -> Tensor:
    """The k best by scores [t, n] rounded to BF16, as DeepSeek's code rounds them; of equal ones the lower entry."""
    return scores.bfloat16().sort(dim=1, descending=True, stable=True).indices[:, :k]


def measure(
    model: Transformer,
    like: Spectrum,
    sizes: tuple[int, ...],
    top_ks: tuple[int, ...],
    tokens: int,
    seed: int,
    progress: Progress,
) -> tuple[list[Drawn], float]:
    """Select from the first `sizes` of the keys drawn, for `tokens` queries, with each top-k.

    Returns one `Drawn` for each top-k and larger size, and the share of negative head weights.
    """
    generator = torch.Generator().manual_seed(seed)
    arithmetic, most = model.arithmetic, max(sizes)
    q, head_weights = _queries(like, tokens, generator)
    q = q.to(model.device, arithmetic.dtype)
    q_used = arithmetic.rounded_index(q)
    wide, tight = torch.empty(tokens, most, dtype=torch.float64), torch.empty(tokens, most, dtype=torch.float64)
    tiles = []
    for low in range(0, most, TILE):
        count = min(TILE, most - low)
        noise = torch.randn(count, like.key_mean.shape[0], generator=generator)
        keys = (noise @ like.key_root.float() + like.key_mean.float()).to(model.device, arithmetic.dtype)
        tiles.append(arithmetic.rounded_index(keys))
        wide[:, low : low + count] = exact_scores(q.cpu(), head_weights, keys.cpu())
        tight[:, low : low + count] = exact_scores(q_used.cpu(), head_weights, tiles[-1].cpu())
        progress(0.8 * (low + count) / most, f"scores of {low + count} drawn entries")
    used = torch.cat(tiles)
    error = rounding_error(q_used.cpu(), head_weights, used.cpu())
    found = []
    for k in top_ks:
        for n in (size for size in sizes if size > k):
            # every token stands behind the last of n entries of one token each, and so sees all of them
            chosen = arithmetic.ops.select(q_used, head_weights.to(model.device), used[:n], n - 1, 1, k).cpu()
            visible, scores = torch.full((tokens,), n), tight[:, :n]
            a = compare(chosen, scores, visible, k, error)
            narrow = compare(narrow_selection(scores, k), scores, visible, k)
            found.append(Drawn(k, n, a, narrow, compare(chosen, wide[:, :n], visible, k)))
            progress(1 - 0.2 / (len(found) + 1), f"top {k} of {n} drawn entries")
    return found, (head_weights < 0).double().mean().item()


def _queries(like: Spectrum, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Queries [tokens, HEADS, d] and head weights [tokens, HEADS], drawn like the model's heads in turn."""
    heads, d = like.query_mean.shape
    q = torch.empty(tokens, HEADS, d)
    for head in range(HEADS):
        of = head % heads
        noise = torch.randn(tokens, d, generator=generator)
        q[:, head] = noise @ like.query_root[of].float() + like.query_mean[of].float()
    picked = torch.randint(len(like.head_weights), (tokens, HEADS), generator=generator)
    return q, like.head_weights[picked, torch.arange(HEADS) % heads]
