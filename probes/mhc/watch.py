"""What the mHC of a run did, taken from its sites and held against `probes.mhc.oracle` call by call."""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from model.checkpoint.weights import Weights
from model.config import ModelConfig
from model.observe import sites
from model.observe.sites import Listener, Site
from probes.finding import JSON
from probes.mhc import oracle
from probes.mhc.oracle import U
from probes.shared.narrow import F64, f64

TINY = 1e-30  # allowed where everything is 0


class Sublayer(NamedTuple):
    """One of the two halves of a layer: what it is called, its parameters, and the sites around its mHC."""

    word: str
    name: str
    norm: str
    pre: Site
    post: Site
    comb: Site
    input: Site
    output: Site
    streams: Site


ATTENTION = Sublayer(
    *("attention", "hc_attn", "attn_norm", sites.ATTENTION_PRE, sites.ATTENTION_POST, sites.ATTENTION_COMB),
    *(sites.ATTENTION_INPUT, sites.ATTENTION_OUTPUT, sites.ATTENTION_STREAMS),
)
EXPERTS = Sublayer(
    *("experts", "hc_ffn", "ffn_norm", sites.EXPERTS_PRE, sites.EXPERTS_POST, sites.EXPERTS_COMB),
    *(sites.EXPERTS_INPUT, sites.EXPERTS_OUTPUT, sites.STREAMS),
)
SUBLAYERS = (ATTENTION, EXPERTS)
READS = (sites.EMBEDDED, sites.HIDDEN, *(site for part in SUBLAYERS for site in part[3:]))


@dataclass
class Worst:
    """The largest error of one thing, as a share of what rounding may make of it, and where it was."""

    share: float = 0.0
    layer: int | None = None
    evidence: dict[str, JSON] = field(default_factory=dict)

    def see(self, got: F64, want: F64, allowed: F64, layer: int | None, first: int, **where: JSON) -> None:
        """Compare `got` and `want` [t, ...] of the tokens from position `first` on; a NaN is the worst there is."""
        share = np.abs(got - want) / allowed
        at = np.unravel_index(int(np.argmax(share)), share.shape)
        if share[at] <= self.share or math.isnan(self.share):
            return
        self.share, self.layer = float(share[at]), layer
        place = "[" + ", ".join(str(int(i)) for i in at[1:]) + "]"
        self.evidence = where | {
            "position": first + int(at[0]),
            "at": place,
            "run": float(got[at]),
            "oracle": float(want[at]),
            "allowed": float(np.broadcast_to(allowed, share.shape)[at]),
        }


@dataclass
class Sums:
    """Sums, ranges and asymmetry of one sublayer's weights, over all tokens."""

    column: float = 0.0  # largest |sum - 1| of a column
    row: float = 0.0  # of a row
    row_by_formula: float = 0.0  # what float64 leaves of it, largest
    row_beyond: float = -math.inf  # largest excess of the run over the formula, token by token
    pre: tuple[float, float] = (math.inf, -math.inf)
    post: tuple[float, float] = (math.inf, -math.inf)
    transposed: float = 0.0  # error of the streams if comb were read transposed, as a share of the rounding
    moving: int = 0  # tokens at which some stream goes mostly to another one
    tokens: int = 0

    def add(self, pre: F64, post: F64, comb: F64, want: F64) -> None:
        """Take in weights of t tokens, and the comb [t, s, s] that the formula gives."""
        rows, formula = np.abs(comb.sum(2) - 1), np.abs(want.sum(2) - 1)
        self.column = max(self.column, float(np.abs(comb.sum(1) - 1).max()))
        self.row, self.row_by_formula = max(self.row, float(rows.max())), max(self.row_by_formula, float(formula.max()))
        self.row_beyond = max(self.row_beyond, float((rows - formula).max()))
        self.pre = (min(self.pre[0], float(pre.min())), max(self.pre[1], float(pre.max())))
        self.post = (min(self.post[0], float(post.min())), max(self.post[1], float(post.max())))
        self.moving += int((comb.argmax(2) != np.arange(comb.shape[1])).any(1).sum())
        self.tokens += len(comb)


class Watch:
    """Listeners for one model, and what they found; set `first` before each call."""

    def __init__(self, config: ModelConfig, weights: Weights, rounding: float) -> None:
        self.config, self.weights, self.rounding = config, weights, rounding  # half an ulp of the activations, relative
        self.first = 0
        self.worst: dict[str, Worst] = defaultdict(Worst)  # by what was compared
        self.sums: dict[tuple[int, str], Sums] = defaultdict(Sums)
        self.square: dict[tuple[int, str], list[F64]] = defaultdict(list)  # mean square of each stream [t, s]
        self._passed: dict[Site, F64] = {}
        self._streams: F64 = np.zeros(0)

    def listeners(self) -> dict[Site, Listener]:
        """What to attach."""
        kept = {
            site: self._keep(site)
            for part in SUBLAYERS
            for site in (part.pre, part.post, part.comb, part.input, part.output)
        }
        written = {part.streams: self._written(part) for part in SUBLAYERS}
        return {sites.EMBEDDED: self._embedded, sites.HIDDEN: self._hidden} | kept | written

    def _keep(self, site: Site) -> Listener:
        def keep(layer: int | None, tensor: Tensor) -> None:
            del layer
            self._passed[site] = f64(tensor)

        return keep

    def _embedded(self, layer: int | None, x: Tensor) -> None:
        del layer
        self._streams = np.repeat(f64(x)[:, None], self.config.hc_mult, 1)
        self.square[-1, "embedded"].append((self._streams**2).mean(2))

    def _written(self, part: Sublayer) -> Callable[[int | None, Tensor], None]:
        def written(layer: int | None, tensor: Tensor) -> None:
            assert layer is not None
            new = f64(tensor)
            self._compare(part, layer, new)
            self.square[layer, part.word].append((new**2).mean(2))
            self._streams = new

        return written

    def _compare(self, part: Sublayer, layer: int, new: F64) -> None:
        """Judge one sublayer of one call, the streams before it being known."""
        word, config, before = part.word, self.config, self._streams
        pre, post, comb = (self._passed[site] for site in (part.pre, part.post, part.comb))
        mixing = oracle.Mixing.of(self.weights, f"layers.{layer}.{part.name}")
        want = oracle.connection(before, mixing, config)
        self._see("pre", pre, want.pre, want.pre_error, layer, word)
        self._see("post", post, want.post, want.post_error, layer, word)
        self._see("comb", comb, want.comb, want.comb_error, layer, word)
        self._read(self._passed[part.input], before, pre, f"layers.{layer}.{part.norm}.weight", layer, word)
        y, sums = self._passed[part.output], self.sums[layer, word]
        right, sizes = oracle.written(y, before, post, comb)
        # One rounding to the activations' dtype; products and sums of s + 1 terms in fp32
        allowed = self.rounding * np.abs(right) + 2 * (config.hc_mult + 2) * U * sizes + TINY
        self._see("written", new, right, allowed, layer, word)
        other, _ = oracle.written(y, before, post, comb.transpose(0, 2, 1))
        sums.transposed = max(sums.transposed, float((np.abs(other - right) / allowed).max()))
        sums.add(pre, post, comb, want.comb)

    def _read(self, x: F64, streams: F64, pre: F64, norm: str, layer: int | None, word: str) -> None:
        """Judge a normed reading x [t, hidden] of the streams."""
        eps, s = self.config.rms_norm_eps, self.config.hc_mult
        want, sizes = oracle.read(streams, pre, f64(self.weights.vector(norm)), eps)
        # Rounded after the sum and after the norm, whose mean square saw rounded values too: three roundings at most.
        # The norm's own sum over hidden is in fp32, and so is the sum over streams.
        fp32 = (oracle.LAMBDA * streams.shape[2] ** 0.5 + 8) * U
        allowed = (3 * self.rounding + fp32) * np.abs(want) + 2 * (s + 2) * U * sizes + TINY
        self._see("read", x, want, allowed, layer, word)

    def _hidden(self, layer: int | None, hidden: Tensor) -> None:
        """Judge the head: its weights are seen at no site, so those of the oracle stand for them."""
        mixing = oracle.Mixing.of(self.weights, "hc_head")
        pre, off = oracle.head_read(self._streams, mixing, self.config)
        want, sizes = oracle.read(self._streams, pre, f64(self.weights.vector("norm.weight")), self.config.rms_norm_eps)
        fp32 = (oracle.LAMBDA * self._streams.shape[2] ** 0.5 + 8) * U
        share = 2 * (off / pre).max(1)[:, None] + 2 * (self.config.hc_mult + 2) * U  # weights that are off, and the sum
        allowed = (3 * self.rounding + fp32) * np.abs(want) + share * sizes + TINY
        self.worst["head"].see(f64(hidden), want, allowed, layer, self.first)

    def _see(self, what: str, got: F64, want: F64, allowed: F64, layer: int | None, word: str) -> None:
        self.worst[what].see(got, want, allowed, layer, self.first, sublayer=word)
