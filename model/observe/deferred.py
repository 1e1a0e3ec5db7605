"""Invariants of a call that is captured: measured on the device, read by the host once, when the call has run.

Each leaves one number in a buffer, and a limit that it may not exceed; a sum is within its limit when it is finite.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from kernels.formats.stored import Rows
from kernels.tripwires import triton as tripwires
from model.errors import Tripwire
from model.observe import invariants
from model.observe.sites import Site
from model.ranks.ranks import Left

CELLS: Final = 16  # a layer's measures at most; see `model.observe.observer`
FINITE: Final = 3.5e38  # beyond every fp32 number
SUM: Final = "values whose sum is"


class _Measure(NamedTuple):
    site: str
    layer: int | None
    wanted: float
    limit: float  # how far from it
    what: str  # was measured
    told: str  # what was expected
    ratio: int  # tokens after which the measure says something


class Deferred:
    """Measures of one call, in the order in which the model makes them.

    Parameters
    ----------
    layers
        Of the model.
    device
        Of the call.

    """

    def __init__(self, layers: int, device: torch.device) -> None:
        self.values = torch.zeros(CELLS * layers + 2, dtype=torch.float32, device=device)
        self._made: list[_Measure] = []
        self.left = Left(tripwires.checksums)  # what ranks have to agree on

    def begin(self) -> None:
        """Begin a call."""
        self._made.clear()
        self.left = Left(tripwires.checksums)

    def finite(self, site: Site, layer: int | None, x: Tensor, ratio: int = 1) -> None:
        """`x`, of any shape, has a sum: see `model.observe.invariants.finite`."""
        cell = self._next(_Measure(site.name, layer, 0, FINITE, SUM, "finite", ratio))
        tripwires.finite(x, self.values, cell)

    def columns(self, site: Site, layer: int, comb: Tensor, eps: float) -> None:
        """Columns of Sinkhorn's comb [t, s, s] sum to 1."""
        limit = invariants.column_tolerance(eps)
        cell = self._next(_Measure(site.name, layer, 0, limit, "a column sum off 1 by", f"at most {limit:g}", 1))
        tripwires.columns(comb, self.values, cell)

    def routing(self, site: Site, layer: int, ids: Tensor, weights: Tensor, scale: float, experts: int) -> None:
        """Experts [t, k] of a token are distinct, and their weights sum to the route scale."""
        wanted, limit = ids.numel(), invariants.WEIGHT_TOLERANCE * scale
        cell = self._next(_Measure(site.name, layer, wanted, 0.0, "distinct experts:", str(wanted), 1))
        off = "weights whose sum is off by"
        self._next(_Measure("experts.weights", layer, 0, limit, off, f"at most {limit:g}", 1))
        tripwires.routing(ids, weights, scale, experts, self.values, cell)

    def selection(
        self, site: Site, layer: int, first: Tensor, ratio: int, top_k: int, entries: int, selected: Tensor
    ) -> None:
        """The selection [1, k] of one token is of min(k, visible) entries, ascending, then -1."""
        invariants.selection_shape(layer, None, top_k, entries, selected)
        broken, unfinished = "selected entries that break a rule:", "selected entries that are not finished:"
        cell = self._next(_Measure(site.name, layer, 0, 0.0, broken, "0", 1))
        self._next(_Measure(site.name, layer, 0, 0.0, unfinished, "0", 1))
        tripwires.selection(selected, first, ratio, entries, self.values, cell)

    def stored(self, site: Site, layer: int, first: Tensor, new: Tensor, rows: Rows, ratio: int) -> None:
        """The row that a call of one token may have written is finite, and comes back as it was, bit for bit."""
        if not rows.shape[0]:
            return
        cell = self._next(_Measure(site.name, layer, 0, FINITE, SUM, "finite", ratio))
        back = f"numbers that come back otherwise from {type(rows).__name__}:"
        self._next(_Measure(site.name, layer, 0, 0.0, back, "0", ratio))
        tripwires.stored(new[:1], rows, first, ratio, self.values, cell)

    def look(self, position: int) -> None:
        """Read what the call of one token at `position` left: one copy. Tripwire for the first beyond its limit."""
        found = self.values.tolist()
        for value, made in zip(found, self._made, strict=False):
            if (position + 1) % made.ratio == 0 and not abs(value - made.wanted) <= made.limit:  # NaN is not
                raise Tripwire(made.site, made.layer, position, f"{made.what} {value:g}", made.told)

    def _next(self, made: _Measure) -> int:
        self._made.append(made)
        return len(self._made) - 1
