"""Attention with grouped heads, of the Llama family."""

from fathom.kernels.grouped import cpu, reference

__all__ = ["cpu", "reference"]
