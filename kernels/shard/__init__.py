"""Attention to Shard's compressed keys and values."""

from kernels.shard import cpu, reference

__all__ = ["cpu", "reference"]
