"""Grouped-query attention of the Llama family. What is remembered, and how it is attended to, is its cache's matter.

The query mechanism is the layer's own: ordinary, or with an adapter the differential one of CoDA-GQA-L. It needs
nothing of the cache: the noise queries are more heads that read the same keys.
"""

import torch
from torch import Tensor

from kernels.differential.reference import combine, noise_query
from kernels.formats.stored import Dense
from model.arithmetic import Arithmetic
from model.cache.gqa import GqaCache, Heads
from model.call import Call
from model.checkpoint.weights import Weights
from model.llama.adapters import EPS, GATE_LOGIT, Adapter
from model.llama.config import LlamaConfig
from model.rope import Rotation


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
        prefix = f"model.layers.{layer}.self_attn"
        self.q_proj = weights.matrix(f"{prefix}.q_proj.weight")  # [H * d, hidden]
        self.k_proj = weights.matrix(f"{prefix}.k_proj.weight")  # [K * d, hidden]
        self.v_proj = weights.matrix(f"{prefix}.v_proj.weight")  # [K * d, hidden]
        self.o_proj = weights.matrix(f"{prefix}.o_proj.weight")  # [hidden, H * d]
        if adapter is not None:
            self.q_proj, self.k_proj = Dense(adapter.q_proj), Dense(adapter.k_proj)
            self.v_proj, self.o_proj = Dense(adapter.v_proj), Dense(adapter.o_proj)
        self.arithmetic, self.rotation, self.head_dim = arithmetic, rotation, config.head_dim
        self.kv_heads, self.adapter = config.num_key_value_heads, adapter

    def __call__(self, x: Tensor, call: Call, cache: GqaCache) -> Tensor:
        """Attend from x [t, hidden], and advance the layer's cache. Returns [t, hidden]."""
        assert isinstance(call.first, int), "grouped caches need the position on the host"
        ops = self.arithmetic.ops
        q = ops.linear(x, self.q_proj).unflatten(-1, (-1, self.head_dim))  # [t, H, d]
        k = ops.linear(x, self.k_proj).unflatten(-1, (-1, self.head_dim))  # [t, K, d]
        v = ops.linear(x, self.v_proj).unflatten(-1, (-1, self.head_dim))  # [t, K, d]
        cos, sin = call.angles(self.rotation)
        q, k = ops.rotate_halves(q, cos, sin), ops.rotate_halves(k, cos, sin)
        if self.adapter is None:
            out = cache.attend(Heads(q, k, v, None), call.first, ops)
        else:
            out = self._differential(self.adapter, x, Heads(q, k, v, self._gates(self.adapter, x)), call.first, cache)
        return ops.linear(out.flatten(1), self.o_proj)

    def _gates(self, adapter: Adapter, x: Tensor) -> Tensor:
        """How much each token is worth keeping, [t] float32."""
        if adapter.gate is None:
            return torch.full((x.shape[0],), GATE_LOGIT, device=x.device).sigmoid()
        weight, bias = adapter.gate
        return torch.sigmoid(self.arithmetic.ops.linear(x, Dense(weight))[:, 0].float() + bias)

    def _differential(self, adapter: Adapter, x: Tensor, heads: Heads, first: int, cache: GqaCache) -> Tensor:
        """Attend with the queries and their noise, as heads of one call, and subtract: [t, H, d]."""
        noise = noise_query(heads.q, adapter.cos, adapter.sin)
        # queries and noise of one group of heads stand together, because the cache gives each KV head a run of heads
        both = torch.stack([part.unflatten(1, (self.kv_heads, -1)) for part in (heads.q, noise)], 2)  # [t, K, 2, G, d]
        out = cache.attend(heads._replace(q=both.flatten(1, 3)), first, self.arithmetic.ops).view(both.shape)
        signal, subtracted = (out[:, :, part].flatten(1, 2).float() for part in (0, 1))  # [t, H, d]
        logit = self.arithmetic.ops.linear(x, Dense(adapter.lambda_weight)).float() + adapter.lambda_bias  # [t, H]
        return combine(signal, subtracted, torch.sigmoid(logit), adapter.norm, EPS).to(heads.q.dtype)
