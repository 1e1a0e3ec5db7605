"""Straight-through rounding: the forward pass sees what the deployed model sees, the gradient does not notice.

Scales are powers of two, 2^ceil(log2(amax / qmax)), as the checkpoint and DeepSeek's activation simulation use them.
"""

from typing import Any

import torch
from torch import Tensor

E4M3_MAX, E2M1_MAX = 448.0, 6.0


def power_of_two_scale(amax: Tensor, qmax: float) -> Tensor:
    """Smallest power of two s with amax / s <= qmax. `amax` must be positive."""
    mantissa, exponent = torch.frexp(amax / qmax)  # amax / qmax = mantissa * 2^exponent, mantissa in [0.5, 1)
    return torch.ldexp(torch.ones_like(amax), exponent - (mantissa == 0.5).to(exponent.dtype))


def round_e4m3(x: Tensor) -> Tensor:
    """To the nearest E4M3 value, ties to even, |x| <= 448."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def round_e2m1(x: Tensor) -> Tensor:
    """To the nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 with its sign, ties to the even code, |x| <= 6.

    The step is 0.5 below 2, 1 below 4 and 2 above; `torch.round` breaks ties to the even multiple of the step.
    """
    a = x.abs().clamp(max=E2M1_MAX)
    step = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0))
    return torch.copysign((a / step).round() * step, x)


def fp8_groups(x: Tensor, group: int, least: float = 1e-4) -> Tensor:
    """E4M3 rounding of groups of `group` along the last axis, each with its own scale."""
    g = x.unflatten(-1, (-1, group))
    s = power_of_two_scale(g.abs().amax(-1, keepdim=True).clamp(min=least), E4M3_MAX)
    return (round_e4m3(g / s) * s).flatten(-2)


def fp4_groups(x: Tensor, group: int = 32) -> Tensor:
    """E2M1 rounding of groups of `group` along the last axis, each with its own scale."""
    g = x.unflatten(-1, (-1, group))
    s = power_of_two_scale(g.abs().amax(-1, keepdim=True).clamp(min=E2M1_MAX * 2.0**-126), E2M1_MAX)
    return (round_e2m1(g / s) * s).flatten(-2)


def fp8_blocks(W: Tensor) -> Tensor:
    """E4M3 rounding of 128 x 128 blocks of a matrix."""
    rows, columns = W.shape
    b = W.view(rows // 128, 128, columns // 128, 128)
    s = power_of_two_scale(b.abs().amax((1, 3), keepdim=True).clamp(min=1e-4), E4M3_MAX)
    return torch.reshape(round_e4m3(b / s) * s, (rows, columns))


def bf16(x: Tensor) -> Tensor:
    """Rounded to BF16, kept in FP32."""
    return x.bfloat16().float()


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, _x: Tensor, rounded: Tensor) -> Tensor:
        return rounded

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """`rounded` forwards, the gradient of `x` backwards."""
    out: Tensor = _StraightThrough.apply(x, rounded.detach())  # type: ignore[no-untyped-call]
    return out


def hadamard(size: int) -> Tensor:
    """Walsh-Hadamard matrix in natural order, divided by sqrt(size): orthogonal and symmetric."""
    H = torch.ones(1, 1)
    while H.shape[0] < size:
        H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)], 0)
    return H.mul(size**-0.5)
