"""The equations in fp32, a few lines per op: the oracle of every other op set. Imports torch alone."""

from kernels.reference import attention, gate, gqa, hyper, indexer, linear, norm, pool, quantise, rope, swiglu

__all__ = ["attention", "gate", "gqa", "hyper", "indexer", "linear", "norm", "pool", "quantise", "rope", "swiglu"]
