"""Attention to Shard's compressed keys and values."""

from fathom.kernels.shard import cpu, reference

__all__ = ["cpu", "reference"]
