"""In which form a sequence's caches are stored: a choice of the run, not of the model.

"dtype" stores the run's dtype. The narrow forms are offered in `deployed` numerics alone, whose rounded values they
hold: the same bits come back, so the choice changes no logit and no selection (`observe.invariants.stored` sees to it).

entries, "fp8"
    E4M3 with a scale per 64 columns, rope dims in BF16: exactly how deployed entries are rounded. Not for an fp32 run,
    whose rope dims BF16 does not hold.
keys, "fp4"
    E2M1 with a scale per 32 columns: exactly how deployed keys are rounded.
keys, "fp8"
    E4M3 with one power of two per row. A deployed key is E2M1 times a power of two for each 32 of its columns, and all
    of that fits one row unless the largest value of some group is less than 2^-14 of the row's largest (E4M3 reaches
    from 2^-9 to 448). The Hadamard rotation spreads what a key holds over all columns, so groups that far apart are
    not to be expected; nothing excludes them, and a run that meets them ends there.
"""

from typing import NamedTuple

import torch

from fathom.kernels.formats import rows
from fathom.kernels.formats.rows import Rows
from fathom.model.cache.variant import Full, Variant
from fathom.model.choices import ENTRY_FORMATS, KEY_FORMATS


class CacheFormats(NamedTuple):
    """The form of each kind of row; "dtype" is the dtype of the run."""

    dtype: torch.dtype  # of the run's activations; the SWA rings are always stored in it
    entries: str  # one of ENTRY_FORMATS: compressed entries of CSA and HCA layers
    keys: str  # one of KEY_FORMATS: index keys of CSA layers
    variants: tuple[Variant, ...] = ()  # how each layer remembers; none are given: all are `Full`

    def variant(self, layer: int) -> Variant:
        """How a layer remembers."""
        return self.variants[layer] if self.variants else Full()

    @property
    def prompted(self) -> bool:
        """Whether a layer's cache must know how long the prompt is."""
        return any(variant.prompted for variant in self.variants)

    def entry_rows(self, n: int, head_dim: int, rope_dim: int, device: torch.device) -> Rows:
        """Allocate `n` entries of `head_dim` columns, of which the last `rope_dim` are rotated."""
        if self.entries == "fp8":
            return rows.fp8_entries(n, head_dim, rope_dim, device)
        assert self.entries == "dtype", f"entries: {self.entries}, want one of {ENTRY_FORMATS}"
        return torch.zeros(n, head_dim, dtype=self.dtype, device=device)

    def key_rows(self, n: int, index_head_dim: int, device: torch.device) -> Rows:
        """Allocate `n` index keys."""
        match self.keys:
            case "fp8":
                return rows.fp8_keys(n, index_head_dim, device)
            case "fp4":
                return rows.fp4_keys(n, index_head_dim, device)
        assert self.keys == "dtype", f"keys: {self.keys}, want one of {KEY_FORMATS}"
        return torch.zeros(n, index_head_dim, dtype=self.dtype, device=device)

    def entry_bytes(self, head_dim: int, rope_dim: int) -> int:
        """Bytes of one entry: 584 for V4's widths in FP8, 1024 in BF16."""
        return rows.nbytes(self.entry_rows(1, head_dim, rope_dim, torch.device("meta")))

    def key_bytes(self, index_head_dim: int) -> int:
        """Bytes of one index key: 68 for V4's width in FP4, 132 in FP8, 256 in BF16."""
        return rows.nbytes(self.key_rows(1, index_head_dim, torch.device("meta")))
