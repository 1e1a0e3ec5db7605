"""A call of a model on one rank, rehearsed on torch's meta device: what it keeps alive, and what its ops take.

The model is the one that runs, with one layer of each kind: all else that a run has is weights, ops, ranks and a state
without bytes. What values decide is told by `Values`.
"""

from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from typing import Any, Final, cast

import torch
from torch import Tensor

from fathom.kernels.ops import Ops
from fathom.model.architectures import Config
from fathom.model.arithmetic import Arithmetic
from fathom.model.cache.gqa import GqaCache, Heads
from fathom.model.checkpoint.census import Census
from fathom.model.choices import FP8_SCORES
from fathom.model.config import ModelConfig
from fathom.model.checkpoint.tensor_mapping import Form
from fathom.model.draft import HEADS, DraftHead, StreamListener
from fathom.model.llama.adapters import Adapter
from fathom.model.llama.config import LlamaConfig
from fathom.model.llama.transformer import LlamaTransformer
from fathom.model.observe import sites
from fathom.model.observe.sites import Site
from fathom.model.observe.observer import LLAMA_PLACES, PLACES, install, listening, observed
from fathom.model.ranks.ranks import Shards
from fathom.model.state import State
from fathom.model.transformer import Transformer
from fathom.model.variants.banked_entries import BankedEntries, NewestKeys
from fathom.model.variants.choice import Full, Variant
from fathom.runtime.arithmetic import cache_formats
from fathom.runtime.options import RunOptions
from fathom.runtime.plan.alive import Alive, Moment
from fathom.runtime.plan.grouped import attending
from fathom.runtime.plan.meta import MetaOps, MetaRanks, MetaWeights, Values
from fathom.runtime.plan.shapes import empty
from fathom.runtime.sharding import ShardingPlan

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
        self.values = Values(*_experts_of(config, self.shards))
        self.alive = Alive(self._answers())
        ranks = MetaRanks(rank, sharding, options.rank_tokens, self.values, self.alive, list(times.values()), gloo=options.device == "cpu")
        made = MetaOps(self.alive, self.values, torch.device(options.device)).of(ops)
        scores = options.index_scores == FP8_SCORES
        arithmetic = Arithmetic(made, options.rounding, formats.dtype, self.formats, ranks, {}, fp8_scores=scores)
        weights = cast("Any", MetaWeights(census, lambda name, rows: sharding.rows(name, rows, rank), layers))
        self.head: DraftHead | None = None
        if isinstance(self.config, LlamaConfig):
            adapter = _adapter(self.config, self.shards, formats.dtype)
            adapters = None if options.coda_adapters is None else [adapter] * len(layers)
            self.model: Any = LlamaTransformer(self.config, weights, arithmetic, adapters)
            install(self.model, LLAMA_PLACES)
        else:
            self.model = Transformer(self.config, weights, arithmetic)
            watched = {site: place for site, place in PLACES.items() if place.part != "experts.experts"}
            install(self.model, watched)
            if census.head is not None:
                self.head = HEADS[census.head](self.model, weights)
                install(self.head, watched, len(layers))
        self.call = cache(self._call)

    def _answers(self) -> dict[Any, Any]:
        """What operations of torch give that ask for values: each expert that has pairs is like the first two."""

        def counted(x: Tensor, *_: Any, minlength: int = 0) -> Tensor:
            return torch.tensor([*[self.values.of_one(x.numel())] * 2, *[0] * minlength][: max(1, minlength)])

        return {
            _aten.bincount.default: counted,
            _aten.nonzero_numpy.default: lambda x: empty(x.ndim, self.values.pairs(len(x)), dtype=torch.int64).unbind(),
            _aten.argmax.default: lambda x, dim=None: torch.zeros(x.shape[:-1] if dim == -1 else (), dtype=torch.int64),
        }

    def _call(self, context: int, tokens: int, prompt: int | None, even: bool, few_pass: bool) -> Moment:  # noqa: FBT001
        """The moment that takes the most bytes of a call of so many tokens, the last of so many positions."""
        self.values.tokens, self.values.even, self.values.few_pass = tokens, even, few_pass
        state, drafts = self._state(context, tokens, prompt), self.head and self.head.new_state(self.options.draft_tokens)
        with ExitStack() as stack:
            for one in (self.model, self.head) if self.head else (self.model,):
                stack.enter_context(observed(one).unchecked())
            stack.enter_context(torch.inference_mode())
            stack.enter_context(self.alive.counting())
            if isinstance(self.config, LlamaConfig):
                self._hold_prompt(self.config, context if prompt is None else prompt, tokens)
            listener = self._listener(state.position)
            listeners = {sites.STREAMS: listener} if listener else {}
            with listening(self.model, listeners):
                self.model.logits(self.model(empty(tokens, dtype=torch.int64), state)[-HEAD_ROWS:])
            if self.head and listener and drafts:
                k = min(self.options.draft_tokens, self.head.most)
                self.head.draft(listener, [0] * self.head.config.sliding_window, context, k, drafts)
        return self.alive.largest

    def graph(self, context: int) -> int:
        """Bytes of a call of one token whose invariants are looked at when the next layer begins: `observe.deferred`."""
        observer = observed(self.model)
        observer.deferred = cast("Any", _Kept())
        try:
            return self._call(context, 1, None, even=False, few_pass=False).nbytes
        finally:
            observer.deferred = None

    def _state(self, context: int, tokens: int, prompt: int | None) -> State:
        """A state whose caches are filled up to the call."""
        told = {"prompt": context if prompt is None else prompt} if self.formats.prompted else {}
        state: State = self.model.new_state(context, tokens, **told)
        state.position = context - tokens
        for layer, cache in enumerate(state.layers):
            if isinstance(cache, GqaCache):
                cache.position, variant = state.position, self.formats.variant(layer)
                if not isinstance(variant, Full):
                    cache.attend = partial(self._attend, variant, context, prompt)  # type: ignore[method-assign]
            for written in cache.compressed():
                written.frontier.position, rows = state.position, written.rows
                rows.count = state.position // rows.ratio
                if isinstance(rows, BankedEntries | NewestKeys):  # which are evicted is decided by values
                    window = rows.variant.window if isinstance(rows, BankedEntries) else rows.window
                    rows.evicted, rows.evict = max(0, rows.count - window), lambda: None  # type: ignore[method-assign]
        return state

    def _attend(self, variant: Variant, context: int, prompt: int | None, heads: Heads, first: int, ops: Ops) -> Tensor:
        """`GqaCache.attend` of a variant."""
        del first, ops
        sizes = *heads.q.shape[:2], heads.k.shape[1], heads.q.shape[2]
        whole = self.model.arithmetic.ranks.shards.kv_heads.total
        self.alive.take(attending(self.ops, variant, *sizes, heads.q.itemsize, whole, context, prompt))
        return torch.empty_like(heads.q)

    def _hold_prompt(self, config: LlamaConfig, prompt: int, tokens: int) -> None:
        """What of a long prompt is alive while one layer after the other reads it, and the call is one of its pieces."""
        if not self.formats.prompted:
            return
        item, kv = self.formats.dtype.itemsize, self.shards.kv_heads.size * config.head_dim
        self.alive.hold("prompt, exact, of a layer", 2 * prompt * kv * item)
        if prompt > tokens:  # what the block before gave, what is left of attention, and what is made of that
            self.alive.hold("streams of the prompt", 3 * prompt * config.hidden_size * item)

    def _listener(self, position: int) -> StreamListener | None:
        """What listens for a drafting head, and has as many rows of former calls as it keeps."""
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
    return config.num_experts_per_tok, config.n_routed_experts, shards.experts.size if shards.experts.split else config.n_routed_experts


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
    """One layer of each kind, ratio, way of routing, way of remembering, and forms of matrices: how many are like it."""
    forms: dict[int, set[tuple[str, Form]]] = {}
    for name, mapping in census.mappings.items():
        before, _, rest = name.partition("layers.")
        if rest and before in ("", "model."):
            layer, _, rest = rest.partition(".")
            forms.setdefault(int(layer), set()).add((rest.rpartition("experts.")[2].lstrip("0123456789"), mapping.form))
    kinds: dict[object, list[int]] = {}
    for layer, variant in enumerate(variants):
        kind: object = None
        if isinstance(config, ModelConfig):
            kind = config.layer_kind(layer), config.ratio(layer), config.is_hash(layer)
        kinds.setdefault((kind, variant, frozenset(forms[layer])), []).append(layer)
    return {layers[0]: len(layers) for layers in sorted(kinds.values())}


def _of_layers(config: Config, layers: list[int]) -> Config:
    """The config of a model of these layers alone; those whose experts are looked up come first."""
    count = len(layers)
    if isinstance(config, LlamaConfig):
        return replace(config, num_hidden_layers=count)
    drafts = config.dspark and replace(config.dspark, target_layer_ids=(count - 1,) * len(config.dspark.target_layer_ids))
    return replace(
        config,
        num_hidden_layers=count,
        layer_kinds=tuple(config.layer_kind(layer) for layer in layers),
        compress_ratios=tuple(config.ratio(layer) for layer in layers),
        num_hash_layers=sum(map(config.is_hash, layers)),
        dspark=drafts,
    )


def _adapter(c: LlamaConfig, shards: Shards, dtype: torch.dtype) -> Adapter:
    """Without bytes, of a layer's queries, with noise, gate and head norm."""
    rows, kv_rows, d, E = shards.heads.size, shards.kv_heads.size, c.head_dim, c.hidden_size
    matrices = (rows * d, E), (kv_rows * d, E), (kv_rows * d, E), (shards.output.size, c.num_attention_heads * d), (rows, E)
    angles = empty(rows, d // 2)
    gate = empty(1, E, dtype=dtype), empty(1)
    made = (empty(*shape, dtype=dtype) for shape in matrices)
    return Adapter(*made, empty(rows), angles, angles, empty(d), gate, None)
