"""Bringing tokens to whole experts on other ranks, and their outputs back.

A token's row goes once to each rank that has one of its experts, in the FP8 codes to which its linears round it anyway.
The output of each pair of a token and an expert comes back by itself, and the token's rank adds them up in ascending
order of experts: the sum has the bits of one rank. Every rank is told the experts of all tokens first, and from these
follows what goes where: where rows are written into each other's memory (`model.ranks.mailbox`), no host waits to know
how many there are.

Many tokens travel in two halves: the second half's rows are on their way while the first half's experts run, and the
first half's outputs while the second's do. Before either, the caller has time for what needs no other rank.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fathom.kernels.experts.reference import FEW
from fathom.kernels.formats.groups import LINEAR_GROUP
from fathom.model.arithmetic import Arithmetic
from fathom.model.call import Call
from fathom.model.ranks.mailbox import WORD, Table
from fathom.model.ranks.ranks import AxisShard, Coming, Partial, Ranks, Route, evenly

HALVES: Final = 2  # in which a rank's tokens travel
# Tokens of an expert in a half, from which on its FP4 weights take less time to read than to multiply: each half reads
# them. By arithmetic, 149 on a B200 and 122 on an H200 (`runtime.plan.gpus`); not measured.
EACH = 128
# Rows [n, hidden], experts [n, k] of each as numbers of this rank's, others where they are no such, and weights [n, k]
# float32, to the outputs [n, k, hidden] of those that are here.
Outputs = Callable[[Tensor, Tensor, Tensor], Tensor]


def told(ids: Tensor, weights: Tensor, tokens: AxisShard, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Experts [m, k] int64 and weights [m, k] float32 of this rank's tokens to those of all, in one exchange."""
    if not tokens.split:
        return ids, weights
    every = ranks.whole(torch.cat((ids.int(), weights.view(torch.int32)), dim=1), 0, tokens)
    every_ids, every_weights = every.split(ids.shape[1], dim=1)
    return every_ids.long(), every_weights.contiguous().view(torch.float32)


def filled(x: Tensor, ids: Tensor, weights: Tensor, layer: int, arithmetic: Arithmetic, outputs: Outputs) -> Tensor:
    """Sum of the experts' outputs of tokens x [t, hidden] that every rank has: [t, hidden] float32, replicated.

    Each rank fills in the outputs of its experts. Tripwire when one is filled by no rank or by two.
    """
    ranks = arithmetic.ranks
    experts = ranks.shards.experts
    own = ids - experts.start
    found, here = outputs(x, own, weights), own.clamp(0, experts.size - 1) == own
    whole = ranks.filled("experts.routed", layer, Partial(found.flatten(0, 1), here.flatten()))
    return arithmetic.ops.sum_slots(whole.view_as(found), ids)


def dispatched(call: Call) -> bool:
    """Whether a call's tokens go to their experts, or all ranks get all of them: few do."""
    return call.shard.split and call.count > FEW


class _Half(NamedTuple):
    """Tokens of all ranks that travel together."""

    tokens: AxisShard  # of theirs this rank's
    ids: Tensor  # [n, k] of all of them
    weights: Tensor  # [n, k]
    rows: Coming  # what comes of their inputs


class Dispatch:
    """A call's own tokens on their way to their experts; `coded`: inputs of all experts are rounded to FP8.

    `summed` is to be called once.
    """

    def __init__(
        self, x: Tensor, ids: Tensor, weights: Tensor, call: Call, layer: int, arithmetic: Arithmetic, *, coded: bool
    ) -> None:
        self.layer, self.arithmetic, self.coded, self.width, self.dtype = layer, arithmetic, coded, x.shape[1], x.dtype
        ranks, experts = arithmetic.ranks, arithmetic.ranks.shards.experts.total
        totals = parts_of(call.count, ranks.size, ids.shape[1] / experts)
        parts = [evenly(total, ranks.rank, ranks.size) for total in totals]
        sizes = [part.size for part in parts]
        given = zip(parts, *(own.split(sizes) for own in (x, ids, weights)), strict=True)
        self.halves = [self._send(at, *one) for at, one in enumerate(given)]

    def _send(self, at: int, tokens: AxisShard, x: Tensor, ids: Tensor, weights: Tensor) -> _Half:
        """Tell all ranks where these go, and send each to the ranks of its experts."""
        ranks = self.arithmetic.ranks
        ids, weights = told(ids, weights, tokens, ranks)
        number, rank = (torch.arange(n, device=x.device) for n in (tokens.total, ranks.size))
        wanted = (self._holder(ids)[:, :, None] == rank).any(1)
        places = torch.where(wanted, number[:, None], -1)
        route = Route(tokens, owners(tokens, ranks.size, x.device), places, tokens.total)
        rows = self.arithmetic.ops.pack_fp8(x, LINEAR_GROUP) if self.coded else x
        if of_words := -rows.shape[1] % WORD:  # as many bytes as a mailbox copies at once
            rows = functional.pad(rows, (0, of_words))
        return _Half(tokens, ids, weights, ranks.moved("experts.dispatch", self.layer, at, rows, route))

    def summed(self, outputs: Outputs) -> Tensor:
        """Sum of the experts' weighted outputs of the own tokens: [m, hidden] float32."""
        back, sizes = [], [half.tokens.size for half in self.halves]
        for at in range(len(sizes)):
            half = self.halves.pop(0)  # whose rows live no longer than they are read
            back.append((half.tokens.of(half.ids), self._return(at, half, self._run(half, outputs))))
        return torch.cat(
            [
                self.arithmetic.ops.sum_slots(coming()[: ids.numel()].unflatten(0, ids.shape), ids)
                for ids, coming in back
            ]
        )

    def _run(self, half: _Half, outputs: Outputs) -> Tensor:
        """Outputs [n, k, hidden] of a half's tokens by the experts that are here."""
        rows = half.rows()
        packed = rows[:, : self.width + self.width // LINEAR_GROUP].contiguous() if self.coded else rows
        x = self.arithmetic.ops.unpack_fp8(packed, LINEAR_GROUP, self.dtype) if self.coded else rows
        return outputs(x, half.ids - self.arithmetic.ranks.shards.experts.start, half.weights)

    def _return(self, at: int, half: _Half, found: Tensor) -> Coming:
        """Send outputs [n, k, hidden] of those experts that are here to the ranks of their tokens."""
        ranks, (n, k, _) = self.arithmetic.ranks, found.shape
        owner, (short, more) = owners(half.tokens, ranks.size, found.device), divmod(n, ranks.size)
        first = owner * short + owner.clamp(max=more)  # of each token's rank
        place = torch.arange(n * k, device=found.device).view(n, k) - k * first[:, None]
        there = owner[:, None] == torch.arange(ranks.size, device=found.device)
        places = torch.where(there[:, None], place[:, :, None], -1).flatten(0, 1)
        longest = k * -(-n // ranks.size)
        route = Route(AxisShard(0, n * k, n * k, split=True), self._holder(half.ids).flatten(), places, longest)
        return ranks.moved("experts.combine", self.layer, HALVES + at, found.flatten(0, 1), route)

    def _holder(self, ids: Tensor) -> Tensor:
        """The rank of each expert: they divide evenly."""
        experts = self.arithmetic.ranks.shards.experts
        return ids // (experts.total // self.arithmetic.ranks.size)


def parts_of(tokens: int, ranks: int, share: float) -> list[int]:
    """How many of all ranks' tokens travel together: two halves, of the first and of the last of each rank's; or all.

    All where experts, of which each gets this `share` of the tokens, would have few in a half; and where a half would
    be so few that an op set computes them otherwise.
    """
    second = sum(evenly(tokens, rank, ranks).size // 2 for rank in range(ranks))
    return [tokens - second, second] if second > FEW and second * share >= EACH else [tokens]


def together(ranks: int, share: float) -> int:
    """Tokens of all ranks from which on they always travel in halves; `share` as of `parts_of`."""
    return int(2 * max(FEW + 1, EACH / share)) + ranks


def tables(tokens: int, ranks: int, slots: int, experts: int, row: int) -> list[Table]:
    """What a rank is sent in calls of up to so many tokens: inputs of each half, then outputs, a row of bytes each."""
    share = slots / experts
    parts = parts_of(tokens, ranks, share)
    sizes = [max(parts[0], min(tokens, together(ranks, share))), *parts[1:], *[0] * (HALVES - len(parts))]
    return [*(Table(n, row) for n in sizes), *(Table(slots * -(-n // ranks), row) for n in sizes)]


def owners(tokens: AxisShard, ranks: int, device: torch.device) -> Tensor:
    """The rank of each of all tokens, of which `tokens` are one rank's: [tokens.total] int64, without a host's list."""
    number, (short, more) = torch.arange(tokens.total, device=device), divmod(tokens.total, ranks)
    longer = more * (short + 1)  # tokens of the first ranks, which have one more
    rest = more + (number - longer) // max(short, 1)
    return torch.where(number < longer, number // (short + 1), rest)
