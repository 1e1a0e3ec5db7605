"""The routed experts of a rank, grouped."""

from fathom.kernels.experts import cpu, reference

__all__ = ["cpu", "reference"]
