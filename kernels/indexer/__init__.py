"""The lightning indexer: scores of every visible entry, and the best k."""

from fathom.kernels.indexer import cpu, cpu_candidates, reference

__all__ = ["cpu", "cpu_candidates", "reference"]
