"""Linears of codes at V4-Flash's dimensions: both tiles, both forms of scales, and split columns."""

import torch

from fathom.kernels.formats.stored import Fp8
from fathom.kernels.linear.reference import Product
from fathom.kernels.linear.triton_codes import linears_fp8

E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn


def of(out, columns, t, scales=E8M0, **how):
    weight = Fp8(torch.empty(out, columns, dtype=E4M3), torch.empty(out // 128, columns // 128, dtype=scales))
    x = torch.empty(t, columns, dtype=torch.bfloat16)
    return lambda: linears_fp8(x, [Product(weight, **how)], deployed=True)


BLACKWELL = {"output, 4096 tokens": of(4096, 8192, 4096)}
CASES = BLACKWELL | {"low-rank query, 512 tokens": of(1024, 4096, 512), "the same, 40 tokens": of(1024, 4096, 40)}
MORE = {
    "fp32 scales": of(4096, 8192, 4096, torch.float32),
    "V4-Pro, low-rank query, 512 tokens": of(1536, 7168, 512),
    "V4-Pro, KV, not rounded": of(512, 7168, 512, wide=True),
}
