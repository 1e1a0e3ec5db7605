"""Compressed entries, or the indexer keys beside them: one row per `ratio` tokens, in the form of the run's choice."""

from collections.abc import Callable, Mapping

from torch import Tensor

from fathom.kernels.formats import rows
from fathom.kernels.formats.rows import Rows
from fathom.model.errors import CapacityError

Store = Callable[[Rows, int, Tensor], None]


class Entries:
    """Rows for a context; allocated once, filled from the front, read as views.

    Parameters
    ----------
    ratio
        Tokens per row.
    data
        [capacity, d]: a tensor in the run's dtype, or the planes of a narrow form. Rows from `count` on are unfilled.

    """

    def __init__(self, ratio: int, data: Rows) -> None:
        self.ratio, self.data = ratio, data
        self.count = 0

    @property
    def used(self) -> int:
        """Rows in use."""
        return self.count

    @property
    def evicted(self) -> int:
        """Entries that are no row of their own any more: none, ever."""
        return 0

    def evict(self) -> None:
        """Nothing to evict when a call has attended."""

    def chosen(self, selected: Tensor) -> Tensor:
        """Rows for a selection [t, k] of entries: these."""
        return selected

    def append(self, new: Tensor, store: Store = rows.write) -> None:
        """Add [n, d] rows in their stored form, by the `Ops.store` of a run; CapacityError when they do not fit."""
        end = self._room_for(new.shape[0])
        store(self.data, self.count, new)
        self.count = end

    def advance(self) -> None:
        """Note that a captured call has written the next row; CapacityError where there is none."""
        self.count = self._room_for(1)

    def rewind(self, position: int, end: int) -> None:
        """Forget the rows of windows that tokens from `position` on have closed."""
        del end
        self.count = position // self.ratio

    def view(self) -> Rows:
        """Return the filled rows as views, [count, d]."""
        return rows.first(self.data, self.count)

    def written(self, first: int | Tensor) -> Rows:
        """Return the rows written so far, those of a call at `first` included; all where the device alone knows."""
        return self.data if isinstance(first, Tensor) else self.view()

    def nbytes(self) -> int:
        """Bytes allocated."""
        return rows.nbytes(self.data)

    def tensors(self, position: int) -> dict[str, Tensor]:
        """Return the filled rows, as stored, plane by plane: what a saved state needs."""
        del position  # the rows are those of whole windows up to it
        return rows.planes(self.view())

    def shapes(self, position: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what `tensors` gives at `position`."""
        filled = position // self.ratio
        return {name: (filled, *plane.shape[1:]) for name, plane in rows.planes(self.data).items()}

    def restore(self, position: int, saved: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave at `position`."""
        self.count = 0
        end = self._room_for(position // self.ratio)
        for name, plane in rows.planes(self.data).items():
            plane[:end] = saved[name]
        self.count = end

    def _room_for(self, n: int) -> int:
        """Rows there are after `n` more."""
        end, capacity = self.count + n, rows.length(self.data)
        if end > capacity:
            raise CapacityError(f"cache of {capacity} entries cannot take entry {end - 1}")
        return end
