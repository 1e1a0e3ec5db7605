"""What the cache of a variant of grouped attention takes in a call: it computes with values, and is not rehearsed."""

from collections.abc import Callable

from torch import Tensor

from fathom.kernels.formats import product_quantise
from fathom.kernels.ops import Ops
from fathom.model.cache.gqa import Heads
from fathom.model.variants.choice import GroupedCoda, GroupedShard, Variant
from fathom.model.variants.shard import TILE
from fathom.runtime.plan.meta_ops import scratch_of

F32, F64 = 4, 8  # bytes


def attending(ops: Ops, variant: Variant, given: Heads, all_kv_heads: int, context: int, prompt: int) -> int:
    """Bytes of `GqaCache.attend`, the result included: of the op, and of what is computed with the call's tokens.

    `all_kv_heads`: of the layer, on all ranks; of the `context` positions `prompt` are the prompt's.
    """
    (tokens, heads, d), kv_heads, item = given.q.shape, given.k.shape[1], given.q.itemsize
    out, width = tokens * heads * d * item, kv_heads * d
    if isinstance(variant, GroupedCoda):  # `coda_attention.prefill` or `step`
        block, compared = min(tokens, variant.block), variant.exact + variant.summary
        slots, own = variant.window + compared, 0 if tokens == 1 else block
        banks = width * F32 * (2 * compared if tokens == 1 else 4 * compared + 8 * 64)
        op = _scratch(ops.attend_banks, block, heads, kv_heads, d, slots, own, item)
        return out * (2 if tokens > 1 else 1) + max(op, 4 * block * heads * d * F32 + banks)
    assert isinstance(variant, GroupedShard), f"{variant}: no variant of grouped attention"
    # or what compressing the prompt takes: eigenvectors of keys, clusters of values, of all heads on every rank
    width = all_kv_heads * d
    rows, groups = min(TILE, prompt), prompt * width // product_quantise.CHANNELS
    points = min(product_quantise.POINTS, groups)
    fit_keys = 6 * (width + rows) * width * F64
    distances = min(points, product_quantise.TILE) * product_quantise.ENTRIES * F32
    fit_values = 4 * points * product_quantise.CHANNELS * F64 + distances + 6 * rows * width * F32
    queries = 5 * min(tokens, 64) * heads * d * F32
    full = _scratch(ops.attend_grouped, tokens, heads, kv_heads, d, context, item)
    op = _scratch(ops.attend_codes, tokens, heads, kv_heads, d, variant.rank, item)
    return out + max(op, queries + max(full, fit_keys, fit_values))


def _scratch(op: Callable[..., Tensor], *sizes: int) -> int:
    found = scratch_of(op)
    assert found is not None, f"{op}: nothing beside it says what it takes"
    return found(*sizes)
