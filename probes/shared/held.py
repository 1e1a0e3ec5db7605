"""What a loaded model holds: each parameter's place among the model's objects, and the numbers an op makes of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fathom.kernels.formats.reference import looked_up
from fathom.kernels.formats.stored import Dense, Fp4, Fp8, Fp8Rows, NvFp4, Weight, rows
from fathom.kernels.ops import Ops
from fathom.model.linear import Embedding, GroupedLinear, Linear, OutputLinear, Reader
from fathom.model.moe import MoE
from fathom.model.transformer import Transformer

# Official names to attributes, applied in this order to a name without its ".weight".
_SPELLINGS = (
    ("layers.", "blocks."),
    ("hc_head_", "hyper_head."),
    (".hc_attn_", ".attention_streams."),
    (".hc_ffn_", ".experts_streams."),
    (".attn_norm", ".attention_norm"),
    (".ffn_norm", ".experts_norm"),
    (".attn_sink", ".sink"),
    (".attn.", ".attention."),
    (".ape", ".wgate.position_bias"),
    (".ffn.", ".experts."),
    (".shared_experts.", ".shared."),
    (".tid2eid", ".table"),
    (".bias_vl", ".bias_of_images"),
    (".indexer.wk", ".indexer.compressor.wk"),
    (".indexer.k_norm", ".indexer.compressor.norm"),
    (".engram.embed", ".engram.table"),
)
Value = Weight | Fp8Rows | Tensor
IDENTITY = 1 << 21  # numbers in a tile of the identity: 8 MiB of fp32


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter in the model: an attribute of one of its objects."""

    holder: Any
    attribute: str
    stacked: MoE | None = None  # that reads the matrix of a routed expert from a stack of its own

    @property
    def value(self) -> Value:
        """What the model holds there now."""
        value: Value = getattr(self.holder, self.attribute)
        return value

    def put(self, value: Value) -> None:
        """Let the model hold something else."""
        setattr(self.holder, self.attribute, value)
        if self.stacked is not None:
            self.stacked.stack()

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that make it up: values, and scales where there are some."""
        value = self.value
        return (value,) if isinstance(value, Tensor) else tuple(value)


def find(model: Transformer, name: str) -> Held | None:
    """The place of a parameter by its official name; None when no object of the model holds it."""
    path = name if name.endswith(".gate.weight") else name.removesuffix(".weight")
    path = "embedding" if path == "embed" else path
    for official, ours in _SPELLINGS:
        path = path.replace(official, ours)
    *steps, attribute = path.split(".")
    holder: Any = model
    stacked = None
    for step in steps:
        stacked = holder if isinstance(holder, MoE) and step == "experts" else stacked
        if step.isdigit():
            if int(step) >= len(holder):
                return None
            holder = holder[int(step)]
        else:
            holder = getattr(holder, step, None)
            if holder is None:
                return None
    value = getattr(holder, attribute, None)
    if isinstance(value, Linear | OutputLinear | Reader | Embedding):
        holder, attribute, value = value, "weight", value.weight
    return Held(holder, attribute, stacked) if isinstance(value, _KINDS) else None


_KINDS = (Tensor, Dense, Fp8, Fp8Rows, Fp4, NvFp4)


def used(ops: Ops, held: Held, groups: int, start: int, stop: int) -> Iterator[tuple[int, Tensor]]:
    """The numbers that the model's own ops compute with, in fp32: rows `start` to `stop`.

    A matrix is not decoded here: the op that the model calls multiplies it by the identity, which changes nothing, so
    what comes out is what every activation meets: stored bytes, scales, decoding and all. A vector or table is what
    the model holds.

    Yields
    ------
    tuple[int, Tensor]
        A column, and the columns from there on: [rows, <= columns] float32; values of a vector or a table whole.

    """
    value = held.value
    if isinstance(value, Tensor):
        yield 0, value[start:stop]
        return
    if isinstance(value, Fp8Rows):
        yield 0, looked_up(value, torch.arange(start, stop), torch.float32)
        return
    part = value if (start, stop) == (0, value.shape[0]) else rows(value, start, stop)
    grouped = isinstance(held.holder, GroupedLinear)
    groups = groups if part is value and grouped else 1
    columns = part.shape[1]
    step = max(1, IDENTITY // (columns * groups))
    for low in range(0, columns, step):
        x = torch.zeros(min(step, columns - low), columns, device=part.data.device)
        x[:, low : low + len(x)].fill_diagonal_(1)
        if grouped:
            out = ops.grouped_linear(x[:, None].expand(-1, groups, -1), part, groups).flatten(1)
        else:
            out = ops.linear(x, part)
        yield low, out.T
