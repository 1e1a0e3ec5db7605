"""What ranks exchange in a call, of any number of tokens: read off `model/`; bytes by count, times assumed.

Experts by *rows*: every rank is given all tokens, and SwiGLU's columns of all are gathered between an expert's
matrices. *Whole*: a token's row goes once to each other rank that has one of its experts, and the output of each of its
experts comes back by itself. How many ranks that is follows from a token's experts, drawn evenly: a run's are not.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import comb
from typing import Final, NamedTuple

from fathom.kernels.experts.reference import FEW
from fathom.kernels.formats.groups import LINEAR_GROUP
from fathom.model.arithmetic import CODED
from fathom.model.checkpoint.tensor_mapping import ROUNDED, Form
from fathom.model.config import LayerKind, ModelConfig
from fathom.model.ranks.dispatch import parts_of
from fathom.model.ranks.ranks import KEPT, AxisShard, Shards
from fathom.model.rounding import FP8, Rounding
from fathom.runtime.plan.weights import F32, I64, Matrices

EXCHANGE: Final = 10e-6  # seconds of a collective of NCCL in a graph, whose bytes are few; assumed
# Matrices whose inputs ranks exchange: those that rows go to, and those behind SwiGLU
ROUTED_UP: Final = "ffn.experts.w1", "ffn.experts.w3"
UP: Final = (*ROUTED_UP, "ffn.shared_experts.w1", "ffn.shared_experts.w3")
DOWN: Final = "ffn.experts.w2", "ffn.shared_experts.w2"
TOLD, DISPATCH, COMBINE = "experts, ids and weights", "experts, dispatch", "experts, combine"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a model on one rank, and what its bytes and products depend on."""

    matrices: Matrices  # of this rank, as they are stored
    item: int  # bytes of an activation
    rounding: Rounding
    shards: Shards  # this rank's
    ranks: int
    tokens: AxisShard  # of the call: this rank's between attentions
    context: int  # positions that the caches hold
    fp8_scores: bool  # whether index queries are rounded to E4M3

    @property
    def t(self) -> int:
        """Tokens of the call."""
        return self.tokens.total

    @property
    def m(self) -> int:
        """Those of this rank between attentions."""
        return self.tokens.size

    def rounds(self, form: Form) -> bool:
        """Whether inputs of linears in this form are rounded to FP8."""
        return self.rounding.linears == FP8 and form in ROUNDED

    def in_codes(self, columns: int, *names: str) -> bool:
        """Whether ranks exchange the inputs of matrices of these names as codes, so many columns on each."""
        coded = all(self.rounds(form) for name in names for form, _, _ in self.matrices[name])
        return self.t > CODED and columns % LINEAR_GROUP == 0 and coded


class Exchange(NamedTuple):
    """Exchanges of one kind, of all layers."""

    what: str
    times: int
    nbytes: int  # that this rank receives in each

    def seconds(self, link: float) -> float:
        """How long they take where a rank receives so many bytes in a second."""
        return self.times * (EXCHANGE + self.nbytes / link)


def exchanges(c: ModelConfig, s: Call, parts: int | None = None) -> list[Exchange]:
    """What ranks exchange for a call, in the order in which it comes: of each kind how often, and how many bytes.

    `parts`: in how many parts tokens travel to whole experts; None: in as many as they do.
    """
    if s.ranks == 1:
        return []
    hidden, compared = c.hidden_size * s.item, compared_tensors(c, split=s.tokens.split)
    times = 1 if s.t <= KEPT else c.num_hidden_layers + 1
    found = [
        *([_filled("embedded tokens", 1, s.t, hidden)] if s.shards.vocabulary.split else []),
        *_of_attention(c, s),
        *(_of_whole(c, s, parts or parts_of_call(c, s)) if s.shards.experts.split else _of_rows(c, s)),
        *([_gathered(s, "output of the last layer", 1, s.t * hidden)] if s.tokens.split else []),
        *([_gathered(s, "logits of a token", 1, c.vocab_size * F32)] if s.shards.vocabulary.split else []),
        Exchange("what ranks compare", times, (s.ranks - 1) * I64 * compared // times),
    ]
    return [one for one in found if one.nbytes]


def _of_attention(c: ModelConfig, s: Call) -> Iterator[Exchange]:
    layers, shards, t = c.num_hidden_layers, s.shards, s.t
    if s.tokens.split:
        yield _gathered(s, "attention, input", layers, t * c.hidden_size * s.item)
        ratios = [c.ratio(layer) for layer, kind in enumerate(c.layer_kinds) if kind is LayerKind.CSA]
        selected = min(c.index_topk, s.context // ratios[0]) if ratios else 0
        yield _gathered(s, "attention, selection", len(ratios), t * selected * 4)
    if shards.heads.split and not shards.groups.split:
        yield _gathered(s, "attention, heads", layers, t * c.num_attention_heads * c.head_dim * s.item)
    if shards.groups.split:
        item = _item(s, shards.groups.size * c.o_lora_rank, "attn.wo_b")
        yield _gathered(s, "attention, low rank", layers, t * c.o_groups * c.o_lora_rank * item)
    yield from _columns(c, s, "attention, output")


def _of_rows(c: ModelConfig, s: Call) -> Iterator[Exchange]:
    """Those of experts of which each rank has rows."""
    layers, k, t = c.num_hidden_layers, c.num_experts_per_tok, s.t
    if s.tokens.split:
        yield _gathered(s, "experts, input", layers, t * c.hidden_size * _item(s, c.hidden_size, *UP))
        yield _gathered(s, TOLD, layers, t * k * 2 * F32)
    numbers = t * (k + 1) * c.moe_intermediate_size
    item = _item(s, s.shards.inner.size, *DOWN)
    yield _gathered(s, "experts, between their matrices", layers, numbers * item)
    yield from _columns(c, s, "experts, output")


def _of_whole(c: ModelConfig, s: Call, parts: int) -> Iterator[Exchange]:
    """Those of experts that lie whole on ranks: `model.ranks.dispatch`."""
    layers, k, t, hidden = c.num_hidden_layers, c.num_experts_per_tok, s.t, c.hidden_size * s.item
    if s.tokens.split:
        yield _gathered(s, TOLD, parts * layers, t * k * 2 * F32 / parts)
    if not s.tokens.split or t <= FEW:
        yield from [_gathered(s, "experts, input", layers, t * hidden)] if s.tokens.split else []
        yield _filled("experts, outputs of all", layers, t * k, hidden)
        return
    reached = 1 - comb(c.n_routed_experts - s.shards.experts.size, k) / comb(c.n_routed_experts, k)
    row = c.hidden_size * _item(s, c.hidden_size, *ROUTED_UP)
    yield _gathered(s, DISPATCH, parts * layers, t * reached * row / parts)
    yield _gathered(s, COMBINE, parts * layers, t / s.ranks * k * hidden / parts)


def parts_of_call(c: ModelConfig, s: Call) -> int:
    """In how many parts a call's own tokens travel to whole experts."""
    return len(parts_of(s.t, s.ranks, c.num_experts_per_tok / c.n_routed_experts)) if s.tokens.split else 1


def _gathered(s: Call, what: str, times: int, nbytes: float) -> Exchange:
    """One to which a rank brings its part of so many bytes."""
    return Exchange(what, times, int(nbytes * (s.ranks - 1) / s.ranks))


def _columns(c: ModelConfig, s: Call, what: str) -> Iterator[Exchange]:
    """A sublayer's output: from a rank's columns of all tokens to all columns of its own."""
    if s.shards.output.split:
        yield _gathered(s, what, c.num_hidden_layers, s.t * c.hidden_size * s.item / (s.ranks if s.tokens.split else 1))


def _filled(what: str, times: int, rows: int, nbytes: int) -> Exchange:
    """An all-reduce of `Ranks.filled`: it sends and receives what it sums up, and which rank filled each row."""
    return Exchange(what, times, 2 * rows * (nbytes + F32))


def _item(s: Call, columns: int, *names: str) -> float:
    """Bytes of a number that matrices of these names read, or of its FP8 code, of so many columns on each rank."""
    return 1 + 1 / LINEAR_GROUP if s.in_codes(columns, *names) else s.item


def compared_tensors(c: ModelConfig, *, split: bool) -> int:
    """Tensors whose checksums a call's ranks compare: see `same` in `model.observe.observer`."""
    always = {LayerKind.SWA: 1, LayerKind.HCA: 2, LayerKind.CSA: 3}  # KV, entry, index key; tokens
    found = 1 + sum(always[kind] for kind in c.layer_kinds)
    if split:
        return found
    of_all = {LayerKind.SWA: 3, LayerKind.HCA: 3, LayerKind.CSA: 4}  # experts, weights, streams, selection; output
    return found + 1 + sum(of_all[kind] for kind in c.layer_kinds)
