"""One layer: attention, then experts, each reading and writing the residual streams through its own mHC."""

from torch import Tensor

from model.arithmetic import Arithmetic
from model.attention import build_attention
from model.cache.layers import LayerCache
from model.config import ModelConfig
from model.decode import Weights
from model.experts import MoE
from model.hyper import ATTENTION, EXPERTS, HyperConnection
from model.rope import Rotation


class Block:
    """A layer of the model."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic, rotation: Rotation
    ) -> None:
        prefix = f"layers.{layer}"
        self.attention_streams = HyperConnection(config, layer, ATTENTION, weights, arithmetic)
        self.attention_norm = weights.vector(f"{prefix}.attn_norm.weight").float()  # [hidden]
        self.attention = build_attention(config, layer, weights, arithmetic, rotation)
        self.experts_streams = HyperConnection(config, layer, EXPERTS, weights, arithmetic)
        self.experts_norm = weights.vector(f"{prefix}.ffn_norm.weight").float()  # [hidden]
        self.experts = MoE(config, layer, weights, arithmetic)
        self.norm, self.eps = arithmetic.ops.rms_norm, config.rms_norm_eps

    def __call__(self, streams: Tensor, tokens: Tensor, first: int, cache: LayerCache) -> Tensor:
        """Streams [t, s, hidden] of token ids [t] at positions ``first ..``; returns the new streams."""
        x, post, comb = self.attention_streams.read(streams, first)
        y = self.attention(self.norm(x, self.attention_norm, self.eps), first, cache)
        streams = self.attention_streams.write(y, streams, post, comb, first)
        x, post, comb = self.experts_streams.read(streams, first)
        y = self.experts(self.norm(x, self.experts_norm, self.eps), tokens, first)
        return self.experts_streams.write(y, streams, post, comb, first)
