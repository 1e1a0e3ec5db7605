"""Compressed entries, or the indexer keys beside them: one row per `ratio` tokens."""

import torch
from torch import Tensor

from model.errors import CapacityError


class Entries:
    """Rows of `width` for a context of `max_context`; allocated once, filled from the front, read as views."""

    def __init__(self, ratio: int, max_context: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.ratio = ratio
        self.data = torch.zeros(max_context // ratio, width, dtype=dtype, device=device)
        self.count = 0

    def append(self, rows: Tensor) -> None:
        """Add [n, width] rows; CapacityError when they do not fit."""
        end = self.count + rows.shape[0]
        if end > self.data.shape[0]:
            raise CapacityError(f"cache of {self.data.shape[0]} entries cannot take entry {end - 1}")
        self.data[self.count : end] = rows
        self.count = end

    def view(self) -> Tensor:
        """Return the filled rows as a view, [count, width]."""
        return self.data[: self.count]

    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.data.nbytes

    def tensors(self, position: int) -> dict[str, Tensor]:
        """Return the filled rows: what a saved state needs."""
        del position  # the rows are those of whole windows up to it
        return {"rows": self.view()}

    def shapes(self, position: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what `tensors` gives at `position`."""
        return {"rows": (position // self.ratio, self.data.shape[1])}

    def restore(self, position: int, saved: dict[str, Tensor]) -> None:
        """Put back what `tensors` gave at `position`."""
        del position
        self.count = 0
        self.append(saved["rows"])
