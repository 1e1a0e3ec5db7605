"""What a call of a Llama-family model keeps alive: read off `model/llama/`.

It does not grow with the context, but where layers read a prompt one after the other: then the streams of all its
tokens are alive, and the exact keys and values of one layer.
"""

from fathom.kernels.formats import product_quantise
from fathom.kernels.tripwires.reference import CHECKED
from fathom.model.llama.config import LlamaConfig
from fathom.model.ranks.ranks import KEPT, AxisShard
from fathom.model.variants.choice import GroupedCoda, GroupedShard, Variant
from fathom.model.variants.shard import TILE
from fathom.runtime.plan.call import F32, I64, Call, Live, Moment

F64 = 8  # bytes


def largest(c: LlamaConfig, s: Call, *, adapters: bool) -> Moment:
    """The moment of a call that takes the most bytes: of embedding, either half of a layer, and head."""
    live, t, hidden, item = Live(), s.t, c.hidden_size, s.item
    row, columns = t * hidden * item, t * s.shards.inner.size
    norm = s.op("rms_norm", t, hidden, item)
    output = s.gather(t * hidden, s.shards.output, first=False)
    if s.ranks > 1:  # streams that ranks compare: of a short call after its last layer
        live.hold("compared", c.num_hidden_layers * row if t <= KEPT else 0)
        live.run("agreement", exchange=4 * I64 * min(CHECKED, row // F32))
    if s.formats.prompted:  # whose pieces are calls
        prompt = s.context if s.prompt is None else s.prompt
        live.hold("prompt, exact, of a layer", 2 * prompt * s.shards.kv_heads.size * c.head_dim * item)
        if prompt > t:  # what the block before gave, what is left of attention, and what is made of that
            live.hold("streams of the prompt", 3 * prompt * hidden * item)
    live.hold("stream", row)
    s.embed(live, hidden)
    with live.scope():
        live.hold("sublayer input", row)
        _attention(c, s, live, adapters=adapters)
    with live.scope():  # the stream that the block was given is still its caller's
        live.hold("stream", 2 * row)
        live.run("norm", norm)
        live.hold("sublayer input", row)
        live.run("gate and up", columns * item + max(s.linear("mlp.gate_proj", t), s.linear("mlp.up_proj", t)))
        live.run("SwiGLU", 2 * columns * item + s.op("swiglu", columns, item))
        live.hold("SwiGLU's columns", columns * item)
        _gathered(s, live, "SwiGLU's columns", t * c.intermediate_size, s.shards.inner)
        live.run("down", s.linear("mlp.down_proj", t), output)
    live.run("sum, and final norm", row + max(2 * row, norm))
    s.unembed(live, "embed_tokens" if c.tie_word_embeddings else "lm_head", c.vocab_size)
    return live.largest


def _gathered(s: Call, live: Live, name: str, numbers: int, shard: AxisShard) -> None:
    """From here on all ranks' parts of a tensor are alive beside this rank's."""
    if shard.split:
        live.run(f"{name}, gathered", exchange=s.gather(numbers, shard, first=False))
        live.hold(f"{name}, whole", numbers * s.item)


def _attention(c: LlamaConfig, s: Call, live: Live, *, adapters: bool) -> None:
    """`Attention.__call__`; with adapters noise queries are heads too."""
    t, d, heads, kv_heads = s.t, c.head_dim, s.shards.heads.size, s.shards.kv_heads.size
    numbers, kv_numbers = t * heads * d, t * kv_heads * d
    q, k = numbers * s.item, kv_numbers * s.item
    live.run("queries", s.linear("self_attn.q_proj", t))
    live.hold("heads", q)
    live.run("keys and values", k + max(s.linear("self_attn.k_proj", t), s.linear("self_attn.v_proj", t)))
    live.hold("heads", q + 2 * k)
    live.hold("cosines and sines", t * d * F32)
    live.run("rotation", max(s.op("rotate_halves", numbers, s.item), q + s.op("rotate_halves", kv_numbers, s.item)))
    live.hold("heads", 2 * q + 3 * k)
    live.hold("noise queries", 3 * q if adapters else 0)
    sizes = t, (2 if adapters else 1) * heads, kv_heads, d
    variants = {s.formats.variant(layer) for layer in range(c.num_hidden_layers)}
    live.run("attention", max(attend(s, variant, *sizes, s.context) for variant in variants))
    if adapters:  # both streams come back in the run's dtype, and are subtracted in fp32
        live.run("subtraction", 2 * q + 6 * numbers * F32)
    live.hold("heads", 3 * q + 3 * k)
    _gathered(s, live, "heads", t * c.num_attention_heads * d, s.shards.heads)
    live.run("output", s.linear("self_attn.o_proj", t), s.gather(t * c.hidden_size, s.shards.output, first=False))


def attend(s: Call, variant: Variant, tokens: int, heads: int, kv_heads: int, d: int, context: int) -> int:
    """Bytes of `GqaCache.attend`: of the op, and of what a variant's cache computes with the tokens of the call."""
    full = s.op("attend_grouped", tokens, heads, kv_heads, d, context, s.item)
    out, width = tokens * heads * d * s.item, kv_heads * d
    match variant:
        case GroupedCoda():  # `coda_attention.prefill` or `step`
            block, compared = min(tokens, variant.block), variant.exact + variant.summary
            slots, own = variant.window + compared, 0 if tokens == 1 else block
            banks = width * F32 * (2 * compared if tokens == 1 else 4 * compared + 8 * 64)
            op = s.op("attend_banks", block, heads, kv_heads, d, slots, own, s.item)
            return out * (2 if tokens > 1 else 1) + max(op, 4 * block * heads * d * F32 + banks)
        case GroupedShard():  # or what compressing the prompt takes: eigenvectors of keys, clusters of values
            if s.shards.kv_heads.split:  # which are of all heads, on every rank
                width *= s.ranks
            prompt = context if s.prompt is None else s.prompt
            rows, groups = min(TILE, prompt), prompt * width // product_quantise.CHANNELS
            points = min(product_quantise.POINTS, groups)
            fit_keys = 6 * (width + rows) * width * F64
            distances = min(points, product_quantise.TILE) * product_quantise.ENTRIES * F32
            fit_values = 4 * points * product_quantise.CHANNELS * F64 + distances + 6 * rows * width * F32
            queries = 5 * min(tokens, 64) * heads * d * F32
            op = s.op("attend_codes", tokens, heads, kv_heads, d, variant.rank, s.item)
            return out + max(op, queries + max(full, fit_keys, fit_values))
    return full
