"""The lightning indexer: scores of every visible entry, and the best k."""

from fathom.kernels.indexer import cpu, reference

__all__ = ["cpu", "reference"]
