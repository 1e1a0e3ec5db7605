"""Shard's compressed keys and values as equations: rotary embedding undone and redone, scores, sums.

All of it keeps the dtype that it is given, so that tests can run it in float64. Heads are split off the columns of a
token in order: column ``head * d + i``. Query head h reads KV head ``h // (query heads / KV heads)``.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fathom.kernels.formats.stored import CodebookValues, CodedRows, EigenKeys, StreamKeys


class Middle(NamedTuple):
    """Tokens that were compressed together, at positions `first` and on."""

    keys: EigenKeys
    values: CodebookValues
    first: int
    freqs: Tensor  # [d / 2] float32, radians per position: the model's own
    interleaved: bool  # whether rotary pairs are neighbours


class Stream(NamedTuple):
    """Tokens that were encoded one by one, keys as they were rotated; row ``token * kv heads + head``."""

    keys: StreamKeys
    values: CodedRows
    tokens: int


def halves(x: Tensor, *, interleaved: bool) -> tuple[Tensor, Tensor]:
    """First and second components of the rotary pairs of [..., d]: neighbours, or i with i + d / 2."""
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    first, second = x.chunk(2, dim=-1)
    return first, second


def turn(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate all pairs of `x` [t, h, d] by the angles of their token; with ``-sin`` it is undone.

    Equation: ``(a, b) -> (a cos - b sin, a sin + b cos)``. `cos` and `sin` are [t, d / 2], computed in fp32 at least
    and without any attention scaling: undoing it in half precision leaves errors of 2e-2.
    """
    a, b = halves(x, interleaved=interleaved)
    cos, sin = cos[:, None], sin[:, None]
    turned = (a * cos - b * sin, a * sin + b * cos)
    return torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)


def relative_scores(
    q: Tensor, coefficients: Tensor, basis: Tensor, mean: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool
) -> Tensor:
    """Scores of one query against compressed keys through the distance of their positions; no key is rebuilt.

    With the rotation undone, q = (a, b) and k = (c, e) by pairs, and ``D = p_k - p_q``:
    ``<R_q q, R_k k> = sum_i (a_i c_i + b_i e_i) cos(f_i D) + (b_i c_i - a_i e_i) sin(f_i D)``, where
    ``(c, e) = sum_r coefficient_r B_r + mu``. The mean is one more component, of coefficient 1; without it scores are
    wrong by an amount that depends on the position, which softmax does not cancel.

    Parameters
    ----------
    q
        [h, d], the rotation at its own position undone.
    coefficients
        [n, r].
    basis
        [heads * d, r].
    mean
        [heads * d].
    cos, sin
        [n, d / 2], of ``f_i (p_k - p_q)``.
    interleaved
        Whether rotary pairs are neighbours.

    Returns
    -------
    Tensor
        [h, n], not scaled.

    """
    h, d = q.shape
    components = torch.cat((basis, mean[:, None]), dim=1)  # [heads * d, r + 1]
    ones = coefficients.new_ones(coefficients.shape[0], 1)
    weights = torch.cat((coefficients, ones), dim=1)  # [n, r + 1]
    per_head = components.unflatten(0, (-1, d)).mT  # [heads, r + 1, d]
    c, e = halves(per_head.repeat_interleave(h // per_head.shape[0], dim=0), interleaved=interleaved)  # [h, r + 1, d/2]
    a, b = halves(q[:, None], interleaved=interleaved)  # [h, 1, d / 2]
    along, across = a * c + b * e, b * c - a * e
    turned = torch.einsum("hri,ni->hnr", along, cos) + torch.einsum("hri,ni->hnr", across, sin)
    return (turned * weights).sum(-1)


def rotated_values(codes: Tensor, codebook: Tensor, largest: Tensor) -> Tensor:
    """Values as stored, still rotated by the Hadamard matrix: ``codebook[codes] * largest``.

    Parameters
    ----------
    codes
        [n, heads * d / 4] uint8.
    codebook
        [256, 4].
    largest
        [heads, d].

    Returns
    -------
    Tensor
        [n, heads, d].

    """
    rows: Tensor = codebook[codes.long()].flatten(1).unflatten(1, largest.shape)
    return rows * largest
