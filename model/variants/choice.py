"""The variants that there are. V4's layers and layers with grouped heads have their own of each method."""

from fathom.model.cache.variant import Full, Variant
from fathom.model.variants.banked_entries import Coda
from fathom.model.variants.coded_entries import Basis, Shard
from fathom.model.variants.grouped import GroupedCoda, GroupedShard

__all__ = ["Basis", "Coda", "Full", "GroupedCoda", "GroupedShard", "Shard", "Variant"]
