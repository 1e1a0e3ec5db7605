"""The mixture-of-experts sublayer: routed experts and one shared expert."""

import torch
from torch import Tensor

from model.arithmetic import Arithmetic
from model.config import ModelConfig
from model.decode import Weights
from model.dispatch import by_expert
from model.gate import build_gate


class Expert:
    """One SwiGLU expert: w1 gate, w3 up, w2 down."""

    def __init__(self, prefix: str, weights: Weights, arithmetic: Arithmetic, limit: float) -> None:
        self.w1 = weights.matrix(f"{prefix}.w1.weight")  # [intermediate, hidden]
        self.w3 = weights.matrix(f"{prefix}.w3.weight")  # [intermediate, hidden]
        self.w2 = weights.matrix(f"{prefix}.w2.weight")  # [hidden, intermediate]
        self.arithmetic, self.limit = arithmetic, limit

    def __call__(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """[n, hidden] to [n, hidden]; `weight` [n] float32 scales routed tokens, None for the shared expert."""
        gate, up = self.arithmetic.linear(x, self.w1), self.arithmetic.linear(x, self.w3)
        return self.arithmetic.linear(self.arithmetic.ops.swiglu(gate, up, self.limit, weight), self.w2)


class MoE:
    """Gate, routed experts, shared expert; the sum over experts is fp32 (DeepSeek `MoE.forward`)."""

    def __init__(self, config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic) -> None:
        prefix = f"layers.{layer}.ffn"
        self.gate = build_gate(config, layer, weights, arithmetic)
        self.experts = [
            Expert(f"{prefix}.experts.{e}", weights, arithmetic, config.swiglu_limit)
            for e in range(config.n_routed_experts)
        ]
        self.shared = Expert(f"{prefix}.shared_experts", weights, arithmetic, config.swiglu_limit)

    def __call__(self, x: Tensor, tokens: Tensor) -> Tensor:
        """[t, hidden] and token ids [t] to [t, hidden]."""
        ids, route_weights = self.gate(x, tokens)
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert, rows, slots in by_expert(ids, len(self.experts)):
            out.index_add_(0, rows, self.experts[expert](x[rows], route_weights[rows, slots]).float())
        return (out + self.shared(x, None).float()).to(x.dtype)
