"""SwiGLU with V4's clamp."""

from kernels.swiglu import cpu, reference

__all__ = ["cpu", "reference"]
