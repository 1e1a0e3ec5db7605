"""A run as digests: 64 bits for every row of every tensor that passed a site, little enough to keep for a whole run.

Two runs are compared bit by bit without holding the tensors of either. Any one number that changes changes the digest
for certain; several could cancel with one chance in about 2^64.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from fathom.model.observe import sites
from fathom.model.observe.observer import listening
from fathom.model.observe.sites import Site
from fathom.model.state import State
from fathom.model.transformer import Transformer

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_OF_EXPERTS = {sites.ROUTED_GATE, sites.ROUTED_UP}
EVERY = (*sites.SITES, *sites.OF_V41)
OF_TOKENS = tuple(site for site in EVERY if site not in _OF_EXPERTS)  # all but those whose rows come by expert


def row_digests(x: Tensor) -> Tensor:
    """Digest of each row: the sum of its numbers' bits times odd constants, modulo 2^64.

    Parameters
    ----------
    x
        [t] or [t, ...] of any dtype. Integer rows may end in -1, which counts as nothing: a selection is padded to the
        number of entries that there are, which depends on the call and not on the token.

    Returns
    -------
    Tensor
        [t] int64.

    """
    rows = x.contiguous()[:, None].flatten(1)
    bits = rows.view(_BITS[rows.element_size()]).long()
    if not x.dtype.is_floating_point:
        bits = bits + 1
    return (bits * _multipliers(bits.shape[1], bits.device)).sum(1)


@lru_cache(maxsize=64)
def _multipliers(count: int, device: torch.device) -> Tensor:
    """Odd 64-bit numbers [count] without a pattern, the first of them the same for every count (splitmix64)."""
    z = torch.arange(1, count + 1, device=device) * -0x61C8864680B583EB
    z = (z ^ (z >> 30 & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    z = (z ^ (z >> 27 & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return z | 1


Passed = tuple[Site, int | None, Tensor]  # what passed a site in a layer, as digests of its rows


@contextmanager
def traced(model: Transformer, watched: Sequence[Site], passed: list[Passed]) -> Iterator[None]:
    """Append what passes `watched` inside the ``with`` to `passed`, in order."""

    def note(site: Site, layer: int | None, x: Tensor) -> None:
        passed.append((site, layer, row_digests(x)))

    with listening(model, {site: partial(note, site) for site in watched}):
        yield


class Difference(NamedTuple):
    """A site of a layer at which two runs differ, and the first row that does."""

    site: Site
    layer: int | None
    row: int

    def __str__(self) -> str:
        """Where it is, as findings tell it."""
        kind = "token" if self.site.shape.startswith("t ") else "row" if self.layer is None else "entry"
        kind = "row" if self.site in _OF_EXPERTS else kind
        return f"{named(self.layer, self.site.name)}, {kind} {self.row}"


def named(layer: int | None, what: str) -> str:
    """The name of a place in the model."""
    return what if layer is None else f"{what} of layer {layer}"


class Trace(NamedTuple):
    """A whole run, whatever calls it came in."""

    rows: dict[tuple[Site, int | None], Tensor]  # digests of tokens or entries, in the order of computation
    caches: dict[tuple[int, str], Tensor]  # what it left, by layer and component.part: [rows]

    @classmethod
    def of(cls, passed: Sequence[Passed], state: State) -> "Trace":
        """Join the rows of all calls."""
        parts: dict[tuple[Site, int | None], list[Tensor]] = {}
        for site, layer, rows in passed:
            parts.setdefault((site, layer), []).append(rows)
        caches = {
            (layer, name): row_digests(part)
            for layer, cache in enumerate(state.layers)
            for name, part in cache.tensors(state.position).items()
        }
        return cls({place: torch.cat(rows) for place, rows in parts.items()}, caches)

    def differences(self, other: "Trace", upto: Callable[[Site, int | None], int] | None = None) -> list[Difference]:
        """Sites at which another run differs within the first `upto` rows (all where None), in order of computation."""
        found = []
        for site, layer in self.rows | other.rows:
            one, two = (trace.rows.get((site, layer), torch.empty(0)) for trace in (self, other))
            if upto is not None:
                one, two = one[: upto(site, layer)], two[: upto(site, layer)]
            both = min(len(one), len(two))
            off = (one[:both] != two[:both]).nonzero()
            if len(off) or len(one) != len(two):
                found.append(Difference(site, layer, int(off[0]) if len(off) else both))
        return found

    def other_caches(self, other: "Trace") -> list[tuple[int, str]]:
        """Parts of caches, by layer and component.part, in which another run left something else."""
        return [place for place, rows in self.caches.items() if not torch.equal(rows, other.caches[place])]
