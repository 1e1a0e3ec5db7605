"""The middle of Shard's attention as Llama-3.1-8B decodes with it: rank 192 of 8 heads of 128, 8K tokens."""

import torch

from fathom.kernels.formats import eigenbasis, product_quantise
from fathom.kernels.shard.triton import Middle
from fathom.kernels.shard.triton_middle import fold_basis, score, sums

CPU = torch.device("cpu")


def middle(n, *, interleaved, t=1):
    keys = eigenbasis.eigen_keys(n, 1024, 192, 192, 0, CPU)
    values = product_quantise.codebook_values(n, 8, 128, CPU)
    given = Middle(keys, values, 4, torch.empty(64), interleaved)
    q = torch.empty(t, 32, 128, dtype=torch.bfloat16)
    return lambda: score(q, given, fold_basis(given, 8, wide=False), sums(512, q), 2, wide=False)


CASES = {"8K tokens": middle(8192, interleaved=False)}
