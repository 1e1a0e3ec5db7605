"""mHC: how a sublayer reads from and writes to the residual streams, and how the head reads them."""

from typing import NamedTuple

from torch import Tensor

from fathom.model.arithmetic import Arithmetic
from fathom.model.call import Call
from fathom.model.checkpoint.weights import Weights
from fathom.model.config import ModelConfig


class Read(NamedTuple):
    """What a sublayer reads, and with which weights the streams are read, written and mixed."""

    x: Tensor  # [t, hidden], normed
    pre: Tensor  # [t, s] float32: A of the paper
    post: Tensor  # [t, s] float32: C
    comb: Tensor  # [t, s, s] float32: B transposed, made doubly stochastic by Sinkhorn


class HyperConnection:
    """The mHC of one sublayer of a layer, whose parameters begin with `prefix`."""

    def __init__(self, config: ModelConfig, prefix: str, weights: Weights, arithmetic: Arithmetic) -> None:
        self.fn = weights.vector(f"{prefix}_fn").float()  # [(2 + s) * s, s * hidden]
        self.base = weights.vector(f"{prefix}_base").float()  # [(2 + s) * s]
        self.scale = weights.vector(f"{prefix}_scale").float()  # [3]: pre, post, comb
        self.ops, self.iterations = arithmetic.ops, config.hc_sinkhorn_iters
        self.eps, self.norm_eps = config.hc_eps, config.rms_norm_eps

    def read(self, streams: Tensor, norm: Tensor) -> Read:
        """Read streams X [t, s, hidden] for the sublayer: ``norm(A X)``, with these weights [hidden] of the norm."""
        mhc = self.fn, self.scale, self.base, self.iterations, self.eps, self.norm_eps
        return Read(*self.ops.read_streams(streams, *mhc, norm, self.norm_eps))

    def write(self, y: Tensor, streams: Tensor, read: Read) -> Tensor:
        """Return the streams [t, s, hidden] after the sublayer's output y [t, hidden]: ``B X + C y``."""
        return self.ops.expand(y, streams, read.post, read.comb)


class HyperHead:
    """The last reading of the streams, before the final norm; its parameters begin with `prefix`.

    Behind it every rank has all tokens.
    """

    def __init__(self, config: ModelConfig, prefix: str, weights: Weights, arithmetic: Arithmetic) -> None:
        self.fn = weights.vector(f"{prefix}hc_head_fn").float()  # [s, s * hidden]
        self.base = weights.vector(f"{prefix}hc_head_base").float()  # [s]
        self.scale = weights.vector(f"{prefix}hc_head_scale").float()  # [1]
        self.ops, self.eps, self.norm_eps = arithmetic.ops, config.hc_eps, config.rms_norm_eps

    def __call__(self, streams: Tensor, call: Call) -> Tensor:
        """[m, s, hidden] to [t, hidden]."""
        pre = self.ops.head_weights(streams, self.fn, self.scale, self.base, self.eps, self.norm_eps)
        return call.whole(self.ops.collapse(streams, pre))
