"""The compressor's tail: pool, norm, rotate, round, store."""

from fathom.kernels.compress import cpu, reference

__all__ = ["cpu", "reference"]
