"""The same ops in PyTorch tiles with bounded memory: what runs on CPU, and on any GPU without Triton."""

from kernels.blocked import attention, decode, gqa, hyper, indexer, linear, quantise, shard

__all__ = ["attention", "decode", "gqa", "hyper", "indexer", "linear", "quantise", "shard"]
