"""Rotary position embedding."""

from fathom.kernels.rope import cpu, reference

__all__ = ["cpu", "reference"]
