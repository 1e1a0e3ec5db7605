"""The same ops in PyTorch tiles with bounded memory: what runs on CPU, and on any GPU without Triton."""

from kernels.blocked import attention, decode, gqa, hyper, indexer, linear, norm, quantise, rope, shard, swiglu

__all__ = ["attention", "decode", "gqa", "hyper", "indexer", "linear", "norm", "quantise", "rope", "shard", "swiglu"]
