"""Grouped-query attention of the Llama family. What is remembered, and how it is attended to, is its cache's matter."""

from torch import Tensor

from model import tripwire
from model.arithmetic import Arithmetic
from model.cache.gqa import GqaCache, Heads
from model.decode import Weights
from model.llama.config import LlamaConfig
from model.llama.rope import Rotation


class Attention:
    """Projections and rotation of one layer."""

    def __init__(
        self, config: LlamaConfig, layer: int, weights: Weights, arithmetic: Arithmetic, rotation: Rotation
    ) -> None:
        prefix, self.layer = f"model.layers.{layer}.self_attn", layer
        self.q_proj = weights.matrix(f"{prefix}.q_proj.weight")  # [H * d, hidden]
        self.k_proj = weights.matrix(f"{prefix}.k_proj.weight")  # [K * d, hidden]
        self.v_proj = weights.matrix(f"{prefix}.v_proj.weight")  # [K * d, hidden]
        self.o_proj = weights.matrix(f"{prefix}.o_proj.weight")  # [hidden, H * d]
        self.arithmetic, self.rotation, self.head_dim = arithmetic, rotation, config.head_dim

    def __call__(self, x: Tensor, first: int, cache: GqaCache) -> Tensor:
        """Attend from x [t, hidden], at positions ``first ..``, and advance the layer's cache. Returns [t, hidden]."""
        ops = self.arithmetic.ops
        q = ops.linear(x, self.q_proj).unflatten(-1, (-1, self.head_dim))  # [t, H, d]
        k = ops.linear(x, self.k_proj).unflatten(-1, (-1, self.head_dim))  # [t, K, d]
        v = ops.linear(x, self.v_proj).unflatten(-1, (-1, self.head_dim))  # [t, K, d]
        cos, sin = self.rotation.at(first, x.shape[0])
        heads = Heads(ops.rotate_halves(q, cos, sin), ops.rotate_halves(k, cos, sin), v, q, k)
        tripwire.count("attention.kv", self.layer, first, cache.position, first)
        return ops.linear(cache.attend(heads, first, ops).flatten(1), self.o_proj)
