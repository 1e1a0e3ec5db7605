"""Tokens of a small grouped-query layer, drawn, and what its attention and rotation are in float64.

Nothing of `kernels` is used here: rotation is a product of complex numbers, attention a softmax over everything.
"""

from typing import NamedTuple

import torch
from torch import Tensor

HEADS, GROUPS, WIDTH = 8, 2, 64  # query heads, KV heads, head_dim: a Llama layer in small
BASE = 10_000.0
DIRECTIONS = 16  # near which keys lie, as a model's do; a basis of so many holds most of them
QUERIES = 128  # rows of float64 logits at once
LOGITS = 64  # random projections of an output, taken for logits
DIVERGENCE = f"KL of a softmax over {LOGITS} random projections of the output, from the full cache's"


class Drawn(NamedTuple):
    """Tokens at positions 0 .. n - 1, float32; queries and keys rotated."""

    q: Tensor  # [n, HEADS, WIDTH]
    k: Tensor  # [n, GROUPS, WIDTH]
    v: Tensor  # [n, GROUPS, WIDTH]


def frequencies() -> Tensor:
    """Radians per position of each pair, [WIDTH / 2] float32."""
    return BASE ** -(torch.arange(0, WIDTH, 2, dtype=torch.float32) / WIDTH)


def turned(x: Tensor, angle: Tensor, *, interleaved: bool) -> Tensor:
    """Turn the pairs of `x` [n, h, d] by `angle` [n, d / 2], as complex numbers: [n, h, d] float64."""
    pairs = x.double().unflatten(-1, (-1, 2)) if interleaved else x.double().unflatten(-1, (2, -1)).mT
    angle = angle.double()[:, None]
    out = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.complex(angle.cos(), angle.sin()))
    return out.flatten(-2) if interleaved else out.mT.flatten(-2)


def draw(n: int, seed: int, *, interleaved: bool = False) -> Drawn:
    """Draw n tokens whose keys have a mean and lie near some directions."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(DIRECTIONS, GROUPS * WIDTH, generator=g) / DIRECTIONS**0.5
    plain = torch.randn(n, DIRECTIONS, generator=g) @ mix + 0.2 * torch.randn(n, GROUPS * WIDTH, generator=g)
    k = (plain + 0.5 * torch.randn(GROUPS * WIDTH, generator=g)).unflatten(1, (GROUPS, WIDTH))
    q = torch.randn(n, HEADS, WIDTH, generator=g)
    angle = torch.arange(n, dtype=torch.float32)[:, None] * frequencies()  # rounded to fp32, as models round it
    v = torch.randn(n, GROUPS, WIDTH, generator=g)
    q, k = (turned(x, angle, interleaved=interleaved).float() for x in (q, k))
    return Drawn(q, k, v)


def attended(drawn: Drawn, window: int | None = None, first: int = 0) -> Tensor:
    """Causal attention of tokens from `first` on to all before, or to the last `window`: [n - first, HEADS, WIDTH]."""
    keys, values = (x.double().repeat_interleave(HEADS // GROUPS, 1).transpose(0, 1) for x in (drawn.k, drawn.v))
    positions, out = torch.arange(len(drawn.q)), []
    for part in positions[first:].split(QUERIES):
        logits = drawn.q[part].double().transpose(0, 1) @ keys.mT * WIDTH**-0.5  # [h, t, n]
        far = positions - part[:, None]
        hidden = far > 0 if window is None else (far > 0) | (far <= -window)
        out.append((logits.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(0, 1))
    return torch.cat(out)


def divergence(whole: Tensor, found: Tensor) -> Tensor:
    """KL of what random projections of `found` [n, h, d] say from what those of `whole` say, as logits: [n] float64."""
    g = torch.Generator().manual_seed(0)
    project = torch.randn(whole[0].numel(), LOGITS, generator=g, dtype=torch.float64)
    project /= whole.double().square().mean().sqrt() * whole[0].numel() ** 0.5  # logits of unit scale
    mine, theirs = ((x.double().flatten(1) @ project).log_softmax(-1) for x in (whole, found))
    return (mine.exp() * (mine - theirs)).sum(-1)


def off(found: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest number wanted."""
    return float((found.double() - wanted).abs().max() / wanted.abs().max())
