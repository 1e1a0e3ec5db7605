"""The routed experts of many tokens on Hopper: FP4 weights become a tensor core's operand in registers.

`experts_fp8` multiplies codes. Deployed numerics round an expert's input to E4M3 with a power of two for each 128
columns. An E2M1 weight has two bits of mantissa, and E4M3 four of exponent: times its scale, over a power of two of its
whole row, it is an E4M3 number too where the row's scales lie within 2^11 of each other. So codes are multiplied by
codes, 128 columns at once:

``y[t, r] = 2^base[r] sum_g p[t, g] sum_(c of g) (w[r, c] s[r, c / 32] 2^-base[r]) x[t, c]``, g groups of 128 columns

Nothing is rounded but by the sums, as in `kernels.linear.triton_codes`. Rows whose scales lie further apart, or are no
numbers, are multiplied without them, 32 columns at once: a program looks at its rows first, and does all in one way.

`experts` multiplies numbers in bf16, which holds a weight times its scale over the largest of its row exactly, where a
row's scales lie within 2^124: ``2^most[r] sum_c (w[r, c] s[r, c / 32] 2^-most[r]) x[t, c]``, one sum in fp32. Columns
of x lie as words of weights are taken apart: they are not added up in the order of `kernels.linear.triton`.
"""

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from fathom.kernels.experts import triton as by_tiles
from fathom.kernels.experts.reference import FEW
from fathom.kernels.experts.triton import (
    _block,
    _Given,
    _Pairs,
    _pairs,
    _sort_pairs,
    _sorting_nbytes,
    check_up,
    sum_slots,
)
from fathom.kernels.formats.groups import LINEAR_GROUP
from fathom.kernels.formats.stored import Fp4, Stack, members
from fathom.kernels.formats.triton import e2m1, e4m3, e8m0, power_of_two
from fathom.kernels.formats.triton_rounding import UPCAST, rounded, widened
from fathom.kernels.linear.triton import Tile
from fathom.kernels.linear.triton_codes import CODES
from fathom.kernels.quantise.triton import fp8_codes, simulate_fp8
from fathom.kernels.swiglu.triton import activation
from fathom.kernels.target import blackwell, multiplies_fp8

APART = tl.constexpr(11)  # E8M0 codes that scales of a row may differ by: 0.5 to 6 times 2^11 are normal in E4M3
APART_NUMBERS = tl.constexpr(124)  # the same of numbers: 2^-8 times 0.5 times 2^-124 is a number in bf16; so far apart
# are a block of zeros, whose scale is 2^-126 by DeepSeek's rule, and weights of less than 8
LEFT = tl.constexpr(32)  # pairs of an expert's last block, and twice as many, that have a tile of their own
_ONE = tl.constexpr(245)  # of `exponent` of numbers: 2^-8 of a weight, about what it is with its scale; sums of that ..
_LIFT = tl.constexpr(2.0**8)  # .. times this stay finite where those of weights do
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
def _numbers_of_e2m1(w, exponent, UPCAST: tl.constexpr):
    """Four nibbles of E2M1 in each word `w` [rows, n] int16, times 2^(exponent - 253): bf16, [rows, n] each.

    `exponent` [rows, n] int32, 121 to 254, so that these are numbers in bf16; of zeros it may be any.
    """
    if UPCAST:
        w, power = w.to(tl.int32), (exponent << 23).to(tl.float32, bitcast=True)
        first = e2m1((w & 15).to(tl.uint32)) * 2.0**-126 * power
        second = e2m1(((w >> 4) & 15).to(tl.uint32)) * 2.0**-126 * power
        third = e2m1(((w >> 8) & 15).to(tl.uint32)) * 2.0**-126 * power
        return first, second, third, e2m1(((w >> 12) & 15).to(tl.uint32)) * 2.0**-126 * power
    # A product with two powers of two copies a nibble's sign and its size to their places in bf16, as a number that is
    # 2^-126 of it: in two words at once, which are independent of each other.
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 two, later;
        and.b32 two, $4, 0x000F000F;
        mul.lo.u32 two, two, 0x1040;
        and.b32 two, two, 0x81C081C0;
        mul.bf16x2 $0, two, $5;
        and.b32 two, $4, 0x00F000F0;
        mul.lo.u32 two, two, 0x0104;
        and.b32 two, two, 0x81C081C0;
        mul.bf16x2 $1, two, $5;
        shr.u32 later, $4, 8;
        and.b32 two, later, 0x000F000F;
        mul.lo.u32 two, two, 0x1040;
        and.b32 two, two, 0x81C081C0;
        mul.bf16x2 $2, two, $5;
        and.b32 two, later, 0x00F000F0;
        mul.lo.u32 two, two, 0x0104;
        and.b32 two, two, 0x81C081C0;
        mul.bf16x2 $3, two, $5;
        }""",
        "=&r,=&r,=&r,=&r,r,r", [w, (exponent << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _sizes(exponent):
    """E4M3 codes of E2M1's sizes 0, .5, 1, 1.5 | 2, 3, 4, 6 times 2^(exponent - 6), a byte each; exponents 1 to 12."""
    return exponent * 0x08080800 + 0x0C080000, exponent * 0x08080808 + 0x1C181410


@triton.jit
def _weights(w, exponent, NUMBERS: tl.constexpr, UPCAST: tl.constexpr):
    """E2M1 in bytes, of NUMBERS in words, [rows, n] times a power of two of the `exponent` [rows, n]: an operand."""
    ROWS: tl.constexpr = w.shape[0]
    N: tl.constexpr = w.shape[1]
    if NUMBERS:
        first, second, third, fourth = _numbers_of_e2m1(w, exponent, UPCAST)
        four = tl.join(tl.join(first, third), tl.join(second, fourth))
        found = tl.reshape(tl.permute(four, (0, 2, 3, 1)), (ROWS, 4 * N))
    else:
        low, high = _sizes(exponent)
        first, second = _codes_of_e2m1(w, low, high, UPCAST)
        found = tl.reshape(tl.permute(tl.join(first, second), (0, 2, 1)), (ROWS, 2 * N))
    return found


@triton.jit
def _product(x, w, total, NUMBERS: tl.constexpr, ACROSS: tl.constexpr, UPCAST: tl.constexpr):
    """Of x [tokens, n] and w [rows, n], added to `total` where it is not None: [rows, tokens], ACROSS the other way."""
    if UPCAST:
        x = widened(x, UPCAST) if NUMBERS else e4m3(x, tl.float32, UPCAST)
    return tl.dot(x, w.T, total, input_precision="ieee") if ACROSS else tl.dot(w, x.T, total, input_precision="ieee")


@triton.jit
def _of_tokens(numbers, ACROSS: tl.constexpr):
    """One number a token, beside a `_product`."""
    return numbers[:, None] if ACROSS else numbers[None, :]


@triton.jit
def _of_rows(numbers, ACROSS: tl.constexpr):
    return numbers[None, :] if ACROSS else numbers[:, None]


@triton.jit
def _scaled_before(
    total, x, powers, lines, data, scale, base, groups,
    NUMBERS: tl.constexpr, ACROSS: tl.constexpr, JOINED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Products of weights times their scales over a power of two of their row, 128 columns at once.

    Numbers JOINED to one product, or in four, in the same order: of kernels like these an H200 was faster with one for
    w2, with several for w1 and w3.
    """
    ROWS: tl.constexpr = data.shape[0]
    HELD: tl.constexpr = 32 if NUMBERS else 64  # words or bytes of 128 columns
    words = tl.multiple_of(data[:, None] + tl.arange(0, HELD)[None, :], (1, HELD // 4))
    found = tl.load(scale)
    if not NUMBERS:
        power = tl.load(powers)
    for step in range(groups):
        ahead = tl.minimum(step + 1, groups - 1)  # loaded a step before they are needed
        found_ahead = tl.load(scale + ahead)
        if not NUMBERS:
            power_ahead = tl.load(powers + ahead * lines)
        exponent = ((found[:, None] >> (8 * tl.arange(0, 4))[None, :]) & 255) - base[:, None]
        exponent = tl.reshape(tl.broadcast_to(exponent[:, :, None], (ROWS, 4, HELD // 4)), (ROWS, HELD))
        packed = tl.load(words + step * HELD)
        if NUMBERS and not JOINED:
            first, second, third, fourth = _numbers_of_e2m1(packed, exponent, UPCAST)
            part = x[:, None] + (step * 128 + tl.arange(0, 32))[None, :]
            total = _product(tl.load(part), first, total, NUMBERS, ACROSS, UPCAST)
            total = _product(tl.load(part + 32), second, total, NUMBERS, ACROSS, UPCAST)
            total = _product(tl.load(part + 64), third, total, NUMBERS, ACROSS, UPCAST)
            total = _product(tl.load(part + 96), fourth, total, NUMBERS, ACROSS, UPCAST)
        else:
            w = _weights(packed, exponent, NUMBERS, UPCAST)
            given = tl.load(x[:, None] + (step * 128 + tl.arange(0, 128))[None, :])
            part = _product(given, w, total if NUMBERS else None, NUMBERS, ACROSS, UPCAST)
            total = part if NUMBERS else tl.fma(part, _of_tokens(e8m0(power), ACROSS), total)
            if not NUMBERS:
                power = power_ahead
        found = found_ahead
    return total


@triton.jit
def _scaled_behind(
    total, x, powers, lines, data, scale, exponent, groups,
    NUMBERS: tl.constexpr, ACROSS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The same of weights times 2^exponent alone, 32 columns at once, whose sums are multiplied by the scales."""
    ROWS: tl.constexpr = data.shape[0]
    column = tl.arange(0, 32)
    HELD: tl.constexpr = 8 if NUMBERS else 16
    RUN: tl.constexpr = 32 if NUMBERS else 64  # columns of x beside each other come from that many apart
    words = tl.multiple_of(data[:, None] + tl.arange(0, HELD)[None, :], (1, HELD))
    exponent = tl.full([ROWS, HELD], exponent, tl.int32)
    for step in range(groups * 4):
        group, quarter = step // 4, step % 4
        w = _weights(tl.load(words + step * HELD), exponent, NUMBERS, UPCAST)
        place = group * 128 + column // HELD * RUN + quarter * HELD + column % HELD
        part = _product(tl.load(x[:, None] + place[None, :]), w, None, NUMBERS, ACROSS, UPCAST)
        if not NUMBERS:
            part *= _of_tokens(e8m0(tl.load(powers + group * lines)), ACROSS)
        total += part * _of_rows(e8m0((tl.load(scale + group) >> (8 * quarter)) & 255), ACROSS)
    return total


@triton.jit
def _sums_of_codes(
    x, powers, lines, data, scale, columns, WORDS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    JOINED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Products [TOKENS, ROWS] of rows that begin at `x` and `powers` [TOKENS], and at `data` and `scale` [ROWS].

    Codes of x lie in `halves`, see `fp8_codes`, and its powers `lines` apart; numbers lie as `_numbers` puts them.
    `scale` has four E8M0 in a word.
    """
    NUMBERS: tl.constexpr = x.dtype.element_ty == tl.bfloat16
    # Codes are of x where there are as many tokens as a tensor core has rows, numbers always of w: what is decoded in
    # registers is multiplied from there.
    ACROSS: tl.constexpr = TOKENS >= 64 and not NUMBERS
    total = tl.zeros([TOKENS, ROWS] if ACROSS else [ROWS, TOKENS], tl.float32)
    groups = columns // 128
    scales = tl.load(scale[:, None] + tl.minimum(tl.arange(0, WORDS), groups - 1)[None, :])
    least, most = scales & 255, scales & 255
    for byte in tl.static_range(1, 4):
        one = (scales >> (8 * byte)) & 255
        least, most = tl.minimum(least, one), tl.maximum(most, one)
    least, most = tl.min(least, 1), tl.max(most, 1)
    near = tl.max(most - least) <= (APART_NUMBERS if NUMBERS else APART)
    if near & (tl.max(most) < LARGE):
        base = most - _ONE if NUMBERS else least - 1
        total = _scaled_before(total, x, powers, lines, data, scale, base, groups, NUMBERS, ACROSS, JOINED, UPCAST)
        total *= _of_rows(e8m0(most) * _LIFT if NUMBERS else power_of_two(base + 6), ACROSS)
    else:
        once = _ONE if NUMBERS else 6
        total = _scaled_behind(total, x, powers, lines, data, scale, once, groups, NUMBERS, ACROSS, UPCAST)
        total = total * _LIFT if NUMBERS else total
    return total if ACROSS else tl.trans(total)


@triton.jit
def _up_of_some(
    x, powers, weights, order, first, count, data, scale, out, lines, slots, rows, columns, limit,
    WORDS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Store what w2 is given of the `count` pairs from place `first` on, by a tile of TOKENS."""
    pair, inside = _pairs(order, first, count, TOKENS)
    token = pair // slots
    total = _sums_of_codes(
        x + token.to(tl.int64) * columns, powers + token, lines, data, scale, columns, WORDS, ROWS, TOKENS,
        JOINED=False, UPCAST=UPCAST,
    )  # fmt: skip
    DTYPE: tl.constexpr = out.dtype.element_ty
    total = rounded(total, DTYPE, UPCAST).to(tl.float32)
    gate, up = tl.split(tl.reshape(total, (TOKENS, ROWS // 2, 2)))
    inner = activation(gate, up, limit) * tl.load(weights + pair, inside, 0.0)[:, None]
    own = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    mask = inside[:, None] & (own < rows)[None, :]
    tl.store(out + pair.to(tl.int64)[:, None] * rows + own[None, :], rounded(inner, DTYPE, UPCAST), mask)


@triton.jit(do_not_specialize=["slots", "lines"])
def _gate_up_of_codes(
    x, powers, weights, order, starts, counts, data1, scale1, data3, scale3, out, lines, slots, experts, rows, columns,
    jump, stride, scale_jump, scale_stride, limit,
    EXPERTS: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """What w2 is given, not rounded to blocks yet. Rows of w1 and w3 take turns: a thread has both of a pair.

    What is left for an expert's last block has a smaller tile where that holds it: with every expert's last of 128 an
    H200 took 6.7 ms where it takes 5.1, of 4096 tokens that a router had dealt out.
    """
    expert, first, count = _block(tl.program_id(1), starts, counts, experts, EXPERTS, TOKENS)
    if expert >= experts:
        return
    both = tl.arange(0, ROWS)
    row = tl.minimum(tl.program_id(0) * (ROWS // 2) + both // 2, rows - 1).to(tl.int64)
    data = tl.where(both % 2 == 0, data1, data3) + expert.to(tl.int64) * jump + row * stride
    scale = tl.where(both % 2 == 0, scale1, scale3) + expert.to(tl.int64) * scale_jump + row * scale_stride
    for twice in tl.static_range(2):
        if (LEFT << twice) < TOKENS:  # noqa: SIM102 (it is a constant)
            if count <= (LEFT << twice):
                _up_of_some(
                    x, powers, weights, order, first, count, data, scale, out, lines, slots, rows, columns, limit,
                    WORDS, ROWS, LEFT << twice, UPCAST,
                )  # fmt: skip
                return
    _up_of_some(
        x, powers, weights, order, first, count, data, scale, out, lines, slots, rows, columns, limit,
        WORDS, ROWS, TOKENS, UPCAST,
    )  # fmt: skip


@triton.jit
def _down_of_some(
    x, powers, order, first, count, data, scale, out, lines, row, rows, columns,
    WORDS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Store rows of the outputs of the `count` pairs from place `first` on, by a tile of TOKENS."""
    pair, inside = _pairs(order, first, count, TOKENS)
    total = _sums_of_codes(
        x + pair.to(tl.int64) * columns, powers + pair, lines, data, scale, columns, WORDS, ROWS, TOKENS,
        JOINED=True, UPCAST=UPCAST,
    )  # fmt: skip
    target = out + pair.to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(target, rounded(total, out.dtype.element_ty, UPCAST), inside[:, None] & (row < rows)[None, :])


@triton.jit(do_not_specialize=["lines"])
def _down_of_codes(
    x, powers, order, starts, counts, data, scale, out, lines, experts, rows, columns, jump, stride, scale_jump,
    scale_stride,
    EXPERTS: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A slot's output; tiles as in `_gate_up_of_codes`."""
    expert, first, count = _block(tl.program_id(1), starts, counts, experts, EXPERTS, TOKENS)
    if expert >= experts:
        return
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    own = tl.minimum(row, rows - 1).to(tl.int64)
    data += expert.to(tl.int64) * jump + own * stride
    scale += expert.to(tl.int64) * scale_jump + own * scale_stride
    for twice in tl.static_range(2):
        if (LEFT << twice) < TOKENS:  # noqa: SIM102
            if count <= (LEFT << twice):
                _down_of_some(
                    x, powers, order, first, count, data, scale, out, lines, row, rows, columns,
                    WORDS, ROWS, LEFT << twice, UPCAST,
                )  # fmt: skip
                return
    _down_of_some(
        x, powers, order, first, count, data, scale, out, lines, row, rows, columns, WORDS, ROWS, TOKENS, UPCAST
    )


def experts_fp8(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Stack, w3: Stack, w2: Stack, limit: float, *, deployed: bool,
    summed: bool = True, total: int = 0,
) -> Tensor:  # fmt: skip
    """`experts`; where they take FP4 matrices whose inputs are rounded, codes by codes."""
    if not deployed or not _taken(x, ids, w1, w3, w2):
        return experts(x, ids, weights, w1, w3, w2, limit, deployed=deployed, summed=summed, total=total)
    return _experts(x, ids, weights, w1, w3, w2, limit, _codes, summed=summed, total=total)


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Stack, w3: Stack, w2: Stack, limit: float, *, deployed: bool,
    summed: bool = True, total: int = 0,
) -> Tensor:  # fmt: skip
    """`kernels.experts.triton.experts`, of numbers where more than FEW tokens in bf16 go to FP4 matrices on Hopper.

    Blackwell multiplies FP4 as it is; words of matrices and scales must lie whole.
    """
    if not _taken(x, ids, w1, w3, w2):
        return by_tiles.experts(x, ids, weights, w1, w3, w2, limit, deployed=deployed, summed=summed, total=total)
    given = partial(_numbers, deployed=deployed)
    return _experts(x, ids, weights, w1, w3, w2, limit, given, summed=summed, total=total)


def experts_up(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Stack, w3: Stack, limit: float, *, deployed: bool
) -> Tensor:
    """What w2 of each of a token's experts is given: the first half of `experts`."""
    if not _taken(x, ids, w1, w3):
        return by_tiles.experts_up(x, ids, weights, w1, w3, limit, deployed=deployed)
    check_up(x, ids, weights, w1, w3)
    pairs, tile, _ = _sorted(ids, w1)
    out: Tensor = _up(pairs, _numbers(x, deployed=deployed), weights, w1, w3, limit, tile).unflatten(0, ids.shape)
    return out


def experts_down(a: Tensor, ids: Tensor, w2: Stack, *, deployed: bool) -> Tensor:
    """Sum of the experts' outputs: the second half of `experts`."""
    if not _taken(a, ids, w2):
        return by_tiles.experts_down(a, ids, w2, deployed=deployed)
    pairs, _, tile = _sorted(ids, w2)
    return _outputs(_down(pairs, _numbers(a.flatten(0, 1), deployed=deployed), w2, tile), ids, summed=True)


def _experts(
    x: Tensor, ids: Tensor, weights: Tensor, w1: Stack, w3: Stack, w2: Stack, limit: float,
    given: Callable[[Tensor], _Given], *, summed: bool = True, total: int = 0,
) -> Tensor:  # fmt: skip
    """`experts` of what `given` makes of inputs; what w2 is given ends with that."""
    check_up(x, ids, weights, w1, w3)
    assert w2.shape == (w1.shape[1], w1.shape[0]), f"w1 {w1.shape}, w2 {w2.shape}"
    pairs, up, down = _sorted(ids, w1, total)
    a = given(_up(pairs, given(x), weights, w1, w3, limit, up))
    return _outputs(_down(pairs, a, w2, down), ids, summed=summed)


def _taken(x: Tensor, ids: Tensor, *matrices: Stack) -> bool:
    """Whether calls of these matrices are multiplied here."""
    if len(ids) <= FEW or not ids.numel() or x.dtype != torch.bfloat16 or not multiplies_fp8() or blackwell():
        return False
    return all(isinstance(of, Fp4) and of.shape[1] % LINEAR_GROUP == 0 and _whole(of) for of in matrices)


def _codes(x: Tensor) -> _Given:
    codes, powers = fp8_codes(x, LINEAR_GROUP, by_group=True, halves=True)
    return _Given(codes.view(CODES), powers)


def _numbers(x: Tensor, *, deployed: bool) -> _Given:
    """Of 128 columns every fourth from the first on, then those from the second on: see `_numbers_of_e2m1`."""
    if deployed:
        x = simulate_fp8(x, LINEAR_GROUP)
    x = x.unflatten(1, (-1, 32, 4)).mT.reshape(x.shape)
    return _Given(x, x)


def _sorted(ids: Tensor, stack: Stack, total: int = 0) -> tuple[_Pairs, Tile, Tile]:
    """Pairs, and a tile of each half, as `kernels.experts.triton._sorted`."""
    up, down = _tiles(ids.numel(), total or members(stack))
    return _sort_pairs(ids.contiguous(), members(stack), up.tokens), up, down


def _up(pairs: _Pairs, given: _Given, weights: Tensor, w1: Stack, w3: Stack, limit: float, tile: Tile) -> Tensor:
    (inner, hidden), t = w1.shape, len(given.x)
    assert _strides(w1, given) == _strides(w3, given), "w1 and w3 lie differently"
    out = torch.empty(len(pairs.order), inner, dtype=torch.bfloat16, device=weights.device)
    _gate_up_of_codes[triton.cdiv(2 * inner, tile.rows), pairs.blocks](
        *given, weights.contiguous(), *pairs[:3], *_planes(w1, given), *_planes(w3, given), out, t, pairs.slots,
        members(w1), inner, hidden, *_strides(w1, given), float(limit), **_constants(w1, tile),
    )  # fmt: skip
    return out


def _down(pairs: _Pairs, given: _Given, w2: Stack, tile: Tile) -> Tensor:
    (hidden, inner), n = w2.shape, len(given.x)
    assert given.x.shape[1] == inner, f"given {given.x.shape[1]} columns, w2 {inner}"
    y = torch.empty(n, hidden, dtype=torch.bfloat16, device=given.x.device)
    _down_of_codes[triton.cdiv(hidden, tile.rows), pairs.blocks](
        *given, *pairs[:3], *_planes(w2, given), y, n, members(w2), hidden, inner, *_strides(w2, given),
        **_constants(w2, tile),
    )  # fmt: skip
    return y


def _outputs(y: Tensor, ids: Tensor, *, summed: bool) -> Tensor:
    of_slots = y.unflatten(0, ids.shape)
    out: Tensor = sum_slots(of_slots, ids) if summed else of_slots
    return out


def _tiles(pairs: int, experts: int) -> tuple[Tile, Tile]:
    """For both halves; as many tokens as an expert gets if all get the same, up to 128."""
    even = pairs // experts
    if even <= 32:
        both = Tile(128, 16, 128, 4, 4) if even <= 16 else Tile(64, 32, 128, 4, 4)
        return both, both
    if even <= 64:
        return Tile(128, 64, 128, 4, 4), Tile(128, 64, 128, 4, 4)
    return Tile(128, 128, 128, 8, 3), Tile(128, 128, 128, 8, 3)


def _whole(stack: Fp4) -> bool:
    """Whether rows begin at 16 bytes, and their scales at four."""
    held = zip(stack, (16, 4), strict=True)
    return not any(at % step for plane, step in held for at in (plane.data_ptr(), *plane.stride()[:2]))


def _planes(stack: Stack, given: _Given) -> tuple[Tensor, Tensor]:
    """Bytes of matrices, or words of two where numbers are given, and scales in words of four."""
    assert isinstance(stack, Fp4), f"matrices are {type(stack).__name__}"
    element = torch.int16 if given.x.dtype == torch.bfloat16 else torch.uint8
    return stack.data.view(element), stack.scale.view(torch.int32)


def _strides(stack: Stack, given: _Given) -> tuple[int, int, int, int]:
    """Of experts and of rows, in elements of both planes."""
    data, scale = _planes(stack, given)
    return data.stride(0), data.stride(1), scale.stride(0), scale.stride(1)


def _constants(stack: Stack, tile: Tile) -> dict[str, int | bool]:
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


def experts_scratch(
    tokens: int, slots: int, experts: int, hidden: int, inner: int, form: str, item: int, *, deployed: bool,
    summed: bool = True,
) -> int:  # fmt: skip
    """Bytes allocated in `experts` of up to so many tokens, whichever way they go on the GPU that there is."""
    sizes = tokens, slots, experts, hidden, inner, form, item
    tiles = by_tiles.experts_scratch(*sizes, deployed=deployed, summed=summed)
    given, middle, y = (tokens * n * item for n in (hidden, slots * inner, slots * hidden))
    first = max(given * (1 + deployed), given + middle)  # rounded inputs beside those in order
    here = max(first, (2 + deployed) * middle, middle + y, y + tokens * hidden * 4 * summed)
    return _either(tiles, here, tokens, slots, experts, form, item)


def experts_up_scratch(
    tokens: int, slots: int, experts: int, hidden: int, inner: int, form: str, item: int, *, deployed: bool
) -> int:
    """Bytes allocated in `experts_up`, its result included."""
    tiles = by_tiles.experts_up_scratch(tokens, slots, experts, hidden, inner, form, item, deployed=deployed)
    given, middle = tokens * hidden * item, tokens * slots * inner * item
    return _either(tiles, max(given * (1 + deployed), given + middle), tokens, slots, experts, form, item)


def experts_down_scratch(
    tokens: int, slots: int, experts: int, hidden: int, inner: int, form: str, item: int, *, deployed: bool
) -> int:
    """Bytes allocated in `experts_down`, where its input lies in pieces, which are copied."""
    tiles = by_tiles.experts_down_scratch(tokens, slots, experts, hidden, inner, form, item, deployed=deployed)
    middle, y = tokens * slots * inner * item, tokens * slots * hidden * item
    here = max(2 * middle, middle + y, y + tokens * hidden * 4)
    return _either(tiles, here, tokens, slots, experts, form, item)


def _either(tiles: int, here: int, tokens: int, slots: int, experts: int, form: str, item: int) -> int:
    """Bytes of a call by `tiles`, or `here` beside sorted pairs, of the two that may be: the more."""
    if tokens <= FEW or form != "FP4" or item != torch.bfloat16.itemsize:
        return tiles
    return max(tiles, here + _sorting_nbytes(tokens, slots, experts, 0, 0, form, deployed=False))
