"""Numbers in float64 with how far off a run may have them: products, norms, rotations and pooling of the oracle.

A sum of n products in fp32 rounds n times, each time by at most half an ulp of what is summed so far. Roundings are
taken to be independent of each other, and the sum so far to stay near the straight way to the whole, as far off as
terms whose signs are drawn would take it: then `LAMBDA` sqrt(n) half ulps of the whole and of the root of the terms'
squares bound the error. (Sums of sizes instead of squares would assume nothing, and at the width of V4 allow a
hundredth of a row.) What a run rounds to bf16 or E4M3 is rounded here too, and only a number that lies within its error
of a tie may fall on the other side, a step further.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from kernels.formats.stored import Weight, rows
from probes.rope.oracle import I64, Table, pairs
from probes.shared.moe import LAMBDA, U
from probes.shared.narrow import BF16, E4M3, F64, decoded, nearest, rounded_blocks

TILE = 2048  # rows of a matrix that are decoded at a time: 128 MiB of float64 where it has 8192 columns
BF16_STEP = 2.0**-7  # from one number to the next, at most, as a share of it
E4M3_STEP = 2.0**-3


@dataclass(frozen=True, slots=True)
class Known:
    """Rows, and how far off a run may have them."""

    value: F64  # [..., d]
    error: F64  # [..., d], of each number, by arithmetic in fp32
    step: float = 0.0  # of a whole row, as a share of it, were all its roundings to fall on the other side

    @classmethod
    def exact(cls, value: F64) -> "Known":
        """Rows that were seen in the run."""
        return cls(value, np.zeros_like(value))

    @property
    def seen(self) -> bool:
        """Whether these are the run's own numbers, whose roundings are no matter of chance."""
        return not self.step and not self.error.any()

    def reshape(self, *shape: int) -> "Known":
        """`numpy.reshape` of both."""
        return replace(self, value=self.value.reshape(shape), error=self.error.reshape(shape))

    def __getitem__(self, at: slice | I64) -> "Known":
        """Some of the rows."""
        return replace(self, value=self.value[at], error=self.error[at])

    def bf16(self) -> "Known":
        """Rounded to bf16."""
        return Known(nearest(self.value, BF16), self.error, 0.0 if self.seen else self.step + BF16_STEP)

    def e4m3(self, group: int, columns: int | None = None) -> "Known":
        """Rounded to E4M3 in groups of columns with a scale each, the first `columns` of them (None: all)."""
        value = self.value.copy()
        value[..., :columns] = rounded_blocks(value[..., :columns], group, E4M3)
        return Known(value, self.error, 0.0 if self.seen else self.step + E4M3_STEP)


def joined(parts: Iterable[Known], axis: int) -> Known:
    """Put parts side by side."""
    some = list(parts)
    value, error = (np.concatenate([getattr(part, name) for part in some], axis) for name in ("value", "error"))
    return Known(value, error, max(part.step for part in some))


def times(x: Known, w: F64) -> Known:
    """``x @ w^T`` for x [t, in] and w [out, in]."""
    value, squares = x.value @ w.T, w.T**2
    # beside the sum: decoding of NVFP4, whose two scales are multiplied in fp32, and the last rounding
    share = (LAMBDA * w.shape[1] ** 0.5 + 4) * U
    error = np.sqrt((share * x.value) ** 2 @ squares + (share * value) ** 2)
    if x.error.any():
        error += np.sqrt(x.error**2 @ squares)
    return Known(value, error, x.step)


def product(x: Known, weight: Weight) -> Known:
    """``x @ W^T`` for a stored matrix, decoded a tile of rows at a time."""
    starts = range(0, weight.shape[0], TILE)
    return joined((times(x, decoded(rows(weight, at, min(at + TILE, weight.shape[0])))) for at in starts), 1)


def rms_norm(x: Known, weight: F64 | None, eps: float) -> Known:
    """``w x / sqrt(mean(x^2) + eps)`` over the last axis."""
    d = x.value.shape[-1]
    size = np.sqrt((x.value**2).mean(-1, keepdims=True) + eps)
    gain = (1 if weight is None else weight) / size
    # of the size, as a share of it: what the numbers are off by, the sum of their squares, mean, root and quotient
    off = np.linalg.norm(x.error, axis=-1, keepdims=True) / (size * d**0.5) + (LAMBDA * d**0.5 + 6) * U
    value = x.value * gain
    return Known(value, x.error * np.abs(gain) + np.abs(value) * off, x.step)


def rotated(x: Known, table: Table, positions: I64) -> Known:
    """Neighbours of the trailing dims turned by the angles at `positions` [n]; x [n, d] or [n, heads, d]."""
    dim = 2 * len(table.freqs)
    shape = (len(positions), *[1] * (x.value.ndim - 2), dim // 2)
    start = pairs(x.value, dim)
    end = start * np.exp(1j * table.angles(positions)).reshape(shape)
    off = np.abs(pairs(x.error, dim)) + np.abs(start) * (table.allowed(positions).reshape(shape) + 4 * U)
    value, error = x.value.copy(), x.error.copy()
    value[..., -dim::2], value[..., 1 - dim :: 2] = end.real, end.imag
    error[..., -dim::2] = error[..., 1 - dim :: 2] = off
    return Known(value, error, x.step)


def pooled(kv: Known, gate: Known) -> Known:
    """``sum_j softmax_j(gate[n, j]) kv[n, j]``, channel by channel: [n, j, d] to [n, d]; gates of -inf take out."""
    shifted = gate.value - gate.value.max(1, keepdims=True)
    weight = np.exp(shifted)
    weight /= weight.sum(1, keepdims=True)
    # A gate that is off by e moves a share of the softmax by up to 2e; the shift is rounded in fp32
    off = 2 * (gate.error + 2 * U * np.where(np.isfinite(shifted), np.abs(shifted), 0)).max(1)
    off += (LAMBDA * kv.value.shape[1] ** 0.5 + 8) * U
    value: F64 = (weight * kv.value).sum(1)
    return Known(value, (weight * kv.error).sum(1) + off * (weight * np.abs(kv.value)).sum(1), kv.step)
