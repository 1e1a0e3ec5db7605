"""Rounding on store, exact in the compiler and in the interpreter."""

import triton
import triton.language as tl

# Whether kernels run in Triton's interpreter, on the CPU: true in the tests. A kernel takes it as a constexpr.
UPCAST: bool = triton.knobs.runtime.interpret


@triton.jit
def rounded(x, dtype: tl.constexpr, UPCAST: tl.constexpr):
    """fp32 `x` in `dtype` (tl.float32, tl.bfloat16 or tl.float16), to nearest even.

    The interpreter's conversion to bf16 truncates, and gets subnormals wrong; there the half of the last place is
    added to the bits, which is the same rounding, and what they begin with is the number. NaN, whose mantissa might
    overflow or lie in the lower bits alone, becomes the plain one.
    """
    if UPCAST and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        up = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, up, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def widened(x, UPCAST: tl.constexpr):
    """`x` in fp32; the interpreter's own conversion of bf16 gets subnormals wrong, which bit-for-bit results show."""
    if UPCAST and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)
