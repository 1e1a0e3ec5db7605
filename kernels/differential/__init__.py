"""Differential attention over CoDA's ring and banks."""

from fathom.kernels.differential import cpu, reference

__all__ = ["cpu", "reference"]
