"""The faults that can be injected, as one table: `python -m scripts.probe NAME --inject FAULT`.

A row says what a fault is called, what it does, where it was seen, and what a model needs to have for it; the code
under the row is the fault itself. The name of the row's decorator says where it acts. A function changes what is there.
A faulty part is a subclass, and the part that is there becomes one: everything else about it stays as it was loaded.

`audits/faults.md` is the matrix of these against the probes, made by running it.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from fathom.kernels.compress.reference import Finish, Tail
from fathom.kernels.experts.reference import Experts
from fathom.kernels.formats import coded_rows, qjl
from fathom.kernels.formats.rows import first as first_rows
from fathom.kernels.formats.rows import write
from fathom.kernels.formats.rows_reference import decode
from fathom.kernels.formats.stored import (
    BasisRows,
    CodedRows,
    Dense,
    Fp4,
    Fp4Keys,
    Fp8,
    Fp8Entries,
    Fp8Keys,
    NvFp4,
    Rows,
    Slots,
    TokenRing,
    Weight,
)
from fathom.kernels.ops import Ops
from fathom.kernels.rope import reference as rope
from fathom.kernels.shard.cpu import middle_keys, middle_values
from fathom.kernels.shard.reference import Middle
from fathom.model.arithmetic import Arithmetic
from fathom.model.attention import Attention, Beyond, CsaAttention, HcaAttention
from fathom.model.block import Block
from fathom.model.cache.entries import Entries, RowCache, Store
from fathom.model.cache.frontier import Frontier
from fathom.model.cache.layers import CsaCache, HcaCache, LayerCache
from fathom.model.cache.window import WindowRing
from fathom.model.call import Call
from fathom.model.compressor import Compressor, EntryCompressor, KeyCompressor
from fathom.model.config import LayerKind, ModelConfig
from fathom.model.draft import BlockAttention, DraftHead, Drafts, DraftState, MtpHead, StreamListener
from fathom.model.hyper import HyperConnection, Read
from fathom.model.indexer import Indexer
from fathom.model.linear import GroupedLinear, Input, Linear, OutputLinear, Reader
from fathom.model.moe import Expert, HashGate, MoE
from fathom.model.observe import sites
from fathom.model.observe.observer import observed
from fathom.model.ranks.ranks import Coming, Partial, Route
from fathom.model.rope import Rotation, layer_frequencies
from fathom.model.state import State
from fathom.model.transformer import Transformer
from fathom.model.variants.banked_entries import BankedEntries
from fathom.model.variants.coda import CodaCache, View
from fathom.model.variants.coded_entries import SIGNS
from fathom.model.variants.shard import ShardCache, causal
from fathom.probes.fault import (
    Fault,
    Parts,
    Place,
    all_of,
    become,
    layers,
    put_in_head,
    put_in_model,
    put_in_ops,
    put_in_parts,
)
from fathom.probes.shared.calls import Attend
from fathom.runtime.drafting import Drafting
from fathom.runtime.generate import Generation
from fathom.runtime.load import AnyLoaded
from fathom.runtime.sampling import Sampling
from fathom.runtime.text.messages import Message
from fathom.runtime.text.segments import BOS, EOS, THINK_END, THINK_START, Segment, Text, merge, render, split_controls

if TYPE_CHECKING:
    from array import array

FAULTS: Final[dict[str, Fault]] = {}

SWA, CSA, HCA = LayerKind.SWA, LayerKind.CSA, LayerKind.HCA
STORY = "the indexer that was off for months"
PORTING = "the mistake's kind: a port that took a neighbour's formula"
WIRING = "the mistake's kind: a projection wired wrongly"
BANKS = "the mistake's kind: what becomes of an evicted entry"
STATES = "the mistake's kind: a part of the state that is not saved"
SHORT: Final = 8  # tokens of a call, up to which ops have a way of their own
BUFFER: Final = 128  # rows of a buffer that a longer call goes round in
CAPACITY: Final = 1.25  # times an even share of a call's pairs that an expert takes
TWICE = "the mistake's kind: two kernels that each do what one of them should"
LONG_WAY = "the mistake's kind: the way of long calls, which nothing but a long call takes"


# --- where faults act: each of these begins a row


def _put_in_states(fault: Fault, change: Callable[[State], None]) -> Fault:
    def inject(model: Transformer) -> None:
        class Changed(Transformer):
            def new_state(self, max_context: int, chunk: int, *, rewind: int = 0) -> State:
                state = super().new_state(max_context, chunk, rewind=rewind)
                change(state)
                return state

        become(model, Changed)

    return put_in_model(fault, inject)


def _put_in_caches(fault: Fault, change: Callable[[LayerCache], None]) -> Fault:
    def change_all(state: State) -> None:
        for held in state.layers:
            assert isinstance(held, LayerCache)
            change(held)

    return _put_in_states(fault, change_all)


def _put_in_coda(fault: Fault, faulty: type[CodaCache]) -> Fault:
    return put_in_parts(fault, lambda parts: parts._replace(coda=faulty))


def _put_in_shard(fault: Fault, faulty: type[ShardCache]) -> Fault:
    return put_in_parts(fault, lambda parts: parts._replace(shard=faulty))


in_ops = Place(FAULTS, put_in_ops)  # an op set, before a model is loaded with it
in_model = Place(FAULTS, put_in_model)  # a model that was just loaded
in_caches = Place(FAULTS, _put_in_caches)  # each layer's cache in every new state of a model
between_ranks = Place(FAULTS, put_in_model, between_ranks=True)  # what one rank holds of a model
in_variant_ops = Place(FAULTS, put_in_ops, in_variants=True)
in_variant_caches = Place(FAULTS, _put_in_caches, in_variants=True)  # of V4's layers
in_coda = Place(FAULTS, _put_in_coda, in_variants=True)  # coda's cache of a grouped-query layer
in_shard = Place(FAULTS, _put_in_shard, in_variants=True)  # shard's cache of a grouped-query layer
in_variant_parts = Place(FAULTS, put_in_parts, in_variants=True)  # what these caches rest on
in_runtime = Place(FAULTS, put_in_parts, in_runtime=True)  # how messages become ids, and logits a token
in_head = Place(FAULTS, put_in_head, in_drafts=True)  # a draft head that was just loaded
in_rewound_states = Place(FAULTS, _put_in_states, in_drafts=True)  # how every new state of a model goes back
in_rewound_caches = Place(FAULTS, _put_in_caches, in_drafts=True)
in_accepting = Place(FAULTS, put_in_parts, in_drafts=True)  # which drafts become tokens


# --- parts of a model and of a layer's cache, and what is done with each of them

Whole = TypeVar("Whole")
Part = TypeVar("Part")


def each(parts: Callable[[Whole], Iterable[Part]]) -> Callable[[Callable[[Part], None]], Callable[[Whole], None]]:
    """The function under it changes one of these parts: it is given each."""

    def adapted(change: Callable[[Part], None]) -> Callable[[Whole], None]:
        def change_all(whole: Whole) -> None:
            for part in parts(whole):
                change(part)

        return change_all

    return adapted


def instead_of(parts: Callable[[Whole], Iterable[Part]]) -> Callable[[type[Part]], Callable[[Whole], None]]:
    """The class under it is faulty: each of these parts becomes one of it, and stays one of its own."""

    def adapted(faulty: type[Part]) -> Callable[[Whole], None]:
        def change(part: Part) -> None:
            own = type(part)
            become(part, faulty if issubclass(faulty, own) else type(faulty.__name__, (faulty, own), {}))

        return each(parts)(change)

    return adapted


class _Computes(Protocol):
    arithmetic: Arithmetic


def ops_of(
    parts: Callable[[Transformer], Iterable[_Computes]],
) -> Callable[[Callable[[Ops], Ops]], Callable[[Transformer], None]]:
    """The function under it changes an op set: each of these parts computes with one of its own."""

    def adapted(faulty: Callable[[Ops], Ops]) -> Callable[[Transformer], None]:
        def change(part: _Computes) -> None:
            part.arithmetic = part.arithmetic._replace(ops=faulty(part.arithmetic.ops))

        return each(parts)(change)

    return adapted


def blocks(model: Transformer) -> list[Block]:
    return model.blocks


def attentions(model: Transformer) -> list[Attention]:
    return [block.attention for block in model.blocks]


def rotations(model: Transformer) -> list[Rotation]:
    return list({id(attention.rotation): attention.rotation for attention in attentions(model)}.values())


def window_attentions(model: Transformer) -> list[Attention]:
    return [attention for attention in attentions(model) if not isinstance(attention, HcaAttention)]


def compressed_attentions(model: Transformer) -> list[HcaAttention]:
    return [attention for attention in attentions(model) if isinstance(attention, HcaAttention)]


def hca_attentions(model: Transformer) -> list[HcaAttention]:
    return [attention for attention in compressed_attentions(model) if not isinstance(attention, CsaAttention)]


def indexers(model: Transformer) -> list[Indexer]:
    return [attention.indexer for attention in attentions(model) if isinstance(attention, CsaAttention)]


def entry_compressors(model: Transformer) -> list[EntryCompressor]:
    return [attention.compressor for attention in compressed_attentions(model)]


def key_compressors(model: Transformer) -> list[KeyCompressor]:
    return [indexer.compressor for indexer in indexers(model)]


def hca_compressors(model: Transformer) -> list[EntryCompressor]:
    return [attention.compressor for attention in hca_attentions(model)]


def compressors(model: Transformer) -> list[Compressor]:
    return [*entry_compressors(model), *key_compressors(model)]


def group_projections(model: Transformer) -> list[GroupedLinear]:
    return [attention.wo_a for attention in attentions(model)]


def readings_of_experts(model: Transformer) -> list[HyperConnection]:
    return [block.experts_streams for block in model.blocks]


def mixtures(model: Transformer) -> list[MoE]:
    return [block.experts for block in model.blocks]


def routed_experts(model: Transformer) -> list[Expert]:
    return [expert for mixture in mixtures(model) for expert in mixture.experts]


def shared_experts(model: Transformer) -> list[Expert]:
    return [mixture.shared for mixture in mixtures(model)]


def rings(held: LayerCache) -> list[WindowRing]:
    return [held.ring]


def frontiers(held: LayerCache) -> list[Frontier]:
    return [frontier for _, frontier, _, _ in held.compressed()]


def banks(held: LayerCache) -> list[BankedEntries]:
    return [held.entries] if isinstance(held, HcaCache) and isinstance(held.entries, BankedEntries) else []


def entries(held: LayerCache) -> list[RowCache[Rows | Slots]]:
    return [held.entries] if isinstance(held, HcaCache) else []


def index_keys(held: LayerCache) -> list[RowCache[Rows]]:
    return [held.keys] if isinstance(held, CsaCache) else []


def coded(held: LayerCache) -> list[Entries]:
    """Entries, and the index keys beside them, that are kept as codes."""
    rows = (*entries(held), *index_keys(held))
    return [part for part in rows if isinstance(part, Entries) and isinstance(part.data, CodedRows)]


def rewound(state: State) -> list[State]:
    return [state]


def mtp_heads(head: DraftHead) -> list[MtpHead]:
    return [head] if isinstance(head, MtpHead) else []


def stage_attentions(head: DraftHead) -> list[Attention]:
    return [block.attention for block in head.blocks]


def block_attentions(head: DraftHead) -> list[BlockAttention]:
    return [attention for attention in stage_attentions(head) if isinstance(attention, BlockAttention)]


# --- ops that are right but for one thing

Score = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [t, h, d], head weights [t, h], keys [n, d] -> [t, n]


def selecting(score: Score, *, higher: bool = False) -> Callable[[Ops], Ops]:
    """A `select` that ranks by `score` and is right otherwise; `higher`: of equal scores it takes the higher entry."""

    def select(q: Tensor, head_weights: Tensor, keys: Rows, first: int, ratio: int, k: int) -> Tensor:
        n = keys.shape[0]
        seen = ((torch.arange(first, first + q.shape[0], device=q.device) + 1) // ratio)[:, None]
        scores = score(q.float(), head_weights, decode(keys))
        scores = scores.masked_fill(torch.arange(n, device=q.device) >= seen, float("-inf"))
        order = scores.flip(1) if higher else scores
        best = order.sort(dim=-1, descending=True, stable=True).indices[:, : min(k, n)]
        best = n - 1 - best if higher else best
        best = torch.where(best < seen, best, n).sort(dim=-1).values
        return torch.where(best < n, best, -1).to(torch.int32)

    return lambda ops: ops._replace(select=select)


def weighted(per_head: Tensor, head_weights: Tensor) -> Tensor:
    return (head_weights[:, None] @ per_head)[:, 0]  # [t, h, n] -> [t, n]


def index_scores(q: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
    return weighted((q @ keys.T).relu(), head_weights)


def attending(change: Callable[[Attend], Attend]) -> Callable[[Ops], Ops]:
    """An `attend` that is right, of changed arguments."""
    return lambda ops: ops._replace(attend=lambda *given: ops.attend(*change(Attend(*given))))


def reading(call: Attend, change: Callable[[Tensor], Tensor]) -> Attend:
    """A call whose entries [n, d] are read changed."""
    match call.entries:
        case None:
            return call
        case Slots(rows, _, _) as slots:
            return call._replace(entries=slots._replace(rows=change(decode(rows))))
        case rows:
            return call._replace(entries=change(decode(rows)))


def one_token_in_64(call: Call, residue: int) -> Tensor:
    """Which of a rank's tokens are at such a position: bool [m, 1]."""
    return call.own(call.places(64) == residue)[:, None]


def slots(ids: Tensor) -> Tensor:
    """Numbers of a token's slots, [k]."""
    return torch.arange(ids.shape[1], device=ids.device)


def yarn_of_window_layers(config: ModelConfig) -> Tensor:
    """Frequencies [rope / 2] of SWA layers, if they had YaRN."""
    assert config.rope_scaling is not None, "no YaRN to have"
    return layer_frequencies(replace(config, compress_rope_theta=config.rope_theta), HCA)


def without_rotation(ops: Ops) -> Ops:
    return ops._replace(rotate=lambda x, cos, sin: x)  # noqa: ARG005 -- an op's signature


# --- what a model needs to have


def key_slices(config: ModelConfig) -> str | None:
    if config.index_head_dim % config.index_n_heads:
        return f"index_head_dim {config.index_head_dim} cannot be cut into {config.index_n_heads} heads"
    return None


def yarn(config: ModelConfig) -> str | None:
    return "the model has no YaRN" if config.rope_scaling is None else None


def scored_experts(config: ModelConfig) -> str | None:
    return None if config.num_hash_layers < config.num_hidden_layers else "all layers are hash layers"


def route_scale(config: ModelConfig) -> str | None:
    return "routed_scaling_factor is 1" if config.routed_scaling_factor == 1 else None


def several_experts(config: ModelConfig) -> str | None:
    return "a token has one expert" if config.num_experts_per_tok == 1 else None


def several_routed(config: ModelConfig) -> str | None:
    return "there is one routed expert" if config.n_routed_experts == 1 else None


def most_ranks(experts: int) -> int:
    """How many ranks, up to 8, can have as many whole experts each; 1 where they cannot be shared out so."""
    return max(ranks for ranks in range(1, 9) if experts % ranks == 0)


def ranks_of_experts(config: ModelConfig) -> str | None:
    experts = config.n_routed_experts
    return f"{experts} experts cannot be shared out to 2 to 8 ranks" if most_ranks(experts) == 1 else None


def experts_that_overflow(config: ModelConfig) -> str | None:
    room = CAPACITY * config.num_experts_per_tok >= config.n_routed_experts
    return "every expert has room for all tokens" if room else None


def hash_layers(config: ModelConfig) -> str | None:
    return None if config.num_hash_layers else "the model has no hash layer"


def several_index_heads(config: ModelConfig) -> str | None:
    return "the indexer has one head" if config.index_n_heads == 1 else None


def several_groups(config: ModelConfig) -> str | None:
    return "the model has one output group" if config.o_groups == 1 else None


# The table begins. Rows stand in the order of audits/faults.md.
#
# One row stands for all published faults that no recording tells apart. Not written twice are: wo_a that a kernel
# repacks for others (vllm#56119: output-rows-shuffled); lengths that a compressor was called without (entries-zero); a
# mask padded with ones (entries-masked); routing without softplus (flashinfer#5190: gate-sigmoid); scales of
# activations that are read as if they were contiguous (sglang#31490: fp8-scale-of-the-neighbour).
# Not here: a gate in BF16, which is how transformers computes it, and a softplus that underflows (sglang#34459), which
# takes logits below -16 that no checkpoint here has.


# --- the story


@in_model(
    "indexer-compressor-not-loaded",
    "The weights of the indexer's key compressor stay zero, so all keys are equal.",
    seen=STORY,
    needs=layers(CSA),
)
@each(key_compressors)
def indexer_compressor_not_loaded(compressor: KeyCompressor) -> None:
    for reader in compressor.readers:
        reader.weight = Dense(torch.zeros_like(reader.weight.data))
    compressor.wgate.position_bias = torch.zeros_like(compressor.wgate.position_bias)


@in_model(
    "indexer-returns-none",
    "The indexer returns None, and CSA layers would attend to their window alone.",
    seen=STORY,
    needs=layers(CSA),
)
@instead_of(indexers)
class IndexerReturnsNone(Indexer):
    def __call__(self, x: Input, latent: Tensor, call: Call, cache: LayerCache) -> Tensor:
        super().__call__(x, latent, call, cache)
        return None  # type: ignore[return-value]


@in_caches(
    "keys-four-times-too-wide",
    "The buffer of index keys is four times as wide as a key.",
    seen=STORY,
    needs=layers(CSA),
)
def keys_four_times_too_wide(held: LayerCache) -> None:
    if isinstance(held, CsaCache):
        n, d = held.keys.data.shape
        held.keys.data = torch.zeros(n, 4 * d, dtype=held.ring.data.dtype, device=held.ring.data.device)


@in_ops(
    "per-head-keys",
    "The shared key is cut into one slice per index head, each scored by its own head.",
    seen=STORY,
    needs=all_of(key_slices, layers(CSA)),
)
@selecting
def per_head_keys(q: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
    heads = q.shape[1]
    width = keys.shape[1] // heads
    slices = keys.unflatten(1, (heads, width))  # the one shared key, taken for one key per head
    return weighted(torch.einsum("thd,nhd->thn", q[..., :width], slices).relu(), head_weights)


# --- the indexer


@in_ops("relu-dropped", "Index scores without ReLU.", seen="sglang#33271", needs=layers(CSA))
@selecting
def relu_dropped(q: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
    return weighted(q @ keys.T, head_weights)


@in_ops(
    "query-rotated-key-not",
    "Hadamard rotation on index queries, none on keys.",
    seen="ROCm/ATOM#1507",
    needs=layers(CSA),
)
def query_rotated_key_not(ops: Ops) -> Ops:
    return ops._replace(hadamard=lambda x: ops.hadamard(x) if x.ndim == 3 else x)  # queries [t, h, d], keys [n, d]


@in_ops(
    "key-columns-permuted",
    "Index keys are written in one layout and read in another.",
    seen="vllm#40991, vllm#50576, vllm#52109",
    needs=layers(CSA),
)
@selecting
def key_columns_permuted(q: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
    moved = keys.unflatten(1, (2, -1)).transpose(1, 2).flatten(1)  # halves read as if they were interleaved
    return index_scores(q, head_weights, moved)


@in_ops("keys-lost", "One key in twenty scores -inf, as a NaN byte made them.", seen="vllm#52109", needs=layers(CSA))
@selecting
def keys_lost(q: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
    scores = index_scores(q, head_weights, keys)
    scores[:, 10::20] = -torch.finfo(torch.float32).max
    return scores


@in_ops(
    "entries-wrapped",
    "Entries from the 4096th on are scored by the keys of those 4096 before them.",
    seen="the mistake's kind: a place that is counted in too few bits",
    needs=layers(CSA),
)
@selecting
def entries_wrapped(q: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
    return index_scores(q, head_weights, keys[torch.arange(len(keys), device=keys.device) % 4096])


@in_ops(
    "late-keys-of-a-long-call",
    "In calls of more than 8 tokens entries from the 4096th on are not scored.",
    seen=LONG_WAY,
    needs=layers(CSA),
)
def late_keys_of_a_long_call(ops: Ops) -> Ops:
    def select(q: Tensor, head_weights: Tensor, keys: Rows, *given: Any) -> Tensor:
        return ops.select(q, head_weights, keys if len(q) <= SHORT else first_rows(keys, 4096), *given)

    return ops._replace(select=select)


@in_ops(
    "narrow-keys-scaled-as-the-one-before",
    "Of index keys that are stored in FP8 or FP4, each is scored with the scale of the one before.",
    seen="the mistake's kind: a plane beside the values that is read one row off",
    needs=layers(CSA),
)
def narrow_keys_scaled_as_the_one_before(ops: Ops) -> Ops:
    def select(q: Tensor, head_weights: Tensor, keys: Rows, *given: Any) -> Tensor:
        return ops.select(q, head_weights, _scaled_as_the_one_before(keys), *given)

    return ops._replace(select=select)


def _scaled_as_the_one_before(stored: Rows) -> Rows:
    """Rows with each other's scales, where they have some."""
    if isinstance(stored, Fp8Keys):
        return stored._replace(scale=stored.scale.roll(1, 0))
    if isinstance(stored, Fp4Keys | Fp8Entries):
        return stored._replace(scale=stored.scale.view(torch.uint8).roll(1, 0).view(stored.scale.dtype))
    return stored


@in_ops(
    "index-scores-by-sigmoid",
    "Index scores are sigmoids, and their mean over the heads, without the heads' weights.",
    seen="mlx-lm#1189",
    needs=layers(CSA),
)
@selecting
def index_scores_by_sigmoid(q: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
    del head_weights
    scale: float = keys.shape[1] ** -0.5
    return (q @ keys.T * scale).sigmoid().mean(1)


@in_ops(
    "one-selection-for-all",
    "The query of a call's first token selects for all of its tokens.",
    seen="mlx-lm#1189",
    needs=layers(CSA),
    whole_calls=True,
)
@selecting
def one_selection_for_all(q: Tensor, head_weights: Tensor, keys: Tensor) -> Tensor:
    return index_scores(q[:1], head_weights[:1], keys).expand(len(q), -1)


@in_ops(
    "stale-selections",
    "A call's tokens from the 129th on have the selection of the token 128 before, which their rows still hold.",
    seen="vllm#42810",
    needs=layers(CSA),
    whole_calls=True,
)
def stale_selections(ops: Ops) -> Ops:
    def select(*given: Any) -> Tensor:
        selected: Tensor = ops.select(*given)
        return selected[torch.arange(len(selected), device=selected.device) % BUFFER]

    return ops._replace(select=select)


@in_ops(
    "unfinished-entries-selected",
    "A token selects, and sees, of all entries up to its own position's number: lengths are not divided by the ratio.",
    seen="TensorRT-LLM#13802",
    needs=layers(CSA),
    whole_calls=True,
)
def unfinished_entries_selected(ops: Ops) -> Ops:
    def select(q: Tensor, head_weights: Tensor, keys: Rows, first: int, ratio: int, k: int) -> Tensor:
        del ratio
        return ops.select(q, head_weights, keys, first, 1, k)

    seen = attending(lambda call: call if call.selected is None else call._replace(ratio=1))
    return seen(ops)._replace(select=select)


@in_ops(
    "ties-to-the-higher-entry",
    "Of entries with equal scores the higher is selected.",
    seen="the mistake's kind: a sort from the other end",
    needs=layers(CSA),
)
def ties_to_the_higher_entry(ops: Ops) -> Ops:
    return selecting(index_scores, higher=True)(ops)


@in_model(
    "top-k-halved",
    "A constant beats the config: half its top-k (512 where 1024 is configured).",
    seen="ROCm/ATOM#1591",
    needs=layers(CSA),
)
@each(indexers)
def top_k_halved(indexer: Indexer) -> None:
    indexer.top_k //= 2


# --- rope


@in_model("window-theta", "SWA layers rotate with compress_rope_theta.", seen="transformers#45910", needs=layers(SWA))
def window_theta(model: Transformer) -> None:
    for attention in window_attentions(model):
        attention.rotation.freqs = rope.frequencies(attention.rope_dim, model.config.compress_rope_theta)


@in_model("yarn-on-window-layers", "SWA layers rotate with YaRN.", seen="vllm#54815", needs=all_of(yarn, layers(SWA)))
def yarn_on_window_layers(model: Transformer) -> None:
    for attention in window_attentions(model):
        attention.rotation.freqs = yarn_of_window_layers(model.config)


@in_model(
    "query-theta",
    "CSA and HCA layers rotate queries, window KV and output with rope_theta, entries and the indexer as they should.",
    seen="nano-deepseek-v4 0.2.0",
    needs=layers(CSA, HCA),
)
def query_theta(model: Transformer) -> None:
    for attention in compressed_attentions(model):  # compressor and indexer keep the layer's own rotation
        attention.rotation = Rotation(rope.frequencies(attention.rope_dim, model.config.rope_theta))


@in_model(
    "yarn-dropped",
    "CSA and HCA layers rotate without YaRN.",
    seen="mlx-lm#1189",
    needs=all_of(yarn, layers(CSA, HCA)),
)
def yarn_dropped(model: Transformer) -> None:
    for attention in compressed_attentions(model):
        attention.rotation.freqs = rope.frequencies(attention.rope_dim, model.config.compress_rope_theta)


@in_model(
    "compressed-theta",
    "CSA and HCA layers rotate with a quarter of compress_rope_theta: 40000, where configs say 160000.",
    seen="Primus#949",
    needs=layers(CSA, HCA),
)
def compressed_theta(model: Transformer) -> None:
    quarter = replace(model.config, compress_rope_theta=model.config.compress_rope_theta / 4)
    for attention in compressed_attentions(model):
        attention.rotation.freqs = layer_frequencies(quarter, HCA)


@in_model(
    "rope-frequencies-in-bf16",
    "Frequencies of rotations are rounded to BF16.",
    seen="the mistake's kind: model.to(bfloat16), which takes buffers along",
)
@each(rotations)
def rope_frequencies_in_bf16(rotation: Rotation) -> None:
    rotation.freqs = rotation.freqs.bfloat16().float()


@in_model(
    "rope-frequencies-inverted",
    "Positions are divided by the frequencies of a rotation, as if these were wavelengths.",
    seen="mlx-lm#1189",
)
@each(rotations)
def rope_frequencies_inverted(rotation: Rotation) -> None:
    rotation.freqs = 1 / rotation.freqs


@in_ops("rope-halves", "RoPE pairs the halves instead of neighbours.", seen="Automodel#2039")
def rope_halves(ops: Ops) -> Ops:
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = cos.shape[-1]
        if x.ndim == 3:
            cos, sin = cos[:, None], sin[:, None]
        a, b = x[..., -2 * half :].float().unflatten(-1, (2, half)).unbind(-2)
        rotated = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
        return torch.cat((x[..., : -2 * half], rotated.to(x.dtype)), dim=-1)

    return ops._replace(rotate=rotate)


@in_model(
    "compressed-keys-unrotated",
    "Entries and index keys are stored without rotation.",
    seen="transformers#45910",
    needs=layers(CSA, HCA),
)
@ops_of(compressors)
def compressed_keys_unrotated(ops: Ops) -> Ops:
    return without_rotation(ops)


@in_model("no-inverse-rotation", "The attention's output keeps the rotation of the values.", seen="mlx-lm#1189")
@ops_of(attentions)
def no_inverse_rotation(ops: Ops) -> Ops:
    kv_done = False  # of heads [t, h, d], what is rotated after the window's KV [t, d] is the output

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        nonlocal kv_done
        of_output, kv_done = kv_done and x.ndim == 3, x.ndim == 2
        return x if of_output else ops.rotate(x, cos, sin)

    return ops._replace(rotate=rotate)


@in_ops(
    "mscale-in-softmax",
    "YaRN's attention scaling is applied, where V4's is 1.",
    seen="transformers#45910",
    needs=layers(CSA, HCA),
)
@attending
def mscale_in_softmax(call: Attend) -> Attend:
    mscale = 0.1 * math.log(16) + 1  # of a factor of 16; logits are scaled by it twice
    return call if call.entries is None else call._replace(q=call.q * mscale**2)  # layers with YaRN have entries


@in_ops("rope-on-first-dims", "RoPE turns the first dims of a head, not the last.", seen=PORTING)
def rope_on_first_dims(ops: Ops) -> Ops:
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        width = 2 * cos.shape[-1]
        rotated: Tensor = ops.rotate(x.roll(-width, -1), cos, sin)
        return rotated.roll(width, -1)

    return ops._replace(rotate=rotate)


class _FromTheirEnd(Rotation):
    def at(self, first: int | Tensor, count: int, step: int = 1) -> tuple[Tensor, Tensor]:
        return super().at(first + step - 1, count, step)


@in_model(
    "entries-rotated-at-their-end",
    "Entries and index keys are rotated by their window's last position, not its first.",
    seen=PORTING,
    needs=layers(CSA, HCA),
)
@each(compressors)
def entries_rotated_at_their_end(compressor: Compressor) -> None:
    compressor.rotation = copy.copy(compressor.rotation)  # the layer's own stays as it is
    become(compressor.rotation, _FromTheirEnd)


class _AtTheirNumber(Rotation):
    def at(self, first: int | Tensor, count: int, step: int = 1) -> tuple[Tensor, Tensor]:
        return super().at(first // step, count)


@in_model(
    "entries-rotated-at-their-number",
    "Entries and index keys are rotated by their number, not by their window's first position.",
    seen="Primus#928",
    needs=layers(CSA, HCA),
)
@each(compressors)
def entries_rotated_at_their_number(compressor: Compressor) -> None:
    compressor.rotation = copy.copy(compressor.rotation)  # the layer's own stays as it is
    become(compressor.rotation, _AtTheirNumber)


@in_model("index-queries-unrotated", "Index queries go without their rotation.", seen=PORTING, needs=layers(CSA))
@ops_of(indexers)
def index_queries_unrotated(ops: Ops) -> Ops:
    return without_rotation(ops)


# --- norms


@in_model("norm-weight-plus-one", "The weights of a layer's norms are taken as what is added to 1.", seen=PORTING)
@each(blocks)
def norm_weight_plus_one(block: Block) -> None:
    block.attention_norm = block.attention_norm + 1  # as Gemma stores them
    block.experts_norm = block.experts_norm + 1


@in_model("layer-norms-swapped", "The norms before attention and experts are exchanged.", seen=PORTING)
@each(blocks)
def layer_norms_swapped(block: Block) -> None:
    block.attention_norm, block.experts_norm = block.experts_norm, block.attention_norm


@in_model("kv-norm-weight-dropped", "KV is normed without its weights.", seen=PORTING)
@each(attentions)
def kv_norm_weight_dropped(attention: Attention) -> None:
    attention.kv_norm = torch.ones_like(attention.kv_norm)


@in_model("kv-normed-twice", "KV is normed twice, each time with its weights.", seen=TWICE)
@ops_of(attentions)
def kv_normed_twice(ops: Ops) -> Ops:
    def norm_rotate(x: Tensor, weight: Tensor | None, eps: float, *given: Any) -> Tensor:
        return ops.norm_rotate(x if weight is None else ops.rms_norm(x, weight, eps), weight, eps, *given)

    return ops._replace(norm_rotate=norm_rotate)


@in_model("experts-normed-twice", "The experts' input is normed twice, each time with its weights.", seen="vllm#42810")
@instead_of(readings_of_experts)
class ExpertsNormedTwice(HyperConnection):
    def read(self, streams: Tensor, norm: Tensor) -> Read:
        read = super().read(streams, norm)
        return read._replace(x=self.ops.rms_norm(read.x, norm, self.norm_eps))


# --- between a layer's input and its attention


@in_model("query-norm-skipped", "Queries go without their norm over each head.", seen=WIRING)
@ops_of(attentions)
def query_norm_skipped(ops: Ops) -> Ops:
    norm = ops.rms_norm  # that of the queries has no weights
    return ops._replace(rms_norm=lambda x, weight, eps: x if weight is None else norm(x, weight, eps))


@in_model("query-normed-to-length-1", "Each head's query is normed to length 1 instead of an RMS of 1.", seen=WIRING)
@ops_of(attentions)
def query_normed_to_length_1(ops: Ops) -> Ops:
    def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        return functional.normalize(x, dim=-1) if weight is None else ops.rms_norm(x, weight, eps)

    return ops._replace(rms_norm=rms_norm)


@in_model(
    "first-projections-not-loaded",
    "The matrices wq_a and wkv stay zero, and with them queries and window KV.",
    seen="sglang#33245",
)
@each(attentions)
def first_projections_not_loaded(attention: Attention) -> None:
    for reader in (attention.wq_a, attention.wkv):
        held = reader.weight.data
        reader.weight = Dense(torch.zeros(reader.weight.shape, dtype=torch.bfloat16, device=held.device))


@in_model(
    "pooling-gate-halved",
    "The gate of the compressors is half of what it should be.",
    seen=WIRING,
    needs=layers(CSA, HCA),
)
@each(compressors)
def pooling_gate_halved(compressor: Compressor) -> None:
    compressor.wgate.weight = Dense(compressor.wgate.weight.data / 2)  # its position bias stays


@in_model(
    "position-bias-shifted",
    "Compressors give each token of a window the position bias of the one before.",
    seen=WIRING,
    needs=layers(CSA, HCA),
)
@each(compressors)
def position_bias_shifted(compressor: Compressor) -> None:
    compressor.wgate.position_bias = compressor.wgate.position_bias.roll(1, 0)


@in_model("pooling-without-gate", "Compressors take the mean of a window.", seen=WIRING, needs=layers(CSA, HCA))
@ops_of(compressors)
def pooling_without_gate(ops: Ops) -> Ops:
    def pool(kv: Tensor, gate: Tensor, previous_kv: Tensor | None, previous_gate: Tensor | None) -> Tensor:
        if previous_kv is not None and previous_gate is not None:
            kv, gate = torch.cat((previous_kv, kv), dim=1), torch.cat((previous_gate, gate), dim=1)
        there = torch.isfinite(gate).to(kv.dtype)
        return (kv * there).sum(1) / there.sum(1)

    return ops._replace(pool=pool)


@in_model(
    "entries-zero",
    "All entries are zero, and are attended to as such.",
    seen="GDzhu01/vllm-ascend-deepseekv4#76, GDzhu01/vllm-ascend-deepseekv4#77",
    needs=layers(CSA, HCA),
)
@ops_of(entry_compressors)
def entries_zero(ops: Ops) -> Ops:
    return ops._replace(pool=lambda *given: torch.zeros_like(ops.pool(*given)))


@in_model(
    "series-swapped",
    "CSA compressors exchange the two series of a token, next and own.",
    seen=WIRING,
    needs=layers(CSA),
)
@each(compressors)
def series_swapped(compressor: Compressor) -> None:
    width, gate = len(compressor.norm), compressor.wgate
    if gate.position_bias.shape[1] > width:
        for reader in compressor.readers:
            reader.weight = Dense(reader.weight.data.roll(width, 0))
        gate.position_bias = gate.position_bias.roll(width, 1)


@in_model(
    "index-weights-without-sign",
    "The weights of the index heads lose their sign.",
    seen=WIRING,
    needs=layers(CSA),
)
@instead_of(indexers)
class IndexWeightsWithoutSign(Indexer):
    def head_weights(self, x: Input) -> Tensor:
        return super().head_weights(x).abs()  # a head can then only add to a score


@in_model(
    "index-weights-permuted",
    "Each index head has the weight of the one before.",
    seen=WIRING,
    needs=all_of(several_index_heads, layers(CSA)),
)
@each(indexers)
def index_weights_permuted(indexer: Indexer) -> None:
    indexer.weights_proj.weight = Dense(indexer.weights_proj.weight.data.roll(1, 0))


@in_model(
    "leak-of-one-entry-in-decode",
    "In calls of one token, HCA layers see an entry more than there are finished blocks.",
    seen="an off-by-one",
    needs=layers(HCA),
)
@instead_of(hca_attentions)
class LeakOfOneEntryInDecode(HcaAttention):
    def beyond_window(self, x: Input, latent: Tensor, call: Call, cache: LayerCache) -> Beyond:
        beyond = super().beyond_window(x, latent, call, cache)
        assert isinstance(cache, HcaCache), type(cache)
        if call.count > 1 or not isinstance(cache.entries, Entries):
            return beyond
        return beyond._replace(entries=Slots(cache.entries.data, None, -1))  # the row that the open window will fill


@in_model(
    "output-groups-permuted",
    "Each group of heads is projected by the next group's rows of wo_a.",
    seen=WIRING,
    needs=several_groups,
)
@ops_of(group_projections)
def output_groups_permuted(ops: Ops) -> Ops:
    def grouped_linear(x: Tensor, weight: Weight, groups: int) -> Tensor:
        return ops.grouped_linear(x.roll(1, 1), weight, groups).roll(-1, 1)

    return ops._replace(grouped_linear=grouped_linear)


@in_model(
    "output-rows-shuffled",
    "Within a group the rows of wo_a are in another order, as a kernel's layout has them.",
    seen="a skill of ROCm/ATOM's for debugging",
)
@ops_of(group_projections)
def output_rows_shuffled(ops: Ops) -> Ops:
    def grouped_linear(*given: Any) -> Tensor:
        low = ops.grouped_linear(*given)
        shuffled: Tensor = low.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        return shuffled

    return ops._replace(grouped_linear=grouped_linear)


# --- mHC


class Mix(NamedTuple):
    """What `hyper_weights` returns."""

    pre: Tensor  # [t, s]
    post: Tensor  # [t, s]
    comb: Tensor  # [t, s, s]


def mixing(change: Callable[[Mix], Mix]) -> Callable[[Ops], Ops]:
    """A `hyper_weights` that is right, its result changed."""
    return lambda ops: ops._replace(hyper_weights=lambda *given: change(Mix(*ops.hyper_weights(*given))))


@in_ops("comb-transposed", "Streams are mixed by the transposed matrix.", seen="Automodel#2039")
def comb_transposed(ops: Ops) -> Ops:
    return ops._replace(expand=lambda y, streams, post, comb: ops.expand(y, streams, post, comb.transpose(1, 2)))


@in_ops("comb-made-transposed", "The matrix that mixes the streams is computed transposed.", seen="Automodel#2039")
@mixing
def comb_made_transposed(mix: Mix) -> Mix:
    return mix._replace(comb=mix.comb.mT.contiguous())


def combining(sinkhorn: Callable[[Tensor, int, float], Tensor]) -> Callable[[Ops], Ops]:
    """A `hyper_weights` that is right but for how comb is made: of logits [t, s, s], the iterations and eps."""

    def faulty(ops: Ops) -> Ops:
        def hyper_weights(
            streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int, eps: float, norm_eps: float
        ) -> tuple[Tensor, Tensor, Tensor]:
            pre, post, _ = ops.hyper_weights(streams, fn, scale, base, iterations, eps, norm_eps)
            s = streams.shape[1]
            flat = streams.flatten(1).float()
            mixes = (flat @ fn[2 * s :].T) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
            return pre, post, sinkhorn((mixes * scale[2] + base[2 * s :]).unflatten(-1, (s, s)), iterations, eps)

        return ops._replace(hyper_weights=hyper_weights)

    return faulty


@in_ops("row-first-sinkhorn", "Sinkhorn ends on rows instead of columns.", seen="Automodel#2039")
@combining
def row_first_sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    comb = logits.softmax(-2) + eps
    for _ in range(iterations):
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
    return comb


@in_ops(
    "sinkhorn-of-sigmoids",
    "Sinkhorn starts from the sigmoids of its logits, not from their exponentials.",
    seen="nano-deepseek-v4 0.2.0",
)
@combining
def sinkhorn_of_sigmoids(logits: Tensor, iterations: int, eps: float) -> Tensor:
    comb = logits.sigmoid() + eps
    for _ in range(iterations):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


@in_model("one-sinkhorn-iteration", "Sinkhorn stops after one iteration.", seen="a constant beats the config")
@each(blocks)
def one_sinkhorn_iteration(block: Block) -> None:
    block.attention_streams.iterations = block.experts_streams.iterations = 1


@in_ops("hyper-head-mean", "The streams behind the last layer are read by their mean.", seen=PORTING)
def hyper_head_mean(ops: Ops) -> Ops:
    def head_weights(streams: Tensor, *given: Any) -> Tensor:
        return torch.full_like(ops.head_weights(streams, *given), 1 / streams.shape[1])

    return ops._replace(head_weights=head_weights)


@in_ops("post-not-doubled", "post = sigmoid instead of 2 sigmoid.", seen="Automodel#2039")
@mixing
def post_not_doubled(mix: Mix) -> Mix:
    return mix._replace(post=mix.post / 2)


@in_ops("eps-tenfold", "Norms have ten times their eps.", seen=PORTING)
def eps_tenfold(ops: Ops) -> Ops:
    def tenfold(op: Callable[..., Any]) -> Callable[..., Any]:
        def norming(*given: Any) -> Any:
            *others, eps = given
            return op(*others, 10 * eps)

        return norming

    return ops._replace(
        rms_norm=tenfold(ops.rms_norm),
        hyper_weights=tenfold(ops.hyper_weights),
        head_weights=tenfold(ops.head_weights),
    )


@in_ops(
    "one-token-post-off",
    "In calls of one token, mHC writes 1 % too much to the streams.",
    seen="the mistake's kind: a fast path of decode",
)
@mixing
def one_token_post_off(mix: Mix) -> Mix:
    return mix._replace(post=mix.post * 1.01) if len(mix.post) == 1 else mix


@in_ops(
    "late-mixing-of-a-long-call",
    "From the 129th token of a call on, mHC takes the weights of the token 128 before.",
    seen="vllm#42810",
    whole_calls=True,
)
@mixing
def late_mixing_of_a_long_call(mix: Mix) -> Mix:
    row = torch.arange(len(mix.pre), device=mix.pre.device) % BUFFER
    return Mix(mix.pre[row], mix.post[row], mix.comb[row])


@in_ops("hyper-head-without-eps", "The streams behind the last layer are read without the eps of mHC.", seen=PORTING)
def hyper_head_without_eps(ops: Ops) -> Ops:
    def head_weights(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, eps: float, norm_eps: float) -> Tensor:
        return ops.head_weights(streams, fn, scale, base, 0 * eps, norm_eps)

    return ops._replace(head_weights=head_weights)


# --- what a token sees


@in_ops(
    "future-block-visible",
    "A token of an HCA layer sees blocks that are not finished.",
    seen="transformers#45820, tpu-inference#3536",
    needs=layers(HCA),
)
@attending
def future_block_visible(call: Attend) -> Attend:
    dense = call.entries is not None and call.selected is None  # entries of later blocks are there in the same call
    return call._replace(ratio=max(1, call.ratio // 2)) if dense else call


def _forget(frontier: Frontier) -> None:
    frontier.kv.zero_()
    frontier.gate.zero_()
    if frontier.overlap:
        frontier.gate[:, : frontier.width] = -math.inf


@in_model(
    "frontier-lost",
    "Compressors begin every call with an empty window.",
    seen="llama.cpp#26471, vllm#41834",
    needs=layers(CSA, HCA),
)
@instead_of(entry_compressors)
class FrontierOfEntriesLost(EntryCompressor):
    def __call__(self, x: Input, call: Call, frontier: Frontier, rows: RowCache[Rows | Slots]) -> None:
        _forget(frontier)
        super().__call__(x, call, frontier, rows)


@in_model.too("frontier-lost")
@instead_of(key_compressors)
class FrontierOfKeysLost(KeyCompressor):
    def __call__(self, x: Input, call: Call, frontier: Frontier, rows: RowCache[Rows | Slots]) -> None:
        _forget(frontier)
        super().__call__(x, call, frontier, rows)


@in_ops("ring-off-by-one", "The window is read one row off.", seen="an off-by-one")
@attending
def ring_off_by_one(call: Attend) -> Attend:
    return call._replace(ring=call.ring.roll(1, 0))  # position p reads the KV of p - 1


@in_caches("ring-written-off-by-one", "The window is written one row off.", seen="an off-by-one")
@instead_of(rings)
class RingWrittenOffByOne(WindowRing):
    def write(self, first: int, kv: Tensor) -> None:
        super().write(first + 1, kv)


@in_ops(
    "entries-off-by-one",
    "Attention gathers the entry beside the right one.",
    seen="vllm#47783",
    needs=layers(CSA, HCA),
)
@attending
def entries_off_by_one(call: Attend) -> Attend:
    return reading(call, lambda rows: rows.roll(1, 0))


@in_ops(
    "entries-masked",
    "No token sees an entry: the mask hides them all.",
    seen="mlx-lm#1189, Blaizzy/mlx-lm#14",
    needs=layers(CSA, HCA),
)
@attending
def entries_masked(call: Attend) -> Attend:
    return call._replace(entries=None, ratio=0, selected=None)


@in_ops(
    "cache-rotated-on-write",
    "Window KV and entries are kept in a Hadamard rotation, and read by queries that are not.",
    seen="llama.cpp#25202, llama.cpp#25402",
)
def cache_rotated_on_write(ops: Ops) -> Ops:
    rotated = attending(lambda call: reading(call._replace(ring=ops.hadamard(call.ring)), ops.hadamard))
    return rotated(ops)


@in_ops(
    "first-tile-again",
    "Attention gathers 256 of the selected entries, and the same again in the place of those after them.",
    seen="the mistake's kind: a loop over tiles that begins each at the first",
    needs=layers(CSA),
)
@attending
def first_tile_again(call: Attend) -> Attend:
    if call.selected is None:
        return call
    return call._replace(selected=call.selected[:, torch.arange(call.selected.shape[1]) % 256])


@in_ops(
    "selected-wrapped",
    "Attention reads the entries from the 4096th on in the place of those 4096 before them.",
    seen="the mistake's kind: a place that is counted in too few bits",
    needs=layers(CSA),
)
@attending
def selected_wrapped(call: Attend) -> Attend:
    return call if call.selected is None else call._replace(selected=call.selected % 4096)


@in_ops(
    "entries-of-the-first-tile-alone",
    "An HCA layer reads 512 entries, and none of those after them.",
    seen="the mistake's kind: a loop over tiles that ends after the first",
    needs=layers(HCA),
)
@attending
def entries_of_the_first_tile_alone(call: Attend) -> Attend:
    if call.selected is not None or call.entries is None:
        return call
    return call._replace(selected=torch.arange(512, dtype=torch.int32, device=call.q.device).expand(len(call.q), 512))


@in_ops(
    "late-selections-of-a-long-call",
    "In calls of more than 8 tokens attention gathers 256 of the selected entries, and none of those after them.",
    seen=LONG_WAY,
    needs=layers(CSA),
)
@attending
def late_selections_of_a_long_call(call: Attend) -> Attend:
    if call.selected is None or len(call.q) <= SHORT:
        return call
    return call._replace(selected=call.selected[:, :256])


@in_ops(
    "late-entries-of-a-long-call",
    "In calls of more than 8 tokens an HCA layer reads 4096 entries, and none of those after them.",
    seen=LONG_WAY,
    needs=layers(HCA),
)
@attending
def late_entries_of_a_long_call(call: Attend) -> Attend:
    if call.selected is not None or call.entries is None or len(call.q) <= SHORT:
        return call
    return call._replace(selected=torch.arange(4096, dtype=torch.int32, device=call.q.device).expand(len(call.q), 4096))


@in_ops(
    "gathered-entries-scaled-as-the-one-before",
    "Of entries that are stored in FP8, those that are selected are read with the scale of the one before.",
    seen="the mistake's kind: a plane beside the values that is read one row off",
    needs=layers(CSA),
)
@attending
def gathered_entries_scaled_as_the_one_before(call: Attend) -> Attend:
    if call.selected is None or not isinstance(call.entries, Fp8Entries):
        return call
    return call._replace(entries=_scaled_as_the_one_before(call.entries))


@in_ops(
    "late-rows-of-a-long-call",
    "From the 300th token of a call on, what attention gives is 5 % too large.",
    seen="the mistake's kind: a launch whose second grid is another kernel's",
)
def late_rows_of_a_long_call(ops: Ops) -> Ops:
    def attend(*given: Any) -> Tensor:
        out = ops.attend(*given)
        return torch.cat((out[:300], out[300:] * 1.05))

    return ops._replace(attend=attend)


@in_model(
    "third-entry-of-a-call-again",
    "Of the entries that a call of an HCA layer completes, the third is the second again.",
    seen="the mistake's kind: a loop over tiles that begins each at the first",
    needs=layers(HCA),
)
@ops_of(hca_compressors)
def third_entry_of_a_call_again(ops: Ops) -> Ops:
    def pool(kv: Tensor, gate: Tensor, previous_kv: Tensor | None, previous_gate: Tensor | None) -> Tensor:
        pooled = ops.pool(kv, gate, previous_kv, previous_gate)
        return torch.cat((pooled[:2], pooled[1:2], pooled[3:])) if len(pooled) > 2 else pooled

    return ops._replace(pool=pool)


@in_ops("sink-dropped", "The softmax has no sink.", seen=PORTING)
@attending
def sink_dropped(call: Attend) -> Attend:
    return call._replace(sink=torch.full_like(call.sink, -1e30))


@in_model("window-one-short", "The window is one token short.", seen="an off-by-one")
@each(attentions)
def window_one_short(attention: Attention) -> None:
    attention.window -= 1


@in_model(
    "softmax-scale-without-rope-dims",
    "Scores are scaled by the root of the dims that are not rotated.",
    seen=PORTING,
)
@each(attentions)
def softmax_scale_without_rope_dims(attention: Attention) -> None:
    _scale_by(attention, attention.head_dim - attention.rope_dim)


def _scale_by(attention: Attention, dims: int) -> None:
    """Scale scores by the root of so many dims."""
    factor = (attention.head_dim / dims) ** 0.5
    scaled = attending(lambda call: call._replace(q=call.q * factor))
    attention.arithmetic = attention.arithmetic._replace(ops=scaled(attention.arithmetic.ops))


@in_model(
    "softmax-scale-with-rope-dims-added",
    "Scores are scaled by the root of a head's dims and its rotated dims, as MLA counts them.",
    seen=PORTING,
)
@each(attentions)
def softmax_scale_with_rope_dims_added(attention: Attention) -> None:
    _scale_by(attention, attention.head_dim + attention.rope_dim)


@in_ops("sink-in-numerator", "The sink is given a value.", seen="a misread equation")
def sink_in_numerator(ops: Ops) -> Ops:
    """The value is the token's own KV."""

    def attend(*given: Any) -> Tensor:
        call = Attend(*given)
        call = call._replace(q=call.q.float())
        out = ops.attend(*call)
        bare = ops.attend(*call._replace(sink=torch.full_like(call.sink, -math.inf)))  # out = bare * (1 - sink's mass)
        mass = 1 - (out * bare).sum(-1, keepdim=True) / bare.square().sum(-1, keepdim=True).clamp(min=1e-30)
        position = torch.arange(call.first, call.first + len(call.q), device=call.q.device)
        own = call.ring[position % len(call.ring)].float()
        wrong: Tensor = (out + mass * own[:, None]).to(given[0].dtype)
        return wrong

    return ops._replace(attend=attend)


@in_ops("rank-0-sinks", "All ranks use rank 0's sinks.", seen="sglang#35092")
@attending
def rank_0_sinks(call: Attend) -> Attend:
    half = len(call.sink) // 2
    return call._replace(sink=torch.cat((call.sink[:half], call.sink[:half], call.sink[2 * half :])))


# --- experts


@in_ops("gate-sigmoid", "Experts are scored by sigmoid, as in V3.", seen=PORTING)
def gate_sigmoid(ops: Ops) -> Ops:
    def as_v3(logits: Tensor) -> Tensor:  # the logits whose sqrt(softplus) is the sigmoid
        return torch.expm1(torch.sigmoid(logits.double()).square()).log().float()

    return ops._replace(
        route=lambda logits, bias, k, scale: ops.route(as_v3(logits), bias, k, scale),
        route_weights=lambda logits, ids, scale: ops.route_weights(as_v3(logits), ids, scale),
    )


@in_ops("weights-not-normed", "Experts' weights are not divided by their sum.", seen=PORTING)
def weights_not_normed(ops: Ops) -> Ops:
    def route(logits: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
        ids, _ = ops.route(logits, bias, k, scale)
        return ids, route_weights(logits, ids, scale)

    def route_weights(logits: Tensor, ids: Tensor, scale: float) -> Tensor:
        return scale * functional.softplus(logits).sqrt().gather(1, ids)

    return ops._replace(route=route, route_weights=route_weights)


@in_model("route-scale-dropped", "Experts' weights go without routed_scaling_factor.", seen=PORTING, needs=route_scale)
@each(mixtures)
def route_scale_dropped(mixture: MoE) -> None:
    mixture.gate.scale = 1.0


@in_ops(
    "selection-bias-dropped",
    "Experts are chosen without the selection bias.",
    seen=PORTING,
    needs=scored_experts,
)
def selection_bias_dropped(ops: Ops) -> Ops:
    return ops._replace(route=lambda logits, bias, k, scale: ops.route(logits, torch.zeros_like(bias), k, scale))


@in_model("gate-in-4-bits", "The gate's matrix is rounded to FP4 (E2M1) by 32 columns.", seen="Atlas#186")
@each(mixtures)
def gate_in_4_bits(mixture: MoE) -> None:
    held = mixture.gate.weight.data
    mixture.gate.weight = Dense(mixture.arithmetic.ops.simulate_fp4(held, 32))


@in_model(
    "first-matrix-of-another-expert",
    "The first expert has the second one's w1.",
    seen="the mistake's kind: a name of a weight that is mapped wrongly",
    needs=several_routed,
)
@each(mixtures)
def first_matrix_of_another_expert(mixture: MoE) -> None:
    mixture.experts[0].w1 = mixture.experts[1].w1
    mixture.stack()


@in_model("up-scaled-as-gate", "Routed experts read w3 with the scales of w1.", seen="vllm#54974, vllm#55073")
@each(mixtures)
def up_scaled_as_gate(mixture: MoE) -> None:
    """Of NVFP4 it is the scale of the whole matrix, as it was there."""
    for expert in mixture.experts:
        match expert.w3, expert.w1:
            case NvFp4() as up, NvFp4() as gate:
                expert.w3 = up._replace(global_scale=gate.global_scale)
            case Fp4() | Fp8() as up, Fp4() | Fp8() as gate:
                expert.w3 = up._replace(scale=gate.scale)
    mixture.stack()


@in_ops("gate-up-swapped", "Gate and up of the experts are exchanged.", seen=PORTING)
def gate_up_swapped(ops: Ops) -> Ops:
    return ops._replace(swiglu=lambda gate, up, limit, weight: ops.swiglu(up, gate, limit, weight))


@in_model("shared-expert-dropped", "The shared expert is left out.", seen=PORTING)
@instead_of(shared_experts)
class SharedExpertDropped(Expert):
    def down(self, a: Tensor, added: Tensor | None = None) -> Tensor:
        assert added is not None, "a shared expert is added to the others"
        return added.to(a.dtype)


@in_model("routed-clamp-dropped", "Routed experts do not clamp.", seen="sglang#23776, transformers#46018")
@each(routed_experts)
def routed_clamp_dropped(expert: Expert) -> None:
    expert.limit = math.inf


@in_model("shared-clamp-dropped", "The shared expert does not clamp.", seen="vllm-ascend#14363")
@each(shared_experts)
def shared_clamp_dropped(expert: Expert) -> None:
    expert.limit = math.inf


@in_ops("bias-in-weights", "The selection bias enters the experts' weights.", seen="a misread equation")
def bias_in_weights(ops: Ops) -> Ops:
    def route(logits: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
        ids, _ = ops.route(logits, bias, k, scale)
        chosen = (functional.softplus(logits).sqrt() + bias).gather(1, ids)
        return ids, scale * chosen / chosen.sum(-1, keepdim=True)

    return ops._replace(route=route)


@in_model(
    "hash-table-zeroed",
    "The table of hash routing is all zeros.",
    seen="vllm-ascend#9423, sglang#29040",
    needs=hash_layers,
)
@each(mixtures)
def hash_table_zeroed(mixture: MoE) -> None:
    if isinstance(mixture.gate, HashGate):
        mixture.gate.table = torch.zeros_like(mixture.gate.table)


@in_model("shared-expert-twice", "A replicated output is summed as if it were partial.", seen="sglang#31699, exo#1996")
@instead_of(shared_experts)
class SharedExpertTwice(Expert):
    """Every rank has it: it is summed over two."""

    def down(self, a: Tensor, added: Tensor | None = None) -> Tensor:
        assert added is not None, "a shared expert is added to the others"
        return (added + 2 * super().down(a).float()).to(a.dtype)


@in_model(
    "experts-wrong-for-some-tokens",
    "The experts of one token in 64 have each other's weights.",
    seen="the mistake's kind: a tile of a grouped kernel",
    needs=several_experts,
)
@instead_of(mixtures)
class ExpertsWrongForSomeTokens(MoE):
    def output(self, x: Tensor, ids: Tensor, weights: Tensor, call: Call) -> Tensor:
        wrong = one_token_in_64(call, 32)
        return super().output(x, ids, torch.where(wrong, weights.roll(1, 1), weights), call)


@in_model(
    "experts-of-the-next-rank",
    "Experts lie whole on ranks: one token in 64 reaches the rank behind the right one, whose experts of the same place"
    " run it.",
    seen="sglang#27635, xtuner#2053",
    needs=ranks_of_experts,
)
@instead_of(mixtures)
class ExpertsOfTheNextRank(MoE):
    def output(self, x: Tensor, ids: Tensor, weights: Tensor, call: Call) -> Tensor:
        return super().output(x, torch.where(one_token_in_64(call, 8), _a_rank_behind(self, ids), ids), weights, call)


def _a_rank_behind(mixture: MoE, ids: Tensor) -> Tensor:
    """Experts of the same place on the rank behind that of these."""
    count = len(mixture.experts)
    return (ids + count // most_ranks(count)) % count


@in_model(
    "expert-ids-off-by-a-rank",
    "Every token is run by experts of the same place on the rank behind the right one.",
    seen="the mistake's kind: an offset of a rank that is added twice",
    needs=ranks_of_experts,
)
@instead_of(mixtures)
class ExpertIdsOffByARank(MoE):
    def output(self, x: Tensor, ids: Tensor, weights: Tensor, call: Call) -> Tensor:
        return super().output(x, _a_rank_behind(self, ids), weights, call)


@in_model(
    "weights-of-another-slot",
    "Experts' outputs come back sorted by expert, and are weighted in the gate's order.",
    seen="the mistake's kind: a permutation that outputs take and weights do not",
    needs=several_experts,
)
@instead_of(mixtures)
class WeightsOfAnotherSlot(MoE):
    def output(self, x: Tensor, ids: Tensor, weights: Tensor, call: Call) -> Tensor:
        sorted_place = ids.argsort(1).argsort(1)  # of each slot
        return super().output(x, ids, weights.gather(1, sorted_place), call)


@in_model(
    "pair-lost",
    "Of one token in 64 the output of its last expert is lost on the way.",
    seen="ROCm/ATOM#887, flashinfer#3547",
)
@instead_of(mixtures)
class PairLost(MoE):
    def output(self, x: Tensor, ids: Tensor, weights: Tensor, call: Call) -> Tensor:
        lost = one_token_in_64(call, 24) & (slots(ids) == ids.shape[1] - 1)
        return super().output(x, ids, weights.masked_fill(lost, 0), call)


@in_model(
    "pairs-beyond-capacity-lost",
    "An expert takes its first pairs of a call, up to 1.25 times an even share of them; the others are lost.",
    seen="vllm-ascend#15640",
    needs=experts_that_overflow,
    whole_calls=True,
)
@instead_of(mixtures)
class PairsBeyondCapacityLost(MoE):
    def output(self, x: Tensor, ids: Tensor, weights: Tensor, call: Call) -> Tensor:
        given, experts = call.whole(ids), len(self.experts)
        chosen = functional.one_hot(given.flatten(), experts)  # [t * k, experts]
        number = chosen.cumsum(0).gather(1, given.flatten()[:, None]).view_as(given)  # of a pair, of its expert's
        beyond = number > math.ceil(CAPACITY * given.numel() / experts)
        return super().output(x, ids, weights.masked_fill(call.own(beyond), 0), call)


@in_model(
    "pair-counted-twice",
    "Of one token in 64 the output of its first expert is added twice, as two ranks have that expert.",
    seen="sglang#32962",
)
@instead_of(mixtures)
class PairCountedTwice(MoE):
    def output(self, x: Tensor, ids: Tensor, weights: Tensor, call: Call) -> Tensor:
        twice = one_token_in_64(call, 48) & (slots(ids) == 0)
        return super().output(x, ids, torch.where(twice, 2 * weights, weights), call)


@in_ops(
    "experts-of-few-tokens-unrounded",
    "Where one op runs all experts of up to 8 tokens, it does not round their inputs.",
    seen="the mistake's kind: a fast path of decode",
)
def experts_of_few_tokens_unrounded(ops: Ops) -> Ops:
    if isinstance(ops.experts, Experts):  # one after the other, by ops that are right
        return ops

    def experts(x: Tensor, *given: Any, deployed: bool, **how: Any) -> Tensor:
        return ops.experts(x, *given, deployed=deployed and len(x) > SHORT, **how)

    return ops._replace(experts=experts)


# --- behind the last layer


@in_model(
    "first-logits-of-a-long-call",
    "Of the logits of more than 8 tokens, the first token's are told for ids one off.",
    seen=LONG_WAY,
)
def first_logits_of_a_long_call(model: Transformer) -> None:
    class Changed(Transformer):
        def logits(self, hidden: Tensor) -> Tensor:
            told = super().logits(hidden)
            return told if len(told) <= SHORT else torch.cat((told[:1].roll(1, 1), told[1:]))

    become(model, Changed)


# --- weights and numbers


def every_matrix(change: Callable[[Fp4 | Fp8], Weight]) -> Callable[[Transformer], None]:
    """Change each quantised matrix of attention, indexer and experts."""

    def inject(model: Transformer) -> None:
        for holder in (*attentions(model), *routed_experts(model), *shared_experts(model), *indexers(model)):
            for name, value in vars(holder).items():
                if isinstance(value, Linear | OutputLinear | Reader) and isinstance(value.weight, Fp4 | Fp8):
                    value.weight = change(value.weight)
                elif isinstance(value, Fp4 | Fp8):
                    setattr(holder, name, change(value))
        for mixture in mixtures(model):
            mixture.stack()

    return inject


@in_model("fp4-nibbles-swapped", "FP4 is unpacked high nibble first.", seen="miles#2044")
@every_matrix
def fp4_nibbles_swapped(weight: Fp4 | Fp8) -> Weight:
    if not isinstance(weight, Fp4):
        return weight
    packed = weight.data.view(torch.uint8)
    return weight._replace(data=((packed >> 4) | (packed << 4)).view(weight.data.dtype))


@in_model("scales-shifted", "Every block uses the scale of the one before.", seen="sglang#39193")
@every_matrix
def scales_shifted(weight: Fp4 | Fp8) -> Weight:
    raw = weight.scale.view(torch.uint8) if weight.scale.element_size() == 1 else weight.scale
    return weight._replace(scale=raw.flatten().roll(1).view(raw.shape).view(weight.scale.dtype))


@in_model(
    "scales-read-as-e4m3",
    "Scales of FP8 matrices are read as E4M3 numbers, where they are E8M0.",
    seen="the mistake's kind: a dtype that is as wide as the right one",
)
@every_matrix
def scales_read_as_e4m3(weight: Fp4 | Fp8) -> Weight:
    if not isinstance(weight, Fp8) or weight.scale.dtype is not torch.float8_e8m0fnu:
        return weight
    return weight._replace(scale=weight.scale.view(torch.float8_e4m3fn).float())


@in_model("parameter-uninitialised", "A norm of the last layer is not loaded.", seen="mlx-vlm#2277, transformers#46129")
def parameter_uninitialised(model: Transformer) -> None:
    block = model.blocks[-1]
    noise = torch.rand(block.experts_norm.shape, generator=torch.Generator().manual_seed(0))  # what its memory had
    block.experts_norm = noise.to(block.experts_norm)


Scales = Callable[[Tensor], tuple[Tensor, Tensor]]  # amax / 448 -> scale that codes are made with, and are read with


def rounding(scales: Scales) -> Callable[[Ops], Ops]:
    """A `simulate_fp8` that is right but for its scales."""

    def simulate_fp8(x: Tensor, group: int) -> Tensor:
        tiles = x.float().unflatten(-1, (-1, group))
        made, read = scales((tiles.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-12))
        rounded: Tensor = (tiles / made).clamp(-448, 448).to(torch.float8_e4m3fn).float() * read
        return rounded.flatten(-2).to(x.dtype)

    return lambda ops: ops._replace(simulate_fp8=simulate_fp8)


def power_of_two(ratio: Tensor, added: int) -> Tensor:
    """The power of two below a float32 to whose bits something was added."""
    return ((ratio.view(torch.int32) + added) & 0x7F800000).view(torch.float32)


@in_ops(
    "fp8-scale-not-power-of-two",
    "Activations are rounded with scales that are no powers of two.",
    seen="sglang#25733",
)
@rounding
def fp8_scale_not_power_of_two(ratio: Tensor) -> tuple[Tensor, Tensor]:
    return ratio, ratio


@in_ops(
    "fp8-scale-mantissa-lost",
    "Codes of activations are made with scales that are no powers of two, and read with the powers below.",
    seen="sglang#39289, vllm#48052",
)
@rounding
def fp8_scale_mantissa_lost(ratio: Tensor) -> tuple[Tensor, Tensor]:
    return ratio, power_of_two(ratio, 0)


@in_ops(
    "fp8-scale-to-nearest-power",
    "Activations are rounded with the nearest power of two as scale, not that above: the largest are cut off.",
    seen="a skill of ROCm/ATOM's for debugging",
)
@rounding
def fp8_scale_to_nearest_power(ratio: Tensor) -> tuple[Tensor, Tensor]:
    nearest = power_of_two(ratio, 0x400000)
    return nearest, nearest


@in_ops(
    "fp8-scale-of-the-neighbour",
    "Codes of a token's activations are read with the scales of the token before, of those in one product.",
    seen="sglang#31490, sglang#31727, sglang#32839",
    whole_calls=True,
)
@rounding
def fp8_scale_of_the_neighbour(ratio: Tensor) -> tuple[Tensor, Tensor]:
    above = power_of_two(ratio, 0x7FFFFF)
    return above, above.roll(1, 0)


@in_ops(
    "rope-dims-rounded",
    "Where window KV and entries are rounded to FP8, their rotated dims are too.",
    seen="the mistake's kind: a format for all of a row, of which a part is kept in another",
)
def rope_dims_rounded(ops: Ops) -> Ops:
    def norm_rotate(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor, kv_group: int) -> Tensor:
        rows = ops.norm_rotate(x, weight, eps, cos, sin, 0)
        return ops.simulate_fp8(rows, kv_group) if kv_group else rows

    return ops._replace(norm_rotate=norm_rotate)


# --- between ranks


@between_ranks("sinks-of-rank-0", "Every rank uses the sinks of rank 0's heads.", seen="sglang#35092")
@each(attentions)
def sinks_of_rank_0(attention: Attention) -> None:
    attention.sink = attention.arithmetic.ranks.of_first(attention.sink.clone())


@between_ranks(
    "replicated-summed-as-partial",
    "The experts' output, which every rank has in full, is added up over ranks.",
    seen="sglang#31699, sglang#32609, tokenspeed#1490",
)
@instead_of(mixtures)
class ReplicatedSummedAsPartial(MoE):
    def output(self, x: Tensor, ids: Tensor, weights: Tensor, call: Call) -> Tensor:
        out = super().output(x, ids, weights, call)
        everybody = torch.ones(len(out), dtype=torch.bool, device=out.device)
        return self.arithmetic.ranks.filled("experts.output", self.layer, Partial(out, everybody))


@between_ranks(
    "top-k-of-a-rank-differs",
    "Rank 1 selects another entry than the other ranks.",
    seen="DeepSeek-V3.2-Exp checks for it in every call",
    needs=layers(CSA),
)
@each(indexers)
def top_k_of_a_rank_differs(indexer: Indexer) -> None:
    ops = indexer.arithmetic.ops

    def select(*given: Any) -> Tensor:
        selected = ops.select(*given)
        if selected.shape[1] > 1:  # instead of the last of a row the one before it, where that was not selected
            last, previous = selected[:, -1], selected[:, -2]
            selected[:, -1] = torch.where(last - 1 > previous, last - 1, last)
        return selected

    if indexer.arithmetic.ranks.rank == 1:
        indexer.arithmetic = indexer.arithmetic._replace(ops=ops._replace(select=select))


@between_ranks(
    "replicated-weight-of-a-rank-differs",
    "On rank 1 the norm before the last layer's experts has its weights in another order.",
    seen="the mistake's kind: a weight that every rank should hold alike",
)
def replicated_weight_of_a_rank_differs(model: Transformer) -> None:
    if model.arithmetic.ranks.rank == 1:
        model.blocks[-1].experts_norm = model.blocks[-1].experts_norm.roll(1)


@between_ranks(
    "experts-off-by-one",
    "On the last rank each expert runs with the rows of the one behind it.",
    seen="the mistake's kind: a placement that is off by one",
)
@each(mixtures)
def experts_off_by_one(mixture: MoE) -> None:
    ranks = mixture.arithmetic.ranks
    if ranks.size > 1 and ranks.rank == ranks.size - 1:
        mixture.experts.append(mixture.experts.pop(0))
        mixture.stack()


def _rerouted(site: str, spoil: Callable[[Tensor, Tensor, Tensor], None]) -> Callable[[Transformer], None]:
    """On the last rank, a row that it moves at this site goes otherwise than the others think.

    `spoil` changes the places [n, ranks] of all rows; it is given the first row that goes to no rank but one other, and
    to which.
    """

    def change(model: Transformer) -> None:
        ranks = model.arithmetic.ranks
        moved, last = ranks.moved, ranks.rank == ranks.size - 1

        def changed(at: str, layer: int, table: int, rows: Tensor, route: Route) -> Coming:
            if at == site and last:
                going = route.going(ranks.rank) >= 0
                other = going.clone()
                other[:, ranks.rank] = False
                row = ((going.sum(1) == 1) & other.any(1)).nonzero()[0, 0]
                route = route._replace(places=route.places.clone())
                spoil(route.places, row, other[row].nonzero()[0, 0])
            return moved(at, layer, table, rows, route)

        vars(ranks)["moved"] = changed

    return change


@between_ranks(
    "row-to-the-wrong-rank",
    "The last rank dispatches a token's row to the rank behind the right one.",
    seen="the mistake's kind: an offset of a rank in a dispatch",
)
@partial(_rerouted, "experts.dispatch")
def row_to_the_wrong_rank(places: Tensor, row: Tensor, rank: Tensor) -> None:
    del rank
    places[row] = places[row].roll(1)


@between_ranks(
    "output-lost-between-ranks",
    "The last rank does not send one of its experts' outputs back.",
    seen="ROCm/ATOM#887, flashinfer#3547",
)
@partial(_rerouted, "experts.combine")
def output_lost_between_ranks(places: Tensor, row: Tensor, rank: Tensor) -> None:
    places[row, rank] = -1


@between_ranks(
    "weights-of-another-slot-on-a-rank",
    "On the last rank outputs of experts that lie there have the weights of the token's other slots.",
    seen="the mistake's kind: weights that are sorted otherwise than the rows beside them",
    needs=several_experts,
)
@instead_of(mixtures)
class WeightsOfAnotherSlotOnARank(MoE):
    def outputs(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        ranks = self.arithmetic.ranks
        return super().outputs(x, ids, weights.roll(1, 1) if ranks.rank == ranks.size - 1 else weights)


# --- state


@in_model(
    "stale-frontier",
    "A sequence begins with the frontier that the last one left.",
    seen="ROCm/ATOM#1417, sglang#33656",
    needs=layers(CSA),
)
def stale_frontier(model: Transformer) -> None:
    rings: list[Tensor] = []  # of frontiers that have one before them

    @ops_of(entry_compressors)
    def left(ops: Ops) -> Ops:
        def compress(
            kv: Tensor, gate: Tensor, ring: TokenRing, first: int, ratio: int, tail: Tail, finish: Finish
        ) -> Tensor | None:
            if not any(ring.kv is other for other in rings):
                return ops.compress(kv, gate, ring, first, ratio, tail, finish)
            more = len(ring.kv)  # as if the ring had been filled once: its last window is before the first one
            before = more // ratio
            return ops.compress(
                kv, gate, ring, first + more, ratio, tail, lambda entry, pooled: finish(entry - before, pooled)
            )

        return ops._replace(compress=compress)

    left(model)

    class Stale(Transformer):
        last: State | None = None

        def new_state(self, max_context: int, chunk: int, *, rewind: int = 0) -> State:
            state = super().new_state(max_context, chunk, rewind=rewind)
            if self.last is not None:
                for new, old in zip(state.layers, self.last.layers, strict=True):
                    if isinstance(new, CsaCache) and isinstance(old, CsaCache):
                        ratio = old.frontier.ratio
                        for left, kept in zip(new.frontier.ring(), old.frontier.ring(), strict=True):
                            windows = kept.unflatten(0, (-1, ratio))
                            left[-ratio:] = windows[(old.frontier.position // ratio - 1) % len(windows)]
                        rings.append(new.frontier.kv)
            self.last = state
            return state

    become(model, Stale)


@in_ops("unrepeatable", "Attention gives other last bits in every run.", seen="vllm#53257, 1Cat-vLLM#162")
def unrepeatable(ops: Ops) -> Ops:
    def attend(*given: Any) -> Tensor:
        out = ops.attend(*given)
        touched = torch.rand(out.shape, device=out.device) < 0.01
        return torch.where(touched, out * (1 + torch.finfo(out.dtype).eps), out)

    return ops._replace(attend=attend)


# --- shard


class _Relative(NamedTuple):
    """The arguments of `kernels.shard.reference.relative_scores`."""

    q: Tensor
    coefficients: Tensor
    basis: Tensor
    mean: Tensor
    cos: Tensor
    sin: Tensor
    interleaved: bool


def with_other_keys(
    parts: Parts, scored: Callable[[_Relative], _Relative], rebuilt: Callable[[Middle], Middle]
) -> Parts:
    """Change keys where the relative identity scores them, and alike where a cache rebuilds them."""

    def relative_scores(*given: Tensor, interleaved: bool) -> Tensor:
        *tensors, pairs = scored(_Relative._make((*given, interleaved)))
        return parts.relative_scores(*tensors, interleaved=pairs)

    class Rebuilt(ShardCache):
        def _compress(self, keys: Tensor, values: Tensor) -> None:
            super()._compress(keys, values)
            if self.middle is not None:
                self.middle = rebuilt(self.middle)

    return parts._replace(relative_scores=relative_scores, shard=Rebuilt)


@in_variant_parts(
    "shard-mean-omitted",
    "Shard's scores leave out the mean of the keys, as the article's listing does.",
    seen="the Shard article",
)
def shard_mean_omitted(parts: Parts) -> Parts:
    return with_other_keys(
        parts,
        lambda keys: keys._replace(mean=torch.zeros_like(keys.mean)),
        lambda middle: middle._replace(keys=middle.keys._replace(mean=middle.keys.mean.zero_())),
    )


@in_variant_parts(
    "shard-distance-negated",
    "Shard's keys are rotated by minus their position, and scores by the distance the other way.",
    seen="the mistake's kind: a sign",
)
def shard_distance_negated(parts: Parts) -> Parts:
    return with_other_keys(
        parts, lambda keys: keys._replace(sin=-keys.sin), lambda middle: middle._replace(freqs=-middle.freqs)
    )


@in_variant_parts(
    "shard-pairs-swapped",
    "Shard turns neighbours where the model turns halves, and the other way round.",
    seen="the mistake's kind: a layout",
)
def shard_pairs_swapped(parts: Parts) -> Parts:
    return with_other_keys(
        parts,
        lambda keys: keys._replace(interleaved=not keys.interleaved),
        lambda middle: middle._replace(interleaved=not middle.interleaved),
    )


@in_variant_caches(
    "shard-norm-of-the-call",
    "Rows that are coded together share the length of the first: codes depend on how a prompt was cut.",
    seen="the mistake's kind: a statistic over the batch",
)
@instead_of(coded)
class NormOfTheCall(Entries):
    def append(self, new: Tensor, store: Store = write) -> None:
        lengths = coded_rows.row_norm(new)[:, None]
        super().append(new / lengths * lengths[:1], store)


@in_shard.too("shard-norm-of-the-call")
class NormOfTheToken(ShardCache):
    """The rows that are coded together are the heads of a token that goes to the stream."""

    def _append(self, key: Tensor, value: Tensor) -> None:
        if self.count >= self.exact:
            row = self._row(self.count)
            for held in (self.keys[row], self.values[row]):
                lengths = held.norm(dim=-1, keepdim=True)
                held.copy_(held / lengths * lengths[:1])
        super()._append(key, value)


@cache
def _stopped_early(bits: int) -> Tensor:
    """Lloyd's iteration from quantiles, twenty times, as published."""
    count = 1 << bits
    centroids: Tensor = torch.special.ndtri((torch.arange(count, dtype=torch.float64) + 0.5) / count)
    for _ in range(20):
        ends = centroids.new_tensor([math.inf])
        edges = torch.cat((-ends, (centroids[1:] + centroids[:-1]) / 2, ends))
        density = torch.exp(-edges.square() / 2) / math.sqrt(2 * math.pi)
        mass = torch.special.ndtr(edges).diff()
        centroids = (density[:-1] - density[1:]) / mass
    return centroids.float()


@in_variant_caches(
    "shard-codebook-unfinished",
    "The codebook is that of twenty iterations from quantiles, as the article says: at 8 bits little better than 6.",
    seen="the Shard article",
)
@instead_of(coded)
class CodebookUnfinished(Entries):
    """Rounds to the unfinished codebook before the codes are made: they then hold its centroids."""

    def append(self, new: Tensor, store: Store = write) -> None:
        assert isinstance(self.data, CodedRows)
        table, signs, width = _stopped_early(self.data.bits).to(new.device), self.data.signs, new.shape[1]
        lengths = coded_rows.row_norm(new)[:, None].clamp(min=1e-30)
        rotated = coded_rows.signed_hadamard(new.float() / lengths, signs) * width**0.5
        nearest = torch.bucketize(rotated, (table[1:] + table[:-1]) / 2)
        super().append(coded_rows.undo_hadamard(table[nearest] * width**-0.5, signs) * lengths, store)


@in_variant_parts.too("shard-codebook-unfinished")
def codebook_unfinished(parts: Parts) -> Parts:
    return parts._replace(codebook=lambda bits, device: _stopped_early(bits).to(device))


@in_shard(
    "shard-stream-coded-again",
    "What was decoded is coded again, with every eighth token.",
    seen="the Shard article warns of it",
)
class StreamCodedAgain(ShardCache):
    def _append(self, key: Tensor, value: Tensor) -> None:
        super()._append(key, value)
        rows = self._streamed(self.count) * self.shape.heads.size
        for held in (self.stream_keys, self.stream_values) if self.count % 8 == 0 else ():
            assert isinstance(held, CodedRows)
            qjl.write(held, 0, coded_rows.read(held, 0, rows))


@in_shard(
    "shard-basis-not-counted",
    "Shard's bytes leave out the basis.",
    seen="the Shard article's formula for bits counts it by the token",
)
class BasisNotCounted(ShardCache):
    def nbytes(self) -> int:
        return super().nbytes() - (0 if self.middle is None else self.middle.keys.basis.nbytes)


@in_variant_ops(
    "shard-all-decoded",
    "Attention decodes all keys and values before it begins.",
    seen="the mistake's kind: the memory that codes save is spent on decoding them",
)
@attending
def all_decoded(call: Attend) -> Attend:
    return call._replace(entries=decode(call.entries)) if isinstance(call.entries, CodedRows) else call


@in_shard.too("shard-all-decoded")
class AllDecoded(ShardCache):
    """The numbers are the same."""

    def _attend_all(self, q: Tensor, ops: Ops) -> Tensor:
        held = min(self.count, self.exact)
        keys, values = [self.keys[:held]], [self.values[:held]]
        if self.middle is not None:
            n = self.middle.values.codes.shape[0]
            keys.append(middle_keys(self.middle, 0, n))
            values.append(coded_rows.undo_hadamard(middle_values(self.middle, 0, n), self.stream_values.signs))
        tokens, heads = self._streamed(self.count), self.shape.heads.size
        for rows, stream in ((keys, self.stream_keys), (values, self.stream_values)):
            assert isinstance(stream, CodedRows)
            rows.append(coded_rows.read(stream, 0, tokens * heads).unflatten(0, (tokens, heads)))
        every = torch.cat(keys)
        return causal(ops, q, every, torch.cat(values), len(every) - 1)


def _narrow(part: RowCache[Rows | Slots], bits: int) -> None:
    """Allocate coded rows at other bits than the run asks for."""
    if isinstance(part.data, CodedRows):
        n, width = part.data.shape
        part.data = coded_rows.allocate(n, width, bits, part.data.codes.device, SIGNS)


@in_variant_caches(
    "shard-index-keys-in-4-bits",
    "Index keys are stored in 4 bits.",
    seen="the mistake's kind: a width that does for entries",
    needs=layers(CSA),
)
@each(index_keys)
def shard_index_keys_in_4_bits(keys: RowCache[Rows]) -> None:
    _narrow(keys, 4)


@in_variant_caches(
    "shard-entries-in-2-bits",
    "Entries are stored in 2 bits, whatever was asked for.",
    seen="the mistake's kind: a width that is told by what it is checked against",
    needs=layers(CSA, HCA),
)
@each(entries)
def shard_entries_in_2_bits(rows: RowCache[Rows | Slots]) -> None:
    _narrow(rows, 2)


@in_variant_ops(
    "shard-basis-mean-omitted",
    "Attention to entries in a basis leaves out their mean.",
    seen="the Shard article, for keys",
    needs=layers(CSA, HCA),
)
@attending
def shard_basis_mean_omitted(call: Attend) -> Attend:
    """It is left out of scores and sums: of both, what is fitted is what is centred."""
    if not isinstance(call.entries, BasisRows):
        return call
    nope = call.entries.nope
    centred = nope._replace(mean=torch.zeros_like(nope.mean))
    return call._replace(entries=call.entries._replace(nope=centred))


# --- coda


@in_coda(
    "coda-ring-one-short",
    "On grouped-query layers a token does not see the oldest token of its window.",
    seen="an off-by-one",
)
class CodaRingOneShort(CodaCache):
    def view(self) -> View:
        seen, window = self.used.clone(), self.settings.window
        if self.position >= window:
            seen[self.position % window] = False
        return View(self.keys, self.values, seen)


@in_variant_caches(
    "coda-window-one-short",
    "On V4's layers an entry is evicted when the window is full, before another needs its place.",
    seen="an off-by-one",
    needs=layers(CSA, HCA),
)
@instead_of(banks)
class CodaWindowOneShort(BankedEntries):
    def evict(self) -> None:
        if self.count - self.evicted == self.variant.window:
            self._evict(self.data[self.banked].clone(), self.evicted)
            self.evicted += 1
            self.data[self.banked :][: self.variant.window - 1] = self.data[self.banked + 1 : self.used + 1].clone()
        super().evict()


@in_variant_caches(
    "coda-unfinished-entry-visible",
    "A token sees the entry that it is itself a part of.",
    seen="an off-by-one",
    needs=layers(CSA, HCA),
)
@instead_of(banks)
class CodaUnfinishedEntryVisible(BankedEntries):
    def view(self) -> Slots:
        slots = super().view()
        return slots._replace(hidden=slots.hidden - 1)  # where the call has it already


@in_variant_caches(
    "coda-replaced-entry-forgotten",
    "What the exact bank gives up goes nowhere.",
    seen=BANKS,
    needs=layers(CSA, HCA),
)
@instead_of(banks)
class CodaReplacedEntryForgotten(BankedEntries):
    def _evict(self, row: Tensor, index: int) -> None:
        full, counts, means, bias = -1 not in self.times, list(self.counts), self.means.clone(), self.bias.clone()
        super()._evict(row, index)
        if full and index in self.times and torch.equal(self.data[self.times.index(index)], row):
            self.counts, self.means, self.bias = counts, means, bias
            self.data[self.variant.exact : self.banked] = means


@in_variant_caches(
    "coda-entry-in-both-banks",
    "An entry that the exact bank takes goes into the summary too, as published for tokens.",
    seen="CoDA-GQA-L, which offers each token to both",
    needs=layers(CSA, HCA),
)
@instead_of(banks)
class CodaEntryInBothBanks(BankedEntries):
    def _evict(self, row: Tensor, index: int) -> None:
        before = sum(self.counts)
        super()._evict(row, index)
        if sum(self.counts) == before:
            self._summarise(row)


@in_variant_caches(
    "coda-mean-weighs-as-one",
    "A mean of many entries weighs as much as one entry.",
    seen="CoDA-GQA-L, whose averages do",
    needs=layers(CSA, HCA),
)
@instead_of(banks)
class CodaMeanWeighsAsOne(BankedEntries):
    def _summarise(self, row: Tensor) -> None:
        super()._summarise(row)
        summary = self.bias[self.variant.exact : self.banked]
        summary.clamp_(max=0.0)


@in_variant_ops(
    "coda-sink-weighed",
    "The sink gets the logarithm of the largest count, as if it were a mean too.",
    seen=BANKS,
    needs=layers(CSA, HCA),
)
@attending
def coda_sink_weighed(call: Attend) -> Attend:
    slots = call.entries
    if isinstance(slots, Slots) and slots.bias is not None and slots.bias.isfinite().any():
        return call._replace(sink=call.sink + slots.bias.amax())
    return call


@in_coda(
    "coda-targets-not-counted",
    "On grouped-query layers coda's bytes leave out what new tokens are compared with.",
    seen="the mistake's kind: a buffer beside the cache",
)
class CodaTargetsNotCounted(CodaCache):
    def nbytes(self) -> int:
        return super().nbytes() - self.exact.targets.data.nbytes - self.summary.targets.data.nbytes


@in_variant_caches(
    "coda-means-not-counted",
    "On V4's layers coda's bytes leave out the means in fp32.",
    seen="the mistake's kind: a buffer beside the cache",
    needs=layers(CSA, HCA),
)
@instead_of(banks)
class CodaMeansNotCounted(BankedEntries):
    def nbytes(self) -> int:
        return super().nbytes() - self.means.nbytes


@in_coda(
    "coda-ring-restored-from-its-start",
    "A ring that is put back goes on at its first slot.",
    seen=STATES,
)
class CodaRingRestoredFromItsStart(CodaCache):
    def restore(self, position: int, saved: Mapping[str, Tensor]) -> None:
        super().restore(position, saved)
        self.position -= self.position % self.settings.window


@in_variant_caches(
    "coda-counts-not-restored",
    "Means that are put back have forgotten of how many entries they are.",
    seen=STATES,
    needs=layers(CSA, HCA),
)
@instead_of(banks)
class CodaCountsNotRestored(BankedEntries):
    def restore(self, position: int, saved: Mapping[str, Tensor]) -> None:
        super().restore(position, saved)
        self.counts = [min(n, 1) for n in self.counts]
        self.bias[self.variant.exact : self.banked].clamp_(max=0)


# --- what is read and drawn

Segments = list[Segment]


def writing(change: Callable[[Segments], Segments]) -> Callable[[Parts], Parts]:
    """The prompt of messages, changed before it becomes ids."""

    def faulty(parts: Parts) -> Parts:
        def encode_messages(messages: Sequence[Message], **how: Any) -> Segments:
            return merge(change(parts.encode_messages(messages, **how)))

        return parts._replace(encode_messages=encode_messages)

    return faulty


Nucleus = Callable[[Tensor, float], Tensor]  # probabilities [v], the largest first, and top-p -> which stay, [v] bool


def drawing(keep: Nucleus, *, cold: bool = False) -> Callable[[Parts], Parts]:
    """A `sample` with another nucleus; `cold`: that of the probabilities before the temperature."""

    def faulty(parts: Parts) -> Parts:
        def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
            if sampling.temperature == 0:
                return parts.sample(logits, sampling, generator)
            order = logits.double().sort(descending=True, stable=True)
            heated = (order.values - order.values[0]) / sampling.temperature
            kept = keep((order.values if cold else heated).softmax(0), sampling.top_p)
            kept[0] = True  # the likeliest stays, whatever its mass
            # drawn as ever among those that stay, so that the nucleus is all that differs
            among = logits.index_fill(0, order.indices[~kept], torch.finfo(logits.dtype).min)
            return parts.sample(among, replace(sampling, top_p=1.0), generator)

        return parts._replace(sample=sample)

    return faulty


def nucleus(p: Tensor, top_p: float) -> Tensor:
    return p.cumsum(0) - p < top_p


Asked = tuple[Sequence[int], dict[str, Any]]  # the prompt, and the named arguments of `runtime.generate.generate`


def generating(change: Callable[[Sequence[int], dict[str, Any]], Asked]) -> Callable[[Parts], Parts]:
    """A `generate` that is right, of changed arguments."""

    def faulty(parts: Parts) -> Parts:
        def generate(model: Any, state: Any, prompt: Sequence[int], **how: Any) -> Iterator[int]:
            prompt, how = change(prompt, how)
            return parts.generate(model, state, prompt, **how)

        return parts._replace(generate=generate)

    return faulty


@in_runtime("bos-left-out", "A prompt begins without BOS.", seen="unsloth#10312")
@writing
def bos_left_out(segments: Segments) -> Segments:
    return [segment for segment in segments if segment != BOS]


@in_runtime(
    "bos-twice",
    "A prompt begins with BOS twice: its format and the tokenizer each put one.",
    seen="sglang#888, vllm#16976, DeepSeek-R1#151",
)
@writing
def bos_twice(segments: Segments) -> Segments:
    return [BOS, *segments]


@in_runtime(
    "thinking-tag-swapped",
    "The answer begins with <think> where thinking is off, and with </think> where it is on.",
    seen="sglang#15294",
)
@writing
def thinking_tag_swapped(segments: Segments) -> Segments:
    other: dict[Segment, Segment] = {THINK_START: THINK_END, THINK_END: THINK_START}
    return [*segments[:-1], other.get(segments[-1], segments[-1])]


@in_runtime(
    "line-after-think",
    "A line ends behind <think>, as the template of R1 has it.",
    seen="the mistake's kind: a port that took a neighbour's format",
)
@writing
def line_after_think(segments: Segments) -> Segments:
    lines: dict[Segment, Segments] = {THINK_START: [THINK_START, Text("\n")]}
    return [part for segment in segments for part in lines.get(segment, [segment])]


@in_runtime(
    "eos-left-out",
    "Nothing ends the assistant's earlier turns.",
    seen="the mistake's kind: a template of one's own",
)
@writing
def eos_left_out(segments: Segments) -> Segments:
    return [segment for segment in segments if segment != EOS]


@in_runtime(
    "controls-out-of-text",
    "A control token spelled in a user's text becomes one.",
    seen="ds4#95, transformers#29279, gemma#770",
)
@writing
def controls_out_of_text(segments: Segments) -> Segments:
    return split_controls(render(segments))


@in_runtime(
    "top-p-off-by-one",
    "The nucleus ends before the token by which its mass reaches top-p.",
    seen="fish-speech#1171, reasoning-from-scratch#164, esm#360",
)
@drawing
def top_p_off_by_one(p: Tensor, top_p: float) -> Tensor:
    return p.cumsum(0) < top_p if top_p < 1 else nucleus(p, top_p)


@in_runtime(
    "top-p-keeps-one-more",
    "Where the mass reaches top-p exactly, the nucleus has one token more.",
    seen="an off-by-one",
)
@drawing
def top_p_keeps_one_more(p: Tensor, top_p: float) -> Tensor:
    return p.cumsum(0) - p <= top_p


@in_runtime(
    "temperature-after-top-p",
    "The nucleus is cut before the temperature is applied.",
    seen="tpu-inference#1385, fish-speech#1150",
)
def temperature_after_top_p(parts: Parts) -> Parts:
    return drawing(nucleus, cold=True)(parts)


@in_runtime("ties-to-the-higher-id", "Of equal largest logits greedy decoding takes the last.", seen="an argmax's")
def ties_to_the_higher_id(parts: Parts) -> Parts:
    def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
        if sampling.temperature:
            return parts.sample(logits, sampling, generator)
        return int((logits == logits.max()).nonzero()[-1])

    return parts._replace(sample=sample)


@in_runtime("raw-without-bos", "Raw text begins without BOS.", seen="unsloth#10312")
def raw_without_bos(parts: Parts) -> Parts:
    return parts._replace(raw_text=lambda *given: parts.raw_text(*given)[1:])


@in_runtime(
    "likelihoods-of-twice-the-logits",
    "The log-probabilities that are told are those at half the temperature.",
    seen="the mistake's kind: likelihoods of what was prepared for sampling",
)
def likelihoods_of_twice_the_logits(parts: Parts) -> Parts:
    return parts._replace(likelihood=lambda logits, token, count: parts.likelihood(2 * logits, token, count))


@in_runtime(
    "last-token-of-an-answer-unread",
    "In a conversation, the token that ended an answer is never run: the state lacks it from then on.",
    seen="an off-by-one",
)
def last_token_of_an_answer_unread(parts: Parts) -> Parts:
    class Changed(parts.conversation):  # type: ignore[name-defined, misc]
        def _caught_up(self, tokens: list[int]) -> list[int]:
            rest: list[int] = super()._caught_up(tokens)
            return rest[1:] if self.held else rest

    return parts._replace(conversation=Changed)


@in_runtime(
    "pending-token-lost",
    "A state that is saved has forgotten which token was chosen and is still to be run.",
    seen=STATES,
)
def pending_token_lost(parts: Parts) -> Parts:
    def save_state(path: Path, state: State, loaded: AnyLoaded, pending: int | None, *given: Any) -> None:
        del pending
        parts.save_state(path, state, loaded, None, *given)

    return parts._replace(save_state=save_state)


@in_runtime(
    "pending-token-of-the-step-before",
    "The token that a saved state is to go on with is the one before the last that was chosen.",
    seen="an off-by-one",
)
def pending_token_of_the_step_before(parts: Parts) -> Parts:
    def generate(*given: Any, record: Generation, **how: Any) -> Iterator[int]:
        for token in parts.generate(*given, record=record, **how):
            record.pending = record.tokens[-2:][0]
            yield token

    return parts._replace(generate=generate)


@in_runtime("prompt-one-short", "The last token of the prompt is not read.", seen="an off-by-one")
@generating
def prompt_one_short(prompt: Sequence[int], how: dict[str, Any]) -> Asked:
    return prompt[:-1], how


@in_runtime("eos-ignored", "Generation goes on behind EOS.", seen="the mistake's kind: one id of several, or none")
@generating
def eos_ignored(prompt: Sequence[int], how: dict[str, Any]) -> Asked:
    return prompt, how | {"eos": ()}


# --- what is drafted, and taken back


@in_head(
    "draft-stages-with-yarn",
    "The stages of a draft head rotate with YaRN.",
    seen="vllm#48304, where it cost 12 of 69 % of the drafts",
    needs=yarn,
)
def draft_stages_with_yarn(head: DraftHead) -> None:
    for attention in stage_attentions(head):
        attention.rotation.freqs = yarn_of_window_layers(head.config)


@in_head(
    "draft-stages-rotate-as-compressed",
    "The stages of a draft head rotate as HCA layers do.",
    seen="antirez/ds4#411, which borrowed a layer of another kind",
)
def draft_stages_rotate_as_compressed(head: DraftHead) -> None:
    for attention in stage_attentions(head):
        attention.rotation.freqs = layer_frequencies(head.config, HCA)


@in_head(
    "draft-taps-one-layer-early",
    "A draft head reads the streams that enter its layers, not those that leave them.",
    seen="V4.1, of which it is no fault",
)
def draft_taps_one_layer_early(head: DraftHead) -> None:
    head.target_layers = tuple(layer - 1 for layer in head.target_layers)


@in_head(
    "draft-collapsed-fed-back",
    "The second draft of MTP is made from what the hyper head read, not from the streams.",
    seen="GDzhu01/vllm-ascend-deepseekv4#132",
)
@instead_of(mtp_heads)
class DraftCollapsedFedBack(MtpHead):
    collapsed: Tensor | None = None  # of the last draft

    def draft(
        self, listener: StreamListener, following: Sequence[int], position: int, k: int, state: DraftState
    ) -> Drafts:
        self.collapsed = None
        return super().draft(listener, following, position, k, state)

    def hidden(self, collapsed: Tensor) -> Tensor:
        self.collapsed = collapsed
        return super().hidden(collapsed)

    def streams(self, given: Tensor, following: Tensor, call: Call) -> Tensor:
        fed = given if self.collapsed is None else self.collapsed[:, None].expand_as(given)
        return super().streams(fed, following, call)


class _OfDraftsAlone(StreamListener):
    """Is given nothing of calls of one token."""

    def __call__(self, layer: int | None, streams: Tensor) -> None:
        call = observed(self.head.model).call
        assert call is not None, "streams outside of a call"
        super().__call__(layer, torch.zeros_like(streams) if call.count == 1 else streams)


@in_head(
    "draft-features-skipped",
    "A draft head is not given the streams of tokens behind which nothing was drafted.",
    seen="a fork of antirez/ds4",
)
def draft_features_skipped(head: DraftHead) -> None:
    class Changed(type(head)):  # type: ignore[misc]
        def listener(self, drafts: int) -> StreamListener:
            return _OfDraftsAlone(self, drafts)

    become(head, Changed)


@in_head("draft-block-causal", "A slot of DSpark's block sees the slots before it alone.", seen=PORTING)
@each(block_attentions)
def draft_block_causal(attention: BlockAttention) -> None:
    become(attention, CausalBlock)


class CausalBlock(BlockAttention):
    def attend(self, q: Tensor, beyond: Beyond, call: Call, cache: LayerCache) -> Tensor:
        first, attend = call.first, self.arithmetic.ops.attend
        assert isinstance(first, int), "a block is not captured"
        slots = enumerate(q.split(1))
        return torch.cat(
            [attend(one, cache.ring.data, first + i, self.window + i + 1, *beyond, self.sink) for i, one in slots]
        )


@in_rewound_caches(
    "open-window-of-rejected-tokens",
    "A frontier that goes back keeps rejected tokens in the window that is open again.",
    seen="lucebox#713, sglang#34189",
    needs=layers(CSA, HCA),
)
@instead_of(frontiers)
class OpenWindowOfRejectedTokens(Frontier):
    """As one of `ratio` rows does, in which the next window overwrites this one."""

    def rewind(self, position: int, end: int) -> None:
        super().rewind(position, end)
        start, rows = position // self.ratio * self.ratio, len(self.kv)
        for rejected in range(position, end):
            place = start + rejected % self.ratio
            if place < position:
                for held in (self.kv, self.gate):
                    held[place % rows] = held[rejected % rows]


@in_rewound_states(
    "rewind-of-the-position-alone",
    "Where tokens are rejected the position goes back, and caches keep their rows.",
    seen="the mistake's kind: a rollback that leaves out what is not counted by the position",
)
@instead_of(rewound)
class RewindOfThePositionAlone(State):
    def rewind(self, position: int) -> None:
        self._furthest = max(self._furthest, self.position)
        self.position = position


class _Unseen:
    """A drafter, the first of whose drafts is made the likeliest token."""

    def __init__(self, drafting: Drafting) -> None:
        self.drafter, self.drafts = drafting.drafter, list[list[int]]()

    def __call__(self, tokens: "array[int]", most: int) -> list[int]:
        drafted = self.drafter(tokens, most)
        if drafted:
            self.drafts.append(drafted)
        return drafted

    def write(self, layer: int | None, logits: Tensor) -> None:
        """Change the first logits [n, vocab] after a draft."""
        del layer
        if len(self.drafts) == 1 and len(logits) == 1 + len(self.drafts[0]):
            logits[0, self.drafts[0][0]] = logits[0].max() + 1e4
            self.drafts.append([])


@in_accepting("draft-taken-unseen", "The first draft of a run is taken without being compared.", seen="an off-by-one")
@generating
def draft_taken_unseen(prompt: Sequence[int], how: dict[str, Any]) -> Asked:
    drafting: Drafting | None = how.get("drafting")
    if drafting is None:
        return prompt, how
    unseen = _Unseen(drafting)
    listeners = {**drafting.listeners, sites.LOGITS: unseen.write}
    return prompt, how | {"drafting": drafting._replace(drafter=unseen, listeners=listeners)}
