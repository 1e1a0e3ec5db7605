"""Which experts a token goes to."""

from kernels.gate import reference

__all__ = ["reference"]
