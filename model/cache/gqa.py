"""The seam between a layer with grouped heads and what it remembers: one call's heads go in, attended values come out.

A cache of this kind is not read by the layer. It takes the heads of a call, remembers what it means to remember of
them, and attends, because only it knows the form in which the past is held.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from kernels.ops import Ops
from model.cache.layers import Component, Components, Stand


class Heads(NamedTuple):
    """Queries, keys and values of one call's t tokens, in the run's dtype; H a multiple of K."""

    q: Tensor  # [t, H, d], rotated at the tokens' absolute positions
    k: Tensor  # [t, K, d], the same
    v: Tensor  # [t, K, d]
    gates: Tensor | None  # [t] float32, how much each token is worth keeping; None: a layer without write gates


class GqaCache(Components, ABC):
    """The cache of one layer with grouped heads."""

    def __init__(self, components: dict[str, Component]) -> None:
        super().__init__(components)
        self.position = 0  # tokens taken so far: the position of the next one

    def stands(self, position: int, first: int) -> list[Stand]:
        """Other tokens were taken than the position says."""
        del first
        return [] if self.position == position else [Stand("attention.kv", position, self.position, position)]

    def restore(self, position: int, saved: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave at `position`."""
        super().restore(position, saved)
        self.position = position

    @abstractmethod
    def attend(self, heads: Heads, first: int, ops: Ops) -> Tensor:
        """Take the tokens at positions ``first ..`` and attend from each to itself and to what is held before it.

        Parameters
        ----------
        heads
            Of t tokens; t is at most the chunk that the cache was made for.
        first
            Position of the first token, which is `position`.
        ops
            What to compute with.

        Returns
        -------
        Tensor
            [t, H, d] in the dtype of `heads.q`.

        """
