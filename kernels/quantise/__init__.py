"""Rounding of activations to narrow formats, and the Hadamard transform."""

from fathom.kernels.quantise import cpu, reference

__all__ = ["cpu", "reference"]
