"""Rotary position embedding."""

from kernels.rope import cpu, reference

__all__ = ["cpu", "reference"]
