"""The memory plan: what one rank needs for a context, in bytes, before anything is allocated.

Weights follow from the census and the placement, caches from the state's own classes on torch's meta device; both are
exact. What a call holds beside them is a bound, read off the code op by op (`runtime.plan.call`), and so close that a
process's peak is within 5 % of the plan (`python -m scripts.probe memory`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from kernels.attention import cpu as attention
from kernels.indexer import bound as index_bound
from kernels.indexer import cpu as indexer
from kernels.linear import cpu as linear
from kernels.linear.cpu import _native_bfloat16
from model.cache.layers import CACHES
from model.checkpoint.census import Census
from model.choices import ALL_TO_ALL, AUTO
from model.config import LayerKind, ModelConfig
from model.ranks.ranks import SPLIT_FROM, Share, evenly, undivided
from model.variants.choice import Coda, Shard
from runtime.arithmetic import DTYPES, cache_formats
from runtime.options import RunOptions
from runtime.plan.call import largest, untiled_scores
from runtime.plan.ops import Costs
from runtime.plan.sizes import Moment, Sizes, stored_forms
from runtime.plan.weights import WeightKind, Weights, total, weights
from runtime.sharding import Placement

# Beside tensors. Of a GPU: CUDA's context, cuBLAS's workspaces, NCCL's buffers, gaps between blocks, and what fused
# kernels take beyond the cpu ops (256 MiB of index scores, tens of split sums); assumed, not measured. Of a process
# on the CPU: the interpreter, torch's libraries, and what the C library keeps of freed blocks: 237 MiB before the first
# token in audits/memory.md, 304 at the end of audits/long-context.md.
RESERVE: Final = {"cuda": 2 << 30, "cpu": 304 << 20}
HELD_POSITION: Final = 40  # bytes of a Python integer and of the list's reference to it


@dataclass(frozen=True, slots=True)
class Plan:
    """What one rank needs."""

    rank: int
    ranks: int
    context: int  # positions
    chunk: int  # tokens of a call, at most
    weights: Mapping[WeightKind, Weights]
    caches: Mapping[LayerKind, Mapping[str, int]]  # bytes by component, of all layers of a kind
    call: Moment  # the largest of any call, whatever the values: all tokens to one expert, all entries above the best
    typical_call: (
        Moment  # the same if tokens spread evenly over experts, and few entries pass the indexer's comparisons
    )
    host: int  # Python's list of the positions in each ring, on the CPU
    reserve: int  # beside tensors
    untiled: int  # not needed here: fp32 index scores of a chunk, made at once

    @property
    def own_weights(self) -> int:
        """Memory that weights take; those of mapped files take none that could not be dropped."""
        return total(self.weights).own

    @property
    def mapped_weights(self) -> int:
        """Bytes of mapped files that the model looks at."""
        return total(self.weights).mapped

    @property
    def cache_bytes(self) -> int:
        """All caches."""
        return sum(sum(parts.values()) for parts in self.caches.values())

    @property
    def needed(self) -> int:
        """Memory without which the run fails: all but mapped files, whose pages the system may drop and read again."""
        return self.own_weights + self.cache_bytes + self.call.nbytes + self.host + self.reserve


class Planner:
    """Plans of one rank of a run, for any context and chunk."""

    def __init__(
        self, config: ModelConfig, census: Census, placement: Placement, options: RunOptions, rank: int
    ) -> None:
        self.config, self.placement, self.options, self.rank = config, placement, options, rank
        gpu = options.device == "cuda"
        self.weights = weights(config, census, placement, rank, mapped=not gpu)
        self.forms = stored_forms(census)
        item = DTYPES[options.dtype].itemsize
        narrow = not gpu and _native_bfloat16(torch.device("cpu"))
        integers = index_bound.native(torch.device(options.device))
        self.formats = cache_formats(options, config)
        _, entries, keys, kinds = self.formats
        coded = any(isinstance(kind, Shard) for kind in kinds)
        based = any(isinstance(kind, Shard) and kind.basis is not None for kind in kinds)
        banked = max((kind.exact + kind.summary for kind in kinds if isinstance(kind, Coda)), default=0)
        self.costs = Costs(
            item, options.numerics == "deployed", narrow, integers, gpu, entries, keys, coded, based, banked
        )

    def plan(self, context: int, chunk: int | None = None) -> Plan:
        """Plan for `context` positions in calls of up to `chunk` tokens (None: the run's own).

        Parameters
        ----------
        context : int
            At least 1. Whether the model has so many positions is not asked.
        chunk : int | None
            Longer than the context it is as long as the context.

        Returns
        -------
        Plan
            Monotone in both: a longer context or chunk never needs less.
        """
        chunk = min(chunk or self.options.prefill_chunk, context)
        call, typical_call = (self._largest_moment(context, chunk, typical=typical) for typical in (False, True))
        rows = self.config.sliding_window + chunk - 1
        gpu = self.options.device == "cuda"
        return Plan(
            self.rank,
            self.placement.size,
            context,
            chunk,
            self.weights,
            self._caches(context, chunk),
            call,
            typical_call,
            0 if gpu else self.config.num_hidden_layers * rows * HELD_POSITION,
            RESERVE[self.options.device],
            untiled_scores(self.config, chunk, context),
        )

    def largest_context(self, memory: int, chunk: int | None = None) -> int:
        """Most positions that fit in so many bytes, at most those that the model has; 0 where none does."""
        return most(lambda n: self.plan(n, chunk).needed <= memory, self.config.max_position_embeddings)

    def largest_chunk(self, memory: int, context: int) -> int:
        """Most tokens of a call with which a context fits in so many bytes; 0 where not even one does."""
        return most(lambda n: self.plan(context, n).needed <= memory, context)

    def _caches(self, context: int, chunk: int) -> dict[LayerKind, dict[str, int]]:
        """What the state allocates, asked of one layer of each kind and ratio on the meta device."""
        config, formats, meta = self.config, self.formats, torch.device("meta")
        found: dict[LayerKind, dict[str, int]] = {}
        layers: dict[tuple[LayerKind, int, str], list[int]] = {}
        for layer, kind in enumerate(config.layer_kinds):
            layers.setdefault((kind, config.ratio(layer), str(formats.variant(layer))), []).append(layer)
        for (kind, *_), alike in layers.items():
            cache = CACHES[kind](config, alike[0], context, chunk, formats, meta)
            parts = found.setdefault(kind, {})
            for component, size in cache.nbytes().items():
                parts[component] = parts.get(component, 0) + len(alike) * size
        return found

    def _largest_moment(self, context: int, chunk: int, *, typical: bool) -> Moment:
        """The largest of calls of 1 to `chunk` tokens: what they take grows with their tokens between these sizes."""
        ranks, shares = self.placement.size, self.placement.ranks[self.rank]
        bounds = {1, linear.FEW, SPLIT_FROM * ranks - 1, chunk}
        bounds |= {max(1, attention.ROWS // shares.heads.size), max(1, indexer.ROWS // self.config.index_n_heads)}
        bounds |= {max(1, indexer.BOUNDED_ROWS // self.config.index_n_heads)}
        moments = []
        for tokens in sorted(bound for bound in bounds if bound <= chunk):
            share = self._tokens(tokens)
            call = Sizes(self.config, self.costs, self.forms, shares, ranks, share, context, typical, typical)
            moments.append(largest(call))
        return max(moments, key=lambda moment: moment.nbytes)

    def _tokens(self, count: int) -> Share:
        """As `model.ranks.ranks.Ranks.tokens`; of all ranks the first has the most."""
        chosen, ranks = self.options.dispatch, self.placement.size
        split = chosen == ALL_TO_ALL or (chosen == AUTO and count >= SPLIT_FROM * ranks)
        return evenly(count, 0, ranks) if split else undivided(count)


def most(fits: Callable[[int], bool], largest: int) -> int:
    """The largest n of 1 .. `largest` that fits, where all below one that fits do too; 0 when 1 does not."""
    low, high = 0, largest + 1  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
