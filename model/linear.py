"""Matrices as the model applies them: what ranks hold in parts is put together on return."""

from collections.abc import Sequence

from torch import Tensor

from fathom.kernels.formats.stored import Weight
from fathom.kernels.linear.reference import ByPosition, Product
from fathom.model.arithmetic import Arithmetic
from fathom.model.call import Call
from fathom.model.ranks.ranks import Partial


class Reader:
    """One of several matrices that read the same input: ``x @ W^T``, made for all of them in one op, see `Input`.

    Parameters
    ----------
    weight
        [out, in], whole on every rank.
    wide
        Whether neither input nor output is rounded: DeepSeek computes such a product in fp32.
    factor
        By which the product is multiplied, in fp32. None: it is left as it is.

    """

    def __init__(self, weight: Weight, *, wide: bool = False, factor: float | None = None) -> None:
        self.weight, self.wide, self.factor = weight, wide, factor

    def product(self, call: Call) -> Product:
        """What `Arithmetic.linears` is asked for."""
        del call
        return Product(self.weight, self.wide, factor=self.factor)

    def __call__(self, x: "Input") -> Tensor:
        """[t, in] to [t, out]; float32 where it is wide or has a factor."""
        return x.product(self)


class BiasedReader(Reader):
    """A wide one; row ``p % period`` of `position_bias` [period, out] float32 is added for the token at position p."""

    def __init__(self, weight: Weight, position_bias: Tensor) -> None:
        super().__init__(weight, wide=True)
        self.position_bias = position_bias

    def product(self, call: Call) -> Product:
        """With the bias of this call's positions."""
        return super().product(call)._replace(bias=ByPosition(self.position_bias, call.first))


class Input:
    """An input x [m, in] of one call, and the product of all its tokens with each of the matrices that read it.

    All are made here, in one op: the input is rounded once, and a GPU launches once. They live as long as this does.
    KeyError for a matrix that is not among the `readers`.
    """

    def __init__(self, x: Tensor, readers: Sequence[Reader], call: Call, arithmetic: Arithmetic) -> None:
        products = arithmetic.linears(call.whole(x), *(reader.product(call) for reader in readers))
        self._products = dict(zip(readers, products, strict=True))

    def product(self, reader: Reader) -> Tensor:
        """The product with one of them."""
        return self._products[reader]


class Linear:
    """``x @ W^T``, its input rounded as deployed numerics round it, see `Arithmetic.linear`.

    Parameters
    ----------
    weight
        [out, in], or a rank's rows of it.
    arithmetic
        What to compute with.
    axis, width
        The axis of `model.ranks.ranks.Shards` by which rows are cut, and rows for each place of it: all ranks' parts of
        the output are put together. None: the output is left as it is.
    given, given_width
        The same of the input, of which a rank has a part: all ranks' parts are put together before the product.

    """

    def __init__(
        self,
        weight: Weight,
        arithmetic: Arithmetic,
        axis: str | None = None,
        width: int = 1,
        *,
        given: str | None = None,
        given_width: int = 1,
    ) -> None:
        self.weight, self.arithmetic = weight, arithmetic
        shards = arithmetic.ranks.shards
        self.gathered, self.given = shards.along(axis, width), shards.along(given, given_width)

    def __call__(self, x: Tensor) -> Tensor:
        """[t, in] to [t, out]."""
        ranks = self.arithmetic.ranks
        return ranks.whole(self.arithmetic.linear(ranks.whole(x, 1, self.given), self.weight), 1, self.gathered)


class OutputLinear:
    """The product at the end of a sublayer: rows of `weight` [hidden, in] may be cut, and it gives own tokens alone."""

    def __init__(self, weight: Weight, arithmetic: Arithmetic) -> None:
        self.weight, self.arithmetic, self.own = weight, arithmetic, arithmetic.ranks.shards.output

    def __call__(self, x: Tensor, call: Call) -> Tensor:
        """[t, in] to [m, hidden]."""
        return call.columns(self.arithmetic.linear(x, self.weight), self.own)


class WideLinear(Linear):
    """A product that is not rounded, neither its input nor its output: the head."""

    def __call__(self, x: Tensor) -> Tensor:
        """[t, in] to [t, out] float32."""
        product = self.arithmetic.ops.linear(x, self.weight, wide=True)
        return self.arithmetic.ranks.whole(product, 1, self.gathered)


class GroupedLinear(Linear):
    """Groups of heads, each through rows of its own: FP8 on disk, but the input is not rounded (DeepSeek's `wo_a`).

    `coded`: what takes the output rounds it to FP8, so ranks may exchange it as codes.
    """

    def __init__(self, weight: Weight, arithmetic: Arithmetic, *, coded: bool) -> None:
        super().__init__(weight, arithmetic, "groups")
        self.coded = coded
        # A group whose heads are on several ranks needs all of them.
        self.heads = arithmetic.ranks.shards.along(None if self.gathered.split else "heads")

    def __call__(self, x: Tensor) -> Tensor:
        """Outputs of a rank's heads [t, heads, d] to those of all groups [t, groups * rank]."""
        ranks = self.arithmetic.ranks
        x = ranks.whole(x, 1, self.heads).flatten(1).unflatten(-1, (self.gathered.size, -1))
        low = self.arithmetic.ops.grouped_linear(x, self.weight, self.gathered.size)  # [t, groups here, rank]
        return self.arithmetic.whole_columns(low.flatten(1), self.gathered.times(low.shape[2]), coded=self.coded)


class Embedding:
    """Rows of a table [vocab, hidden] by token id, each from the rank that has it."""

    def __init__(self, weight: Tensor, arithmetic: Arithmetic) -> None:
        self.weight, self.arithmetic = weight, arithmetic

    def __call__(self, tokens: Tensor, call: Call) -> Tensor:
        """[t] int64 of a call to [m, hidden] in the run's dtype."""
        ranks, dtype = self.arithmetic.ranks, self.arithmetic.dtype
        here = ranks.shards.vocabulary
        if not here.split:
            return call.own(self.weight[tokens].to(dtype))
        present = (tokens >= here.start) & (tokens < here.stop)
        rows = self.weight[(tokens - here.start).clamp(0, here.size - 1)]
        return call.own(ranks.filled("embedded", None, Partial(rows, present)).to(dtype))
