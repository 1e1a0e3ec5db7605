"""Matrix products with weights in their stored form, accumulated in fp32."""

import torch
from torch import Tensor

from kernels.formats.reference import decode
from kernels.formats.stored import Weight


def linear(x: Tensor, weight: Weight, *, wide: bool = False) -> Tensor:
    """``x @ W^T`` with W decoded to fp32 and an fp32 accumulator.

    Parameters
    ----------
    x
        [t, in] bfloat16 or float32.
    weight
        Any stored form of [out, in].
    wide
        Whether the result is not rounded to the dtype of `x`, as of what DeepSeek multiplies in fp32: of bfloat16
        operands products are exact, and their sum is kept as it is.

    Returns
    -------
    Tensor
        [t, out] in the dtype of `x`, or float32 where `wide`.

    """
    assert x.shape[-1] == weight.shape[1], f"x has {x.shape[-1]} columns, the weight {weight.shape[1]}"
    product = x.float() @ decode(weight).T
    return product if wide else product.to(x.dtype)


def grouped_linear(x: Tensor, weight: Weight, groups: int) -> Tensor:
    """Project each group of heads by its own rows of W: the first half of V4's low-rank output.

    Equation: ``y[t, g, r] = sum_d x[t, g, d] W[g * rank + r, d]`` (DeepSeek `Attention.forward`, ``bsgd,grd->bsgr``).

    Parameters
    ----------
    x
        [t, groups, in].
    weight
        [groups * rank, in] in any stored form.
    groups
        `o_groups` of the config.

    Returns
    -------
    Tensor
        [t, groups, rank] in the dtype of `x`.

    """
    per_group = decode(weight).unflatten(0, (groups, -1))  # [g, rank, in]
    return torch.einsum("tgd,grd->tgr", x.float(), per_group).to(x.dtype)
