"""Rotary embedding as a product of complex numbers, of the rope dims alone.

One core of an AVX2 EPYC, 16 heads x 128 with 32 rope dims: 512 tokens 1.42 -> 0.33 ms, one token 65 -> 25 us
(``python -m scripts.bench kernels --only activations``).
"""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the trailing dims by interleaved pairs: `kernels.reference.rope.rotate`."""
    half = cos.shape[-1]
    turn = torch.complex(cos, sin)
    wide = x[..., -2 * half :].to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    torch.view_as_complex(wide.unflatten(-1, (half, 2))).mul_(turn[:, None] if x.ndim == 3 else turn)
    out = x.clone()
    out[..., -2 * half :] = wide
    return out
