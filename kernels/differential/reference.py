"""Differential attention: two softmax attentions of one query over the same keys, the second subtracted from the first.

``out = N(A(q) - lambda A(R(theta) q))``: the noise query is the query itself, each head turned by angles of its own,
and lambda is a number per token and head. Source: the CoDA-GQA-L article, "constrained orthogonal differential
attention". Nothing here knows of a cache: `attend` takes keys, values and which of them are seen, and several such
segments are merged by their log-sum-exp.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fathom.kernels.norm.reference import rms_norm
from fathom.kernels.rope.reference import rotate

# Keys [K, s, D], values [K, s, D], which are seen ([s] or [t, s] bool; None: all), bias of the logits ([s]; None: 0).
Segment = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


class Past(NamedTuple):
    """Slots that were written before."""

    keys: Tensor  # [K, s, D]
    values: Tensor  # [K, s, D], finite throughout: what is not seen has mass 0, and 0 * inf is not 0
    seen: Tensor | None  # [s] bool, one at least, or [t, s] for tokens that have keys of their own; None: all


class Own(NamedTuple):
    """Keys of the tokens that attend, each of which sees itself and those before it."""

    keys: Tensor  # [t, K, D]
    values: Tensor
    window: int | None  # how many of these a token sees, itself included; None: all


class Noise(NamedTuple):
    """The second stream, which is subtracted from the first."""

    lam: Tensor  # [t, H]
    cos: Tensor  # [H, D / 2] float32, of the angles that turn a query into a noise query
    sin: Tensor


def noise_query(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each head of `q` by its own angles: interleaved pairs, after RoPE, whichever pairing RoPE itself uses.

    Parameters
    ----------
    q
        [t, H, D], RoPE applied.
    cos, sin
        [H, D / 2] float32, of theta. At theta = pi/2 the noise query is orthogonal to the query.

    Returns
    -------
    Tensor
        [t, H, D] in the dtype of `q`.

    """
    return rotate(q.transpose(0, 1), cos, sin).transpose(0, 1)  # rotate takes one row of angles per leading index


def attend(
    streams: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attend with grouped queries; the n streams and the heads of a group are rows of one product per KV head.

    Equation: ``o = sum_j exp(l_j - lse) v_j`` with ``l_j = q . k_j D^-0.5 + bias_j`` over the seen j, and
    ``lse = log sum_j exp(l_j)``. Query head h reads KV head ``h // (H / K)``.

    Parameters
    ----------
    streams
        [n, t, H, D]: n queries of each token that read the same keys.
    keys, values
        [K, s, D], finite throughout, H a multiple of K: what is not seen has mass 0, and 0 * inf is not 0.
    seen
        [s] or [t, s] bool, or None for all.
    bias
        [s] float32 added to the logits of all heads (the log of how many tokens a slot stands for), or None.

    Returns
    -------
    tuple[Tensor, Tensor]
        Outputs [n, t, H, D] and log-sum-exps [n, t, H], float32. Without any seen key the output is 0, its log-sum-exp
        -inf.

    """
    n, t, heads, d = streams.shape
    groups, slots = keys.shape[0], keys.shape[1]
    assert heads % groups == 0, f"{heads} query heads do not divide among {groups} KV heads"
    if slots == 0:
        return streams.new_zeros(streams.shape, dtype=torch.float32), streams.new_full(
            (n, t, heads), -torch.inf
        ).float()
    rows = streams.float().unflatten(2, (groups, -1)).permute(2, 0, 1, 3, 4)  # [K, n, t, H/K, D]
    logits = rows.flatten(1, 3) @ (keys.float() * d**-0.5).transpose(1, 2)  # [K, n t H/K, s]
    logits = logits.view(*rows.shape[:-1], slots)
    if bias is not None:
        logits = logits + bias
    if seen is not None:
        hidden = ~seen if seen.ndim == 1 else ~seen[:, None]  # [s] or [t, 1, s]
        logits = logits.masked_fill(hidden, -torch.inf)
    peak = logits.amax(-1, keepdim=True)
    mass = torch.exp(logits - peak.clamp(min=torch.finfo(torch.float32).min))  # never inf - inf
    total = mass.sum(-1, keepdim=True)
    out = (mass.flatten(1, 3) @ values.float()).view(rows.shape) / total.masked_fill(total == 0, 1)
    lse = (peak + total.log())[..., 0]  # [K, n, t, H/K]
    return out.permute(1, 2, 0, 3, 4).flatten(2, 3), lse.permute(1, 2, 0, 3).flatten(2, 3)


def attend_segments(streams: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Attend to several segments as if they were one: [n, t, H, D] float32, see `attend`.

    Equation: ``o = sum_i exp(lse_i - lse) o_i`` with ``lse = log sum_i exp(lse_i)``.
    """
    parts = [attend(streams, *segment) for segment in segments]
    if len(parts) == 1:
        return parts[0][0]
    lses = torch.stack([lse for _, lse in parts])  # [segments, n, t, H]
    peak = lses.amax(0).clamp(min=torch.finfo(torch.float32).min)
    mass = torch.exp(lses - peak)
    total = mass.sum(0)
    weight = mass / total.masked_fill(total == 0, 1)
    outs = torch.stack([out for out, _ in parts])  # [segments, n, t, H, D]
    return (weight[..., None] * outs).sum(0)


def combine(signal: Tensor, noise: Tensor, lam: Tensor, norm: Tensor | None, eps: float) -> Tensor:
    """Subtract the noise stream and norm what remains: ``N(signal - lambda noise)``.

    Parameters
    ----------
    signal, noise
        [t, H, D] float32, the outputs of the two streams.
    lam
        [t, H], the strength of the subtraction.
    norm
        [D] float32, the one weight that all heads share of an RMSNorm over each head's D dims ("full"); or None for no
        norm at all ("identity"), which is not a norm of weight 1.
    eps
        Of the norm.

    Returns
    -------
    Tensor
        [t, H, D] float32.

    """
    out = signal - lam.float()[..., None] * noise
    return out if norm is None else rms_norm(out, norm, eps)


def differential_attend(
    q: Tensor, lam: Tensor, cos: Tensor, sin: Tensor, norm: Tensor | None, eps: float, segments: Sequence[Segment]
) -> Tensor:
    """Differential attention, both streams in one pass over each segment.

    Parameters
    ----------
    q
        [t, H, D], RoPE applied.
    lam
        [t, H], see `combine`.
    cos, sin
        [H, D / 2] float32, see `noise_query`.
    norm, eps
        See `combine`.
    segments
        What the tokens see, see `attend`. A token that sees nothing gets zeros.

    Returns
    -------
    Tensor
        [t, H, D] in the dtype of `q`.

    """
    signal, noise = attend_segments(torch.stack((q, noise_query(q, cos, sin))), segments)
    return combine(signal, noise, lam, norm, eps).to(q.dtype)
