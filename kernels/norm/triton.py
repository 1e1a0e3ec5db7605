"""RMSNorm: a row is read once, squared, summed and scaled in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fathom.kernels.formats.triton_rounding import UPCAST, rounded


@triton.jit
def _rms_norm(x, weight, out, columns, eps, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr, UPCAST: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    wide = tl.load(x + row * columns + column, inside, 0.0).to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide) / columns + eps)
    if WEIGHTED:
        wide *= tl.load(weight + column, inside, 0.0)
    tl.store(out + row * columns + column, rounded(wide, out.dtype.element_ty, UPCAST), inside)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Scale rows to unit mean square: `kernels.norm.reference.rms_norm`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    columns = x.shape[-1]
    rows = x.numel() // columns
    if rows:
        block = triton.next_power_of_2(columns)
        warps = max(1, min(8, block // 512))
        constants = {"WEIGHTED": weight is not None, "BLOCK": block, "UPCAST": UPCAST}
        _rms_norm[(rows,)](x, weight, out, columns, eps, **constants, num_warps=warps, enable_fp_fusion=False)
    return out
