"""The mixture-of-experts sublayer: the gate, routed experts and one shared expert.

The gate says which experts each token goes to: in the first layers a table by token id, later the scores.
"""

from collections.abc import Callable, Iterable
from operator import is_not

from torch import Tensor

from kernels.experts.reference import by_expert
from kernels.formats.stored import Dense, Stack, Weight, as_stack
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
        self.weight = Dense(weights.operand(f"{prefix}.weight"))  # [experts, hidden]
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
        """Return the scores' logits [t, experts] float32, not rounded, as DeepSeek computes them in fp32."""
        return self.arithmetic.ops.linear(x, self.weight, wide=True)


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
    """One SwiGLU expert of three matrices: w1 gate [intermediate, hidden], w3 up, w2 down [hidden, intermediate]."""

    def __init__(self, matrices: Iterable[Weight], arithmetic: Arithmetic, limit: float) -> None:
        self.w1, self.w3, self.w2 = matrices
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
        together = not reads_apart(arithmetic.ops)
        three = [
            weights.matrices([f"{prefix}.experts.{e}.{name}.weight" for e in own], together=together)
            for name in ("w1", "w3", "w2")
        ]
        self.experts = {e: Expert(of, arithmetic, limit) for e, of in zip(own, zip(*three, strict=True), strict=True)}
        self._given: tuple[Weight, ...] = ()
        shared = [weights.matrix(f"{prefix}.shared_experts.{name}.weight") for name in ("w1", "w3", "w2")]
        self.shared = Expert(shared, arithmetic, limit)

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
        if self.dispatch.ranks.size == 1 and self.together():
            return self._run(self.shared.arithmetic.ops.experts, x, ids, weights)
        return self.dispatch(x, ids, weights, call, self.outputs)

    def outputs(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Weighted outputs [n, k, hidden] of those experts that are held here, zero for the others: what ranks send."""
        if self.together():
            return self._run(self.shared.arithmetic.ops.expert_outputs, x, ids, weights)
        out, own = x.new_zeros(*ids.shape, x.shape[1]), self.shared.arithmetic.own_experts
        for expert, rows, slots in by_expert(ids, own.start, len(own)):
            out[rows, slots] = self.experts[own[expert]](x[rows], weights[rows, slots])
        return out

    def together(self) -> bool:
        """Whether one op runs the routed experts, as ever, but while somebody listens to what one computes inside."""
        return True

    @property
    def matrices(self) -> tuple[Stack, Stack, Stack]:
        """The routed experts' w1, w3 and w2, as ops take them; made anew when an expert was given another matrix."""
        given = tuple(matrix for expert in self.experts.values() for matrix in (expert.w1, expert.w3, expert.w2))
        if len(given) != len(self._given) or any(map(is_not, given, self._given)):
            self._given, self._matrices = given, (as_stack(given[::3]), as_stack(given[1::3]), as_stack(given[2::3]))
        return self._matrices

    def _run(self, op: Callable[..., Tensor], x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        arithmetic, limit = self.shared.arithmetic, next(iter(self.experts.values())).limit
        own = arithmetic.own_experts
        return op(x, ids, weights, *self.matrices, limit, own.start, deployed=arithmetic.deployed)
