"""The full cache of a layer with grouped heads: keys, rotated, and values of every position."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fathom.kernels.ops import Ops
from fathom.model.cache.gqa import GqaCache, Heads, KvHeads
from fathom.model.errors import CapacityError


class Positions:
    """Rows of every position, head by head; allocated once, filled from the front, read as views."""

    def __init__(self, heads: int, capacity: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.data = torch.zeros(heads, capacity, width, dtype=dtype, device=device)

    def write(self, first: int, new: Tensor) -> None:
        """Store `new` [t, heads, width] for positions ``first ..``; CapacityError when they do not fit."""
        stop, capacity = first + new.shape[0], self.data.shape[1]
        if stop > capacity:
            raise CapacityError(f"cache of {capacity} positions cannot take position {stop - 1}")
        self.data[:, first:stop] = new.transpose(0, 1)

    def rewind(self, position: int, end: int) -> None:
        """Forget the last tokens: rows are read up to the position, and overwritten from there on."""

    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.data.nbytes

    def tensors(self, position: int) -> dict[str, Tensor]:
        """Return the rows of positions below `position`, [heads, position, width]: what a saved state needs."""
        return {"rows": self.data[:, :position]}

    def shapes(self, position: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what `tensors` gives at `position`."""
        heads, _, width = self.data.shape
        return {"rows": (heads, position, width)}

    def by_head(self) -> Mapping[str, tuple[int, int]]:
        """Rows stand head by head."""
        return {"rows": (0, 1)}

    def restore(self, position: int, saved: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave at `position`."""
        del position
        self.write(0, saved["rows"].transpose(0, 1))


class FullCache(GqaCache):
    """Keys and values of every position, exact; a window limits what is read of them, not what is held.

    Parameters
    ----------
    heads, head_dim
        Those of the layer's K that are here, and d.
    window
        Positions that a token sees, its own included; None: all before it.
    max_context
        Positions to hold.
    dtype, device
        Of the rows.

    """

    def __init__(
        self,
        heads: KvHeads,
        head_dim: int,
        window: int | None,
        max_context: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.window = window
        self.keys = Positions(heads.size, max_context, head_dim, dtype, device)
        self.values = Positions(heads.size, max_context, head_dim, dtype, device)
        super().__init__({"keys": self.keys, "values": self.values}, heads)

    def attend(self, heads: Heads, first: int, ops: Ops) -> Tensor:
        """Store, then attend to all that is held, or to the window of it; see `GqaCache.attend`."""
        self.keys.write(first, heads.k)
        self.values.write(first, heads.v)
        self.position = first + heads.k.shape[0]
        return ops.attend_grouped(heads.q, self.keys.data, self.values.data, first, self.window)
