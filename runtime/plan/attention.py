"""What attention holds, moment by moment: read off `model.attention`, `model.compressor` and `model.indexer`."""

from collections.abc import Iterator

from kernels.attention.cpu import ROWS
from model.config import LayerKind
from runtime.plan.ops import F32
from runtime.plan.sizes import Alive, Moment, Sizes, moment


def attention(s: Sizes, layer: int, alive: Alive) -> Iterator[Moment]:
    """`Attention.__call__`, beside what is `alive` around it."""
    c, t, costs, heads = s.config, s.t, s.costs, s.shares.heads.size
    rope, d = c.qk_rope_head_dim, c.head_dim
    angles, latent, queries = t * rope * F32, t * c.q_lora_rank * s.item, t * heads * d * s.item
    alive = alive | {"rotations": angles}
    normed = latent + costs.rms_norm(t, c.q_lora_rank)
    yield moment("low-rank query", alive, work=max(s.linear("attn.wq_a", t, c.q_lora_rank, c.hidden_size), normed))
    alive = alive | {"low-rank query": latent}
    normed = queries + costs.rms_norm(t * heads, d)
    rotated = 2 * queries + costs.rotate(t, heads, d, rope)
    yield moment("queries", alive, work=s.linear("attn.wq_b", t, heads * d, c.q_lora_rank))
    yield moment("queries, normed and rotated", alive, work=max(normed, rotated))
    alive = alive | {"queries": queries}
    yield moment("KV", alive, work=_kv(s))
    alive = alive | {"KV": t * d * s.item}
    yield from _attend(s, layer, alive)
    alive = alive | {"mixed values": queries}
    yield moment("output, rotated back", alive, work=angles // 2 + costs.rotate(t, heads, d, rope))
    yield from _project(s, alive)


def _kv(s: Sizes) -> int:
    """From the input to rotated and rounded KV [t, head_dim]."""
    c, t, d, costs = s.config, s.t, s.config.head_dim, s.costs
    row = t * d * s.item
    made = [
        s.linear("attn.wkv", t, d, c.hidden_size),
        row + costs.rms_norm(t, d),
        row + costs.rotate(t, 1, d, c.qk_rope_head_dim),
    ]
    if costs.deployed:
        made.append(2 * row + costs.simulate(t * (d - c.qk_rope_head_dim)))
    return max(made)


def _attend(s: Sizes, layer: int, alive: Alive) -> Iterator[Moment]:
    """`attend` of the layer's kind: compress, select, attend."""
    c, t, heads, kind = s.config, s.t, s.shares.heads.size, s.config.layer_kind(layer)
    keys = c.sliding_window + min(t, max(1, ROWS // heads))  # that come in a row, for one tile of tokens
    selected = 0
    if kind is not LayerKind.SWA:
        yield from _compress(s, layer, "compressor", c.head_dim, alive)
        entries = s.context // c.ratio(layer)
        keys = max(keys, entries)
    if kind is LayerKind.CSA:
        yield from _select(s, layer, alive)
        selected = min(c.index_topk, entries) + s.costs.banked
        alive = alive | {"selection": t * (selected + s.costs.banked) * 4}
    yield moment("attention", alive, work=s.costs.attend(t, heads, c.head_dim, keys, selected, c.sliding_window))


def _compress(s: Sizes, layer: int, name: str, width: int, alive: Alive) -> Iterator[Moment]:
    """A compressor: values and gates of all series in fp32, then what is pooled and stored."""
    c, t, ratio = s.config, s.t, s.config.ratio(layer)
    overlap = c.layer_kind(layer) is LayerKind.CSA
    columns = (2 if overlap else 1) * width
    one, wide = t * columns * F32, 0 if s.item == F32 else t * c.hidden_size * F32
    product = s.wide_linear(f"attn.{name}.wkv", t, columns, c.hidden_size)
    biased = 3 * one + ratio * columns * F32  # values, gates, and the position bias of each token
    yield moment(f"{name}, values and gates", alive, work=wide + max(one + product, biased))
    alive = alive | {"values and gates": 2 * one}
    closed = -(-t // ratio) * width
    stored = closed * (3 * F32 + 2 * s.item)  # normed, rotated, rounded, and read back
    stored += 0 if name.startswith("indexer") else s.costs.coding(closed // width, width)
    yield moment(f"{name}, pooling", alive, work=closed * F32 + max(s.costs.pool(t, width, overlap=overlap), stored))


def _select(s: Sizes, layer: int, alive: Alive) -> Iterator[Moment]:
    """`Indexer.__call__`."""
    c, t, costs, share = s.config, s.t, s.costs, s.shares.index_heads
    heads, d = share.size, c.index_head_dim
    yield from _compress(s, layer, "indexer.compressor", d, alive)
    queries = t * heads * d * s.item
    work = [
        s.linear("attn.indexer.wq_b", t, heads * d, c.q_lora_rank),
        queries + costs.rotate(t, heads, d, c.qk_rope_head_dim),
    ]
    if costs.deployed:
        work += [queries + costs.hadamard(t * heads, d), 2 * queries + costs.simulate(t * heads * d)]
    yield moment("index queries", alive, work=max(work))
    alive = alive | {"index queries": queries, "index weights": t * heads * F32}
    if share.split:
        whole = t * c.index_n_heads * d
        yield moment("index queries, gathered", alive, exchange=s.gather(whole, share, first=False))
        alive = alive | {"index queries": queries + whole * s.item}
        alive = alive | {"index weights": t * (heads + c.index_n_heads) * F32}
    entries = s.context // c.ratio(layer)
    selected = s.m * min(c.index_topk, entries)
    yield moment(
        "scores and selection",
        alive,
        work=costs.select(s.m, c.index_n_heads, d, entries, c.index_topk, few_pass=s.few_pass),
    )
    if s.tokens.split:
        whole = s.gather(t * min(c.index_topk, entries), s.tokens, item=4)
        yield moment("selection, gathered", alive | {"selection": selected * 4}, exchange=whole)


def _project(s: Sizes, alive: Alive) -> Iterator[Moment]:
    """`Attention.project`."""
    c, t = s.config, s.t
    heads, groups, output = s.shares.heads, s.shares.groups, s.shares.output
    if heads.split and not groups.split:
        mixed = t * heads.total * c.head_dim
        yield moment("heads, gathered", alive, exchange=s.gather(mixed, heads, first=False))
        alive = alive | {"values of all heads": mixed * s.item}
    columns = c.num_attention_heads * c.head_dim // c.o_groups
    rows, rank = groups.size * c.o_lora_rank, c.o_groups * c.o_lora_rank
    product = max(s.costs.linear(t, rows, columns, form, groups.size) for form in s.forms["attn.wo_a"])
    yield moment("output, low rank", alive, work=product)
    low = t * rows * s.item
    if groups.split:
        yield moment(
            "output, gathered", alive | {"low-rank output": low}, exchange=s.gather(t * rank, groups, first=False)
        )
    alive = alive | {"low-rank output": t * rank * s.item}
    yield moment("output", alive, work=s.linear("attn.wo_b", t, output.size, rank))
    if output.split:
        own = alive | {"output": t * output.size * s.item}
        yield moment("output, gathered", own, exchange=s.gather(t * c.hidden_size, output, first=False))
