"""Invariants of a call that is captured: measured on the device, read by the host once, when the call has run.

Those of a layer are measured together, when the next one begins: until then what they look at must stay as it is. Each
leaves one number in a buffer, and a limit that it may not exceed; a sum is within its limit when it is finite.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from fathom.kernels.formats.stored import Rows
from fathom.kernels.tripwires import triton as tripwires
from fathom.model.errors import Tripwire
from fathom.model.observe import invariants
from fathom.model.observe.sites import Site
from fathom.model.ranks.ranks import Left

CELLS: Final = 32  # a layer's measures at most, and those outside of layers; see `model.observe.observer`
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
        self.values = torch.zeros(CELLS * (layers + 1), dtype=torch.float32, device=device)
        self._made: list[_Measure] = []
        self.left = Left(tripwires.checksums)  # what ranks have to agree on
        self._waiting: list[tripwires.Measure] = []  # those of the last ones that were made which have not run

    def begin(self) -> None:
        """Begin a call."""
        self._made.clear()
        self.left = Left(tripwires.checksums)
        self._waiting.clear()

    def end(self) -> None:
        """End a call, or a layer: what waits is measured."""
        if self._waiting:
            first = len(self._made) - sum(one.cells for one in self._waiting)
            tripwires.measure(self._waiting, self.values, first)
            self._waiting.clear()

    def finite(self, site: Site, layer: int | None, x: Tensor, ratio: int = 1) -> None:
        """`x`, of any shape, has a sum: see `model.observe.invariants.finite`."""
        for one in tripwires.finite(x):
            self._wait(one, _Measure(site.name, layer, 0, FINITE, SUM, "finite", ratio))

    def columns(self, site: Site, layer: int, comb: Tensor, eps: float) -> None:
        """Columns of Sinkhorn's comb [t, s, s] sum to 1."""
        limit = invariants.column_tolerance(eps)
        made = _Measure(site.name, layer, 0, limit, "a column sum off 1 by", f"at most {limit:g}", 1)
        self._wait(tripwires.columns(comb), made)

    def routing(self, site: Site, layer: int, ids: Tensor, weights: Tensor, scale: float, experts: int) -> None:
        """Experts [t, k] of a token are distinct, and their weights sum to the route scale."""
        wanted, limit = ids.numel(), invariants.WEIGHT_TOLERANCE * scale
        distinct = _Measure(site.name, layer, wanted, 0.0, "distinct experts:", str(wanted), 1)
        off = _Measure("experts.weights", layer, 0, limit, "weights whose sum is off by", f"at most {limit:g}", 1)
        self._wait(tripwires.routing(ids, weights, scale, experts), distinct, off)

    def selection(
        self, site: Site, layer: int, first: Tensor, ratio: int, top_k: int, entries: int, selected: Tensor
    ) -> None:
        """The selection [1, k] of one token is of min(k, visible) entries, ascending, then -1."""
        invariants.selection_shape(layer, None, top_k, entries, selected)
        broken = _Measure(site.name, layer, 0, 0.0, "selected entries that break a rule:", "0", 1)
        unfinished = broken._replace(what="selected entries that are not finished:")
        self._wait(tripwires.selection(selected, first, ratio, entries), broken, unfinished)

    def stored(self, site: Site, layer: int, first: Tensor, new: Tensor, rows: Rows, ratio: int) -> None:
        """The row that a call of one token may have written is finite, and comes back as it was, bit for bit."""
        if not rows.shape[0]:
            return
        total = _Measure(site.name, layer, 0, FINITE, SUM, "finite", ratio)
        what = f"numbers that come back otherwise from {type(rows).__name__}:"
        back = total._replace(limit=0.0, what=what, told="0")
        self._wait(tripwires.stored(new[:1], rows, first, ratio), total, back)

    def look(self, position: int) -> None:
        """Read what the call of one token at `position` left: one copy. Tripwire for the first beyond its limit."""
        found = self.values.tolist()
        for value, made in zip(found, self._made, strict=False):
            if (position + 1) % made.ratio == 0 and not abs(value - made.wanted) <= made.limit:  # NaN is not
                raise Tripwire(made.site, made.layer, position, f"{made.what} {value:g}", made.told)

    def _wait(self, measure: tripwires.Measure, *made: _Measure) -> None:
        """Let something be measured together with all else of its layer; `made`: what its cells are."""
        if self._waiting and self._made[-1].layer != made[0].layer:
            self.end()
        assert len(made) == measure.cells, f"{len(made)} names for {measure.cells} cells"
        self._waiting.append(measure)
        self._made.extend(made)
        assert len(self._made) <= len(self.values), f"{len(self._made)} measures"
