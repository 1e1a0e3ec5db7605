"""What a call of many tokens asks of one rank, by arithmetic: products, exchanges, and what these hide of each other.

Products are those of all matrices, at the nominal rate of what they multiply, or the reading of the matrices where that
takes longer; and those of attention and of the indexer, for each token as for the middle one. Norms, roundings, mHC's
mixing, reading of caches and launches are left out, so a run takes longer. Nothing of it was measured.

Experts that lie whole on ranks hide exchanges: see `overlapped`.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from fathom.model.config import LayerKind, ModelConfig
from fathom.runtime.plan.exchanges import COMBINE, DISPATCH, Call, Exchange, exchanges, parts_of_call
from fathom.runtime.plan.fullest import pairs
from fathom.runtime.plan.gpus import Rates
from fathom.runtime.plan.weights import stored_bytes

_ROUTED, _SHARED = "ffn.experts.", "ffn.shared_experts."
_OWN: Final = ("hc_attn_fn", "hc_ffn_fn", "hc_head_fn", "ffn.gate", "attn.indexer.wq_b")  # given a rank's own tokens
_TABLES: Final = ("embed", "ape", "tid2eid")  # last parts of names; no product takes them


class Prefill(NamedTuple):
    """A call of many tokens on one rank; seconds are of all layers."""

    tokens: int
    products: Mapping[str, float]  # seconds, by what is multiplied
    exchanges: tuple[Exchange, ...]
    hidden: float  # seconds of exchanges while there are products
    rates: Rates

    @property
    def multiplying(self) -> float:
        """Seconds of products."""
        return sum(self.products.values())

    @property
    def exchanging(self) -> float:
        """Seconds of exchanges."""
        return sum(one.seconds(self.rates.link) for one in self.exchanges)

    @property
    def seconds(self) -> float:
        """Both, less what is hidden."""
        return self.multiplying + self.exchanging - self.hidden


def prefill(c: ModelConfig, s: Call, rates: Rates, *, exact: bool, parts: int | None = None) -> Prefill:
    """A call at the end of its context; `exact`: FP8 codes are multiplied as BF16, see `RunOptions.fp8_products`.

    `parts`: in how many parts tokens travel to whole experts; None: in as many as they do.
    """
    parts = (parts or parts_of_call(c, s)) if s.shards.experts.split else 1
    own_shared = s.shards.experts.split and s.tokens.split
    products = dict.fromkeys(
        ("matrices but experts", "attention", "index scores", "shared expert", "routed experts"), 0.0
    )
    for name, shapes in s.matrices.items():
        if name.startswith("mtp.") or name.rpartition(".")[2] in _TABLES:
            continue
        for (form, rows, columns), count in shapes.items():
            rate = rates.fp8 if s.rounds(form) and not exact else rates.bf16
            size, nbytes = count * rows * columns, count * stored_bytes(form, (rows, columns))
            if name.startswith(_ROUTED):  # each part of the tokens reads the experts that it goes to
                tokens, read = _of_routed(c, s, s.t // parts)
                products["routed experts"] += parts * _seconds(size * tokens, nbytes * read, rate, rates)
            elif name.startswith(_SHARED):
                tokens = s.m if own_shared else s.t
                products["shared expert"] += _seconds(size * tokens, nbytes, rate, rates)
            else:
                tokens = 1 if name == "head" else s.m if name in _OWN else s.t
                products["matrices but experts"] += _seconds(size * tokens, nbytes, rate, rates)
    products["attention"], products["index scores"] = _attention(c, s, rates)
    found = tuple(exchanges(c, s, parts))
    travelling = {one.what: one.seconds(rates.link) for one in found if one.what in (DISPATCH, COMBINE)}
    hidden = 0.0
    if travelling:
        dispatch, combine = travelling[DISPATCH] / parts, travelling[COMBINE] / parts
        shared, routed = products["shared expert"], products["routed experts"] / parts
        first = shared * 2 / 3  # w1 and w3; the sum of the others is added to the product with w2
        alone = first + parts * (dispatch + routed + combine)
        hidden = alone - overlapped(first, dispatch, routed, combine, parts)
    return Prefill(s.t, products, found, hidden, rates)


def overlapped(shared: float, dispatch: float, routed: float, combine: float, parts: int) -> float:
    """Seconds from the first row that leaves to the last output that is back, each stage of each part taking so many.

    Products wait for the rows of their part, and go on while rows of the next arrive and outputs of the last leave;
    what of the shared expert comes first runs while the first rows travel. All rows go over the link before any output.
    """
    computed, left = shared, parts * dispatch
    for part in range(parts):
        computed = max(computed, (part + 1) * dispatch) + routed
        left = max(left, computed) + combine
    return left


def _of_routed(c: ModelConfig, s: Call, tokens: int) -> tuple[float, float]:
    """Tokens of one expert that is here, on the fullest rank, and the part of these experts that is any token's."""
    here = s.shards.experts.size
    return pairs(c, s.shards.experts, tokens) / here, 1 - (1 - c.num_experts_per_tok / c.n_routed_experts) ** tokens


def _seconds(multiplications: float, nbytes: float, rate: float, rates: Rates) -> float:
    return max(2 * multiplications / rate, nbytes / rates.bandwidth)


def _attention(c: ModelConfig, s: Call, rates: Rates) -> tuple[float, float]:
    """Seconds of products with keys and values, and with index keys: in BF16, index keys in FP8 where queries are."""
    rows = scored = 0  # of all layers, for one token
    seen = s.context - s.t // 2
    for layer, kind in enumerate(c.layer_kinds):
        rows += min(c.sliding_window, seen)
        if kind is not LayerKind.SWA:
            entries = seen // c.ratio(layer)
            rows += entries if kind is LayerKind.HCA else min(c.index_topk, entries)
            scored += entries if kind is LayerKind.CSA else 0
    attended = 2 * s.t * s.shards.heads.size * c.head_dim * rows  # keys, and values
    compared = s.m * c.index_n_heads * c.index_head_dim * scored
    return 2 * attended / rates.bf16, 2 * compared / (rates.fp8 if s.fp8_scores else rates.bf16)
