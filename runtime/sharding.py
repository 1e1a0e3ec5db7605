"""Which rows of which parameter each rank holds: a pure function of the config and the number of ranks.

Sharded, each where the count divides: attention heads (wq_b, sinks), output groups (wo_a), columns of the attention's
output (wo_b), indexer heads (indexer.wq_b, weights_proj), the vocabulary (embedding, head), and routed experts, which
must divide. A rank's rows of a quantisable matrix are whole blocks of 128: FP8 weights have one scale for each.
All else is replicated: what writes the shared KV, entries and index keys (each rank has all caches), mHC, gate, the
shared expert, norms. Nothing is sharded by columns, so no product is ever summed over ranks.
"""

from dataclasses import dataclass
from typing import Final

from kernels.formats.groups import FP8_BLOCK
from model.architectures import Config
from model.checkpoint.names import Axis, axis
from model.config import LayerKind
from model.errors import ConfigError
from model.llama.config import LlamaConfig
from model.ranks.ranks import AxisShard, Shards, evenly, undivided


@dataclass(frozen=True, slots=True)
class Placement:
    """Who holds what; `place` makes it."""

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
        }.get(along)
        if shard is None or not shard.split:
            return undivided(rows)
        each = rows // shard.total  # rows for each head, group, ...
        return AxisShard(shard.start * each, shard.stop * each, rows, split=True)


# One rank has all of everything: a shard that is not split says no more than that.
WHOLE: Final = Placement(1, (Shards(*(undivided(1),) * len(Shards._fields)),), ())


def place(config: Config, size: int) -> Placement:
    """Place a model on `size` ranks.

    ConfigError when the routed experts do not divide by `size`; every other axis that does not is replicated, and
    `Placement.replicated` says so.
    """
    if isinstance(config, LlamaConfig):
        assert size == 1, f"{size} ranks: a model of the Llama family runs on one"
        return WHOLE
    if config.n_routed_experts % size:
        raise ConfigError(f"{size} ranks: n_routed_experts is {config.n_routed_experts}, which {size} does not divide")
    why: list[str] = []
    heads = _divides("attention heads", config.num_attention_heads, config.head_dim, size, why)
    groups = _divides("output groups", config.o_groups, config.o_lora_rank, size, why)
    if groups and not heads:
        groups = False
        why.append("output groups: as the attention heads")
    output = _divides("columns of the attention's output", config.hidden_size, 1, size, why)
    indexed = LayerKind.CSA in config.layer_kinds
    index_heads = indexed and _divides("indexer heads", config.index_n_heads, config.index_head_dim, size, why)
    vocabulary = config.vocab_size % size == 0
    if not vocabulary:
        why.append(f"vocabulary: {config.vocab_size} tokens, which {size} does not divide")

    def shard(total: int, rank: int, *, split: bool) -> AxisShard:
        return evenly(total, rank, size) if split else undivided(total)

    ranks = tuple(
        Shards(
            heads=shard(config.num_attention_heads, rank, split=heads),
            groups=shard(config.o_groups, rank, split=groups),
            output=shard(config.hidden_size, rank, split=output),
            index_heads=shard(config.index_n_heads, rank, split=index_heads),
            vocabulary=shard(config.vocab_size, rank, split=vocabulary),
            experts=evenly(config.n_routed_experts, rank, size),
        )
        for rank in range(size)
    )
    return Placement(size, ranks, tuple(why))


def _divides(what: str, count: int, rows: int, size: int, why: list[str]) -> bool:
    """Whether `count` parts of `rows` rows each split over `size` ranks; says why not."""
    if count % size:
        why.append(f"{what}: {count}, which {size} does not divide")
        return False
    if size > 1 and count // size * rows % FP8_BLOCK:
        why.append(f"{what}: {count // size * rows} rows for each rank, no whole blocks of {FP8_BLOCK}")
        return False
    return True
