"""What layers of V4.1 remember: some make entries and index keys, and others read them."""

import torch

from fathom.kernels.formats.stored import Rows, Slots
from fathom.model.cache.components import Components, Stand, Written
from fathom.model.cache.entries import RowCache
from fathom.model.cache.formats import CacheFormats
from fathom.model.cache.frontier import Frontier
from fathom.model.cache.layers import LayerCache, lacking
from fathom.model.cache.variant import Room
from fathom.model.cache.window import WindowRing
from fathom.model.config import ModelConfig


class SharedCache(LayerCache):
    """Window, and the entries and keys that the layer makes (`source` is None), or those of another.

    Attributes
    ----------
    tokens
        Numbers of the last tokens, by which a layer with n-grams looks them up; None: it has none.

    """

    entries: RowCache[Rows | Slots]
    keys: RowCache[Rows]
    key_frontier: Frontier  # of both: a key is made of its entry

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        max_context: int,
        chunk: int,
        formats: CacheFormats,
        device: torch.device,
        rewind: int = 0,
        source: "SharedCache | None" = None,
    ) -> None:
        super().__init__(config, layer, max_context, chunk, formats, device, rewind)
        assert config.v41 is not None, "of its config"
        self.tokens: WindowRing | None = None
        if layer in config.v41.engram.layer_ids:
            self.tokens = WindowRing(config.v41.engram.max_ngram, chunk, 1, torch.int64, device, rewind)
            self.components["tokens"] = self.tokens
        self.own, self.key_width = source is None and bool(config.ratio(layer)), config.index_head_dim
        if source is not None:
            self.entries, self.keys, self.key_frontier = source.entries, source.keys, source.key_frontier
        elif ratio := config.ratio(layer):
            room = Room(ratio, max_context // ratio, config.head_dim, config.qk_rope_head_dim, chunk)
            variant = formats.variant(layer)
            self.entries = variant.entry_cache(room, formats, device)
            self.keys = variant.key_cache(room._replace(width=config.index_head_dim), formats, device)
            self.key_frontier = Frontier(ratio, config.head_dim, overlap=False, device=device, rewind=rewind)
            self.components |= {"entries": self.entries, "frontier": self.key_frontier, "indexer_keys": self.keys}

    def ring_stands(self, position: int, first: int) -> list[Stand]:
        """The ring of the window, or that of tokens, lacks the newest position, or the oldest that `first` sees."""
        tokens = [] if self.tokens is None else lacking("engram.tokens", self.tokens, position, first)
        return [*super().ring_stands(position, first), *tokens]

    def compressed(self) -> list[Written]:
        """What the layer makes itself."""
        if not self.own:
            return []
        entries, keys = "attention.entry", "indexer.key_used"
        frontier = self.key_frontier
        return [
            Written(entries, frontier, self.entries, frontier.width),
            Written(keys, frontier, self.keys, self.key_width),
        ]


def shared_caches(
    config: ModelConfig, max_context: int, chunk: int, formats: CacheFormats, device: torch.device, rewind: int
) -> list[Components]:
    """Return an empty cache for each layer."""
    found: list[SharedCache] = []
    for layer in range(config.num_hidden_layers):
        reads = bool(config.ratio(layer)) and not config.makes_entries(layer)
        source = found[config.entry_source(layer)] if reads else None
        found.append(SharedCache(config, layer, max_context, chunk, formats, device, rewind, source))
    return list(found)
