"""What attending takes in a layer with grouped heads, by variant of its cache: bounds, read off the functions named."""

from kernels.differential import cpu as differential
from kernels.formats import product_quantise
from kernels.grouped import cpu as gqa
from kernels.shard import cpu as shard
from model.llama.config import LlamaConfig
from model.variants.choice import Full, GroupedCoda, GroupedShard, Variant
from model.variants.shard import TILE
from runtime.plan.ops import F32, TILE_SLACK, Costs

F64 = 8


def attend(variant: Variant, costs: Costs, c: LlamaConfig, tokens: int, heads: int, context: int) -> int:
    """`GqaCache.attend` of so many tokens with `heads` query heads: noise queries are heads too."""
    kv_heads, d = c.num_key_value_heads, c.head_dim
    match variant:
        case Full():
            return attend_grouped(costs, tokens, heads, kv_heads, d, context)
        case GroupedCoda():
            return attend_coda(costs, variant, tokens, heads, kv_heads, d)
        case GroupedShard():
            return attend_shard(costs, variant, tokens, heads, kv_heads, d, context)
    raise AssertionError(f"{variant}: of layers with compressed entries")


def attend_grouped(costs: Costs, tokens: int, heads: int, kv_heads: int, d: int, context: int) -> int:
    """`attend_grouped` to as many positions as the context has."""
    rows = min(tokens, max(1, gqa.ROWS // heads))
    queries = rows * heads * d * F32  # scaled, by head of keys; the accumulator; at the end, in the order of tokens
    tile = min(context, gqa.tile_length(rows, heads, kv_heads, d))
    widened = 0 if costs.item == F32 else 2 * kv_heads * tile * d * F32
    folded = widened + rows * heads * tile * F32 + 3 * rows * tile
    return tokens * heads * d * costs.item + 2 * queries + max(queries, folded) + TILE_SLACK


def attend_coda(costs: Costs, variant: GroupedCoda, tokens: int, heads: int, kv_heads: int, d: int) -> int:
    """`coda_attention.prefill` or `step`: all keys and values in fp32, and two tiles of logits."""
    block, narrow = min(tokens, variant.block), costs.item < F32
    slots, more = variant.window + variant.exact + variant.summary, 0 if tokens == 1 else block
    queries = block * heads * d * F32
    joined = costs.item if more else 0  # with the block's own
    rows = 2 * kv_heads * (slots + more) * d * (joined + (F32 if narrow else 0))
    each = heads // kv_heads * (slots + more)  # logits of a token and a KV head
    logits = 2 * max(each, min(differential.LOGITS, kv_heads * block * each)) * F32
    compared = variant.exact + variant.summary  # in fp32, where the cache is not
    banks = kv_heads * d * F32 * (2 * compared if tokens == 1 else 4 * compared + 8 * 64)
    out = tokens * heads * d * costs.item * (2 if tokens > 1 else 1)  # in parts, and joined
    return out + 4 * queries + max(rows + logits, banks) + more * more + TILE_SLACK


def attend_shard(
    costs: Costs, variant: GroupedShard, tokens: int, heads: int, kv_heads: int, d: int, context: int
) -> int:
    """`ShardCache.attend`: a tile of exact or rebuilt keys and values, or what compressing the prompt takes."""
    rows, width = min(tokens, shard.TOKENS), kv_heads * d
    queries = rows * heads * d * F32
    tile = max(1, min(shard.KEYS // width, shard.LOGITS // (heads * rows)))
    rebuilt = tile * (3 * variant.rank + 5 * width) * F32 + width * variant.rank * 2 * F32
    read = max(rebuilt + 3 * rows * heads * tile * F32, attend_grouped(costs, tokens, heads, kv_heads, d, context))
    some = min(TILE, context)
    fit_keys = 6 * width * width * F64 + 6 * some * width * F64  # covariance, its vectors, their sorted copy; a tile
    points = min(product_quantise.POINTS, context * width // product_quantise.CHANNELS)
    distances = min(points, product_quantise.TILE) * product_quantise.ENTRIES * F32
    fit_values = 4 * points * product_quantise.CHANNELS * F64 + distances + 6 * some * width * F32
    return tokens * heads * d * costs.item + 5 * queries + max(read, fit_keys, fit_values) + TILE_SLACK
