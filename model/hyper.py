"""mHC: how a sublayer reads from and writes to the residual streams, and how the head reads them."""

from typing import NamedTuple

from torch import Tensor

from model import sites, tripwire
from model.arithmetic import Arithmetic
from model.config import ModelConfig
from model.decode import Weights
from model.ranks import Share
from model.sites import Site


class Sublayer(NamedTuple):
    """One of the two halves of a layer: its parameters' name and the sites of its mHC."""

    name: str
    pre: Site
    post: Site
    comb: Site
    streams: Site


ATTENTION = Sublayer(
    "hc_attn", sites.ATTENTION_PRE, sites.ATTENTION_POST, sites.ATTENTION_COMB, sites.ATTENTION_STREAMS
)
EXPERTS = Sublayer("hc_ffn", sites.EXPERTS_PRE, sites.EXPERTS_POST, sites.EXPERTS_COMB, sites.STREAMS)


class HyperConnection:
    """The mHC of one sublayer of a layer."""

    def __init__(
        self, config: ModelConfig, layer: int, sublayer: Sublayer, weights: Weights, arithmetic: Arithmetic
    ) -> None:
        prefix = f"layers.{layer}.{sublayer.name}"
        self.fn = weights.vector(f"{prefix}_fn").float()  # [(2 + s) * s, s * hidden]
        self.base = weights.vector(f"{prefix}_base").float()  # [(2 + s) * s]
        self.scale = weights.vector(f"{prefix}_scale").float()  # [3]: pre, post, comb
        self.ops, self.taps, self.layer, self.sublayer = arithmetic.ops, arithmetic.taps, layer, sublayer
        self.iterations, self.eps, self.norm_eps = config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps

    def read(self, streams: Tensor, first: int, share: Share) -> tuple[Tensor, Tensor, Tensor]:
        """From streams [t, s, hidden]: the sublayer's input [t, hidden], and post [t, s] and comb [t, s, s].

        The tokens are this rank's `share` of a call's; `first` is the position of the first of them.
        """
        pre, post, comb = self.ops.hyper_weights(
            streams, self.fn, self.scale, self.base, self.iterations, self.eps, self.norm_eps
        )
        tripwire.columns(self.sublayer.comb.name, self.layer, first, comb, self.eps)
        self.taps(self.sublayer.pre, self.layer, pre, share)
        self.taps(self.sublayer.post, self.layer, post, share)
        self.taps(self.sublayer.comb, self.layer, comb, share)
        return self.ops.collapse(streams, pre), post, comb

    def write(self, y: Tensor, streams: Tensor, post: Tensor, comb: Tensor, first: int, share: Share) -> Tensor:
        """Return the streams [t, s, hidden] after the sublayer's output y [t, hidden]."""
        new = self.ops.expand(y, streams, post, comb)
        tripwire.finite(self.sublayer.streams.name, self.layer, first, new)
        self.taps(self.sublayer.streams, self.layer, new, share)
        return new


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
