"""Products with stored weights."""

from fathom.kernels.linear import cpu, reference

__all__ = ["cpu", "reference"]
