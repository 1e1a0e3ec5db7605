"""Which experts a token goes to."""

from kernels.gate import cpu, reference

__all__ = ["cpu", "reference"]
