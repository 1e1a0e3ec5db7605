"""The two compressors: tokens in, one row per closed window out.

They write different things: that of entries head_dim-wide rows that are attended to, that of index keys
index_head_dim-wide rows that are only scored. Source: DeepSeek `Compressor.forward`; paper section 2.3.1.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Final

from torch import Tensor

from fathom.kernels.compress.reference import Tail
from fathom.kernels.formats.stored import Dense, Rounding, Rows, Slots
from fathom.model.arithmetic import Arithmetic
from fathom.model.cache.entries import RowCache
from fathom.model.cache.frontier import Frontier
from fathom.model.call import Call
from fathom.model.checkpoint.weights import Weights
from fathom.model.config import ModelConfig
from fathom.model.linear import BiasedReader, Input, Reader
from fathom.model.rope import Rotation
from fathom.model.rounding import FP4, FP8, NONE

KEYS_AS: Final[Mapping[str, Rounding]] = {FP4: "index", FP8: "row", NONE: "none"}  # how `Ops.compress` calls it


class Compressor(ABC):
    """Pools windows of tokens into rows, each normed and rotated as of the start of its window."""

    @property
    @abstractmethod
    def rounding(self) -> Rounding:
        """How rows are rounded as they are kept, for `Ops.compress`."""

    def __init__(
        self, config: ModelConfig, layer: int, prefix: str, weights: Weights, arithmetic: Arithmetic, rotation: Rotation
    ) -> None:
        bias = weights.vector(f"{prefix}.ape").float()  # [ratio, series * width]
        self.wkv = Reader(Dense(weights.operand(f"{prefix}.wkv.weight")), wide=True)  # [series * width, hidden]
        self.wgate = BiasedReader(Dense(weights.operand(f"{prefix}.wgate.weight")), bias)
        self.readers: tuple[Reader, ...] = (self.wkv, self.wgate)
        self.norm = weights.vector(f"{prefix}.norm.weight").float()  # [width]
        self.arithmetic, self.rotation, self.eps = arithmetic, rotation, config.rms_norm_eps
        self.coded = arithmetic.formats.variant(layer).coded  # the cache rounds, and from the unrounded

    def __call__(self, x: Input, call: Call, frontier: Frontier, rows: RowCache[Rows | Slots]) -> None:
        """Append the rows of the windows that the tokens of x [t, hidden] complete."""
        assert isinstance(call.first, Tensor) or call.first == frontier.position, "windows follow each other"
        kv, gate = self.wkv(x), self.wgate(x)  # [t, series * width] float32, the gate with its position bias
        self.compress(kv, gate, call, frontier, rows)
        frontier.take(call.first, call.count)

    def compress(
        self, kv: Tensor, gate: Tensor, call: Call, frontier: Frontier, rows: RowCache[Rows | Slots]
    ) -> Tensor | None:
        """Pool windows (`kernels.compress.reference`), norm, rotate, round and append them: see `Ops.compress`."""
        ratio, dtype = frontier.ratio, self.arithmetic.dtype

        def finish(entry: int, pooled: Tensor) -> None:
            self.append(rows, self.stored(self.row(pooled, call, entry * ratio, ratio)))

        tail = Tail(self.norm, self.eps, self.rotation.freqs, self.rounding, rows.data, dtype)
        return self.arithmetic.ops.compress(kv, gate, frontier.ring(), call.first, ratio, tail, finish)

    def row(self, pooled: Tensor, call: Call, first: int, ratio: int) -> Tensor:
        """Norm and rotate pooled windows [n, width], the first of which begins at position `first`; entries rounded."""
        cos, sin = call.angles_of_windows(self.rotation, first, pooled.shape[0], ratio)
        rows = self.unnormed(pooled)
        group = self.arithmetic.kv_group if self.rounding == "kv" and not self.coded else 0
        return self.arithmetic.ops.norm_rotate(rows, self.norm, self.eps, cos, sin, group)

    def unnormed(self, pooled: Tensor) -> Tensor:
        """Pooled windows [n, width] in the dtype of the run, as the norm is given them."""
        return pooled.to(self.arithmetic.dtype)

    def stored(self, rows: Tensor) -> Tensor:
        """Rows [n, width] as they are kept: as they are, for entries were rounded when they were rotated."""
        return rows

    def append(self, rows: RowCache[Rows | Slots], new: Tensor) -> None:
        """Write new rows [n, width] behind those of the cache."""
        rows.append(new, self.arithmetic.ops.store)


class EntryCompressor(Compressor):
    """Writes compressed entries [head_dim] of HCA and CSA layers."""

    @property
    def rounding(self) -> Rounding:
        """FP8 (E4M3) by 64 columns, or none."""
        return "kv" if self.arithmetic.kv_group else "none"

    def __init__(
        self, config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic, rotation: Rotation
    ) -> None:
        super().__init__(config, layer, f"{config.prefix(layer)}.attn.compressor", weights, arithmetic, rotation)


class KeyCompressor(Compressor):
    """Writes indexer keys [index_head_dim] of CSA layers."""

    @property
    def rounding(self) -> Rounding:
        """A Hadamard transform and FP4 (E2M1), FP8 (E4M3) by row, or none."""
        return KEYS_AS[self.arithmetic.rounding.index]

    def __init__(
        self, config: ModelConfig, layer: int, weights: Weights, arithmetic: Arithmetic, rotation: Rotation
    ) -> None:
        super().__init__(
            config, layer, f"{config.prefix(layer)}.attn.indexer.compressor", weights, arithmetic, rotation
        )

    def stored(self, rows: Tensor) -> Tensor:
        """As queries are; where the cache codes rows, their transform alone."""
        return self.arithmetic.hadamard(rows) if self.coded else self.arithmetic.rounded_index(rows)
