"""Fast decoding of stored weights; the same numbers, bit for bit, as `kernels.reference.formats.decode`.

The plain conversions are what makes a decode step slow on CPU: on one core of an AVX-512 Xeon the reference takes 6 ns
for an E4M3 weight and 9 ns for an FP4 one. Here E4M3 takes 2.3 ns, through float16, which the hardware converts, and
FP4 2.0 ns, from a table of all 256 bytes, which yields two weights a look-up (``python -m scripts.bench decode``).
"""

from functools import cache

import torch
from torch import Tensor

from kernels.formats import Dense, Fp4, Fp8, NvFp4, Weight
from kernels.reference import formats


def decode(weight: Weight) -> Tensor:
    """Decode a tile of rows to [rows, in] float32, which the caller may overwrite unless it is `Dense`."""
    match weight:
        case Dense(data):
            return data.float()
        case Fp8(data, scale):
            out = e4m3(data)
            per_column = formats.e8m0(scale).repeat_interleave(128, 1)[:, : data.shape[1]]  # [blocks, in]
            whole = len(out) // 128  # rows of blocks; one more may be partial
            out[: whole * 128].view(whole, 128, data.shape[1]).mul_(per_column[:whole, None])
            out[whole * 128 :].mul_(per_column[-1])
            return out
        case Fp4(data, scale):
            out = _e2m1(data)
            out.unflatten(1, (-1, 32)).mul_(formats.e8m0(scale)[..., None])
            return out
        case NvFp4(data, scale, global_scale):
            out = _e2m1(data)
            out.unflatten(1, (-1, 16)).mul_(e4m3(scale)[..., None])
            return out.mul_(global_scale)


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


def _e2m1(packed: Tensor) -> Tensor:
    byte = packed.view(torch.uint8).flatten().long()
    return _pairs(packed.device).index_select(0, byte).view(torch.float32).view(packed.shape[0], -1)


@cache
def _pairs(device: torch.device) -> Tensor:
    """The two float32 of each byte as one int64: [256]."""
    return formats.e2m1(torch.arange(256, dtype=torch.uint8, device=device)).view(torch.int64)
