"""What the caches and one call must take, by hand from the config: nothing here asks the model."""

from dataclasses import replace

from model.config import LayerKind, ModelConfig

ITEM_BYTES = {"bf16": 2, "fp32": 4}
F32 = 4
IN_DTYPE = ("dtype", "dtype")  # how entries and index keys are stored where nothing else was asked for

# What one op of the backend cpu takes beside its operands and its result, whatever the context. A linear decodes
# tiles of 2^20 weights at up to 12 bytes each; attention and indexer keep theirs, 1 and 2 MiB each, below that.
TILES = 16 << 20


def entry_bytes(config: ModelConfig, item: int, form: str) -> int:
    """Bytes of one entry. In FP8: E4M3, rope dims in BF16, a scale per 64 columns, filled up to a multiple of 8."""
    d, rope = config.head_dim, config.qk_rope_head_dim
    narrow = (d - rope) + 2 * rope + (d - rope) // 64
    return {"dtype": d * item, "fp8": (narrow + 7) // 8 * 8}[form]


def key_bytes(config: ModelConfig, item: int, form: str) -> int:
    """Bytes of one index key. In FP8 an fp32 scale is beside it, in FP4 a byte of scale per 32 columns."""
    di = config.index_head_dim
    return {"dtype": di * item, "fp8": di + F32, "fp4": di // 2 + di // 32}[form]


def layer_bytes(
    config: ModelConfig, layer: int, context: int, chunk: int, item: int, formats: tuple[str, str] = IN_DTYPE
) -> dict[str, int]:
    """Bytes of each component of a layer's cache, for `context` positions in calls of `chunk` tokens.

    A ring holds the window of a call's first token and the whole call: window + chunk - 1 rows. A compressed layer has
    an entry for each closed window of `ratio` tokens, and keeps values and gates of the open one in fp32, so that the
    pooling does not depend on where calls end. In a CSA layer windows overlap: each token brings two series, and the
    first series of the last closed window is kept as well, 3 x ratio rows in all; and beside every entry lies an index
    key, `index_head_dim` wide, one for all index heads, with a frontier of its own. `formats` are those of entries and
    of keys.
    """
    d, di, ratio = config.head_dim, config.index_head_dim, config.ratio(layer)
    chunk = min(chunk, context)
    found = {"window": (config.sliding_window + chunk - 1) * d * item}
    kind = config.layer_kind(layer)
    if kind is LayerKind.SWA:
        return found
    rows = 3 * ratio if kind is LayerKind.CSA else ratio
    entry, key = entry_bytes(config, item, formats[0]), key_bytes(config, item, formats[1])
    found |= {"entries": context // ratio * entry, "frontier": 2 * rows * d * F32}
    if kind is LayerKind.CSA:
        found |= {"indexer_keys": context // ratio * key, "indexer_frontier": 2 * rows * di * F32}
    return found


def cache_bytes(
    config: ModelConfig, context: int, chunk: int, item: int, formats: tuple[str, str] = IN_DTYPE
) -> dict[str, int]:
    """The same summed over layers."""
    total: dict[str, int] = {}
    for layer in range(config.num_hidden_layers):
        for component, size in layer_bytes(config, layer, context, chunk, item, formats).items():
            total[component] = total.get(component, 0) + size
    return total


def call_bytes(config: ModelConfig, chunk: int, item: int) -> int:
    """At most what a call of `chunk` tokens holds at once beside weights and caches; the context is not in it.

    Alive through a layer: streams before and after each of the two sublayers, their input and output, and the fp32 sum
    over experts. Beside these the widest of: queries or index queries (stored twice, and twice in fp32 where they are
    normed, rotated or rounded), values and gates of both compressors in fp32 (and again where they are pooled), the
    activations of one expert that got every token. And one op's tiles.
    """
    D, s = config.hidden_size, config.hc_mult
    always = 3 * s * D * item + 2 * D * (item + F32)
    copies = 2 * item + 2 * F32
    queries = config.num_attention_heads * config.head_dim * copies
    indexed = config.index_n_heads * config.index_head_dim * copies + queries // 2
    pooled = 2 * 2 * 2 * config.head_dim * F32 + queries // 2
    expert = config.moe_intermediate_size * config.n_shared_experts * (copies + F32)
    return chunk * (always + max(queries, indexed, pooled, expert)) + TILES


def naive_bytes(config: ModelConfig, context: int, chunk: int, item: int) -> dict[str, int]:
    """What a runtime would hold that tiles nothing: the size of the mistake that the bounds must exclude."""
    found = {"streams of the whole prompt": context * config.hc_mult * config.hidden_size * item}
    if LayerKind.CSA in config.layer_kinds:
        ratio = min(config.ratio(layer) for layer, kind in enumerate(config.layer_kinds) if kind is LayerKind.CSA)
        found["index scores of one call, fp32"] = chunk * (context // ratio) * F32
        found["the same, of each head"] = chunk * (context // ratio) * F32 * config.index_n_heads
    return found


def shaped(config: ModelConfig, csa: int, hca: int, swa: int) -> ModelConfig:
    """A config whose caches are those of a published V4: `csa`, `hca` and `swa` layers of its widths.

    Source: config.json of DeepSeek-V4-Pro (30 CSA and 31 HCA layers) and DeepSeek-V4-Flash (21, 20, and 2 of SWA). Both
    have head_dim 512, index_head_dim 128, ratios 4 and 128, window 128; nothing else of them enters a cache.
    """
    kinds = (LayerKind.CSA,) * csa + (LayerKind.HCA,) * hca + (LayerKind.SWA,) * swa
    return replace(
        config,
        num_hidden_layers=len(kinds),
        layer_kinds=kinds,
        compress_ratios=tuple({LayerKind.CSA: 4, LayerKind.HCA: 128, LayerKind.SWA: 0}[kind] for kind in kinds),
        num_hash_layers=0,
        head_dim=512,
        qk_rope_head_dim=64,
        index_head_dim=128,
        sliding_window=128,
        max_position_embeddings=1 << 20,
    )
