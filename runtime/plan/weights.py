"""Bytes of weights that a rank holds, by kind, from the census and the sharding: nothing is read.

A weight stays as the checkpoint stores it: on the CPU a view of the mapped file, whose pages the system may drop and
read again, on a GPU a copy. What the model converts while it is built is its own on both: every norm, sink, bias and
mHC parameter is held in fp32, every table of experts in int64.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from enum import StrEnum
from functools import cache
from typing import Final, NamedTuple

from fathom.kernels.formats.groups import FP8_BLOCK
from fathom.model.architectures import Config
from fathom.model.checkpoint.census import Census
from fathom.model.checkpoint.tensor_mapping import Form
from fathom.model.llama.config import LlamaConfig
from fathom.model.rope import rotated_as
from fathom.runtime.plan.meta_weights import stored, table
from fathom.runtime.sharding import ShardingPlan

F32, I64 = 4, 8  # bytes
# By name without layer and expert: form, rows and columns, and how many there are of these
Matrices = Mapping[str, Mapping[tuple[Form, int, int], int]]


class WeightKind(StrEnum):
    """What a weight is for."""

    EMBEDDING = "embedding and head"
    ATTENTION = "attention"
    COMPRESSORS = "compressors"
    INDEXER = "indexer"  # with its key compressor
    ROUTED = "routed experts"
    SHARED = "shared experts"
    GATES = "gates and hash tables"
    MHC = "mHC"
    NORMS = "norms"
    ENGRAM = "n-grams"  # of V4.1
    DRAFTING = "draft head"
    ROTARY = "rotary frequencies"  # computed from the config
    FEED_FORWARD = "feed-forward"  # of the Llama family, as the next
    ADAPTERS = "adapters"


# Parts of a parameter's name that tell its kind; the first that it has. Of none of them: embedding and head.
_PARTS: Final = {
    "mtp.": WeightKind.DRAFTING,
    "norm.weight": WeightKind.NORMS,
    "hc_": WeightKind.MHC,
    ".ffn.experts.": WeightKind.ROUTED,
    ".ffn.shared_experts.": WeightKind.SHARED,
    ".ffn.gate.": WeightKind.GATES,
    ".attn.indexer.": WeightKind.INDEXER,
    ".attn.compressor.": WeightKind.COMPRESSORS,
    ".attn.": WeightKind.ATTENTION,
    ".engram.": WeightKind.ENGRAM,
    ".self_attn.": WeightKind.ATTENTION,
    ".mlp.": WeightKind.FEED_FORWARD,
}


class Weights(NamedTuple):
    """Bytes of one kind of weights on one rank."""

    stored: int = 0  # of the checkpoint's, as its files hold them: what this rank reads
    mapped: int = 0  # of these, views of the files that the model keeps: none on a GPU
    own: int = 0  # memory of the process: copies and conversions
    whole: int = 0  # of `stored`, what every other rank stores too


@cache
def stored_bytes(form: Form, shape: tuple[int, ...], block: int = FP8_BLOCK) -> int:
    """Bytes of a parameter of this shape with its scales, as the checkpoint stores it; without rows it has none."""
    if 0 in shape:
        return 0
    planes = table(*shape) if form is Form.FP8_ROWS else stored(form, *shape, block=block)
    return sum(plane.nbytes for plane in planes)


def weights(
    config: Config, census: Census, sharding: ShardingPlan, rank: int, *, mapped: bool
) -> dict[WeightKind, Weights]:
    """Bytes that a rank holds of a checkpoint, by kind; every kind that the family has, in the order of `WeightKind`.

    `mapped`: whether weights are views of mapped files, as on the CPU, or copied to a device. Exact, but for a tensor
    whose first byte is misaligned for its dtype, of which torch makes a copy on the CPU; no published file has any.
    """
    found: dict[WeightKind, list[Weights]] = {kind: [] for kind in WeightKind}
    for name, count in census.alike.items():
        parameter = census.demanded[name]
        shard = sharding.rows(name, parameter.shape[0], rank)
        shape = (shard.size, *parameter.shape[1:])
        mapping = census.mappings[name]
        as_stored = own = stored_bytes(mapping.form, shape, mapping.block or FP8_BLOCK)
        # a vector in BF16 is a norm; other tensors in BF16 are operands of products, as stored
        wide = {"f32": F32, "i64": I64, "bf16": F32 if len(shape) == 1 else None}.get(parameter.kind)
        if wide is not None:
            own = math.prod(shape) * wide
        replicated = sharding.size > 1 and not shard.split
        view = as_stored if mapped and own == as_stored else 0
        kind = next((kind for part, kind in _PARTS.items() if part in name), WeightKind.EMBEDDING)
        of_one = as_stored, view, 0 if view else own, as_stored if replicated else 0
        found[kind].append(Weights(*(count * size for size in of_one)))
    if isinstance(config, LlamaConfig):
        found[WeightKind.ROTARY].append(Weights(own=config.head_dim // 2 * F32))
        return {kind: _sum(parts) for kind, parts in found.items() if parts}
    rotations = len(set(map(rotated_as, config.layer_kinds)))
    if census.head is not None:  # a head has its own
        found[WeightKind.DRAFTING].append(Weights(own=config.qk_rope_head_dim // 2 * F32))
    found[WeightKind.ROTARY].append(Weights(own=rotations * config.qk_rope_head_dim // 2 * F32))
    others = {WeightKind.FEED_FORWARD, WeightKind.ADAPTERS} | ({WeightKind.DRAFTING} if census.head is None else set())
    others |= {WeightKind.ENGRAM} if config.v41 is None else set()
    return {kind: _sum(parts) for kind, parts in found.items() if kind not in others}


def total(found: Mapping[WeightKind, Weights]) -> Weights:
    """Sum over kinds."""
    return _sum(found.values())


def _sum(parts: Collection[Weights]) -> Weights:
    return Weights(*(sum(sizes) for sizes in zip(Weights(), *parts, strict=True)))


def matrices(census: Census, sharding: ShardingPlan, rank: int) -> Matrices:
    """The forms and shapes of each matrix on a rank, over all layers and experts; of what is not here none."""
    found: dict[str, Counter[tuple[Form, int, int]]] = {}
    for name, count in census.alike.items():
        shape = census.demanded[name].shape
        shard = sharding.rows(name, shape[0], rank)
        if len(shape) == 2 and shard.size:
            parts = [part for part in name.split(".") if not part.isdigit()]
            bare = ".".join(part for part in parts if part not in ("model", "layers", "weight"))
            found.setdefault(bare, Counter())[census.mappings[name].form, shard.size, shape[1]] += count
    return found
