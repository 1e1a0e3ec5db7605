"""What each kind of layer remembers: SWA a ring; HCA a ring and entries; CSA a ring, entries and indexer keys.

Capacities come from the context the state was made for and the layer's ratio, widths from what writes the buffer:
entries are `head_dim` wide, indexer keys `index_head_dim`.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from fathom.kernels.formats import basis_rows, coded_rows
from fathom.model.cache.entries import Entries
from fathom.model.cache.formats import CacheFormats
from fathom.model.cache.frontier import Frontier
from fathom.model.cache.window import WindowRing
from fathom.model.call import Call
from fathom.model.config import LayerKind, ModelConfig
from fathom.model.variants.banked_entries import BankedEntries, NewestKeys, newest_rows
from fathom.model.variants.choice import Basis, Coda, Shard

SIGNS = 0  # seed of the signs before the rotation of coded rows: those of every run, so that states can be exchanged

AnyEntries = Entries | BankedEntries
AnyKeys = Entries | NewestKeys


class Part(Mapping[str, Tensor]):
    """What a mapping has under names of one prefix, by the rest of the names; asked for only when it is asked for."""

    def __init__(self, whole: Mapping[str, Tensor], prefix: str) -> None:
        self.whole, self.prefix = whole, prefix

    def __getitem__(self, name: str) -> Tensor:
        """Return one tensor."""
        return self.whole[self.prefix + name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return (name.removeprefix(self.prefix) for name in self.whole if name.startswith(self.prefix))

    def __len__(self) -> int:
        """Return the number of names."""
        return sum(name.startswith(self.prefix) for name in self.whole)


class Stand(NamedTuple):
    """Where something of a cache stands, and where it should."""

    site: str
    position: int
    found: int
    wanted: int


class Written(NamedTuple):
    """What a compressor writes: the site of its rows, its state, the rows, and how wide they are."""

    site: str
    frontier: Frontier
    rows: AnyEntries | AnyKeys
    width: int


class Component(Protocol):
    """One buffer of a layer's cache, as saving and accounting see it."""

    def nbytes(self) -> int:
        """Bytes allocated."""
        ...

    def tensors(self, position: int) -> dict[str, Tensor]:
        """What must survive a save at `position`, as views where the buffer allows it."""
        ...

    def shapes(self, position: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what `tensors` gives at `position`, whatever the buffer holds now."""
        ...

    def restore(self, position: int, saved: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave at `position`."""
        ...


@runtime_checkable
class Rewindable(Component, Protocol):
    """A buffer out of which its last tokens can be taken again."""

    def rewind(self, position: int, end: int) -> None:
        """Forget the tokens at positions ``position .. end - 1``, the last ones it was given."""
        ...


@runtime_checkable
class Banked(Component, Protocol):
    """A buffer of bounded size, which can tell what became of the tokens or entries that it was given."""

    def stats(self) -> dict[str, float | None]:
        """Slots in use, how alike they are, and counts of what has happened."""
        ...


class Components:
    """The cache of one layer, of any architecture, as saving and accounting see it: buffers by name."""

    def __init__(self, components: dict[str, Component]) -> None:
        self.components = components

    def stands(self, position: int, first: int) -> list[Stand]:
        """Which of its parts stand elsewhere than they should when so many tokens are written.

        `first` is the earliest token whose window must still be there.
        """
        raise NotImplementedError

    def compressed(self) -> list[Written]:
        """What its compressors write; there are none."""
        return []

    def nbytes(self) -> dict[str, int]:
        """Bytes allocated, by component."""
        return {name: component.nbytes() for name, component in self.components.items()}

    def stats(self) -> dict[str, float | None]:
        """What its bounded buffer tells of itself; nothing where it has none."""
        return {
            name: value
            for part in self.components.values()
            if isinstance(part, Banked)
            for name, value in part.stats().items()
        }

    def irreversible(self) -> list[str]:
        """Components that cannot forget what they were given last."""
        return [name for name, component in self.components.items() if not isinstance(component, Rewindable)]

    def rewind(self, position: int, end: int) -> None:
        """Forget the tokens at positions ``position .. end - 1``, the last ones, of a cache with room for that."""
        for component in self.components.values():
            assert isinstance(component, Rewindable), f"{type(component).__name__}: see irreversible"
            component.rewind(position, end)

    def tensors(self, position: int) -> dict[str, Tensor]:
        """Return what a saved state needs, by ``component.part``."""
        return dict(self.saved(position))

    def saved(self, position: int) -> Iterator[tuple[str, Tensor]]:
        """One after the other, what `tensors` gives at once."""
        for name, component in self.components.items():
            for part, tensor in component.tensors(position).items():
                yield f"{name}.{part}", tensor

    def shapes(self, position: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what `tensors` gives at `position`, whatever this cache holds now."""
        return {
            f"{name}.{part}": shape
            for name, component in self.components.items()
            for part, shape in component.shapes(position).items()
        }

    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtype of each of them, while nothing is held."""
        return {name: part.dtype for name, part in self.tensors(0).items()}

    def restore(self, position: int, saved: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave at `position`; StateError for content that a component cannot have had."""
        for name, component in self.components.items():
            component.restore(position, Part(saved, f"{name}."))


class LayerCache(Components):
    """The cache of a V4 layer; this class itself is that of an SWA layer, which remembers its window alone."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        max_context: int,
        chunk: int,
        formats: CacheFormats,
        device: torch.device,
        rewind: int = 0,
    ) -> None:
        del layer, max_context  # a window depends on neither
        self.ring = WindowRing(config.sliding_window, chunk, config.head_dim, formats.dtype, device, rewind)
        super().__init__({"window": self.ring})

    def write(self, call: Call, kv: Tensor) -> None:
        """Store the window's KV [t, d]; of a captured call `advance` has to be told on the host."""
        if isinstance(call.first, Tensor):
            self.ring.data.index_copy_(0, call.places(self.ring.data.shape[0]), kv)
        else:
            self.ring.write(call.first, kv)

    def ring_stands(self, position: int, first: int) -> list[Stand]:
        """The ring lacks the newest position, or the oldest that `first` sees."""
        ends = (max(0, first - self.ring.window + 1), position - 1) if position else ()
        return [
            Stand("attention.ring", at, self.ring.held_for(at), at)
            for at in ends
            if at < position and self.ring.held_for(at) != at
        ]

    def stands(self, position: int, first: int) -> list[Stand]:
        """The ring lacks a position, or a closed window has no row."""
        found = self.ring_stands(position, first)
        for site, frontier, rows, _ in self.compressed():
            closed = position // frontier.ratio
            if rows.count != closed:
                found.append(Stand(f"{site}, rows", position, rows.count, closed))
            if frontier.position != position:
                found.append(Stand(f"{site}, tokens", position, frontier.position, position))
        return found

    def evict(self) -> None:
        """Let go of what may go when all tokens of a call have attended."""

    def advance(self, position: int) -> None:
        """Note what a captured call of one token has written."""
        self.ring.advance(position)
        for _, frontier, rows, _ in self.compressed():
            assert isinstance(rows, Entries), f"a captured call writes no {type(rows).__name__}"
            frontier.advance()
            if frontier.position % frontier.ratio == 0:
                rows.advance()


class HcaCache(LayerCache):
    """Window, and one entry per `ratio` tokens to which every later token attends."""

    overlap = False

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        max_context: int,
        chunk: int,
        formats: CacheFormats,
        device: torch.device,
        rewind: int = 0,
    ) -> None:
        super().__init__(config, layer, max_context, chunk, formats, device, rewind)
        ratio = config.ratio(layer)
        n, d, rope = max_context // ratio, config.head_dim, config.qk_rope_head_dim
        self.entries: AnyEntries
        match formats.variant(layer):
            case Coda() as coda:
                self.entries = BankedEntries(
                    ratio, coda, d, rope, newest_rows(ratio, coda, chunk, n), formats.dtype, device
                )
            case Shard(basis=Basis(_, fit, rope_bits)):
                self.entries = Entries(ratio, basis_rows.allocate(n, fit, rope, rope_bits, SIGNS, device))
            case Shard(bits):
                self.entries = Entries(ratio, coded_rows.allocate(n, d, bits, device, SIGNS))
            case _:
                self.entries = Entries(ratio, formats.entry_rows(n, d, rope, device))
        self.frontier = Frontier(ratio, config.head_dim, overlap=self.overlap, device=device, rewind=rewind)
        self.components |= {"entries": self.entries, "frontier": self.frontier}

    def compressed(self) -> list[Written]:
        """The compressor's."""
        return [Written("attention.entry", self.frontier, self.entries, self.frontier.width)]

    def evict(self) -> None:
        """Let go of entries that may go when all tokens of a call have attended."""
        self.entries.evict()


class CsaCache(HcaCache):
    """Window, overlapping entries, and an indexer key per entry by which tokens choose among them."""

    overlap = True

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        max_context: int,
        chunk: int,
        formats: CacheFormats,
        device: torch.device,
        rewind: int = 0,
    ) -> None:
        super().__init__(config, layer, max_context, chunk, formats, device, rewind)
        ratio, width = config.ratio(layer), config.index_head_dim
        n = max_context // ratio
        self.keys: AnyKeys
        match formats.variant(layer):
            case Coda() as coda:
                self.keys = NewestKeys(ratio, coda, width, newest_rows(ratio, coda, chunk, n), formats.dtype, device)
            case Shard(_, bits):
                self.keys = Entries(ratio, coded_rows.allocate(n, width, bits, device, SIGNS))
            case _:
                self.keys = Entries(ratio, formats.key_rows(n, width, device))
        self.key_frontier = Frontier(ratio, config.index_head_dim, overlap=True, device=device, rewind=rewind)
        self.components |= {"indexer_keys": self.keys, "indexer_frontier": self.key_frontier}

    def compressed(self) -> list[Written]:
        """The compressor's and the indexer's."""
        keys = Written("indexer.key_used", self.key_frontier, self.keys, self.key_frontier.width)
        return [*super().compressed(), keys]

    def evict(self) -> None:
        """Let go of entries and keys that may go when all tokens of a call have attended."""
        super().evict()
        self.keys.evict()


# The cache that each kind of layer needs.
CACHES = {LayerKind.SWA: LayerCache, LayerKind.HCA: HcaCache, LayerKind.CSA: CsaCache}
