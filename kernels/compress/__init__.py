"""The compressor's tail: pool, norm, rotate, round, store."""

from kernels.compress import pool, reference

__all__ = ["pool", "reference"]
