"""What one call of the model holds beside weights and caches, moment by moment: read off `model/`, file by file.

A call is planned as the model runs it on one rank with the cpu ops: what each function keeps alive while another
runs, and what that one takes itself (`runtime.plan.ops`). The largest moment of the costliest layer is what a call
needs. It does not grow with the context: index scores and attention's logits exist in tiles only. `untiled_scores` says
what a runtime needs that makes them at once.
"""

from collections.abc import Iterator
from typing import Final

from model.config import LayerKind, ModelConfig
from model.ranks.ranks import CHECKED, KEPT
from runtime.plan.attention import attention
from runtime.plan.experts import experts
from runtime.plan.ops import F32
from runtime.plan.sizes import Alive, Moment, Sizes, moment

I32, I64 = 4, 8
HEAD_ROWS: Final = 64  # rows of logits made at once, see `scripts.logits`; generation makes one


def moments(s: Sizes) -> list[Moment]:
    """Every moment that could be the largest: of the embedding, of one layer of each kind, and of the head."""
    c = s.config
    embedded = {"embedded tokens": s.t * c.hidden_size * s.item}
    streams = s.m * c.hc_mult * c.hidden_size * s.item
    found = [_embedding(s, streams)]
    for layer in _distinct(c):
        found += _block(s, layer, embedded | {"streams": streams}, streams)
    weights = s.costs.hyper_weights(s.m, c.hc_mult, c.hidden_size)
    read = max(weights, s.m * c.hc_mult * F32 + s.costs.collapse(s.m, c.hc_mult, c.hidden_size))
    found.append(moment("hyper head", embedded | {"streams": streams}, work=read))
    row = {"output": s.m * c.hidden_size * s.item}
    gathered = s.gather(s.t * c.hidden_size, s.tokens)
    normed = s.costs.rms_norm(s.m, c.hidden_size)
    found.append(moment("final norm", embedded | {"streams": streams} | row, work=normed + gathered))
    found.append(_logits(s))
    return found


def largest(s: Sizes) -> Moment:
    """The moment of a call that takes the most."""
    compared = _compared(s)
    found = [moment(one.name, one.parts, compared=compared) for one in moments(s)]
    if s.ranks > 1:  # 64-bit words of a tile, their places, factors and products
        streams = s.m * s.config.hc_mult * s.config.hidden_size * s.item
        checked = 4 * I64 * min(CHECKED, max(streams, compared) // F32)
        found.append(moment("agreement", {"streams": streams}, compared=compared, work=checked))
    return max(found, key=lambda one: one.nbytes)


def _compared(s: Sizes) -> int:
    """What ranks keep until they compare it, see `Ranks.note`: of a long call one layer's, else those of all layers.

    KV, entries, index keys, and where each rank makes it for all tokens the selection; streams are there anyway.
    """
    if s.ranks == 1:
        return 0
    layers = [_compared_of_layer(s, layer) for layer in range(s.config.num_hidden_layers)]
    return max(layers) if s.t > KEPT else sum(layers)


def _compared_of_layer(s: Sizes, layer: int) -> int:
    c, kind = s.config, s.config.layer_kind(layer)
    kv = s.t * c.head_dim * s.item
    if kind is LayerKind.SWA:
        return kv
    entries = s.t // c.ratio(layer) + 1
    if kind is LayerKind.HCA:
        return kv + entries * c.head_dim * s.item
    selected = 0 if s.tokens.split else s.t * min(c.index_topk, s.context // c.ratio(layer)) * I32
    return kv + entries * (c.head_dim + c.index_head_dim) * s.item + selected


def untiled_scores(config: ModelConfig, tokens: int, context: int) -> int:
    """Bytes of the index scores [tokens, context / ratio] in fp32, which a runtime that does not tile them holds."""
    ratios = [config.ratio(layer) for layer, kind in enumerate(config.layer_kinds) if kind is LayerKind.CSA]
    return tokens * (context // min(ratios)) * F32 if ratios else 0


def _distinct(config: ModelConfig) -> list[int]:
    """One layer of each kind, ratio and way of routing."""
    first: dict[tuple[LayerKind, int, bool], int] = {}
    for layer, kind in enumerate(config.layer_kinds):
        first.setdefault((kind, config.ratio(layer), config.is_hash(layer)), layer)
    return list(first.values())


def _embedding(s: Sizes, streams: int) -> Moment:
    """`Transformer.embed`, and the streams that begin as copies of what it gives."""
    rows = s.t * s.config.hidden_size * F32  # stored as BF16, or F32
    if not s.shares.vocabulary.split:
        return moment("embedding", {"embedded tokens": rows, "streams": streams})
    # looked up, masked, as integers, and as they were
    return moment("embedding", {"embedded tokens": rows, "streams": streams}, exchange=3 * rows + s.t * 8)


def _block(s: Sizes, layer: int, alive: Alive, streams: int) -> Iterator[Moment]:
    """`Block.__call__`."""
    c, costs = s.config, s.costs
    hc, D = c.hc_mult, c.hidden_size
    row, whole = s.m * D * s.item, s.t * D * s.item
    normed = costs.rms_norm(s.m, D)
    read = max(costs.hyper_weights(s.m, hc, D), s.m * hc * (hc + 2) * F32 + costs.collapse(s.m, hc, D))
    written = costs.expand(s.m, hc, D)
    yield moment("mHC, read", alive, work=read)
    alive = alive | {"mHC weights": s.m * hc * (hc + 1) * F32, "sublayer input": row}
    yield moment("norm", alive, work=max(normed, row + s.gather(s.t * D, s.tokens)))
    alive = alive | {"sublayer input": whole}
    yield from attention(s, layer, alive)
    alive = alive | {"sublayer output": whole}
    yield moment("mHC, write", alive, work=written)
    alive = alive | {"streams": 2 * streams}
    yield moment("mHC, read", alive, work=read)
    alive = alive | {"sublayer input": row}
    yield moment("norm", alive, work=normed)
    yield from experts(s, layer, alive | {"sublayer input": 2 * row})
    yield moment("mHC, write", alive | {"sublayer output": row}, work=written)


def _logits(s: Sizes) -> Moment:
    """`Transformer.logits`, of at most `HEAD_ROWS` rows of the call's output."""
    c, share = s.config, s.shares.vocabulary
    rows = min(HEAD_ROWS, s.t)
    product = s.wide_linear("head", rows, share.size, c.hidden_size)
    own = rows * share.size * F32
    gathered = own + s.gather(rows * c.vocab_size, share, first=False, item=F32)
    alive = {"output": s.t * c.hidden_size * s.item, "rows in fp32": rows * c.hidden_size * F32}
    return moment("logits", alive, work=max(product, gathered))
