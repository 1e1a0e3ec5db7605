"""Narrow formats in registers: codes to numbers, numbers to codes with a scale per block, and Hadamard's rotation."""

import triton
import triton.language as tl

from fathom.kernels.quantise.reference import E2M1_MAX, E4M3_MAX

E4M3_LARGEST: tl.constexpr = tl.constexpr(E4M3_MAX)
E2M1_LARGEST: tl.constexpr = tl.constexpr(E2M1_MAX)
E4M3_SMALLEST: tl.constexpr = tl.constexpr(1e-4)  # the smallest size of a block that its scale follows


@triton.jit
def e8m0(byte):
    """2^(byte - 127) in fp32; byte 0 is a subnormal, byte 255 NaN."""
    wide = byte.to(tl.uint32)
    return tl.where(wide == 0, 1 << 22, tl.where(wide == 255, 0x7FC00000, wide << 23)).to(tl.float32, bitcast=True)


@triton.jit
def e2m1(code):
    """uint32 codes 0 .. 15 in fp32: moved to the place of fp32's exponent they are 2^-126 of their value."""
    return (((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def e4m3(byte, dtype: tl.constexpr, UPCAST: tl.constexpr):
    """uint8 codes of E4M3 in `dtype`; of NaN the interpreter makes 480."""
    x = byte.to(tl.float8e4nv, bitcast=True).to(dtype)
    if UPCAST:
        x = tl.where((byte & 0x7F) == 0x7F, float("nan"), x)
    return x


# Codes of a word in fp32, two at a time through fp16: the hardware widens pairs of E4M3, and E2M1 moved to the same
# places is E4M3, 2^-6 of its value. Bytes of a word are columns in ascending order, of E2M1 the low nibble first.
E4M3_WORD: tl.constexpr = tl.constexpr("""{
.reg .b16 low, high;
mov.b32 {low, high}, $2;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}""")
E2M1_WORD: tl.constexpr = tl.constexpr("""{
.reg .b32 sign, size, even, odd;
.reg .b16 low, high;
shl.b32 sign, $4, 4;
and.b32 sign, sign, 0x80808080;
shl.b32 size, $4, 2;
and.b32 size, size, 0x1C1C1C1C;
or.b32 even, sign, size;
and.b32 sign, $4, 0x80808080;
shr.b32 size, $4, 2;
and.b32 size, size, 0x1C1C1C1C;
or.b32 odd, sign, size;
mov.b32 {low, high}, even;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $2, high;
mov.b32 {low, high}, odd;
cvt.rn.f16x2.e4m3x2 $1, low;
cvt.rn.f16x2.e4m3x2 $3, high;
}""")


@triton.jit
def halves(pair):
    """Both fp16 numbers of a word, the lower first, in fp32."""
    bits = pair.to(tl.uint32, bitcast=True)
    low = (bits & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    return low.to(tl.float32), (bits >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def eighths(x):
    """Eight parts of [..., 8], without their last axis."""
    a, b = tl.split(tl.reshape(x, x.shape[:-1] + [4, 2]))  # noqa: RUF005 (Triton knows no star)
    a, c = tl.split(tl.reshape(a, x.shape[:-1] + [2, 2]))  # noqa: RUF005
    b, d = tl.split(tl.reshape(b, x.shape[:-1] + [2, 2]))  # noqa: RUF005
    x0, x4 = tl.split(a)
    x1, x5 = tl.split(b)
    x2, x6 = tl.split(c)
    x3, x7 = tl.split(d)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def quarters(x):
    """Four parts of [..., 4], without their last axis."""
    a, b = tl.split(tl.reshape(x, x.shape[:-1] + [2, 2]))  # noqa: RUF005
    x0, x2 = tl.split(a)
    x1, x3 = tl.split(b)
    return x0, x1, x2, x3


@triton.jit
def e2m1_word(word, UPCAST: tl.constexpr):
    """The eight columns of int32 words of E2M1 codes, fp32, each 2^-6 of its value."""
    if UPCAST:
        codes = (tl.expand_dims(word, -1).to(tl.uint32, bitcast=True) >> (4 * tl.arange(0, 8))) & 15
        return eighths(e2m1(codes) * 0.015625)
    pairs = tl.inline_asm_elementwise(
        E2M1_WORD, "=r,=r,=r,=r,r", [word], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
    )
    c0, c2 = halves(pairs[0])
    c1, c3 = halves(pairs[1])
    c4, c6 = halves(pairs[2])
    c5, c7 = halves(pairs[3])
    return c0, c1, c2, c3, c4, c5, c6, c7


@triton.jit
def e4m3_word(word, UPCAST: tl.constexpr):
    """The four columns of int32 words of E4M3 codes, fp32."""
    if UPCAST:
        codes = (tl.expand_dims(word, -1).to(tl.uint32, bitcast=True) >> (8 * tl.arange(0, 4))) & 255
        return quarters(e4m3(codes.to(tl.uint8), tl.float32, UPCAST))
    pairs = tl.inline_asm_elementwise(E4M3_WORD, "=r,=r,r", [word], dtype=(tl.int32, tl.int32), is_pure=True, pack=1)
    c0, c1 = halves(pairs[0])
    c2, c3 = halves(pairs[1])
    return c0, c1, c2, c3


@triton.jit
def centroids(codes, table, row, inside, D: tl.constexpr, BITS: tl.constexpr):
    """What the codes of rows `row` [n] mean in `table` [2^BITS], [n, D] in its dtype; code 0 where not `inside` [n].

    Packed as in `kernels.formats.lloyd_max`, rows of D * BITS / 8 bytes: RUN codes begin and end with a byte.
    """
    RUN: tl.constexpr = 8 if BITS % 2 else 4 if BITS % 4 else 2 if BITS % 8 else 1
    SIZE: tl.constexpr = RUN * BITS // 8
    at = codes + row.to(tl.int64)[:, None] * (D * BITS // 8) + tl.arange(0, D // RUN)[None, :] * SIZE
    word = tl.load(at, inside[:, None], 0).to(tl.int64 if SIZE > 3 else tl.int32)
    for byte in tl.static_range(1, SIZE):
        word |= tl.load(at + byte, inside[:, None], 0).to(word.dtype) << (8 * byte)
    code = (word[:, :, None] >> (tl.arange(0, RUN) * BITS)[None, None, :]).to(tl.int32) & ((1 << BITS) - 1)
    return tl.load(table + tl.reshape(code, (row.shape[0], D)))


@triton.jit
def unit(size):
    """The power of two at or below `size`, fp32; 1 for 0 and what is smaller than any normal number."""
    power = (size.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(power > 0, power, 1.0)


@triton.jit
def hadamard(x, ROWS: tl.constexpr, D: tl.constexpr, STEPS: tl.constexpr):
    """`kernels.formats.coded_rows.hadamard` of rows [ROWS, D] fp32, to the bit but for its factor: D is 2^STEPS."""
    for _ in tl.static_range(STEPS):
        low, high = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, D // 2)), (0, 2, 1)))
        x = tl.reshape(tl.join(low + high, low - high), (ROWS, D))
    return x


@triton.jit
def rotated_query(x, signs, ROWS: tl.constexpr, D: tl.constexpr, STEPS: tl.constexpr, SIGNED: tl.constexpr):
    """Rows [ROWS, D] fp32 in the space of `CodedRows`, over the powers of two [ROWS] below their largest: both.

    Then fp16 holds them, 8 times finer than bf16.
    """
    size = unit(tl.max(tl.abs(x), 1))
    x = x / size[:, None]
    if SIGNED:
        x *= tl.load(signs + tl.arange(0, D))[None, :]
    return hadamard(x, ROWS, D, STEPS) * (D**-0.5), size


@triton.jit
def block_exponent(x, axis: tl.constexpr, SMALLEST: tl.constexpr, LARGEST: tl.constexpr):
    """E8M0 code (int32) of the scale of blocks of fp32 `x` along `axis`: that of `power_of_two_scale`, 255 for NaN.

    Sizes are compared as bits, where NaN is the largest of all: a maximum of floats would drop it.
    """
    size = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis).to(tl.float32, bitcast=True)
    ratio = tl.where(size < SMALLEST, SMALLEST, size) * (1.0 / LARGEST)
    bits = ratio.to(tl.int32, bitcast=True)
    return tl.where(ratio < float("inf"), (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32), 255)


@triton.jit
def power_of_two(exponent):
    """fp32 of an E8M0 code (int32); that of its inverse is ``power_of_two(254 - exponent)``, whose products are exact.

    A quotient is not: Triton's division of fp32 is an approximate one.
    """
    return tl.where(exponent == 255, float("nan"), (exponent << 23).to(tl.float32, bitcast=True))


@triton.jit
def narrow(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Round fp32 `x` to the format, nearest even, sign of zero kept: as in `kernels.quantise.cpu`."""
    bits = x.to(tl.int32, bitcast=True)
    power = tl.maximum(bits & 0x7F800000, (128 - BIAS) << 23).to(tl.float32, bitcast=True)  # 2^(1 - BIAS) at least
    magic = power * (1.5 * 2.0 ** (23 - MANTISSA))
    value = (x + magic) - magic
    return (value.to(tl.int32, bitcast=True) | (bits & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def code(value, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SIGN: tl.constexpr):
    """Bits (int32) of what `narrow` gave, the sign at bit SIGN; NaN has all bits below it."""
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    wide = size.to(tl.float32, bitcast=True)
    subnormal = size < ((128 - BIAS) << 23)
    steps = (tl.where(subnormal, wide, 0.0) * 2.0 ** (BIAS - 1 + MANTISSA)).to(tl.int32)
    found = tl.where(subnormal, steps, (size >> (23 - MANTISSA)) - ((127 - BIAS) << MANTISSA))
    found = tl.where(value == value, found, (1 << SIGN) - 1)
    return found | (((bits >> 31) & 1) << SIGN)


@triton.jit
def encoded(
    x, AXIS: tl.constexpr, SMALLEST: tl.constexpr, LARGEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    SIGN: tl.constexpr,
):  # fmt: skip
    """Bytes of `simulated`: codes, and of each block the E8M0 code of its scale, with an axis of one."""
    exponent = tl.expand_dims(block_exponent(x, AXIS, SMALLEST, LARGEST), AXIS)
    codes = code(narrow(x * power_of_two(254 - exponent), MANTISSA, BIAS), MANTISSA, BIAS, SIGN)
    return codes.to(tl.uint8), exponent.to(tl.uint8)


@triton.jit
def simulated(
    x, AXIS: tl.constexpr, SMALLEST: tl.constexpr, LARGEST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr
):
    """Round fp32 `x` as if stored: codes, and one scale for each block along AXIS."""
    exponent = tl.expand_dims(block_exponent(x, AXIS, SMALLEST, LARGEST), AXIS)
    return narrow(x * power_of_two(254 - exponent), MANTISSA, BIAS) * power_of_two(exponent)
