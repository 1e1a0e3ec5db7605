"""The seam between a layer with grouped heads and what it remembers: one call's heads go in, attended values come out.

A cache of this kind is not read by the layer. It takes the heads of a call, remembers what it means to remember of
them, and attends, because only it knows the form in which the past is held.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fathom.kernels.ops import Ops
from fathom.model.cache.components import Component, Components, Part, Stand
from fathom.model.ranks.ranks import AxisShard, Ranks, undivided


class KvHeads(NamedTuple):
    """The KV heads of a layer that a cache holds: all, or on several ranks this rank's."""

    own: AxisShard
    ranks: Ranks | None = None  # those among whom they are split

    @property
    def size(self) -> int:
        """How many are here."""
        return self.own.size

    @property
    def total(self) -> int:
        """How many the layer has."""
        return self.own.total

    def whole(self, x: Tensor, dim: int, width: int = 1) -> Tensor:
        """Put together what all ranks have of their heads, along axis `dim`: any number of times `size` x `width`."""
        if not self.own.split:
            return x
        assert self.ranks is not None, f"heads {self.own} of no ranks"
        times = x.shape[dim] // (self.size * width)
        return self.ranks.whole(x.unflatten(dim, (times, self.size, width)), dim + 1, self.own).flatten(dim, dim + 2)

    def of_first(self, x: Tensor) -> Tensor:
        """What the first rank has in `x`, in its place: where a fit must be the same on all."""
        if self.own.split:
            assert self.ranks is not None, f"heads {self.own} of no ranks"
            self.ranks.of_first(x.view(torch.uint8))
        return x

    def part(self, x: Tensor, dim: int, width: int = 1) -> Tensor:
        """What of a tensor that `whole` made is of the heads that are here."""
        if not self.own.split:
            return x
        times = x.shape[dim] // (self.total * width)
        return self.own.of(x.unflatten(dim, (times, self.total, width)), dim + 1).flatten(dim, dim + 2)


def kv_heads(ranks: Ranks) -> KvHeads:
    """The KV heads that a rank has of every layer of a Llama."""
    return KvHeads(ranks.shards.kv_heads, ranks)


def all_heads(count: int) -> KvHeads:
    """All KV heads of a layer, in one place."""
    return KvHeads(undivided(count))


class KvShape(NamedTuple):
    """What the layer writes."""

    heads: KvHeads  # that are here
    head_dim: int
    freqs: Tensor  # [head_dim / 2] float32, radians per position, scaled as the model scales them
    interleaved: bool  # whether rotary pairs are neighbours


class Heads(NamedTuple):
    """Queries, keys and values of one call's t tokens, in the run's dtype; H a multiple of K."""

    q: Tensor  # [t, H, d], rotated at the tokens' absolute positions
    k: Tensor  # [t, K, d], the same
    v: Tensor  # [t, K, d]
    gates: Tensor | None  # [t] float32, how much each token is worth keeping; None: a layer without write gates


class GroupedComponent(Component, Protocol):
    """One buffer of a cache with grouped heads."""

    def by_head(self) -> Mapping[str, tuple[int, int]]:
        """The axis of KV heads in each tensor of `tensors` that has one, and places of a head, see `KvHeads.whole`."""
        ...


class _OfHeads(Part):
    """Of saved tensors what is of the heads that are here, asked for only when it is asked for."""

    def __init__(self, whole: Mapping[str, Tensor], heads: KvHeads, places: Mapping[str, tuple[int, int]]) -> None:
        super().__init__(whole, "")
        self.heads, self.places = heads, places

    def __getitem__(self, name: str) -> Tensor:
        """Return one tensor."""
        whole = super().__getitem__(name)
        return self.heads.part(whole, *self.places[name]) if name in self.places else whole


class GqaCache(Components, ABC):
    """The cache of one layer with grouped heads.

    What it saves is that of all heads, whatever ranks they are on, and what it takes back too: a saved state does not
    depend on their number. All ranks must save together.
    """

    def __init__(self, grouped: Mapping[str, GroupedComponent], heads: KvHeads) -> None:
        super().__init__(dict(grouped))
        self.heads, self.grouped = heads, grouped
        self.position = 0  # tokens taken so far: the position of the next one

    def stands(self, position: int, first: int) -> list[Stand]:
        """Other tokens were taken than the position says."""
        del first
        return [] if self.position == position else [Stand("attention.kv", position, self.position, position)]

    def rewind(self, position: int, end: int) -> None:
        """Forget the tokens at positions ``position .. end - 1``, the last ones."""
        super().rewind(position, end)
        self.position = position

    def saved(self, position: int) -> Iterator[tuple[str, Tensor]]:
        """One after the other, what a saved state needs, of all heads."""
        places = self._by_head()
        for name, part in super().saved(position):
            yield name, self.heads.whole(part, *places[name]) if name in places else part

    def shapes(self, position: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what `tensors` gives at `position`."""
        found = super().shapes(position)
        for name, (dim, _) in self._by_head().items():
            if name in found:
                shape = found[name]
                found[name] = (*shape[:dim], shape[dim] // self.heads.size * self.heads.total, *shape[dim + 1 :])
        return found

    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtype of each of them, while nothing is held."""
        return {name: part.dtype for name, part in super().saved(0)}

    def restore(self, position: int, saved: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave at `position`."""
        super().restore(position, _OfHeads(saved, self.heads, self._by_head()))
        self.position = position

    def _by_head(self) -> dict[str, tuple[int, int]]:
        return {f"{name}.{part}": at for name, one in self.grouped.items() for part, at in one.by_head().items()}

    @abstractmethod
    def attend(self, heads: Heads, first: int, ops: Ops) -> Tensor:
        """Take the tokens at positions ``first ..`` and attend from each to itself and to what is held before it.

        Parameters
        ----------
        heads
            Of t tokens; t is at most the chunk that the cache was made for.
        first
            Position of the first token, which is `position`.
        ops
            What to compute with.

        Returns
        -------
        Tensor
            [t, H, d] in the dtype of `heads.q`.

        """
