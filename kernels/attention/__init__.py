"""Attention of a V4 layer: window, compressed entries and a sink, key and value at once."""

from fathom.kernels.attention import cpu, reference

__all__ = ["cpu", "reference"]
