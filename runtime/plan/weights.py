"""Bytes of weights that a rank holds, by kind, from the census and the placement: nothing is read.

A weight stays as the checkpoint stores it: on the CPU a view of the mapped file, whose pages the system may drop and
read again, on a GPU a copy. What the model converts while it is built is its own on both: every norm, sink, bias and
mHC parameter is held in fp32, every table of experts in int64.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

from model.checkpoint.binding import Form
from model.checkpoint.census import Census
from model.checkpoint.names import Axis, Parameter, axis
from model.config import ModelConfig
from model.ranks.ranks import Share
from runtime.sharding import Placement

F32, I64 = 4, 8  # bytes

# Bytes of the values of one weight, or fewer where two share one; and of a scale, with the rows and columns it is for.
_VALUES: Final = {
    Form.FP8: (1, 1, 128, 128),
    Form.FP8_F32: (1, 4, 128, 128),
    Form.FP4: (0.5, 1, 1, 32),
    Form.NVFP4: (0.5, 1, 1, 16),
}
_PLAIN: Final = {Form.BF16: 2, Form.F16: 2, Form.F32: F32, Form.I64: I64, Form.I32: 4}


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
    ROTARY = "rotary frequencies"  # computed from the config


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of one kind of weights on one rank."""

    stored: int = 0  # of the checkpoint's, as its files hold them: what this rank reads
    mapped: int = 0  # of these, views of the files that the model keeps: none on a GPU
    own: int = 0  # memory of the process: copies and conversions
    whole: int = 0  # of `stored`, what every other rank stores too

    def __add__(self, other: Self) -> "Weights":
        """Sum, field by field."""
        return Weights(
            self.stored + other.stored, self.mapped + other.mapped, self.own + other.own, self.whole + other.whole
        )


def weight_kind(name: str) -> WeightKind:
    """Which kind a parameter is of, by its official name."""
    if name.endswith("norm.weight"):
        return WeightKind.NORMS
    for part, kind in (
        ("hc_", WeightKind.MHC),
        (".ffn.experts.", WeightKind.ROUTED),
        (".ffn.shared_experts.", WeightKind.SHARED),
        (".ffn.gate.", WeightKind.GATES),
        (".attn.indexer.", WeightKind.INDEXER),
        (".attn.compressor.", WeightKind.COMPRESSORS),
        (".attn.", WeightKind.ATTENTION),
    ):
        if part in name:
            return kind
    return WeightKind.EMBEDDING


def stored_bytes(form: Form, shape: tuple[int, ...]) -> int:
    """Bytes of a parameter of this shape with its scales, as the checkpoint stores it."""
    if form in _PLAIN:
        return math.prod(shape) * _PLAIN[form]
    value, scale, block_rows, block_columns = _VALUES[form]
    rows, columns = shape
    scales = -(-rows // block_rows) * -(-columns // block_columns) * scale
    return int(rows * columns * value) + scales + (F32 if form is Form.NVFP4 else 0)


def held(form: Form, parameter: Parameter, share: Share, *, mapped: bool, replicated: bool) -> Weights:
    """What a rank holds of one parameter, of which `share` says the rows."""
    shape = (share.size, *parameter.shape[1:])
    stored = stored_bytes(form, shape)
    wide = {"f32": F32, "i64": I64}.get(parameter.kind)
    if parameter.kind == "bf16" and len(shape) == 1:  # a norm; the other vectors are operands of products, as stored
        wide = F32
    own = stored if wide is None else math.prod(shape) * wide
    whole = stored if replicated else 0
    if mapped and own == stored:
        return Weights(stored, stored, 0, whole)
    return Weights(stored, 0, own, whole)


def weights(
    config: ModelConfig, census: Census, placement: Placement, rank: int, *, mapped: bool
) -> dict[WeightKind, Weights]:
    """What a rank holds of a checkpoint, by kind.

    Parameters
    ----------
    config : ModelConfig
        The architecture.
    census : Census
        Of a checkpoint, or of `model.checkpoint.published.published_tensors`.
    placement : Placement
        Who holds which rows.
    rank : int
        Which rank.
    mapped : bool
        Whether weights are views of mapped files, as they are on the CPU, or copied to a device.

    Returns
    -------
    dict[WeightKind, Weights]
        Every kind, in the order of `WeightKind`. Exact, but for a tensor whose first byte is misaligned for its dtype:
        torch makes no view of such a one, so on the CPU it is a copy. No published file has any.
    """
    found = dict.fromkeys(WeightKind, Weights())
    for name, binding in census.bindings.items():
        parameter = census.demanded[name]
        share = placement.rows(name, parameter.shape[0], rank)
        if share is not None:
            replicated = placement.size > 1 and not share.split and axis(name)[0] is not Axis.EXPERTS
            found[weight_kind(name)] += held(binding.form, parameter, share, mapped=mapped, replicated=replicated)
    rotary = len(set(config.layer_kinds)) * config.qk_rope_head_dim // 2 * F32
    found[WeightKind.ROTARY] = Weights(own=rotary)
    return found


def total(found: Mapping[WeightKind, Weights]) -> Weights:
    """Sum over kinds."""
    return sum(found.values(), Weights())
