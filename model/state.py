"""The state of one sequence: a cache per layer, and the position."""

import torch

from fathom.model.cache.components import Components
from fathom.model.cache.formats import CacheFormats
from fathom.model.cache.gqa import KvHeads, KvShape, all_heads
from fathom.model.cache.layers import CACHES
from fathom.model.cache.shared import shared_caches
from fathom.model.cache.variant import GroupedRoom
from fathom.model.config import ModelConfig
from fathom.model.errors import CapacityError, ConfigError
from fathom.model.llama.config import LlamaConfig
from fathom.model.llama.rope import frequencies


class State:
    """Everything that a sequence has left behind; the model advances it in place.

    All buffers are allocated here, for `max_context` positions and calls of up to `chunk` tokens (or `max_context`,
    where that is less). `prompt` is how many of the positions are the prompt's, which a grouped `shard` layer must
    know; None where there is no such layer. `heads` are the KV heads of grouped layers that are here; None: all.

    Such a prompt may come in one call, longer than `chunk`: layers read it one after the other, and one at a time holds
    it exactly. In several calls all of them do until the last.
    Of its last `rewind` tokens any number can be taken back (`rewind`), as if they had never been run.

    CapacityError for a context beyond the model's `max_position_embeddings`; ConfigError for a layer out of whose cache
    no token can be taken back, where some are to be.
    """

    first = 0  # the position that caches count from

    def __init__(
        self,
        config: ModelConfig | LlamaConfig,
        max_context: int,
        chunk: int,
        formats: CacheFormats,
        device: torch.device,
        prompt: int | None = None,
        heads: KvHeads | None = None,
        rewind: int = 0,
    ) -> None:
        assert rewind >= 0, f"rewind {rewind}"
        assert max_context > 0, f"max_context {max_context}"
        assert chunk > 0, f"chunk {chunk}"
        if max_context > config.max_position_embeddings:
            raise CapacityError(
                f"a context of {max_context} positions is beyond the model's max_position_embeddings"
                f" {config.max_position_embeddings}"
            )
        if prompt is not None and prompt > max_context:
            raise CapacityError(f"a prompt of {prompt} tokens exceeds the context of {max_context}")
        chunk = min(chunk, max_context)  # longer calls never come
        self.max_context, self.chunk, self.position = max_context, chunk, 0
        self.prompt = prompt if formats.prompted else None
        self.kept = rewind
        self._furthest = self._restored = 0  # where the sequence has been, and where a saved state was put back
        self.layers = layer_caches(config, max_context, chunk, formats, device, self.prompt, heads, rewind)

    @property
    def unread(self) -> int:
        """Tokens of a prompt yet to come that one call may have, however long its pieces are."""
        return max(0, (self.prompt or 0) - self.position)

    def reserve(self, tokens: int) -> None:
        """Check that a call of `tokens` fits; CapacityError names the limit."""
        if tokens > max(self.chunk, self.unread):
            raise CapacityError(f"a call of {tokens} tokens exceeds the chunk of {self.chunk} that the state holds")
        if self.position + tokens > self.max_context:
            raise CapacityError(
                f"{self.position + tokens} tokens exceed the context of {self.max_context} that the state was made for"
            )

    @property
    def earliest(self) -> int:
        """The first position to which the state can go back."""
        furthest = max(self._furthest, self.position)
        prompt = self.prompt if self.prompt is not None and furthest >= self.prompt else 0  # it was compressed
        return min(self.position, max(furthest - self.kept, self._restored, prompt))

    def rewind(self, position: int) -> None:
        """Take back the tokens from `position` on: no later call reads anything of them.

        CapacityError, before anything is changed, for a position before `earliest`.
        """
        assert position <= self.position, f"position {position} of a state at {self.position}"
        if position < self.earliest:
            raise CapacityError(
                f"position {position} is out of reach from {self.position}: this state goes back to {self.earliest}"
            )
        self._furthest = max(self._furthest, self.position)
        for cache in self.layers if position < self.position else ():
            cache.rewind(position, self.position)
        self.position = position

    def restored(self, position: int) -> None:
        """Note that all caches were put back as they were at `position`: what was before it is not there."""
        self.position = self._furthest = self._restored = position

    def nbytes(self) -> dict[str, int]:
        """Bytes allocated per component, summed over layers."""
        total: dict[str, int] = {}
        for cache in self.layers:
            for component, size in cache.nbytes().items():
                total[component] = total.get(component, 0) + size
        return total

    def banks(self) -> list[dict[str, float | None]]:
        """What bounded caches tell of themselves, one for each layer that has one; see `Banked.stats`.

        On several ranks all of them must ask.
        """
        told = [(layer, cache.stats()) for layer, cache in enumerate(self.layers)]
        return [{"layer": layer, **stats} for layer, stats in told if stats]


def layer_caches(
    config: ModelConfig | LlamaConfig,
    max_context: int,
    chunk: int,
    formats: CacheFormats,
    device: torch.device,
    prompt: int | None,
    heads: KvHeads | None,
    rewind: int,
) -> list[Components]:
    """Return an empty cache for each layer; ConfigError for one that cannot go back, where some are to: see `State`."""
    found: list[Components]
    if isinstance(config, LlamaConfig):
        heads = heads or all_heads(config.num_key_value_heads)
        shape = KvShape(heads, config.head_dim, frequencies(config), interleaved=False)
        room = GroupedRoom(shape, config.sliding_window, max_context, prompt, formats.dtype, device, rewind)
        found = [formats.variant(layer).grouped_cache(room) for layer in range(config.num_hidden_layers)]
    elif config.v41 is not None:
        found = shared_caches(config, max_context, chunk, formats, device, rewind)
    else:
        found = [
            CACHES[kind](config, layer, max_context, chunk, formats, device, rewind)
            for layer, kind in enumerate(config.layer_kinds)
        ]
    for layer, cache in enumerate(found if rewind else ()):
        if stuck := cache.irreversible():
            raise ConfigError(
                f"layer {layer}: {formats.variant(layer)} cannot take tokens back, as drafts need: what enters its"
                f" {' and '.join(stuck)} stays"
            )
    return found
