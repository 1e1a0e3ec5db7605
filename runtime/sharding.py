"""Which rows of which parameter each rank holds: a pure function of the config and the number of ranks.

Sharded, each where the count divides: attention heads (wq_b, sinks), output groups (wo_a), columns of the attention's
output (wo_b), indexer heads (indexer.wq_b, weights_proj), the vocabulary (embedding, head), and routed experts, which
must divide. A rank's rows of a quantisable matrix are whole blocks of 128: FP8 weights have one scale for each.
All else is replicated: what writes the shared KV, entries and index keys (each rank has all caches), mHC, gate, the
shared expert, norms. Of the Llama family: KV heads with their caches and the heads that read them, SwiGLU's columns,
both sublayers' outputs, and the vocabulary. Nothing is sharded by columns, so no product is ever summed over ranks.
"""

from dataclasses import dataclass

from kernels.formats.groups import FP8_BLOCK
from model.architectures import Config
from model.checkpoint.names import Axis, axis
from model.config import LayerKind, ModelConfig
from model.errors import ConfigError
from model.llama.config import LlamaConfig
from model.ranks.ranks import AxisShard, Shards, evenly, undivided


@dataclass(frozen=True, slots=True)
class ShardingPlan:
    """Who holds what; `sharding_plan` makes it."""

    size: int
    ranks: tuple[Shards, ...]  # by rank
    replicated: tuple[str, ...]  # axes that could not be split, and why

    def rows(self, name: str, rows: int, rank: int) -> AxisShard | None:
        """What of a parameter's `rows` (its official name, its first axis) `rank` holds; None: it has no part of it."""
        along, expert = axis(name)
        shards = self.ranks[rank]
        if along is Axis.EXPERTS:
            assert expert is not None
            return undivided(rows) if shards.experts.start <= expert < shards.experts.stop else None
        shard = {
            Axis.HEADS: shards.heads,
            Axis.GROUPS: shards.groups,
            Axis.OUTPUT: shards.output,
            Axis.INDEX_HEADS: shards.index_heads,
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

    ConfigError when the routed experts do not divide by `size`; every other axis that does not is replicated, and
    `ShardingPlan.replicated` says so.
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
    if config.n_routed_experts % size:
        raise ConfigError(f"{size} ranks: n_routed_experts is {config.n_routed_experts}, which {size} does not divide")
    heads = _divides("attention heads", config.num_attention_heads, size, why, config.head_dim, FP8_BLOCK)
    groups = _divides("output groups", config.o_groups, size, why, config.o_lora_rank, FP8_BLOCK)
    if groups and not heads:
        groups = False
        why.append("output groups: as the attention heads")
    output = _divides("columns of the attention's output", config.hidden_size, size, why, 1, FP8_BLOCK)
    index_heads = LayerKind.CSA in config.layer_kinds and _divides(
        "indexer heads", config.index_n_heads, size, why, config.index_head_dim, FP8_BLOCK
    )
    return {
        "heads": (config.num_attention_heads, heads),
        "groups": (config.o_groups, groups),
        "output": (config.hidden_size, output),
        "index_heads": (config.index_n_heads, index_heads),
        "vocabulary": (config.vocab_size, _divides("vocabulary", config.vocab_size, size, why)),
        "experts": (config.n_routed_experts, True),
    }


def _llama_axes(config: LlamaConfig, size: int, why: list[str]) -> Axes:
    """The heads that read a KV head are where it is."""
    heads = _divides("KV heads with their caches, and the heads that read them", config.num_key_value_heads, size, why)
    return {
        "heads": (config.num_attention_heads, heads),
        "kv_heads": (config.num_key_value_heads, heads),
        "inner": (config.intermediate_size, _divides("columns of SwiGLU", config.intermediate_size, size, why)),
        "output": (config.hidden_size, _divides("columns of both sublayers' outputs", config.hidden_size, size, why)),
        "vocabulary": (config.vocab_size, _divides("vocabulary", config.vocab_size, size, why)),
    }


def _divides(what: str, count: int, size: int, why: list[str], rows: int = 1, block: int = 1) -> bool:
    """Whether `count` parts of `rows` rows each split over `size` ranks, in whole blocks; says why not."""
    if count % size:
        why.append(f"{what}: {count}, which {size} does not divide")
        return False
    if size > 1 and count // size * rows % block:
        why.append(f"{what}: {count // size * rows} rows for each rank, no whole blocks of {block}")
        return False
    return True
