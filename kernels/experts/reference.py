"""The routed experts of one rank."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.formats.groups import LINEAR_GROUP
from kernels.formats.stored import Fp4, Fp8, Stack, Weight, member, members
from kernels.linear.reference import linear
from kernels.quantise.reference import simulate_fp8
from kernels.swiglu.reference import swiglu


def by_expert(ids: Tensor, first: int, count: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Group routed tokens by expert.

    Parameters
    ----------
    ids
        [t, k] int64, the experts of each token, distinct within a row.
    first, count
        The experts that are asked for: ``first .. first + count - 1``.

    Yields
    ------
    tuple[int, Tensor, Tensor]
        Each of them that has tokens, counted from `first`, in ascending order, with the rows [n] of its tokens,
        ascending, and their slots [n] in 0 .. k - 1.

    """
    order = ids.flatten().argsort(stable=True)
    start = 0
    for expert, found in enumerate(torch.bincount(ids.flatten(), minlength=first + count).tolist()):
        if found and first <= expert < first + count:
            places = order[start : start + found]
            yield expert - first, places // ids.shape[1], places % ids.shape[1]
        start += found


@dataclass(frozen=True, slots=True)
class _Parts:
    """What experts are made of; an op set gives its own, and any may be replaced."""

    linear: Callable[..., Tensor]
    swiglu: Callable[..., Tensor]
    simulate_fp8: Callable[..., Tensor]

    def one(self, x: Tensor, weights: Tensor, matrices: Iterable[Weight], limit: float, *, deployed: bool) -> Tensor:
        """One expert, of w1, w3 and w2: its tokens x [n, hidden] to its outputs, weighted by weights [n]."""

        def product(x: Tensor, weight: Weight) -> Tensor:
            rounds = deployed and isinstance(weight, Fp8 | Fp4)
            return self.linear(self.simulate_fp8(x, LINEAR_GROUP) if rounds else x, weight)

        w1, w3, w2 = matrices
        return product(self.swiglu(product(x, w1), product(x, w3), limit, weights), w2)


class ExpertOutputs(_Parts):
    """Weighted outputs of those of a token's experts that this rank holds, each in its slot: what ranks exchange.

    Equation: ``y[t, s] = W2_e swiglu(W1_e x[t], W3_e x[t], limit, weights[t, s])`` with ``e = ids[t, s]``, rounded to
    the dtype of `x` (DeepSeek `Expert.forward`).
    """

    __slots__ = ()

    def __call__(  # noqa: PLR0913 (as many as the equation has)
        self, x: Tensor, ids: Tensor, weights: Tensor, w1: Stack, w3: Stack, w2: Stack, limit: float, first: int,
        *, deployed: bool,
    ) -> Tensor:  # fmt: skip
        """Run one expert after the other.

        Parameters
        ----------
        x, ids, weights, w1, w3, w2, limit, first, deployed
            As `Experts` has them.

        Returns
        -------
        Tensor
            [t, k, hidden] in the dtype of `x`; zero, with all bits zero, where the expert is another rank's.

        """
        out = x.new_zeros(*ids.shape, x.shape[1])
        for expert, tokens, slots in by_expert(ids, first, members(w1)):
            three = (member(w, expert) for w in (w1, w3, w2))
            out[tokens, slots] = self.one(x[tokens], weights[tokens, slots], three, limit, deployed=deployed)
        return out


class Experts(_Parts):
    """Sum of the weighted outputs of those of a token's experts that this rank holds, in ascending order of experts.

    Equation: ``sum_e y_e`` in fp32 of what `ExpertOutputs` gives (DeepSeek `MoE.forward`).
    """

    __slots__ = ()

    def __call__(  # noqa: PLR0913 (as many as the equation has)
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        w1: Stack,
        w3: Stack,
        w2: Stack,
        limit: float,
        first: int,
        *,
        deployed: bool,
    ) -> Tensor:
        """Run one expert after the other.

        Parameters
        ----------
        x
            [t, hidden] bfloat16 or float32.
        ids
            [t, k] int64, the experts of each token, distinct within a row. Those outside of ``first .. first + E - 1``
            are other ranks': nothing is added for them.
        weights
            [t, k] float32 routing weights.
        w1, w3
            Gate and up, E matrices [intermediate, hidden], both of one form.
        w2
            Down, E matrices [hidden, intermediate].
        limit
            `swiglu_limit`.
        first
            Id of the expert whose matrices come first.
        deployed
            Whether inputs of Fp8 and Fp4 matrices are rounded to E4M3 per 128 columns first. `intermediate` and
            `hidden` are multiples of 128 then.

        Returns
        -------
        Tensor
            [t, hidden] float32.

        """
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert, tokens, slots in by_expert(ids, first, members(w1)):
            three = (member(w, expert) for w in (w1, w3, w2))
            found = self.one(x[tokens], weights[tokens, slots], three, limit, deployed=deployed)
            out.index_add_(0, tokens, found.float())
        return out


experts = Experts(linear, swiglu, simulate_fp8)
expert_outputs = ExpertOutputs(linear, swiglu, simulate_fp8)


def summed(outputs: Tensor, ids: Tensor) -> Tensor:
    """Add up outputs [t, k, hidden] of experts `ids` [t, k] in ascending order of experts, in fp32: [t, hidden]."""
    total = torch.zeros(outputs.shape[0], outputs.shape[2], device=outputs.device)
    order = ids.argsort(dim=1)
    token = torch.arange(outputs.shape[0], device=outputs.device)
    for slot in order.unbind(1):
        total += outputs[token, slot].float()
    return total
