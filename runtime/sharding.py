"""Which rows of which parameter each rank holds: a pure function of the config and the number of ranks.

Cut, each where the count divides: attention heads (wq_b, sinks), output groups (wo_a), columns of attention's output
(wo_b), the vocabulary (embedding, head), and the experts in one of two ways. By *rows*: SwiGLU's columns (w1 and w3 of
every expert, routed or shared, which must divide) and columns of the output (every w2). *Whole*: each routed expert,
whose number must divide, lies on one rank, consecutive ones together, and the shared expert on every rank.

A rank's rows of a quantisable matrix are whole blocks of 128 or a part of one: FP8 weights have one scale for each. All
else is on every rank: what writes the shared KV, entries and index keys (each rank has all caches), the indexer, mHC,
gate, norms. Were these cut, their outputs would take one more exchange in each layer, which takes longer than reading
all of them does, of V4-Pro on a B200 (`runtime.plan.token`). Of the Llama family also KV heads, with their caches and
the heads that read them. Nothing is cut by columns, so no product is ever summed over ranks.
"""

from dataclasses import dataclass

from fathom.kernels.formats.groups import FP8_BLOCK
from fathom.model.architectures import Config
from fathom.model.checkpoint.names import Axis, axis, expert_number, of_shared_expert
from fathom.model.choices import ALL, AUTO, ROWS, WHOLE
from fathom.model.config import ModelConfig
from fathom.model.errors import ConfigError
from fathom.model.llama.config import LlamaConfig
from fathom.model.ranks.ranks import AxisShard, Shards, evenly, undivided


@dataclass(frozen=True, slots=True)
class ShardingPlan:
    """Who holds what; `sharding_plan` makes it."""

    size: int
    ranks: tuple[Shards, ...]  # by rank
    replicated: tuple[str, ...]  # axes that could not be split, and why
    experts: str  # how routed experts lie: WHOLE or ROWS

    def rows(self, name: str, rows: int, rank: int) -> AxisShard:
        """What of a parameter's `rows` (its official name, its first axis) `rank` holds."""
        along, shards = axis(name), self.ranks[rank]
        if shards.experts.split and (number := expert_number(name)) is not None:
            here = shards.experts.start <= number < shards.experts.stop
            return AxisShard(0, rows if here else 0, rows, split=True)
        if shards.experts.split and of_shared_expert(name):
            return undivided(rows)
        shard = {
            Axis.HEADS: shards.heads,
            Axis.GROUPS: shards.groups,
            Axis.OUTPUT: shards.output,
            Axis.VOCABULARY: shards.vocabulary,
            Axis.KV_HEADS: shards.kv_heads,
            Axis.INNER: shards.inner,
        }.get(along)
        if shard is None or not shard.split:
            return undivided(rows)
        rows_per_place = rows // shard.total  # rows for each head, group, ...
        return AxisShard(shard.start * rows_per_place, shard.stop * rows_per_place, rows, split=True)


def tokens_of_ranks(config: Config, asked: str) -> str:
    """Which tokens of a call a rank has between attentions: what `--rank-tokens` asks for; of a Llama, all."""
    return ALL if isinstance(config, LlamaConfig) else asked


def sharding_plan(config: Config, size: int, experts: str = AUTO) -> ShardingPlan:
    """Place a model on `size` ranks, its routed `experts` WHOLE or by ROWS; AUTO: by rows, where these divide.

    ConfigError when neither the experts' SwiGLU nor their number divides by `size`, or not the one that is asked for:
    experts are what does not fit on one rank. Every other axis that does not divide is replicated, and
    `ShardingPlan.replicated` says so.
    """
    why: list[str] = []
    if isinstance(config, LlamaConfig):
        axes, experts = _llama_axes(config, size, why), ROWS
    else:
        axes, experts = _v4_axes(config, size, why, experts)

    def shard(axis: str, rank: int) -> AxisShard:
        total, split = axes.get(axis, (1, False))
        return evenly(total, rank, size) if split else undivided(total)

    ranks = tuple(Shards(*(shard(axis, rank) for axis in Shards._fields)) for rank in range(size))
    return ShardingPlan(size, ranks, tuple(why), experts)


Axes = dict[str, tuple[int, bool]]  # how long each axis of `Shards` is, and whether it is split


def _v4_axes(config: ModelConfig, size: int, why: list[str], experts: str) -> tuple[Axes, str]:
    """And how experts lie."""
    refused: list[str] = []
    rows = experts != WHOLE and _divides("columns of SwiGLU", config.moe_intermediate_size, size, refused, 1, FP8_BLOCK)
    if not rows and (experts == ROWS or not _divides("routed experts", config.n_routed_experts, size, refused)):
        named = "n_routed_experts" if experts == WHOLE else "moe_intermediate_size"
        raise ConfigError(f"{size} ranks: {named}, {refused[0]}")
    heads = _divides("attention heads", config.num_attention_heads, size, why, config.head_dim, FP8_BLOCK)
    groups = _divides("output groups", config.o_groups, size, why, config.o_lora_rank, FP8_BLOCK)
    if groups and not heads:
        groups = False
        why.append("output groups: as the attention heads")
    output = _divides(Axis.OUTPUT.value, config.hidden_size, size, why, 1, FP8_BLOCK)
    axes = {
        "heads": (config.num_attention_heads, heads),
        "groups": (config.o_groups, groups),
        "output": (config.hidden_size, output),
        "vocabulary": (config.vocab_size, _divides("vocabulary", config.vocab_size, size, why)),
        "inner": (config.moe_intermediate_size, rows),
        "experts": (config.n_routed_experts, not rows),
    }
    return axes, ROWS if rows else WHOLE


def _llama_axes(config: LlamaConfig, size: int, why: list[str]) -> Axes:
    """The heads that read a KV head are where it is."""
    heads = _divides("KV heads with their caches, and the heads that read them", config.num_key_value_heads, size, why)
    return {
        "heads": (config.num_attention_heads, heads),
        "kv_heads": (config.num_key_value_heads, heads),
        "inner": (config.intermediate_size, _divides("columns of SwiGLU", config.intermediate_size, size, why)),
        "output": (config.hidden_size, _divides(Axis.OUTPUT.value, config.hidden_size, size, why)),
        "vocabulary": (config.vocab_size, _divides("vocabulary", config.vocab_size, size, why)),
    }


def _divides(what: str, count: int, size: int, why: list[str], rows: int = 1, block: int = 1) -> bool:
    """Whether `count` parts of `rows` rows split over `size` ranks, in whole blocks or a part of one; adds why not."""
    if count % size:
        why.append(f"{what}: {count}, which {size} does not divide")
        return False
    each = count // size * rows
    if each % block and block % each:
        why.append(f"{what}: {each} rows for each rank, neither whole blocks of {block} nor a part of one")
        return False
    return True
