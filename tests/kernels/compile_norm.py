"""RMSNorm as V4-Pro and V4-Flash launch it: hidden rows, the low-rank query, heads without a weight."""

import torch

from fathom.kernels.norm.triton import rms_norm


def rows(*shape, weighted=True):
    x = torch.empty(*shape, dtype=torch.bfloat16)
    return lambda: rms_norm(x, torch.empty(shape[-1]) if weighted else None, 1e-6)


CASES = {
    "hidden, V4-Pro": rows(1, 7168),
    "heads": rows(1, 128, 512, weighted=False),
}
MORE = {
    "hidden, V4-Flash": rows(1, 4096),
    "query": rows(1, 1536),
}
