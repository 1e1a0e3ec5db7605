"""What a run computes with: an op set, a dtype, and whether activations are rounded as deployed.

`plain` leaves activations unquantised, as Hugging Face transformers does. `deployed` rounds them where DeepSeek's
serving code does (inputs of FP8 and FP4 linears, KV, indexer queries and keys): the values are those of the narrow
formats, the products are fp32, see `kernels.quantise.reference`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fathom.kernels.formats.groups import INDEX_GROUP, KV_GROUP
from fathom.kernels.formats.stored import Weight
from fathom.kernels.linear.reference import Product
from fathom.kernels.ops import Ops
from fathom.model.cache.formats import CacheFormats
from fathom.model.ranks.ranks import Ranks


class Arithmetic(NamedTuple):
    """Op set, numerics, dtype, cache formats and ranks of one model."""

    ops: Ops
    deployed: bool
    dtype: torch.dtype  # of activations and caches: bfloat16 or float32
    formats: CacheFormats  # of the caches that `new_state` makes
    ranks: Ranks  # who else computes this model, and which part is here
    ran: dict[str, str]  # the backend of each op that has run so far, see `kernels.ops.noted`
    fp8_scores: bool = False  # whether index queries are rounded to E4M3 before they are scored, an approximation

    @property
    def numerics(self) -> str:
        """Return the name that `--numerics` takes."""
        return "deployed" if self.deployed else "plain"

    @property
    def select(self) -> Callable[..., Tensor]:
        """The op that selects entries, by exact scores or by those of E4M3 queries."""
        return self.ops.select_fp8 if self.fp8_scores else self.ops.select

    def linear(self, x: Tensor, weight: Weight, added: Tensor | None = None) -> Tensor:
        """``x @ W^T``; deployed, the input of an FP8 or FP4 weight is rounded to E4M3 per 128 columns first.

        To the product `added`, float32, may be added in fp32.
        """
        return self.linears(x, Product(weight, added=added))[0]

    def linears(self, x: Tensor, *products: Product) -> list[Tensor]:
        """Several products with the same input, in one op: `kernels.linear.reference.Linears`."""
        return self.ops.linears(x, products, deployed=self.deployed)

    @property
    def kv_group(self) -> int:
        """Columns of the blocks to which window KV is rounded; 0: it is not."""
        return KV_GROUP if self.deployed else 0

    def rounded_kv(self, kv: Tensor, rope_dim: int) -> Tensor:
        """Round window KV or compressed entries [n, d] as they are cached: E4M3 per 64 columns, rope dims untouched."""
        if not self.deployed:
            return kv
        return self.ops.round_kv(kv, KV_GROUP, rope_dim)

    def rounded_index(self, x: Tensor) -> Tensor:
        """Round indexer queries or keys [..., index_head_dim]: Hadamard rotation, then E2M1 per 32 columns."""
        if not self.deployed:
            return x
        return self.ops.round_index(x, INDEX_GROUP)

    def hadamard(self, x: Tensor) -> Tensor:
        """The Hadamard transform alone, for keys whose cache rounds them itself."""
        return self.ops.hadamard(x) if self.deployed else x
