"""mHC: how a sublayer reads from and writes to the residual streams, and how the head reads them."""

from torch import Tensor

from model.arithmetic import Arithmetic
from model.config import ModelConfig
from model.decode import Weights


class HyperConnection:
    """The mHC of one sublayer (`hc_attn_*` or `hc_ffn_*`)."""

    def __init__(self, config: ModelConfig, prefix: str, weights: Weights, arithmetic: Arithmetic) -> None:
        self.fn = weights.vector(f"{prefix}_fn").float()  # [(2 + s) * s, s * hidden]
        self.base = weights.vector(f"{prefix}_base").float()  # [(2 + s) * s]
        self.scale = weights.vector(f"{prefix}_scale").float()  # [3]: pre, post, comb
        self.ops = arithmetic.ops
        self.iterations, self.eps, self.norm_eps = config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps

    def read(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From streams [t, s, hidden]: the sublayer's input [t, hidden], and post [t, s] and comb [t, s, s]."""
        pre, post, comb = self.ops.hyper_weights(
            streams, self.fn, self.scale, self.base, self.iterations, self.eps, self.norm_eps
        )
        return self.ops.collapse(streams, pre), post, comb

    def write(self, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """Return the streams [t, s, hidden] after the sublayer's output y [t, hidden]."""
        return self.ops.expand(y, streams, post, comb)


class HyperHead:
    """The last reading of the streams, before the final norm."""

    def __init__(self, config: ModelConfig, weights: Weights, arithmetic: Arithmetic) -> None:
        self.fn = weights.vector("hc_head_fn").float()  # [s, s * hidden]
        self.base = weights.vector("hc_head_base").float()  # [s]
        self.scale = weights.vector("hc_head_scale").float()  # [1]
        self.ops, self.eps, self.norm_eps = arithmetic.ops, config.hc_eps, config.rms_norm_eps

    def __call__(self, streams: Tensor) -> Tensor:
        """[t, s, hidden] to [t, hidden]."""
        pre = self.ops.head_weights(streams, self.fn, self.scale, self.base, self.eps, self.norm_eps)
        return self.ops.collapse(streams, pre)
