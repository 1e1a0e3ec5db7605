"""The narrow codes decoded fast: E4M3, E2M1 and E8M0 without the plain conversions, which take most of the time on CPU.

The same numbers, bit for bit, as torch's own conversion of E4M3 and as `kernels.formats.reference`.
"""

from functools import cache

import torch
from torch import Tensor

from kernels.formats import reference as formats


def e4m3(data: Tensor) -> Tensor:
    """Decode float8_e4m3fn of any shape to float32.

    E4M3 shifted by seven bits is the float16 of its value / 256, subnormals included: both have three and more
    mantissa bits below an exponent whose biases, 7 and 15, differ by 8. Only NaN (all seven bits set) comes out as a
    number, 480, which no other code means.
    """
    if data.device.type != "cpu":
        return data.float()
    bits = data.view(torch.int8).to(torch.int16)  # the sign fills the upper byte
    bits.bitwise_left_shift_(7).bitwise_and_(~(1 << 14))
    out = bits.view(torch.float16).float().mul_(256)
    if out.numel() > 0 and int(bits.bitwise_and_(0x7FFF).amax()) == 0x7F << 7:
        out.masked_fill_(bits == 0x7F << 7, float("nan"))
    return out


def e2m1(packed: Tensor) -> Tensor:
    """Decode bytes [n, m] of two E2M1 values, the even column in the low nibble, to [n, 2 m] float32.

    From a table of all 256 bytes, which yields two values a look-up.
    """
    byte = packed.view(torch.uint8).flatten().int()
    return _pairs(packed.device).index_select(0, byte).view(torch.float32).view(packed.shape[0], 2 * packed.shape[1])


def e8m0(scale: Tensor) -> Tensor:
    """Decode float8_e8m0fnu of any shape to float32; float32 is returned as it is."""
    if scale.dtype == torch.float32:
        return scale
    byte = scale.view(torch.uint8).flatten().int()
    return _powers(scale.device).index_select(0, byte).view(scale.shape)


@cache
def _pairs(device: torch.device) -> Tensor:
    """The two float32 of each byte as one int64: [256]."""
    return formats.e2m1(torch.arange(256, dtype=torch.uint8, device=device)).view(torch.int64)


@cache
def _powers(device: torch.device) -> Tensor:
    """The float32 of each byte: [256]."""
    return formats.e8m0(torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e8m0fnu))
