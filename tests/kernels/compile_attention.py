"""Attention at V4's dimensions: one token at a capacity of 1M, a chunk, each form of entries, each kind of layer.

Few cases, for each takes seconds: together they launch every branch of the kernel but fp32, the biases of `Slots`
and several tokens to a tile; those of CASES all of these but a layer without entries. The prefill's tiles fill most of
a Hopper's shared memory.
"""

import torch

from fathom.kernels.attention.triton import attend
from fathom.kernels.formats import basis_rows, coded_rows, eigenbasis
from fathom.kernels.formats.rows import fp8_entries

D, WINDOW = 512, 128
CONTEXT = 1 << 20
HERE = torch.device("cpu")
BF16, FP8, CODED, BASED = "bf16", "fp8", "coded", "based"
FORMS = {
    BF16: lambda n: torch.empty(n, D, dtype=torch.bfloat16),
    FP8: lambda n: fp8_entries(n, D, 64, HERE),
    CODED: lambda n: coded_rows.allocate(n, D, 6, HERE, seed=0),
    BASED: lambda n: basis_rows.allocate(n, fit(), 64, 8, 0, HERE),
}


def fit():
    """A basis of 448 columns."""
    made = eigenbasis.eigen_keys(0, 448, 448, 448, 7, HERE)
    made.basis.copy_(torch.eye(448))
    made.basis_scale.fill_(1)
    made.bits.fill_(4)
    return made


def attention(t, heads, ratio, form, *, k=None):
    q = torch.empty(t, heads, D, dtype=torch.bfloat16)
    ring = torch.empty(WINDOW + t - 1, D, dtype=torch.bfloat16)
    sink = torch.empty(heads)
    entries = None if form is None else FORMS[form](CONTEXT // ratio)
    selected = None if k is None else torch.empty(t, k, dtype=torch.int32)
    first = torch.empty((), dtype=torch.int64)
    return lambda: attend(q, ring, first, WINDOW, entries, ratio, selected, sink)


BLACKWELL = {
    "CSA prefill, fp8, V4-Flash": attention(2048, 64, 4, FP8, k=512),  # decoded ahead
    "CSA decode, fp8, 16 heads": attention(1, 16, 4, FP8, k=512),
    "CSA decode, codes": attention(1, 64, 4, CODED, k=512),
    "CSA decode, in a basis": attention(1, 64, 4, BASED, k=512),
}
CASES = BLACKWELL | {
    "CSA prefill, V4-Flash": attention(512, 64, 4, BF16, k=512),
    "HCA decode, fp8, V4-Pro": attention(1, 128, 128, FP8),
}
MORE = {
    "CSA prefill, fp8, in few tokens": attention(512, 64, 4, FP8, k=512),  # decoded in the loop
    "SWA decode, V4-Flash": attention(1, 64, 0, None),
    "HCA prefill, codes": attention(512, 64, 128, CODED),
    "HCA prefill, in a basis": attention(512, 64, 128, BASED),
}
