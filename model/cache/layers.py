"""What each kind of layer remembers: SWA a ring; HCA a ring and entries; CSA a ring, entries and indexer keys.

Capacities come from the context the state was made for and the layer's ratio, widths from what writes the buffer:
entries are `head_dim` wide, indexer keys `index_head_dim`.
"""

import torch
from torch import Tensor

from fathom.model.cache.components import Components, Stand, Written
from fathom.model.cache.entries import Entries
from fathom.model.cache.formats import CacheFormats
from fathom.model.cache.frontier import Frontier
from fathom.model.cache.variant import Room
from fathom.model.cache.window import WindowRing
from fathom.model.call import Call
from fathom.model.config import LayerKind, ModelConfig


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
        return lacking("attention.ring", self.ring, position, first)

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


def lacking(site: str, ring: WindowRing, position: int, first: int) -> list[Stand]:
    """Of the newest position in a ring and the oldest that `first` sees, those that it lacks."""
    ends = (max(0, first - ring.window + 1), position - 1) if position else ()
    return [Stand(site, at, ring.held_for(at), at) for at in ends if at < position and ring.held_for(at) != at]


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
        room = Room(ratio, max_context // ratio, config.head_dim, config.qk_rope_head_dim, chunk)
        self.entries = formats.variant(layer).entry_cache(room, formats, device)
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
        ratio = config.ratio(layer)
        room = Room(ratio, max_context // ratio, config.index_head_dim, config.qk_rope_head_dim, chunk)
        self.keys = formats.variant(layer).key_cache(room, formats, device)
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
