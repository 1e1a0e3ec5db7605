"""A run as digests: 64 bits for every row of every tensor that passed a site, little enough to keep for a whole run.

Two runs are then compared bit by bit without holding the tensors of either. Any one number that changes changes the
digest for certain; several could cancel with one chance in about 2^64.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from model.observe import sites
from model.observe.observer import listening
from model.observe.sites import Listener, Site
from model.state import State
from model.transformer import Transformer

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Sites whose rows a token, or an entry, has for itself: all but those of routed experts, whose rows come by expert.
OF_TOKENS = tuple(site for site in sites.SITES if site not in {sites.ROUTED_GATE, sites.ROUTED_UP, sites.LOGITS})


def row_digests(x: Tensor) -> Tensor:
    """Digest of each row: the sum of its numbers' bits times odd constants, modulo 2^64.

    Parameters
    ----------
    x
        [t, ...] of any dtype. Integer rows may end in -1, which counts as nothing: a selection is padded to the number
        of entries that there are, which depends on the call and not on the token.

    Returns
    -------
    Tensor
        [t] int64.

    """
    rows = x.contiguous().flatten(1)
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


class Passed(NamedTuple):
    """One tensor that passed a site."""

    site: Site
    layer: int | None
    first: int  # position of the first token of the call
    rows: Tensor  # [t or n] int64, see `row_digests`


@contextmanager
def traced(model: Transformer, watched: Sequence[Site], first: int = 0) -> Iterator[list[Passed]]:
    """Collect what passes `watched` inside the ``with``, in order; the first token run there stands at `first`."""
    passed: list[Passed] = []
    called, after = first, first  # positions of this call's first token, and of the next one's

    def begin(layer: int | None, x: Tensor) -> None:
        nonlocal called, after
        del layer
        called, after = after, after + x.shape[0]

    def note(site: Site, layer: int | None, x: Tensor) -> None:
        passed.append(Passed(site, layer, called, row_digests(x)))

    listeners: dict[Site, Listener] = {site: partial(note, site) for site in watched}
    with listening(model, {sites.EMBEDDED: begin}), listening(model, listeners):
        yield passed


Joined = dict[tuple[Site, int | None], Tensor]  # digests of all rows of a run, in the order of computation


def joined(passed: Sequence[Passed]) -> Joined:
    """Rows of a whole run by site and layer, whatever calls they came in: tokens, or entries."""
    parts: dict[tuple[Site, int | None], list[Tensor]] = {}
    for one in passed:
        parts.setdefault((one.site, one.layer), []).append(one.rows)
    return {key: torch.cat(rows) for key, rows in parts.items()}


class Difference(NamedTuple):
    """A place at which two runs differ, and the first row that does."""

    site: str
    layer: int | None
    row: str  # "token 17", "entry 3"
    rows: int  # that differ there

    def __str__(self) -> str:
        return f"{named(self.site, self.layer)}, {self.row}"


def named(what: str, layer: int | None) -> str:
    """The name of a place in the model."""
    return what if layer is None else f"{what} of layer {layer}"


def first_difference(
    one: Joined, other: Joined, upto: Callable[[Site, int | None], int] | None = None
) -> Difference | None:
    """First place in the order of computation where the runs differ, within the first `upto` rows (all where None)."""
    for (site, layer), rows in one.items():
        count = max(len(rows), len(other[site, layer])) if upto is None else upto(site, layer)
        mine, yours = rows[:count], other[site, layer][:count]
        both = min(len(mine), len(yours))
        off = (mine[:both] != yours[:both]).nonzero()
        missing = abs(len(mine) - len(yours))
        if len(off) or missing:
            row = int(off[0]) if len(off) else both
            kind = "token" if site.shape.startswith("t ") else "entry"
            return Difference(site.name, layer, f"{kind} {row}", len(off) + missing)
    return None


def cache_digests(state: State) -> dict[tuple[int, str], Tensor]:
    """Digests [rows] of what must survive in each part of each layer's cache."""
    return {
        (layer, name): row_digests(part)
        for layer, cache in enumerate(state.layers)
        for name, part in cache.tensors(state.position).items()
    }
