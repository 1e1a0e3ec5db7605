"""A rank of several on torch's meta device: its exchanges give shapes, and take what the real ones take."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fathom.kernels.tripwires.reference import CHECKED
from fathom.model.ranks.ranks import KEPT, Coming, Group, Ranks, Route, Shards
from fathom.runtime.plan.alive import Alive


@dataclass
class Values:
    """What of a call no shape tells: where tokens go, how scores are spread, and the device."""

    k: int  # experts of a token
    experts: int  # on all ranks
    here: int  # of them on this rank
    device: torch.device  # that the run is for
    tokens: int = 1  # of the call
    even: bool = False  # whether tokens spread evenly over experts; else all go to one expert, or to this rank's
    few_pass: bool = False  # whether few entries pass the indexer's comparisons; else all do

    def of_one(self, pairs: int) -> int:
        """Of so many pairs of a token and an expert, those of the expert that has most."""
        found = min(self.tokens, -(-self.tokens * self.k // self.experts)) if self.even else self.tokens
        return min(pairs, found)

    def pairs(self, tokens: int) -> int:
        """Pairs of so many tokens and an expert on this rank."""
        return -(-tokens * self.k * self.here // self.experts) if self.even else tokens * min(self.k, self.here)

    def reached(self, tokens: int) -> int:
        """Of so many tokens, those that have an expert on this rank."""
        return min(tokens, self.pairs(tokens))


class MetaRanks(Ranks):
    """A rank that exchanges shapes; `times`: for how many layers each of the model's stands.

    gloo, on the CPU, lays out once more what is gathered; NCCL does not, nor does either for what else is exchanged.
    """

    def __init__(
        self, group: Group, shards: Shards, tokens: str, values: Values, alive: Alive, times: Sequence[int]
    ) -> None:
        super().__init__(group, shards, tokens)
        self.values, self.alive, self.times, self._apart = values, alive, times, True
        self._kept: list[list[Tensor]] = [[], []]  # what is compared next, and what was the last time

    def record(self, site: str, layer: int | None, tensor: Tensor) -> None:
        """Keep a tensor until it is compared; of a short call those of all layers are."""
        del site
        if self.size > 1:
            like = self.times[layer] - 1 if layer is not None and self.values.tokens <= KEPT else 0
            self._kept[0] += [tensor, *(torch.empty_like(tensor) for _ in range(like))]

    def verify(self, *, wait: bool = True) -> None:
        """Compare what was kept; without `wait` it lives until the next time."""
        words = max((tensor.nbytes // 4 for tensor in self._kept[0]), default=0)
        self.alive.take(4 * 8 * min(CHECKED, words))  # of 64 bits: words, their places, factors and products
        self._kept = [[], [] if wait else self._kept[0]]

    def moved(self, site: str, layer: int, table: int, rows: Tensor, route: Route) -> Coming:
        """As `Ranks` by a collective, each row behind its number."""
        del layer, table
        own, row = rows.view(torch.uint8), 4
        if site == "experts.dispatch":
            sent, coming = len(own) * min(self.size, self.values.k), self.values.reached(route.into)
        else:
            sent, coming = self.values.pairs(len(own) // self.values.k), route.into
        given = torch.cat((own.new_empty(sent, row), own.new_empty(sent, own.shape[1])), dim=1)
        got = own.new_empty(coming, given.shape[1])

        def arrived(given: Tensor = given) -> Tensor:
            out = given.new_zeros(route.into, got.shape[1] - row)
            return out.view(rows.dtype)

        return arrived

    def _gathered(self, own: Tensor) -> Tensor:
        every = own.new_empty(self.size, len(own))
        self.alive.take(every.nbytes if self.values.device.type == "cpu" else 0)
        return every
