"""The experts of a layer on several ranks, in two ways. No sum crosses ranks in either.

By *rows* each rank has rows of every expert: all of them run every token, each its columns of both halves of an expert,
and put these together after each half. *Whole*, each routed expert is on one rank, to which its tokens go
(`model.ranks.dispatch`), and the shared one on every rank.
"""

import torch
from torch import Tensor

from fathom.model.arithmetic import Arithmetic
from fathom.model.call import Call
from fathom.model.checkpoint.weights import Weights
from fathom.model.config import ModelConfig
from fathom.model.moe import MoE
from fathom.model.ranks.dispatch import Dispatch, dispatched, filled, told


class ByRows(MoE):
    """Rows of all matrices are here: `Expert.up` gives their columns, and `down`, which takes all, columns of its own.

    Where linears round what they are given, it is exchanged as codes.
    """

    def output(self, x: Tensor, ids: Tensor, weights: Tensor, call: Call) -> Tensor:
        """See `MoE.output`."""
        ranks = self.arithmetic.ranks
        x = self.arithmetic.whole_rows(x, call, coded=self.coded and self.coded_shared)
        ids, weights = told(ids, weights, call.shard, ranks)
        up = torch.cat((self.routed_up(x, ids, weights), self.shared.up(x)[:, None]), dim=1)  # [t, k + 1, inner]
        up = self.arithmetic.whole_columns(up, ranks.shards.inner, coded=self.coded_inner)
        return call.columns(self.shared.down(up[:, -1], self.routed_down(up[:, :-1], ids)), ranks.shards.output)


class Whole(MoE):
    """Some of the routed experts are here."""

    def output(self, x: Tensor, ids: Tensor, weights: Tensor, call: Call) -> Tensor:
        """See `MoE.output`."""
        if not dispatched(call):
            every, (ids, weights) = call.whole(x), told(ids, weights, call.shard, self.arithmetic.ranks)
            return self.shared(x, call.own(filled(every, ids, weights, self.layer, self.arithmetic, self.outputs)))
        going = Dispatch(x, ids, weights, call, self.layer, self.arithmetic, coded=self.coded)
        up = self.shared.up(x)  # while the first rows are on their way
        return self.shared.down(up, going.summed(self.outputs))


def build_moe(config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic) -> MoE:
    """Return the experts of a layer, as they lie on the ranks that there are."""
    shards = arithmetic.ranks.shards
    kind = Whole if shards.experts.split else ByRows if shards.inner.split else MoE
    return kind(config, layer, weights, arithmetic)
