"""The parts of the cache variants that stand outside of a V4 model, as a value: a fault may replace them.

What a V4 layer holds is reached through the model (`probes.fault.Fault.inject`). The caches of grouped-query layers and
what their codes rest on are made by the probe that measures them, which takes them from here.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.formats import lloyd_max
from kernels.shard import reference as shard
from model.variants.coda import CodaCache
from model.variants.shard import ShardCache


class Parts(NamedTuple):
    """One callable per part."""

    coda: type[CodaCache]
    shard: type[ShardCache]
    codebook: Callable[[int, torch.device], Tensor]  # `kernels.formats.lloyd_max.codebook`
    relative_scores: Callable[..., Tensor]  # `kernels.shard.reference.relative_scores`


PARTS = Parts(CodaCache, ShardCache, lloyd_max.codebook, shard.relative_scores)
