"""Invariants of a call that is captured: measured on the device, read by the host once, when the call has run.

Each leaves one number in a buffer, and a limit that it may not exceed; a sum is within its limit when it is finite.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

from kernels.formats.rows import take
from kernels.formats.stored import Rows
from model.errors import Tripwire
from model.observe import invariants
from model.observe.sites import Site

CELLS: Final = 16  # a layer's measures at most; see `model.observe.observer`
FINITE: Final = 3.5e38  # beyond every fp32 number


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
        self._seen: dict[tuple[int, int, int], tuple[Tensor, Tensor, Tensor]] = {}
        self._numbers: dict[int, Tensor] = {}
        self.values = torch.zeros(CELLS * layers + 2, dtype=torch.float32, device=device)
        self._cells = self.values.unbind(0)
        self._made: list[_Measure] = []

    def begin(self) -> None:
        """Begin a call."""
        self._made.clear()
        self._seen.clear()
        self._numbers.clear()

    def finite(self, site: Site, layer: int | None, x: Tensor, ratio: int = 1) -> None:
        """`x`, of any shape, has a sum: see `model.observe.invariants.finite`."""
        cell = self._next(_Measure(site.name, layer, 0, FINITE, "values whose sum is", "finite", ratio))
        torch.sum(x, dim=tuple(range(x.ndim)), dtype=torch.float32, out=cell)

    def columns(self, site: Site, layer: int, comb: Tensor, eps: float) -> None:
        """Columns of Sinkhorn's comb [t, s, s] sum to 1."""
        limit = invariants.column_tolerance(eps)
        cell = self._next(_Measure(site.name, layer, 0, limit, "a column sum off 1 by", f"at most {limit:g}", 1))
        torch.linalg.vector_norm(comb.sum(1) - 1, ord=torch.inf, out=cell)

    def routing(self, site: Site, layer: int, ids: Tensor, weights: Tensor, scale: float, experts: int) -> None:
        """Experts [t, k] of a token are distinct, and their weights sum to the route scale."""
        # [t, experts]: one that is repeated, or unknown, is not counted
        found = (ids[:, None] == self._numbered(experts, ids.device)).any(2)
        self._count(site, layer, found, "distinct experts:", wanted=ids.numel())
        limit = invariants.WEIGHT_TOLERANCE * scale
        made = _Measure("experts.weights", layer, 0, limit, "weights whose sum is off by", f"at most {limit:g}", 1)
        torch.linalg.vector_norm(weights.sum(1) - scale, ord=torch.inf, out=self._next(made))

    def selection(
        self, site: Site, layer: int, first: Tensor, ratio: int, top_k: int, entries: int, selected: Tensor
    ) -> None:
        """The selection [1, k] of one token is of min(k, visible) entries, ascending, then -1."""
        invariants.selection_shape(layer, None, top_k, entries, selected)
        filled, after, seen = self._visible(first, ratio, entries, selected.shape[1])
        # Behind the selected entries stand numbers that go on beyond them: all rise, or a rule is broken.
        chain = torch.where(filled, selected, torch.where(selected == -1, after, -2))
        rising = torch.nn.functional.pad(chain, (1, 0), value=-1)
        self._count(site, layer, rising[:, 1:] <= rising[:, :-1], "selected entries that break a rule:")
        self._count(site, layer, (selected >= seen) & filled, "selected entries that are not finished:")

    def _numbered(self, count: int, device: torch.device) -> Tensor:
        """0 .. count - 1, [count, 1] int64; once for a call."""
        if count not in self._numbers:
            self._numbers[count] = torch.arange(count, device=device)[:, None]
        return self._numbers[count]

    def _visible(self, first: Tensor, ratio: int, entries: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Which of the `width` places are filled, what follows in the others, and entries visible; once for a call."""
        key = ratio, entries, width
        if key not in self._seen:
            seen = ((first + 1) // ratio).clamp(max=entries).to(torch.int32)[None, None]
            place = torch.arange(width, device=first.device, dtype=torch.int32)[None]
            self._seen[key] = place < seen, seen + place, seen
        return self._seen[key]

    def stored(self, site: Site, layer: int, first: Tensor, new: Tensor, rows: Rows, ratio: int) -> None:
        """The row that a call of one token may have written is finite, and comes back as it was, bit for bit."""
        if not rows.shape[0]:
            return
        self.finite(site, layer, new[:1], ratio)
        back = take(rows, (first // ratio).clamp(max=rows.shape[0] - 1)[None])
        whole = torch.int32 if back.dtype == torch.float32 else torch.int16  # bits: zeros have signs
        differs = back.view(whole) != new[:1].to(back.dtype).view(whole)
        self._count(site, layer, differs, f"numbers that come back otherwise from {type(rows).__name__}:", ratio)

    def look(self, position: int) -> None:
        """Read what the call of one token at `position` left: one copy. Tripwire for the first beyond its limit."""
        found = self.values.tolist()
        for value, made in zip(found, self._made, strict=False):
            if (position + 1) % made.ratio == 0 and not abs(value - made.wanted) <= made.limit:  # NaN is not
                raise Tripwire(made.site, made.layer, position, f"{made.what} {value:g}", made.told)

    def _count(self, site: Site, layer: int, true: Tensor, what: str, ratio: int = 1, *, wanted: int = 0) -> None:
        cell = self._next(_Measure(site.name, layer, wanted, 0.0, what, str(wanted), ratio))
        torch.sum(true, dim=tuple(range(true.ndim)), dtype=torch.float32, out=cell)

    def _next(self, made: _Measure) -> Tensor:
        cell = self._cells[len(self._made)]
        self._made.append(made)
        return cell
