"""Matrix products with weights in their stored form, accumulated in fp32."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fathom.kernels.formats.groups import LINEAR_GROUP
from fathom.kernels.formats.reference import decode
from fathom.kernels.formats.stored import Fp4, Fp8, Weight
from fathom.kernels.quantise.reference import simulate_fp8

FEW = 16  # tokens up to which a GPU's products are those of a token alone, to the bit


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


class ByPosition(NamedTuple):
    """Rows that are added to tokens, one after the other and from the first again."""

    table: Tensor  # [period, out] float32
    first: int | Tensor  # position of the first token; [] int64 where it is on the device

    def rows(self, count: int) -> Tensor:
        """Those of `count` tokens: [count, out]."""
        period = self.table.shape[0]
        if isinstance(self.first, Tensor):
            places = self.first + torch.arange(count, device=self.table.device)
            return self.table.index_select(0, places % period)
        place = self.first % period
        if place + count <= period:
            return self.table[place : place + count]
        whole, rest = divmod(place + count - period, period)
        return torch.cat((self.table[place:], *[self.table] * whole, self.table[:rest]))


class Product(NamedTuple):
    """What `Linears` multiplies its input by, and what becomes of the product."""

    weight: Weight  # [out, in]
    wide: bool = False  # as `linear` has it
    bias: ByPosition | None = None  # added to a wide product
    factor: float | None = None  # the product, when it is rounded, is multiplied by it in fp32 and stays so
    added: Tensor | None = None  # [t, out] float32, added to the product, when it is rounded, in fp32: rounded again


def rounds(weight: Weight, *, deployed: bool) -> bool:
    """Whether the input of a product is rounded to E4M3 blocks: in deployed numerics that of FP8 and FP4 weights.

    NVFP4 weights are used weight-only in both numerics: the scale of their inputs is calibrated, not dynamic, and
    belongs to another serving stack.
    """
    return deployed and isinstance(weight, Fp8 | Fp4)


@dataclass(frozen=True, slots=True)
class Linears:
    """Products of several matrices with one input. Of an op set's own parts."""

    linear: Callable[..., Tensor]
    simulate_fp8: Callable[..., Tensor]
    group: int = LINEAR_GROUP  # columns that are rounded together: 32 in V4.1

    def __call__(self, x: Tensor, products: Sequence[Product], *, deployed: bool) -> list[Tensor]:
        """Run one after the other.

        Parameters
        ----------
        x
            [t, in] bfloat16 or float32.
        products
            Matrices [out, in], each in its stored form and with an `out` of its own.
        deployed
            Whether the input of FP8 and FP4 matrices is rounded to E4M3 by groups of columns first: see `rounds`.

        Returns
        -------
        list[Tensor]
            Of each [t, out], in the dtype of `x`; float32 where it is wide or has a factor.

        """
        narrow = any(rounds(product.weight, deployed=deployed) for product in products)
        rounded = self.simulate_fp8(x, self.group) if narrow else x
        return [self._one(rounded if rounds(product.weight, deployed=deployed) else x, product) for product in products]

    def _one(self, x: Tensor, product: Product) -> Tensor:
        return finished(self.linear(x, product.weight, wide=product.wide), product)


def finished(out: Tensor, product: Product) -> Tensor:
    """What becomes of a product [t, out], which is overwritten: a bias, an addend, a factor."""
    if product.bias is not None:
        out.add_(product.bias.rows(out.shape[0]))
    if product.added is not None:
        out = (product.added + out.float()).to(out.dtype)
    return out if product.factor is None else out.float() * product.factor


linears = Linears(linear, simulate_fp8)
