"""The routed experts of many tokens on Hopper's FP8 tensor cores: FP4 weights as E4M3 codes, times codes.

Deployed numerics round an expert's input to E4M3 with a power of two for each 128 columns. An E2M1 weight has two bits
of mantissa, and E4M3 four of exponent: times its scale, over a power of two of its whole row, it is an E4M3 number too
where the row's scales lie within 2^11 of each other. So codes are multiplied by codes, 128 columns at once:

``y[t, r] = 2^base[r] sum_g p[t, g] sum_(c of g) (w[r, c] s[r, c / 32] 2^-base[r]) x[t, c]``, g groups of 128 columns

Nothing is rounded but by the sums, as in `kernels.linear.triton_codes`. Rows whose scales lie further apart, or are no
numbers, are multiplied without them, 32 columns at once: a program looks at its rows first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fathom.kernels.experts.reference import FEW
from fathom.kernels.experts.triton import _located, _Pairs, _sort_pairs, check_up, experts, slots_summed
from fathom.kernels.formats.groups import LINEAR_GROUP
from fathom.kernels.formats.stored import Fp4, Stack, members
from fathom.kernels.formats.triton import e4m3, e8m0, power_of_two
from fathom.kernels.formats.triton_rounding import UPCAST, rounded
from fathom.kernels.linear.triton import Tile
from fathom.kernels.linear.triton_codes import CODES
from fathom.kernels.quantise.triton import fp8_codes
from fathom.kernels.swiglu.triton import activation
from fathom.kernels.target import blackwell, multiplies_fp8

APART = tl.constexpr(11)  # E8M0 codes that scales of a row may differ by: 0.5 to 6 times 2^11 are normal in E4M3
LARGE = tl.constexpr(244)  # from this E8M0 code on the other way is taken: NaN, and what takes a base beyond 2^127


@triton.jit
def _codes_of_e2m1(w, low, high, UPCAST: tl.constexpr):
    """Bytes `w` [rows, n] of E2M1 as E4M3: of each 4 bytes the first half, and the second half, [rows, n] each.

    `low` and `high` [rows, n]: E4M3 codes of the eight sizes, four bytes each; the same for the 4 bytes of a word.
    """
    if UPCAST:
        ROWS: tl.constexpr = w.shape[0]
        N: tl.constexpr = w.shape[1]
        halves = tl.permute(tl.reshape(w, (ROWS, N // 4, 2, 2)), (0, 1, 3, 2))
        first, second = tl.split(halves)
        return _looked_up(first, low, high), _looked_up(second, low, high)
    # A permutation of bytes looks up four codes by four nibbles, whose highest bit must be 0; another one, whose bit
    # 3 repeats a byte's sign, makes the signs.
    first, second = tl.inline_asm_elementwise(
        """{
        .reg .b32 size, sign, second;
        and.b32 size, $2, 0x77777777;
        prmt.b32 $0, $3, $7, size;
        prmt.b32 sign, 0x80808080, 0x80808080, $2;
        shl.b32 sign, sign, 1;
        lop3.b32 $0, sign, 0x80808080, $0, 0xEA;
        shr.u32 size, size, 16;
        shr.u32 second, $2, 16;
        prmt.b32 $1, $3, $7, size;
        prmt.b32 sign, 0x80808080, 0x80808080, second;
        shl.b32 sign, sign, 1;
        lop3.b32 $1, sign, 0x80808080, $1, 0xEA;
        }""",
        "=&r,=&r,r,r,r,r,r,r,r,r,r", [w, low, high], dtype=(tl.int8, tl.int8), is_pure=True, pack=4,
    )  # fmt: skip
    return first.to(tl.float8e4nv, bitcast=True), second.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _looked_up(w, low, high):
    """Nibbles of bytes w [rows, n / 4, 2] in fp32, [rows, n]: what `_codes_of_e2m1` does, for the interpreter."""
    code = tl.reshape(tl.join(w & 15, w >> 4), low.shape).to(tl.int32)
    size = (tl.where((code & 4) != 0, high, low) >> (8 * (code & 3))) & 255
    return e4m3((size | ((code & 8) << 4)).to(tl.uint8), tl.float32, UPCAST=True)


@triton.jit
def _sizes(exponent):
    """E4M3 codes of E2M1's sizes 0, .5, 1, 1.5 | 2, 3, 4, 6 times 2^(exponent - 6), a byte each; exponents 1 to 12."""
    return exponent * 0x08080800 + 0x0C080000, exponent * 0x08080808 + 0x1C181410


@triton.jit
def _part(x, w, UPCAST: tl.constexpr, TOKENS: tl.constexpr):
    """A product of codes: [tokens, rows], or of fewer tokens than tensor cores have rows [rows, tokens]."""
    x = e4m3(x, tl.float32, UPCAST) if UPCAST else x
    return tl.dot(x, w.T, input_precision="ieee") if TOKENS >= 64 else tl.dot(w, x.T, input_precision="ieee")


@triton.jit
def _zeros(ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """What `_part`s are added to."""
    return tl.zeros([TOKENS, ROWS], tl.float32) if TOKENS >= 64 else tl.zeros([ROWS, TOKENS], tl.float32)


@triton.jit
def _of_tokens(numbers, TOKENS: tl.constexpr):
    """One number a token, beside a `_part`."""
    return numbers[:, None] if TOKENS >= 64 else numbers[None, :]


@triton.jit
def _of_rows(numbers, TOKENS: tl.constexpr):
    return numbers[None, :] if TOKENS >= 64 else numbers[:, None]


@triton.jit
def _scaled_before(
    x, powers, lines, data, scale, base, groups, ROWS: tl.constexpr, TOKENS: tl.constexpr, UPCAST: tl.constexpr
):  # fmt: skip
    """Products of weights that are codes of E4M3 over a power of two of their row, 128 columns at once."""
    total, column = _zeros(ROWS, TOKENS), tl.arange(0, 128)
    words = tl.multiple_of(data[:, None] + tl.arange(0, 64)[None, :], (1, 16))
    found, power = tl.load(scale), tl.load(powers)
    for step in range(groups):
        ahead = tl.minimum(step + 1, groups - 1)  # loaded a step before they are needed
        found_ahead, power_ahead = tl.load(scale + ahead), tl.load(powers + ahead * lines)
        exponent = ((found[:, None] >> (8 * tl.arange(0, 4))[None, :]) & 255) - base[:, None]
        low, high = _sizes(tl.reshape(tl.broadcast_to(exponent[:, :, None], (ROWS, 4, 16)), (ROWS, 64)))
        first, second = _codes_of_e2m1(tl.load(words + step * 64), low, high, UPCAST)
        w = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (ROWS, 128))
        part = _part(tl.load(x[:, None] + (step * 128 + column)[None, :]), w, UPCAST, TOKENS)
        total = tl.fma(part, _of_tokens(e8m0(power), TOKENS), total)
        found, power = found_ahead, power_ahead
    return total * _of_rows(power_of_two(base + 6), TOKENS)


@triton.jit
def _scaled_behind(
    x, powers, lines, data, scale, groups, ROWS: tl.constexpr, TOKENS: tl.constexpr, UPCAST: tl.constexpr
):  # fmt: skip
    """The same of weights without their scales, 32 columns at once, whose sums are multiplied by these."""
    total, column = _zeros(ROWS, TOKENS), tl.arange(0, 32)
    words = tl.multiple_of(data[:, None] + tl.arange(0, 16)[None, :], (1, 16))
    low, high = _sizes(tl.full([ROWS, 16], 6, tl.int32))
    for step in range(groups * 4):
        group, quarter = step // 4, step % 4
        first, second = _codes_of_e2m1(tl.load(words + step * 16), low, high, UPCAST)
        w = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (ROWS, 32))
        place = group * 128 + column // 16 * 64 + quarter * 16 + column % 16
        part = _part(tl.load(x[:, None] + place[None, :]), w, UPCAST, TOKENS)
        part *= _of_tokens(e8m0(tl.load(powers + group * lines)), TOKENS)
        total += part * _of_rows(e8m0((tl.load(scale + group) >> (8 * quarter)) & 255), TOKENS)
    return total


@triton.jit
def _sums_of_codes(
    x, powers, lines, data, scale, columns, WORDS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Products [TOKENS, ROWS] of rows that begin at `x` and `powers` [TOKENS], and at `data` and `scale` [ROWS].

    Codes of x lie in `halves`, see `fp8_codes`, and its powers `lines` apart; `scale` has four E8M0 in a word.
    """
    groups = columns // 128
    scales = tl.load(scale[:, None] + tl.minimum(tl.arange(0, WORDS), groups - 1)[None, :])
    least, most = scales & 255, scales & 255
    for byte in tl.static_range(1, 4):
        one = (scales >> (8 * byte)) & 255
        least, most = tl.minimum(least, one), tl.maximum(most, one)
    least, most = tl.min(least, 1), tl.max(most, 1)
    if (tl.max(most - least) <= APART) & (tl.max(most) < LARGE):
        total = _scaled_before(x, powers, lines, data, scale, least - 1, groups, ROWS, TOKENS, UPCAST)
    else:
        total = _scaled_behind(x, powers, lines, data, scale, groups, ROWS, TOKENS, UPCAST)
    return total if TOKENS >= 64 else tl.trans(total)


@triton.jit(do_not_specialize=["slots", "lines"])
def _gate_up_of_codes(
    x, powers, weights, order, starts, counts, data1, scale1, data3, scale3, out, lines, slots, experts, rows, columns,
    jump, stride, scale_jump, scale_stride, limit,
    EXPERTS: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """What w2 is given, not rounded to blocks yet. Rows of w1 and w3 take turns: a thread has both of a pair."""
    expert, pair, inside = _located(tl.program_id(1), order, starts, counts, experts, EXPERTS, TOKENS)
    if expert >= experts:
        return
    both = tl.arange(0, ROWS)
    row = tl.minimum(tl.program_id(0) * (ROWS // 2) + both // 2, rows - 1).to(tl.int64)
    data = tl.where(both % 2 == 0, data1, data3) + expert.to(tl.int64) * jump + row * stride
    scale = tl.where(both % 2 == 0, scale1, scale3) + expert.to(tl.int64) * scale_jump + row * scale_stride
    token = pair // slots
    total = _sums_of_codes(
        x + token.to(tl.int64) * columns, powers + token, lines, data, scale, columns, WORDS, ROWS, TOKENS, UPCAST
    )
    DTYPE: tl.constexpr = out.dtype.element_ty
    total = rounded(total, DTYPE, UPCAST).to(tl.float32)
    gate, up = tl.split(tl.reshape(total, (TOKENS, ROWS // 2, 2)))
    inner = activation(gate, up, limit) * tl.load(weights + pair, inside, 0.0)[:, None]
    own = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    mask = inside[:, None] & (own < rows)[None, :]
    tl.store(out + pair.to(tl.int64)[:, None] * rows + own[None, :], rounded(inner, DTYPE, UPCAST), mask)


@triton.jit(do_not_specialize=["lines"])
def _down_of_codes(
    x, powers, order, starts, counts, data, scale, out, lines, experts, rows, columns, jump, stride, scale_jump,
    scale_stride,
    EXPERTS: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A slot's output."""
    expert, pair, inside = _located(tl.program_id(1), order, starts, counts, experts, EXPERTS, TOKENS)
    if expert >= experts:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    own = tl.minimum(row, rows - 1).to(tl.int64)
    data += expert.to(tl.int64) * jump + own * stride
    scale += expert.to(tl.int64) * scale_jump + own * scale_stride
    total = _sums_of_codes(
        x + pair.to(tl.int64) * columns, powers + pair, lines, data, scale, columns, WORDS, ROWS, TOKENS, UPCAST
    )
    target = out + pair.to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(target, rounded(total, out.dtype.element_ty, UPCAST), inside[:, None] & (row < rows)[None, :])


def experts_fp8(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Stack, w3: Stack, w2: Stack, limit: float, *, deployed: bool
) -> Tensor:
    """`kernels.experts.triton.experts`, where more than FEW tokens in bf16 go to FP4 matrices that are rounded for.

    Blackwell multiplies FP4 as it is; words of matrices and scales must lie whole.
    """
    narrow = deployed and x.dtype == torch.bfloat16 and multiplies_fp8() and not blackwell()
    exactly = x.shape[0] <= FEW or not ids.numel() or not narrow
    if exactly or not (isinstance(w1, Fp4) and isinstance(w3, Fp4) and isinstance(w2, Fp4)) or not _whole(w1, w3, w2):
        return experts(x, ids, weights, w1, w3, w2, limit, deployed=deployed)
    check_up(x, ids, weights, w1, w3)
    (inner, hidden), held = w1.shape, members(w1)
    assert w2.shape == (hidden, inner), f"w1 {w1.shape}, w2 {w2.shape}"
    assert inner % LINEAR_GROUP == 0, f"{inner} columns are no multiple of {LINEAR_GROUP}"
    ids = ids.contiguous()
    up_tile, down_tile = _tiles(ids.numel(), held)
    pairs = _sort_pairs(ids, held, up_tile.tokens)
    # what w2 is given ends with its codes
    codes = fp8_codes(_up(pairs, x, weights, w1, w3, limit, up_tile), LINEAR_GROUP, by_group=True, halves=True)
    return slots_summed(_down(pairs, codes, w2, down_tile).unflatten(0, ids.shape), ids)


def _up(pairs: _Pairs, x: Tensor, weights: Tensor, w1: Fp4, w3: Fp4, limit: float, tile: Tile) -> Tensor:
    codes, powers = fp8_codes(x, LINEAR_GROUP, by_group=True, halves=True)
    (t, hidden), inner = x.shape, w1.shape[0]
    (data1, scale1), (data3, scale3) = _planes(w1), _planes(w3)
    layout = _strides(w1)
    assert layout == _strides(w3), "w1 and w3 lie differently"
    out = x.new_empty(len(pairs.order), inner)
    _gate_up_of_codes[triton.cdiv(2 * inner, tile.rows), pairs.blocks](
        codes.view(CODES), powers, weights.contiguous(), *pairs[:3], data1, scale1, data3, scale3, out, t, pairs.slots,
        members(w1), inner, hidden, *layout, float(limit), **_constants(w1, tile),
    )  # fmt: skip
    return out


def _down(pairs: _Pairs, given: tuple[Tensor, Tensor], w2: Fp4, tile: Tile) -> Tensor:
    (codes, powers), (hidden, inner) = given, w2.shape
    n = len(codes)
    y = torch.empty(n, hidden, dtype=torch.bfloat16, device=codes.device)
    _down_of_codes[triton.cdiv(hidden, tile.rows), pairs.blocks](
        codes.view(CODES), powers, *pairs[:3], *_planes(w2), y, n, members(w2), hidden, inner, *_strides(w2),
        **_constants(w2, tile),
    )  # fmt: skip
    return y


def _tiles(pairs: int, experts: int) -> tuple[Tile, Tile]:
    """For both halves; as many tokens as an expert gets if all get the same, up to 128."""
    even = pairs // experts
    if even <= 32:
        both = Tile(128, 16, 128, 4, 4) if even <= 16 else Tile(64, 32, 128, 4, 4)
        return both, both
    if even <= 64:
        return Tile(128, 64, 128, 4, 4), Tile(128, 64, 128, 4, 4)
    return Tile(128, 128, 128, 8, 3), Tile(64, 128, 128, 4, 3)


def _whole(*stacks: Fp4) -> bool:
    """Whether rows begin at 16 bytes, and their scales at four."""
    held = [(plane, step) for stack in stacks for plane, step in zip(stack, (16, 4), strict=True)]
    return not any(at % step for plane, step in held for at in (plane.data_ptr(), *plane.stride()[:2]))


def _planes(stack: Fp4) -> tuple[Tensor, Tensor]:
    return stack.data.view(torch.uint8), stack.scale.view(torch.int32)


def _strides(stack: Fp4) -> tuple[int, int, int, int]:
    """Of experts and of rows, in bytes; of their scales, in words of four."""
    _, scale = _planes(stack)
    return stack.data.stride(0), stack.data.stride(1), scale.stride(0), scale.stride(1)


def _constants(stack: Fp4, tile: Tile) -> dict[str, int | bool]:
    return {
        "EXPERTS": triton.next_power_of_2(members(stack)),
        "WORDS": triton.next_power_of_2(stack.shape[1] // LINEAR_GROUP),
        "ROWS": tile.rows,
        "TOKENS": tile.tokens,
        "UPCAST": UPCAST,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "enable_fp_fusion": False,
    }
