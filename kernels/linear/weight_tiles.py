"""Tiles of stored weights, decoded in registers and multiplied: what `linear` and `experts` have in common.

A tile of W is the left operand of a product ``W x^T``: rows of W fill the tensor core's long side, so that a few tokens
cost no more than the bytes of W. It is decoded to bfloat16 where nothing is lost by it, and it never is for bfloat16 x:

- Fp4: two bits of mantissa times a power of two.
- NvFp4: 2 bits times the 4 of the block's scale are at most 6. The scale of the matrix multiplies the sum, in fp32.
- Fp8: the values themselves. The block's scale, whichever form it has, multiplies the sum over the block's 128 columns,
  in fp32 (the sum of ``x W`` before the scale must stay below 3e38).

Other operands (fp32 x, matrices stored in F16 or F32) are multiplied in fp32, with no rounding before the sum.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.formats.stored import Dense, Fp4, Fp8, NvFp4, Weight
from kernels.formats.triton import e2m1, e4m3, e8m0
from kernels.formats.triton_rounding import UPCAST


class Planes(NamedTuple):
    """A weight as kernels take it; planes that a form does not have are `data` again and never read."""

    form: str  # dense, fp8, fp4 or nvfp4
    data: Tensor  # [..., out, in] or [..., out, in / 2], of narrow forms the bytes
    scale: Tensor  # uint8 where it is E8M0 or E4M3, else float32
    global_scale: Tensor  # [...] float32


def planes(weight: Weight) -> Planes:
    """Views of the planes of a matrix [out, in] or of stacked ones [E, out, in]."""
    for plane in weight[:2]:
        assert plane.stride(-1) == 1 or plane.shape[-1] == 1, "columns of a weight do not lie side by side"
    match weight:
        case Dense(data):
            return Planes("dense", data, data, data)
        case Fp8(data, scale):
            data, scale = data.view(torch.uint8), scale if scale.dtype == torch.float32 else scale.view(torch.uint8)
            return Planes("fp8", data, scale, data)
        case Fp4(data, scale):
            data = data.view(torch.uint8)
            return Planes("fp4", data, scale.view(torch.uint8), data)
        case NvFp4(data, scale, global_scale):
            return Planes("nvfp4", data.view(torch.uint8), scale.view(torch.uint8), global_scale)


def narrow(x: Tensor, weight: Weight) -> bool:
    """Whether bfloat16 holds both operands of the product."""
    return x.dtype == torch.bfloat16 and (not isinstance(weight, Dense) or weight.data.dtype == torch.bfloat16)


def operand(x: Tensor, weight: Weight) -> tl.dtype:
    """Dtype to multiply in: bfloat16 where it is exact, but for the interpreter."""
    return tl.bfloat16 if narrow(x, weight) and not UPCAST else tl.float32


@triton.jit
def inputs(x, place, inside, columns, step, BLOCK: tl.constexpr, OPERAND: tl.constexpr):
    """BLOCK columns of rows of x, transposed: [BLOCK, tokens]; `place` [tokens] is where rows begin."""
    column = step * BLOCK + tl.arange(0, BLOCK)
    mask = (column < columns)[:, None] & inside[None, :]
    return tl.load(x + place[None, :] + column[:, None], mask, 0.0).to(OPERAND)


@triton.jit
def multiplied(
    total, x, data, scale, row, there, width, scale_width, stride, scale_stride, step,
    FORM: tl.constexpr, BLOCK: tl.constexpr, OPERAND: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """`total` [rows, tokens] plus BLOCK columns of rows of W times `inputs`; of Fp8, BLOCK divides 128.

    `width` and `scale_width`: columns of `data` and of `scale` as stored. Places are multiples of `step`, and masks
    compare with arguments of the kernel: of a quotient the compiler would not know that 16 bytes may be read at once.
    """
    start = data + row.to(tl.int64)[:, None] * stride
    if FORM == "dense":
        column = step * BLOCK + tl.arange(0, BLOCK)
        w = tl.load(start + column[None, :], there[:, None] & (column < width)[None, :], 0.0)
        total = tl.dot(w.to(OPERAND), x, total, input_precision="ieee")
    elif FORM == "fp8":
        column = step * BLOCK + tl.arange(0, BLOCK)
        w = tl.load(start + column[None, :], there[:, None] & (column < width)[None, :], 0)
        s = tl.load(scale + (row // 128) * scale_stride + step * BLOCK // 128, there, 0)
        if scale.dtype.element_ty == tl.uint8:
            s = e8m0(s)
        total += tl.dot(e4m3(w, OPERAND, UPCAST), x, input_precision="ieee") * s[:, None]
    else:
        SHARED: tl.constexpr = 16 if FORM == "fp4" else 8  # bytes under one scale
        ROWS: tl.constexpr = row.shape[0]
        GROUPS: tl.constexpr = BLOCK // 2 // SHARED
        byte = step * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        w = tl.load(start + byte[None, :], there[:, None] & (byte < width)[None, :], 0)
        w = w.to(tl.uint32).reshape(ROWS, GROUPS, SHARED)
        group = step * GROUPS + tl.arange(0, GROUPS)
        mask = there[:, None] & (group < scale_width)[None, :]
        s = tl.load(scale + row.to(tl.int64)[:, None] * scale_stride + group[None, :], mask, 0)
        s = (e8m0(s) if FORM == "fp4" else e4m3(s, tl.float32, UPCAST))[:, :, None]
        w = tl.join(e2m1(w & 15) * s, e2m1(w >> 4) * s).to(OPERAND)
        total = tl.dot(w.reshape(ROWS, BLOCK), x, total, input_precision="ieee")
    return total
