"""mHC: weights, reading and writing of the residual streams."""

from kernels.hyper import cpu, reference

__all__ = ["cpu", "reference"]
