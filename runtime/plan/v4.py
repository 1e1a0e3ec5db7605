"""What a call of DeepSeek-V4 keeps alive, sublayer by sublayer: read off `model/`, one layer of each kind.

It does not grow with the context: index scores and attention's logits exist in tiles only. `untiled_scores` says what a
runtime needs that makes them at once.
"""

from dataclasses import replace

from fathom.kernels.experts.cpu import FEW
from fathom.kernels.experts.reference import FEW as SOME
from fathom.kernels.formats import basis_rows
from fathom.kernels.formats.groups import LINEAR_GROUP
from fathom.kernels.hyper.reference import ReadStreams
from fathom.kernels.ops import reads_apart
from fathom.kernels.tripwires.reference import CHECKED
from fathom.model.checkpoint.mtp import Head
from fathom.model.config import LayerKind, ModelConfig
from fathom.model.ranks.dispatch import parts_of
from fathom.model.ranks.ranks import KEPT, AxisShard, undivided
from fathom.model.rope import rotated_as
from fathom.model.rounding import FP4, FP8
from fathom.model.variants.choice import Coda, Full, Shard
from fathom.runtime.plan.call import F32, I64, Call, Live, Moment
from fathom.runtime.plan.exchanges import DOWN, ROUTED_UP, UP


def largest(c: ModelConfig, s: Call, head: Head | None = None, drafts: int = 0) -> Moment:
    """The moment of a call that takes the most bytes, or of a draft by this head of up to so many tokens at a time."""
    live, t, hidden = Live(), s.t, c.hidden_size
    streams, compared = s.m * c.hc_mult * hidden * s.item, _compared(c, s)
    live.hold("compared", compared)  # at the end of the layer, or of the call
    if head is not None:
        draft(c, s, live, head, drafts)
    with live.scope():
        live.hold("streams", streams)
        s.embed(live, hidden)
        if s.ranks > 1:  # 64-bit words of a tile, their places, factors and products
            live.run("agreement", exchange=4 * I64 * min(CHECKED, max(streams, compared) // F32))
        live.hold("embedded tokens", t * hidden * s.item)
        rotations = len(set(map(rotated_as, c.layer_kinds)))  # made once for all layers that rotate alike
        ratios = {c.ratio(layer) for layer, kind in enumerate(c.layer_kinds) if kind is not LayerKind.SWA}
        windows = sum(t // ratio + 1 for ratio in ratios)  # those that a call may close
        live.hold("cosines and sines", (rotations * t * 3 + windows * 2) * (c.qk_rope_head_dim // 2) * F32)
        for layer in _distinct(c, s):
            with live.scope():
                _block(c, s, live, layer)
    live.hold("output", t * hidden * s.item)
    s.unembed(live, "head", c.vocab_size)
    return live.largest


def deferred(c: ModelConfig, s: Call) -> int:
    """What a layer's invariants look at in a call of few tokens, and lives until the next one's: `observe.deferred`."""
    streams, comb = s.m * c.hc_mult * c.hidden_size * s.item, s.m * c.hc_mult * (c.hc_mult + 2) * F32
    found = []
    for layer in _distinct(c, s):
        kind, rows = c.layer_kind(layer), 0
        if kind is not LayerKind.SWA:
            rows += s.t * c.head_dim * s.item
        if kind is LayerKind.CSA:
            selected = min(c.index_topk, s.context // c.ratio(layer))
            rows += s.t * (c.index_head_dim * s.item + selected * 4)
            rows += s.m * c.index_n_heads * (c.index_head_dim * s.item + F32)
        found.append(2 * (streams + comb) + rows + _routing(c, s, layer))
    return max(found)


def draft(c: ModelConfig, s: Call, live: Live, head: Head, drafts: int) -> None:
    """Hold the rows that a drafting head has of the model, and run it: `DraftHead.draft`."""
    slots = 1 if head is Head.MTP or c.dspark is None else c.dspark.block_size
    read = c.hc_mult if head is Head.MTP or c.dspark is None else len(c.dspark.target_layer_ids)  # rows for each token
    n, hidden, item = c.sliding_window, c.hidden_size, s.item
    rows = n * read * hidden * item
    # in a call those that were kept, and the new ones; of DSpark those of each layer too, whose mean is taken in fp32
    beside = 0 if head is Head.MTP else read * item + c.hc_mult * F32
    live.hold("rows for the drafting head", (n + drafts) * hidden * (2 * read * item + beside))
    matrices = {name.removeprefix("mtp."): found for name, found in s.matrices.items() if name.startswith("mtp.")}
    variants = (*s.formats.variants, *[Full()] * head.stages) if s.formats.variants else ()
    one = replace(
        s, matrices={**s.matrices, **matrices}, tokens=undivided(slots), formats=s.formats._replace(variants=variants)
    )
    with live.scope():
        live.hold("rows to remember", rows)
        given = [("e_proj", n), ("h_proj", n * read)] if head is Head.MTP else [("main_proj", n)]
        for name, count in given:
            out = count * hidden * item
            live.run("drafting head, input", out + max(one.linear(name, count), s.op("rms_norm", count, hidden, item)))
            live.hold(name, out)
        live.run("drafting head, KV", 2 * n * (hidden + 2 * c.head_dim) * item + one.linear("attn.wkv", n))
    with live.scope():
        live.hold("streams", slots * c.hc_mult * hidden * item)
        _block(c, one, live, c.num_hidden_layers)
        live.hold("logits of drafts", 2 * max(slots, drafts) * c.vocab_size * F32)
        live.run("drafting head, logits", s.linear("head", slots, wide=True))


def untiled_scores(c: ModelConfig, tokens: int, context: int) -> int:
    """Bytes of the index scores [tokens, context / ratio] in fp32, which a runtime that does not tile them holds."""
    ratios = [c.ratio(layer) for layer, kind in enumerate(c.layer_kinds) if kind is LayerKind.CSA]
    return tokens * (context // min(ratios)) * F32 if ratios else 0


def _distinct(c: ModelConfig, s: Call) -> list[int]:
    """One layer of each kind, ratio, way of routing, and way of remembering."""
    kinds = enumerate(c.layer_kinds)
    found = {(kind, c.ratio(at), c.is_hash(at), str(s.formats.variant(at))): at for at, kind in kinds}
    return list(found.values())


def _compared(c: ModelConfig, s: Call) -> int:
    """Bytes that ranks keep until they compare them (`Ranks.record`): of a long call two layers', else of all layers.

    KV, entries, index keys, and where each rank makes them for all tokens the selection and the experts; streams are
    there anyway.
    """
    if s.ranks == 1:
        return 0
    layers = []
    for layer, kind in enumerate(c.layer_kinds):
        kept = s.t * c.head_dim * s.item
        if kind is not LayerKind.SWA:
            width = c.head_dim + (c.index_head_dim if kind is LayerKind.CSA else 0)
            kept += (s.t // c.ratio(layer) + 1) * width * s.item
        if kind is LayerKind.CSA and not s.tokens.split:
            kept += s.t * min(c.index_topk, s.context // c.ratio(layer)) * 4
        if not s.tokens.split:
            kept += _routing(c, s, layer)
        layers.append(kept)
    return sum(sorted(layers)[-2:]) if s.t > KEPT else sum(layers)


def _routing(c: ModelConfig, s: Call, layer: int) -> int:
    """Bytes of experts' ids and weights; ids by score are a view of the order of all experts."""
    ids = c.num_experts_per_tok if c.is_hash(layer) else c.n_routed_experts
    return s.m * (ids * I64 + c.num_experts_per_tok * F32)


def _block(c: ModelConfig, s: Call, live: Live, layer: int) -> None:
    """`Block.__call__`; reading for attention and its norm take less than the same for the experts."""
    m, hc, hidden, streams = s.m, c.hc_mult, c.hidden_size, live.alive["streams"]
    row, whole = m * hidden * s.item, s.t * hidden * s.item
    if isinstance(s.ops.read_streams, ReadStreams):
        weights = m * hc * (hc + 2) * F32
        read = max(s.op("hyper_weights", m, hc, hidden, s.item), weights + s.op("collapse", m, hc, hidden, s.item))
    else:
        read = s.op("read_streams", m, hc, hidden, s.item)
    norm, written = s.op("rms_norm", m, hidden, s.item), s.op("expand", m, hc, hidden, s.item)
    live.hold("mHC weights", m * hc * (hc + 2) * F32)
    live.hold("sublayer input", row)
    live.run("norm, gathered", row, s.gather(s.t * hidden, s.tokens))
    live.hold("sublayer input", whole)
    with live.scope():
        _attention(c, s, live, layer)
    live.hold("sublayer output", row)
    live.run("mHC, write", written)
    live.hold("streams", 2 * streams)
    live.run("mHC, read", read)
    live.hold("sublayer input", row)
    live.run("norm", norm)
    with live.scope():
        live.hold("sublayer input", 2 * row)
        _experts(c, s, live, layer)
    live.hold("sublayer output", row)
    live.run("mHC, write", written)


def _attention(c: ModelConfig, s: Call, live: Live, layer: int) -> None:
    """`Attention.__call__`."""
    t, d, rope, heads, item = s.t, c.head_dim, c.qk_rope_head_dim, s.shards.heads, s.item
    latent, queries, kv = t * c.q_lora_rank * item, t * heads.size * d * item, t * d * item
    rotated = s.op("rotate", t, heads.size, d, rope, item)
    _project(c, s, live, layer)
    live.run("low-rank query", s.op("rms_norm", t, c.q_lora_rank, item))
    live.hold("low-rank query", latent)
    live.run("queries", max(s.linear("attn.wq_b", t), queries + s.op("norm_rotate", t, heads.size, d, item)))
    live.hold("queries", queries)
    live.run("KV", s.op("norm_rotate", t, 1, d, item))
    live.hold("KV", kv)
    _attend(c, s, live, layer)
    live.hold("projections", 0)
    live.hold("mixed values", queries)
    live.run("output, rotated back", t * rope * F32 // 2 + rotated)
    live.hold("values rotated back", queries)
    groups, output = s.shards.groups, s.shards.output
    if heads.split and not groups.split:
        mixed = t * heads.total * d
        live.run("heads, gathered", exchange=s.gather(mixed, heads, first=False))
        live.hold("values of all heads", mixed * item)
    shapes = s.matrices["attn.wo_a"]
    products = [s.op("grouped_linear", t, r, n, groups.size, form.name, item, s.device) for form, r, n in shapes]
    live.run("output, low rank", max(products))
    low, rank = groups.size * c.o_lora_rank, groups.total * c.o_lora_rank
    live.run("low rank, gathered", t * low * item, _columns_gathered(s, t * rank, groups, low, "attn.wo_b"))
    live.hold("low-rank output", t * rank * item)
    live.run("output", s.linear("attn.wo_b", t))
    live.run("output, put together", t * output.size * item, _columns(c, s))


def _project(c: ModelConfig, s: Call, live: Live, layer: int) -> None:
    """`Input` of the attention; the position bias of each token is added to gates in place."""
    kind, products, bias = c.layer_kind(layer), {"attn.wq_a": False, "attn.wkv": False}, 0
    if kind is not LayerKind.SWA:
        compressors = ("compressor", "indexer.compressor") if kind is LayerKind.CSA else ("compressor",)
        products |= {f"attn.{name}.{part}": True for name in compressors for part in ("wkv", "wgate")}
        series = 2 if kind is LayerKind.CSA else 1
        bias = (s.t + 2 * c.ratio(layer)) * series * c.head_dim * F32
    if kind is LayerKind.CSA:
        products["attn.indexer.weights_proj"] = True
    held = s.made(s.t, products)
    live.run("projections", max(s.linears(s.t, products), held + bias))
    live.hold("projections", held)


def _columns_gathered(s: Call, numbers: int, shard: AxisShard, columns: int, *names: str) -> int:
    """Bytes of `Arithmetic.whole_columns`, of so many columns on each rank that matrices of these names read."""
    if s.in_codes(columns, *names):
        return s.gather_coded(numbers, shard, first=False)
    return s.gather(numbers, shard, first=False)


def _columns(c: ModelConfig, s: Call) -> int:
    """Bytes of `Call.columns` of a sublayer's output: gathered, or exchanged for all columns of the own tokens."""
    output = s.shards.output
    if output.split and s.tokens.split:
        return 2 * s.m * c.hidden_size * s.item
    return s.gather(s.t * c.hidden_size, output, first=False)


def _attend(c: ModelConfig, s: Call, live: Live, layer: int) -> None:
    """`attend` of the layer's kind: compress, select, attend."""
    kind, variant, form, entries, selected = c.layer_kind(layer), s.formats.variant(layer), s.formats.entries, 0, 0
    if isinstance(variant, Shard):
        form = "coded" if variant.basis is None else "based"
    if kind is not LayerKind.SWA:
        entries = s.context // c.ratio(layer)
        _compress(c, s, live, layer, "compressor", c.head_dim)
    with live.scope():
        if kind is LayerKind.CSA:
            banked = variant.exact + variant.summary if isinstance(variant, Coda) else 0
            selected = min(c.index_topk, entries) + banked
            with live.scope():
                _select(c, s, live, layer)
            live.hold("selection", s.t * (selected + banked) * 4)
        live.hold("projections", 0)
        sizes = s.t, s.shards.heads.size, c.head_dim, c.sliding_window, entries, selected
        live.run("attention", s.op("attend", *sizes, form, s.item))


def _compress(c: ModelConfig, s: Call, live: Live, layer: int, name: str, width: int) -> None:
    """A compressor: what is pooled of values and gates, rounded and stored."""
    t, series = s.t, 2 if c.layer_kind(layer) is LayerKind.CSA else 1
    closed = -(-t // c.ratio(layer))
    stored = closed * width * (3 * F32 + 2 * s.item)
    variant = s.formats.variant(layer)
    if isinstance(variant, Shard) and variant.basis is not None and name == "compressor":
        stored += coding(closed, width)
    live.run(f"{name}, pooling", closed * width * F32 + max(s.op("pool", t, width, series), stored))


def coding(vectors: int, width: int) -> int:
    """Bytes of `kernels.formats.basis_rows.write` of so many vectors: exact products, and what a gain loses."""
    gains = len(basis_rows.GAINS) * min(vectors, basis_rows.ROWS) * width * 16
    return vectors * width * 8 + max(vectors * width * 40 + width**2 * 8, gains)


def _select(c: ModelConfig, s: Call, live: Live, layer: int) -> None:
    """`Indexer.__call__`."""
    t, m, d, item, heads = s.t, s.m, c.index_head_dim, s.item, c.index_n_heads
    _compress(c, s, live, layer, "indexer.compressor", d)
    queries = m * heads * d * item
    made = [s.linear("attn.indexer.wq_b", m), queries + s.op("rotate", m, heads, d, c.qk_rope_head_dim, item)]
    if s.rounding.index == FP4:
        made.append(queries + s.op("round_index", m * heads, d, item))
    elif s.rounding.index == FP8:
        made.append(queries + s.op("simulate_fp8", m * heads * d, item))
    live.run("index queries", max(made))
    live.hold("index queries", queries)
    entries = s.context // c.ratio(layer)
    form = "coded" if isinstance(s.formats.variant(layer), Shard) else s.formats.keys
    sizes = s.m, c.index_n_heads, d, entries, c.index_topk
    scored = s.op("select", *sizes, form, item, s.device, few_pass=s.few_pass)
    rounded = queries if s.fp8_scores else 0  # or their codes, which take less
    live.run("scores and selection", rounded + scored)
    selected = min(c.index_topk, entries)
    live.run("selection, gathered", s.m * selected * 4, s.gather(t * selected, s.tokens, item=4))


def _experts(c: ModelConfig, s: Call, live: Live, layer: int) -> None:
    """`MoE.__call__`: gate, routed experts, shared expert."""
    m, t, hidden, k, item = s.m, s.t, c.hidden_size, c.num_experts_per_tok, s.item
    scores, out = m * c.n_routed_experts, t * s.shards.output.size
    live.run("gate", max(s.linear("ffn.gate", m, wide=True), scores * F32 + s.op("route", m, c.n_routed_experts)))
    live.hold("expert ids and weights", _routing(c, s, layer))
    if s.shards.experts.split:
        _spread(c, s, live)
        return
    with live.scope():
        if s.tokens.split:
            coded = s.in_codes(hidden, *UP)
            exchange = s.gather_coded(t * hidden, s.tokens, first=True) if coded else s.gather(t * hidden, s.tokens)
            live.run("experts' input, gathered", exchange=exchange)
            live.hold("input, ids and weights of all tokens", t * hidden * item + t * k * (I64 + F32))
        if s.shards.inner.split:
            _halves(c, s, live)
        else:
            _whole(c, s, live)
        live.run("routed and shared, added", out * F32 + max(s.widened(out), 0 if item == F32 else out * item))
        live.run("experts' output, put together", out * item, _columns(c, s))


def _spread(c: ModelConfig, s: Call, live: Live) -> None:
    """`MoE.output_of_whole`: the routed experts that lie here, outputs moved, and the shared one of the own tokens."""
    m, t, k, hidden, item = s.m, s.t, c.num_experts_per_tok, c.hidden_size, s.item
    up = m * s.shards.inner.size * item
    with live.scope():
        if s.tokens.split and t > SOME:
            live.run("shared expert, up", _up(s, "shared_experts", m))
            live.hold("shared expert's columns", up)
            _dispatched(c, s, live)
        else:
            if s.tokens.split:
                live.run("experts' input, gathered", exchange=s.gather(t * hidden, s.tokens))
                live.hold("input, ids and weights of all tokens", t * hidden * item + t * k * (I64 + F32))
            pairs, outputs = _pairs(c, s, t), t * k * hidden * item
            _apart(c, s, live, t, pairs)
            live.hold("outputs of experts", outputs)
            words = outputs + t * k * F32
            live.run("outputs of experts, filled in", exchange=words + outputs)
            live.hold("outputs of experts", 2 * outputs)
            live.run("routed experts, added", s.op("sum_slots", t, k, hidden, item))
            live.hold("outputs of experts", t * hidden * F32)
            live.run("shared expert, up", _up(s, "shared_experts", m))
    live.hold("sum over experts", m * hidden * F32)
    live.run("shared expert, down", up + s.linear("ffn.shared_experts.w2", m))
    live.hold("shared expert's output", m * hidden * item)
    live.run("routed and shared, added", m * hidden * (F32 + (0 if item == F32 else item)))
    live.hold("sum over experts", 0)
    live.hold("shared expert's output", 0)


def _dispatched(c: ModelConfig, s: Call, live: Live) -> None:
    """`Dispatch`: rows that go to experts and outputs that come back, in one or two halves."""
    t, k, hidden, item, n = s.t, c.num_experts_per_tok, c.hidden_size, s.item, s.ranks
    coded, numbered = s.in_codes(hidden, *ROUTED_UP), 4
    row = hidden + hidden // LINEAR_GROUP if coded else hidden * item
    output, parts = hidden * item + numbered, parts_of(t, n, k / c.n_routed_experts)
    for at, tokens in enumerate(parts):
        own, reached = -(-tokens // n), _reached(c, s, tokens)
        sent = own * min(n, k)
        packing = s.op("pack_fp8", own * hidden, LINEAR_GROUP, item) if coded else 0
        live.run("rows for experts, sent", max(packing, (coded * own + sent) * row + sent * (row + numbered)))
        routes = tokens * (k * (I64 + F32) + 3 * n * I64)
        live.hold(f"rows for experts, half {at + 1}", (sent + reached) * (row + numbered) + routes)
    for at, tokens in enumerate(parts):
        own, reached, pairs = -(-tokens // n), _reached(c, s, tokens), _pairs(c, s, tokens)
        outputs = tokens * k * hidden * item
        live.run("rows for experts, put in order", reached * row + tokens * row)
        with live.scope():
            rows = tokens * row
            if coded:
                live.run("rows for experts, unpacked", rows + s.op("unpack_fp8", tokens * hidden, LINEAR_GROUP, item))
            live.hold("experts' input", tokens * hidden * item + coded * rows)
            _apart(c, s, live, tokens, pairs)
        live.hold(f"rows for experts, half {at + 1}", 0)
        live.hold("outputs of experts", outputs)
        routes = tokens * k * 3 * n * I64
        live.run("outputs of experts, sent", exchange=pairs * (output + hidden * item) + routes)
        live.hold("outputs of experts", 0)
        live.hold(f"outputs of experts, half {at + 1}", (pairs + own * k) * output + routes)
    own = -(-parts[-1] // n)
    summed = s.m * hidden * F32
    one = s.op("sum_slots", own, k, hidden, item)
    live.run("routed experts, added", summed + max(2 * own * k * hidden * item + one, summed))


def _reached(c: ModelConfig, s: Call, tokens: int) -> int:
    """Of so many tokens, those that have an expert on this rank."""
    return min(tokens, -(-tokens * c.num_experts_per_tok // s.ranks)) if s.even else tokens


def _pairs(c: ModelConfig, s: Call, tokens: int) -> int:
    """Pairs of so many tokens and an expert on this rank."""
    k, here = c.num_experts_per_tok, s.shards.experts.size
    return -(-tokens * k // s.ranks) if s.even else tokens * min(k, here)


def _apart(c: ModelConfig, s: Call, live: Live, tokens: int, pairs: int) -> None:
    """`MoE.outputs` of so many tokens, and of them so many pairs with an expert that is here."""
    k, hidden, inner, item = c.num_experts_per_tok, c.hidden_size, c.moe_intermediate_size, s.item
    if _grouped(s):
        live.run("routed experts", _op(c, s, "experts", hidden, inner, tokens, summed=False))
        return
    with live.scope():
        outputs = tokens * k * hidden * item
        live.hold("outputs of experts", outputs)
        live.hold("pairs", pairs * (hidden * item + 4 * I64))
        n = min(pairs, _tokens_of_one(c, s) if s.even else tokens)
        if pairs <= FEW:
            live.run("routed experts", pairs * hidden * 2 * F32)
        else:
            live.hold("sum over experts", pairs * hidden * F32)
            down = s.linear("ffn.experts.w2", n) + s.widened(n * hidden)
            rows, columns = n * hidden * item, n * inner * item
            live.run("routed experts", rows + max(_up(s, "experts", n), columns + down))
        live.run("routed experts, put in order", pairs * hidden * (F32 + item))


def _whole(c: ModelConfig, s: Call, live: Live) -> None:
    """`MoE.routed` and the shared expert."""
    t, hidden, k, item, inner = s.t, c.hidden_size, c.num_experts_per_tok, s.item, c.moe_intermediate_size
    summed = t * hidden * F32
    if _grouped(s) or t <= FEW:
        live.run("routed experts", _op(c, s, "experts", hidden, inner))
    else:
        with live.scope():
            live.hold("sum over experts", summed)
            live.hold("routing", 4 * t * k * I64)
            n = _tokens_of_one(c, s)
            down = s.linear("ffn.experts.w2", n) + s.widened(n * hidden)
            rows, columns = n * hidden * item, n * inner * item
            live.run("routed experts", rows + max(_up(s, "experts", n), columns + down, n * hidden * item))
    live.hold("sum over experts", summed)
    down = t * inner * item + s.linear("ffn.shared_experts.w2", t)
    live.run("shared expert", max(_up(s, "shared_experts", t), down))
    live.hold("shared expert's output", t * hidden * item)


def _halves(c: ModelConfig, s: Call, live: Live) -> None:
    """`MoE.routed_up`, all ranks' columns put together, `MoE.routed_down`."""
    t, k, item, inner, out = s.t, c.num_experts_per_tok, s.item, s.shards.inner, s.shards.output.size
    n, own, whole = _tokens_of_one(c, s), t * inner.size * item, t * (k + 1) * inner.total * item
    with live.scope():
        if _grouped(s):
            live.run("routed experts, up", _op(c, s, "experts_up", c.hidden_size, inner.size))
            live.hold("routed experts' columns", k * own)
        else:
            live.hold("routed experts' columns", k * own)
            live.hold("routing", 4 * t * k * I64)
            live.run("routed experts, up", n * c.hidden_size * item + _up(s, "experts", n))
        live.run("shared expert, up", max(_up(s, "shared_experts", t), (k + 2) * own))
    live.hold("experts' columns", (k + 1) * own)
    exchange = _columns_gathered(s, whole // item, inner, inner.size, *DOWN)
    live.run("experts' columns, gathered", exchange=exchange)
    live.hold("experts' columns", whole)
    summed = t * out * F32
    with live.scope():
        if _grouped(s):
            copied = t * k * inner.total * item  # of the routed ones, without the shared one among them
            live.run("routed experts, down", copied + _op(c, s, "experts_down", out, inner.total))
        else:
            live.hold("sum over experts", summed)
            live.hold("routing", 4 * t * k * I64)
            rows, product = n * inner.total * item, s.linear("ffn.experts.w2", n) + s.widened(n * out)
            live.run("routed experts, down", rows + product)
    live.hold("sum over experts", summed)
    live.run("shared expert, down", t * inner.total * item + s.linear("ffn.shared_experts.w2", t))
    live.hold("shared expert's output", t * out * item)


def _grouped(s: Call) -> bool:
    """Whether one op runs all experts at once, whatever the number of tokens."""
    return not reads_apart(s.ops)


def _op(c: ModelConfig, s: Call, op: str, hidden: int, inner: int, tokens: int | None = None, **how: bool) -> int:
    """Bytes of an op that runs all experts at once, of matrices of such rows and columns; of the call, or `tokens`."""
    sizes = tokens or s.t, c.num_experts_per_tok, s.shards.experts.size, hidden, inner
    forms = {form.name for form, _, _ in s.matrices["ffn.experts.w1"]}
    return max(s.op(op, *sizes, form, s.item, deployed=s.rounding.linears == FP8, **how) for form in forms)


def _tokens_of_one(c: ModelConfig, s: Call) -> int:
    """Tokens of the expert that gets most."""
    even = -(-s.t * c.num_experts_per_tok // c.n_routed_experts)
    return min(s.t, even) if s.even else s.t


def _up(s: Call, name: str, n: int) -> int:
    """Bytes of `Expert.up` of n tokens, its result included."""
    products = {f"ffn.{name}.{half}": False for half in ("w1", "w3")}
    made = s.made(n, products)
    return max(s.linears(n, products), made + s.op("swiglu", made // (2 * s.item), s.item))
