"""The compressor's tail: pool, norm, rotate, round, store."""

from kernels.compress import reference

__all__ = ["reference"]
