"""Shard's attention as Llama-3.1-8B decodes: 32 heads of 128 on 8 KV heads, a stream of 8 bits for keys, 4 for values.

Its middle's kernels are in a file of their own, see compile_shard_middle.
"""

import torch

from fathom.kernels.formats import coded_rows
from fathom.kernels.shard.triton import Stream, attend

CPU = torch.device("cpu")


def streamed(bits, seed):
    q, keys, values = (torch.empty(n, heads, 128, dtype=torch.bfloat16) for n, heads in ((1, 32), (68, 8), (68, 8)))
    rows = [coded_rows.allocate(1000 * 8, 128, b, CPU, seed) for b in bits]
    return lambda: attend(q, keys, values, None, Stream(*rows, torch.tensor(7)), rows[1].signs)


CASES = {"signs": streamed((8, 4), 5)}
