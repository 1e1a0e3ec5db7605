"""Compressed entries, or the indexer keys beside them: one row per `ratio` tokens, in the form of the run's choice."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from torch import Tensor

from fathom.kernels.formats import rows
from fathom.kernels.formats.stored import Rows, Slots
from fathom.model.errors import CapacityError

Store = Callable[[Rows, int, Tensor], None]
Seen_co = TypeVar("Seen_co", Rows, Rows | Slots, covariant=True)


class RowCache(ABC, Generic[Seen_co]):
    """What compressor, indexer and attention ask of entries or keys, whichever variant keeps them.

    Parameters
    ----------
    ratio
        Tokens per row.
    data
        [capacity, d], as stored; allocated once.

    """

    evicted = 0  # of the rows that were written, how many are no row of their own any more

    def __init__(self, ratio: int, data: Rows) -> None:
        self.ratio, self.data = ratio, data
        self.count = 0  # rows that were written

    @property
    def used(self) -> int:
        """Rows of `data` in use."""
        return self.count - self.evicted

    def append(self, new: Tensor, store: Store = rows.write) -> None:
        """Add [n, d] rows in their stored form, by the `Ops.store` of a run; CapacityError when they do not fit."""
        self._room_for(new.shape[0])
        store(self.data, self.used, new)
        self.count += new.shape[0]

    @abstractmethod
    def view(self) -> Seen_co:
        """What is attended to, or scored, as views."""

    def written(self, first: int | Tensor) -> Seen_co:
        """The same, the rows of a call at `first` included, whose position the host must know."""
        assert not isinstance(first, Tensor), f"{type(self).__name__} needs the position on the host"
        return self.view()

    def chosen(self, selected: Tensor) -> Tensor:
        """Rows of `view` for a selection [t, k] int32 among the entries that have keys; -1 stays none."""
        return selected

    def evict(self) -> None:
        """Let go of what may go when all tokens of a call have attended."""

    def nbytes(self) -> int:
        """Bytes allocated."""
        return rows.nbytes(self.data)

    @abstractmethod
    def tensors(self, position: int) -> dict[str, Tensor]:
        """What a saved state needs."""

    @abstractmethod
    def shapes(self, position: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what `tensors` gives at `position`, whatever is held now."""

    @abstractmethod
    def restore(self, position: int, saved: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave at `position`."""

    def _room_for(self, n: int) -> None:
        """CapacityError unless so many more rows fit."""
        end, capacity = self.used + n, rows.length(self.data)
        if end > capacity:
            raise CapacityError(f"cache of {capacity} entries cannot take entry {end - 1}")


class Entries(RowCache[Rows]):
    """Rows for a context, filled from the front, read as views: a tensor in the run's dtype, or a narrow form."""

    def advance(self) -> None:
        """Note that a captured call has written the next row; CapacityError where there is none."""
        self._room_for(1)
        self.count += 1

    def rewind(self, position: int, end: int) -> None:
        """Forget the rows of windows that tokens from `position` on have closed."""
        del end
        self.count = position // self.ratio

    def view(self) -> Rows:
        """Return the filled rows as views, [count, d]."""
        return rows.first(self.data, self.count)

    def written(self, first: int | Tensor) -> Rows:
        """The same; all of `data` where the device alone knows the position."""
        return self.data if isinstance(first, Tensor) else self.view()

    def tensors(self, position: int) -> dict[str, Tensor]:
        """Return the filled rows, as stored, plane by plane."""
        del position  # the rows are those of whole windows up to it
        return rows.planes(self.view())

    def shapes(self, position: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what `tensors` gives at `position`."""
        filled = position // self.ratio
        return {name: (filled, *plane.shape[1:]) for name, plane in rows.planes(self.data).items()}

    def restore(self, position: int, saved: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave at `position`."""
        self.count = 0
        self._room_for(end := position // self.ratio)
        for name, plane in rows.planes(self.data).items():
            plane[:end] = saved[name]
        self.count = end
