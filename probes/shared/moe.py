"""Routing and experts in float64 from the checkpoint's files: what the routing probe holds a run against."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.formats.stored import Fp4, Fp8
from model.checkpoint.weights import Weights
from model.config import ModelConfig
from probes.shared.narrow import BF16, E4M3, F64, LINEAR_GROUP, decoded, f64, nearest, rounded_blocks
from runtime.options import RunOptions

I64 = NDArray[np.int64]
U = 2.0**-24  # half an ulp of fp32, as a share of the number
LAMBDA = 6.0  # a sum of n products rounds to within LAMBDA sqrt(n) U of the sum of their sizes (Higham and Mary 2019)


@dataclass(frozen=True)
class Scores:
    """Routing scores of one layer for t tokens, and how far off fp32 may put them."""

    score: F64  # [t, experts], sqrt(softplus(logit))
    bias: F64  # [experts], zeros in a hash layer
    error: F64  # [t, experts], of the score, as a share of it

    @classmethod
    def of(cls, x: F64, weights: Weights, layer: int, *, hashed: bool) -> "Scores":
        """Score x [t, hidden] with the gate of the files."""
        prefix = f"layers.{layer}.ffn.gate"
        w = f64(weights.vector(f"{prefix}.weight"))  # [experts, hidden]
        bias = np.zeros(len(w)) if hashed else f64(weights.vector(f"{prefix}.bias"))
        score = np.sqrt(np.logaddexp(0, x @ w.T))
        logit_error = LAMBDA * x.shape[1] ** 0.5 * U * (np.abs(x) @ np.abs(w).T)
        # d score / d logit = sigmoid / (2 score) <= score / 2; softplus, root and the last bits of both: 4 roundings
        return cls(score, bias, logit_error / 2 + 4 * U)

    def choice(self, k: int) -> tuple[I64, NDArray[np.bool_]]:
        """Top k of score + bias [t, k], ids ascending, and which rows [t] are near ties, left to fp32 to decide."""
        biased = self.score + self.bias
        order = np.argsort(-biased, axis=1, kind="stable")
        last, next_best = order[:, k - 1 : k], order[:, k : k + 1]
        at = np.take_along_axis
        slack = (self.error * self.score).max(1) + 2 * U * np.abs(biased).max(1)
        near = (at(biased, last, 1) - at(biased, next_best, 1))[:, 0] <= 2 * slack
        return np.sort(order[:, :k], axis=1), near

    def weights(self, ids: I64, scale: float, *, biased: bool = False) -> F64:
        """Weights of experts ids [t, k]: ``scale * score / sum``; `biased` gives those of a runtime that is wrong."""
        chosen = np.take_along_axis(self.score + self.bias if biased else self.score, ids, 1)
        weights: F64 = scale * chosen / chosen.sum(1, keepdims=True)
        return weights

    def weight_error(self, ids: I64) -> F64:
        """How far off fp32 may put the weights of ids [t, k], as a share of each."""
        chosen = np.take_along_axis(self.error, ids, 1)
        error: F64 = chosen + chosen.max(1, keepdims=True) + (ids.shape[1] + 2) * U  # of the score, and of the sum
        return error


@dataclass(frozen=True)
class Experts:
    """The experts of a checkpoint in float64, rounding where the run rounds."""

    config: ModelConfig
    weights: Weights
    options: RunOptions

    def kept(self, x: F64) -> F64:
        """Round to the dtype in which the run hands activations on."""
        return nearest(x, BF16) if self.options.dtype == "bf16" else x

    def linear(self, x: F64, name: str) -> F64:
        """``x @ W^T`` for x [n, in] and the matrix of the files, its input rounded where `deployed` rounds it."""
        weight = self.weights.matrix(f"{name}.weight")
        if self.options.numerics == "deployed" and isinstance(weight, Fp8 | Fp4):
            x = rounded_blocks(x, LINEAR_GROUP, E4M3)
        return self.kept(x @ decoded(weight).T)

    def activation(self, gate: F64, up: F64, weight: F64 | None, limit: float) -> F64:
        """``silu(min(gate, limit)) * clamp(up, -limit, limit) * weight``; gate, up [n, intermediate], weight [n]."""
        gate = np.minimum(gate, limit)
        out = gate / (1 + np.exp(-gate)) * np.clip(up, -limit, limit)
        return self.kept(out if weight is None else out * weight[:, None])

    def output(self, x: F64, name: str, weight: F64 | None) -> F64:
        """One expert: x [n, hidden] to [n, hidden]."""
        gate, up = self.linear(x, f"{name}.w1"), self.linear(x, f"{name}.w3")
        return self.linear(self.activation(gate, up, weight, self.config.swiglu_limit), f"{name}.w2")

    def mixture(self, x: F64, layer: int, ids: I64, weights: F64) -> tuple[F64, F64]:
        """Sum of the routed experts ids [n, k] with weights [n, k], and the shared expert; each [n, hidden]."""
        routed = np.zeros_like(x)
        for expert in np.unique(ids):
            rows, slots = np.nonzero(ids == expert)
            name = f"layers.{layer}.ffn.experts.{expert}"
            routed[rows] += self.output(x[rows], name, weights[rows, slots])
        return routed, self.output(x, f"layers.{layer}.ffn.shared_experts", None)


def distances(found: F64, wanted: F64) -> F64:
    """Distance of each row of [n, d] from the wanted one, as a share of that one's length."""
    shares: F64 = np.linalg.norm(found - wanted, axis=1) / np.maximum(np.linalg.norm(wanted, axis=1), 1e-30)
    return shares
