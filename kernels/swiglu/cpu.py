"""Clamped SwiGLU in two fp32 buffers."""

from torch import Tensor
from torch.nn import functional


def swiglu(gate: Tensor, up: Tensor, limit: float, weight: Tensor | None) -> Tensor:
    """Activate an expert: `kernels.swiglu.reference.swiglu`."""
    out = functional.silu(gate.float().clamp(max=limit), inplace=True)
    out.mul_(up.float().clamp(-limit, limit))
    if weight is not None:
        out.mul_(weight[:, None])
    return out.to(gate.dtype)
