"""Linears of V4-Flash and V4-Pro in the forms that checkpoints store, for one token and for 512."""

import torch

from fathom.kernels.formats.stored import Dense, Fp4, Fp8, NvFp4
from fathom.kernels.linear.reference import ByPosition, Product
from fathom.kernels.linear.triton import grouped_linear, linear, linears

E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
FORMS = {
    "bf16": lambda o, i: Dense(torch.empty(o, i, dtype=torch.bfloat16)),
    "fp8": lambda o, i: Fp8(torch.empty(o, i, dtype=E4M3), torch.empty(o // 128, i // 128, dtype=E8M0)),
    "fp4": lambda o, i: Fp4(torch.empty(o, i // 2, dtype=torch.int8), torch.empty(o, i // 32, dtype=E8M0)),
    "nvfp4": lambda o, i: NvFp4(
        torch.empty(o, i // 2, dtype=torch.uint8), torch.empty(o, i // 16, dtype=E4M3), torch.empty(())
    ),
}


def of(form, out, columns, t, dtype=torch.bfloat16, **how):
    return lambda: linear(torch.empty(t, columns, dtype=dtype), FORMS[form](out, columns), **how)


def in_groups(groups, rank, columns, t):
    x = torch.empty(t, groups, columns, dtype=torch.bfloat16)
    return lambda: grouped_linear(x, FORMS["fp8"](groups * rank, columns), groups)


def together(columns, *products):
    x = torch.empty(1, columns, dtype=torch.bfloat16)
    return lambda: linears(x, [make() for make in products], deployed=True)


def read_by_csa(hidden, query):
    """What a CSA layer's attention reads off its input: query, KV, both compressors, index weights."""
    position, sizes = torch.empty((), dtype=torch.int64), ((query, "fp8"), (512, "fp8"))
    pooled = [
        make
        for width in (1024, 256)
        for make in (
            lambda width=width: Product(FORMS["bf16"](width, hidden), wide=True),
            lambda width=width: Product(
                FORMS["bf16"](width, hidden), wide=True, bias=ByPosition(torch.empty(4, width), position)
            ),
        )
    ]
    made = [lambda rows=rows, form=form: Product(FORMS[form](rows, hidden)) for rows, form in sizes]
    return together(hidden, *made, *pooled, lambda: Product(FORMS["bf16"](64, hidden), factor=0.01))


BLACKWELL = {
    "an expert, V4-Flash, one token": of("fp4", 2048, 4096, 1),
    "CSA, V4-Flash": read_by_csa(4096, 1024),
    "low-rank query, V4-Flash": of("fp8", 1024, 4096, 512),
}
CASES = BLACKWELL | {
    "compressor, V4-Pro, one token": of("bf16", 1024, 7168, 1, wide=True),
    "NVFP4, one token": of("nvfp4", 3072, 7168, 1),
    "output in groups, V4-Flash, one token": in_groups(8, 1024, 4096, 1),
    "low-rank query, V4-Flash, five tokens": of("fp8", 1024, 4096, 5),
    "compressor, V4-Flash, two tokens": of("bf16", 1024, 4096, 2, wide=True),
    "an expert, V4-Pro, two tokens": of("fp4", 7168, 3072, 2),
    "FP8 and FP4, one token": together(
        4096, lambda: Product(FORMS["fp8"](2048, 4096)), lambda: Product(FORMS["fp4"](2048, 4096))
    ),
    "rows of 11,008 numbers, four tokens": of("bf16", 4096, 11008, 4),
}
MORE = {
    "head, V4-Flash, one token": of("bf16", 129280, 4096, 1, wide=True),
    "compressor, V4-Pro, five tokens": of("bf16", 1024, 7168, 5, wide=True),
    "query, V4-Flash, 8192 tokens": of("fp8", 32768, 1024, 8192),
    "CSA, V4-Pro": read_by_csa(7168, 1536),
    "query, V4-Flash, one token": together(1024, lambda: Product(FORMS["fp8"](32768, 1024))),
    "NVFP4 and FP4, one token": together(
        4096, lambda: Product(FORMS["nvfp4"](2048, 4096)), lambda: Product(FORMS["fp4"](2048, 4096))
    ),
    "head, V4-Flash": of("bf16", 129280, 4096, 512, wide=True),
    "an expert, V4-Pro": of("fp4", 3072, 7168, 512),
    "fp32 activations": of("fp8", 1024, 4096, 512, torch.float32),
}
