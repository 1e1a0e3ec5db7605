"""The run's rounding ops against an independent cast, on inputs made to break them and on real ones."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.ops import Ops
from probes.finding import JSON, Finding, exactly, judged
from probes.shared.narrow import (
    E2M1,
    E4M3,
    F64,
    INDEX_GROUP,
    KV_GROUP,
    LINEAR_GROUP,
    Format,
    f64,
    nearest,
    rounded_blocks,
    scales,
)

ROWS = 16  # blocks of random numbers in each case
DTYPES = (torch.float32, torch.bfloat16)


@dataclass
class Rounding:
    """One use of a rounding op, and what became of all its cases."""

    what: str  # "simulate_fp8 in groups of 128"
    op: Callable[[Tensor, int], Tensor]
    group: int
    to: Format
    values: int = 0
    unlike: int = 0  # values that are not the independent cast's, bit for bit
    blocks: int = 0
    off_grid: int = 0  # blocks that no power of two puts on the format's numbers
    first: dict[str, JSON] = field(default_factory=dict)  # the first value unlike

    def add(self, case: str, x: Tensor) -> None:
        """Round x [n, group * m]."""
        found, given = f64(self.op(x, self.group)), f64(x)
        wanted = rounded_blocks(given, self.group, self.to)
        unlike = found.view(np.int64) != wanted.view(np.int64)  # the sign of a zero counts
        off = off_grid(found, self.group, self.to)
        self.values += found.size
        self.unlike += int(unlike.sum())
        self.blocks += off.size
        self.off_grid += int(off.sum())
        if unlike.any() and not self.first:
            place = tuple(np.argwhere(unlike)[0])
            numbers = {"given": given[place], "found": found[place], "wanted": wanted[place]}
            self.first = {"case": case, **{name: float(value) for name, value in numbers.items()}}

    def findings(self) -> list[Finding]:
        """Judge the casts and the scales behind them."""
        form = "E4M3" if self.to is E4M3 else "E2M1"
        return [
            judged(
                f"{self.what}: values unlike an independent cast", self.unlike, exactly(0), of=self.values, **self.first
            ),
            judged(
                f"{self.what}: blocks that are no {form} numbers times a power of two",
                self.off_grid,
                exactly(0),
                of=self.blocks,
            ),
        ]


def roundings(ops: Ops) -> list[Rounding]:
    """Return what deployed numerics rounds with."""
    return [
        Rounding("simulate_fp8 in groups of 128", ops.simulate_fp8, LINEAR_GROUP, E4M3),
        Rounding("simulate_fp8 in groups of 64", ops.simulate_fp8, KV_GROUP, E4M3),
        Rounding("simulate_fp4 in groups of 32", ops.simulate_fp4, INDEX_GROUP, E2M1),
    ]


def off_grid(y: F64, group: int, to: Format) -> NDArray[np.bool_]:
    """Which blocks of `group` columns of y [..., d] are no numbers of the format times one power of two.

    A rounded block's largest number lies in the upper half of the format's range or, rounded down, on its lower end;
    both name a power of two under which a block that has one at all is on the grid.
    """
    blocks = y.reshape(-1, group)
    amax = np.abs(blocks).max(1, keepdims=True)
    scale = np.where(amax > 0, scales(amax, to.largest, floor=0.0), 1.0)
    off: NDArray[np.bool_] = (nearest(blocks / scale, to) * scale != blocks).any(1)
    return off


def cases(rounding: Rounding, seed: int) -> dict[str, Tensor]:
    """Inputs [n, group] float32 on which a rounding that is almost right goes wrong."""
    rng = np.random.default_rng(seed)
    group, largest = rounding.group, rounding.to.largest

    def with_amax(amax: F64) -> F64:
        """Random blocks whose largest number is given for each."""
        blocks = rng.uniform(-1, 1, (len(amax), group)) * amax[:, None]
        blocks[np.arange(len(amax)), rng.integers(group, size=len(amax))] = amax
        return blocks

    powers: F64 = 2.0 ** np.arange(-10.0, 11.0)
    edges: F64 = largest * powers
    ulp = edges * 2.0**-23  # of fp32, or half of it
    made = {
        "amax a power of two": with_amax(powers),
        "amax at the format's largest": with_amax(edges),
        "amax an ulp above it": with_amax(edges + ulp),
        "amax an ulp below it": with_amax(edges - ulp),
        "every number of the format and every midpoint": _numbers(rounding.to, group),
        "tiny": with_amax(np.full(ROWS, 1e-30)),
        "at the smallest amax": with_amax(np.full(ROWS, 1e-4)),
        "huge": with_amax(np.full(ROWS, 1e30)),
        "zeros": np.zeros((1, group)),
        "one number among zeros": np.eye(1, group) * -3.0,
        "outlier": with_amax(np.full(ROWS, 1e4)) * np.where(rng.random((ROWS, group)) < 0.9, 1e-5, 1),
    }
    return {name: torch.from_numpy(x.astype(np.float32)) for name, x in made.items()}


def _numbers(to: Format, group: int) -> F64:
    """Every number of a format and every midpoint of two neighbours, in blocks that its largest pins to scale 1."""
    halves = np.arange(2 ** (to.mantissa + 1))  # half steps of a binade
    binades = [2.0**e * (1 + halves / len(halves)) for e in range(to.lowest, int(np.log2(to.largest)) + 1)]
    some = np.concatenate([2.0**to.lowest * halves / len(halves), *binades])
    some = some[some <= to.largest]
    some = np.concatenate((some, -some))
    filled = np.resize(some, (-(-len(some) // (group - 1)), group - 1))
    return np.concatenate((filled, np.full((len(filled), 1), to.largest)), axis=1)
