"""The routed experts of one rank."""

import torch
from torch import Tensor

from kernels.formats.groups import LINEAR_GROUP
from kernels.formats.stored import Fp4, Fp8, Weight, member
from kernels.linear.reference import linear
from kernels.quantise.reference import simulate_fp8
from kernels.swiglu.reference import swiglu


def experts(  # noqa: PLR0913, as many as the equation has
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: Weight,
    w3: Weight,
    w2: Weight,
    limit: float,
    first: int,
    *,
    deployed: bool,
) -> Tensor:
    """Sum of the weighted outputs of those of a token's experts that this rank holds, in ascending order of experts.

    Equation: ``sum_e W2_e swiglu(W1_e x, W3_e x, limit, weight_e)``, every expert's output rounded to the dtype of `x`,
    the sum in fp32 (DeepSeek `MoE.forward` and `Expert.forward`).

    Parameters
    ----------
    x
        [t, hidden] bfloat16 or float32.
    ids
        [t, k] int64, the experts of each token, distinct within a row. Those outside of ``first .. first + E - 1`` are
        other ranks': nothing is added for them.
    weights
        [t, k] float32 routing weights.
    w1, w3
        Gate and up, a `kernels.formats.stored.stack` of E matrices [intermediate, hidden], both of one form.
    w2
        Down, a stack of E matrices [hidden, intermediate].
    limit
        `swiglu_limit`.
    first
        Id of the expert whose matrices come first.
    deployed
        Whether inputs of Fp8 and Fp4 matrices are rounded to E4M3 per 128 columns first. `intermediate` and `hidden`
        are multiples of 128 then.

    Returns
    -------
    Tensor
        [t, hidden] float32.

    """
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(len(w1.data)):
        tokens, slots = (ids == first + expert).nonzero(as_tuple=True)
        if len(tokens):
            gate, up = (_linear(x[tokens], member(w, expert), deployed=deployed) for w in (w1, w3))
            inner = swiglu(gate, up, limit, weights[tokens, slots])
            out.index_add_(0, tokens, _linear(inner, member(w2, expert), deployed=deployed).float())
    return out


def _linear(x: Tensor, weight: Weight, *, deployed: bool) -> Tensor:
    return linear(simulate_fp8(x, LINEAR_GROUP) if deployed and isinstance(weight, Fp8 | Fp4) else x, weight)
