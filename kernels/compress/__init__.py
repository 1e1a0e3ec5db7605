"""The compressor's tail: pool, norm, rotate, round, store."""

from kernels.compress import cpu, reference

__all__ = ["cpu", "reference"]
