"""Watching a model: `install` wraps, once, the methods whose return values are sites.

Listeners are shown it first, for they may write it; then it is looked at for what must never happen
(`model.observe.invariants`), and for what must be the same on every rank. The equations know nothing of it. Before and
after each call the caches are looked at, whether they stand where the position says.

On the host's device what must never happen is looked at where it may. On another one, with Triton's kernels, that would
wait for the device in every layer: it is measured there, and the host reads what was found once, at the end of the call
(`model.observe.deferred`): before the call's position counts, and before anything is chosen by what it returns.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from fathom.kernels.experts.reference import by_expert
from fathom.model.arithmetic import Arithmetic
from fathom.model.cache.components import Components
from fathom.model.call import Call
from fathom.model.errors import ConfigError, Tripwire
from fathom.model.observe import invariants, sites
from fathom.model.observe.sites import Listener, Site, axes
from fathom.model.ranks.ranks import KEPT, Ranks, undivided

if TYPE_CHECKING:
    from fathom.model.config import ModelConfig
    from fathom.model.observe.deferred import Deferred

ALWAYS, WHOLE_CALLS = "always", "in calls of which every rank has all tokens"
STEP_BY_STEP: Final = ("reference", "cpu")  # op sets whose fused ops round every step to the dtype of the run


class Place(NamedTuple):
    """Where a site is: what a method of a part of the model returns."""

    part: str  # attributes that lead to it, from its layer or, outside of all layers, from the model
    method: str
    output: int = -1  # of several that it returns; -1: it returns one
    shard: str = ""  # of which axis a rank has a shard: the first, "tokens" of the call; the second, "heads" or "inner"
    same: str = ""  # when it must be the same on every rank: ALWAYS, WHOLE_CALLS, or never
    # A step inside an op, from the part, what the method was given and what it returned: made for listeners alone.
    step: Callable[[Any, tuple[Any, ...], Any], Tensor] | None = None


_WHOLE: Final = Place("", "")
_A, _E = "attention_streams", "experts_streams"

PLACES: Final[Mapping[Site, Place]] = {
    sites.EMBEDDED: Place("", "embed", shard="tokens"),
    sites.ATTENTION_PRE: Place(_A, "read", 1, "tokens"),
    sites.ATTENTION_POST: Place(_A, "read", 2, "tokens"),
    sites.ATTENTION_COMB: Place(_A, "read", 3, "tokens"),
    sites.ATTENTION_INPUT: Place(_A, "read", 0, "tokens"),
    sites.LATENT: Place("attention", "latent"),
    sites.QUERY: Place("attention", "query", shard="heads"),
    sites.KV: Place("attention", "kv", same=ALWAYS),
    sites.ENTRY: Place("attention.compressor", "stored", same=ALWAYS),
    sites.INDEX_KEY: Place("attention.indexer.compressor", "row"),
    sites.INDEX_KEY_USED: Place("attention.indexer.compressor", "stored", same=ALWAYS),
    sites.INDEX_QUERY: Place("attention.indexer", "query", shard="tokens"),
    sites.INDEX_QUERY_USED: Place("attention.indexer", "query_used", shard="tokens"),
    sites.INDEX_WEIGHTS: Place("attention.indexer", "head_weights"),
    sites.SELECTED: Place("attention", "select", same=WHOLE_CALLS),
    sites.MIXED: Place("attention", "attend", shard="heads"),
    sites.UNROTATED: Place("attention", "unrotate", shard="heads"),
    sites.ATTENTION_OUTPUT: Place("attention", "output", shard="tokens"),
    sites.ATTENTION_STREAMS: Place(_A, "write", shard="tokens"),
    sites.EXPERTS_PRE: Place(_E, "read", 1, "tokens"),
    sites.EXPERTS_POST: Place(_E, "read", 2, "tokens"),
    sites.EXPERTS_COMB: Place(_E, "read", 3, "tokens"),
    sites.EXPERTS_INPUT: Place(_E, "read", 0, "tokens"),
    sites.EXPERT_IDS: Place("experts", "route", 0, "tokens", same=WHOLE_CALLS),
    sites.EXPERT_WEIGHTS: Place("experts", "route", 1, "tokens", same=WHOLE_CALLS),
    sites.ROUTED_GATE: Place("experts.experts", "gate_up", 0, "inner"),  # of each expert
    sites.ROUTED_UP: Place("experts.experts", "gate_up", 1, "inner"),
    sites.SHARED_GATE: Place("experts.shared", "gate_up", 0, "inner"),
    sites.SHARED_UP: Place("experts.shared", "gate_up", 1, "inner"),
    sites.EXPERTS_OUTPUT: Place("experts", "output", shard="tokens"),
    sites.STREAMS: Place(_E, "write", shard="tokens", same=WHOLE_CALLS),
    sites.HIDDEN: Place("", "hidden", same=WHOLE_CALLS),
    sites.LOGITS: Place("", "unembed"),
}


def _normed(norm: str) -> Callable[[Any, tuple[Any, ...], Any], Tensor]:
    """What `Ops.norm_rotate` has between its norm, with the weights of this name, and its rotation."""

    def normed(part: Any, given: tuple[Any, ...], out: Tensor) -> Tensor:
        del given
        rows: Tensor = part.arithmetic.ops.rms_norm(out, getattr(part, norm, None), part.eps)
        return rows

    return normed


def _logits(experts: Any, given: tuple[Any, ...], out: Any) -> Tensor:
    """What `Ops.gate` has between its product and its choice."""
    del out
    logits: Tensor = experts.arithmetic.ops.linear(given[0], experts.gate.weight, wide=True)
    return logits


_KEYS: Final = "attention.indexer.compressor"
# Steps, see `sites.STEPS`. Softmax weights are made by no op; gate and up of experts are shown by `_wrap_routed`.
STEP_PLACES: Final[Mapping[Site, Place]] = {
    sites.LATENT_UNNORMED: Place("attention", "latent_unnormed"),
    sites.QUERY_UNNORMED: Place("attention", "query_unnormed", shard="heads"),
    sites.QUERY_UNROTATED: Place("attention", "query_unnormed", shard="heads", step=_normed("")),
    sites.KV_UNNORMED: Place("attention", "kv_unnormed"),
    sites.KV_UNROTATED: Place("attention", "kv_unnormed", step=_normed("kv_norm")),
    sites.ENTRY_UNNORMED: Place("attention.compressor", "unnormed"),
    sites.ENTRY_UNROTATED: Place("attention.compressor", "unnormed", step=_normed("norm")),
    sites.INDEX_KEY_UNNORMED: Place(_KEYS, "unnormed"),
    sites.INDEX_KEY_UNROTATED: Place(_KEYS, "unnormed", step=_normed("norm")),
    sites.INDEX_QUERY_UNROTATED: Place("attention.indexer", "query_unrotated", shard="tokens"),
    sites.EXPERT_LOGITS: Place("experts", "route", shard="tokens", step=_logits),
}


def not_shown(ops: str) -> list[Site]:
    """Steps that an op set of this name has nowhere in memory."""
    inside = [site for site, place in STEP_PLACES.items() if place.step is not None]
    return [sites.WEIGHTS, *([] if ops in STEP_BY_STEP else inside)]


# The same of V4.1, which reads streams by the weights of the sublayer before, and shares entries and selections.
V41_PLACES: Final[Mapping[Site, Place]] = {
    **{site: place._replace(method="read_by") if place.method == "read" else place for site, place in PLACES.items()},
    sites.CANDIDATES: Place("attention.indexer", "candidates"),
    sites.ENGRAM_ROWS: Place("engram", "rows"),
    sites.ENGRAM_GATE: Place("engram", "gate"),
    sites.ENGRAM_STREAMS: Place("engram", "write"),
    sites.FOLDED: Place("", "folded"),
}


def places_of(config: "ModelConfig") -> Mapping[Site, Place]:
    """Where sites are in a model of this config, and in its draft head."""
    return PLACES if config.v41 is None else V41_PLACES


# The same of the Llama family, whose tensors no probe listens to.
LLAMA_PLACES: Final[Mapping[Site, Place]] = {
    sites.STREAM_ATTENDED: Place("", "attended"),
    sites.STREAM: Place("", "fed_forward", same=ALWAYS),
    sites.HIDDEN: Place("", "hidden", same=ALWAYS),
    sites.LOGITS: Place("", "unembed"),
}


# Steps that are put together from what each expert shows.
OF_EXPERTS: Final = {sites.EXPERTS_GATE: sites.ROUTED_GATE, sites.EXPERTS_UP: sites.ROUTED_UP}
INSIDE: Final = {*OF_EXPERTS, *OF_EXPERTS.values()}

# Attentions that have a site; those that are not here are of every layer.
_SELECTS: Final = ("CsaAttention", "SelectingAttention", "MakingAttention")
OF_KINDS: Final[Mapping[Site, tuple[str, ...]]] = {
    sites.ENTRY: ("HcaAttention", "CsaAttention", "MakingAttention"),
    **dict.fromkeys((sites.INDEX_KEY, sites.INDEX_KEY_USED), ("CsaAttention", "MakingAttention")),
    **dict.fromkeys((sites.INDEX_QUERY, sites.INDEX_QUERY_USED, sites.INDEX_WEIGHTS, sites.SELECTED), _SELECTS),
    sites.CANDIDATES: _SELECTS,
}


class Observed(Protocol):
    """A model of any architecture."""

    blocks: Any
    arithmetic: Arithmetic
    config: Any


class Point(NamedTuple):
    """A wrapped method of one part of a model."""

    layer: int | None
    sites: tuple[tuple[Site, Place], ...]

    @property
    def begins(self) -> bool:
        """Whether it is the first of a layer behind another."""
        return bool(self.layer) and self.sites[0][0] in {sites.ATTENTION_PRE, sites.STREAM_ATTENDED}


class Observer:
    """What looks at one model. `checking`: whether what must never happen ends the run."""

    def __init__(self, config: Any, ranks: Ranks) -> None:
        self.config, self.ranks, self.checking = config, ranks, True
        self.deferred: Deferred | None = None  # where invariants of the call are measured that runs; None: at once
        self._eager: Deferred | None = None  # that of calls which are not captured
        self._rehearsing = False
        self.call: Call | None = None  # the one that runs
        self.origin = 0  # the position that it counts from
        self._listeners: dict[Site, list[Listener]] = {}

    @property
    def listening(self) -> bool:
        """Whether anybody listens."""
        return bool(self._listeners)

    def listens(self, site: Site) -> bool:
        """Whether anybody listens at a site."""
        return site in self._listeners

    @contextmanager
    def unchecked(self) -> Iterator[None]:
        """Inside the ``with``, nothing that must never happen ends a run: for who looks at a faulty one."""
        before, self.checking = self.checking, False
        try:
            yield
        finally:
            self.checking = before

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Inside the ``with``, nothing ends a run either, but what is measured on a device is: its kernels compile."""
        self._rehearsing = True
        try:
            with self.unchecked():
                yield
        finally:
            self._rehearsing = False

    @property
    def measuring(self) -> bool:
        """Whether sites are looked at: for a tripwire, or for nobody as yet."""
        return self.checking or self.deferred is not None

    @contextmanager
    def attached(self, listeners: Mapping[Site, Listener]) -> Iterator[None]:
        """Listen inside the ``with``; whatever happens there, all of these listeners are gone after it.

        Tripwire when a tensor that passes has another shape than its site says.
        """
        of_one_rank = INSIDE & listeners.keys() and self.ranks.shards.experts.split
        if of_one_rank:
            raise ConfigError("--experts whole: no rank has what routed experts compute inside for all tokens")
        known = axes(self.config)
        added = {site: _shaped(site, known, listener) for site, listener in listeners.items()}
        for site, listener in added.items():
            self._listeners.setdefault(site, []).append(listener)
        try:
            yield
        finally:
            for site, listener in added.items():
                self._listeners[site].remove(listener)
                if not self._listeners[site]:
                    del self._listeners[site]

    # --- what wrapped methods tell

    def begun(self, call: Call, tokens: Tensor) -> None:
        """A call begins, of token ids [t]."""
        self.call = call
        self.ranks.record("tokens", None, tokens)

    @contextmanager
    def deferring(self, model: Observed, tokens: Tensor, call: Call) -> Iterator[None]:
        """Inside, what must never happen in a call is measured on its device, and looked at behind: Tripwire.

        Nothing is deferred that nobody looks at or rehearses, nor on the host's device, nor with other ops than
        Triton's. In a call that is captured it is who captures it that defers, and looks.
        """
        at_once = on_host(tokens) or model.arithmetic.ops.name != "triton"
        if at_once or not (self.checking or self._rehearsing) or not isinstance(call.first, int):
            yield
            return
        from fathom.model.observe import deferred  # noqa: PLC0415 (Triton is not on every platform)

        if self._eager is None:
            self._eager = deferred.Deferred(len(model.blocks), tokens.device)
        self._eager.clear()
        self._eager.begin(torch.full((), call.first, dtype=torch.int64, device=tokens.device), call.count)
        self.deferred = self._eager
        try:
            yield
            self._eager.end()
        finally:
            self.deferred = None
        if self.checking:
            self._eager.look(call.first, self.origin)

    def skip(self, site: Site) -> int:
        """Tokens of the call that runs before the first whose row is here of what passes a site."""
        return self.call.shard.start if self.call and PLACES.get(site, _WHOLE).shard == "tokens" else 0

    def stands(self, caches: list[Components], position: int, first: int, coming: int) -> None:
        """Look at where the caches stand at a position, after a call from `first` on or before `coming` more tokens."""
        if self.checking:
            for layer, cache in enumerate(caches):
                invariants.stands(layer, cache, position, first, coming)

    def passes(self, point: Point, part: Any, given: tuple[Any, ...], out: Any) -> Any:
        """Look at what a method returned."""
        if self.ranks.size > 1 and point.begins and self.call is not None and self.call.count > KEPT:
            self.ranks.verify(wait=False)  # what the last layer left: of a long call it is kept for one more
        for site, place in point.sites:
            if place.step is not None:
                if listeners := self._listeners.get(site):
                    self._show(place, listeners, point.layer, place.step(part, given, out))
                continue
            x = out if place.output < 0 else out[place.output]
            if self._listeners and x is not None and (listeners := self._listeners.get(site)):
                self._show(place, listeners, point.layer, x)  # first: what they write is looked at too
            if self.measuring and (check := CHECKS.get(site)):
                check(self, point.layer, part, given, out)
            if place.same and self.ranks.size > 1 and self.call is not None:
                self._compare(site, place, point.layer, x, self.call)
        return out

    def shows(self, site: Site, layer: int | None, x: Tensor) -> None:
        """Show listeners what no method returns, whole."""
        for listener in self._listeners.get(site, ()):
            listener(layer, x)

    def first(self, *, own: bool = False) -> int | None:
        """Position of the first token of the call that runs, or of this rank's `own`; None where a part runs alone."""
        if self.call is None:
            return None
        first = self.call.own_first if own else self.call.first
        assert isinstance(first, int), "a captured call has its position on the device"
        return self.origin + first

    def _compare(self, site: Site, place: Place, layer: int | None, x: Tensor, call: Call) -> None:
        if place.same == ALWAYS or not call.shard.split:
            self.ranks.record(site.name, layer, x)
        if site is sites.HIDDEN:
            self.ranks.verify()

    def _show(self, place: Place, listeners: list[Listener], layer: int | None, x: Tensor) -> None:
        """Show a tensor to listeners, whole where this rank has a shard of it; what they write is taken over."""
        shard, dim = undivided(0), 0
        whole_experts = place.shard == "inner" and self.ranks.shards.experts.split  # the shared one runs own tokens
        if place.shard in {"heads", "inner"} and not whole_experts:
            shard, dim = self.ranks.shards.along(place.shard), 1
        elif place.shard and self.call is not None:
            shard = self.call.shard
        whole = self.ranks.whole(x, dim, shard)
        for listener in listeners:
            listener(layer, whole)
        if shard.split:
            x.copy_(shard.of(whole, dim))


def on_host(x: Tensor) -> bool:
    """Whether the host need not wait for what is computed of a tensor."""
    return x.device.type == "cpu"


def _shaped(site: Site, known: dict[str, int], listener: Listener) -> Listener:
    """`listener`, after a look at the shape."""
    names = site.shape.split()

    def look(layer: int | None, tensor: Tensor) -> None:
        wanted = [known.get(name, -1) for name in names]
        found = list(tensor.shape)
        if len(found) != len(wanted) or any(want not in {-1, got} for want, got in zip(wanted, found, strict=True)):
            raise Tripwire(site.name, layer, None, f"shape {found}", f"[{', '.join(names)}] = {wanted}")
        listener(layer, tensor)

    return look


# --- what must never happen, by site: the observer, layer, part, what its method was given, and what it returned

Check = Callable[[Observer, int | None, Any, tuple[Any, ...], Any], None]


def _finite(site: Site) -> Check:
    own = site in PLACES and PLACES[site].shard == "tokens"

    def check(by: Observer, layer: int | None, part: Any, given: tuple[Any, ...], out: Any) -> None:
        del part, given
        if by.deferred is not None:
            by.deferred.finite(site, layer, out, by.skip(site))
        else:
            invariants.finite(site.name, layer, None if site is sites.LOGITS else by.first(own=own), out)

    return check


def _columns(site: Site) -> Check:
    def check(by: Observer, layer: int | None, part: Any, given: tuple[Any, ...], out: Any) -> None:
        del given
        assert layer is not None, f"{site.name} outside of all layers"
        if by.deferred is not None:
            by.deferred.columns(site, layer, out.comb, part.eps, by.skip(site))
        else:
            invariants.columns(site.name, layer, by.first(own=True), out.comb, part.eps)

    return check


def _selection(by: Observer, layer: int | None, part: Any, given: tuple[Any, ...], out: Any) -> None:
    del part
    assert layer is not None, "a selection outside of all layers"
    (_, _, call, cache), keys = given, given[3].keys
    ratio, top_k = cache.key_frontier.ratio, by.config.index_topk
    if by.deferred is not None:
        capacity, captured = keys.data.shape[0], isinstance(call.first, Tensor)
        selected = invariants.selection_shape(layer, None, top_k, capacity if captured else keys.used, out)
        by.deferred.selection(sites.SELECTED, layer, ratio, top_k, capacity, selected, keys.evicted)
    else:
        invariants.selection(layer, call.first, ratio, top_k, keys.used, out, keys.evicted)


def _routing(by: Observer, layer: int | None, part: Any, given: tuple[Any, ...], out: Any) -> None:
    del part, given
    assert layer is not None, "experts outside of all layers"
    (ids, weights), scale, experts = out, by.config.routed_scaling_factor, by.config.n_routed_experts
    if by.deferred is not None:
        by.deferred.routing(sites.EXPERT_IDS, layer, ids, weights, scale, experts, by.skip(sites.EXPERT_IDS))
    else:
        invariants.routing(layer, by.first(own=True), ids, weights, scale, experts)


CHECKS: Final[Mapping[Site, Check]] = {
    sites.ATTENTION_COMB: _columns(sites.ATTENTION_COMB),
    sites.INDEX_QUERY_USED: _finite(sites.INDEX_QUERY_USED),
    sites.INDEX_WEIGHTS: _finite(sites.INDEX_WEIGHTS),
    sites.SELECTED: _selection,
    sites.ATTENTION_STREAMS: _finite(sites.ATTENTION_STREAMS),
    sites.EXPERTS_COMB: _columns(sites.EXPERTS_COMB),
    sites.EXPERT_IDS: _routing,
    sites.STREAMS: _finite(sites.STREAMS),
    sites.STREAM_ATTENDED: _finite(sites.STREAM_ATTENDED),
    sites.STREAM: _finite(sites.STREAM),
    sites.HIDDEN: _finite(sites.HIDDEN),
    sites.LOGITS: _finite(sites.LOGITS),
}


# --- wrapping


def observed(model: Any) -> Observer:
    """What looks at a model."""
    observer: Observer = model.observer
    return observer


def listening(model: Any, listeners: Mapping[Site, Listener]) -> AbstractContextManager[None]:
    """Listen at sites of a model inside the ``with``, see `Observer.attached`."""
    return observed(model).attached(listeners)


def install(model: Observed, places: Mapping[Site, Place], first_layer: int = 0) -> Observer:
    """Wrap the methods of a model whose return values are sites; once, when it was built. Returns what looks at it.

    A draft head is such a model too: its stages are layers behind those of the model that it drafts for.
    """
    observer = Observer(model.config, model.arithmetic.ranks)
    whole = (sites.EMBEDDED, sites.FOLDED, sites.HIDDEN, sites.LOGITS)
    _wrap_all(observer, model, None, {site: place for site, place in places.items() if site in whole})
    of_layers = {site: place for site, place in places.items() if site not in whole}
    steps = STEP_PLACES if sites.MIXED in of_layers else {}
    if sites.FOLDED in places:  # of V4.1, where heads are not normed
        steps = {**steps, sites.QUERY_UNROTATED: steps[sites.QUERY_UNROTATED]._replace(step=None)}
    for layer, block in enumerate(model.blocks, first_layer):
        missing = set(of_layers) - _wrap_all(observer, block, layer, {**of_layers, **steps})
        kind = type(getattr(block, "attention", None)).__name__
        allowed = {site for site in missing if site in OF_KINDS and kind not in OF_KINDS[site]}
        allowed |= {site for site in missing if places[site].part == "engram" and block.engram is None}
        assert missing == allowed, f"layer {layer}: no method for {sorted(site.name for site in missing - allowed)}"
        if sites.MIXED in of_layers:
            _wrap_attend(observer, block.attention, layer)
            _wrap_routed(observer, block.experts, layer)
        for site, part in (
            (sites.ENTRY, "attention.compressor"),
            (sites.INDEX_KEY_USED, "attention.indexer.compressor"),
        ):
            for compressor in _parts(block, part):
                _wrap_written(observer, compressor, layer, site)
    _wrap_call(observer, model)
    if hasattr(model, "draft"):
        _wrap_draft(observer, model)
    return observer


def _parts(root: Any, path: str) -> Iterator[Any]:
    """The part at the end of a path of attributes; all of a list; nothing where there is none."""
    for name in path.split(".") if path else ():
        root = getattr(root, name, None)
        if root is None:
            return
    if isinstance(root, list):
        yield from root
    else:
        yield root


def _wrap_all(observer: Observer, root: Any, layer: int | None, places: Mapping[Site, Place]) -> set[Site]:
    """Wrap what is there of `places`; returns which that was."""
    wrapped: set[Site] = set()
    methods: dict[tuple[str, str], list[tuple[Site, Place]]] = {}
    for site, place in places.items():
        methods.setdefault((place.part, place.method), []).append((site, place))
    for (path, method), found in methods.items():
        point = Point(layer, tuple(found))
        for part in _parts(root, path):
            if hasattr(type(part), method):
                _wrap(part, method, partial(observer.passes, point))
                wrapped |= {site for site, _ in found}
    return wrapped


def _wrap(part: Any, method: str, after: Callable[[Any, tuple[Any, ...], Any], Any]) -> None:
    """Let a part's method be followed by a look at what it returned.

    The method is looked up in its class at each call: a part may become one of a subclass. The part holds what is
    wrapped around it, which therefore does not hold the part.
    """
    reference = weakref.ref(part)

    @wraps(getattr(type(part), method))
    def wrapped(*given: Any) -> Any:
        own: Any = reference()
        return after(own, given, getattr(type(own), method)(own, *given))

    setattr(part, method, wrapped)


def _wrap_attend(observer: Observer, attention: Any, layer: int) -> None:
    """What is attended to has been written: the ring is looked at before it is read."""
    watched = attention.attend

    @wraps(watched)
    def attend(q: Tensor, beyond: Any, call: Call, cache: Any) -> Tensor:
        if observer.checking and isinstance(call.first, int):
            for where in cache.ring_stands(call.first + call.count, call.first):
                invariants.count(where.site, layer, where.position, where.found, where.wanted)
        out: Tensor = watched(q, beyond, call, cache)
        return out

    attention.attend = attend


def _wrap_routed(observer: Observer, experts: Any, layer: int) -> None:
    """While somebody listens to what an expert computes inside, experts run one by one.

    The equation is the same, and so are the bits but where `Ops.experts` adds up in another order than `Ops.linears`.
    """
    reference, method = weakref.ref(experts), type(experts)

    def inside() -> bool:
        return any(map(observer.listens, INSIDE))

    @wraps(method.routed)
    def routed(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        own: Any = reference()
        if not inside():
            return cast("Tensor", type(own).routed(own, x, ids, weights))
        return cast("Tensor", own.routed_down(own.routed_up(x, ids, weights), ids))

    @wraps(method.routed_up)
    def routed_up(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        own: Any = reference()
        if not inside():
            return cast("Tensor", type(own).routed_up(own, x, ids, weights))
        out = x.new_empty(*ids.shape, own.experts[0].w1.shape[0])
        found: dict[Site, Tensor] = {}

        def keep(step: Site, of: int | None, part: Tensor) -> None:
            del of
            whole = found.setdefault(step, part.new_empty(*ids.shape, part.shape[1]))
            whole[rows, slots] = part

        kept = {site: partial(keep, step) for step, site in OF_EXPERTS.items() if observer.listens(step)}
        with observer.attached(kept):
            for expert, rows, slots in by_expert(ids, len(own.experts)):
                out[rows, slots] = own.experts[expert].up(x[rows], weights[rows, slots])
        for step, whole in found.items():
            observer.shows(step, layer, whole)
        return out

    experts.routed, experts.routed_up = routed, routed_up


def _wrap_written(observer: Observer, compressor: Any, layer: int, site: Site) -> None:
    """Rows are finite and as wide as their cache before they are written, and come back as they were."""
    reference = weakref.ref(compressor)

    @wraps(type(compressor).append)
    def append(rows: Any, new: Tensor) -> None:
        own: Any = reference()
        if observer.measuring:
            invariants.width(site.name, layer, rows.data, new.shape[1])
            if observer.deferred is None:
                invariants.finite(site.name, layer, observer.first(), new)
        before = rows.count
        type(own).append(own, rows, new)
        if observer.measuring:
            row = rows.used - new.shape[0]
            if observer.deferred is None:
                invariants.stored(site.name, layer, row, new, rows.data, rows.ratio)
            else:
                assert observer.call is not None, "what is deferred is so for a call"
                skip = before - observer.call.first // rows.ratio
                observer.deferred.appended(site, layer, row, new, rows.data, rows.ratio, skip)

    @wraps(type(compressor).compress)
    def compress(kv: Tensor, gate: Tensor, call: Call, frontier: Any, rows: Any) -> Tensor | None:
        own: Any = reference()
        new: Tensor | None = type(own).compress(own, kv, gate, call, frontier, rows)
        if new is None:  # step by step: `append` has looked
            return None
        if observer.deferred is not None:
            invariants.width(site.name, layer, rows.data, new.shape[1])
            observer.deferred.stored(site, layer, new[:1], rows.data, rows.ratio)
        if observer.ranks.size > 1:  # a row of a window that stays open holds anything
            still_open = (call.first + 1) % rows.ratio != 0
            observer.ranks.record(site.name, layer, new[:1].masked_fill(still_open, 0))
        return new

    compressor.append, compressor.compress = append, compress


def _wrap_draft(observer: Observer, head: Any) -> None:
    """What a draft head says at its end is finite: a broken one is not to pass for a bad one."""

    def look(own: Any, given: tuple[Any, ...], drafts: Any) -> Any:
        del own
        if observer.checking:
            invariants.finite("drafts.logits", None, given[2], drafts.logits)
            if drafts.confidence is not None:
                invariants.finite("drafts.confidence", None, given[2], drafts.confidence[:, None])
        return drafts

    _wrap(head, "draft", look)


def _wrap_call(observer: Observer, model: Any) -> None:
    """A call begins with tokens that ranks compare, and runs between two looks at the caches."""
    reference = weakref.ref(model)

    def begin(tokens: Tensor, first: int | Tensor) -> Call:
        own: Any = reference()
        call: Call = type(own).call(own, tokens, first)
        observer.begun(call, tokens)
        return call

    def run(tokens: Tensor, call: Call, state: Any, *given: Tensor) -> Tensor:
        own: Any = reference()
        first, observer.origin = call.first, state.first
        try:
            if isinstance(first, int):  # what stands when a captured call runs is looked at by who replays it
                observer.stands(state.layers, first, first, call.count)
            with observer.deferring(own, tokens, call):
                out: Tensor = type(own).run(own, tokens, call, state, *given)
            if isinstance(first, int):
                observer.stands(state.layers, first + call.count, first, 0)
            return out
        finally:
            observer.call = None  # nothing of it lives on

    model.call, model.run, model.observer = begin, run, observer
