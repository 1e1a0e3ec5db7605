"""Products with stored weights."""

from kernels.linear import cpu, reference

__all__ = ["cpu", "reference"]
