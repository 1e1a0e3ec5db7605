"""Bringing tokens to experts and their outputs back, on one rank or between ranks.

Whatever the way, an expert gets its tokens in ascending order, all of a call at once, and a token's outputs are added
up in ascending order of experts in fp32: the ways compute the same numbers, but for the order of sums inside a product
where an op set takes few tokens otherwise (`kernels.experts.triton`).

Between ranks there are two. *All-reduce*: every rank has all tokens, runs its own experts, and fills in their outputs;
one exchange gives every rank all of them. It moves k outputs per token to every rank, in one step: for decode.
*All-to-all*: each rank owns some of the tokens, sends each to the ranks of its experts and gets the outputs back. It
moves 2 k rows per token in all, in three steps: for long prefill. The rows that a rank sends are sorted by expert, and
so by the rank that holds it, then by token; those that it receives by the rank they come from and then as that rank
sent them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.experts.reference import summed
from model.arithmetic import Arithmetic
from model.call import Call
from model.ranks.ranks import AxisShard, Partial, Ranks

# Rows [n, hidden], the experts [n, k] int64 of each and their weights [n, k] float32, to the outputs [n, k, hidden] of
# those experts that are held here, zero for the others: the op `expert_outputs`.
Outputs = Callable[[Tensor, Tensor, Tensor], Tensor]


class Dispatch:
    """The way that a call's tokens take: none on one rank; on several, that which the call's shard asks for."""

    def __init__(self, arithmetic: Arithmetic, layer: int) -> None:
        self.ranks, self.layer = arithmetic.ranks, layer

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, call: Call, outputs: Outputs) -> Tensor:
        """Sum of the experts' weighted outputs [m, hidden] float32, of this rank's tokens x [m, hidden]."""
        if self.ranks.size == 1:
            return summed(outputs(x, ids, weights), ids)
        if call.shard.split:
            return all_to_all(x, ids, weights, self.ranks, outputs)
        return all_reduce(x, ids, weights, self.ranks, self.layer, outputs)


def all_reduce(x: Tensor, ids: Tensor, weights: Tensor, ranks: Ranks, layer: int, outputs: Outputs) -> Tensor:
    """Sum of outputs of tokens x [t, hidden] that every rank has, with each expert on one rank; replicated.

    Tripwire when a slot is filled by no rank or by two: a token is conserved.
    """
    own = ranks.shards.experts
    found = outputs(x, ids, weights)  # [t, k, hidden]
    filled = (ids >= own.start) & (ids < own.stop)
    whole = ranks.filled("experts.routed", layer, Partial(found.flatten(0, 1), filled.flatten()))
    return summed(whole.view_as(found), ids)


def all_to_all(x: Tensor, ids: Tensor, weights: Tensor, ranks: Ranks, outputs: Outputs) -> Tensor:
    """The same of this rank's own tokens x [m, hidden], m >= 0; [m, hidden] float32, of these tokens.

    How many rows go where must be known to the host before they can be sent: the one wait of a layer.
    """
    k = ids.shape[1]
    order = ids.flatten().argsort(stable=True)  # (token, slot) pairs, by expert, then token
    wanted = ids.flatten()[order]
    holder = _holder(wanted, ranks.shards.experts, ranks.size)
    counts = torch.zeros(ranks.size, dtype=torch.int64, device=x.device)  # a bincount would wait for its largest number
    sent, received = ranks.counted(counts.scatter_add_(0, holder, torch.ones_like(holder)))
    rows = ranks.exchange(x[order // k], sent, received)
    labels = torch.stack((wanted.double(), weights.flatten()[order].double()), dim=1)  # both exact in float64
    labels = ranks.exchange(labels, sent, received)
    found = outputs(rows, labels[:, :1].long(), labels[:, 1:].float())[:, 0]
    slots = x.new_empty(len(order), x.shape[1])
    slots[order] = ranks.exchange(found, received, sent)
    return summed(slots.unflatten(0, ids.shape), ids)


def _holder(expert: Tensor, shard: AxisShard, size: int) -> Tensor:
    """The rank of each expert: they divide evenly."""
    return expert // (shard.total // size)
