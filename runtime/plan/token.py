"""What a decoded token asks of one rank, by arithmetic: bytes, exchanges and launches, and how long these take.

A token of a graph waits for nothing but these. Bytes are those of weights and caches, each read once; of the routed
experts those of a token's k: of which every rank has rows, or those that lie on the rank that has the most of them, by
expectation. Exchanges follow from what is cut (`runtime.sharding`), and launches are counted by a recorder of what is
captured (`tests/runtime/test_captured_step.py`). What each of them takes is assumed: nothing of it was measured.

Caches are on every rank. Cut over ranks by rows, index keys would be scored by the rank that has them, the best of all
merged, and selected entries brought to every rank: two more exchanges and three more launches in a CSA layer.
`Token.cut_from` says how long a context must be for that to take less than it saves.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from fathom.model.choices import ROWS, WHOLE
from fathom.model.config import LayerKind, ModelConfig
from fathom.model.rope import rotated_as
from fathom.runtime.plan.exchanges import EXCHANGE, Call, Exchange, compared_tensors, exchanges
from fathom.runtime.plan.fullest import pairs
from fathom.runtime.plan.gpus import Rates
from fathom.runtime.plan.weights import I64, WeightKind, Weights, stored_bytes

LAUNCH: Final = 1.5e-6  # seconds of a node of a graph; assumed
# Nodes of a captured layer on one rank, tripwires among them, in deployed numerics with caches in FP8 and FP4; and of
# the angles that layers with one rotation share
LAUNCHES: Final = {LayerKind.SWA: 23, LayerKind.HCA: 24, LayerKind.CSA: 31}
ANGLES: Final = 7
# Nodes that several ranks add, exchanges not among them: to a layer; for each row that a compressor writes, which is
# compared where it ends a window; outside of layers, where an embedding is put together. By multicast each gather is
# copied once more.
ON_RANKS: Final = ({ROWS: 3, WHOLE: 8}, 4, 9)
MERGED: Final = (2, 3)  # exchanges and launches by which a CSA layer would grow whose caches were cut over ranks


class Token(NamedTuple):
    """A decoded token at the end of a context, on one rank."""

    read: Mapping[str, int]  # bytes, by what is read
    exchanges: tuple[Exchange, ...]
    launches: int  # of layers, and of what several ranks add: checksums of what they compare among it
    rates: Rates  # of the device
    cut_from: int | None  # positions from which on caches that are cut over ranks would save time; None: one rank
    spared: int  # bytes of caches that a rank would not hold then

    @property
    def reading(self) -> float:
        """Seconds that bytes take."""
        return sum(self.read.values()) / self.rates.bandwidth

    @property
    def exchanging(self) -> float:
        """Seconds that exchanges take."""
        return sum(one.seconds(self.rates.link) for one in self.exchanges)

    @property
    def launching(self) -> float:
        """Seconds that launches take, did they all wait for each other."""
        return self.launches * LAUNCH

    @property
    def seconds(self) -> float:
        """All of these, one after the other."""
        return self.reading + self.exchanging + self.launching


_NOT_READ: Final = (WeightKind.EMBEDDING, WeightKind.DRAFTING)  # by the layers of the model


def token(
    c: ModelConfig,
    s: Call,
    weights: Mapping[WeightKind, Weights],
    caches: Mapping[str, Mapping[str, int]],
    context: int,
    rates: Rates,
) -> Token:
    """A token after `context` positions, for which `caches` are: bytes by kind of layer and component, in full."""
    read = {kind.value: part.own for kind, part in weights.items() if kind not in _NOT_READ}
    experts = s.shards.experts  # of each of these a rank has all, or rows
    read[WeightKind.ROUTED.value] = int(read[WeightKind.ROUTED.value] * pairs(c, experts, 1) / experts.size)
    tables = sum(map(c.is_hash, range(c.num_hidden_layers))) * c.num_experts_per_tok * c.vocab_size * I64
    read[WeightKind.GATES.value] -= tables
    read["head"] = max(stored_bytes(form, (rows, columns)) for form, rows, columns in s.matrices["head"])
    counts = {kind: c.layer_kinds.count(kind) for kind in LayerKind}
    read["window"] = c.num_hidden_layers * min(c.sliding_window, context) * c.head_dim * s.item
    entries, keys, selected = (caches.get(kind, {}).get(name, 0) for kind, name in _PARTS)
    read["entries of HCA"], read["index keys"] = entries, keys
    ratios = [c.ratio(layer) for layer, kind in enumerate(c.layer_kinds) if kind is LayerKind.CSA]
    if ratios:
        read["selected entries"] = int(selected * min(1.0, c.index_topk / max(1, context // ratios[0])))
    kept = (s.ranks - 1) / s.ranks
    saved = keys * kept / rates.bandwidth / context  # seconds of a position
    paid = MERGED[0] * EXCHANGE + MERGED[1] * LAUNCH
    if ratios and s.ranks > 1:
        rows = read["selected entries"] // len(ratios)
        paid = len(ratios) * (paid + rows * kept / rates.link)
    launches = sum(count * LAUNCHES[kind] for kind, count in counts.items())
    launches += ANGLES * len({rotated_as(kind) for kind, count in counts.items() if count})
    return Token(
        read,
        tuple(exchanges(c, s)),
        launches + (_on_ranks(c, WHOLE if s.shards.experts.split else ROWS) if s.ranks > 1 else 0),
        rates,
        int(paid / saved) + 1 if saved else None,
        int((keys + selected) * kept),
    )


_PARTS: Final = (LayerKind.HCA, "entries"), (LayerKind.CSA, "indexer_keys"), (LayerKind.CSA, "entries")


def _on_ranks(c: ModelConfig, experts: str) -> int:
    """Launches that several ranks add to a token, by how experts lie."""
    of_layer, of_row, outside = ON_RANKS
    rows = sum({LayerKind.SWA: 0, LayerKind.HCA: 1, LayerKind.CSA: 2}[kind] for kind in c.layer_kinds)
    return compared_tensors(c, split=False) + of_layer[experts] * c.num_hidden_layers + of_row * rows + outside
