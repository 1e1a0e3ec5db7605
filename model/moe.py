"""The mixture-of-experts sublayer: the gate, routed experts and one shared expert.

The gate says which experts each token goes to: in the first layers a table by token id, later the scores.
"""

from collections.abc import Iterable
from operator import is_not

import torch
from torch import Tensor

from fathom.kernels.experts.reference import FEW, by_expert
from fathom.kernels.formats.stored import Apart, Dense, Fp4, Stack, Weight, as_stack
from fathom.kernels.linear.reference import Product
from fathom.kernels.ops import reads_apart
from fathom.model.arithmetic import Arithmetic
from fathom.model.call import Call
from fathom.model.checkpoint.weights import Weights
from fathom.model.config import ModelConfig
from fathom.model.ranks.dispatch import Dispatch, dispatched, filled, told


class Gate:
    """Scored routing: top k of biased scores, weights of unbiased ones."""

    def __init__(self, config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic) -> None:
        prefix = f"{config.prefix(layer)}.ffn.gate"
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
        return self.arithmetic.ops.gate(x, self.weight, self.bias, None, self.k, self.scale)


class HashGate(Gate):
    """Routing by token id (`tid2eid`); the weights still come from the scores of the given experts."""

    def choose_by(self, prefix: str, weights: Weights) -> None:
        """Bind what decides the choice: here the table."""
        self.table = weights.table(f"{prefix}.tid2eid")  # [vocab, k] int64

    def __call__(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids [t, k] int64 and weights [t, k] float32 for x [t, hidden] and its token ids [t]."""
        return self.arithmetic.ops.gate(x, self.weight, None, self.table[tokens], self.k, self.scale)


def build_gate(config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic) -> Gate:
    """Return the gate that the layer asks for."""
    return (HashGate if config.is_hash(layer) else Gate)(config, layer, weights, arithmetic)


class Expert:
    """One SwiGLU expert of three matrices: w1 gate [inner, hidden], w3 up, w2 down [hidden, inner].

    Of several ranks each has rows of all three: `up` gives its columns, `down` takes all of them and gives its own.
    """

    def __init__(self, matrices: Iterable[Weight], arithmetic: Arithmetic, limit: float) -> None:
        self.w1, self.w3, self.w2 = matrices
        self.arithmetic, self.limit = arithmetic, limit

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """[n, hidden] to [n, hidden], on one rank: see `down`."""
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
    """Gate, routed experts, shared expert; the sum over experts is fp32 (DeepSeek `MoE.forward`).

    On several ranks no sum crosses ranks, in either of two ways. By *rows* each has rows of every expert: all of them
    run every token, each its columns of both halves of an expert, and put these together after each half. *Whole*, each
    routed expert is on one rank, to which its tokens go (`model.ranks.dispatch`), and the shared one on every rank.
    """

    def __init__(self, config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic) -> None:
        prefix, self.layer = f"{config.prefix(layer)}.ffn", layer
        self.gate, self.arithmetic = build_gate(config, layer, weights, arithmetic), arithmetic
        here, together = arithmetic.ranks.shards.experts, not reads_apart(arithmetic.ops)
        three = [
            weights.matrices(
                [f"{prefix}.experts.{e}.{name}.weight" for e in range(here.start, here.stop)], together=together
            )
            for name in ("w1", "w3", "w2")
        ]
        self.experts = [Expert(of, arithmetic, config.swiglu_limit) for of in zip(*three, strict=True)]
        self._given: tuple[Weight, ...] = ()
        shared = [weights.matrix(f"{prefix}.shared_experts.{name}.weight") for name in ("w1", "w3", "w2")]
        self.shared = Expert(shared, arithmetic, config.swiglu_limit)
        routed = [f"experts.{e}" for e in range(config.n_routed_experts)]

        def names(modules: list[str], *matrices: str) -> list[str]:
            return [f"{prefix}.{module}.{matrix}.weight" for module in modules for matrix in matrices]

        # Of all experts, on whichever rank: ranks that have some of them must not go by those.
        self.alike = all(len(weights.forms(names(routed, *of))) == 1 for of in (("w1", "w3"), ("w2",)))
        # Whether inputs of routed w1 and w3, of the shared ones, and of all w2 are rounded to FP8: then ranks exchange
        # them as codes.
        rounded = arithmetic.linears_rounded
        self.coded = rounded and weights.coded(names(routed, "w1", "w3"))
        self.coded_shared = rounded and weights.coded(names(["shared_experts"], "w1", "w3"))
        self.coded_inner = rounded and weights.coded(names(["shared_experts", *routed], "w2"))

    def __call__(self, x: Tensor, call: Call) -> Tensor:
        """[m, hidden] to [m, hidden], of the call's own tokens."""
        ids, weights = self.route(x, call)
        return self.output(x, ids, weights, call)

    def route(self, x: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Which experts each token goes to: ids [m, k] int64 and weights [m, k] float32."""
        return self.gate(x, call.tokens)

    def output(self, x: Tensor, ids: Tensor, weights: Tensor, call: Call) -> Tensor:
        """Routed experts and the shared one: [m, hidden]."""
        shards = self.arithmetic.ranks.shards
        if shards.experts.split:
            return self.output_of_whole(x, ids, weights, call)
        if shards.inner.split:
            return self.output_of_rows(x, ids, weights, call)
        return self.shared(x, self.routed(x, ids, weights))

    def output_of_rows(self, x: Tensor, ids: Tensor, weights: Tensor, call: Call) -> Tensor:
        """The same where a rank has rows of every expert."""
        shards = self.arithmetic.ranks.shards
        x = self.arithmetic.whole_rows(x, call, coded=self.coded and self.coded_shared)
        ids, weights = told(ids, weights, call.shard, self.arithmetic.ranks)
        up = torch.cat((self.routed_up(x, ids, weights), self.shared.up(x)[:, None]), dim=1)  # [t, k + 1, inner]
        up = self.arithmetic.whole_columns(up, shards.inner, coded=self.coded_inner)
        return call.columns(self.shared.down(up[:, -1], self.routed_down(up[:, :-1], ids)), shards.output)

    def output_of_whole(self, x: Tensor, ids: Tensor, weights: Tensor, call: Call) -> Tensor:
        """The same where a rank has some of the experts."""
        if not dispatched(call):
            every, (ids, weights) = call.whole(x), told(ids, weights, call.shard, self.arithmetic.ranks)
            return self.shared(x, call.own(filled(every, ids, weights, self.layer, self.arithmetic, self.outputs)))
        going = Dispatch(x, ids, weights, call, self.layer, self.arithmetic, coded=self.coded)
        up = self.shared.up(x)  # while the first rows are on their way
        return self.shared.down(up, going.summed(self.outputs))

    def routed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Sum of the routed experts' weighted outputs: [t, hidden] float32."""
        if not self.together():
            return self.routed_down(self.routed_up(x, ids, weights), ids)
        return self._run(x, ids, weights, summed=True)

    def outputs(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Weighted outputs [n, k, hidden] of the experts `ids` that are here, as numbers of these; others are not."""
        return self._run(x, ids, weights, summed=False)

    def _run(self, x: Tensor, ids: Tensor, weights: Tensor, *, summed: bool) -> Tensor:
        """All experts in one op."""
        ops, deployed = self.arithmetic.ops, self.arithmetic.linears_rounded
        of_codes = self.arithmetic.fp8_experts and len(x) > FEW and all(isinstance(of, Fp4) for of in self.matrices)
        op = ops.experts_fp8 if of_codes else ops.experts
        total, limit = self.arithmetic.ranks.shards.experts.total, self.experts[0].limit
        return op(x, ids, weights, *self.matrices, limit, deployed=deployed, summed=summed, total=total)

    def routed_up(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """What w2 of each of a token's experts is given: [t, k, inner]."""
        w1, w3, _ = self.matrices
        if self.together():
            ops, deployed = self.arithmetic.ops, self.arithmetic.linears_rounded
            return ops.experts_up(x, ids, weights, w1, w3, self.experts[0].limit, deployed=deployed)
        out = x.new_empty(*ids.shape, w1.shape[0])
        for expert, rows, slots in by_expert(ids, len(self.experts)):
            out[rows, slots] = self.experts[expert].up(x[rows], weights[rows, slots])
        return out

    def routed_down(self, a: Tensor, ids: Tensor) -> Tensor:
        """Sum of the outputs of a token's experts: [t, hidden] float32."""
        return self.arithmetic.ops.experts_down(a, ids, self.matrices[2], deployed=self.arithmetic.linears_rounded)

    def together(self) -> bool:
        """Whether one op runs the routed experts, as ever, but while somebody listens to what one computes inside."""
        return True

    @property
    def matrices(self) -> tuple[Stack, Stack, Stack]:
        """The routed experts' w1, w3 and w2, as ops take them; made anew when an expert was given another matrix."""
        given = tuple(matrix for expert in self.experts for matrix in (expert.w1, expert.w3, expert.w2))
        if len(given) != len(self._given) or any(map(is_not, given, self._given)):
            stacked = as_stack if self.alike else Apart  # as one rank has them all
            self._given, self._matrices = given, (stacked(given[::3]), stacked(given[1::3]), stacked(given[2::3]))
        return self._matrices
