"""Faults put into transformers' own modules, one layer (or the head) at a time: what `compare` has to find."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

from fathom.kernels.quantise.reference import hadamard, simulate_fp4
from fathom.kernels.rope import reference as rope
from fathom.runtime.options import DEMO


class Put(NamedTuple):
    """A fault in their code: where it is seen first, and its name, None where it is in no table.

    The name is that of a fault in `probes.faults`, or of a plain cause in `probes.judge.causes`, which is told before:
    first-projections-not-loaded and entries-zero are rows of zeros.
    """

    name: str | None
    layer: int | None
    sublayer: str  # "attention" or "experts": the first part of the first site that differs; "hidden" or "logits"
    put: Callable[[Any], None]
    what: str = ""  # in words, where it has no name


def attention(model: Any, layer: int) -> Any:
    """Their attention of a layer."""
    return model.model.layers[layer].self_attn


def _hook(module: Any, change: Callable[[Any], Any]) -> None:
    module.register_forward_hook(lambda _module, _given, out: change(out))


def _given(module: Any, change: Callable[[Tensor], Tensor]) -> None:
    module.register_forward_pre_hook(lambda _module, given: (change(given[0]), *given[1:]))


def _set(of: Callable[[Any], Any], name: str, change: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Change an attribute, or the numbers of a parameter."""

    def put(model: Any) -> None:
        module = of(model)
        value = getattr(module, name)
        if isinstance(value, torch.nn.Parameter):
            value.data = change(value.data)
        else:
            setattr(module, name, change(value))

    return put


def _rotary(layer: int, change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[[Any], None]:
    """Change cos and sin of the main rotation of one layer: its queries, keys and outputs."""

    def put(model: Any) -> None:
        module = attention(model, layer)

        def changed(_module: Any, given: Any, named: dict[str, Any]) -> Any:
            angles = dict(named["position_embeddings"])
            kind = module.rope_layer_type
            angles[kind] = change(*angles[kind])
            return given, named | {"position_embeddings": angles}

        module.register_forward_pre_hook(changed, with_kwargs=True)

    return put


def _frequencies(layer: int, change: Callable[[Any, Tensor], Tensor]) -> Callable[[Any], None]:
    """Rotate one layer by other frequencies: `change(their rotary, the layer's own)`."""

    def put(model: Any) -> None:
        module, rotary = attention(model, layer), model.model.rotary_emb
        frequencies = change(rotary, getattr(rotary, f"{module.rope_layer_type}_inv_freq"))

        def turned(cos: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
            angles = torch.arange(cos.shape[1])[:, None].float() * frequencies[None]
            return angles.cos()[None].to(cos.dtype), angles.sin()[None].to(cos.dtype)

        _rotary(layer, turned)(model)

    return put


def _plain(rotary: Any, _: Tensor) -> Tensor:
    """Frequencies of the compressed layers' base without YaRN."""
    return rope.frequencies(2 * rotary.compress_inv_freq.shape[0], 160000.0)


def _yarn(theta: float) -> Callable[[Any, Tensor], Tensor]:
    """YaRN of the compressed layers, on another base."""
    return lambda _rotary, _own: rope.yarn_frequencies(
        ROPE, theta, factor=16, original_context=4096, beta_fast=32, beta_slow=1
    )


def _no_inverse(layer: int) -> Callable[[Any], None]:
    """Give the output projection what the attention gave before its inverse rotation."""

    def put(model: Any) -> None:
        module, kept = attention(model, layer), {}

        def keep(_module: Any, _given: Any, named: dict[str, Any]) -> None:
            kept["angles"] = named["position_embeddings"][module.rope_layer_type]

        def rotated(grouped: Tensor) -> Tensor:
            heads = grouped.flatten(2).unflatten(-1, (module.num_heads, module.head_dim)).transpose(1, 2)
            return theirs.apply_rotary_pos_emb(heads, *kept["angles"]).transpose(1, 2).reshape(grouped.shape)

        module.register_forward_pre_hook(keep, with_kwargs=True)
        _given(module.o_a_proj, rotated)

    return put


def _compressor_rotary(layer: int, part: str, change: Callable[[Any, Any], Any]) -> Callable[[Any], None]:
    """Change how the rotation of a compressor is called: `change(forward, named arguments)`."""

    def put(model: Any) -> None:
        compressor = attention(model, layer).compressor
        rotary = (compressor if part == "entries" else compressor.indexer).rotary_emb
        forward = rotary.forward
        rotary.forward = lambda x, **named: change(lambda **other: forward(x, **other), named)

    return put


def _unrotated(forward: Any, named: dict[str, Any]) -> Any:
    cos, sin = forward(**named)
    return torch.ones_like(cos), torch.zeros_like(sin)


def _window(layer: int) -> Callable[[Any], None]:
    """Hide the oldest token that a token of the layer sees."""

    def put(model: Any) -> None:
        module = attention(model, layer)

        def changed(_module: Any, given: Any, named: dict[str, Any]) -> Any:
            mask = named["attention_mask"].clone()
            t = mask.shape[-2]
            rows = torch.arange(module.sliding_window - 1, t)
            mask[..., rows, rows - module.sliding_window + 1] = torch.finfo(mask.dtype).min
            return given, named | {"attention_mask": mask}

        module.register_forward_pre_hook(changed, with_kwargs=True)

    return put


def _router(layer: int, change: Callable[[Any, Tensor], tuple[Tensor, Tensor, Tensor]]) -> Callable[[Any], None]:
    def put(model: Any) -> None:
        gate = model.model.layers[layer].mlp.gate
        gate.forward = lambda x, *_: change(gate, x.reshape(-1, gate.hidden_dim))

    return put


def _biased_weights(gate: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = torch.nn.functional.linear(x, gate.weight)
    scores = gate.score_fn(logits) + gate.e_score_correction_bias
    ids = scores.topk(gate.top_k, -1, sorted=False).indices
    weights = scores.gather(1, ids)
    return logits, weights / weights.sum(-1, keepdim=True) * gate.routed_scaling_factor, ids


def _unnormed_weights(gate: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = torch.nn.functional.linear(x, gate.weight)
    scores = gate.score_fn(logits)
    ids = (scores + gate.e_score_correction_bias).topk(gate.top_k, -1, sorted=False).indices
    return logits, scores.gather(1, ids) * gate.routed_scaling_factor, ids


def _scorer(layer: int) -> Any:
    return lambda model: attention(model, layer).compressor.indexer.scorer


def _scored(layer: int, score: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any], None]:
    """Other index scores: `score(products [1, t, heads, n], head weights [1, t, heads])`."""

    def put(model: Any) -> None:
        scorer = _scorer(layer)(model)

        def changed(q: Tensor, keys: Tensor, x: Tensor) -> Tensor:
            products = q.float() @ keys.float().unsqueeze(1).mT * scorer.softmax_scale
            return score(products, scorer.weights_proj(x).float() * scorer.weights_scaling)

        scorer.forward = changed

    return put


def _without_relu(products: Tensor, weights: Tensor) -> Tensor:
    return (products * weights.unsqueeze(-1)).sum(dim=2)


def _by_sigmoid(products: Tensor, _: Tensor) -> Tensor:
    return products.sigmoid().mean(2)


def _of_the_first(products: Tensor, weights: Tensor) -> Tensor:
    return (products.relu() * weights.unsqueeze(-1)).sum(dim=2)[:, :1].expand(-1, products.shape[1], -1)


def _stale(selected: Tensor) -> Tensor:
    return selected[:, torch.arange(selected.shape[1]) % 128]


def _unfinished(layer: int) -> Callable[[Any], None]:
    """Select of all entries up to a token's position, as a number of entries."""

    def put(model: Any) -> None:
        indexer, kept = attention(model, layer).compressor.indexer, {}
        _hook(indexer.scorer, lambda scores: kept.update(scores=scores))

        def again(selected: Tensor) -> Tensor:
            scores = kept["scores"]
            t, n = scores.shape[1:]
            future = torch.arange(n)[None] > torch.arange(t)[:, None]
            best = scores.masked_fill(future, -torch.inf).topk(selected.shape[-1]).indices
            return best.masked_fill(future.expand_as(scores).gather(2, best), -1)

        _hook(indexer, again)

    return put


def _masked(out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return out[0], torch.full_like(out[1], -torch.inf)


def _interleaved(low: Tensor) -> Tensor:
    return low.unflatten(-1, (2, -1)).mT.flatten(-2)


def _twice_normed(of: Callable[[Any], Any]) -> Callable[[Any], None]:
    def put(model: Any) -> None:
        norm = of(model)
        forward = norm.forward
        norm.forward = lambda x: forward(forward(x))

    return put


def _not_loaded(layer: int) -> Callable[[Any], None]:
    def put(model: Any) -> None:
        for part in (attention(model, layer).q_a_proj, attention(model, layer).kv_proj):
            part.weight.data.zero_()

    return put


def _kept_rotated(layer: int) -> Callable[[Any], None]:
    """Rotate keys and values, which are one, where attention reads them."""

    def put(model: Any) -> None:
        module = attention(model, layer)
        forward, attend = module.forward, theirs.eager_attention_forward

        def rotated(part: Any, query: Tensor, key: Tensor, value: Tensor, *given: Any, **named: Any) -> Any:
            del value
            return attend(part, query, hadamard(key), hadamard(key), *given, **named)

        def changed(*given: Any, **named: Any) -> Any:
            with patch.object(theirs, "eager_attention_forward", rotated):
                return forward(*given, **named)

        module.forward = changed

    return put


def _swapped_halves(layer: int) -> Callable[[Any], None]:
    """The two series of a CSA compressor the other way round."""

    def put(model: Any) -> None:
        for module in (attention(model, layer).compressor, attention(model, layer).compressor.indexer):
            width = module.head_dim
            for part in (module.kv_proj, module.gate_proj):
                part.weight.data = part.weight.data.roll(width, 0)
            module.position_bias.data = module.position_bias.data.roll(width, 1)

    return put


def _all_compressors(layer: int, change: Callable[[Any], None]) -> Callable[[Any], None]:
    def put(model: Any) -> None:
        compressor = attention(model, layer).compressor
        for module in (compressor, getattr(compressor, "indexer", None)):
            if module is not None:
                change(module)

    return put


def _no_gate(module: Any) -> None:
    module.gate_proj.weight.data.zero_()
    module.position_bias.data.zero_()


def _shifted_bias(module: Any) -> None:
    module.position_bias.data = module.position_bias.data.roll(1, 0)


def _swapped_gate_and_up(layer: int) -> Callable[[Any], None]:
    """Exchange them behind the projections, where all experts use them."""

    def put(model: Any) -> None:
        mlp = model.model.layers[layer].mlp
        experts, shared = mlp.experts, mlp.shared_experts
        one = experts._apply_gate
        experts._apply_gate = lambda both: one(both.roll(both.shape[-1] // 2, -1))

        def forward(x: Tensor) -> Tensor:
            both = torch.cat((shared.gate_proj(x), shared.up_proj(x)), -1)
            return shared.down_proj(experts._apply_gate(both))

        shared.forward = forward

    return put


def _dispatched(layer: int, change: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]) -> Callable[[Any], None]:
    """Change which experts run which tokens of a prompt in one call, and with what weights, behind the gate."""

    def put(model: Any) -> None:
        experts = model.model.layers[layer].mlp.experts

        def changed(_module: Any, given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            x, ids, weights = given
            return (x, *change(ids, weights, experts.num_experts))

        experts.register_forward_pre_hook(changed)

    return put


def _wrong_rank(ids: Tensor, weights: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    ids = ids.clone()
    ids[8::64] = (ids[8::64] + experts // RANKS) % experts
    return ids, weights


def _a_rank_off(ids: Tensor, weights: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    return (ids + experts // RANKS) % experts, weights


def _scaled_as_gate(layer: int) -> Callable[[Any], None]:
    """Give each block of 32 weights of w3 the scale of w1 on disk."""

    def put(model: Any) -> None:
        for path in DEMO.glob("*.safetensors"):
            for name, gate in load_file(path).items():
                prefix, _, expert = name.removesuffix(".w1.scale").rpartition(".")
                if name.endswith(".w1.scale") and prefix == f"layers.{layer}.ffn.experts":
                    up = load_file(path)[name.replace("w1", "w3")]
                    ratio = (gate.float() / up.float()).repeat_interleave(32, 1)
                    both = model.model.layers[layer].mlp.experts.gate_up_proj.data[int(expert)]
                    both[len(ratio) :] *= ratio  # a power of two: exact

    return put


def _another_gate(layer: int) -> Callable[[Any], None]:
    def put(model: Any) -> None:
        both = model.model.layers[layer].mlp.experts.gate_up_proj.data
        both[0, : both.shape[1] // 2] = both[1, : both.shape[1] // 2]

    return put


def _sorted_outputs(ids: Tensor, weights: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """What runs for slot s is weighted by where its expert stands among the token's, sorted."""
    del experts
    return ids.sort(1).values, weights


def _lost(ids: Tensor, weights: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    del experts
    weights = weights.clone()
    weights[24::64, -1] = 0
    return ids, weights


def _beyond_capacity(ids: Tensor, weights: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    room, taken, weights = math.ceil(1.25 * ids.numel() / experts), [0] * experts, weights.clone()
    for pair, expert in enumerate(ids.flatten().tolist()):
        taken[expert] += 1
        if taken[expert] > room:
            weights.view(-1)[pair] = 0
    return ids, weights


def _twice(ids: Tensor, weights: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """A slot more: the first expert again, which counts of one token in 64."""
    del experts
    more = torch.zeros_like(weights[:, :1])
    more[48::64] = weights[48::64, :1]
    return torch.cat((ids, ids[:, :1]), 1), torch.cat((weights, more), 1)


def _tiles(ids: Tensor, weights: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    del experts
    weights = weights.clone()
    weights[32::64] = weights[32::64].flip(1)
    return ids, weights


def _sigmoids(layer: int) -> Callable[[Any], None]:
    """Start Sinkhorn of a layer's attention from sigmoids, where it takes a softmax."""

    def put(model: Any) -> None:
        hyper = model.model.layers[layer].attn_hc
        forward = hyper.forward

        def changed(streams: Tensor) -> Any:
            with patch.object(torch, "softmax", lambda x, **_: x.sigmoid()):
                return forward(streams)

        hyper.forward = changed

    return put


def _late_mixing(out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    row = torch.arange(out[0].shape[1]) % 128
    return out[0][:, row], out[1][:, row], out[2]


def _plus_one(layer: int) -> Callable[[Any], None]:
    def put(model: Any) -> None:
        block = model.model.layers[layer]
        block.input_layernorm.weight.data += 1
        block.post_attention_layernorm.weight.data += 1

    return put


def _mlp(layer: int) -> Any:
    return lambda model: model.model.layers[layer].mlp


def _layer(layer: int) -> Any:
    return lambda model: model.model.layers[layer]


def _of(layer: int) -> Any:
    return lambda model: attention(model, layer)


def _hooked(of: Any, change: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda model: _hook(of(model), change)


def _nothing(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


HEAD_DIM, ROPE, HEADS, RANKS = (
    128,
    64,
    4,
    8,
)  # of the demo, whose layers are SWA, CSA, HCA, CSA; the first routes by hash

KNOWN = (
    # attention
    Put("sink-dropped", 3, "attention", _set(_of(3), "sinks", lambda x: x * 0 - 1e9)),
    Put("window-one-short", 0, "attention", _window(0)),
    Put("softmax-scale-without-rope-dims", 2, "attention", _set(_of(2), "scaling", lambda x: x * 2**0.5)),
    Put("softmax-scale-with-rope-dims-added", 1, "attention", _set(_of(1), "scaling", lambda x: x * (2 / 3) ** 0.5)),
    Put("kv-normed-twice", 0, "attention", _twice_normed(lambda m: attention(m, 0).kv_norm)),
    Put("rows-of-zeros", 2, "attention", _not_loaded(2)),
    Put("entries-masked", 2, "attention", _hooked(lambda m: attention(m, 2).compressor, _masked)),
    Put("cache-rotated-on-write", 3, "attention", _kept_rotated(3)),
    Put("output-rows-shuffled", 3, "attention", _hooked(lambda m: attention(m, 3).o_a_proj, _interleaved)),
    Put("query-norm-skipped", 0, "attention", lambda m: setattr(attention(m, 0).q_b_norm, "forward", lambda x: x)),
    Put("kv-norm-weight-dropped", 1, "attention", _set(lambda m: attention(m, 1).kv_norm, "weight", torch.ones_like)),
    Put(
        "output-groups-permuted",
        1,
        "attention",
        _set(lambda m: attention(m, 1).o_a_proj, "weight", lambda w: w.roll(len(w) // 2, 0)),
    ),
    # rope
    Put("window-theta", 0, "attention", _frequencies(0, _plain)),
    Put("yarn-on-window-layers", 0, "attention", _frequencies(0, _yarn(10000.0))),
    Put("query-theta", 2, "attention", _frequencies(2, lambda rotary, _: rotary.main_inv_freq)),
    Put("yarn-dropped", 2, "attention", _frequencies(2, _plain)),
    Put("compressed-theta", 2, "attention", _frequencies(2, _yarn(40000.0))),
    Put("rope-frequencies-in-bf16", 0, "attention", _frequencies(0, lambda _, own: own.bfloat16().float())),
    Put("rope-frequencies-inverted", 0, "attention", _frequencies(0, lambda _, own: 1 / own)),
    Put(
        "entries-rotated-at-their-number",
        1,
        "attention",
        _compressor_rotary(1, "entries", lambda f, named: f(**named | {"position_ids": named["position_ids"] // 4})),
    ),
    Put("no-inverse-rotation", 3, "attention", _no_inverse(3)),
    Put("compressed-keys-unrotated", 2, "attention", _compressor_rotary(2, "entries", _unrotated)),
    Put(
        "entries-rotated-at-their-end",
        2,
        "attention",
        _compressor_rotary(2, "entries", lambda f, named: f(**named | {"position_ids": named["position_ids"] + 127})),
    ),
    # compressors and the indexer
    Put("pooling-without-gate", 1, "attention", _all_compressors(1, _no_gate)),
    Put("rows-of-zeros", 1, "attention", _hooked(lambda m: attention(m, 1).compressor.kv_proj, torch.zeros_like)),
    Put("index-scores-by-sigmoid", 3, "indexer", _scored(3, _by_sigmoid)),
    Put("one-selection-for-all", 1, "indexer", _scored(1, _of_the_first)),
    Put("stale-selections", 3, "indexer", _hooked(lambda m: attention(m, 3).compressor.indexer, _stale)),
    Put("unfinished-entries-selected", 1, "indexer", _unfinished(1)),
    Put("position-bias-shifted", 2, "attention", _all_compressors(2, _shifted_bias)),
    Put("series-swapped", 3, "attention", _swapped_halves(3)),
    Put("relu-dropped", 3, "indexer", _scored(3, _without_relu)),
    Put(
        "index-weights-permuted",
        1,
        "indexer",
        _set(lambda m: _scorer(1)(m).weights_proj, "weight", lambda w: w.roll(1, 0)),
    ),
    Put("index-weights-without-sign", 3, "indexer", _hooked(lambda m: _scorer(3)(m).weights_proj, torch.abs)),
    Put(
        "top-k-halved", 1, "indexer", _set(lambda m: attention(m, 1).compressor.indexer, "index_topk", lambda k: k // 2)
    ),
    # mHC
    Put(
        "comb-made-transposed",
        1,
        "attention",
        _hooked(lambda m: m.model.layers[1].attn_hc, lambda o: (o[0], o[1].mT, o[2])),
    ),
    Put(
        "one-sinkhorn-iteration",
        2,
        "experts",
        _set(lambda m: m.model.layers[2].ffn_hc, "hc_sinkhorn_iters", lambda _: 1),
    ),
    Put("late-mixing-of-a-long-call", 2, "attention", _hooked(lambda m: m.model.layers[2].attn_hc, _late_mixing)),
    Put("sinkhorn-of-sigmoids", 1, "attention", _sigmoids(1)),
    Put("post-not-doubled", 3, "experts", _hooked(lambda m: m.model.layers[3].ffn_hc, lambda o: (o[0] / 2, *o[1:]))),
    # experts
    Put("bias-in-weights", 1, "experts", _router(1, _biased_weights)),
    Put("weights-not-normed", 2, "experts", _router(2, _unnormed_weights)),
    Put(
        "selection-bias-dropped",
        3,
        "experts",
        _set(lambda m: _mlp(3)(m).gate, "e_score_correction_bias", torch.zeros_like),
    ),
    Put("route-scale-dropped", 1, "experts", _set(lambda m: _mlp(1)(m).gate, "routed_scaling_factor", lambda _: 1.0)),
    Put("gate-sigmoid", 2, "experts", _set(lambda m: _mlp(2)(m).gate, "score_fn", lambda _: torch.nn.Sigmoid())),
    Put("shared-expert-twice", 1, "experts", _hooked(lambda m: _mlp(1)(m).shared_experts, lambda out: 2 * out)),
    Put("shared-expert-dropped", 0, "experts", _hooked(lambda m: _mlp(0)(m).shared_experts, _nothing)),
    Put("gate-up-swapped", 2, "experts", _swapped_gate_and_up(2)),
    Put("hash-table-zeroed", 0, "experts", _set(lambda m: _mlp(0)(m).gate, "tid2eid", torch.zeros_like)),
    Put("experts-wrong-for-some-tokens", 1, "experts", _dispatched(1, _tiles)),
    Put("experts-of-the-next-rank", 0, "experts", _dispatched(0, _wrong_rank)),
    Put("expert-ids-off-by-a-rank", 3, "experts", _dispatched(3, _a_rank_off)),
    Put("gate-in-4-bits", 1, "experts", _set(lambda m: _mlp(1)(m).gate, "weight", lambda w: simulate_fp4(w, 32))),
    Put("first-matrix-of-another-expert", 2, "experts", _another_gate(2)),
    Put("up-scaled-as-gate", 0, "experts", _scaled_as_gate(0)),
    Put("experts-normed-twice", 3, "experts", _twice_normed(lambda m: _layer(3)(m).post_attention_layernorm)),
    Put("weights-of-another-slot", 2, "experts", _dispatched(2, _sorted_outputs)),
    Put("pair-lost", 3, "experts", _dispatched(3, _lost)),
    Put("pairs-beyond-capacity-lost", 1, "experts", _dispatched(1, _beyond_capacity)),
    Put("pair-counted-twice", 2, "experts", _dispatched(2, _twice)),
    # norms and the head
    Put("norm-weight-plus-one", 2, "attention", _plus_one(2)),
    Put("hyper-head-mean", None, "hidden", lambda m: setattr(m.model.hc_head, "forward", lambda x: x.mean(2))),
)


def _lost_head(grouped: Tensor) -> Tensor:
    heads = grouped.flatten(2).unflatten(-1, (HEADS, HEAD_DIM)).clone()
    heads[:, :, 1] = 0
    return heads.reshape(grouped.shape)


def _streams_exchanged(out: Tensor) -> Tensor:
    return out[:, :, [1, 0, 2, 3]]


def _latent_norm(model: Any) -> Any:
    return attention(model, 0).q_a_norm


def _one_expert(model: Any) -> None:
    model.model.layers[2].mlp.experts.down_proj.data[3] *= 1.25


UNKNOWN = (
    Put(None, 1, "attention", lambda m: _given(attention(m, 1).o_a_proj, _lost_head), "a head's output lost"),
    Put(None, 3, "streams", _hooked(_layer(3), _streams_exchanged), "two streams exchanged"),
    Put(None, 2, "experts", _one_expert, "one expert a quarter too large"),
    Put(None, 0, "attention", _set(_latent_norm, "weight", lambda w: w.roll(7, 0)), "a norm's weights shifted"),
    Put(None, None, "logits", _hooked(lambda m: m.lm_head, lambda out: out + 0.5 * out.roll(1, -1)), "logits mixed"),
)
