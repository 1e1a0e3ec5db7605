"""Which rows of the caches a run writes, and whether each holds what was written for it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.formats import rows as stored
from model.cache.frontier import Frontier
from model.cache.layers import CsaCache, HcaCache, LayerCache
from model.observe import sites
from model.observe.sites import Listener, Site
from model.state import State


@dataclass(frozen=True, slots=True)
class Rows:
    """One buffer of one layer at a moment of a run."""

    layer: int
    component: str
    position: int  # of the state
    allocated: int
    expected: int  # rows that must hold something
    written: int  # rows that were ever written
    row_bytes: int  # as stored
    wrong: list[int]  # rows that are missing, or beyond, or hold something else


class Written:
    """Keeps what the model says it writes, in order, per layer: the rows that the caches must hold."""

    def __init__(self, layers: int) -> None:
        self.kv: list[list[Tensor]] = [[] for _ in range(layers)]
        self.entries: list[list[Tensor]] = [[] for _ in range(layers)]
        self.keys: list[list[Tensor]] = [[] for _ in range(layers)]

    def listeners(self) -> dict[Site, Listener]:
        """What to attach."""

        def keep(into: list[list[Tensor]]) -> Listener:
            def listener(layer: int | None, rows: Tensor) -> None:
                assert layer is not None
                into[layer].append(rows.clone())

            return listener

        return {
            sites.KV: keep(self.kv),
            sites.ENTRY: keep(self.entries),
            sites.INDEX_KEY_USED: keep(self.keys),
        }


def poison(state: State) -> None:
    """Fill every row that nothing may read before it is written with NaN, which would end the run.

    The first series of "the window before the first" is not among them: its gates of -inf are read, and mean that
    there is none.
    """
    for cache in state.layers:
        assert isinstance(cache, LayerCache)
        buffers = [cache.ring.data]
        if isinstance(cache, HcaCache):
            buffers += [*stored.planes(cache.entries.data).values(), cache.frontier.kv, cache.frontier.gate]
        if isinstance(cache, CsaCache):
            buffers += [*stored.planes(cache.keys.data).values(), cache.key_frontier.kv, cache.key_frontier.gate]
        for buffer in buffers:
            buffer.view(torch.uint8).fill_(0xFF)  # NaN in every dtype here; of E2M1, which has none, in its scales


def look(state: State, written: Written) -> list[Rows]:
    """Every buffer of a poisoned state, at its position."""
    found = []
    for layer, cache in enumerate(state.layers):
        assert isinstance(cache, LayerCache)
        found += _layer(layer, cache, written, state.position)
    return found


def _layer(layer: int, cache: LayerCache, written: Written, position: int) -> list[Rows]:
    ring = cache.ring.data
    oldest = max(0, position - len(ring))
    recent = {p % len(ring): row for p, row in enumerate(torch.cat(written.kv[layer])) if p >= oldest}
    found = [_rows(layer, "window", position, ring, recent)]
    if isinstance(cache, HcaCache):
        found.append(_rows(layer, "entries", position, cache.entries.data, _in_order(written.entries[layer])))
        found.append(_frontier(layer, "frontier", position, cache.frontier))
    if isinstance(cache, CsaCache):
        found.append(_rows(layer, "indexer_keys", position, cache.keys.data, _in_order(written.keys[layer])))
        found.append(_frontier(layer, "indexer_frontier", position, cache.key_frontier))
    return found


def _in_order(parts: list[Tensor]) -> dict[int, Tensor]:
    return dict(enumerate(torch.cat(parts))) if parts else {}


def _rows(layer: int, component: str, position: int, held: stored.Rows, rows: dict[int, Tensor]) -> Rows:
    """A buffer that must hold these rows, bit by bit, and poison everywhere else; a narrow form is decoded."""
    buffer = stored.read(held, 0, stored.length(held))
    wanted = torch.full_like(buffer, torch.nan)
    if rows:
        values = torch.stack(list(rows.values())).to(buffer.dtype)
        wanted[torch.tensor(list(rows), device=buffer.device)] = values
    same = ((buffer == wanted) | (buffer.isnan() & wanted.isnan())).all(1)
    written = int((~buffer.isnan()).any(1).sum())
    wrong, row_bytes = (~same).nonzero()[:, 0].tolist(), stored.nbytes(stored.first(held, 1))
    return Rows(layer, component, position, len(buffer), len(rows), written, row_bytes, wrong)


def _frontier(layer: int, component: str, position: int, frontier: Frontier) -> Rows:
    """The open window must be there; rows that no token was ever put in must be poison, the others may be old."""
    filled, ever = position % frontier.ratio, min(position, frontier.ratio)
    touched = ~(frontier.kv.isnan() | frontier.gate.isnan()).any(1)
    wrong = [row for row, there in enumerate(touched.tolist()) if there != (row < filled) and not filled <= row < ever]
    row_bytes = frontier.kv[:1].nbytes + frontier.gate[:1].nbytes
    return Rows(layer, component, position, frontier.ratio, filled, int(touched.sum()), row_bytes, wrong)
