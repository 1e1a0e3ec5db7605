"""SwiGLU's clamp: how often a run reaches it, and whether it is there when experts are pushed past it."""

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kernels.ops import Ops
from model.moe import Expert
from model.observe import sites
from model.observe.observer import listening
from model.observe.sites import Listener, Site
from model.transformer import Transformer
from probes.finding import Finding, at_most, judged, vacuous
from probes.shared.moe import Experts, distances
from probes.shared.narrow import F64, f64

Path = Literal["routed", "shared"]
PATHS: dict[Path, tuple[Site, Site]] = {
    "routed": (sites.ROUTED_GATE, sites.ROUTED_UP),
    "shared": (sites.SHARED_GATE, sites.SHARED_UP),
}
TELLING = 10.0  # a lost clamp must move a pushed output by so many times the bound, or pushing showed nothing
REACH = 5.0  # pushed: gate and up go at least so many times beyond the limit, 50 where it is 10


@dataclass(slots=True)
class Hits:
    """How far one of the two factors of one path went in one layer."""

    values: int = 0
    beyond: int = 0  # values that the clamp changes
    largest: float = 0.0

    @property
    def share(self) -> float:
        """Of the values, those that the clamp changed."""
        return self.beyond / self.values if self.values else 0.0


@dataclass
class Counter:
    """Counts, at the sites before the clamp, what it is about to change."""

    limit: float
    hits: dict[tuple[Path, int, str], Hits] = field(default_factory=dict)  # by path, layer, "gate" or "up"

    def listeners(self) -> dict[Site, Listener]:
        """What to attach."""
        pairs = ((path, pair, which) for path, pair in PATHS.items() for which in (0, 1))
        return {pair[which]: self._listener(path, ("gate", "up")[which]) for path, pair, which in pairs}

    def _listener(self, path: Path, which: str) -> Listener:
        def count(layer: int | None, values: Tensor) -> None:
            assert layer is not None, "experts have a layer"
            size = values.float() if which == "gate" else values.float().abs()  # the gate has no lower clamp
            hits = self.hits.setdefault((path, layer, which), Hits())
            hits.values += size.numel()
            hits.beyond += int((size > self.limit).sum())
            hits.largest = max(hits.largest, size.max().item())

        return count

    def share(self, path: Path) -> float:
        """Of all gate and up values of a path, those that the clamp changed."""
        mine = [hits for (of, _, _), hits in self.hits.items() if of == path]
        return sum(hits.beyond for hits in mine) / max(1, sum(hits.values for hits in mine))


@dataclass(frozen=True, slots=True)
class Pushed:
    """One expert, given inputs that take it past the clamp; distances are the median token's."""

    distance: float  # of its output from the equation in float64
    unclamped: float  # of the equation without clamp from the equation: what a lost clamp would show
    unclamped_distance: float  # of its output from the equation without clamp
    gate: float  # largest gate
    up: float  # largest size of an up


Pushes = dict[tuple[Path, int], list[Pushed]]  # by path and layer: one for each expert that was pushed


def push(model: Transformer, expert: Expert, name: str, x: Tensor, weight: Tensor | None, oracle: Experts) -> Pushed:
    """Scale inputs x [n, hidden] until gate and up pass the limit, and compare the output with float64.

    The oracle starts at the gate and up that pass the sites, and goes through the files' w2. The factor is a power of
    two, so that the inputs round as they did.

    Parameters
    ----------
    model, expert
        The model under test and one of its experts.
    name
        Of the expert in the files, without the matrix: "layers.0.ffn.shared_experts".
    x
        In the run's dtype and on its device.
    weight
        [n] float32 for a routed expert, None for a shared one.
    oracle
        What the files say.

    """
    limit = oracle.config.swiglu_limit
    _, gate, up = _watched(model, expert, x, weight)
    least = min(gate.max(), np.abs(up).max())
    # all gates negative: nothing to push, and `unclamped` will say so
    factor = 2.0 ** math.ceil(math.log2(REACH * limit / least)) if least > 0 else 1.0
    out, gate, up = _watched(model, expert, x * max(1.0, factor), weight)
    shares = None if weight is None else f64(weight)
    wanted, without = (
        oracle.linear(oracle.activation(gate, up, shares, bound), f"{name}.w2") for bound in (limit, math.inf)
    )
    return Pushed(
        float(np.median(distances(out, wanted))),
        float(np.median(distances(without, wanted))),
        float(np.median(distances(out, without))),
        float(gate.max()),
        float(np.abs(up).max()),
    )


@torch.inference_mode()
def _watched(model: Transformer, expert: Expert, x: Tensor, weight: Tensor | None) -> tuple[F64, F64, F64]:
    """Output [n, hidden], gate and up [n, intermediate] of an expert."""
    seen: dict[Site, F64] = {}

    def keep(site: Site) -> Listener:
        def listener(layer: int | None, values: Tensor) -> None:
            del layer
            seen[site] = f64(values)

        return listener

    gate, up = PATHS["shared" if weight is None else "routed"]
    with listening(model, {gate: keep(gate), up: keep(up)}):
        out = f64(expert(x, weight))
    return out, seen[gate], seen[up]


def push_findings(pushed: Pushes, close: float) -> list[Finding]:
    """Judge each path of each layer by its worst expert; `close` bounds the distance."""
    found = []
    for (path, layer), each in pushed.items():
        worst = max(each, key=lambda one: one.distance)
        what = f"{path} {'expert' if path == 'shared' else 'experts'} pushed past the clamp, distance from float64"
        if min(one.unclamped for one in each) < TELLING * close:
            found.append(vacuous(what, "clamped and unclamped outputs are as good as equal", layer=layer))
        else:
            finding = judged(
                what,
                worst.distance,
                at_most(close),
                layer=layer,
                largest_gate=worst.gate,
                largest_up=worst.up,
                distance_from_unclamped=worst.unclamped_distance,
            )
            found.append(finding)
    return found


def grid_error(ops: Ops, limit: float, device: torch.device) -> float:
    """Largest relative error of the run's SwiGLU in fp32, over a grid of gate and up to five times the limit.

    Here the sides show: up is clamped at both, the gate only above (the silu of a gate at the lower limit is 1e23 times
    that of one at five times the limit, and nothing beside the other terms of a sum).
    """
    axis = torch.linspace(-REACH * limit, REACH * limit, 201, device=device)
    gate, up = (part.flatten()[None] for part in torch.meshgrid(axis, axis, indexing="ij"))  # [1, 201^2]
    errors = []
    for weight in (None, torch.full((1,), 0.7, device=device)):
        found = f64(ops.swiglu(gate, up, limit, weight))
        kept = np.minimum(f64(gate), limit)
        wanted = kept / (1 + np.exp(-kept)) * np.clip(f64(up), -limit, limit)
        wanted = wanted if weight is None else wanted * f64(weight)
        errors.append(np.abs(found - wanted) / np.maximum(np.abs(wanted), 1e-30))
    return float(np.max(errors))
