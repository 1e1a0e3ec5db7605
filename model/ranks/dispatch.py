"""Bringing tokens to experts and their outputs back, on one rank or between ranks.

Whatever the way, an expert gets its tokens in ascending order, all of a call at once, and a token's outputs are added
up in ascending order of experts in fp32: the ways compute the same numbers.

Between ranks there are two. *All-reduce*: every rank has all tokens, runs its own experts, and fills in their outputs;
one exchange gives every rank all of them. It moves k outputs per token to every rank, in one step: for decode.
*All-to-all*: each rank owns some of the tokens, sends each to the ranks of its experts and gets the outputs back. It
moves 2 k rows per token in all, in three steps: for long prefill. The rows that a rank sends are sorted by expert, and
so by the rank that holds it, then by token; those that it receives by the rank they come from and then as that rank
sent them.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from model.arithmetic import Arithmetic
from model.call import Call
from model.ranks.ranks import AxisShard, Partial, Ranks

# Rows [n, hidden] of one expert's tokens, and their weights [n] float32, to its outputs [n, hidden].
Experts = Callable[[int, Tensor, Tensor], Tensor]


class Dispatch:
    """The way that a call's tokens take: `alone` on one rank; on several, that which the call's shard asks for."""

    def __init__(self, arithmetic: Arithmetic, layer: int) -> None:
        self.ranks, self.layer = arithmetic.ranks, layer

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, call: Call, run: Experts) -> Tensor:
        """Sum of the experts' weighted outputs, of this rank's tokens x [m, hidden]; see `alone`."""
        if self.ranks.size == 1:
            return alone(x, ids, weights, self.ranks.shards.experts.total, run)
        if call.shard.split:
            return all_to_all(x, ids, weights, self.ranks, run)
        return all_reduce(x, ids, weights, self.ranks, self.layer, run)


def by_expert(ids: Tensor, experts: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Group routed tokens by expert.

    Parameters
    ----------
    ids
        [t, k] int64, the experts of each token, distinct within a row.
    experts
        Number of experts.

    Yields
    ------
    tuple[int, Tensor, Tensor]
        Each expert that has tokens, in ascending order, with the rows [n] of its tokens, ascending, and their slots [n]
        in 0 .. k - 1.

    """
    order = ids.flatten().argsort(stable=True)
    counts = torch.bincount(ids.flatten(), minlength=experts).tolist()
    start = 0
    for expert, count in enumerate(counts):
        if count:
            places = order[start : start + count]
            yield expert, places // ids.shape[1], places % ids.shape[1]
            start += count


def alone(x: Tensor, ids: Tensor, weights: Tensor, experts: int, run: Experts) -> Tensor:
    """Sum of the experts' weighted outputs, all of them here.

    Parameters
    ----------
    x
        [t, hidden].
    ids, weights
        [t, k] int64 and float32: the experts of each token.
    experts
        Number of experts.
    run
        Runs one of them.

    Returns
    -------
    Tensor
        [t, hidden] float32.

    """
    out = torch.zeros_like(x, dtype=torch.float32)
    if x.shape[0] == 1:  # decode: nothing to group
        for expert, slot in sorted((expert, slot) for slot, expert in enumerate(ids[0].tolist())):
            out += run(expert, x, weights[:, slot])
        return out
    for expert, rows, slots in by_expert(ids, experts):
        out.index_add_(0, rows, run(expert, x.index_select(0, rows), weights[rows, slots]).float())
    return out


def all_reduce(x: Tensor, ids: Tensor, weights: Tensor, ranks: Ranks, layer: int, run: Experts) -> Tensor:
    """Sum as `alone`, of tokens that every rank has, with each expert on one rank; replicated.

    Tripwire when a slot is filled by no rank or by two: a token is conserved.
    """
    own = ranks.shards.experts
    outputs = x.new_zeros(*ids.shape, x.shape[1])  # [t, k, hidden]
    filled = torch.zeros_like(ids, dtype=torch.bool)
    for expert, rows, slots in by_expert(ids, own.total):
        if own.start <= expert < own.stop:
            outputs[rows, slots] = run(expert, x[rows], weights[rows, slots])
            filled[rows, slots] = True
    whole = ranks.filled("experts.routed", layer, Partial(outputs.flatten(0, 1), filled.flatten()))
    return _summed(whole.view_as(outputs), ids)


def all_to_all(x: Tensor, ids: Tensor, weights: Tensor, ranks: Ranks, run: Experts) -> Tensor:
    """Sum as `alone`, of this rank's own tokens x [m, hidden], m >= 0; [m, hidden] float32, of these tokens."""
    k = ids.shape[1]
    order = ids.flatten().argsort(stable=True)  # (token, slot) pairs, by expert, then token
    wanted = ids.flatten()[order]
    sent = torch.bincount(_holder(wanted, ranks.shards.experts, ranks.size), minlength=ranks.size).tolist()
    rows, received = ranks.exchange(x[order // k], sent)
    labels = torch.stack((wanted.double(), weights.flatten()[order].double()), dim=1)  # both exact in float64
    labels, _ = ranks.exchange(labels, sent, received)
    outputs = torch.empty_like(rows)
    for expert, places, _ in by_expert(labels[:, :1].long(), ranks.shards.experts.total):
        outputs[places] = run(expert, rows[places], labels[places, 1].float())
    back, _ = ranks.exchange(outputs, received, sent)
    slots = x.new_empty(len(order), x.shape[1])
    slots[order] = back
    return _summed(slots.unflatten(0, ids.shape), ids)


def _holder(expert: Tensor, shard: AxisShard, size: int) -> Tensor:
    """The rank of each expert: they divide evenly."""
    return expert // (shard.total // size)


def _summed(outputs: Tensor, ids: Tensor) -> Tensor:
    """Add up outputs [t, k, hidden] of experts `ids` [t, k] in ascending order of experts, in fp32: [t, hidden]."""
    total = torch.zeros(outputs.shape[0], outputs.shape[2], device=outputs.device)
    order = ids.argsort(dim=1)
    token = torch.arange(outputs.shape[0], device=outputs.device)
    for slot in order.unbind(1):
        total += outputs[token, slot].float()
    return total
