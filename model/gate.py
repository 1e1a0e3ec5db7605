"""The gate: which experts each token goes to. In the first layers a table by token id decides, later the scores."""

from torch import Tensor

from kernels.formats.stored import Dense
from model.arithmetic import Arithmetic
from model.config import ModelConfig
from model.decode import Weights


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
