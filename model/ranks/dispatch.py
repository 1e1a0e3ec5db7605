"""Bringing tokens to whole experts on other ranks, and their outputs back.

A token's row goes once to each rank that has one of its experts, in the FP8 codes to which its linears round it anyway.
The output of each pair of a token and an expert comes back by itself, and the token's rank adds them up in ascending
order of experts: the sum has the bits of one rank. Every rank is told the experts of all tokens first, and from these
follows what goes where: where rows are written into each other's memory (`model.ranks.mailbox`), no host waits to know
how many there are.

A rank's tokens travel in two halves. The second half's rows are on their way while the first half's experts run, and
the first half's outputs while the second's do; before either, the caller has time for what needs no other rank.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fathom.kernels.experts.reference import FEW
from fathom.kernels.formats.groups import LINEAR_GROUP
from fathom.model.arithmetic import Arithmetic
from fathom.model.call import Call
from fathom.model.ranks.mailbox import Table
from fathom.model.ranks.ranks import AxisShard, Coming, Partial, Route, evenly

HALVES: Final = 2  # in which a rank's tokens travel
# Rows [n, hidden], experts [n, k] of each as numbers of this rank's, -1 for another's, and weights [n, k] float32, to
# the outputs [n, k, hidden] of those that are here.
Outputs = Callable[[Tensor, Tensor, Tensor], Tensor]


def local(ids: Tensor, experts: AxisShard) -> Tensor:
    """Experts `ids` as numbers of those that are here; -1 for another rank's."""
    here = (ids >= experts.start) & (ids < experts.stop)
    return torch.where(here, ids - experts.start, -1)


def filled(x: Tensor, ids: Tensor, weights: Tensor, layer: int, arithmetic: Arithmetic, outputs: Outputs) -> Tensor:
    """Sum of the experts' outputs of tokens x [t, hidden] that every rank has: [t, hidden] float32, replicated.

    Each rank fills in the outputs of its experts. Tripwire when one is filled by no rank or by two.
    """
    ranks = arithmetic.ranks
    own = local(ids, ranks.shards.experts)
    found, here = outputs(x, own, weights), (own >= 0).flatten()
    whole = ranks.filled("experts.routed", layer, Partial(found.flatten(0, 1), here))
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
        self.layer, self.arithmetic, self.coded, self.dtype = layer, arithmetic, coded, x.dtype
        parts = halves(call.shard, arithmetic.ranks.size, arithmetic.ranks.rank)
        sizes = [part.size for part in parts]
        given = zip(parts, *(own.split(sizes) for own in (x, ids, weights)), strict=True)
        self.halves = [self._send(at, *one) for at, one in enumerate(given)]

    def _send(self, at: int, tokens: AxisShard, x: Tensor, ids: Tensor, weights: Tensor) -> _Half:
        """Tell all ranks where these go, and send each to the ranks of its experts."""
        ranks = self.arithmetic.ranks
        ids, weights = (ranks.whole(own, 0, tokens) for own in (ids, weights))
        number, rank = (torch.arange(n, device=x.device) for n in (tokens.total, ranks.size))
        wanted = (self._holder(ids)[:, :, None] == rank).any(1)
        places = torch.where(wanted, number[:, None], -1)
        route = Route(tokens, owners(tokens, ranks.size, x.device), places, tokens.total)
        rows = self.arithmetic.ops.pack_fp8(x, LINEAR_GROUP) if self.coded else x
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
        x = self.arithmetic.ops.unpack_fp8(rows, LINEAR_GROUP, self.dtype) if self.coded else rows
        return outputs(x, local(half.ids, self.arithmetic.ranks.shards.experts), half.weights)

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


def halves(tokens: AxisShard, ranks: int, rank: int = 0) -> list[AxisShard]:
    """What of each of two halves of all ranks' tokens a rank has: a half has the first, or the last, of each rank's.

    One half where the second would be so few that an op set computes them otherwise.
    """
    second = sum(evenly(tokens.total, of, ranks).size // 2 for of in range(ranks))
    parts = [tokens.total - second, second] if second > FEW else [tokens.total]
    return [evenly(total, rank, ranks) for total in parts]


def tables(tokens: int, ranks: int, slots: int, row: int) -> list[Table]:
    """What a rank is sent in calls of up to so many tokens: inputs of each half, then outputs, a row of bytes each."""
    one = min(tokens, 2 * FEW + ranks)  # of calls that go in one half
    parts = [part.total for part in halves(evenly(tokens, 0, ranks), ranks)]
    sizes = [max(parts[0], one), *parts[1:], *[0] * (HALVES - len(parts))]
    return [*(Table(n, row) for n in sizes), *(Table(slots * -(-n // ranks), row) for n in sizes)]


def owners(tokens: AxisShard, ranks: int, device: torch.device) -> Tensor:
    """The rank of each of all tokens, of which `tokens` are one rank's: [tokens.total] int64, without a host's list."""
    number, (short, more) = torch.arange(tokens.total, device=device), divmod(tokens.total, ranks)
    longer = more * (short + 1)  # tokens of the first ranks, which have one more
    rest = more + (number - longer) // max(short, 1)
    return torch.where(number < longer, number // (short + 1), rest)
