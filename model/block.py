"""One layer: attention, then experts, each reading and writing the residual streams through its own mHC."""

from torch import Tensor

from model import sites
from model.arithmetic import Arithmetic
from model.attention import build_attention
from model.cache.layers import LayerCache
from model.config import ModelConfig
from model.decode import Weights
from model.experts import MoE
from model.hyper import ATTENTION, EXPERTS, HyperConnection
from model.ranks import Share
from model.rope import Rotation


class Block:
    """A layer of the model."""

    def __init__(
        self, config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic, rotation: Rotation
    ) -> None:
        prefix, self.layer = f"layers.{layer}", layer
        self.attention_streams = HyperConnection(config, layer, ATTENTION, weights, arithmetic)
        self.attention_norm = weights.vector(f"{prefix}.attn_norm.weight").float()  # [hidden]
        self.attention = build_attention(config, layer, weights, arithmetic, rotation)
        self.experts_streams = HyperConnection(config, layer, EXPERTS, weights, arithmetic)
        self.experts_norm = weights.vector(f"{prefix}.ffn_norm.weight").float()  # [hidden]
        self.experts = MoE(config, layer, weights, arithmetic)
        self.norm, self.eps, self.ranks = arithmetic.ops.rms_norm, config.rms_norm_eps, arithmetic.ranks

    def __call__(self, streams: Tensor, tokens: Tensor, first: int, cache: LayerCache, share: Share) -> Tensor:
        """Run a call's tokens, at positions ``first ..``, through the layer.

        Parameters
        ----------
        streams
            [m, s, hidden], of this rank's `share` of the tokens: attention sees all of them, all else its own.
        tokens
            [m] int64, their ids.
        first
            Position of the call's first token, of all ranks.
        cache
            The layer's, advanced.
        share
            Which of the call's t tokens are this rank's between attentions.

        Returns
        -------
        Tensor
            The new streams.

        """
        mine = first + share.start
        x, post, comb = self.attention_streams.read(streams, mine, share)
        x = self.ranks.whole(self.norm(x, self.attention_norm, self.eps), 0, share)
        y = share.of(self.attention(x, first, cache, share))
        streams = self.attention_streams.write(y, streams, post, comb, mine, share)
        x, post, comb = self.experts_streams.read(streams, mine, share)
        y = self.experts(self.norm(x, self.experts_norm, self.eps), tokens, mine, share)
        streams = self.experts_streams.write(y, streams, post, comb, mine, share)
        if not share.split:
            self.ranks.note(sites.STREAMS.name, self.layer, streams)
        return streams
