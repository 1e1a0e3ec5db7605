"""Which experts a token goes to."""

from fathom.kernels.gate import cpu, reference

__all__ = ["cpu", "reference"]
