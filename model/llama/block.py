"""One layer of the Llama family: attention, then SwiGLU, each reading a norm of the stream and adding to it."""

from math import inf

from torch import Tensor

from model.arithmetic import Arithmetic
from model.cache.gqa import GqaCache
from model.call import Call
from model.checkpoint.weights import Weights
from model.linear import Linear
from model.llama.adapters import Adapter
from model.llama.attention import Attention
from model.llama.config import LlamaConfig
from model.rope import Rotation


class FeedForward:
    """``down(silu(gate x) * up x)``, without V4's clamp."""

    def __init__(self, prefix: str, weights: Weights, arithmetic: Arithmetic) -> None:
        gate, up, down = (weights.matrix(f"{prefix}.{name}_proj.weight") for name in ("gate", "up", "down"))
        self.gate = Linear(gate, arithmetic)  # [intermediate, hidden]
        self.up = Linear(up, arithmetic)  # [intermediate, hidden]
        self.down = Linear(down, arithmetic, "output", given="inner")  # [hidden, intermediate]
        self.ops = arithmetic.ops

    def __call__(self, x: Tensor) -> Tensor:
        """[t, hidden] to [t, hidden]."""
        return self.down(self.ops.swiglu(self.gate(x), self.up(x), inf, None))


class Block:
    """A layer of the model."""

    def __init__(
        self,
        config: LlamaConfig,
        layer: int,
        weights: Weights,
        arithmetic: Arithmetic,
        rotation: Rotation,
        adapter: Adapter | None,
    ) -> None:
        prefix = f"model.layers.{layer}"
        self.attention_norm = weights.vector(f"{prefix}.input_layernorm.weight").float()  # [hidden]
        self.attention = Attention(config, layer, weights, arithmetic, rotation, adapter)
        self.feed_forward_norm = weights.vector(f"{prefix}.post_attention_layernorm.weight").float()  # [hidden]
        self.feed_forward = FeedForward(f"{prefix}.mlp", weights, arithmetic)
        self.norm, self.eps = arithmetic.ops.rms_norm, config.rms_norm_eps

    def __call__(self, x: Tensor, call: Call, cache: GqaCache) -> Tensor:
        """Run a call's tokens x [t, hidden] through the layer; [t, hidden]."""
        return self.fed_forward(self.attended(x, call, cache))

    def attended(self, x: Tensor, call: Call, cache: GqaCache) -> Tensor:
        """The residual stream [t, hidden] after the attention."""
        return x + self.attention(self.norm(x, self.attention_norm, self.eps), call, cache)

    def fed_forward(self, x: Tensor) -> Tensor:
        """The residual stream [t, hidden] after the layer."""
        return x + self.feed_forward(self.norm(x, self.feed_forward_norm, self.eps))
