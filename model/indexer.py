"""The lightning indexer of a CSA layer: scores every visible entry by its key and selects the top k per token."""

from torch import Tensor

from fathom.kernels.formats.stored import Dense
from fathom.model.arithmetic import Arithmetic
from fathom.model.cache.layers import CsaCache, LayerCache
from fathom.model.call import Call
from fathom.model.checkpoint.weights import Weights
from fathom.model.compressor import KeyCompressor
from fathom.model.config import ModelConfig
from fathom.model.linear import Input, Linear, Reader
from fathom.model.rope import Rotation


class Indexer:
    """Always returns a selection: there is no CSA layer without one.

    Source: DeepSeek `Indexer.forward`, except that scores stay in fp32: the reference rounds them to BF16, which makes
    ties common and their order arbitrary.
    """

    def __init__(
        self, config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic, rotation: Rotation
    ) -> None:
        prefix = f"{config.prefix(layer)}.attn.indexer"
        # from q_lora_rank numbers to index_n_heads * index_head_dim, and from hidden to index_n_heads
        self.wq_b = Linear(weights.matrix(f"{prefix}.wq_b.weight"), arithmetic)
        scale: float = config.index_head_dim**-0.5 * config.index_n_heads**-0.5  # DeepSeek's; it changes no order
        self.weights_proj = Reader(Dense(weights.operand(f"{prefix}.weights_proj.weight")), factor=scale)
        self.arithmetic, self.rotation = arithmetic, rotation
        self.width, self.top_k = config.index_head_dim, config.index_topk
        self.build(config, layer, weights, arithmetic, rotation)

    def build(
        self, config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic, rotation: Rotation
    ) -> None:
        """Make what makes keys."""
        self.compressor = KeyCompressor(config, layer, weights, arithmetic, rotation)
        self.readers: tuple[Reader, ...] = (*self.compressor.readers, self.weights_proj)

    def __call__(self, x: Input, latent: Tensor, call: Call, cache: LayerCache) -> Tensor:
        """Write the keys of the windows that the call's tokens complete, then select for every token.

        Parameters
        ----------
        x
            [t, hidden], the input of the attention.
        latent
            [t, q_lora_rank], the normed low-rank query of the attention.
        call
            The tokens.
        cache
            The layer's; its entries of these tokens may or may not be written yet, the keys are written here.

        Returns
        -------
        Tensor
            [t, min(index_topk, keys)] int32, see `kernels.indexer.reference.select`.

        """
        assert isinstance(cache, CsaCache), f"CSA layer got {type(cache).__name__}"
        self.compressor(x, call, cache.key_frontier, cache.keys)
        keys, ratio = cache.keys.written(call.first), cache.key_frontier.ratio

        def select(call: Call, latent: Tensor, head_weights: Tensor) -> Tensor:
            q, first = self.query_used(self.query(latent, call)), call.first
            if cache.keys.evicted:
                first = first - cache.keys.evicted * ratio  # counted from the first token of the first key
            return self.arithmetic.select(q, head_weights, keys, first, ratio, self.top_k)

        return call.by_token(select, latent, self.head_weights(x))

    def query(self, latent: Tensor, call: Call) -> Tensor:
        """Index queries [t, heads, width], rotated."""
        return self.arithmetic.ops.rotate(self.query_unrotated(latent), *call.angles(self.rotation))

    def query_unrotated(self, latent: Tensor) -> Tensor:
        """The same before their rotation."""
        q: Tensor = self.wq_b(latent).unflatten(-1, (-1, self.width))
        return q

    def query_used(self, q: Tensor) -> Tensor:
        """The same as they are scored, rounded as the keys are."""
        return self.arithmetic.rounded_index(q)

    def head_weights(self, x: Input) -> Tensor:
        """How much each index head counts [t, heads] float32."""
        return self.weights_proj(x)
