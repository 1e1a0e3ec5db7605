"""The streams of hyper-connections read into one input, and written after a sublayer: each number touched once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fathom.kernels.formats.triton_rounding import UPCAST, rounded, widened

COLUMNS = 2048  # of a program


@triton.jit
def _collapse(streams, pre, out, d, S: tl.constexpr, BLOCK: tl.constexpr, UPCAST: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(S):
        stream = widened(tl.load(streams + (token * S + k) * d + column, column < d, 0.0), UPCAST)
        x += tl.load(pre + token * S + k) * stream
    tl.store(out + token * d + column, rounded(x, out.dtype.element_ty, UPCAST), column < d)


@triton.jit
def _expand(y, streams, post, comb, new, d, S: tl.constexpr, BLOCK: tl.constexpr, UPCAST: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < d
    out = widened(tl.load(y + token * d + column, inside, 0.0), UPCAST)
    olds = ()
    for j in tl.static_range(S):
        olds += (widened(tl.load(streams + (token * S + j) * d + column, inside, 0.0), UPCAST),)  # type: ignore[assignment]
    for k in tl.static_range(S):
        mixed = tl.zeros([BLOCK], tl.float32)
        for j in tl.static_range(S):
            mixed += tl.load(comb + (token * S + j) * S + k) * olds[j]
        mixed += tl.load(post + token * S + k) * out
        tl.store(new + (token * S + k) * d + column, rounded(mixed, new.dtype.element_ty, UPCAST), inside)


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """Read the streams: `kernels.hyper.reference.collapse`."""
    t, s, d = streams.shape
    out = streams.new_empty(t, d)
    if t:
        block = min(COLUMNS, triton.next_power_of_2(d))
        constants = {"S": s, "BLOCK": block, "UPCAST": UPCAST}
        _collapse[(t, triton.cdiv(d, block))](
            streams.contiguous(), pre.contiguous(), out, d, **constants, enable_fp_fusion=False
        )
    return out


def expand(y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Write the streams: `kernels.hyper.reference.expand`."""
    t, s, d = streams.shape
    streams = streams.contiguous()
    new = torch.empty_like(streams)
    if t:
        block = min(COLUMNS, triton.next_power_of_2(d))
        constants = {"S": s, "BLOCK": block, "UPCAST": UPCAST}
        _expand[(t, triton.cdiv(d, block))](
            y.contiguous(), streams, post.contiguous(), comb.contiguous(), new, d, **constants, enable_fp_fusion=False
        )
    return new
