"""What a run computes with: an op set, a dtype, and what of activations is rounded to a narrow format.

Three places are (`model.rounding`): inputs of FP8 and FP4 linears, KV, indexer queries and keys. The values are those
of the narrow formats, the products are fp32, see `kernels.quantise.reference`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from fathom.kernels.formats.groups import INDEX_GROUP, KV_GROUP, LINEAR_GROUP
from fathom.kernels.formats.stored import Fp8, Weight
from fathom.kernels.linear.reference import FEW, Product
from fathom.kernels.ops import Ops
from fathom.model.cache.formats import CacheFormats
from fathom.model.ranks.ranks import AxisShard, Ranks, evenly
from fathom.model.rounding import FP4, FP8, Rounding

if TYPE_CHECKING:
    from fathom.model.call import Call

CODED: Final = 32  # tokens up to which ranks exchange numbers: of few, codes take longer to make than they save


class Arithmetic(NamedTuple):
    """Op set, numerics, dtype, cache formats and ranks of one model."""

    ops: Ops
    rounding: Rounding
    dtype: torch.dtype  # of activations and caches: bfloat16 or float32
    formats: CacheFormats  # of the caches that `new_state` makes
    ranks: Ranks  # who else computes this model, and which part is here
    ran: dict[str, str]  # the backend of each op that has run so far, see `kernels.ops.noted`
    fp8_scores: bool = False  # whether index queries are rounded to E4M3 before they are scored, an approximation
    fp8_products: bool = False  # whether FP8 linears of many tokens are summed as FP8 tensor cores do
    fp8_experts: bool = False  # and FP4 experts

    @property
    def numerics(self) -> str:
        """Return the name that `--numerics` or `--rounding` takes."""
        return self.rounding.numerics

    @property
    def select(self) -> Callable[..., Tensor]:
        """The op that selects entries, by exact scores or by those of E4M3 queries."""
        return self.ops.select_fp8 if self.fp8_scores else self.ops.select

    def linear(self, x: Tensor, weight: Weight, added: Tensor | None = None) -> Tensor:
        """``x @ W^T``; where linears are rounded, the input of an FP8 or FP4 weight is, to E4M3 by groups of columns.

        To the product `added`, float32, may be added in fp32.
        """
        return self.linears(x, Product(weight, added=added))[0]

    def linears(self, x: Tensor, *products: Product) -> list[Tensor]:
        """Several products with the same input, in one op: `kernels.linear.reference.Linears`."""
        of_codes = self.fp8_products and len(x) > FEW and any(isinstance(of.weight, Fp8) for of in products)
        op = self.ops.linears_fp8 if of_codes else self.ops.linears
        return op(x, products, deployed=self.linears_rounded)

    @property
    def linears_rounded(self) -> bool:
        """Whether inputs of FP8 and FP4 linears are rounded."""
        return self.rounding.linears == FP8

    def whole_rows(self, x: Tensor, call: "Call", *, coded: bool) -> Tensor:
        """Rows [m, d] of a rank's tokens to those of all [t, d]; `coded`: only linears that round them take them.

        Then codes are exchanged, half the bytes, and what comes is rounded as these linears do; of many tokens.
        """
        if not (coded and call.shard.split and call.count > CODED):
            return call.whole(x)
        return self.ops.unpack_fp8(call.whole(self.ops.pack_fp8(x, LINEAR_GROUP)), LINEAR_GROUP, x.dtype)

    def whole_columns(self, x: Tensor, shard: AxisShard, *, coded: bool) -> Tensor:
        """The same of a rank's columns [t, ..., shard.size]: [t, ..., shard.total]. Whole groups are coded."""
        if not (coded and shard.split and shard.size % LINEAR_GROUP == 0 and len(x) > CODED):
            return self.ranks.whole(x, x.dim() - 1, shard)
        one = evenly(self.ranks.size, self.ranks.rank, self.ranks.size)
        packed = self.ops.pack_fp8(x.flatten(0, -2), LINEAR_GROUP)
        parts = self.ops.unpack_fp8(self.ranks.whole(packed[None], 0, one).flatten(0, 1), LINEAR_GROUP, x.dtype)
        return parts.view(self.ranks.size, *x.shape).movedim(0, -2).reshape(*x.shape[:-1], shard.total)

    @property
    def kv_group(self) -> int:
        """Columns of the E4M3 blocks to which window KV and entries are rounded but for rope dims; 0: they are not."""
        return KV_GROUP if self.rounding.kv == FP8 else 0

    def rounded_index(self, x: Tensor) -> Tensor:
        """Round indexer queries or keys [..., d]: Hadamard transform, then E2M1 per 32 columns; or E4M3 per row."""
        if self.rounding.index == FP4:
            return self.ops.round_index(x, INDEX_GROUP)
        return self.ops.simulate_fp8(x, x.shape[-1]) if self.rounding.index == FP8 else x

    def hadamard(self, x: Tensor) -> Tensor:
        """The Hadamard transform alone, for keys whose cache rounds them itself."""
        return self.ops.hadamard(x) if self.rounding.index == FP4 else x
