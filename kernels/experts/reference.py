"""The routed experts of one rank."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.formats.groups import LINEAR_GROUP
from kernels.formats.stored import Fp4, Fp8, Stack, Weight, member, members
from kernels.linear.reference import linear
from kernels.quantise.reference import simulate_fp8
from kernels.swiglu.reference import swiglu


@dataclass(frozen=True, slots=True)
class Experts:
    """Sum of the weighted outputs of those of a token's experts that this rank holds, in ascending order of experts.

    Equation: ``sum_e W2_e swiglu(W1_e x, W3_e x, limit, weight_e)``, every expert's output rounded to the dtype of `x`,
    the sum in fp32 (DeepSeek `MoE.forward` and `Expert.forward`). An op set gives its own three parts; any may be
    replaced.
    """

    linear: Callable[..., Tensor]
    swiglu: Callable[..., Tensor]
    simulate_fp8: Callable[..., Tensor]

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

        def product(x: Tensor, weight: Weight) -> Tensor:
            rounds = deployed and isinstance(weight, Fp8 | Fp4)
            return self.linear(self.simulate_fp8(x, LINEAR_GROUP) if rounds else x, weight)

        out = torch.zeros_like(x, dtype=torch.float32)
        for expert in range(members(w1)):
            tokens, slots = (ids == first + expert).nonzero(as_tuple=True)
            if len(tokens):
                gate, up = (product(x[tokens], member(w, expert)) for w in (w1, w3))
                inner = self.swiglu(gate, up, limit, weights[tokens, slots])
                out.index_add_(0, tokens, product(inner, member(w2, expert)).float())
        return out


experts = Experts(linear, swiglu, simulate_fp8)
