"""The routed experts of a rank, grouped."""

from kernels.experts import reference

__all__ = ["reference"]
