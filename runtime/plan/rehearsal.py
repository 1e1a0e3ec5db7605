"""A call of a model on one rank, rehearsed on torch's meta device: what it keeps alive, and what its ops take.

The model is the one that runs, with one layer of each kind: all else that a run has is weights, ops, ranks and a state
without bytes. What values decide is told by `Values`.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from math import lcm
from typing import Any, Final, cast

import torch
from torch import Tensor

from fathom.kernels.ops import Ops, rounding_by
from fathom.model.architectures import Config
from fathom.model.arithmetic import Arithmetic
from fathom.model.cache.gqa import GqaCache, Heads
from fathom.model.checkpoint.census import Census
from fathom.model.choices import FP8_SCORES
from fathom.model.config import ModelConfig
from fathom.model.draft import DraftHead, DraftState, StreamListener, build_head
from fathom.model.llama.adapters import Adapter
from fathom.model.llama.config import LlamaConfig
from fathom.model.llama.transformer import LlamaTransformer
from fathom.model.observe import sites
from fathom.model.observe.observer import LLAMA_PLACES, install, listening, observed, places_of
from fathom.model.observe.sites import Site
from fathom.model.ranks.ranks import Group, Shards
from fathom.model.state import State
from fathom.model.transformer import Transformer
from fathom.model.v41 import TransformerV41
from fathom.model.variants.banked_entries import BankedEntries, NewestKeys
from fathom.model.variants.choice import Full, Variant
from fathom.runtime.arithmetic import cache_formats
from fathom.runtime.options import RunOptions
from fathom.runtime.plan.alive import Alive, Moment
from fathom.runtime.plan.grouped import attending
from fathom.runtime.plan.meta_ops import on_meta
from fathom.runtime.plan.meta_ranks import MetaRanks, Values
from fathom.runtime.plan.meta_weights import MetaWeights
from fathom.runtime.plan.shapes import empty
from fathom.runtime.sharding import ShardingPlan, tokens_of_ranks

HEAD_ROWS: Final = 64  # rows of logits made at once, see `scripts.logits`; generation makes one
_aten: Final = torch.ops.aten


class Rehearsal:
    """Calls of one rank's model, of which every layer that is like another is left out."""

    def __init__(
        self, config: Config, census: Census, sharding: ShardingPlan, rank: int, options: RunOptions, ops: Ops
    ) -> None:
        self.options, self.shards, self.ops = options, sharding.ranks[rank], ops
        formats = cache_formats(options, config)
        times = _distinct(config, census, [str(formats.variant(at)) for at in range(config.num_hidden_layers)])
        layers = list(times)
        variants = tuple(formats.variant(at) for at in layers)
        if formats.variants and census.head is not None:
            variants += (Full(),) * census.head.stages
        self.config, self.formats = _of_layers(config, layers), formats._replace(variants=variants)
        self.period = 1 if isinstance(config, LlamaConfig) else lcm(*filter(None, config.compress_ratios))
        self.values = Values(*_experts_of(config, self.shards), torch.device(options.device))
        self.alive = Alive(self._answers())
        # of a rank that says nothing to the others, nothing is asked but whether there are some
        group = Group(rank, sharding.size, None if sharding.size == 1 else cast("Any", self))
        tokens = tokens_of_ranks(config, options.rank_tokens)
        stages = [1] * (census.head.stages if census.head is not None else 0)  # of the draft head, behind the layers
        ranks = MetaRanks(group, self.shards, tokens, self.values, self.alive, [*times.values(), *stages])
        scores = options.index_scores == FP8_SCORES
        made = on_meta(ops, self.alive, self.values)
        if isinstance(config, ModelConfig):
            made = rounding_by(made, config.fp8_block)
        arithmetic = Arithmetic(made, options.rounding, formats.dtype, self.formats, ranks, {}, fp8_scores=scores)
        weights = cast("Any", MetaWeights(census, lambda name, rows: sharding.rows(name, rows, rank), layers))
        self.head: DraftHead | None = None
        if isinstance(self.config, LlamaConfig):
            adapter = _adapter(self.config, self.shards, formats.dtype)
            adapters = None if options.coda_adapters is None else [adapter] * len(layers)
            self.model: Any = LlamaTransformer(self.config, weights, arithmetic, adapters)
            install(self.model, LLAMA_PLACES)
        else:
            if self.config.v41 is None:
                self.model = Transformer(self.config, weights, arithmetic)
            else:
                alike = empty(config.vocab_size, dtype=torch.int64)
                self.model = TransformerV41(self.config, weights, arithmetic, alike)
            watched = {site: place for site, place in places_of(self.config).items() if place.part != "experts.experts"}
            install(self.model, watched)
            if census.head is not None:
                self.head = build_head(census.head, self.model, weights)
                install(self.head, watched, len(layers))
        self._calls: dict[tuple[object, ...], Moment] = {}

    def _answers(self) -> dict[Any, Any]:
        """What operations of torch give that ask for values: each expert that has pairs is like the first two."""

        def counted(x: Tensor, weights: None = None, minlength: int = 0) -> Tensor:
            del weights  # torch passes both by place, however they were named
            return torch.tensor([*[self.values.of_one(x.numel())] * 2, *[0] * minlength][: max(1, minlength)])

        return {
            _aten.bincount.default: counted,
            _aten.nonzero_numpy.default: lambda x: empty(x.ndim, self.values.pairs(len(x)), dtype=torch.int64).unbind(),
            _aten.any.default: lambda _: torch.tensor(False),  # noqa: FBT003 (no token stands for an image)
            _aten.argmax.default: lambda x, dim=None: torch.zeros(x.shape[:-1] if dim == -1 else (), dtype=torch.int64),
        }

    def call(self, context: int, tokens: int, prompt: int | None, *, even: bool, few_pass: bool) -> Moment:
        """The moment that takes the most bytes of a call of so many tokens, the last of so many positions."""
        asked = context, tokens, prompt, even, few_pass
        if asked not in self._calls:
            self._calls[asked] = self._call(*asked)
        return self._calls[asked]

    def _call(self, context: int, tokens: int, prompt: int | None, even: bool, few_pass: bool) -> Moment:  # noqa: FBT001
        self.values.tokens, self.values.even, self.values.few_pass = tokens, even, few_pass
        state, drafts = self._state(context, tokens, prompt), self._drafts()
        with self._unchecked(), self.alive.counting():
            if isinstance(self.config, LlamaConfig):
                self._hold_prompt(self.config, context if prompt is None else prompt, tokens)
            ids, listener = empty(tokens, dtype=torch.int64), self._listener(state.position)
            with nullcontext() if listener is None else listening(self.model, {sites.STREAMS: listener}):
                self.model.logits(self.model(ids, state)[-HEAD_ROWS:])
            if listener is not None:
                self._draft(listener, state.position, drafts)
        return self.alive.largest

    @contextmanager
    def _unchecked(self) -> Iterator[None]:
        with ExitStack() as stack:
            for one in (self.model, *([self.head] if self.head else [])):
                stack.enter_context(observed(one).unchecked())
            yield

    def _drafts(self) -> DraftState | None:
        return None if self.head is None else self.head.new_state(self.options.draft_tokens)

    def _draft(self, listener: StreamListener, position: int, drafts: DraftState | None) -> None:
        assert self.head is not None, "no draft head"
        assert drafts is not None, "nor what it remembers"
        k = min(self.options.draft_tokens, self.head.most)
        self.head.draft(listener, [0] * self.head.config.sliding_window, position, k, drafts)

    def graph(self, context: int) -> int:
        """Bytes of a call of a token, with what invariants look at when the next layer begins: `observe.deferred`."""
        observer = observed(self.model)
        observer.deferred = cast("Any", _Kept())
        try:
            return self._call(context, 1, None, False, False).nbytes  # noqa: FBT003
        finally:
            observer.deferred = None

    def _state(self, context: int, tokens: int, prompt: int | None) -> State:
        """A state filled up to the call, which begins where windows do, or, a short one, ends where one does.

        So it closes as many windows as any call does, and a longer context takes no less.
        """
        told = {"prompt": context if prompt is None else prompt} if self.formats.prompted else {}
        begins = tokens >= self.period
        first = -(-(context - begins * tokens) // self.period) * self.period - (not begins) * tokens
        state: State = self.model.new_state(first + tokens, tokens, **told)
        state.position = first
        for layer, held in enumerate(state.layers):
            if isinstance(held, GqaCache):
                held.position, variant = state.position, self.formats.variant(layer)
                if not isinstance(variant, Full):
                    held.attend = partial(self._attend, variant, context, prompt)  # type: ignore[method-assign]
            for written in held.compressed():
                written.frontier.position, rows = state.position, written.rows
                rows.count = state.position // rows.ratio
                if isinstance(rows, BankedEntries | NewestKeys):  # which are evicted is decided by values
                    window = rows.variant.window if isinstance(rows, BankedEntries) else rows.window
                    rows.evicted, rows.evict = max(0, rows.count - window), lambda: None  # type: ignore[method-assign]
        return state

    def _attend(self, variant: Variant, context: int, prompt: int | None, heads: Heads, first: int, ops: Ops) -> Tensor:
        """`GqaCache.attend` of a variant."""
        del first, ops
        of = self.shards.kv_heads.total, context, context if prompt is None else prompt
        self.alive.take(attending(self.ops, variant, heads, *of))
        return torch.empty_like(heads.q)

    def _hold_prompt(self, config: LlamaConfig, prompt: int, tokens: int) -> None:
        """What of a long prompt is alive while layers read it one after the other, in pieces that are calls."""
        if not self.formats.prompted:
            return
        item, kv = self.formats.dtype.itemsize, self.shards.kv_heads.size * config.head_dim
        self.alive.hold("prompt, exact, of a layer", 2 * prompt * kv * item)
        if prompt > tokens:  # what the block before gave, what is left of attention, and what is made of that
            self.alive.hold("streams of the prompt", 3 * prompt * config.hidden_size * item)

    def _listener(self, position: int) -> StreamListener | None:
        """What listens for a draft head, and has as many rows of former calls as it keeps."""
        if self.head is None:
            return None
        listener = self.head.listener(self.options.draft_tokens)
        if (n := min(position, listener.kept)) > 0:
            c = self.head.config
            read = self.head.read(empty(n, c.hc_mult, c.hidden_size, dtype=self.formats.dtype))
            listener.rows.append((position - n, torch.cat([read] * len(self.head.target_layers), -1)))
        return listener


def _experts_of(config: Config, shards: Shards) -> tuple[int, int, int]:
    """Experts of a token, on all ranks, and on this one."""
    if isinstance(config, LlamaConfig):
        return 0, 1, 0
    total = config.n_routed_experts
    return config.num_experts_per_tok, total, shards.experts.size if shards.experts.split else total


class _Kept:
    """Keeps what a layer's invariants look at, as `model.observe.deferred` does, and looks at nothing."""

    def __init__(self) -> None:
        self._layer: int | None = None
        self._kept: list[Any] = []

    def finite(self, site: Site, layer: int | None, *given: Any) -> None:
        """Keep what is given."""
        del site
        if layer != self._layer:
            self._layer, self._kept = layer, []
        self._kept.append(given)

    columns = routing = selection = appended = finite


def _distinct(config: Config, census: Census, variants: list[str]) -> dict[int, int]:
    """One layer of each kind, ratio, way of routing and of remembering, and forms of matrices; how many are like it."""
    kinds: dict[object, list[int]] = {}
    for layer, variant in enumerate(variants):
        kind: object = None
        if isinstance(config, ModelConfig):
            kind = config.layer_kind(layer), config.ratio(layer), config.is_hash(layer)
            if config.v41 is not None:  # layers read what others made: all are run
                kind = layer
        kinds.setdefault((kind, variant, census.forms_of_layers[layer]), []).append(layer)
    return {layers[0]: len(layers) for layers in sorted(kinds.values())}


def _of_layers(config: Config, layers: list[int]) -> Config:
    """The config of a model of these layers alone; those whose experts are looked up come first."""
    count = len(layers)
    if isinstance(config, LlamaConfig):
        return replace(config, num_hidden_layers=count)
    drafts = config.dspark
    if drafts is not None and config.v41 is None:
        read = len(drafts.target_layer_ids)  # what it reads of each lives until the last of them
        drafts = replace(drafts, target_layer_ids=tuple(max(0, count - read + at) for at in range(read)))
    return replace(
        config,
        num_hidden_layers=count,
        max_position_embeddings=config.max_position_embeddings + lcm(*filter(None, config.compress_ratios)),
        layer_kinds=tuple(config.layer_kind(layer) for layer in layers),
        compress_ratios=tuple(config.ratio(layer) for layer in layers),
        num_hash_layers=sum(map(config.is_hash, layers)),
        dspark=drafts,
    )


def _adapter(c: LlamaConfig, shards: Shards, dtype: torch.dtype) -> Adapter:
    """Without bytes, of a layer's queries, with noise, gate and head norm."""
    H, K, d, E = shards.heads.size, shards.kv_heads.size, c.head_dim, c.hidden_size
    k, angles = empty(K * d, E, dtype=dtype), empty(H, d // 2)
    return Adapter(
        q_proj=empty(H * d, E, dtype=dtype),
        k_proj=k,
        v_proj=k,
        o_proj=empty(shards.output.size, c.num_attention_heads * d, dtype=dtype),
        lambda_weight=empty(H, E, dtype=dtype),
        lambda_bias=empty(H),
        cos=angles,
        sin=angles,
        norm=empty(d),
        gate=(empty(1, E, dtype=dtype), empty(1)),
        eta_logit=None,
    )
