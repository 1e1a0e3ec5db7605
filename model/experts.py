"""The mixture-of-experts sublayer: routed experts and one shared expert."""

from torch import Tensor

from kernels.formats import Weight, member
from model import dispatch, sites, tripwire
from model.arithmetic import Arithmetic
from model.config import ModelConfig
from model.decode import Weights
from model.gate import build_gate
from model.ranks import Share
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

    def __call__(self, x: Tensor, weight: Tensor | None, share: Share | None = None) -> Tensor:
        """[n, hidden] to [n, hidden]; `weight` [n] float32 scales routed tokens, None for the shared expert.

        `share`: which of a call's tokens these are, where they are this rank's part of all.
        """
        gate, up = self.arithmetic.linears(x, self.w1, self.w3)
        for site, tensor in zip(self.watched, (gate, up), strict=True):
            self.arithmetic.taps(site, self.layer, tensor, share)
        return self.arithmetic.linear(self.arithmetic.ops.swiglu(gate, up, self.limit, weight), self.w2)


class MoE:
    """Gate, routed experts, shared expert; the sum over experts is fp32 (DeepSeek `MoE.forward`)."""

    def __init__(self, config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic) -> None:
        limit, routed = config.swiglu_limit, (sites.ROUTED_GATE, sites.ROUTED_UP)
        self.layer, self.taps, self.scale = layer, arithmetic.taps, config.routed_scaling_factor
        self.gate = build_gate(config, layer, weights, arithmetic)
        self.ranks, here = arithmetic.ranks, arithmetic.ranks.shares.experts
        self.experts = {  # this rank's
            e: Expert(layer, f"experts.{e}", routed, weights, arithmetic, limit) for e in range(here.start, here.stop)
        }
        self._stacks: tuple[Weight, Weight, Weight] | None = None
        shared = (sites.SHARED_GATE, sites.SHARED_UP)
        self.shared = Expert(layer, "shared_experts", shared, weights, arithmetic, limit)

    def __call__(self, x: Tensor, tokens: Tensor, first: int, share: Share) -> Tensor:
        """[m, hidden] and token ids [m] to [m, hidden]: this rank's `share` of a call's tokens, from `first` on."""
        self.taps(sites.EXPERTS_INPUT, self.layer, x, share)
        ids, route_weights = self.gate(x, tokens)
        tripwire.routing(self.layer, first, ids, route_weights, self.scale, self.ranks.shares.experts.total)
        self.taps(sites.EXPERT_IDS, self.layer, ids, share)
        self.taps(sites.EXPERT_WEIGHTS, self.layer, route_weights, share)
        out = self.routed(x, ids, route_weights, share)
        out = (out + self.shared(x, None, share).float()).to(x.dtype)
        self.taps(sites.EXPERTS_OUTPUT, self.layer, out, share)
        return out

    def routed(self, x: Tensor, ids: Tensor, weights: Tensor, share: Share) -> Tensor:
        """Sum of the routed experts' weighted outputs: [m, hidden] float32."""
        if self.ranks.size == 1:
            return dispatch.alone(x, ids, weights, len(self.experts), self.run)
        if share.split:
            return dispatch.all_to_all(x, ids, weights, self.ranks, self.run)
        return dispatch.all_reduce(x, ids, weights, self.ranks, self.layer, self.run)

    def mixed(self) -> bool:
        """Whether the routed experts are stored in several forms, so that they cannot be stacked."""

        def form(weight: Weight) -> tuple[object, ...]:
            return type(weight), *((plane.dtype, plane.shape) for plane in weight)

        kinds = {tuple(form(w) for w in (e.w1, e.w3, e.w2)) for e in self.experts.values()}
        return len(kinds) > 1 or form(self.experts[0].w1) != form(self.experts[0].w3)

    def stacks(self) -> tuple[Weight, Weight, Weight]:
        """The routed experts' w1, w3 and w2 as `kernels.formats.stack` has them; the experts' own become views of it.

        No matrix is held twice, but for one of the three while it is made; what the allocator keeps of the memory that
        the loaded ones had is its own affair, and not in the plan.
        """
        if self._stacks is None:
            assert not self.mixed(), "experts of several forms"
            self._stacks = self._stack("w1"), self._stack("w3"), self._stack("w2")
        return self._stacks

    def _stack(self, name: str) -> Weight:
        count, one = len(self.experts), getattr(self.experts[0], name)
        stacked: Weight = type(one)(*(plane.new_empty(count, *plane.shape) for plane in one))
        for index, expert in self.experts.items():
            for plane, own in zip(member(stacked, index), getattr(expert, name), strict=True):
                plane.copy_(own)
            setattr(expert, name, member(stacked, index))
        return stacked

    def run(self, expert: int, x: Tensor, weights: Tensor) -> Tensor:
        """One of this rank's experts, for its tokens x [n, hidden] with weights [n]."""
        return self.experts[expert](x, weights)
