"""The routed experts, and the two halves between which ranks exchange what they have computed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fathom.kernels.formats.groups import LINEAR_GROUP
from fathom.kernels.formats.stored import Fp4, Fp8, Stack, Weight, member, members
from fathom.kernels.linear.reference import linear
from fathom.kernels.quantise.reference import simulate_fp8
from fathom.kernels.swiglu.reference import swiglu

FEW = 32  # tokens up to which a GPU's experts are those of a token alone, to the bit


def by_expert(ids: Tensor, count: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Group routed tokens by expert.

    Parameters
    ----------
    ids
        [t, k] int64, the experts of each token, distinct within a row, in 0 .. count - 1.
    count
        How many experts there are.

    Yields
    ------
    tuple[int, Tensor, Tensor]
        Each expert that has tokens, in ascending order, with the rows [n] of its tokens, ascending, and their slots [n]
        in 0 .. k - 1.

    """
    order = ids.flatten().argsort(stable=True)
    start = 0
    for expert, found in enumerate(torch.bincount(ids.flatten(), minlength=count).tolist()):
        if found:
            places = order[start : start + found]
            yield expert, places // ids.shape[1], places % ids.shape[1]
        start += found


def sum_slots(y: Tensor, ids: Tensor) -> Tensor:
    """Add the outputs of a token's experts as `experts` does: in fp32, from 0 on, in ascending order of experts.

    Parameters
    ----------
    y
        [t, k, hidden] bfloat16 or float32, the output of each pair of a token and a slot.
    ids
        [t, k], the experts of each token, distinct within a row.

    Returns
    -------
    Tensor
        [t, hidden] float32.

    """
    out = torch.zeros(y.shape[0], y.shape[2], device=y.device)
    tokens = torch.arange(y.shape[0], device=y.device)
    for slot in ids.argsort(1).unbind(1):
        out += y[tokens, slot].float()
    return out


def of_pairs(
    experts: Callable[..., Tensor], x: Tensor, ids: Tensor, weights: Tensor, w1: Stack, *given: Any, **how: Any
) -> Tensor:
    """`experts` with ``summed=False``, of itself: pairs that are on this rank are tokens of one expert each."""
    tokens, slots = ((ids >= 0) & (ids < members(w1))).nonzero(as_tuple=True)
    out = x.new_zeros(*ids.shape, x.shape[1])
    pairs = x[tokens], ids[tokens, slots][:, None], weights[tokens, slots][:, None]
    out[tokens, slots] = experts(*pairs, w1, *given, **how).to(x.dtype)
    return out


@dataclass(frozen=True, slots=True)
class _Parts:
    """What experts are made of; an op set gives its own, and any may be replaced."""

    linear: Callable[..., Tensor]
    swiglu: Callable[..., Tensor]
    simulate_fp8: Callable[..., Tensor]
    group: int = LINEAR_GROUP  # columns that are rounded together: 32 in V4.1

    def product(self, x: Tensor, weight: Weight, *, deployed: bool) -> Tensor:
        """``x @ W^T``, of an input [n, in] that is rounded where deployed numerics do."""
        rounds = deployed and isinstance(weight, Fp8 | Fp4)
        return self.linear(self.simulate_fp8(x, self.group) if rounds else x, weight)

    def up(self, x: Tensor, weights: Tensor, w1: Weight, w3: Weight, limit: float, *, deployed: bool) -> Tensor:
        """What an expert's last matrix is given, [n, inner], of its tokens x [n, hidden] with weights [n]."""
        gate, up = (self.product(x, weight, deployed=deployed) for weight in (w1, w3))
        return self.swiglu(gate, up, limit, weights)


class ExpertsUp(_Parts):
    """The first half of the routed experts: what the last matrix of each of a token's experts is given.

    Equation: ``a[t, s] = swiglu(W1_e x[t], W3_e x[t], limit, weights[t, s])`` with ``e = ids[t, s]``, rounded to the
    dtype of `x` (DeepSeek `Expert.forward`). Of rows of w1 and w3 these are columns of a: a rank's.
    """

    __slots__ = ()

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, w1: Stack, w3: Stack, limit: float, *, deployed: bool
    ) -> Tensor:
        """Run one expert after the other.

        Parameters
        ----------
        x, ids, weights, w1, w3, limit, deployed
            As `Experts` has them.

        Returns
        -------
        Tensor
            [t, k, inner] in the dtype of `x`, not yet rounded as the input of w2.

        """
        out = x.new_empty(*ids.shape, w1.shape[0])
        for expert, tokens, slots in by_expert(ids, members(w1)):
            matrices = member(w1, expert), member(w3, expert)
            out[tokens, slots] = self.up(x[tokens], weights[tokens, slots], *matrices, limit, deployed=deployed)
        return out


class ExpertsDown(_Parts):
    """The second half: the sum of a token's experts' outputs, in ascending order of experts.

    Equation: ``sum_s W2_e a[t, s]`` with ``e = ids[t, s]``, each rounded to the dtype of `a`, added in fp32 (DeepSeek
    `MoE.forward`). Of rows of w2 these are columns of the sum: a rank's.
    """

    __slots__ = ()

    def __call__(self, a: Tensor, ids: Tensor, w2: Stack, *, deployed: bool) -> Tensor:
        """Run one expert after the other.

        Parameters
        ----------
        a
            [t, k, inner], as `ExpertsUp` gives it, whole.
        ids, w2, deployed
            As `Experts` has them.

        Returns
        -------
        Tensor
            [t, hidden] float32.

        """
        out = torch.zeros(a.shape[0], w2.shape[0], device=a.device)
        for expert, tokens, slots in by_expert(ids, members(w2)):
            out.index_add_(0, tokens, self.product(a[tokens, slots], member(w2, expert), deployed=deployed).float())
        return out


class Experts(_Parts):
    """Both halves in one: sum of the weighted outputs of a token's experts, in ascending order of experts."""

    __slots__ = ()

    def __call__(  # noqa: PLR0913 (its tensors, and how)
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        w1: Stack,
        w3: Stack,
        w2: Stack,
        limit: float,
        *,
        deployed: bool,
        summed: bool = True,
        total: int = 0,
    ) -> Tensor:
        """Run one expert after the other.

        Parameters
        ----------
        x
            [t, hidden] bfloat16 or float32.
        ids
            [t, k] int64, the experts of each token, distinct within a row; where outputs are not summed, one that is no
            number of these is another rank's.
        weights
            [t, k] float32 routing weights.
        w1, w3
            Gate and up, E matrices [inner, hidden], both of one form.
        w2
            Down, E matrices [hidden, inner].
        limit
            `swiglu_limit`.
        deployed
            Whether inputs of Fp8 and Fp4 matrices are rounded to E4M3 by groups of columns first. `inner` and `hidden`
            are multiples of these then.
        summed
            Whether a token's outputs are added up; else `sum_slots` does it, to the same bits.
        total
            How many experts there are on all ranks, 0 where these are all: what a GPU's tiles follow from.

        Returns
        -------
        Tensor
            [t, hidden] float32; not summed the output of each pair, [t, k, hidden] in the dtype of `x`. That of a pair
            whose expert is another rank's holds nothing that may be read.

        """
        del total
        if not summed:
            return of_pairs(self, x, ids, weights, w1, w3, w2, limit, deployed=deployed)
        out = torch.zeros_like(x, dtype=torch.float32)
        for expert, tokens, slots in by_expert(ids, members(w1)):
            one, three, two = (member(w, expert) for w in (w1, w3, w2))
            found = self.one(x[tokens], weights[tokens, slots], one, three, two, limit, deployed=deployed)
            out.index_add_(0, tokens, found.float())
        return out

    def one(
        self, x: Tensor, weights: Tensor, w1: Weight, w3: Weight, w2: Weight, limit: float, *, deployed: bool
    ) -> Tensor:
        """Both halves of one expert, of its tokens [n, hidden]: [n, hidden]."""
        a = self.up(x, weights, w1, w3, limit, deployed=deployed)
        return self.product(a, w2, deployed=deployed)


experts = Experts(linear, swiglu, simulate_fp8)
experts_up = ExpertsUp(linear, swiglu, simulate_fp8)
experts_down = ExpertsDown(linear, swiglu, simulate_fp8)
