"""Products of FP8 weights with inputs that are codes too: of many tokens, on tensor cores that multiply FP8.

Deployed numerics round the input of an FP8 linear to E4M3 with a power of two for each 128 columns, and a block of the
weight has its scale for 128 of them, so that of each 128 columns codes are multiplied as they are:

``y[t, r] = sum_g s[r, g] p[t, g] sum_(c of g) w[r, c] x[t, c]``, g the groups of 128 columns

The inner sum is the tensor cores', the outer one is fp32 in registers: DeepSeek's own arithmetic (DeepGEMM). It is the
sum of `kernels.linear.triton.linear`, with fewer bits kept on the way by Hopper (`tests/fp8_sums.py` stands for it).
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fathom.kernels.formats.groups import LINEAR_GROUP
from fathom.kernels.formats.stored import Fp8
from fathom.kernels.formats.triton import e4m3, e8m0
from fathom.kernels.formats.triton_rounding import UPCAST, rounded
from fathom.kernels.linear.reference import FEW, Product, finished
from fathom.kernels.linear.triton import PROGRAMS, Tile, linears
from fathom.kernels.linear.weight_tiles import COUNTERS, arrived_last, counters, planes, summed
from fathom.kernels.quantise.triton import fp8_codes

CODES = torch.uint8 if UPCAST else torch.float8_e4m3fn  # what a kernel is given; the interpreter decodes bytes
BESIDE = tl.constexpr(8)  # tiles of tokens that programs beside each other in time share: those of a weight stay in L2


@triton.jit(do_not_specialize=["t"])
def _product_of_codes(
    x, powers, data, scale, out, parts, counters, t, rows, columns, stride, scale_stride, each,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Codes x [t, columns] and their E8M0 `powers` [columns / 128, t], by rows of W; ROWS divides 128."""
    across, down = tl.cdiv(t, TOKENS), tl.cdiv(rows, ROWS)
    program, split = tl.program_id(0), tl.program_id(1)
    first = program // (BESIDE * down) * BESIDE
    beside = tl.minimum(across - first, BESIDE)
    token = (first + program % (BESIDE * down) % beside) * TOKENS + tl.arange(0, TOKENS)
    tile = program % (BESIDE * down) // beside
    row, column = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, 128)
    known, own = tl.minimum(token, t - 1), tl.minimum(row, rows - 1)  # what is read twice is not stored
    x += known.to(tl.int64)[:, None] * columns + column[None, :]
    data += own.to(tl.int64)[None, :] * stride + column[:, None]
    scale += tile * ROWS // 128 * scale_stride
    begin = split * each
    end = tl.minimum(columns // 128, begin + each)
    total = tl.zeros([TOKENS, ROWS], tl.float32)
    power, factor = tl.load(powers + begin * t + known), tl.load(scale + begin)
    for step in range(begin, end):
        ahead = tl.minimum(step + 1, end - 1)  # loaded a step before they are needed
        power_ahead, factor_ahead = tl.load(powers + ahead * t + known), tl.load(scale + ahead)
        codes, w = tl.load(x + step * 128), tl.load(data + step * 128)
        if UPCAST:
            codes, w = e4m3(codes, tl.float32, UPCAST), e4m3(w, tl.float32, UPCAST)
        part = tl.dot(codes, w, input_precision="ieee")
        if scale.dtype.element_ty == tl.uint8:
            factor = e8m0(factor)
        total = tl.fma(part, (e8m0(power) * factor)[:, None], total)
        power, factor = power_ahead, factor_ahead
    target, mask = token.to(tl.int64)[:, None] * rows + row[None, :], (token < t)[:, None] & (row < rows)[None, :]
    if SPLIT:
        size, splits = t * rows, tl.num_programs(1)
        tl.store(parts + split.to(tl.int64) * size + target, total, mask)
        if arrived_last(counters, program, splits):
            total = summed(parts, target, mask, splits, size)
            tl.store(out + target, rounded(total, out.dtype.element_ty, UPCAST), mask)
    else:
        tl.store(out + target, rounded(total, out.dtype.element_ty, UPCAST), mask)


def linears_fp8(x: Tensor, products: Sequence[Product], *, deployed: bool) -> list[Tensor]:
    """`kernels.linear.triton.linears`, where FP8 weights are multiplied by codes of more than FEW tokens in bf16."""
    of_codes = [deployed and isinstance(product.weight, Fp8) for product in products]
    if x.shape[0] <= FEW or x.dtype != torch.bfloat16 or not any(of_codes):
        return linears(x, products, deployed=deployed)
    others = [product for product, codes in zip(products, of_codes, strict=True) if not codes]
    exact = iter(linears(x, others, deployed=deployed))
    codes, powers = fp8_codes(x, LINEAR_GROUP, by_group=True)
    return [
        finished(_multiplied(codes, powers, product, x.dtype), product) if narrow else next(exact)
        for product, narrow in zip(products, of_codes, strict=True)
    ]


def _multiplied(codes: Tensor, powers: Tensor, product: Product, dtype: torch.dtype) -> Tensor:
    (t, columns), (rows, held) = codes.shape, product.weight.shape
    assert columns == held, f"x has {columns} columns, the weight {held}"
    _, data, scale, _ = planes(product.weight)
    out = torch.empty(t, rows, dtype=torch.float32 if product.wide else dtype, device=codes.device)
    tile = _tile(t, rows)
    tiles, steps = triton.cdiv(t, tile.tokens) * triton.cdiv(rows, tile.rows), columns // tile.columns
    each = triton.cdiv(steps, _splits(tiles, steps))
    splits = triton.cdiv(steps, each)
    parts = torch.empty(splits, t, rows, dtype=torch.float32, device=codes.device) if splits > 1 else out
    assert splits == 1 or tiles <= COUNTERS, f"{tiles} tiles"
    _product_of_codes[tiles, splits](
        codes.view(CODES), powers, data.view(CODES), scale, out, parts, counters(codes.device), t, rows, columns,
        data.stride(0), scale.stride(0), each, SPLIT=splits > 1, ROWS=tile.rows, TOKENS=tile.tokens, UPCAST=UPCAST,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _tile(t: int, rows: int) -> Tile:
    """As many tokens as there are three quarters of the programs for that are wanted, and tokens to fill them."""
    wide = triton.cdiv(t, 128) * triton.cdiv(rows, 64) * 4 >= 3 * PROGRAMS
    return Tile(rows=64, tokens=128 if wide else 64, columns=128, warps=4, stages=4)


def _splits(tiles: int, steps: int) -> int:
    """Fill the machine once, with four steps at least to fill the pipeline."""
    return max(1, min(PROGRAMS // 2 // tiles, steps // 4))
