"""Faults between ranks: each function changes the part of a model that one rank holds.

On one rank alone they do nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.formats.rows import Rows
from kernels.ops import Ops
from model.attention import CsaAttention
from model.call import Call
from model.moe import MoE
from model.ranks.ranks import Partial
from model.transformer import Transformer


def sinks_of_rank_0(model: Transformer) -> None:
    """Give every rank the sinks of rank 0's heads."""
    for block in model.blocks:
        block.attention.sink = model.arithmetic.ranks.of_first(block.attention.sink.clone())


class _SumsReplicated(MoE):
    def routed(self, x: Tensor, ids: Tensor, weights: Tensor, call: Call) -> Tensor:
        """Sum over ranks what every rank has in full."""
        total = super().routed(x, ids, weights, call)
        everybody = torch.ones(len(total), dtype=torch.bool, device=total.device)
        return self.dispatch.ranks.filled("experts.routed", self.dispatch.layer, Partial(total, everybody))


def replicated_summed_as_partial(model: Transformer) -> None:
    """Add up over ranks the experts' output, which every rank has in full by then."""
    for block in model.blocks:
        block.experts.__class__ = _SumsReplicated


@dataclass(frozen=True, slots=True)
class _TakesTheOneBefore:
    """A `select` whose last entry of each row is the one before it, where that was not selected."""

    ops: Ops

    def __call__(self, q: Tensor, head_weights: Tensor, keys: Rows, first: int, ratio: int, k: int) -> Tensor:
        selected = self.ops.select(q, head_weights, keys, first, ratio, k)
        if selected.shape[1] > 1:
            last, previous = selected[:, -1], selected[:, -2]
            selected[:, -1] = torch.where(last - 1 > previous, last - 1, last)
        return selected


def top_k_of_rank_1_differs(model: Transformer) -> None:
    """Let rank 1 select another entry than it should as the last of a row, where there is one to take."""
    if model.arithmetic.ranks.rank != 1:
        return
    for block in model.blocks:
        if isinstance(block.attention, CsaAttention):
            indexer = block.attention.indexer
            other = indexer.arithmetic.ops._replace(select=_TakesTheOneBefore(indexer.arithmetic.ops))
            indexer.arithmetic = indexer.arithmetic._replace(ops=other)


def shared_expert_of_rank_1_differs(model: Transformer) -> None:
    """Swap gate and up of the last layer's shared expert on rank 1: a replicated weight that is not the same there."""
    if model.arithmetic.ranks.rank == 1:
        shared = model.blocks[-1].experts.shared
        shared.w1, shared.w3 = shared.w3, shared.w1


def experts_off_by_one(model: Transformer) -> None:
    """Run the first expert of each rank with the weights of its second: an off-by-one of the placement."""
    if model.arithmetic.ranks.size == 1:
        return
    for block in model.blocks:
        here = block.experts.dispatch.ranks.shards.experts
        if here.size > 1:
            block.experts.experts[here.start] = block.experts.experts[here.start + 1]
