"""Tiles of stored weights, multiplied as they are stored, and sums of split columns: of `linear` and of `experts`.

A tile of W is the left operand of a product ``W x^T``: rows of W fill the tensor core's long side. It is decoded to
bfloat16 where nothing is lost by it, and it never is for bfloat16 x:

- Fp4: two bits of mantissa times a power of two; the compiler has a product of this format. Where x is codes of E4M3
  with a power of two for each 128 columns, which is what deployed numerics round it to, Blackwell multiplies both as
  they are. Under the smallest scale, 2^-127, an older compiler (Triton 3.6) counts weights as 0.
- NvFp4: 2 bits times the 4 of the block's scale are at most 6. The scale of the matrix multiplies the sum, in fp32.
- Fp8: the values themselves. The block's scale, whichever form it has, multiplies the sum over the block's 128 columns,
  in fp32 (the sum of ``x W`` before the scale must stay below 3e38).

Other operands (fp32 x, matrices stored in F16 or F32) are multiplied in fp32, with no rounding before the sum.

Where columns are split, a program leaves its sum in fp32, and the last of a tile adds all of them in their order.
"""

from functools import cache
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fathom.kernels.formats.stored import Dense, Fp4, Fp8, NvFp4, Weight
from fathom.kernels.formats.triton import e2m1, e4m3, e8m0
from fathom.kernels.formats.triton_rounding import UPCAST


class Planes(NamedTuple):
    """A weight as kernels take it; planes that a form does not have are `data` again and never read."""

    form: str  # dense, fp8, fp4 or nvfp4
    data: Tensor  # [..., out, in] or [..., out, in / 2], of narrow forms the bytes
    scale: Tensor  # uint8 where it is E8M0 or E4M3, else float32
    global_scale: Tensor  # [...] float32

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Columns of data and of scales as stored, and how many of each lie from one row to the next."""
        return self.data.shape[-1], self.scale.shape[-1], self.data.stride(-2), self.scale.stride(-2)


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


COUNTERS: Final = 1 << 16  # tiles of split columns in one launch, at most


@cache
def counters(device: torch.device) -> Tensor:
    """How many programs have arrived at each tile, [COUNTERS] int32: zero between launches, which follow each other.

    Made once for a device, before anything is captured there: a graph's own memory would end with it.
    """
    captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    assert not captured, "the first product with split columns is captured: run one before"
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


@triton.jit
def arrived_last(counters, tile, splits):
    """Whether this program is the last of a tile's to have stored its sum, so that it may read those of all."""
    tl.debug_barrier()  # what all threads stored comes before the count
    last = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == splits - 1
    if last:
        tl.store(counters + tile, 0)
    return last


@triton.jit
def summed(parts, place, mask, splits, size):
    """Sums of all splits, `size` numbers apart, added in their order; from L2, where other programs' stores are."""
    total = tl.zeros(place.shape, tl.float32)
    for _ in range(splits):
        total += tl.load(parts + place, mask, 0.0, cache_modifier=".cg")
        parts += size
    return total


@triton.jit
def inputs(x, place, inside, columns, step, BLOCK: tl.constexpr, OPERAND: tl.constexpr):
    """BLOCK columns of rows of x, transposed: [BLOCK, tokens]; codes stay codes. `place` [tokens]: where rows begin."""
    column = step * BLOCK + tl.arange(0, BLOCK)
    mask = (column < columns)[:, None] & inside[None, :]
    found = tl.load(x + place[None, :] + column[:, None], mask, 0)
    return found if found.dtype == tl.uint8 else found.to(OPERAND)


@triton.jit
def input_powers(powers, place, inside, columns, step, BLOCK: tl.constexpr):
    """E8M0 of `inputs` that are codes, one for 128 columns, told for each 32: [tokens, BLOCK / 32]."""
    group = (step * (BLOCK // 32) + tl.arange(0, BLOCK // 32)) // 4
    mask = inside[:, None] & (group < columns // 128)[None, :]
    return tl.load(powers + (place // 128)[:, None] + group[None, :], mask, 127)


@triton.jit
def multiplied(
    total, x, powers, data, scale, row, there, width, scale_width, stride, scale_stride, step,
    FORM: tl.constexpr, BLOCK: tl.constexpr, OPERAND: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """`total` [rows, tokens] plus BLOCK columns of rows of W times `inputs`; of Fp8, BLOCK divides 128.

    `powers` are `input_powers` where inputs are codes.

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
    elif FORM == "fp4" and x.dtype != tl.float32:
        byte = step * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
        w = tl.load(start + byte[None, :], there[:, None] & (byte < width)[None, :], 0)
        group = step * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
        mask = there[:, None] & (group < scale_width)[None, :]
        s = tl.load(scale + row.to(tl.int64)[:, None] * scale_stride + group[None, :], mask, 0)
        if x.dtype == tl.uint8:
            total = tl.dot_scaled(w, s, "e2m1", x, powers, "e4m3", total)
        else:
            total = tl.dot_scaled(w, s, "e2m1", x, None, "bf16", total)
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
