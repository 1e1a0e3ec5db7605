"""Differential attention over CoDA's ring and banks."""

from kernels.differential import cpu, reference

__all__ = ["cpu", "reference"]
