"""The lightning indexer: scores of every visible entry, and the best k."""

from fathom.kernels.indexer import candidates, cpu, reference

__all__ = ["candidates", "cpu", "reference"]
