"""Products as FP8 tensor cores of Hopper sum them, or worse: a stand-in where there is no GPU.

32 products are summed at once with what was summed before, each cut to BITS bits below the largest of them; sums of 128
columns are added up in fp32. How many bits Hopper keeps is not published: 13 are said to be (DeepSeek-V3's report,
section 3.3.2, of "around 14 bits" in all). With 12, the mean error is larger than any that was measured on an H200.
"""

import torch

from fathom.kernels.formats.reference import decode
from fathom.kernels.formats.stored import Fp4, Fp8
from fathom.kernels.linear import cpu

AT_ONCE, BITS = 32, 12


def cut(x, unit):
    return (x / unit).trunc() * unit


def group_sum(x, w):
    """``x @ w^T`` of [t, 128] and [out, 128] float64 numbers that 8 bits hold."""
    total = x.new_zeros(len(x), len(w))
    for x_part, w_part in zip(x.split(AT_ONCE, 1), w.split(AT_ONCE, 1), strict=True):
        products = x_part[:, None] * w_part
        largest = torch.maximum(products.abs().amax(-1), total.abs())
        unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1 - BITS)
        total = cut(products, unit[..., None]).sum(-1) + cut(total, unit)
        total[largest == 0] = 0
    return total


def linear(x, weight, *, wide=False):
    """`kernels.linear.reference.linear`, of inputs rounded to E4M3 per 128 columns where the weight is narrow."""
    if not isinstance(weight, Fp8 | Fp4) or x.dtype != torch.bfloat16:
        return cpu.linear(x, weight, wide=wide)
    matrix = decode(weight).double()
    total = torch.zeros(len(x), len(matrix))
    for x_group, w_group in zip(x.double().split(128, 1), matrix.split(128, 1), strict=True):
        total += group_sum(x_group, w_group).float()
    return total if wide else total.to(x.dtype)
