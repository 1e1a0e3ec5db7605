"""What one launch takes that only reads: the honest floor of a kernel, since a launch has a beginning and an end."""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

NUMBERS: Final = 1024  # int32 that a program of four warps reads: two loads of 16 bytes a thread


@triton.jit
def _read(data, out, NUMBERS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    tl.store(out + tl.program_id(0), tl.xor_sum(tl.load(data + place), 0))


def room(nbytes: int) -> int:
    """How many int32 a launch reads that reads at least so many bytes."""
    return NUMBERS * max(1, -(-nbytes // (4 * NUMBERS)))


def read(data: Tensor) -> Tensor:
    """Read int32 `data`, of a length that `room` gives; [programs] int32, the exclusive or of what each has read.

    It writes 4 bytes for each 4096, so that nothing is left out.
    """
    assert data.dtype == torch.int32, "it reads int32"
    assert data.is_contiguous(), "16 bytes at a time"
    assert data.numel() % NUMBERS == 0, f"{data.numel()} are no multiple of {NUMBERS}"
    out = torch.empty(data.numel() // NUMBERS, dtype=torch.int32, device=data.device)
    _read[out.shape](data, out, NUMBERS=NUMBERS, num_warps=4)
    return out
