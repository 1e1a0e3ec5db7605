"""Rotary position embedding: interleaved pairs on the trailing dims, with YaRN where a layer uses it; and in halves."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fathom.kernels.norm.reference import rms_norm
from fathom.kernels.quantise.reference import simulate_fp8


def frequencies(dim: int, theta: float) -> Tensor:
    """Radians per position of each pair, without YaRN.

    Equation: ``f_i = theta^(-2i / dim)`` for pairs i = 0 .. dim/2 - 1. Returns [dim / 2] float32.
    """
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def yarn_frequencies(
    dim: int, theta: float, *, factor: float, original_context: int, beta_fast: float, beta_slow: float
) -> Tensor:
    """Radians per position of each pair with YaRN's ramp and no attention scaling (mscale is 1 in V4).

    Pairs that turn more than `beta_fast` times within `original_context` positions keep their frequency, pairs that
    turn less than `beta_slow` times are slowed by `factor`, those between are interpolated linearly in the pair index.
    Source: DeepSeek `precompute_freqs_cis`; YaRN, arXiv 2309.00071, section 3.2. Returns [dim / 2] float32.
    """

    def pair_that_turns(times: float) -> float:
        return dim * math.log(original_context / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(beta_slow)), dim - 1)
    width = high - low if high != low else 0.001
    slowed = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)  # 0: kept, 1: slowed by factor
    kept = frequencies(dim, theta)
    return kept / factor * slowed + kept * (1 - slowed)


def angles(positions: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of ``position * frequency``, each [t, dim / 2] float32.

    The product is rounded to fp32, as DeepSeek's and transformers' are, which is an error of up to ``angle * 2^-24``
    that every implementation shares: near position 10^6 up to 2^-5 = 0.03 radians, in the second fastest pair. The
    fastest has frequency 1, which makes it exact below position 2^24.
    """
    turned = positions.to(torch.float32)[:, None] * freqs[None, :]
    return turned.cos(), turned.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the trailing ``2 * cos.shape[-1]`` dims of `x` by interleaved pairs.

    Equation: ``(a, b) -> (a cos - b sin, a sin + b cos)`` for neighbours (x[2i], x[2i + 1]) of the rope slice, in fp32.
    With ``-sin`` it is the inverse rotation, which V4 applies to the attention output (values carry rope because keys
    and values are one tensor). Source: DeepSeek `apply_rotary_emb`.

    Parameters
    ----------
    x
        [t, d] or [t, h, d].
    cos, sin
        [t, r / 2] float32, r <= d even.

    Returns
    -------
    Tensor
        As `x`, in its dtype; the leading d - r dims are unchanged.

    """
    half = cos.shape[-1]
    if x.ndim == 3:
        cos, sin = cos[:, None], sin[:, None]
    pairs = x[..., -2 * half :].float().unflatten(-1, (half, 2))  # [t, (h,) r/2, 2]
    a, b = pairs.unbind(-1)
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., : -2 * half], turned.to(x.dtype)), dim=-1)


def llama3_frequencies(
    dim: int, theta: float, *, factor: float, low_freq_factor: float, high_freq_factor: float, original_context: int
) -> Tensor:
    """Radians per position of each pair, with the scaling of Llama 3.1 and its successors.

    Equation: with the wavelength ``w = 2 pi / f`` and ``s = clamp((original / w - low) / (high - low), 0, 1)``, a pair
    turns by ``(1 - s) f / factor + s f``: short waves keep their frequency, long ones are slowed by `factor`, those
    between are interpolated in turns per `original_context`. Source: Meta's `apply_scaling` (llama-models, model.py).
    Returns [dim / 2] float32.
    """
    kept = frequencies(dim, theta)
    turns = original_context / (2 * math.pi / kept)  # within the original context
    kept_part = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0, 1)  # 1: kept
    return (1 - kept_part) * kept / factor + kept_part * kept


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate every dim of `x`, a pair being one dim of the first half and its like of the second.

    Equation: ``(a, b) -> (a cos - b sin, b cos + a sin)`` for ``(x[i], x[i + d / 2])``, in fp32; with ``-sin`` it is
    the inverse. It is the rotation of the Llama family's published weights, whose rows were permuted from interleaved
    pairs to halves. Source: transformers `rotate_half`, `apply_rotary_pos_emb`.

    Parameters
    ----------
    x
        [t, h, d], d even.
    cos, sin
        [t, d / 2] float32.

    Returns
    -------
    Tensor
        As `x`, in its dtype.

    """
    a, b = x.float().chunk(2, dim=-1)  # [t, h, d / 2]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


@dataclass(frozen=True, slots=True)
class NormRotate:
    """Norm, rotate and round queries, window KV or compressed rows. Of an op set's own parts."""

    rms_norm: Callable[..., Tensor]
    rotate: Callable[..., Tensor]
    simulate_fp8: Callable[..., Tensor]

    def __call__(self, x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, kv_group: int) -> Tensor:
        """Run the parts one after the other; each rounds to the dtype of `x`.

        Parameters
        ----------
        x, weight, eps
            As `rms_norm` takes them.
        cos, sin
            As `rotate` takes them.
        kv_group
            Columns of the E4M3 blocks to which all but the rotated columns are rounded; 0: they are not.

        Returns
        -------
        Tensor
            As `x`.

        """
        rows = self.rotate(self.rms_norm(x, weight, eps), cos, sin)
        if not kv_group:
            return rows
        rope = 2 * cos.shape[-1]
        return torch.cat((self.simulate_fp8(rows[..., :-rope], kv_group), rows[..., -rope:]), dim=-1)


norm_rotate = NormRotate(rms_norm, rotate, simulate_fp8)
