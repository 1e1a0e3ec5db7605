"""Invariants of a call that are measured on its device, and read by the host once, when the call has run.

Those of a layer are measured together, when the next one begins: until then what they look at must stay as it is. Of a
call of more than HELD tokens what is large is measured at once, with what waits, so that it does not live longer. Rows
that a call completes are measured by themselves, for how many pieces they come in follows from the position, and which
measures stand together is compiled.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from fathom.kernels.formats.rows import BasisRows, CodedRows
from fathom.kernels.formats.stored import Rows
from fathom.kernels.tripwires import triton as tripwires
from fathom.model.errors import Tripwire
from fathom.model.observe import invariants
from fathom.model.observe.sites import Site
from fathom.model.ranks.ranks import Left

HELD: Final = 8  # tokens of a call whose tensors may all live until the end of their layer
SUM: Final = "values whose sum is"


class _Measure(NamedTuple):
    site: str
    layer: int | None
    what: str  # was measured
    told: str  # what was expected
    ratio: int = 1  # tokens of a row
    cell: int = 0


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
        self.cells = torch.full((invariants.CELLS * (layers + 1),), tripwires.NOTHING, dtype=torch.int64, device=device)
        self._made: list[_Measure] = []  # in the order of the model
        self._used = [0, 0]  # cells from the front, and from the back, where those are that run by themselves
        self.left = Left(tripwires.checksums)  # what ranks have to agree on
        self._waiting: list[tripwires.Measure] = []  # the last ones, which have not run
        self._layer: int | None = None  # of these

    def clear(self) -> None:
        """Forget what was found, before a call, or a replay of one, runs."""
        self.cells.fill_(tripwires.NOTHING)

    def begin(self, first: Tensor, count: int) -> None:
        """Begin a call of `count` tokens, the first at position `first` [] int64, on the device."""
        self.first, self.count = first, count
        self._made.clear()
        self._used = [0, 0]
        self.left = Left(tripwires.checksums)
        self._waiting.clear()

    def end(self) -> None:
        """End a call, or a layer: what waits is measured."""
        if self._waiting:
            first = self._used[0] - sum(one.cells for one in self._waiting)
            tripwires.measure(self._waiting, self.cells, first)
            self._waiting.clear()

    def finite(self, site: Site, layer: int | None, x: Tensor, skip: int = 0, ratio: int = 1) -> None:
        """Rows of `x` [n, ...] have a sum: see `model.observe.invariants.finite`.

        The first is of the token, or of the window of `ratio` tokens, `skip` behind that of the call's first.
        """
        self._wait(tripwires.finite(x, skip), _Measure(site.name, layer, SUM, "finite", ratio))
        if self.count > HELD:
            self.end()

    def columns(self, site: Site, layer: int, comb: Tensor, eps: float, skip: int = 0) -> None:
        """Columns of Sinkhorn's comb [t, s, s] sum to 1; `skip` tokens of the call are before the first."""
        limit = invariants.column_tolerance(eps)
        made = _Measure(site.name, layer, "a column sum off 1 by", f"at most {limit:g}")
        self._wait(tripwires.columns(comb, limit, skip), made)

    def routing(
        self, site: Site, layer: int, ids: Tensor, weights: Tensor, scale: float, experts: int, skip: int = 0
    ) -> None:
        """Experts [t, k] of a token are distinct, and their weights sum to the route scale; `skip` as of `columns`."""
        limit = invariants.WEIGHT_TOLERANCE * scale
        distinct = _Measure(site.name, layer, "distinct experts:", str(ids.shape[1]))
        off = _Measure("experts.weights", layer, "weights whose sum is off by", f"at most {limit:g}")
        self._wait(tripwires.routing(ids, weights, scale, experts, limit, skip), distinct, off)

    def selection(
        self, site: Site, layer: int, ratio: int, top_k: int, entries: int, selected: Tensor, evicted: int = 0
    ) -> None:
        """The selection [t, k] of each token is of min(k, visible) entries, ascending, then -1.

        There is room for `entries` entries, and k is `top_k` or those that there are; `evicted` as of
        `model.observe.invariants.selection`.
        """
        broken = _Measure(site.name, layer, "selected entries that break a rule:", "0")
        unfinished = broken._replace(what="selected entries that are not finished:")
        self._wait(tripwires.selection(selected, self.first, ratio, entries, top_k, evicted), broken, unfinished)
        if self.count > HELD:
            self.end()

    def stored(self, site: Site, layer: int, new: Tensor, rows: Rows, ratio: int) -> None:
        """The row [1, d] of the window that a call of one token may complete is finite, and comes back bit for bit."""
        if not rows.shape[0]:
            return
        total = _Measure(site.name, layer, SUM, "finite", ratio)
        self._wait(tripwires.stored(new, rows, self.first, self.count, ratio), total, _back(total, rows))

    def appended(self, site: Site, layer: int, row: int, new: Tensor, rows: Rows, ratio: int, skip: int) -> None:
        """New rows [n, d], written behind the first `row`, are finite, and come back as they were or as near as may be.

        They are of the windows that the call's tokens complete, behind the first `skip` of these.
        """
        total = _Measure(site.name, layer, SUM, "finite", ratio)
        match rows:
            case Tensor():  # in the dtype of the run, as they were
                self._run(tripwires.finite(new, skip), total)
            case CodedRows() | BasisRows():
                self._run(tripwires.finite(new, skip), total)
                error, allowed, told = invariants.coded_error(row, new, rows)
                what = "a row that comes back off, as a share of its squared length,"
                made = _Measure(site.name, layer, what, f"what a row may{told}", ratio)
                self._run(tripwires.within(error, allowed, skip), made)
            case _:
                self._run(tripwires.stored(new, rows, self.first, self.count, ratio, skip), total, _back(total, rows))

    def look(self, position: int, origin: int = 0) -> None:
        """Read what the call at `position` left: one copy. Tripwire for the first measure that found something.

        `origin`: the position of the sequence from which `position` counts.
        """
        cells = self.cells.tolist()
        for made in self._made:
            if (found := tripwires.told(cells[made.cell])) is not None:
                row, value = found
                last = (position // made.ratio + row + 1) * made.ratio - 1
                raise Tripwire(made.site, made.layer, origin + last, f"{made.what} {value:.6g}", made.told)

    def _wait(self, measure: tripwires.Measure, *made: _Measure) -> None:
        """Let something be measured together with all else of its layer; `made`: what its cells are."""
        if self._waiting and self._layer != made[0].layer:
            self.end()
        self._layer = made[0].layer
        assert len(made) == measure.cells, f"{len(made)} names for {measure.cells} cells"
        self._waiting.append(measure)
        self._note(self._used[0], made)
        self._used[0] += len(made)

    def _run(self, measure: tripwires.Measure, *made: _Measure) -> None:
        """Measure something by itself, at once."""
        self._used[1] += len(made)
        first = len(self.cells) - self._used[1]
        self._note(first, made)
        tripwires.measure([measure], self.cells, first)

    def _note(self, first: int, made: tuple[_Measure, ...]) -> None:
        self._made += [one._replace(cell=first + i) for i, one in enumerate(made)]
        assert len(self._made) <= len(self.cells), f"{len(self._made)} measures"


def _back(total: _Measure, rows: Rows) -> _Measure:
    return total._replace(what=f"numbers that come back otherwise from {type(rows).__name__}:", told="0")
