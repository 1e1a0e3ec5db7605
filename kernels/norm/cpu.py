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
