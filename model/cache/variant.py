"""How a layer remembers what is older than its window: what a KV-compression method answers for, and `Full`, no method.

A variant is a value with its settings, the choice of `--kv` layer by layer. An SWA layer has nothing older than its
window, and no variant but `Full`. Layers with compressed entries ask for an `entry_cache` and a `key_cache`, those with
grouped heads for a `grouped_cache`.
"""

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from fathom.kernels.formats.stored import Rows, Slots
from fathom.model.cache.entries import Entries, RowCache
from fathom.model.cache.full import FullCache
from fathom.model.cache.gqa import GqaCache, KvShape

if TYPE_CHECKING:
    from fathom.model.cache.formats import CacheFormats


class Room(NamedTuple):
    """What a layer's entries or keys need room for."""

    ratio: int  # tokens per row
    rows: int  # of the whole context
    width: int
    rope: int  # of the width, the last columns, which are rotated
    chunk: int  # tokens of a call at most


class GroupedRoom(NamedTuple):
    """The same of a layer with grouped heads."""

    shape: KvShape
    window: int | None  # positions that a token sees by the model's own sliding window, for `Full` alone; None: all
    max_context: int
    prompt: int | None  # how many of these are the prompt's; None: no layer needs to know
    dtype: torch.dtype  # of what is kept exact
    device: torch.device
    rewind: int  # tokens that can be taken back, where the variant can at all


@dataclass(frozen=True, slots=True)
class Variant:
    """How a layer remembers; what it has no answer to is not asked of its layers."""

    name: ClassVar[str]
    coded: ClassVar[bool] = False  # whether its rows are given unrounded, because it rounds them itself
    prompted: ClassVar[bool] = False  # whether its cache must know how long the prompt is

    def __str__(self) -> str:
        """Return it as `--kv` spells it, with every setting."""
        values = {part.name: getattr(self, part.name) for part in fields(self)}
        settings = ",".join(f"{key}={value}" for key, value in values.items() if value is not None)
        return f"{self.name}:{settings}" if settings else self.name

    def entry_cache(self, room: Room, formats: "CacheFormats", device: torch.device) -> RowCache[Rows | Slots]:
        """Return a layer's empty entries."""
        raise NotImplementedError

    def key_cache(self, room: Room, formats: "CacheFormats", device: torch.device) -> RowCache[Rows]:
        """Return the empty index keys of a CSA layer."""
        raise NotImplementedError

    def check(self, heads: int, head_dim: int) -> None:
        """Refuse to be the variant of a layer of so many KV heads: ConfigError."""

    def grouped_cache(self, room: GroupedRoom) -> GqaCache:
        """Return the empty cache of a layer with grouped heads."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Full(Variant):
    """Everything, in the run's formats."""

    name = "full"

    def entry_cache(self, room: Room, formats: "CacheFormats", device: torch.device) -> Entries:
        """One row each."""
        return Entries(room.ratio, formats.entry_rows(room.rows, room.width, room.rope, device))

    def key_cache(self, room: Room, formats: "CacheFormats", device: torch.device) -> Entries:
        """One row each."""
        return Entries(room.ratio, formats.key_rows(room.rows, room.width, device))

    def grouped_cache(self, room: GroupedRoom) -> GqaCache:
        """Keys and values of every position."""
        shape, window = room.shape, room.window
        return FullCache(shape.heads, shape.head_dim, window, room.max_context, room.dtype, room.device)
