"""Rounding of activations to E4M3 and E2M1 without narrow dtypes, whose conversions take most of the time on CPU.

The numbers are those of `kernels.quantise.reference` bit for bit, signed zeros included, and NaN stands at the same
places; which of the many NaNs it is is left open.
"""

import torch
from torch import Tensor

from kernels.quantise.reference import E2M1_MAX, E4M3_MAX, power_of_two_scale

TILE = 1 << 17  # numbers per tile: half a MiB of fp32


def simulate_fp8(x: Tensor, group: int) -> Tensor:
    """Round `x` [..., d] to E4M3 blocks: `kernels.quantise.reference.simulate_fp8`."""
    return _simulate(x, group, smallest=1e-4, largest=E4M3_MAX, mantissa=3, normal=2.0**-6)


def simulate_fp8_scratch(numbers: int, item: int) -> int:
    """Bytes alive at most in `simulate_fp8` or `simulate_fp4`, the result included: it, and a tile three times."""
    return numbers * item + min(numbers, TILE) * (12 if item == 4 else 16)


def simulate_fp4(x: Tensor, group: int = 32) -> Tensor:
    """Round `x` [..., d] to E2M1 blocks: `kernels.quantise.reference.simulate_fp4`."""
    return _simulate(x, group, smallest=E2M1_MAX * 2.0**-126, largest=E2M1_MAX, mantissa=1, normal=1.0)


simulate_fp4_scratch = simulate_fp8_scratch


def _simulate(x: Tensor, group: int, *, smallest: float, largest: float, mantissa: int, normal: float) -> Tensor:
    assert x.shape[-1] % group == 0, f"{x.shape[-1]} columns are no multiple of the group of {group}"
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    source, target, tile = x.reshape(-1, group), out.view(-1, group), TILE // group
    for start in range(0, source.shape[0], tile):
        wide = source[start : start + tile].float()
        amax = wide.abs().amax(-1, keepdim=True)
        scale = power_of_two_scale(amax.clamp_min_(smallest), largest)
        torch.mul(_round(wide / scale, mantissa, normal), scale, out=target[start : start + tile])
    return out


def _round(x: Tensor, mantissa: int, normal: float) -> Tensor:
    """Round float32 to so many bits of mantissa, nearest even, with the spacing of `normal` below it; overwrites `x`.

    With p the power of two at or below abs(x), ``1.5 * 2^(23 - mantissa) * p`` is a float32 whose last bit is the
    spacing wanted: adding it rounds, as the hardware rounds, and subtracting it is exact.
    What became zero is +0.0 then, so the sign is put back. No clamp to the largest code: with the scale of the caller,
    x exceeds it by an ulp at most.
    """
    bits = x.view(torch.int32)
    sign = bits.bitwise_and(torch.iinfo(torch.int32).min)
    power = bits.bitwise_and(0x7F800000).view(torch.float32)
    magic = power.clamp_min_(normal).mul_(1.5 * 2.0 ** (23 - mantissa))
    x.add_(magic).sub_(magic)
    return bits.bitwise_or_(sign).view(torch.float32)
