"""The cache of one layer, of any architecture, as saving and accounting see it; and its rows, as a model sees them."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from fathom.kernels.formats.stored import Rows, Slots
from fathom.model.cache.entries import RowCache
from fathom.model.cache.frontier import Frontier


class Part(Mapping[str, Tensor]):
    """A lazy view of the keys that begin with `prefix`, named without it."""

    def __init__(self, whole: Mapping[str, Tensor], prefix: str) -> None:
        self.whole, self.prefix = whole, prefix

    def __getitem__(self, name: str) -> Tensor:
        """Return one tensor."""
        return self.whole[self.prefix + name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return (name.removeprefix(self.prefix) for name in self.whole if name.startswith(self.prefix))

    def __len__(self) -> int:
        """Return the number of names."""
        return sum(name.startswith(self.prefix) for name in self.whole)


class Stand(NamedTuple):
    """Where something of a cache stands, and where it should."""

    site: str
    position: int
    found: int
    wanted: int


class Component(Protocol):
    """One buffer of a layer's cache, as saving and accounting see it."""

    def nbytes(self) -> int:
        """Bytes allocated."""
        ...

    def tensors(self, position: int) -> dict[str, Tensor]:
        """What must survive a save at `position`, as views where the buffer allows it."""
        ...

    def shapes(self, position: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what `tensors` gives at `position`, whatever the buffer holds now."""
        ...

    def restore(self, position: int, saved: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave at `position`."""
        ...


@runtime_checkable
class Rewindable(Component, Protocol):
    """A buffer out of which its last tokens can be taken again."""

    def rewind(self, position: int, end: int) -> None:
        """Forget the tokens at positions ``position .. end - 1``, the last ones it was given."""
        ...


@runtime_checkable
class Banked(Component, Protocol):
    """A buffer of bounded size, which can tell what became of the tokens or entries that it was given."""

    def stats(self) -> dict[str, float | None]:
        """Slots in use, how alike they are, and counts of what has happened."""
        ...


class Written(NamedTuple):
    """What a compressor writes: the site of its rows, its state, the rows, and how wide they are."""

    site: str
    frontier: Frontier
    rows: RowCache[Rows | Slots]
    width: int


class Components:
    """The buffers of one layer's cache, by name."""

    def __init__(self, components: dict[str, Component]) -> None:
        self.components = components

    def stands(self, position: int, first: int) -> list[Stand]:
        """Which of its parts stand elsewhere than they should when so many tokens are written.

        `first` is the earliest token whose window must still be there.
        """
        raise NotImplementedError

    def compressed(self) -> list[Written]:
        """What its compressors write; there are none."""
        return []

    def nbytes(self) -> dict[str, int]:
        """Bytes allocated, by component."""
        return {name: component.nbytes() for name, component in self.components.items()}

    def stats(self) -> dict[str, float | None]:
        """What its bounded buffer tells of itself; nothing where it has none."""
        return {
            name: value
            for part in self.components.values()
            if isinstance(part, Banked)
            for name, value in part.stats().items()
        }

    def irreversible(self) -> list[str]:
        """Components that cannot forget what they were given last."""
        return [name for name, component in self.components.items() if not isinstance(component, Rewindable)]

    def rewind(self, position: int, end: int) -> None:
        """Forget the tokens at positions ``position .. end - 1``, the last ones, of a cache with room for that."""
        for component in self.components.values():
            assert isinstance(component, Rewindable), f"{type(component).__name__}: see irreversible"
            component.rewind(position, end)

    def tensors(self, position: int) -> dict[str, Tensor]:
        """Return what a saved state needs, by ``component.part``."""
        return dict(self.saved(position))

    def saved(self, position: int) -> Iterator[tuple[str, Tensor]]:
        """One after the other, what `tensors` gives at once."""
        for name, component in self.components.items():
            for part, tensor in component.tensors(position).items():
                yield f"{name}.{part}", tensor

    def shapes(self, position: int) -> dict[str, tuple[int, ...]]:
        """Shapes of what `tensors` gives at `position`, whatever this cache holds now."""
        return {
            f"{name}.{part}": shape
            for name, component in self.components.items()
            for part, shape in component.shapes(position).items()
        }

    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtype of each of them, while nothing is held."""
        return {name: part.dtype for name, part in self.tensors(0).items()}

    def restore(self, position: int, saved: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave at `position`; StateError for content that a component cannot have had."""
        for name, component in self.components.items():
            component.restore(position, Part(saved, f"{name}."))
