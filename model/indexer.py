"""The lightning indexer of a CSA layer: scores every visible entry by its key and selects the top k per token."""

from torch import Tensor

from kernels.formats import Dense
from model import sites, tripwire
from model.arithmetic import Arithmetic
from model.cache.layers import CsaCache
from model.compressor import IndexerKeyCompressor
from model.config import ModelConfig
from model.decode import Weights
from model.ranks import Share
from model.rope import Rotation


class Indexer:
    """Always returns a selection: there is no CSA layer without one."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic, rotation: Rotation
    ) -> None:
        prefix = f"layers.{layer}.attn.indexer"
        self.wq_b = weights.matrix(f"{prefix}.wq_b.weight")  # [index_n_heads * index_head_dim, q_lora_rank]
        self.weights_proj = Dense(weights.vector(f"{prefix}.weights_proj.weight"))  # [index_n_heads, hidden]
        self.compressor = IndexerKeyCompressor(config, layer, weights, arithmetic, rotation)
        self.arithmetic, self.layer = arithmetic, layer
        self.ranks, self.heads = arithmetic.ranks, config.index_n_heads
        self.width, self.top_k = config.index_head_dim, config.index_topk

    def __call__(
        self, x: Tensor, latent: Tensor, first: int, cache: CsaCache, cos: Tensor, sin: Tensor, tokens: Share
    ) -> Tensor:
        """Write the keys of the windows that x completes, then select for every token.

        Source: DeepSeek `Indexer.forward`, except that scores stay in fp32: the reference rounds them to BF16, which
        makes ties common and their order arbitrary.

        Parameters
        ----------
        x
            [t, hidden], normed input of the layer.
        latent
            [t, q_lora_rank], the normed low-rank query of the attention.
        first
            Position of the first token.
        cache
            The layer's cache; its entries of these tokens may or may not be written yet, the keys are written here.
        cos, sin
            Rotation of the tokens.
        tokens
            Those for which this rank selects, with the queries of all heads. Where every rank selects for all of them,
            the selections are compared.

        Returns
        -------
        Tensor
            [t, min(index_topk, keys)] int32, see `kernels.reference.indexer.select`.

        """
        self.compressor(x, first, cache.key_frontier, cache.keys)
        ranks, heads, taps = self.ranks, self.ranks.shares.index_heads, self.arithmetic.taps
        q = self.arithmetic.linear(latent, self.wq_b).unflatten(-1, (heads.size, self.width))
        q = self.arithmetic.ops.rotate(q, cos, sin)
        taps(sites.INDEX_QUERY, self.layer, q, heads, 1)
        q = self.arithmetic.rounded_index(q)
        head_weights = self.arithmetic.ops.linear(x, self.weights_proj).float()
        head_weights = head_weights * (self.width**-0.5 * self.heads**-0.5)  # DeepSeek's scale; the order is unaffected
        taps(sites.INDEX_QUERY_USED, self.layer, q, heads, 1)
        taps(sites.INDEX_WEIGHTS, self.layer, head_weights, heads, 1)
        keys, ratio = cache.keys.view(), cache.key_frontier.ratio
        tripwire.width("indexer.keys", self.layer, keys, self.width)  # one key for all heads, never one for each
        tripwire.finite(sites.INDEX_QUERY_USED.name, self.layer, first, q)
        tripwire.finite(sites.INDEX_WEIGHTS.name, self.layer, first, head_weights)
        q, head_weights = tokens.of(ranks.whole(q, 1, heads)), tokens.of(ranks.whole(head_weights, 1, heads))
        since = first + tokens.start - cache.keys.evicted * ratio  # the first key is that of the first entry from there
        selected = self.arithmetic.ops.select(q, head_weights, keys, since, ratio, self.top_k)
        if not tokens.split:
            ranks.note(sites.SELECTED.name, self.layer, selected)
        return ranks.whole(selected, 0, tokens)
