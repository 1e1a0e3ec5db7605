"""How the stored forms decode, in fp32.

Where the scale is an E8M0 power of two (Fp4, and Fp8 as V4 stores it) a product keeps the value's few mantissa bits and
is exact, subnormals included, up to the range of float32. With a general float32 scale it is rounded once: Fp8's 4 bits
times 24, and NvFp4's 2 + 4, whose product with the block scale is exact, times the 24 of the global scale.
"""

import torch
from torch import Tensor

from fathom.kernels.formats.groups import FP4_BLOCK, NVFP4_BLOCK
from fathom.kernels.formats.stored import Dense, Fp4, Fp8, Fp8Rows, NvFp4, Weight


def e8m0(scale: Tensor) -> Tensor:
    """Decode a power-of-two scale.

    Equation: ``2^(byte - 127)``; byte 255 is NaN. Byte 0 is 2^-127, which float32 holds as a subnormal.

    Parameters
    ----------
    scale
        [...] float8_e8m0fnu, or float32, which is returned as it is.

    Returns
    -------
    Tensor
        [...] float32.

    """
    if scale.dtype == torch.float32:
        return scale
    assert scale.dtype == torch.float8_e8m0fnu, f"scale: {scale.dtype}, want float8_e8m0fnu or float32"
    byte = scale.view(torch.uint8).to(torch.int32)
    bits = torch.where(byte == 0, 1 << 22, torch.where(byte == 255, 0x7FC00000, byte << 23))
    return bits.to(torch.int32).view(torch.float32)


def e2m1(packed: Tensor) -> Tensor:
    """Decode two 4-bit values a byte, the even column in the low nibble.

    Equation: sign bit, two exponent bits e, one mantissa bit m: ``±2^(e-1) (1 + m/2)``, or ``±m/2`` where e = 0.
    Source: DeepSeek convert.py, `FP4_TABLE`.

    Parameters
    ----------
    packed
        [..., n] int8 or uint8.

    Returns
    -------
    Tensor
        [..., 2n] float32.

    """
    assert packed.dtype in (torch.int8, torch.uint8), f"packed: {packed.dtype}, want int8 or uint8"
    positive = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    values = torch.tensor([*positive, *(-value for value in positive)], device=packed.device)
    byte = packed.view(torch.uint8).to(torch.int32)
    return values[torch.stack((byte & 15, byte >> 4), dim=-1).flatten(-2)]


def decode(weight: Weight) -> Tensor:
    """Decode a matrix of any stored form.

    Equations: Fp8 ``W[i, j] s[i // block, j // block]``, Fp4 ``W[i, j] s[i, j // 32]``, NvFp4
    ``W[i, j] s[i, j // 16] g``.

    Parameters
    ----------
    weight
        [out, in] in its stored form.

    Returns
    -------
    Tensor
        [out, in] float32.

    """
    rows, columns = weight.shape
    match weight:
        case Dense(data):
            return data.float()
        case Fp8(data, scale):
            blocks = e8m0(scale).repeat_interleave(weight.block, 0).repeat_interleave(weight.block, 1)
            return data.float() * blocks[:rows, :columns]  # blocks at the edges may be partial
        case Fp4(data, scale):
            return e2m1(data) * e8m0(scale).repeat_interleave(FP4_BLOCK, 1)
        case NvFp4(data, scale, global_scale):
            return e2m1(data) * scale.float().repeat_interleave(NVFP4_BLOCK, 1) * global_scale


def looked_up(table: Fp8Rows, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a table by their numbers [...] int64: [..., d], products of values and scales, rounded to `dtype`."""
    values, scale = table.data[ids].float(), e8m0(table.scale[ids])
    out: Tensor = (values.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2)
    return out.to(dtype)
