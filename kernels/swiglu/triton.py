"""The experts' activation, element by element; `experts` applies the same to sums that it has in registers."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fathom.kernels.formats.triton_rounding import UPCAST, rounded

BLOCK = 1024
LOG2E = tl.constexpr(float(torch.tensor(math.log2(math.e))))  # in fp32, and what that leaves
LOG2E_REST = tl.constexpr(math.log2(math.e) - LOG2E.value)
LN2 = tl.constexpr(math.log(2))


@triton.jit
def exponential(x):
    """e^x of fp32 to a few units in the last place, as ``2^(x log2(e))``.

    `tl.exp` rounds that product, by up to half a unit of a number of size |x|, which moves the power by |x| 2^-24 of
    itself and more. What the rounding leaves, below 2^-16, multiplies the power here.
    """
    power = x * LOG2E
    left = tl.where(tl.abs(power) < float("inf"), tl.fma(x, LOG2E, -power) + x * LOG2E_REST, 0.0)
    return tl.exp2(power) * tl.fma(left, LN2, 1.0)


@triton.jit
def activation(gate, up, limit):
    """Clamped SwiGLU of fp32 numbers; comparisons, unlike a minimum, keep NaN."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return tl.div_rn(gate, 1.0 + exponential(-gate)) * up


@triton.jit
def _swiglu(
    gate, up, weight, out, columns, gate_stride, up_stride, limit,
    WEIGHTED: tl.constexpr, BLOCK: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    g = tl.load(gate + row * gate_stride + column, inside, 0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, inside, 0.0).to(tl.float32)
    wide = activation(g, u, limit)
    if WEIGHTED:
        wide *= tl.load(weight + row)
    tl.store(out + row * columns + column, rounded(wide, out.dtype.element_ty, UPCAST), inside)


def swiglu(gate: Tensor, up: Tensor, limit: float, weight: Tensor | None) -> Tensor:
    """Clamped SwiGLU: `kernels.swiglu.reference.swiglu`."""
    assert gate.shape == up.shape, f"gate is {tuple(gate.shape)}, up {tuple(up.shape)}"
    gate, up = (part if part.stride(-1) == 1 else part.contiguous() for part in (gate, up))  # halves of one matrix stay
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        t, columns = gate.shape
        factors = gate if weight is None else weight.contiguous()
        _swiglu[t, triton.cdiv(columns, BLOCK)](
            gate, up, factors, out, columns, gate.stride(0), up.stride(0),
            float(limit), WEIGHTED=weight is not None, BLOCK=BLOCK, UPCAST=UPCAST, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out
