"""RMSNorm."""

from fathom.kernels.norm import cpu, reference

__all__ = ["cpu", "reference"]
