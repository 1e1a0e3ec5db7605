"""FP4 experts of codes, and of numbers, at V4-Flash's dimensions: tiles of 128, 64, 32 and 16 tokens.

Blackwell multiplies them otherwise; for it the kernels are compiled all the same, so that they could.
"""

from functools import partial

import torch

from fathom.kernels.experts import triton_expert_codes as of_codes
from fathom.kernels.formats.stored import Fp4

EXPERTS, SLOTS, HIDDEN, INNER = 8, 6, 4096, 2048
E8M0 = torch.float8_e8m0fnu


def fp4(out, columns):
    data = torch.empty(EXPERTS, out, columns // 2, dtype=torch.int8)
    return Fp4(data, torch.empty(EXPERTS, out, columns // 32, dtype=E8M0))


def halves(t, hidden=HIDDEN, inner=INNER, given=of_codes._codes):
    def run():
        ids, x = torch.empty(t, SLOTS, dtype=torch.int64), torch.empty(t, hidden, dtype=torch.bfloat16)
        w1, w2 = fp4(inner, hidden), fp4(hidden, inner)
        of_codes._experts(x, ids, torch.empty(t, SLOTS), w1, w1, w2, 10.0, given)

    return run


NUMBERS = partial(of_codes._numbers, deployed=False)


BLACKWELL = {"96 tokens an expert": halves(128)}
CASES = BLACKWELL | {
    "12 tokens an expert": halves(16),
    "96 tokens an expert, exact": halves(128, given=NUMBERS),
    "12 tokens an expert, exact": halves(16, given=NUMBERS),
}
MORE = {
    "48 tokens an expert, exact": halves(64, given=NUMBERS),
    "48 tokens an expert": halves(64),
    "24 tokens an expert": halves(33),
    "V4-Pro, 96 tokens an expert": halves(128, 7168, 3072),
}
