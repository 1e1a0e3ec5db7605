"""Matrix products with weights in their stored form: a tile of rows is decoded, multiplied and forgotten.

Decoding is 20 % of a product with 512 tokens, 55 % with 64 and 90 % with one (``bench kernels --only decoding``, one
core of an AVX-512 Xeon): a token decoded from FP8 or FP4 costs about ten times one from bfloat16, which is the price of
keeping weights as stored.
"""

from functools import cache

import torch
from torch import Tensor

from kernels.formats.cpu import decode
from kernels.formats.stored import Dense, Fp4, Fp8, Weight, rows

FEW = 4  # tokens up to which one `torch.mv` each beats a matrix product in the stored dtype
TILE = 1 << 20  # weights per decoded tile, 4 MiB of fp32 (or 128 rows, where these hold more)
ROWS = 1 << 18  # weights per tile where one token reads them: 1 MiB of fp32, which stays in the core's cache
# Of scratch: forms with the bytes of an operand whose tiles are views of the weight; and bytes of a weight while a tile
# is decoded, the fp32 result included: E4M3 goes through 16-bit integers, E2M1 through indices and scales.
_SAME = (("BF16", 2), ("F32", 4))
_DECODED = {"BF16": 4, "F16": 4, "FP8": 6, "FP8_F32": 6, "FP4": 6.5, "NVFP4": 6.5}


def linear(x: Tensor, weight: Weight) -> Tensor:
    """``x @ W^T``: `kernels.linear.reference.linear`."""
    t = x.shape[0]  # of tensors, len is a slow call
    if isinstance(weight, Dense) and 0 < t <= FEW:
        if weight.data.dtype == x.dtype:  # nothing to decode
            return torch.mv(weight.data, x[0])[None] if t == 1 else torch.stack([torch.mv(weight.data, y) for y in x])
        if t == 1:
            return _widened(x[0].float(), weight.data)[None].to(x.dtype)
    return grouped_linear(x[:, None], weight, 1)[:, 0]


def _widened(x: Tensor, data: Tensor) -> Tensor:
    """Multiply one token by weights that are narrower, through one buffer: [out] float32."""
    height, columns = data.shape
    out = torch.empty(height, device=x.device)
    step = min(height, max(1, ROWS // columns))
    wide = torch.empty(step, columns, device=x.device)
    for low in range(0, height, step):
        part = slice(low, min(low + step, height))
        torch.mv(wide[: part.stop - low].copy_(data[part]), x, out=out[part])
    return out


def grouped_linear(x: Tensor, weight: Weight, groups: int) -> Tensor:
    """Each group by its own rows of W: `kernels.linear.reference.grouped_linear`."""
    t = x.shape[0]
    out_rows, columns = weight.shape
    assert x.shape[1:] == (groups, columns), f"x is {tuple(x.shape)}, want [t, {groups}, {columns}]"
    rank = out_rows // groups
    if t == 1 and isinstance(weight, Dense) and weight.data.dtype == x.dtype:  # nothing to decode
        parts = zip(weight.data.split(rank), x[0], strict=True)
        return torch.stack([torch.mv(part, group) for part, group in parts])[None]
    out = torch.empty(t, out_rows, dtype=x.dtype, device=x.device)
    operand = _operand(x, weight)
    wide = x.to(operand)
    step = max(128, TILE // columns // 128 * 128)
    for start in range(0, out_rows, step):
        stop = min(start + step, out_rows)
        tile = _decoded(rows(weight, start, stop), operand)
        for group in range(start // rank, -(-stop // rank)):
            low, high = max(start, group * rank), min(stop, (group + 1) * rank)
            part = tile[low - start : high - start]  # [rows, in] of this group
            out[:, low:high] = torch.mv(part, wide[0, group]) if t == 1 else wide[:, group] @ part.T
    return out.view(t, groups, rank)


def linear_scratch(tokens: int, rows: int, columns: int, form: str, item: int, device: torch.device) -> int:
    """Bytes alive at most in `linear`, the result included; see `grouped_linear_scratch`."""
    out = tokens * rows * item
    if tokens <= FEW and (form, item) in _SAME:
        return 2 * out
    if tokens == 1 and form in ("BF16", "F16", "F32"):
        return min(rows, max(1, ROWS // columns)) * columns * 4 + rows * 4 + out
    return grouped_linear_scratch(tokens, rows, columns, 1, form, item, device)


def grouped_linear_scratch(
    tokens: int, rows: int, columns: int, groups: int, form: str, item: int, device: torch.device
) -> int:
    """Bytes alive at most in `grouped_linear`, the result included: widened inputs, two decoded tiles, a product.

    `form` is how the weight is stored: BF16, F16, F32, FP8 (E8M0 scales), FP8_F32 (those in F32), FP4 or NVFP4.
    """
    out = tokens * rows * item
    if tokens == 1 and (form, item) in _SAME:
        return 2 * out
    operand = 2 if item == 2 and form in ("BF16", "FP8", "FP4") and _native_bfloat16(device) else 4
    wide = 0 if operand == item else tokens * groups * columns * operand
    step = min(rows, max(128, TILE // columns // 128 * 128))
    product = tokens * min(step, rows // groups) * operand
    if (form, operand) in _SAME:  # a view of the weight
        return out + wide + product
    tile, decoded = step * columns, max(_DECODED[form], 6 if operand == 2 else 0)
    before = tile * operand if step < rows else 0  # the tile before is still there
    return out + wide + max(before + int(tile * decoded), tile * operand + product)


def _decoded(tile: Weight, operand: torch.dtype) -> Tensor:
    """A tile in the dtype in which it is multiplied: as it is stored, where that is the same."""
    if isinstance(tile, Dense) and tile.data.dtype == operand:
        return tile.data
    return decode(tile).to(operand)


def _operand(x: Tensor, weight: Weight) -> torch.dtype:
    """Dtype in which to multiply; the accumulator is fp32 in both.

    bfloat16 holds E4M3 and E2M1 times a power of two exactly, so where the processor multiplies it natively (AMX)
    nothing is lost but weights below 2^-126, which it takes for zero; elsewhere it is emulated, four times slower than
    fp32. Scales stored in fp32 and NVFP4's two scales need more mantissa than bfloat16 has.
    """
    match weight:
        case Dense(data):
            exact = data.dtype == torch.bfloat16
        case Fp8(_, scale):
            exact = scale.dtype == torch.float8_e8m0fnu
        case Fp4():
            exact = True
        case _:
            exact = False
    return torch.bfloat16 if exact and x.dtype == torch.bfloat16 and _native_bfloat16(x.device) else torch.float32


@cache
def _native_bfloat16(device: torch.device) -> bool:
    # Private, but the public `get_capabilities` is younger than the oldest torch supported. AMX tiles imply bfloat16.
    return device.type == "cpu" and torch.cpu._is_amx_tile_supported()  # noqa: SLF001
