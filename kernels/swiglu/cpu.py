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


def swiglu_scratch(numbers: int, item: int) -> int:
    """Bytes alive at most in `swiglu` of so many numbers of gate and of up, the result included: fp32 buffers."""
    return (2 if item == 4 else 3) * 4 * numbers
