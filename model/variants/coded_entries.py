"""Every entry as codes: Shard, for layers whose entry is key and value at once."""

from dataclasses import dataclass, field

import torch

from fathom.kernels.formats import basis_rows, coded_rows
from fathom.kernels.formats.stored import EigenKeys
from fathom.model.cache.entries import Entries
from fathom.model.cache.formats import CacheFormats
from fathom.model.cache.variant import Room, Variant

SIGNS = 0  # seed of the signs before the rotation of coded rows: those of every run, so that states can be exchanged


@dataclass(frozen=True, slots=True)
class Basis:
    """A basis that was fitted to a layer's entries beforehand, see `runtime.basis`."""

    digest: str  # of all below: what tells one basis from another, here and in a saved state
    fit: EigenKeys = field(compare=False, repr=False)  # of the nope dims, without any row
    rope_bits: int = field(compare=False)  # of a value of the rope dims

    def __str__(self) -> str:
        """Return what tells it from others."""
        return self.digest


@dataclass(frozen=True, slots=True)
class Shard(Variant):
    """Every entry as codes: rotated by Hadamard (`formats.coded_rows`), or in a basis (`formats.basis_rows`)."""

    name, coded = "shard", True
    bits: int = 6  # of a value of an entry; in a basis, as many bytes as that takes, the basis included
    keys: int = 8  # of a value of an index key
    basis: Basis | None = None

    def entry_cache(self, room: Room, formats: CacheFormats, device: torch.device) -> Entries:
        """Codes of each, as one row."""
        del formats
        if self.basis is None:
            return Entries(room.ratio, coded_rows.allocate(room.rows, room.width, self.bits, device, SIGNS))
        fit, bits = self.basis.fit, self.basis.rope_bits
        return Entries(room.ratio, basis_rows.allocate(room.rows, fit, room.rope, bits, SIGNS, device))

    def key_cache(self, room: Room, formats: CacheFormats, device: torch.device) -> Entries:
        """Codes of each, rotated."""
        del formats
        return Entries(room.ratio, coded_rows.allocate(room.rows, room.width, self.keys, device, SIGNS))
