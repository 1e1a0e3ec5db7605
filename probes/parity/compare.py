"""Two runs of one prompt, compared row by row at every site as the second of them goes by.

The first run is held in full, of the second only one number for each row: how far it is from the first. A row is a
token, or an entry, which stands for the last token of its block.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from model.checkpoint.weights import Weights
from model.config import ModelConfig
from model.observe import sites
from model.observe.sites import Listener, Site

# One expert's rows come in the order of the experts, not of the tokens; what it adds is in EXPERTS_OUTPUT.
COMPARED = tuple(site for site in sites.SITES if site not in (sites.ROUTED_GATE, sites.ROUTED_UP))
DECISIONS = (sites.SELECTED, sites.EXPERT_IDS)  # sets of integers
OF_ENTRIES = (sites.ENTRY, sites.INDEX_KEY, sites.INDEX_KEY_USED)

# What passes at a site of a layer, in the form of `Canonical`; returns what the run is to go on with, None for the same
Sink = Callable[[Site, int | None, Tensor], Tensor | None]


class Key(NamedTuple):
    """A site of a layer."""

    site: Site
    layer: int | None

    def __str__(self) -> str:
        return self.site.name if self.layer is None else f"{self.site.name} of layer {self.layer}"


class Canonical:
    """Between a model and a sink: brings what passes into a form in which equal means equal, and back.

    That form is float32 on the CPU; selections [t, index_topk] ascending after as many -1 as it takes, whatever the
    entries so far; expert ids ascending and their weights in the same order; both int64.
    """

    def __init__(self, config: ModelConfig, sink: Sink) -> None:
        self.top_k, self.sink = config.index_topk, sink
        self.order = torch.empty(0)  # of the experts that passed last: their weights come next

    def __call__(self, site: Site, layer: int | None, tensor: Tensor) -> Tensor | None:
        """Show `tensor` to the sink; returns what to go on with, in the shape, order and dtype of `tensor`."""
        x = tensor.detach().cpu()
        if site == sites.SELECTED:
            x = functional.pad(x.long(), (0, max(0, self.top_k - x.shape[1])), value=-1).sort(dim=1).values
        elif site == sites.EXPERT_IDS:
            x, self.order = x.long().sort(dim=1)
        elif site == sites.EXPERT_WEIGHTS:
            x = x.float().gather(1, self.order)
        new = self.sink(site, layer, x if site in DECISIONS else x.float())
        if new is None:
            return None
        if site == sites.SELECTED:
            entries = torch.where(new < 0, torch.iinfo(torch.int64).max, new).sort(dim=1).values[:, : tensor.shape[1]]
            new = torch.where(entries < torch.iinfo(torch.int64).max, entries, -1)
        elif site in (sites.EXPERT_IDS, sites.EXPERT_WEIGHTS):
            new = torch.empty_like(new).scatter_(1, self.order, new)
        return new.to(tensor)

    def listeners(self) -> dict[Site, Listener]:
        """One for each site, for `Transformer.attached`. They write into what passes where the sink wants it so."""

        def at(site: Site) -> Listener:
            def listen(layer: int | None, tensor: Tensor) -> None:
                new = self(site, layer, tensor)
                if new is not None:
                    tensor.copy_(new)

            return listen

        return {site: at(site) for site in COMPARED}


class Trace:
    """Everything that passed in one run, in the order of the computation."""

    def __init__(self) -> None:
        self._parts: dict[Key, list[Tensor]] = {}

    def __call__(self, site: Site, layer: int | None, tensor: Tensor) -> None:
        """Keep it."""
        self._parts.setdefault(Key(site, layer), []).append(tensor.clone())

    @property
    def keys(self) -> list[Key]:
        """In the order in which they were first passed."""
        return list(self._parts)

    def __getitem__(self, key: Key) -> Tensor:
        if len(self._parts[key]) > 1:
            self._parts[key] = [torch.cat(self._parts[key])]
        return self._parts[key][0]

    def __contains__(self, key: Key) -> bool:
        return key in self._parts


class Example(NamedTuple):
    """The first row of a site that is beyond the bound: where in the row it is farthest."""

    row: int
    element: tuple[int, ...]
    one: float
    other: float


@dataclass
class Comparison:
    """A second run against a held one: a sink for what passes in it.

    Attributes
    ----------
    config, weights
        Of the checkpoint. The gates' weights say how close two experts were.
    held
        The first run.
    bound
        Difference from which on a row is an example, and within which scores are equal; infinity for neither.
    steered
        Put the second run back on the first after every site: what differs there then is what was computed since the
        site before. With the rows that go into caches, these are put back too.
    differences
        For each site and layer [rows] float32: ``|a - b| / max(|a|, |b|)``, Euclidean over the row, so 0 to 2; of
        decisions the share that is in one set only. Infinite where a row is missing, too wide, or not finite.
    keys
        Sites and layers that were compared, in the order of the first run; filled by `close`.
    examples
        The first row beyond the bound, by site and layer.
    excused
        Rows whose decision fell otherwise between choices that are equal within the bound. The second run goes on with
        the decision of the first.
    """

    config: ModelConfig
    weights: Weights
    held: Trace
    bound: float
    steered: bool
    differences: dict[Key, Tensor] = field(default_factory=dict)
    keys: list[Key] = field(default_factory=list)
    examples: dict[Key, Example] = field(default_factory=dict)
    excused: dict[Key, list[int]] = field(default_factory=dict)

    def __call__(self, site: Site, layer: int | None, tensor: Tensor) -> Tensor | None:
        """Compare the next rows of a site."""
        key = Key(site, layer)
        known = self.differences.get(key, torch.empty(0))
        first = len(known)
        one = self.held[key][first : first + len(tensor)] if key in self.held else tensor.new_empty(0)
        if one.shape != tensor.shape:
            self.differences[key] = torch.cat((known, torch.full((len(tensor),), math.inf)))
            return None
        taken = self._excuse(key, first, one, tensor)
        goes_on = torch.where(taken.view(-1, *[1] * (one.ndim - 1)), one, tensor)
        least = _usual(self.held[key]) if site == sites.INDEX_WEIGHTS else 0.0
        rows = _shares(one, goes_on) if site in DECISIONS else _distances(one.flatten(1), goes_on.flatten(1), least)
        self.differences[key] = torch.cat((known, rows))
        beyond = (rows > self.bound).nonzero()
        if len(beyond) and key not in self.examples:
            at = int(beyond[0])
            self.examples[key] = _example(first + at, one[at].double(), tensor[at].double())
        return one if self.steered else goes_on if taken.any() else None

    def close(self, hidden: tuple[Site, ...]) -> None:
        """Count rows that never came as infinitely far, and let the first run go.

        `hidden` are sites that the second side does not show.
        """
        for key in self.held.keys:
            known = self.differences.get(key, torch.empty(0))
            missing = len(self.held[key]) - len(known)
            if missing > 0 and key.site not in hidden:
                self.differences[key] = torch.cat((known, torch.full((missing,), math.inf)))
        unheard = [key for key in self.differences if key not in self.held]
        self.keys = [key for key in self.held.keys if key in self.differences] + unheard
        self.held = Trace()

    def token(self, key: Key, row: int) -> int:
        """Position of the token that a row belongs to."""
        if key.site not in OF_ENTRIES or key.layer is None:
            return row
        return (row + 1) * self.config.ratio(key.layer) - 1

    def _excuse(self, key: Key, first: int, one: Tensor, other: Tensor) -> Tensor:
        """Which rows go on with the first run's decision: [rows] bool. With the ids of a row go their weights."""
        taken = torch.zeros(len(one), dtype=torch.bool)
        if key.site == sites.EXPERT_WEIGHTS:
            excused = self.excused.get(Key(sites.EXPERT_IDS, key.layer), [])
            taken[[row - first for row in excused if row >= first]] = True
        elif key.site in DECISIONS and math.isfinite(self.bound):
            for at in (one != other).any(1).nonzero().flatten().tolist():
                taken[at] = self._equally_good(key, first + at, one[at], other[at])
            if taken.any():
                self.excused.setdefault(key, []).extend((first + taken.nonzero().flatten()).tolist())
        return taken

    def _equally_good(self, key: Key, row: int, one: Tensor, other: Tensor) -> bool:
        """Whether the picks that were exchanged had scores that the bound does not tell apart."""
        mine, theirs = set(one.tolist()), set(other.tolist())
        exchanged = mine ^ theirs
        if len(mine) != len(theirs) or -1 in exchanged:  # one side has a pick twice, or fewer picks
            return False
        scores, scale = self._scores(key, row)
        between = scores[sorted(exchanged)]
        return bool(between.max() - between.min() <= self.bound * scale)

    def _scores(self, key: Key, row: int) -> tuple[Tensor, float]:
        """What the first run's decision was made by, in fp64 from what it was given, and the size of its terms."""
        layer = key.layer
        assert layer is not None, f"{key} has no layer"
        if key.site == sites.SELECTED:
            q = self.held[Key(sites.INDEX_QUERY_USED, layer)][row].double()  # [h, d]
            keys = self.held[Key(sites.INDEX_KEY_USED, layer)].double()  # [n, d]
            head_weights = self.held[Key(sites.INDEX_WEIGHTS, layer)][row].double()
            largest = (head_weights.abs() * q.norm(dim=1)).sum() * keys.norm(dim=1).max()
            return head_weights @ (q @ keys.T).relu(), float(largest)
        x = self.held[Key(sites.EXPERTS_INPUT, layer)][row].double()
        gate = self.weights.vector(f"layers.{layer}.ffn.gate.weight").cpu().double()
        scores = functional.softplus(gate @ x).sqrt()
        if self.config.is_hash(layer):
            return scores, 0.0  # a table leaves nothing to choose
        bias = self.weights.vector(f"layers.{layer}.ffn.gate.bias").cpu().double()
        return scores + bias, float(gate.norm(dim=1).max() * x.norm())


def _shares(one: Tensor, other: Tensor) -> Tensor:
    """Share of each row's picks that only one side has: [rows] float32, 0 to 1."""
    shares = torch.zeros(len(one))
    for at in (one != other).any(1).nonzero().flatten().tolist():
        mine, theirs = ({pick for pick in side[at].tolist() if pick >= 0} for side in (one, other))
        shares[at] = len(mine ^ theirs) / (len(mine) + len(theirs))
    return shares


def _usual(rows: Tensor) -> float:
    """Root mean square length of rows [n, h] that are a few sums each.

    What rounding leaves is a share of the terms, which are as large in all rows: where a row of one or two such sums
    cancels, it is the larger beside what remains.
    """
    return float(rows.square().sum(1).mean().sqrt())


def _distances(one: Tensor, other: Tensor, least: float) -> Tensor:
    """[rows, n] twice to [rows]: Euclidean distance, relative to the longer of two rows, or to `least`.

    0 between two rows of zeros, infinite with a NaN.
    """
    off = (one - other).norm(dim=1)
    relative = torch.where(off == 0, 0.0, off / torch.maximum(one.norm(dim=1), other.norm(dim=1)).clamp(min=least))
    return relative.nan_to_num(nan=math.inf, posinf=math.inf)


def _example(row: int, one: Tensor, other: Tensor) -> Example:
    off = (one - other).abs().nan_to_num(nan=math.inf)
    element = tuple((off == off.max()).nonzero()[0].tolist())  # torch.unravel_index would import sympy, for 2 s
    return Example(row, element, float(one[element]), float(other[element]))
