"""SwiGLU with V4's clamp."""

from fathom.kernels.swiglu import cpu, reference

__all__ = ["cpu", "reference"]
