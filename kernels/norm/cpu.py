"""RMSNorm in one fp32 buffer, where the equation takes five: fresh memory costs page faults.

In a run, which has the memory already, the gain is small: audits/cpu-gains.md.
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Scale rows to unit mean square: `kernels.norm.reference.rms_norm`."""
    wide = x.to(torch.float32, copy=True)
    size = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    wide.mul_(size.square_().div_(x.shape[-1]).add_(eps).rsqrt_())
    if weight is not None:
        wide.mul_(weight)
    return wide.to(x.dtype)


def rms_norm_scratch(vectors: int, width: int, item: int) -> int:
    """Bytes alive at most in `rms_norm`, the result included: the fp32 buffer, a size of each vector, and the copy."""
    return vectors * (width + 2) * 4 + (0 if item == 4 else vectors * width * item)
