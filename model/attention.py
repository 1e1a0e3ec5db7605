"""Attention of the three kinds of layer: SWA, HCA (dense over compressed entries), CSA (selected ones).

One low-rank query, one shared KV head that is key and value at once, a sink per head, and the inverse rotation of the
output, because values carry rope. Source: DeepSeek `Attention.forward`; paper section 2.3.
"""

from typing import NamedTuple

from torch import Tensor

from fathom.kernels.formats.stored import Rows, Slots
from fathom.model.arithmetic import Arithmetic
from fathom.model.cache.layers import CsaCache, HcaCache, LayerCache
from fathom.model.call import Call
from fathom.model.checkpoint.weights import Weights
from fathom.model.compressor import EntryCompressor
from fathom.model.config import LayerKind, ModelConfig
from fathom.model.indexer import Indexer
from fathom.model.linear import GroupedLinear, Input, Linear, OutputLinear, Reader
from fathom.model.rope import Rotation


class Beyond(NamedTuple):
    """What a call's tokens attend to beside their window."""

    entries: Rows | Slots | None  # None: nothing
    ratio: int  # tokens per entry
    selected: Tensor | None  # [t, k] int32, rows of `entries`, -1 where there is none; None: all that are visible


class Attention:
    """What every layer kind shares; a layer of this class itself is SWA: it sees its window only."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic, rotation: Rotation
    ) -> None:
        prefix = f"{config.prefix(layer)}.attn"

        self.wq_a = Reader(weights.matrix(f"{prefix}.wq_a.weight"))  # [q_lora_rank, hidden]
        self.q_norm = weights.vector(f"{prefix}.q_norm.weight").float()  # [q_lora_rank]
        self.wq_b = Linear(weights.matrix(f"{prefix}.wq_b.weight"), arithmetic)  # [heads * head_dim, q_lora_rank]
        self.wkv = Reader(weights.matrix(f"{prefix}.wkv.weight"))  # [head_dim, hidden]
        self.readers: tuple[Reader, ...] = (self.wq_a, self.wkv)  # of the input
        self.kv_norm = weights.vector(f"{prefix}.kv_norm.weight").float()  # [head_dim]
        # by groups of heads to o_groups * o_lora_rank numbers, and from these to hidden
        coded = arithmetic.linears_rounded and weights.coded([f"{prefix}.wo_b.weight"])
        self.wo_a = GroupedLinear(weights.matrix(f"{prefix}.wo_a.weight"), arithmetic, coded=coded)
        self.wo_b = OutputLinear(weights.matrix(f"{prefix}.wo_b.weight"), arithmetic)  # [hidden, o_groups * rank]
        self.sink = weights.vector(f"{prefix}.attn_sink").float()  # [heads]
        self.arithmetic, self.rotation, self.head_dim = arithmetic, rotation, config.head_dim
        self.window, self.rope_dim, self.eps = config.sliding_window, config.qk_rope_head_dim, config.rms_norm_eps

    def __call__(self, x: Tensor, call: Call, cache: LayerCache) -> Tensor:
        """Attend from x [m, hidden], and advance the layer's cache. Returns [m, hidden]."""
        read = Input(x, self.readers, call, self.arithmetic)
        latent = self.latent(read)
        q, kv = self.query(latent, call), self.kv(read, call)
        cache.write(call, kv)
        beyond = self.beyond_window(read, latent, call, cache)
        del read  # of a long call it is large, and so are these behind it
        out = self.attend(q, beyond, call, cache)
        del q, beyond
        cache.evict()
        out = self.unrotate(out, call)
        return self.output(out, call)

    def latent(self, x: Input) -> Tensor:
        """Normed low-rank query [t, q_lora_rank], which the indexer reads too."""
        return self.arithmetic.ops.rms_norm(self.latent_unnormed(x), self.q_norm, self.eps)

    def latent_unnormed(self, x: Input) -> Tensor:
        """The same before its norm."""
        return self.wq_a(x)

    def query(self, latent: Tensor, call: Call) -> Tensor:
        """Queries [t, heads, head_dim], normed head by head without weights, then rotated."""
        q, angles = self.query_unnormed(latent), call.angles(self.rotation)
        return self.arithmetic.ops.norm_rotate(q, None, self.eps, *angles, 0)

    def query_unnormed(self, latent: Tensor) -> Tensor:
        """The same before their norm."""
        q: Tensor = self.wq_b(latent).unflatten(-1, (-1, self.head_dim))
        return q

    def kv(self, x: Input, call: Call) -> Tensor:
        """Key and value of each token in one [t, head_dim]: normed, rotated, rounded as the window keeps it."""
        given = self.kv_unnormed(x), self.kv_norm, self.eps, *call.angles(self.rotation), self.arithmetic.kv_group
        return self.arithmetic.ops.norm_rotate(*given)

    def kv_unnormed(self, x: Input) -> Tensor:
        """The same before its norm."""
        return self.wkv(x)

    def beyond_window(self, x: Input, latent: Tensor, call: Call, cache: LayerCache) -> Beyond:
        """Nothing is compressed, and nothing seen beside the window."""
        del x, latent, call, cache
        return Beyond(None, 0, None)

    def attend(self, q: Tensor, beyond: Beyond, call: Call, cache: LayerCache) -> Tensor:
        """Attend from q [t, heads, head_dim] to the window, compressed entries and the sink: [t, heads, head_dim]."""
        return self.arithmetic.ops.attend(q, cache.ring.data, call.first, self.window, *beyond, self.sink)

    def unrotate(self, out: Tensor, call: Call) -> Tensor:
        """Rotate what was attended to back by each token's own position, [t, heads, head_dim]."""
        return self.arithmetic.ops.rotate(out, *call.angles_back(self.rotation))

    def output(self, out: Tensor, call: Call) -> Tensor:
        """Heads' outputs [t, heads, head_dim] to the sublayer's [m, hidden]: low rank, by groups of heads."""
        return self.wo_b(self.wo_a(out), call)


class HcaAttention(Attention):
    """Window, and every visible compressed entry: a token at position p sees entry e where ``e < (p + 1) // ratio``.

    That is `Ops.attend`'s to see to. Windows of an HCA layer do not overlap, those of a CSA layer do (`CsaCache`).
    """

    def __init__(
        self, config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic, rotation: Rotation
    ) -> None:
        super().__init__(config, layer, weights, arithmetic, rotation)
        self.compressor = EntryCompressor(config, layer, weights, arithmetic, rotation)
        self.readers += self.compressor.readers

    def beyond_window(self, x: Input, latent: Tensor, call: Call, cache: LayerCache) -> Beyond:
        """Write the entries that the call's tokens complete; all are seen."""
        del latent
        assert isinstance(cache, HcaCache), f"HCA layer got {type(cache).__name__}"
        self.compressor(x, call, cache.frontier, cache.entries)
        return Beyond(cache.entries.written(call.first), cache.frontier.ratio, None)


class CsaAttention(HcaAttention):
    """Window, and the entries that the indexer selects."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic, rotation: Rotation
    ) -> None:
        super().__init__(config, layer, weights, arithmetic, rotation)
        self.indexer = Indexer(config, layer, weights, arithmetic, rotation)
        self.readers += self.indexer.readers

    def beyond_window(self, x: Input, latent: Tensor, call: Call, cache: LayerCache) -> Beyond:
        """Write the entries that the call's tokens complete; those that the indexer selects are seen."""
        assert isinstance(cache, CsaCache), f"CSA layer got {type(cache).__name__}"
        every = super().beyond_window(x, latent, call, cache)
        return every._replace(selected=cache.entries.chosen(self.select(x, latent, call, cache)))

    def select(self, x: Input, latent: Tensor, call: Call, cache: CsaCache) -> Tensor:
        """Entries that each token sees: [t, min(index_topk, entries)] int32."""
        return self.indexer(x, latent, call, cache)


def build_attention(
    config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic, rotation: Rotation
) -> Attention:
    """Return the attention that the layer's kind asks for."""
    kinds = {LayerKind.SWA: Attention, LayerKind.HCA: HcaAttention, LayerKind.CSA: CsaAttention}
    return kinds[config.layer_kind(layer)](config, layer, weights, arithmetic, rotation)
