"""Rounding on store, exact in the compiler and in the interpreter."""

import triton
import triton.language as tl

# Whether kernels run in Triton's interpreter, on the CPU: true in the tests. A kernel takes it as a constexpr.
UPCAST: bool = triton.knobs.runtime.interpret


@triton.jit
def rounded(x, dtype: tl.constexpr, UPCAST: tl.constexpr):
    """fp32 `x` in `dtype` (tl.float32, tl.bfloat16 or tl.float16), to nearest even.

    The interpreter truncates when it converts to bf16; there the half of the last place is added to the bits first,
    which is the same rounding for every finite number (NaN with a full mantissa would overflow, so it is kept as is).
    """
    if UPCAST and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        up = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, up.to(tl.float32, bitcast=True), x)
    return x.to(dtype)
