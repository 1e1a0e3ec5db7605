"""The mixture-of-experts sublayer: the gate, routed experts and one shared expert.

The gate says which experts each token goes to: in the first layers a table by token id, later the scores.
"""

from functools import cached_property

from torch import Tensor

from kernels.experts.cpu import FEW
from kernels.formats.stored import Apart, Dense, Stack, Weight, member
from kernels.ops import reads_apart
from model.arithmetic import Arithmetic
from model.call import Call
from model.checkpoint.weights import Weights
from model.config import ModelConfig
from model.ranks.dispatch import Dispatch


class Gate:
    """Scored routing: top k of biased scores, weights of unbiased ones."""

    def __init__(self, config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic) -> None:
        prefix = f"layers.{layer}.ffn.gate"
        self.weight = Dense(weights.vector(f"{prefix}.weight"))  # [experts, hidden]
        self.arithmetic = arithmetic
        self.k, self.scale = config.num_experts_per_tok, config.routed_scaling_factor
        self.choose_by(prefix, weights)

    def choose_by(self, prefix: str, weights: Weights) -> None:
        """Bind what decides the choice: here the selection bias."""
        self.bias = weights.vector(f"{prefix}.bias").float()  # [experts]

    def __call__(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids [t, k] int64 and weights [t, k] float32 for x [t, hidden] and its token ids [t]."""
        del tokens
        return self.arithmetic.ops.route(self.logits(x), self.bias, self.k, self.scale)

    def logits(self, x: Tensor) -> Tensor:
        """Return the scores' logits [t, experts], in fp32 as the reference computes them."""
        return self.arithmetic.ops.linear(x.float(), self.weight)


class HashGate(Gate):
    """Routing by token id (`tid2eid`); the weights still come from the scores of the given experts."""

    def choose_by(self, prefix: str, weights: Weights) -> None:
        """Bind what decides the choice: here the table."""
        self.table = weights.table(f"{prefix}.tid2eid")  # [vocab, k] int64

    def __call__(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids [t, k] int64 and weights [t, k] float32 for x [t, hidden] and its token ids [t]."""
        ids = self.table[tokens]
        return ids, self.arithmetic.ops.route_weights(self.logits(x), ids, self.scale)


def build_gate(config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic) -> Gate:
    """Return the gate that the layer asks for."""
    return (HashGate if config.is_hash(layer) else Gate)(config, layer, weights, arithmetic)


class Expert:
    """One SwiGLU expert: w1 gate, w3 up, w2 down."""

    def __init__(self, prefix: str, weights: Weights, arithmetic: Arithmetic, limit: float) -> None:
        self.w1 = weights.matrix(f"{prefix}.w1.weight")  # [intermediate, hidden]
        self.w3 = weights.matrix(f"{prefix}.w3.weight")  # [intermediate, hidden]
        self.w2 = weights.matrix(f"{prefix}.w2.weight")  # [hidden, intermediate]
        self.arithmetic, self.limit = arithmetic, limit

    def __call__(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """[n, hidden] to [n, hidden]; `weight` [n] float32 scales routed tokens, None for the shared expert."""
        gate, up = self.gate_up(x)
        return self.arithmetic.linear(self.arithmetic.ops.swiglu(gate, up, self.limit, weight), self.w2)

    def gate_up(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """SwiGLU's two factors [n, intermediate], before the clamp."""
        return self.arithmetic.linears(x, self.w1, self.w3)


class MoE:
    """Gate, routed experts, shared expert; the sum over experts is fp32 (DeepSeek `MoE.forward`)."""

    def __init__(self, config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic) -> None:
        prefix, limit, own = f"layers.{layer}.ffn", config.swiglu_limit, arithmetic.own_experts
        self.gate = build_gate(config, layer, weights, arithmetic)
        self.dispatch = Dispatch(arithmetic, layer)
        self.experts = {e: Expert(f"{prefix}.experts.{e}", weights, arithmetic, limit) for e in own}
        self._stacks: tuple[Weight, Weight, Weight] | None = None
        self.shared = Expert(f"{prefix}.shared_experts", weights, arithmetic, limit)

    def __call__(self, x: Tensor, call: Call) -> Tensor:
        """[m, hidden] to [m, hidden], of the call's own tokens."""
        ids, weights = self.route(x, call)
        return self.output(x, ids, weights, call)

    def route(self, x: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Which experts each token goes to: ids [m, k] int64 and weights [m, k] float32."""
        return self.gate(x, call.tokens)

    def output(self, x: Tensor, ids: Tensor, weights: Tensor, call: Call) -> Tensor:
        """Routed experts and the shared one: [m, hidden]."""
        return (self.routed(x, ids, weights, call) + self.shared(x).float()).to(x.dtype)

    def routed(self, x: Tensor, ids: Tensor, weights: Tensor, call: Call) -> Tensor:
        """Sum of the routed experts' weighted outputs: [m, hidden] float32."""
        if not self.together(call):
            return self.dispatch(x, ids, weights, call, self.run)
        arithmetic, limit = self.shared.arithmetic, self.experts[0].limit
        matrices = self.stacks() if isinstance(call.first, Tensor) else self.apart
        return arithmetic.ops.experts(x, ids, weights, *matrices, limit, 0, deployed=arithmetic.deployed)

    def together(self, call: Call) -> bool:
        """Whether a call's routed experts run in one op.

        They must where it is captured: who goes where is known on the device alone. On a CPU they do where tokens are
        few, so that each expert has one or two.
        """
        if isinstance(call.first, Tensor):
            return True
        few = call.count <= FEW and call.tokens.device.type == "cpu"
        return few and self.dispatch.ranks.size == 1 and self.alike

    @cached_property
    def alike(self) -> bool:
        """Whether one op takes the routed experts where they are: they were of one form when this was first asked."""
        return reads_apart(self.shared.arithmetic.ops) and not self.mixed()

    def mixed(self) -> bool:
        """Whether the routed experts are stored in several forms, so that they cannot be stacked."""

        def form(weight: Weight) -> tuple[object, ...]:
            return type(weight), *((plane.dtype, plane.shape) for plane in weight)

        kinds = {tuple(form(w) for w in (e.w1, e.w3, e.w2)) for e in self.experts.values()}
        return len(kinds) > 1 or form(self.experts[0].w1) != form(self.experts[0].w3)

    def stacks(self) -> tuple[Weight, Weight, Weight]:
        """The routed experts' w1, w3 and w2 as `stack` has them; the experts' own become views of it.

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

    @cached_property
    def apart(self) -> tuple[Stack, Stack, Stack]:
        """The routed experts' w1, w3 and w2 where they are."""
        experts = self.experts.values()
        return Apart([e.w1 for e in experts]), Apart([e.w3 for e in experts]), Apart([e.w2 for e in experts])

    def run(self, expert: int, x: Tensor, weights: Tensor) -> Tensor:
        """One of the experts held here, for its tokens x [n, hidden] with weights [n]."""
        return self.experts[expert](x, weights)
