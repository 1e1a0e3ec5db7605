"""The mixture-of-experts sublayer: the gate, routed experts and one shared expert.

The gate says which experts each token goes to: in the first layers a table by token id, later the scores.
"""

from collections.abc import Iterable

from torch import Tensor

from fathom.kernels.experts.reference import FEW
from fathom.kernels.formats.stored import Apart, Dense, Fp4, Stack, Weight, as_stack
from fathom.kernels.linear.reference import Product
from fathom.kernels.ops import reads_apart
from fathom.model.arithmetic import Arithmetic
from fathom.model.call import Call
from fathom.model.checkpoint.weights import Weights
from fathom.model.config import ModelConfig


class Gate:
    """Scored routing: top k of biased scores, weights of unbiased ones."""

    def __init__(self, config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic) -> None:
        prefix = f"{config.prefix(layer)}.ffn.gate"
        self.weight = Dense(weights.operand(f"{prefix}.weight"))  # [experts, hidden]
        self.arithmetic = arithmetic
        (_, self.k), self.scale = config.experts(layer), config.routed_scaling_factor
        self.choose_by(prefix, weights)

    def choose_by(self, prefix: str, weights: Weights) -> None:
        """Bind what decides the choice: here the selection bias."""
        self.bias = weights.vector(f"{prefix}.bias").float()  # [experts]

    def __call__(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids [t, k] int64 and weights [t, k] float32 for x [t, hidden] and its token ids [t]."""
        del tokens
        return self.arithmetic.ops.gate(x, self.weight, self.bias, None, self.k, self.scale)


class HashGate(Gate):
    """Routing by token id (`tid2eid`); the weights still come from the scores of the given experts."""

    def choose_by(self, prefix: str, weights: Weights) -> None:
        """Bind what decides the choice: here the table."""
        self.table = weights.table(f"{prefix}.tid2eid")  # [vocab, k] int64

    def __call__(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids [t, k] int64 and weights [t, k] float32 for x [t, hidden] and its token ids [t]."""
        return self.arithmetic.ops.gate(x, self.weight, None, self.table[tokens], self.k, self.scale)


class TextGate(Gate):
    """V4.1's, of a text's tokens: another bias, of those in images, is stored and not used."""

    def choose_by(self, prefix: str, weights: Weights) -> None:
        """Bind what decides the choice."""
        super().choose_by(prefix, weights)
        self.bias_of_images = weights.vector(f"{prefix}.bias_vl").float()  # [experts]


def build_gate(config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic) -> Gate:
    """Return the gate that the layer asks for."""
    scored = Gate if config.v41 is None else TextGate
    return (HashGate if config.is_hash(layer) else scored)(config, layer, weights, arithmetic)


class Expert:
    """One SwiGLU expert of three matrices: w1 gate [inner, hidden], w3 up, w2 down [hidden, inner]."""

    def __init__(self, matrices: Iterable[Weight], arithmetic: Arithmetic, limit: float) -> None:
        self.w1, self.w3, self.w2 = matrices
        self.arithmetic, self.limit = arithmetic, limit

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """[n, hidden] to [n, hidden]: see `down`."""
        return self.down(self.up(x), added)

    def up(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """[n, hidden] to [n, inner]; `weight` [n] float32 scales routed tokens, None for the shared expert."""
        return self.arithmetic.ops.swiglu(*self.gate_up(x), self.limit, weight)

    def gate_up(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """SwiGLU's two factors [n, inner], before the clamp."""
        gate, up = self.arithmetic.linears(x, Product(self.w1), Product(self.w3))
        return gate, up

    def down(self, a: Tensor, added: Tensor | None = None) -> Tensor:
        """[n, inner] to [n, hidden]; to the shared expert's the sum of the others is `added` [n, hidden], in fp32."""
        return self.arithmetic.linear(a, self.w2, added)


class MoE:
    """Gate, routed experts and the shared one; the sum over experts is fp32 (DeepSeek `MoE.forward`).

    How several ranks compute it: `model.ranks.experts`, whose classes differ in `output` alone.
    """

    def __init__(self, config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic) -> None:
        prefix, self.layer = f"{config.prefix(layer)}.ffn", layer
        self.gate, self.arithmetic = build_gate(config, layer, weights, arithmetic), arithmetic
        (self.total, _), together = config.experts(layer), not reads_apart(arithmetic.ops)
        routed = {
            name: [f"{prefix}.experts.{e}.{name}.weight" for e in range(self.total)] for name in ("w1", "w3", "w2")
        }
        three = [weights.matrices(weights.here(names), together=together) for names in routed.values()]
        self.experts = [Expert(of, arithmetic, config.swiglu_limit) for of in zip(*three, strict=True)]
        shared = {name: f"{prefix}.shared_experts.{name}.weight" for name in ("w1", "w3", "w2")}
        self.shared = Expert(map(weights.matrix, shared.values()), arithmetic, config.swiglu_limit)
        up, down = routed["w1"] + routed["w3"], routed["w2"]
        # Of all experts, wherever they are: those that have some of them must not go by these.
        self.alike = all(len(weights.forms(names)) == 1 for names in (up, down))
        self.stack()
        # Whether inputs of routed w1 and w3, of the shared ones, and of all w2 are rounded to FP8.
        rounded = arithmetic.linears_rounded
        self.coded = rounded and weights.coded(up)
        self.coded_shared = rounded and weights.coded([shared["w1"], shared["w3"]])
        self.coded_inner = rounded and weights.coded([shared["w2"], *down])

    def stack(self) -> None:
        """Take the routed experts' w1, w3 and w2 together, as ops read them: anew after an expert was changed."""
        stacked = as_stack if self.alike else Apart
        self.matrices: tuple[Stack, Stack, Stack] = (
            stacked([expert.w1 for expert in self.experts]),
            stacked([expert.w3 for expert in self.experts]),
            stacked([expert.w2 for expert in self.experts]),
        )

    def __call__(self, x: Tensor, call: Call) -> Tensor:
        """[m, hidden] to [m, hidden]."""
        ids, weights = self.route(x, call)
        return self.output(x, ids, weights, call)

    def route(self, x: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Which experts each token goes to: ids [m, k] int64 and weights [m, k] float32."""
        return self.gate(x, call.tokens)

    def output(self, x: Tensor, ids: Tensor, weights: Tensor, call: Call) -> Tensor:
        """Routed experts and the shared one: [m, hidden]."""
        del call
        return self.shared(x, self.routed(x, ids, weights))

    def routed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Sum of the routed experts' weighted outputs: [t, hidden] float32."""
        return self._run(x, ids, weights, summed=True)

    def outputs(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Weighted outputs [n, k, hidden] of the experts `ids` that are here, as numbers of these; others are not."""
        return self._run(x, ids, weights, summed=False)

    def _run(self, x: Tensor, ids: Tensor, weights: Tensor, *, summed: bool) -> Tensor:
        """All experts in one op."""
        ops, deployed = self.arithmetic.ops, self.arithmetic.linears_rounded
        of_codes = self.arithmetic.fp8_experts and len(x) > FEW and all(isinstance(of, Fp4) for of in self.matrices)
        op, limit = ops.experts_fp8 if of_codes else ops.experts, self.experts[0].limit
        return op(x, ids, weights, *self.matrices, limit, deployed=deployed, summed=summed, total=self.total)

    def routed_up(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """What w2 of each of a token's experts is given: [t, k, inner]."""
        (w1, w3, _), deployed = self.matrices, self.arithmetic.linears_rounded
        return self.arithmetic.ops.experts_up(x, ids, weights, w1, w3, self.experts[0].limit, deployed=deployed)

    def routed_down(self, a: Tensor, ids: Tensor) -> Tensor:
        """Sum of the outputs of a token's experts: [t, hidden] float32."""
        return self.arithmetic.ops.experts_down(a, ids, self.matrices[2], deployed=self.arithmetic.linears_rounded)
