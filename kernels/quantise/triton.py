"""What happens to activations between products: rotary embedding, rounding to E4M3 and E2M1 blocks, Hadamard.

`compress` does the same to a row in its registers, with the same helpers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.formats.triton import E4M3_SMALLEST, simulated
from kernels.formats.triton_rounding import UPCAST, rounded, widened
from kernels.quantise.reference import E2M1_MAX, E4M3_MAX

TILE = 2048  # numbers per program
WARPS = 4

# A narrow format: the smallest size of a block that its scale follows, the largest code, mantissa bits, bias
E4M3 = {"SMALLEST": E4M3_SMALLEST.value, "LARGEST": E4M3_MAX, "MANTISSA": 3, "BIAS": 7}
E2M1 = {"SMALLEST": E2M1_MAX * 2.0**-126, "LARGEST": E2M1_MAX, "MANTISSA": 1, "BIAS": 1}


@triton.jit
def held(x, dtype: tl.constexpr, UPCAST: tl.constexpr):
    """fp32 `x` rounded to `dtype`, in fp32."""
    return widened(rounded(x, dtype, UPCAST), UPCAST)


@triton.jit
def walsh(x, ROWS: tl.constexpr, D: tl.constexpr, LOG: tl.constexpr):
    """Hadamard transform of fp32 rows `x` [ROWS, D] in natural order, unscaled; D is 2^LOG.

    LOG times the same step, sums of neighbours to the first half and differences to the second: it is the transform,
    because each step also turns the bits of an index round by one, and LOG turns are none.
    """
    for _ in tl.static_range(LOG):
        a, b = tl.split(tl.reshape(x, [ROWS, D // 2, 2]))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), [ROWS, D])
    return x


@triton.jit(do_not_specialize=["blocks"])
def _simulate(
    x, out, blocks, GROUP: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, UPCAST: tl.constexpr,
    SMALLEST: tl.constexpr, LARGEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, PADDED)[None, :]
    inside = (block < blocks) & (column < GROUP)
    wide = widened(tl.load(x + block * GROUP + column, inside, 0.0), UPCAST)
    wide = simulated(wide, 1, SMALLEST, LARGEST, MANTISSA, BIAS)
    tl.store(out + block * GROUP + column, rounded(wide, out.dtype.element_ty, UPCAST), inside)


@triton.jit(do_not_specialize=["rows"])
def _hadamard(x, out, rows, scale, D: tl.constexpr, LOG: tl.constexpr, ROWS: tl.constexpr, UPCAST: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    place = row * D + tl.arange(0, D)[None, :]
    wide = walsh(tl.load(x + place, row < rows, 0.0).to(tl.float32), ROWS, D, LOG) * scale
    tl.store(out + place, rounded(wide, out.dtype.element_ty, UPCAST), row < rows)


@triton.jit(do_not_specialize=["rows"])
def _rotate(
    x, cos, sin, out, rows, heads, kept, half,
    KEPT: tl.constexpr, HALF: tl.constexpr, HALVES: tl.constexpr, ROWS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    start = row * (kept + 2 * half)
    if KEPT > 0:
        column = tl.arange(0, KEPT)[None, :]
        inside = (row < rows) & (column < kept)
        tl.store(out + start + column, tl.load(x + start + column, inside), inside)
    start += kept
    pair = tl.arange(0, HALF)[None, :]
    inside = (row < rows) & (pair < half)
    turn = row // heads * half + pair
    c, s = tl.load(cos + turn, inside, 0.0), tl.load(sin + turn, inside, 0.0)
    if HALVES:
        a = widened(tl.load(x + start + pair, inside, 0.0), UPCAST)
        b = widened(tl.load(x + start + half + pair, inside, 0.0), UPCAST)
        tl.store(out + start + pair, rounded(a * c - b * s, out.dtype.element_ty, UPCAST), inside)
        tl.store(out + start + half + pair, rounded(b * c + a * s, out.dtype.element_ty, UPCAST), inside)
    else:  # neighbours are read and written as one run of columns
        column = tl.arange(0, 2 * HALF)[None, :]
        inside = (row < rows) & (column < 2 * half)
        a, b = tl.split(tl.reshape(widened(tl.load(x + start + column, inside, 0.0), UPCAST), [ROWS, HALF, 2]))
        turned = tl.reshape(tl.join(a * c - b * s, a * s + b * c), [ROWS, 2 * HALF])
        tl.store(out + start + column, rounded(turned, out.dtype.element_ty, UPCAST), inside)


def simulate_fp8(x: Tensor, group: int) -> Tensor:
    """Round `x` [..., d] to E4M3 blocks: `kernels.quantise.reference.simulate_fp8`, bit for bit."""
    return _simulated(x, group, E4M3)


def simulate_fp4(x: Tensor, group: int = 32) -> Tensor:
    """Round `x` [..., d] to E2M1 blocks: `kernels.quantise.reference.simulate_fp4`, bit for bit."""
    return _simulated(x, group, E2M1)


def _simulated(x: Tensor, group: int, form: dict[str, float]) -> Tensor:
    assert x.shape[-1] % group == 0, f"{x.shape[-1]} columns are no multiple of the group of {group}"
    x = x.contiguous()
    out = torch.empty_like(x)
    blocks = x.numel() // group
    if blocks:
        padded = triton.next_power_of_2(group)
        rows = max(1, TILE // padded)
        constants = {"GROUP": group, "PADDED": padded, "ROWS": rows, "UPCAST": UPCAST, **form}
        _simulate[(triton.cdiv(blocks, rows),)](x, out, blocks, **constants, num_warps=WARPS, enable_fp_fusion=False)
    return out


def hadamard(x: Tensor) -> Tensor:
    """Walsh-Hadamard transform of the last dim: `kernels.quantise.reference.hadamard`, up to the order of its sums."""
    d = x.shape[-1]
    assert d & (d - 1) == 0, f"{d} is no power of two"
    x = x.contiguous()
    out = torch.empty_like(x)
    n = x.numel() // d
    if n:
        rows = max(1, TILE // d)
        constants = {"D": d, "LOG": d.bit_length() - 1, "ROWS": rows, "UPCAST": UPCAST}
        _hadamard[(triton.cdiv(n, rows),)](x, out, n, d**-0.5, **constants, num_warps=WARPS, enable_fp_fusion=False)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbours in the trailing dims of `x` [t, (h,) d]: `kernels.rope.reference.rotate`, bit for bit."""
    assert 2 * cos.shape[-1] <= x.shape[-1], f"{cos.shape[-1]} pairs in {x.shape[-1]} columns"
    return _rotated(x, cos, sin, halves=False)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate all of `x` [t, h, d], half against half: `kernels.rope.reference.rotate_halves`, bit for bit."""
    assert 2 * cos.shape[-1] == x.shape[-1], f"{cos.shape[-1]} pairs, want half of {x.shape[-1]} columns"
    return _rotated(x, cos, sin, halves=True)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, *, halves: bool) -> Tensor:
    assert cos.shape == sin.shape == (x.shape[0], cos.shape[1]), f"cos {cos.shape} of {x.shape[0]} tokens"
    x = x.contiguous()
    out = torch.empty_like(x)
    half = cos.shape[1]
    kept = x.shape[-1] - 2 * half
    n = x.numel() // x.shape[-1]
    if n:
        constants = {"KEPT": triton.next_power_of_2(kept) if kept else 0, "HALF": triton.next_power_of_2(half)}
        rows = triton.cdiv(TILE, triton.next_power_of_2(x.shape[-1]))
        constants |= {"HALVES": halves, "ROWS": rows, "UPCAST": UPCAST}
        _rotate[(triton.cdiv(n, rows),)](
            x, cos.contiguous(), sin.contiguous(), out, n, n // x.shape[0], kept, half,
            **constants, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def simulate_fp8_scratch(numbers: int, item: int) -> int:
    """Bytes allocated in `simulate_fp8`, `simulate_fp4`: the result."""
    return numbers * item


simulate_fp4_scratch = rotate_halves_scratch = simulate_fp8_scratch


def hadamard_scratch(vectors: int, width: int, item: int) -> int:
    """Bytes allocated in `hadamard`: the result."""
    return vectors * width * item


def rotate_scratch(tokens: int, heads: int, width: int, rope: int, item: int) -> int:
    """Bytes allocated in `rotate`: the result."""
    del rope
    return tokens * heads * width * item
