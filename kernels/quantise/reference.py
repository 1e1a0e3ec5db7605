"""What DeepSeek's deployed arithmetic does to activations: FP8 and FP4 blocks with power-of-two scales, Hadamard.

Each function returns values in the dtype of its input that are exactly representable in the narrow format times its
scale. A matrix product of such values in fp32 therefore equals a product of the narrow values themselves up to the
order of summation, which is why the rest of the runtime needs no second set of kernels for `deployed` numerics.

A block that holds NaN or an infinity becomes NaN as a whole: its scale is NaN, so what went wrong cannot vanish in a
neighbour that looks healthy. What rounds to zero keeps its sign.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0


def power_of_two_scale(amax: Tensor, largest: float) -> Tensor:
    """Return the smallest power of two s with ``amax * fl32(1 / largest) <= s``, float32.

    The exponent is read off the bits, so that no rounding of a logarithm can change it: a mantissa of all ones, added,
    carries into the exponent unless the mantissa was zero. NaN where `amax` is NaN or infinite: no power of two fits.
    Source: DeepSeek kernel.py, `fast_round_scale`.
    """
    ratio = amax.float() * (1.0 / largest)  # torch rounds the factor to fp32 first
    power = (ratio.view(torch.int32) + 0x7FFFFF).bitwise_and_(0x7F800000).view(torch.float32)
    return torch.where(ratio < float("inf"), power, float("nan"))


def quantise_fp8(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """E4M3 values and power-of-two scales, one scale per `group` columns.

    Equation: ``s = 2^ceil(log2(max(amax, 1e-4) / 448))``, ``v = e4m3(clamp(x / s, -448, 448))``, nearest even.
    Source: DeepSeek kernel.py, `act_quant`.

    Parameters
    ----------
    x
        [..., d], d a multiple of `group`.
    group
        Columns per scale: 128 for the inputs of linears, 64 for KV; 32 for both in V4.1.

    Returns
    -------
    tuple[Tensor, Tensor]
        [..., d] float8_e4m3fn and [..., d / group] float32.

    """
    assert x.shape[-1] % group == 0, f"{x.shape[-1]} columns are no multiple of the group of {group}"
    blocks = x.float().unflatten(-1, (-1, group))
    scale = power_of_two_scale(blocks.abs().amax(-1, keepdim=True).clamp_min(1e-4), E4M3_MAX)
    values = (blocks / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return values.flatten(-2), scale.squeeze(-1)


def simulate_fp8(x: Tensor, group: int) -> Tensor:
    """Round `x` [..., d] to what E4M3 blocks of `group` columns hold; same shape and dtype."""
    values, scale = quantise_fp8(x, group)
    blocks: Tensor = values.float().unflatten(-1, (-1, group)) * scale[..., None]
    return blocks.flatten(-2).to(x.dtype)


def pack_fp8(x: Tensor, group: int) -> Tensor:
    """What `simulate_fp8` rounds `x` to, as bytes that one rank sends another.

    Parameters
    ----------
    x
        [n, d], d a multiple of `group`.
    group
        Columns per scale.

    Returns
    -------
    Tensor
        [n, d + d / group] uint8: E4M3 codes of a row, then the E8M0 scale of each of its groups, 255 where it is NaN.

    """
    values, scale = quantise_fp8(x, group)
    return torch.cat((values.view(torch.uint8), scale.to(torch.float8_e8m0fnu).view(torch.uint8)), 1)


def unpack_fp8(packed: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Numbers [n, d] in `dtype` of what `pack_fp8` gave: of `x` in that dtype those of `simulate_fp8`.

    Rounded once more they are the same; but what rounds to 2^128, from 248 * 2^120 on, is infinite then, and rounds its
    block to NaN.
    """
    assert packed.shape[1] % (group + 1) == 0, f"{packed.shape[1]} bytes are no codes in groups of {group} and scales"
    d = packed.shape[1] // (group + 1) * group
    values, scale = packed[:, :d].view(torch.float8_e4m3fn), packed[:, d:].view(torch.float8_e8m0fnu)
    blocks: Tensor = values.float().unflatten(1, (-1, group)) * scale.float()[..., None]
    return blocks.flatten(1).to(dtype)


def pack_fp8_scratch(numbers: int, group: int, item: int) -> int:
    """Bytes alive at most in `pack_fp8`: numbers in fp32, over their scales, and clamped."""
    return numbers * (8 + 4 * (item < 4)) + numbers // group * 8


def unpack_fp8_scratch(numbers: int, group: int, item: int) -> int:
    """Bytes alive at most in `unpack_fp8`: codes in fp32, and times their scales."""
    del item
    return numbers * 8 + numbers // group * 4


def round_e2m1(x: Tensor) -> Tensor:
    """Round float32 values within [-6, 6] to the nearest of 0, .5, 1, 1.5, 2, 3, 4, 6, ties to the even code."""
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))  # spacing of E2M1 at that size
    return torch.round(x / step) * step  # torch.round takes ties to even, and the codes alternate with the multiples


def simulate_fp4(x: Tensor, group: int = 32) -> Tensor:
    """Round `x` [..., d] to what E2M1 blocks of `group` columns hold; same shape and dtype.

    Equation: ``s = 2^ceil(log2(max(amax, 6 * 2^-126) / 6))``, ``y = e2m1(clamp(x / s, -6, 6)) * s``.
    Source: DeepSeek kernel.py, `fp4_act_quant`.
    """
    assert x.shape[-1] % group == 0, f"{x.shape[-1]} columns are no multiple of the group of {group}"
    blocks = x.float().unflatten(-1, (-1, group))
    scale = power_of_two_scale(blocks.abs().amax(-1, keepdim=True).clamp_min(E2M1_MAX * 2.0**-126), E2M1_MAX)
    return (round_e2m1((blocks / scale).clamp(-E2M1_MAX, E2M1_MAX)) * scale).flatten(-2).to(x.dtype)


def simulate_entries(x: Tensor, group: int) -> Tensor:
    """Round `x` [..., d] to E2M1 blocks of `group` columns with scales in E4M3, as V4.1 keeps entries; same dtype.

    Equation: ``s = e4m3(max(amax, 6 * 2^-9) / 6)``, at most 448, ``y = e2m1(clamp(x / s, -6, 6)) * s``.
    Source: DeepSeek V4.1's kernel.py, `fp4_act_quant`. PyTorch on every device: no op set has another.
    """
    assert x.shape[-1] % group == 0, f"{x.shape[-1]} columns are no multiple of the group of {group}"
    blocks = x.float().unflatten(-1, (-1, group))
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = (amax.clamp_min(E2M1_MAX * 2.0**-9) / E2M1_MAX).clamp_max(E4M3_MAX).to(torch.float8_e4m3fn).float()
    scale = torch.where(amax < float("inf"), scale, float("nan"))
    return (round_e2m1((blocks / scale).clamp(-E2M1_MAX, E2M1_MAX)) * scale).flatten(-2).to(x.dtype)


def hadamard(x: Tensor) -> Tensor:
    """Walsh-Hadamard transform of the last dim in natural order, scaled by ``d^-0.5``: its own inverse.

    Equation: ``y_j = d^-0.5 sum_i (-1)^popcount(i & j) x_i``. It spreads outliers over all dims before FP4; applied to
    both q and k it leaves their dot products alone. Source: DeepSeek `rotate_activation`.

    Parameters
    ----------
    x
        [..., d], d a power of two.

    Returns
    -------
    Tensor
        [..., d] in the dtype of `x`, computed in fp32 and rounded once.

    """
    d = x.shape[-1]
    assert d & (d - 1) == 0, f"{d} is no power of two"
    matrix = torch.ones(1, 1, device=x.device)
    while matrix.shape[0] < d:  # Sylvester: H_2n = [[H, H], [H, -H]]
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    scale: float = d**-0.5
    return (x.float() @ matrix * scale).to(x.dtype)


@dataclass(frozen=True, slots=True)
class RoundIndex:
    """Round index queries or keys as they are cached. Of an op set's own parts."""

    hadamard: Callable[..., Tensor]
    simulate_fp4: Callable[..., Tensor]

    def __call__(self, x: Tensor, group: int) -> Tensor:
        """Transform `x` [..., d] and round it to E2M1 blocks of `group` columns."""
        return self.simulate_fp4(self.hadamard(x), group)


round_index = RoundIndex(hadamard, simulate_fp4)
