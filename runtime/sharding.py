"""Which rows of which parameter each rank holds: a pure function of the config and the number of ranks.

Cut, each where the count divides: attention heads (wq_b, sinks), output groups (wo_a), SwiGLU's columns (w1 and w3 of
every expert, routed or shared, which must divide), columns of both sublayers' outputs (wo_b, every w2), and the
vocabulary (embedding, head). A rank's rows of a quantisable matrix are whole blocks of 128 or a part of one: FP8
weights have one scale for each. All else is on every rank: what writes the shared KV, entries and index keys (each rank
has all caches), the indexer, mHC, gate, norms. Were these cut, their outputs would take one more exchange in each
layer, which takes longer than reading all of them does, of V4-Pro on a B200 (`runtime.plan.token`). Of the Llama family
also KV heads, with their caches and the heads that read them. Nothing is cut by columns, so no product is ever summed
over ranks.
"""

from dataclasses import dataclass

from fathom.kernels.formats.groups import FP8_BLOCK
from fathom.model.architectures import Config
from fathom.model.checkpoint.names import Axis, axis
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

    def rows(self, name: str, rows: int, rank: int) -> AxisShard:
        """What of a parameter's `rows` (its official name, its first axis) `rank` holds."""
        along, shards = axis(name), self.ranks[rank]
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


def sharding_plan(config: Config, size: int) -> ShardingPlan:
    """Place a model on `size` ranks.

    ConfigError when the experts' SwiGLU does not divide by `size`, for experts are what does not fit on one rank; every
    other axis that does not is replicated, and `ShardingPlan.replicated` says so.
    """
    why: list[str] = []
    axes = _llama_axes(config, size, why) if isinstance(config, LlamaConfig) else _v4_axes(config, size, why)

    def shard(axis: str, rank: int) -> AxisShard:
        total, split = axes.get(axis, (1, False))
        return evenly(total, rank, size) if split else undivided(total)

    ranks = tuple(Shards(*(shard(axis, rank) for axis in Shards._fields)) for rank in range(size))
    return ShardingPlan(size, ranks, tuple(why))


Axes = dict[str, tuple[int, bool]]  # how long each axis of `Shards` is, and whether it is split


def _v4_axes(config: ModelConfig, size: int, why: list[str]) -> Axes:
    if not _divides("columns of SwiGLU", config.moe_intermediate_size, size, why, 1, FP8_BLOCK):
        raise ConfigError(f"{size} ranks: moe_intermediate_size, {why[-1]}")
    heads = _divides("attention heads", config.num_attention_heads, size, why, config.head_dim, FP8_BLOCK)
    groups = _divides("output groups", config.o_groups, size, why, config.o_lora_rank, FP8_BLOCK)
    if groups and not heads:
        groups = False
        why.append("output groups: as the attention heads")
    output = _divides(Axis.OUTPUT.value, config.hidden_size, size, why, 1, FP8_BLOCK)
    return {
        "heads": (config.num_attention_heads, heads),
        "groups": (config.o_groups, groups),
        "output": (config.hidden_size, output),
        "vocabulary": (config.vocab_size, _divides("vocabulary", config.vocab_size, size, why)),
        "inner": (config.moe_intermediate_size, True),
    }


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
