"""A case: one call of one kernel at one shape, what it costs at least, what is asked of it, and how it is checked."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scripts.bench.device.counts import Cost
from scripts.bench.device.draw import Draw


class Target(NamedTuple):
    """What is asked of a case on an H200: at most so many us, or at least a share of the bytes' or FLOPs' roof."""

    us: float | None = None
    of_bytes: float | None = None
    of_flops: float | None = None

    def __str__(self) -> str:
        """As the page says it."""
        if self.us is not None:
            return f"<= {self.us:g} us"
        share, what = (self.of_bytes, "bytes/s") if self.of_flops is None else (self.of_flops, "FLOP/s")
        return f">= {100 * (share or 0):.0f} % of {what}"

    def reached(self, cost: Cost, us: float, roof: tuple[float, float]) -> bool:
        """Whether a case of this cost reaches it in so many us."""
        if self.us is not None:
            return us <= self.us
        if self.of_flops is not None:
            return cost.flops / (1e-6 * us) >= self.of_flops * roof[1]
        return cost.bytes / (1e-6 * us) >= (self.of_bytes or 0) * roof[0]


class Tolerance(NamedTuple):
    """What may lie between a result and the expected one; `error` is in units of it, so up to 1 is right."""

    of_each: float = 0.0  # of the expected number's size
    of_rms: float = 0.0  # of the root mean square of all expected numbers
    differing: float | None = None  # or: the share of numbers that may differ, by however much

    def __str__(self) -> str:
        """As the page says it."""
        if self.differing is not None:
            return f"{self.differing:.2g} of all differ"
        if not self.of_each and not self.of_rms:
            return "bit for bit"
        parts = ((self.of_each, "of each"), (self.of_rms, "of the rms"))
        return " + ".join(f"{size:.2g} {what}" for size, what in parts if size)

    def error(self, ours: Tensor, expected: Tensor) -> float:
        """Largest difference, in units of what may be; infinite where one side alone is no finite number."""
        a, b = ours.float(), expected.float()
        if a.shape != b.shape or bool((a.isfinite() != b.isfinite()).any()):
            return float("inf")
        a, b = (x.nan_to_num(0.0, 0.0, 0.0) for x in (a, b))
        off = (a - b).abs()
        if self.differing is not None:
            return float((off > 0).float().mean()) / self.differing
        if not self.of_each and not self.of_rms:
            return float("inf") if bool(off.any()) else 0.0
        allowed = self.of_each * b.abs() + self.of_rms * b.square().mean().sqrt()
        return float((off / allowed.clamp_min(torch.finfo(torch.float32).tiny)).max())


class Call(NamedTuple):
    """A case with its inputs."""

    run: Callable[[], Any]
    error: Callable[[Any], float]  # of what `run` gave, in units of the tolerance


class Case(NamedTuple):
    """One row of the table."""

    part: str  # the Triton file of `kernels` that is measured
    label: str
    cost: Cost
    build: Callable[[Draw], Call]
    tolerance: str
    against: str  # what the result is compared with
    target: Target | None = None
    compiled: bool = False  # whether it stands for its kernels where they are only compiled
