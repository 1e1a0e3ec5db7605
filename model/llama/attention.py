"""Grouped-query attention of the Llama family. What is remembered, and how it is attended to, is its cache's matter.

The query mechanism is the layer's own: ordinary, or with an adapter the differential one of CoDA-GQA-L. It needs
nothing of the cache: the noise queries are more heads that read the same keys.
"""

import torch
from torch import Tensor

from fathom.kernels.formats.stored import Dense, Weight
from fathom.model.arithmetic import Arithmetic
from fathom.model.cache.gqa import GqaCache, Heads
from fathom.model.call import Call
from fathom.model.checkpoint.weights import Weights
from fathom.model.linear import Linear
from fathom.model.llama.adapters import EPS, GATE_LOGIT, Adapter
from fathom.model.llama.config import LlamaConfig
from fathom.model.rope import Rotation


class Attention:
    """Projections and rotation of one layer."""

    def __init__(
        self,
        config: LlamaConfig,
        layer: int,
        weights: Weights,
        arithmetic: Arithmetic,
        rotation: Rotation,
        adapter: Adapter | None,
    ) -> None:
        d = config.head_dim

        def matrix(name: str) -> Weight:
            stored = weights.matrix(f"model.layers.{layer}.self_attn.{name}.weight")
            return stored if adapter is None else Dense(getattr(adapter, name))

        self.q_proj = Linear(matrix("q_proj"), arithmetic)  # [H * d, hidden]
        self.k_proj = Linear(matrix("k_proj"), arithmetic)  # [K * d, hidden]
        self.v_proj = Linear(matrix("v_proj"), arithmetic)  # [K * d, hidden]
        self.o_proj = Linear(matrix("o_proj"), arithmetic, "output", given="heads", given_width=d)  # [hidden, H * d]
        self.arithmetic, self.rotation, self.head_dim, self.adapter = arithmetic, rotation, d, adapter

    def __call__(self, x: Tensor, call: Call, cache: GqaCache) -> Tensor:
        """Attend from x [t, hidden], and advance the layer's cache. Returns [t, hidden]."""
        assert isinstance(call.first, int), "grouped caches need the position on the host"
        ops = self.arithmetic.ops
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # [t, H, d]
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))  # [t, K, d]
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))  # [t, K, d]
        cos, sin = call.angles(self.rotation)
        q, k = ops.rotate_halves(q, cos, sin), ops.rotate_halves(k, cos, sin)
        if self.adapter is None:
            out = cache.attend(Heads(q, k, v, None), call.first, ops)
        else:
            out = self._differential(self.adapter, x, Heads(q, k, v, self._gates(self.adapter, x)), call.first, cache)
        return self.o_proj(out.flatten(1))

    def _gates(self, adapter: Adapter, x: Tensor) -> Tensor:
        """How much each token is worth keeping, [t] float32."""
        if adapter.gate is None:
            return torch.full((x.shape[0],), GATE_LOGIT, device=x.device).sigmoid()
        weight, bias = adapter.gate
        return torch.sigmoid(self.arithmetic.ops.linear(x, Dense(weight))[:, 0].float() + bias)

    def _differential(self, adapter: Adapter, x: Tensor, heads: Heads, first: int, cache: GqaCache) -> Tensor:
        """Attend with the queries and their noise, as heads of one call, and subtract: [t, H, d]."""
        ops = self.arithmetic.ops
        # each head is turned by angles of its own, in neighbouring pairs whichever RoPE itself has
        noise = ops.rotate(heads.q.transpose(0, 1), adapter.cos, adapter.sin).transpose(0, 1)
        # queries and noise of one group of heads stand together, because the cache gives each KV head a run of heads
        kv_heads = heads.k.shape[1]
        both = torch.stack([part.unflatten(1, (kv_heads, -1)) for part in (heads.q, noise)], 2)  # [t, K, 2, G, d]
        out = cache.attend(heads._replace(q=both.flatten(1, 3)), first, ops).view(both.shape)
        signal, subtracted = (out[:, :, part].flatten(1, 2).float() for part in (0, 1))  # [t, H, d]
        lam = torch.sigmoid(ops.linear(x, Dense(adapter.lambda_weight)).float() + adapter.lambda_bias)  # [t, H]
        rest = signal - lam[..., None] * subtracted
        return (rest if adapter.norm is None else ops.rms_norm(rest, adapter.norm, EPS)).to(heads.q.dtype)
