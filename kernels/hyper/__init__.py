"""mHC: weights, reading and writing of the residual streams."""

from fathom.kernels.hyper import cpu, reference

__all__ = ["cpu", "reference"]
