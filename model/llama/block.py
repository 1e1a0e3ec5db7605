"""One layer of the Llama family: attention, then SwiGLU, each reading a norm of the stream and adding to it."""

from collections.abc import Callable, Sequence
from math import inf

import torch
from torch import Tensor

from fathom.model.arithmetic import Arithmetic
from fathom.model.cache.gqa import GqaCache
from fathom.model.call import Call
from fathom.model.checkpoint.weights import Weights
from fathom.model.linear import Linear
from fathom.model.llama.adapters import Adapter
from fathom.model.llama.attention import Attention
from fathom.model.llama.config import LlamaConfig
from fathom.model.rope import Rotation


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

    def __call__(self, x: Tensor, pieces: Sequence[Call], cache: GqaCache) -> Tensor:
        """Run the tokens x [t, hidden] of a call, or of its pieces, through the layer; [t, hidden]."""
        return self.fed_forward(self.attended(x, pieces, cache), pieces)

    def attended(self, x: Tensor, pieces: Sequence[Call], cache: GqaCache) -> Tensor:
        """The residual stream [t, hidden] after the attention."""

        def attend(x: Tensor, call: Call) -> Tensor:
            return x + self.attention(self.norm(x, self.attention_norm, self.eps), call, cache)

        return in_pieces(attend, x, pieces)

    def fed_forward(self, x: Tensor, pieces: Sequence[Call]) -> Tensor:
        """The residual stream [t, hidden] after the layer."""

        def feed(x: Tensor, _: Call) -> Tensor:
            return x + self.feed_forward(self.norm(x, self.feed_forward_norm, self.eps))

        return in_pieces(feed, x, pieces)


def in_pieces(run: Callable[[Tensor, Call], Tensor], x: Tensor, pieces: Sequence[Call]) -> Tensor:
    """`run` of each piece's rows of x [t, hidden], which gives as many: [t, hidden]."""
    if len(pieces) == 1:
        return run(x, pieces[0])
    out, lengths = torch.empty_like(x), [call.count for call in pieces]
    for rows, given, call in zip(out.split(lengths), x.split(lengths), pieces, strict=True):
        rows.copy_(run(given, call))
    return out
