"""Top-k of V4-Flash and V4-Pro: a decode step whose row is split, and a chunk of prefill with a program per row."""

import torch

from fathom.kernels.indexer.topk import top_k


def rows(t, k):
    scores = torch.empty(t, 262144)
    return lambda: top_k(scores, 1 << 20, 4, k)


CASES = {
    "decode, V4-Flash": rows(1, 512),
    "prefill, V4-Flash": rows(512, 512),
}
MORE = {"decode, V4-Pro": rows(1, 1024), "prefill, V4-Pro": rows(512, 1024)}
