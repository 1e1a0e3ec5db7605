"""Rotary embedding as a product of complex numbers, of the rope dims alone: three times as fast in prefill.

Before and after are in audits/cpu-gains.md.
"""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the trailing dims by interleaved pairs: `kernels.rope.reference.rotate`."""
    half = cos.shape[-1]
    turn = torch.complex(cos, sin)
    wide = x[..., -2 * half :].to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    torch.view_as_complex(wide.unflatten(-1, (half, 2))).mul_(turn[:, None] if x.ndim == 3 else turn)
    out = x.clone()
    out[..., -2 * half :] = wide
    return out


def rotate_scratch(tokens: int, heads: int, width: int, rope: int, item: int) -> int:
    """Bytes alive at most in `rotate`, the result included: complex angles, and the rope dims in fp32."""
    return tokens * heads * (width * item + rope * 4) + tokens * rope * 4
