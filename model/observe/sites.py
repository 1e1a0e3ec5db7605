"""Sites: the named tensors of the forward pass, at which a listener can watch them go by.

Each is what a small method of the model returns; `model.observe.observer` says which. Shapes are written as axes: an
axis that the config fixes is compared at every tensor that is watched; `t` (tokens of the call) and `n` (rows of this
moment) are free.

On several ranks every rank must attach the same listeners, and each is shown the whole tensor, put together from the
ranks' shards for it; at the sites of routed experts a rank sees its own.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from torch import Tensor

from fathom.model.config import ModelConfig

# Called with the layer (None outside of all layers) and the tensor itself. Caches and streams go on being used and
# overwritten: a listener that keeps a tensor clones it. One that writes into what passes steers the run: at a site that
# is passed before the tensor is used, the run goes on with what was written.
Listener = Callable[[int | None, Tensor], None]


class Site(NamedTuple):
    """A place in the model, by name, with the shape of what passes there."""

    name: str
    shape: str  # axes, see `axes`
    what: str


EMBEDDED = Site("embedded", "t hidden", "token embeddings, before they are copied into every stream")
HIDDEN = Site("hidden", "t hidden", "normed output of the model")
LOGITS = Site("logits", "n vocab", "logits, fp32")

# mHC: one of each per sublayer
ATTENTION_PRE = Site("attention.pre", "t s", "mHC weights that read the streams into the attention, fp32")
ATTENTION_POST = Site("attention.post", "t s", "mHC weights that write the attention's output to the streams, fp32")
ATTENTION_COMB = Site("attention.comb", "t s s", "mHC mixing of the streams; [t, j, k] sends stream j to k, fp32")
ATTENTION_STREAMS = Site("attention.streams", "t s hidden", "residual streams after the attention sublayer")
EXPERTS_PRE = Site("experts.pre", "t s", "as attention.pre, for the experts")
EXPERTS_POST = Site("experts.post", "t s", "as attention.post, for the experts")
EXPERTS_COMB = Site("experts.comb", "t s s", "as attention.comb, for the experts")
STREAMS = Site("streams", "t s hidden", "residual streams after the layer")

ATTENTION_INPUT = Site("attention.input", "t hidden", "normed input of the attention")
LATENT = Site("attention.latent", "t q_lora_rank", "normed low-rank query")
QUERY = Site("attention.query", "t heads head_dim", "queries, normed and rotated")
KV = Site("attention.kv", "t head_dim", "shared KV of the window as the ring stores it: normed, rotated, rounded")
ENTRY = Site("attention.entry", "n head_dim", "compressed entries of the windows that this call closed, as stored")
MIXED = Site("attention.mixed", "t heads head_dim", "attention output before the inverse rotation")
UNROTATED = Site("attention.unrotated", "t heads head_dim", "attention output after the inverse rotation")
ATTENTION_OUTPUT = Site("attention.output", "t hidden", "output of the attention sublayer")

INDEX_QUERY = Site("indexer.query", "t index_heads index_head_dim", "index queries, rotated, not rounded")
INDEX_QUERY_USED = Site("indexer.query_used", "t index_heads index_head_dim", "index queries as scored (rounded)")
INDEX_KEY = Site("indexer.key", "n index_head_dim", "index keys of the windows that this call closed, not rounded")
INDEX_KEY_USED = Site("indexer.key_used", "n index_head_dim", "the same as stored and scored")
INDEX_WEIGHTS = Site("indexer.weights", "t index_heads", "weight of each index head, scaled, fp32")
SELECTED = Site("indexer.selected", "t n", "entries selected for each token, ascending, then -1; int32")

EXPERTS_INPUT = Site("experts.input", "t hidden", "normed input of the experts")
EXPERT_IDS = Site("experts.ids", "t k", "experts of each token, int64")
EXPERT_WEIGHTS = Site("experts.weights", "t k", "their weights, fp32")
ROUTED_GATE = Site("experts.routed_gate", "n intermediate", "SwiGLU gate of one routed expert, before the clamp")
ROUTED_UP = Site("experts.routed_up", "n intermediate", "SwiGLU up of one routed expert, before the clamp")
SHARED_GATE = Site("experts.shared_gate", "t intermediate", "SwiGLU gate of the shared expert, before the clamp")
SHARED_UP = Site("experts.shared_up", "t intermediate", "SwiGLU up of the shared expert, before the clamp")
EXPERTS_OUTPUT = Site("experts.output", "t hidden", "output of the experts sublayer")

# Of the Llama family, whose one residual stream is looked at after each sublayer.
STREAM_ATTENDED = Site("attention.stream", "t hidden", "residual stream after the attention")
STREAM = Site("stream", "t hidden", "residual stream after the layer")

# In the order in which a call passes them; pages list them in this order.
SITES = (
    EMBEDDED,
    ATTENTION_PRE,
    ATTENTION_POST,
    ATTENTION_COMB,
    ATTENTION_INPUT,
    LATENT,
    QUERY,
    KV,
    ENTRY,
    INDEX_KEY,
    INDEX_KEY_USED,
    INDEX_WEIGHTS,
    INDEX_QUERY,
    INDEX_QUERY_USED,
    SELECTED,
    MIXED,
    UNROTATED,
    ATTENTION_OUTPUT,
    ATTENTION_STREAMS,
    EXPERTS_PRE,
    EXPERTS_POST,
    EXPERTS_COMB,
    EXPERTS_INPUT,
    EXPERT_IDS,
    EXPERT_WEIGHTS,
    ROUTED_GATE,
    ROUTED_UP,
    SHARED_GATE,
    SHARED_UP,
    EXPERTS_OUTPUT,
    STREAMS,
    HIDDEN,
    LOGITS,
)

# Steps on the way to a site. Ours shows them where its ops have them, see `observer.not_shown`; what is written into a
# step inside an op steers nothing.
LATENT_UNNORMED = Site("attention.latent_unnormed", "t q_lora_rank", "low-rank query before its norm")
QUERY_UNNORMED = Site("attention.query_unnormed", "t heads head_dim", "queries before their norm")
QUERY_UNROTATED = Site("attention.query_unrotated", "t heads head_dim", "queries normed, before their rotation")
KV_UNNORMED = Site("attention.kv_unnormed", "t head_dim", "KV before its norm")
KV_UNROTATED = Site("attention.kv_unrotated", "t head_dim", "KV normed, before its rotation")
ENTRY_UNNORMED = Site("attention.entry_unnormed", "n head_dim", "entries as they are pooled, before their norm")
ENTRY_UNROTATED = Site("attention.entry_unrotated", "n head_dim", "entries normed, before their rotation")
INDEX_KEY_UNNORMED = Site("indexer.key_unnormed", "n index_head_dim", "index keys as they are pooled, not normed")
INDEX_KEY_UNROTATED = Site("indexer.key_unrotated", "n index_head_dim", "index keys normed, not yet rotated")
INDEX_QUERY_UNROTATED = Site("indexer.query_unrotated", "t index_heads index_head_dim", "index queries, not rotated")
WEIGHTS = Site("attention.weights", "t heads keys", "softmax on KV of all positions, then on all entries")
EXPERT_LOGITS = Site("experts.logits", "t experts", "the router's products, before the square root of softplus")
EXPERTS_GATE = Site("experts.gate", "t k intermediate", "SwiGLU gate of the experts of `ids`, unclamped")
EXPERTS_UP = Site("experts.up", "t k intermediate", "SwiGLU up of the same, before the clamp")

STEPS: Final[dict[Site, Site]] = {
    LATENT_UNNORMED: LATENT,
    QUERY_UNNORMED: QUERY,
    QUERY_UNROTATED: QUERY,
    KV_UNNORMED: KV,
    KV_UNROTATED: KV,
    ENTRY_UNNORMED: ENTRY,
    ENTRY_UNROTATED: ENTRY,
    INDEX_KEY_UNNORMED: INDEX_KEY,
    INDEX_KEY_UNROTATED: INDEX_KEY,
    INDEX_QUERY_UNROTATED: INDEX_QUERY,
    WEIGHTS: MIXED,
    EXPERT_LOGITS: EXPERT_WEIGHTS,
    EXPERTS_GATE: EXPERTS_OUTPUT,
    EXPERTS_UP: EXPERTS_OUTPUT,
}


# What V4.1 has and V4 has not.
CANDIDATES = Site("indexer.candidates", "t n", "blocks that later layers may select from, ascending, then -1; int32")
ENGRAM_ROWS = Site("engram.rows", "t engram", "rows of the n-gram tables, side by side")
ENGRAM_GATE = Site("engram.gate", "t s", "how much of their value each stream takes, fp32")
ENGRAM_STREAMS = Site("engram.streams", "t s hidden", "streams that enter the layer, n-grams added")
FOLDED = Site("folded", "t hidden", "streams behind the last layer as one, before the last norm")
OF_V41 = (CANDIDATES, ENGRAM_ROWS, ENGRAM_GATE, ENGRAM_STREAMS, FOLDED)


def axes(config: ModelConfig) -> dict[str, int]:
    """Length of every axis that the config fixes, by its name in `Site.shape`."""
    tables = config.v41 and config.v41.engram
    return {
        "engram": tables.columns * tables.head_dim if tables else 0,
        "hidden": config.hidden_size,
        "s": config.hc_mult,
        "heads": config.num_attention_heads,
        "head_dim": config.head_dim,
        "q_lora_rank": config.q_lora_rank,
        "index_heads": config.index_n_heads,
        "index_head_dim": config.index_head_dim,
        "k": config.num_experts_per_tok,
        "experts": config.n_routed_experts,
        "intermediate": config.moe_intermediate_size,
        "vocab": config.vocab_size,
    }
