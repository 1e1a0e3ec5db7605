"""What happens to activations between products: rotary embedding, rounding to E4M3 and E2M1 blocks, Hadamard.

`compress` does the same to a row in its registers, with the same helpers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fathom.kernels.formats.triton import E4M3_LARGEST, E4M3_SMALLEST, e4m3, e8m0, encoded, simulated
from fathom.kernels.formats.triton_rounding import UPCAST, rounded, widened
from fathom.kernels.quantise.reference import E2M1_MAX, E4M3_MAX

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


@triton.jit
def turned(x, c, s, turns, BLOCK: tl.constexpr):
    """Rotate those pairs of neighbours of fp32 `x` [BLOCK] that `turns` [BLOCK / 2] names, by these angles."""
    a, b = tl.split(tl.reshape(x, [BLOCK // 2, 2]))
    both = tl.join(tl.where(turns, a * c - b * s, a), tl.where(turns, a * s + b * c, b))
    return tl.reshape(both, [BLOCK])


@triton.jit
def kv_rounded(x, count, GROUP: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr, UPCAST: tl.constexpr):
    """Round the first `count` columns of fp32 `x` [BLOCK] to E4M3 blocks of GROUP, and to the run's dtype."""
    group = simulated(tl.reshape(x, [BLOCK // GROUP, GROUP]), 1, E4M3_SMALLEST, E4M3_LARGEST, 3, 7)
    return tl.where(tl.arange(0, BLOCK) < count, held(tl.reshape(group, [BLOCK]), DTYPE, UPCAST), x)


@triton.jit
def _norm_rotate(
    x, weight, cos, sin, out, heads, width, eps, half,
    WEIGHTED: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    DTYPE: tl.constexpr = out.dtype.element_ty
    wide = widened(tl.load(x + row * width + column, inside, 0.0), UPCAST)
    wide *= tl.rsqrt(tl.sum(wide * wide) / width + eps)
    if WEIGHTED:
        wide *= tl.load(weight + column, inside, 0.0)
    pair = tl.arange(0, BLOCK // 2) - (width // 2 - half)
    turns, angle = (pair >= 0) & (pair < half), row // heads * half + pair
    c, s = tl.load(cos + angle, turns, 1.0), tl.load(sin + angle, turns, 0.0)
    wide = held(turned(held(wide, DTYPE, UPCAST), c, s, turns, BLOCK), DTYPE, UPCAST)
    if GROUP > 0:
        wide = kv_rounded(wide, width - 2 * half, GROUP, BLOCK, DTYPE, UPCAST)
    tl.store(out + row * width + column, rounded(wide, DTYPE, UPCAST), inside)


@triton.jit(do_not_specialize=["blocks"])
def _simulate(
    x, out, powers, blocks, CODES: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    ACROSS: tl.constexpr, BEHIND: tl.constexpr, HALVES: tl.constexpr, UPCAST: tl.constexpr, SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """ACROSS: blocks of a row, where powers of the same place in all rows lie side by side; 0: those of a row do.

    BEHIND: blocks of a row, where its powers are behind its codes, in one row of bytes; 0: they are a tensor.
    HALVES: of each 8 columns of a block the first four come before all second four.
    """
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, PADDED)[None, :]
    inside = (block < blocks) & (column < GROUP)
    wide = widened(tl.load(x + block * GROUP + column, inside, 0.0), UPCAST)
    if CODES:
        codes, exponent = encoded(wide, 1, SMALLEST, LARGEST, MANTISSA, BIAS, 7)
        if HALVES:
            eights = tl.permute(tl.reshape(codes, [ROWS, PADDED // 8, 2, 4]), (0, 2, 1, 3))
            codes = tl.reshape(eights, [ROWS, PADDED])
        before = block // BEHIND if BEHIND > 0 else 0  # rows
        tl.store(out + block * GROUP + before * BEHIND + column, codes, inside)
        place = block if ACROSS == 0 else block % ACROSS * (blocks // ACROSS) + block // ACROSS
        place += 0 if BEHIND == 0 else (before + 1) * BEHIND * GROUP
        tl.store(powers + place, exponent, block < blocks)
    else:
        wide = simulated(wide, 1, SMALLEST, LARGEST, MANTISSA, BIAS)
        tl.store(out + block * GROUP + column, rounded(wide, out.dtype.element_ty, UPCAST), inside)


@triton.jit(do_not_specialize=["blocks"])
def _unpack(
    packed, out, blocks,
    BEHIND: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Numbers of what `_simulate` left with powers BEHIND codes."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, PADDED)[None, :]
    inside, before = (block < blocks) & (column < GROUP), block // BEHIND
    codes = tl.load(packed + block * GROUP + before * BEHIND + column, inside, 0)
    power = e8m0(tl.load(packed + (before + 1) * BEHIND * GROUP + block, block < blocks, 127))
    wide = e4m3(codes, tl.float32, UPCAST) * power
    tl.store(out + block * GROUP + column, rounded(wide, out.dtype.element_ty, UPCAST), inside)


@triton.jit(do_not_specialize=["rows"])
def _hadamard(
    x, out, rows, scale,
    D: tl.constexpr, LOG: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, UPCAST: tl.constexpr,
    SMALLEST: tl.constexpr, LARGEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """GROUP: columns of the blocks to which rows are rounded then; 0: they are not."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    place = row * D + tl.arange(0, D)[None, :]
    wide = walsh(tl.load(x + place, row < rows, 0.0).to(tl.float32), ROWS, D, LOG) * scale
    if GROUP > 0:
        groups = tl.reshape(held(wide, out.dtype.element_ty, UPCAST), [ROWS, D // GROUP, GROUP])
        wide = tl.reshape(simulated(groups, 2, SMALLEST, LARGEST, MANTISSA, BIAS), [ROWS, D])
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
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(x, out, out, group, form)
    return out


def fp8_codes(x: Tensor, group: int, *, by_group: bool = False, halves: bool = False) -> tuple[Tensor, Tensor]:
    """What `simulate_fp8` rounds `x` [..., d] to, as bytes: codes of E4M3 [..., d] and of E8M0 [..., d / group].

    `by_group`: powers are [d / group, ...], as a product reads them that takes many rows a group at a time.
    `halves`: codes of a group are reordered, of each 8 the first four before all second four: the order in which
    `kernels.experts.triton_expert_codes` takes nibbles out of words.
    """
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    groups = x.shape[-1] // group
    shape = (groups, *x.shape[:-1]) if by_group else (*x.shape[:-1], groups)
    powers = torch.empty(shape, dtype=torch.uint8, device=x.device)
    assert not halves or group % 8 == group & (group - 1) == 0, f"groups of {group}"
    _launch(x, codes, powers, group, E4M3, across=groups if by_group else 0, halves=halves)
    return codes, powers


def pack_fp8(x: Tensor, group: int) -> Tensor:
    """E4M3 codes and scales of rows [n, d] as bytes: `kernels.quantise.reference.pack_fp8`, bit for bit but for NaN."""
    (n, d), groups = x.shape, x.shape[1] // group
    out = torch.empty(n, d + groups, dtype=torch.uint8, device=x.device)
    _launch(x, out, out, group, E4M3, behind=groups)
    return out


def unpack_fp8(packed: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """Numbers of what `pack_fp8` gave: `kernels.quantise.reference.unpack_fp8`, bit for bit but for NaN."""
    (n, width), groups = packed.shape, packed.shape[1] // (group + 1)
    assert groups * (group + 1) == width, f"{width} bytes are no codes in groups of {group} and scales"
    out = torch.empty(n, groups * group, dtype=dtype, device=packed.device)
    if blocks := n * groups:
        padded = triton.next_power_of_2(group)
        rows = max(1, TILE // padded)
        _unpack[(triton.cdiv(blocks, rows),)](
            packed.contiguous(), out, blocks, BEHIND=groups, GROUP=group, PADDED=padded, ROWS=rows, UPCAST=UPCAST,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _launch(
    x: Tensor, out: Tensor, powers: Tensor, group: int, form: dict[str, float], *, across: int = 0, behind: int = 0,
    halves: bool = False,
) -> None:  # fmt: skip
    assert x.shape[-1] % group == 0, f"{x.shape[-1]} columns are no multiple of the group of {group}"
    x = x.contiguous()
    blocks = x.numel() // group
    if blocks:
        padded = triton.next_power_of_2(group)
        rows = max(1, TILE // padded)
        constants = {"GROUP": group, "PADDED": padded, "ROWS": rows, "UPCAST": UPCAST, **form}
        constants |= {"ACROSS": across, "BEHIND": behind, "HALVES": halves}
        _simulate[(triton.cdiv(blocks, rows),)](
            x, out, powers, blocks, CODES=out.dtype == torch.uint8, **constants, num_warps=WARPS, enable_fp_fusion=False
        )


def hadamard(x: Tensor) -> Tensor:
    """Walsh-Hadamard transform of the last dim: `kernels.quantise.reference.hadamard`, up to the order of its sums."""
    return _transformed(x, 0)


def round_index(x: Tensor, group: int) -> Tensor:
    """The same, rounded to E2M1 blocks: `kernels.quantise.reference.RoundIndex`."""
    assert x.shape[-1] % group == 0, f"{x.shape[-1]} columns are no multiple of the group of {group}"
    return _transformed(x, group)


def _transformed(x: Tensor, group: int) -> Tensor:
    d = x.shape[-1]
    assert d & (d - 1) == 0, f"{d} is no power of two"
    x = x.contiguous()
    out = torch.empty_like(x)
    n = x.numel() // d
    if n:
        rows = max(1, TILE // d)
        constants = {"D": d, "LOG": d.bit_length() - 1, "GROUP": group, "ROWS": rows, "UPCAST": UPCAST, **E2M1}
        _hadamard[(triton.cdiv(n, rows),)](x, out, n, d**-0.5, **constants, num_warps=WARPS, enable_fp_fusion=False)
    return out


def norm_rotate(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, kv_group: int) -> Tensor:
    """Norm rows [t, (h,) d], rotate them, round KV where there is a group: `kernels.rope.reference.NormRotate`."""
    width, half = x.shape[-1], cos.shape[-1]
    assert 2 * half <= width, f"{half} pairs in {width} columns"
    assert width % 2 == 0, f"{width} columns"
    assert not kv_group or (width - 2 * half) % kv_group == 0, f"{width - 2 * half} columns in groups of {kv_group}"
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    out = torch.empty_like(x)
    if rows := x.numel() // width:
        block = max(2, kv_group, triton.next_power_of_2(width))
        constants = {"WEIGHTED": weight is not None, "GROUP": kv_group, "BLOCK": block, "UPCAST": UPCAST}
        _norm_rotate[(rows,)](
            x, weight, cos, sin, out, x.shape[1] if x.ndim == 3 else 1, width, eps, half, **constants,
            num_warps=max(1, min(8, block // 256)), enable_fp_fusion=False,
        )  # fmt: skip
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
