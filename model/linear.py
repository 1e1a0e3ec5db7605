"""Matrices as the model applies them: what ranks hold in parts is put together on return."""

from typing import NamedTuple

from torch import Tensor

from fathom.kernels.formats.stored import Weight
from fathom.model.arithmetic import Arithmetic
from fathom.model.ranks.ranks import Partial


class Projected(NamedTuple):
    """What a layer's attention reads off its input [t, hidden], all in one op; None where it has no such part."""

    query: Tensor  # [t, q_lora_rank], not normed yet
    kv: Tensor  # [t, head_dim], the same
    entry_kv: Tensor | None = None  # what the compressor pools, see `model.compressor.Projections`
    entry_gate: Tensor | None = None
    key_kv: Tensor | None = None  # and the indexer's
    key_gate: Tensor | None = None
    index_weights: Tensor | None = None  # [t, index_n_heads] float32, scaled


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

    def __call__(self, tokens: Tensor) -> Tensor:
        """[t] int64 to [t, hidden] in the run's dtype."""
        own = self.arithmetic.ranks.shards.vocabulary
        if not own.split:
            return self.weight[tokens].to(self.arithmetic.dtype)
        present = (tokens >= own.start) & (tokens < own.stop)
        rows = self.weight[(tokens - own.start).clamp(0, own.size - 1)]
        return self.arithmetic.ranks.filled("embedded", None, Partial(rows, present)).to(self.arithmetic.dtype)
