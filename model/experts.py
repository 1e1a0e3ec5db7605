"""The mixture-of-experts sublayer: routed experts and one shared expert."""

import torch
from torch import Tensor

from model import sites, tripwire
from model.arithmetic import Arithmetic
from model.config import ModelConfig
from model.decode import Weights
from model.dispatch import by_expert
from model.gate import build_gate
from model.sites import Site


class Expert:
    """One SwiGLU expert: w1 gate, w3 up, w2 down."""

    def __init__(
        self, layer: int, name: str, watched: tuple[Site, Site], weights: Weights, arithmetic: Arithmetic, limit: float
    ) -> None:
        prefix = f"layers.{layer}.ffn.{name}"
        self.w1 = weights.matrix(f"{prefix}.w1.weight")  # [intermediate, hidden]
        self.w3 = weights.matrix(f"{prefix}.w3.weight")  # [intermediate, hidden]
        self.w2 = weights.matrix(f"{prefix}.w2.weight")  # [hidden, intermediate]
        self.arithmetic, self.limit, self.layer, self.watched = arithmetic, limit, layer, watched

    def __call__(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """[n, hidden] to [n, hidden]; `weight` [n] float32 scales routed tokens, None for the shared expert."""
        gate, up = self.arithmetic.linear(x, self.w1), self.arithmetic.linear(x, self.w3)
        for site, tensor in zip(self.watched, (gate, up), strict=True):
            self.arithmetic.taps(site, self.layer, tensor)
        return self.arithmetic.linear(self.arithmetic.ops.swiglu(gate, up, self.limit, weight), self.w2)


class MoE:
    """Gate, routed experts, shared expert; the sum over experts is fp32 (DeepSeek `MoE.forward`)."""

    def __init__(self, config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic) -> None:
        limit, routed = config.swiglu_limit, (sites.ROUTED_GATE, sites.ROUTED_UP)
        self.layer, self.taps, self.scale = layer, arithmetic.taps, config.routed_scaling_factor
        self.gate = build_gate(config, layer, weights, arithmetic)
        self.experts = [
            Expert(layer, f"experts.{e}", routed, weights, arithmetic, limit) for e in range(config.n_routed_experts)
        ]
        shared = (sites.SHARED_GATE, sites.SHARED_UP)
        self.shared = Expert(layer, "shared_experts", shared, weights, arithmetic, limit)

    def __call__(self, x: Tensor, tokens: Tensor, first: int) -> Tensor:
        """[t, hidden] and token ids [t], of positions ``first ..``, to [t, hidden]."""
        self.taps(sites.EXPERTS_INPUT, self.layer, x)
        ids, route_weights = self.gate(x, tokens)
        tripwire.routing(self.layer, first, ids, route_weights, self.scale, len(self.experts))
        self.taps(sites.EXPERT_IDS, self.layer, ids)
        self.taps(sites.EXPERT_WEIGHTS, self.layer, route_weights)
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert, rows, slots in by_expert(ids, len(self.experts)):
            out.index_add_(0, rows, self.experts[expert](x[rows], route_weights[rows, slots]).float())
        out = (out + self.shared(x, None).float()).to(x.dtype)
        self.taps(sites.EXPERTS_OUTPUT, self.layer, out)
        return out
