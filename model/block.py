"""One layer: attention, then experts, each reading and writing the residual streams through its own mHC."""

from collections.abc import Callable

from torch import Tensor

from fathom.model.arithmetic import Arithmetic
from fathom.model.attention import Attention, build_attention
from fathom.model.cache.layers import LayerCache
from fathom.model.call import Call
from fathom.model.checkpoint.weights import Weights
from fathom.model.config import ModelConfig
from fathom.model.hyper import HyperConnection
from fathom.model.ranks.experts import build_moe
from fathom.model.rope import Rotation


class Block:
    """A layer of the model."""

    connection = HyperConnection

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        weights: Weights,
        arithmetic: Arithmetic,
        rotation: Rotation,
        attention: Callable[..., Attention] = build_attention,
    ) -> None:
        prefix, self.layer = config.prefix(layer), layer
        self.attention_streams = self.connection(config, f"{prefix}.hc_attn", weights, arithmetic)
        self.attention_norm = weights.vector(f"{prefix}.attn_norm.weight").float()  # [hidden]
        self.attention = attention(config, layer, weights, arithmetic, rotation)
        self.experts_streams = self.connection(config, f"{prefix}.hc_ffn", weights, arithmetic)
        self.experts_norm = weights.vector(f"{prefix}.ffn_norm.weight").float()  # [hidden]
        self.experts = build_moe(config, layer, weights, arithmetic)

    def __call__(self, streams: Tensor, call: Call, cache: LayerCache) -> Tensor:
        """Run a call through the layer: ``X <- B X + C F(A X)`` for attention, then for experts (paper section 2.2).

        Parameters
        ----------
        streams
            [m, s, hidden], of the call's own tokens.
        call
            Which tokens, and where they stand.
        cache
            The layer's, advanced.

        Returns
        -------
        Tensor
            The new streams.

        """
        read = self.attention_streams.read(streams, self.attention_norm)
        y = self.attention(read.x, call, cache)
        streams = self.attention_streams.write(y, streams, read)
        read = self.experts_streams.read(streams, self.experts_norm)
        y = self.experts(read.x, call)
        return self.experts_streams.write(y, streams, read)
