"""Routed experts of V4-Flash and V4-Pro as published (FP4 experts), a few of each, for one token and for 512."""

import torch

from fathom.kernels.experts.triton import experts, experts_down, experts_up
from fathom.kernels.formats.stored import Fp4, Fp8

E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
FORMS = {
    "fp8": lambda e, o, i: Fp8(torch.empty(e, o, i, dtype=E4M3), torch.empty(e, o // 128, i // 128, dtype=E8M0)),
    "fp4": lambda e, o, i: Fp4(torch.empty(e, o, i // 2, dtype=torch.int8), torch.empty(e, o, i // 32, dtype=E8M0)),
}


def of(form, held, hidden, inner, t, *, deployed, summed=True, dtype=torch.bfloat16):
    w1, w2 = FORMS[form](held, inner, hidden), FORMS[form](held, hidden, inner)
    x, ids, weights = torch.empty(t, hidden, dtype=dtype), torch.empty(t, 6, dtype=torch.int64), torch.empty(t, 6)
    return lambda: experts(x, ids, weights, w1, w1, w2, 10.0, deployed=deployed, summed=summed)


def of_a_rank(held, hidden, inner, t, ranks):
    """Both halves, of FP4 matrices that are cut by rows."""
    make = FORMS["fp4"]
    w1, w2 = make(held, inner // ranks, hidden), make(held, hidden // ranks, inner)
    x, ids, weights = (
        torch.empty(t, hidden, dtype=torch.bfloat16),
        torch.empty(t, 6, dtype=torch.int64),
        torch.empty(t, 6),
    )
    a = torch.empty(t, 6, inner, dtype=torch.bfloat16)

    def run():
        experts_up(x, ids, weights, w1, w1, 10.0, deployed=True)
        experts_down(a, ids, w2, deployed=True)

    return run


ONE = {"V4-Flash, one token": of("fp4", 256, 4096, 2048, 1, deployed=True)}
ONE |= {"V4-Pro, one token, experts of a rank of eight": of("fp4", 48, 7168, 3072, 1, deployed=True, summed=False)}
BLACKWELL = ONE | {"V4-Flash, 40 tokens": of("fp4", 256, 4096, 2048, 40, deployed=True)}
CASES = ONE | {"V4-Pro, 512 tokens, a rank of eight": of("fp4", 48, 7168, 3072, 512, deployed=True)}
MORE = BLACKWELL | {
    "V4-Pro, a rank of eight, one token": of_a_rank(384, 7168, 3072, 1, 8),
    "V4-Flash, 4096 tokens": of("fp4", 256, 4096, 2048, 4096, deployed=True),
    "FP8 experts, one token": of("fp8", 8, 4096, 2048, 1, deployed=True),
    "FP8 experts": of("fp8", 8, 4096, 2048, 512, deployed=True),
}
