"""The memory plan: what one rank needs for a context, in bytes, before anything is allocated.

Weights follow from the census and the sharding, caches from the state's own classes on torch's meta device; both are
exact. What a call holds beside them is a bound: the activations that `model/` keeps alive, and the scratch that the ops
say they take, so close that on a CPU a process's peak is within 5 % of the plan (`python -m scripts.probe memory`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Final

import torch

from fathom.kernels.experts.reference import FEW
from fathom.kernels.ops import CPU
from fathom.model.architectures import Config
from fathom.model.cache import window
from fathom.model.cache.gqa import KvHeads
from fathom.model.checkpoint.census import Census
from fathom.model.choices import EXACT, FP8_SCORES
from fathom.model.config import LayerKind, ModelConfig
from fathom.model.draft import DraftState, draft_caches
from fathom.model.llama.adapters import adapters_nbytes
from fathom.model.llama.config import LlamaConfig
from fathom.model.observe.invariants import CELLS
from fathom.model.ranks.dispatch import tables, together
from fathom.model.ranks.ranks import SPLIT_FROM, AxisShard, evenly, splits, undivided
from fathom.model.state import layer_caches
from fathom.model.variants.choice import Full
from fathom.runtime.arithmetic import cache_formats
from fathom.runtime.op_sets import of_triton
from fathom.runtime.options import RunOptions
from fathom.runtime.plan.alive import Moment
from fathom.runtime.plan.exchanges import Call
from fathom.runtime.plan.gpus import Rates
from fathom.runtime.plan.prefill import Prefill, prefill
from fathom.runtime.plan.rehearsal import Rehearsal
from fathom.runtime.plan.token import Token, token
from fathom.runtime.plan.weights import F32, I64, WeightKind, Weights, matrices, total, weights
from fathom.runtime.sharding import ShardingPlan, tokens_of_ranks

# Beside tensors. Of a GPU: CUDA's context, cuBLAS's workspaces, NCCL's buffers, and gaps between blocks; assumed, not
# measured. Of a process on the CPU: the interpreter, torch's libraries, and what the C library keeps of freed blocks:
# 237 MiB before the first token in audits/memory.md, 304 at the end of audits/long-context.md.
RESERVE: Final = {"cuda": 2 << 30, "cpu": 304 << 20}
LOADED: Final = 10e9  # bytes of weights that a rank copies to its GPU in a second; assumed, not measured
DRAFTING: Final = "draft head"  # among kinds of layers, what holds its rings
POSITION: Final = 40  # bytes of a Python integer and of the list's reference to it


@dataclass(frozen=True, slots=True)
class Plan:
    """What one rank needs."""

    rank: int
    ranks: int
    context: int  # positions
    chunk: int  # tokens of a call, at most
    prompt: int | None  # tokens of the prompt that its caches are of; None where they do not depend on one
    weights: Mapping[WeightKind, Weights]
    caches: Mapping[str, Mapping[str, int]]  # bytes by kind of layer and component, of all its layers
    call: Moment  # the largest of any call, whatever the values: all tokens to one expert, all entries above the best
    typical: Callable[[], Moment] = field(compare=False, repr=False)  # asks the planner for `typical_call`
    graph: int  # pool of a captured step, into which nothing else is put, and its buffers; 0: none is captured
    host: int  # Python's list of the positions in each ring, on the CPU
    reserve: int  # beside tensors
    untiled: int  # not needed here: fp32 index scores of a chunk, made at once

    @property
    def typical_call(self) -> Moment:
        """The largest if tokens spread evenly over experts, and few entries pass the indexer's comparisons."""
        return self.typical()

    @property
    def own_weights(self) -> int:
        """Memory that weights take; those of mapped files take none that could not be dropped."""
        return total(self.weights).own

    @property
    def load_seconds(self) -> float:
        """How long all weights of the rank take to load at the assumed rate; on a CPU next to none are copied."""
        return self.own_weights / LOADED

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
        return self.own_weights + self.cache_bytes + self.call.nbytes + self.graph + self.host + self.reserve


class Planner:
    """Plans of one rank of a run, for any context and chunk; `backend` is the name of its op set.

    The reference's memory is bounded by nothing, so its plan, as that of any other set, is the one of CPU. `prompt` is
    how many tokens the prompt has, of a context that is shorter all of it; None: not known, and each part of a plan is
    for the prompt that takes most of it. It matters where a cache depends on it alone.
    """

    def __init__(
        self,
        config: Config,
        census: Census,
        sharding: ShardingPlan,
        options: RunOptions,
        rank: int,
        backend: str,
        prompt: int | None = None,
    ) -> None:
        self.config, self.sharding, self.options, self.rank = config, sharding, options, rank
        self.census, self.head, self.prompt, self._backend = census, census.head, prompt, backend
        self.weights = weights(config, census, sharding, rank, mapped=options.device == "cpu")
        if options.coda_adapters is not None:
            assert isinstance(config, LlamaConfig), "other models have none"
            size = adapters_nbytes(Path(options.coda_adapters), config, sharding.ranks[rank])
            self.weights[WeightKind.ADAPTERS] = Weights(size, own=size)
        self.ops = of_triton(options, config) if backend == "triton" else CPU
        self.formats = cache_formats(options, config)

    @cached_property
    def rehearsal(self) -> Rehearsal:
        """The model without bytes."""
        return Rehearsal(self.config, self.census, self.sharding, self.rank, self.options, self.ops)

    @cached_property
    def call(self) -> Call:
        """A call of one token."""
        options = self.options
        return Call(
            matrices=matrices(self.census, self.sharding, self.rank),
            item=self.formats.dtype.itemsize,
            rounding=options.rounding,
            shards=self.sharding.ranks[self.rank],
            ranks=self.sharding.size,
            tokens=undivided(1),
            context=1,
            fp8_scores=options.index_scores == FP8_SCORES,
        )

    def plan(self, context: int, chunk: int | None = None) -> Plan:
        """Plan for `context` positions in calls of up to `chunk` tokens (None: the run's own).

        Longer than the context, a chunk is as long as the context. Whether the model has so many positions is not
        asked. Monotone in both: a longer context or chunk never needs less.
        """
        asked = chunk or self.options.prefill_chunk
        chunk = min(asked, context)
        call = partial(self._largest_call, context, chunk, self.tables(asked))
        host = untiled = 0
        if isinstance(self.config, ModelConfig):
            ratios = [self.config.ratio(at) for at, kind in enumerate(self.config.layer_kinds) if kind is LayerKind.CSA]
            untiled = chunk * (context // min(ratios)) * F32 if ratios else 0
            if self.options.device == "cpu":
                ring_rows = window.rows(self.config.sliding_window, chunk, self.options.draft_tokens)
                host = self.config.num_hidden_layers * ring_rows * POSITION
        prompt, caches = self._caches(context, chunk)
        return Plan(
            rank=self.rank,
            ranks=self.sharding.size,
            context=context,
            chunk=chunk,
            prompt=prompt,
            weights=self.weights,
            caches=caches,
            call=call(usual=False),
            typical=partial(call, usual=True),
            graph=self.graph(context),
            host=host,
            reserve=RESERVE[self.options.device],
            untiled=untiled,
        )

    def _largest_call(self, context: int, chunk: int, held: dict[str, int], *, usual: bool) -> Moment:
        """What is alive in it with `held`, which calls of any size have."""
        one = self._of_any_size(context, chunk, usual=usual)
        return one._replace(parts=one.parts | held)

    def _of_any_size(self, context: int, chunk: int, *, usual: bool) -> Moment:
        """The largest moment of calls of up to `chunk` tokens.

        What they take grows with their tokens, but where an op changes over, ranks begin to share tokens out, or these
        begin to travel in halves.
        """
        shared, halved = SPLIT_FROM * self.sharding.size - 1, chunk
        if isinstance(self.config, ModelConfig):
            halved = together(self.sharding.size, self.config.num_experts_per_tok / self.config.n_routed_experts)
        sizes = {min(chunk, size) for size in (1, FEW, shared, halved, chunk)}
        return max((self.largest(context, n, even=usual, few_pass=usual) for n in sizes), key=lambda one: one.nbytes)

    def tables(self, chunk: int) -> dict[str, int]:
        """Bytes of the tables into which ranks write each other's rows, made for calls of up to so many tokens."""
        c, ranks, split = self.config, self.sharding.size, self.sharding.ranks[self.rank].experts.split
        if self.options.device != "cuda" or not split or not isinstance(c, ModelConfig):
            return {}
        if not splits(self.options.rank_tokens, chunk, ranks):
            return {}
        row = c.hidden_size * self.formats.dtype.itemsize
        held = tables(chunk, ranks, c.num_experts_per_tok, c.n_routed_experts, row)
        return {"tables that ranks write into": sum(table.nbytes for table in held)}

    def graph(self, context: int) -> int:
        """Bytes that a captured step keeps beside caches (`runtime.graph`), where a run may capture one; else 0.

        What a call of one token holds at most, in the pool of its own that a graph has, and what its invariants look
        at; with the logits and the cells of these, which are read when it has run. What torch's allocator takes for a
        pool beyond its tensors, in segments of 2 and 20 MiB, is the reserve's.
        """
        full = all(isinstance(variant, Full) for variant in self.formats.variants)
        captured = self.options.device == "cuda" and self._backend == "triton" and full and self.head is None
        if not captured or not isinstance(self.config, ModelConfig):
            return 0
        cells = CELLS * (self.config.num_hidden_layers + 1) * I64
        buffers = self.config.vocab_size * F32 + cells
        return self.rehearsal.graph(context) + buffers

    def largest(self, context: int, tokens: int, *, even: bool, few_pass: bool) -> Moment:
        """The largest moment of one call, see `Values`."""
        prompt = None if self.prompt is None else min(self.prompt, context)
        of_v4 = isinstance(self.config, ModelConfig)  # of others no value decides anything
        return self.rehearsal.call(context, tokens, prompt, even=even and of_v4, few_pass=few_pass and of_v4)

    def token(self, context: int, rates: Rates) -> Token | None:
        """What a token after so many positions asks of this rank's device; None but of V4 with full caches."""
        if not isinstance(self.config, ModelConfig) or self.options.kv:
            return None
        return token(self.config, self.call, self.weights, self._caches(context, 1)[1], context, rates)

    def prefill(self, tokens: int, context: int, rates: Rates, parts: int | None = None) -> Prefill:
        """What a call of so many tokens, the last of so many positions, asks of this rank's device; of V4 alone.

        `parts`: in how many parts tokens travel to whole experts; None: in as many as they do.
        """
        assert isinstance(self.config, ModelConfig), "of other models nothing is counted"
        call = replace(self.call, tokens=self._tokens(tokens), context=context)
        return prefill(self.config, call, rates, exact=self.options.fp8_products == EXACT, parts=parts)

    def largest_context(self, memory: int, chunk: int | None = None) -> int:
        """Most positions that fit in so many bytes, at most those that the model has.

        0 where none does, or the prompt does not.
        """
        low, high = 0, self.config.max_position_embeddings  # low fits, what is above high does not
        while low < high:  # a call takes no less at the end of a longer context
            low = self._fits(memory, chunk, high, range(low, high))
            high = self._fits(memory, chunk, max(low, 1), range(low, high))
            if low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if self.plan(middle, chunk).needed <= memory else (low, middle - 1)
        return low if low >= (self.prompt or 0) else 0

    def _fits(self, memory: int, chunk: int | None, calls: int, among: range) -> int:
        """The most positions `among` these and the next that fit, were a call what it is at the end of `calls` ones."""
        plan, asked = self.plan(calls, chunk), chunk or self.options.prefill_chunk

        def needed(context: int) -> int:
            caches = sum(sum(parts.values()) for parts in self._caches(context, min(asked, context))[1].values())
            return plan.needed - plan.cache_bytes + caches

        return among.start + most(lambda more: needed(among.start + more) <= memory, len(among))

    def largest_chunk(self, memory: int, context: int) -> int:
        """Most tokens of a call with which a context fits in so many bytes; 0 where not even one does."""
        return most(lambda n: self.plan(context, n).needed <= memory, context)

    def _caches(self, context: int, chunk: int) -> tuple[int | None, dict[str, dict[str, int]]]:
        """What the state allocates, by kind of layer, and of which prompt where that depends on one.

        Of a prompt that is not known, the length that takes most: it takes some bytes for each token of the prompt and
        others for each that follows, so the most at one of the ends.
        """
        formats, found, heads = self.formats, [], KvHeads(self.sharding.ranks[self.rank].kv_heads)
        rewind = self.options.draft_tokens
        told = (0, context) if self.prompt is None else (min(self.prompt, context),)
        for prompt in told if formats.prompted else (None,):
            kinds: dict[str, dict[str, int]] = {}
            caches = layer_caches(self.config, context, chunk, formats, torch.device("meta"), prompt, heads, rewind)
            for layer, cache in enumerate(caches):
                kind = self.config.layer_kind(layer) if isinstance(self.config, ModelConfig) else "attention"
                parts = kinds.setdefault(kind, {})
                for component, size in cache.nbytes().items():
                    parts[component] = parts.get(component, 0) + size
            found.append((prompt, kinds))
        of, largest = max(found, key=lambda one: sum(sum(parts.values()) for parts in one[1].values()))
        if self.head is None or not isinstance(self.config, ModelConfig):
            return of, largest
        stages = draft_caches(self.head, self.config, formats, torch.device("meta"), rewind)
        return of, largest | {DRAFTING: {"window": DraftState(stages).nbytes()}}

    def _tokens(self, count: int) -> AxisShard:
        """As `model.ranks.ranks.Ranks.tokens`; of all ranks the first has the most."""
        ranks = self.sharding.size
        own = splits(tokens_of_ranks(self.config, self.options.rank_tokens), count, ranks)
        return evenly(count, 0, ranks) if own else undivided(count)


def most(fits: Callable[[int], bool], largest: int) -> int:
    """The largest n of 1 .. `largest` that fits, where all below one that fits do too; 0 when 1 does not."""
    low, high = 0, largest + 1  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
