"""A point of a sequence to come back to, without a copy of its entries."""

from typing import NamedTuple

from torch import Tensor

from model.cache.entries import Entries
from model.state import State


class Snapshot(NamedTuple):
    """What a call overwrites: rings and frontiers by layer and component, and how many entries there were."""

    position: int
    counts: list[dict[str, int]]
    parts: list[dict[str, dict[str, Tensor]]]


def snapshot(state: State) -> Snapshot:
    """Remember `state` as it is now. Entries are only ever added, so their number is enough."""
    counts, parts = [], []
    for cache in state.layers:
        entries = {name: c.count for name, c in cache.components.items() if isinstance(c, Entries)}
        others = {name: c.tensors(state.position) for name, c in cache.components.items() if name not in entries}
        counts.append(entries)
        parts.append({name: {part: x.clone() for part, x in saved.items()} for name, saved in others.items()})
    return Snapshot(state.position, counts, parts)


def restore(state: State, saved: Snapshot) -> None:
    """Bring `state` back to where it was; what came after is forgotten."""
    for cache, counts, parts in zip(state.layers, saved.counts, saved.parts, strict=True):
        for name, component in cache.components.items():
            if isinstance(component, Entries):
                component.count = counts[name]
            else:
                component.restore(saved.position, parts[name])
    state.position = saved.position
