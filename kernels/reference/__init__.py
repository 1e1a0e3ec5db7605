"""The equations in fp32, a few lines per op: the oracle of every other op set. Imports torch alone."""

from kernels.reference import (
    attention,
    compress,
    differential,
    gate,
    gqa,
    hyper,
    indexer,
    linear,
    lloyd_max,
    norm,
    pool,
    quantise,
    rope,
    shard,
    swiglu,
)

__all__ = [
    "attention", "compress", "differential", "gate", "gqa", "hyper", "indexer", "linear", "lloyd_max", "norm", "pool",
    "quantise", "rope", "shard", "swiglu",
]  # fmt: skip
