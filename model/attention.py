"""Attention of the three kinds of layer: SWA, HCA (dense over compressed entries), CSA (selected ones).

One low-rank query, one shared KV head that is key and value at once, a sink per head, and the inverse rotation of the
output, because values carry rope. Source: DeepSeek `Attention.forward`; paper section 2.3.
"""

from torch import Tensor

from model import sites, tripwire
from model.arithmetic import Arithmetic
from model.cache.layers import CsaCache, HcaCache, LayerCache
from model.compressor import MainCompressor
from model.config import LayerKind, ModelConfig
from model.decode import Weights
from model.indexer import Indexer
from model.ranks import Share
from model.rope import Rotation


class Attention:
    """What every layer kind shares; a layer of this class itself is SWA: it sees its window only."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic, rotation: Rotation
    ) -> None:
        prefix = f"layers.{layer}.attn"
        self.wq_a = weights.matrix(f"{prefix}.wq_a.weight")  # [q_lora_rank, hidden]
        self.q_norm = weights.vector(f"{prefix}.q_norm.weight").float()  # [q_lora_rank]
        # of the four that are sharded, and of the sinks, these are this rank's rows
        self.wq_b = weights.matrix(f"{prefix}.wq_b.weight")  # [heads * head_dim, q_lora_rank]
        self.wkv = weights.matrix(f"{prefix}.wkv.weight")  # [head_dim, hidden]
        self.kv_norm = weights.vector(f"{prefix}.kv_norm.weight").float()  # [head_dim]
        self.wo_a = weights.matrix(f"{prefix}.wo_a.weight")  # [o_groups * o_lora_rank, heads * head_dim / o_groups]
        self.wo_b = weights.matrix(f"{prefix}.wo_b.weight")  # [hidden, o_groups * o_lora_rank]
        self.sink = weights.vector(f"{prefix}.attn_sink").float()  # [heads]
        self.arithmetic, self.rotation, self.layer = arithmetic, rotation, layer
        self.ranks, self.head_dim = arithmetic.ranks, config.head_dim
        self.window, self.rope_dim, self.eps = config.sliding_window, config.qk_rope_head_dim, config.rms_norm_eps

    def __call__(self, x: Tensor, first: int, cache: LayerCache, tokens: Share) -> Tensor:
        """Attend from x [t, hidden], at positions ``first ..``, and advance the layer's cache. Returns [t, hidden].

        Every rank has all of x and of the cache, and computes its own heads; `tokens` says for which of the t tokens it
        selects entries.
        """
        ops, taps, heads = self.arithmetic.ops, self.arithmetic.taps, self.ranks.shares.heads
        taps(sites.ATTENTION_INPUT, self.layer, x)
        cos, sin = self.rotation.at(first, x.shape[0])
        latent = ops.rms_norm(self.arithmetic.linear(x, self.wq_a), self.q_norm, self.eps)
        q = self.arithmetic.linear(latent, self.wq_b).unflatten(-1, (heads.size, self.head_dim))
        q = ops.rotate(ops.rms_norm(q, None, self.eps), cos, sin)
        kv = ops.rotate(ops.rms_norm(self.arithmetic.linear(x, self.wkv), self.kv_norm, self.eps), cos, sin)
        kv = self.arithmetic.rounded_kv(kv, self.rope_dim)
        self.ranks.note(sites.KV.name, self.layer, kv)
        taps(sites.LATENT, self.layer, latent)
        taps(sites.QUERY, self.layer, q, heads, 1)
        taps(sites.KV, self.layer, kv)
        cache.ring.write(first, kv)
        for position in (max(0, first - self.window + 1), first + x.shape[0] - 1):  # the oldest seen, and the newest
            tripwire.count("attention.ring", self.layer, position, cache.ring.held_for(position), position)
        out = self.attend(q, x, latent, first, cache, cos, sin, tokens)  # [t, heads, head_dim]
        taps(sites.MIXED, self.layer, out, heads, 1)
        out = ops.rotate(out, cos, -sin)
        taps(sites.UNROTATED, self.layer, out, heads, 1)
        out = self.project(out)
        taps(sites.ATTENTION_OUTPUT, self.layer, out)
        return out

    def project(self, out: Tensor) -> Tensor:
        """Outputs of this rank's heads [t, heads, head_dim] to the sublayer's [t, hidden]: low rank, by groups."""
        ranks, (heads, groups, output, *_) = self.ranks, self.ranks.shares
        if not groups.split:
            out = ranks.whole(out, 1, heads)
        out = out.flatten(1).unflatten(-1, (groups.size, -1))
        # wo_a is FP8 on disk, but its input is not quantised: the reference computes this product in BF16
        low = ranks.whole(self.arithmetic.ops.grouped_linear(out, self.wo_a, groups.size), 1, groups)
        return ranks.whole(self.arithmetic.linear(low.flatten(1), self.wo_b), 1, output)

    def attend(
        self,
        q: Tensor,
        x: Tensor,
        latent: Tensor,
        first: int,
        cache: LayerCache,
        cos: Tensor,
        sin: Tensor,
        tokens: Share,
    ) -> Tensor:
        """Attend to the window alone."""
        del x, latent, cos, sin, tokens
        return self.arithmetic.ops.attend(q, cache.ring.data, first, self.window, None, 0, None, self.sink)


class HcaAttention(Attention):
    """Window, and every visible compressed entry."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic, rotation: Rotation
    ) -> None:
        super().__init__(config, layer, weights, arithmetic, rotation)
        self.compressor = MainCompressor(config, layer, weights, arithmetic, rotation)

    def attend(
        self,
        q: Tensor,
        x: Tensor,
        latent: Tensor,
        first: int,
        cache: LayerCache,
        cos: Tensor,
        sin: Tensor,
        tokens: Share,
    ) -> Tensor:
        """Compress, then attend to the window and all visible entries."""
        del latent, cos, sin, tokens
        assert isinstance(cache, HcaCache), f"HCA layer got {type(cache).__name__}"
        self.compressor(x, first, cache.frontier, cache.entries)
        ratio, entries = cache.frontier.ratio, cache.entries.view()
        out = self.arithmetic.ops.attend(q, cache.ring.data, first, self.window, entries, ratio, None, self.sink)
        cache.settle()
        return out


class CsaAttention(HcaAttention):
    """Window, and the entries that the indexer selects."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic, rotation: Rotation
    ) -> None:
        super().__init__(config, layer, weights, arithmetic, rotation)
        self.indexer = Indexer(config, layer, weights, arithmetic, rotation)
        self.top_k = config.index_topk

    def attend(
        self,
        q: Tensor,
        x: Tensor,
        latent: Tensor,
        first: int,
        cache: LayerCache,
        cos: Tensor,
        sin: Tensor,
        tokens: Share,
    ) -> Tensor:
        """Compress, select, then attend to the window and the selected entries."""
        assert isinstance(cache, CsaCache), f"CSA layer got {type(cache).__name__}"
        self.compressor(x, first, cache.frontier, cache.entries)
        ratio, entries = cache.frontier.ratio, cache.entries.view()
        selected = self.indexer(x, latent, first, cache, cos, sin, tokens)
        keys = cache.keys
        selected = tripwire.selection(self.layer, first, ratio, self.top_k, keys.used, selected, keys.evicted)
        self.arithmetic.taps(sites.SELECTED, self.layer, selected)
        rows = cache.entries.chosen(selected)
        out = self.arithmetic.ops.attend(q, cache.ring.data, first, self.window, entries, ratio, rows, self.sink)
        cache.settle()
        return out


def build_attention(
    config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic, rotation: Rotation
) -> Attention:
    """Return the attention that the layer's kind asks for."""
    match config.layer_kind(layer):
        case LayerKind.SWA:
            return Attention(config, layer, weights, arithmetic, rotation)
        case LayerKind.HCA:
            return HcaAttention(config, layer, weights, arithmetic, rotation)
        case LayerKind.CSA:
            return CsaAttention(config, layer, weights, arithmetic, rotation)
