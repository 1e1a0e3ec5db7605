"""By which angles a run rotated: each rotated tensor against what it was before, call by call.

What went into a rotation is seen at no site, so it is computed again from the site before it, by the run's own linears,
norms and pooling, in the same shapes: nothing but the rotation can then differ.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from model.attention import CsaAttention, HcaAttention
from model.cache.frontier import Frontier
from model.compressor import EntryCompressor, KeyCompressor
from model.observe import sites
from model.observe.observer import observed
from model.observe.sites import Listener, Site
from model.transformer import Transformer
from probes.finding import JSON
from probes.rope.oracle import I64, TINY, Table, U, pairs
from probes.shared.narrow import F64, f64

READS = (
    *(sites.ATTENTION_INPUT, sites.LATENT, sites.QUERY, sites.KV, sites.ENTRY, sites.INDEX_QUERY, sites.INDEX_KEY),
    *(sites.MIXED, sites.UNROTATED),
)


@dataclass
class Turned:
    """One kind of rotated tensor in one layer, over all its rows."""

    share: float = 0.0  # largest error, as a share of what rounding allows
    radians: float = 0.0  # the same error, as an angle
    evidence: dict[str, JSON] = field(default_factory=dict)
    unturned: float = 0.0  # largest share if nothing had been rotated
    rows: int = 0
    last: int = -1  # largest position

    def see(self, before: F64, after: F64, table: Table, positions: I64, rounding: float, sign: int) -> None:
        """Compare rows `after` [t, ..., d] with `before`, rotated by `sign` times the angles at `positions` [t].

        Rounding each number by a share moves a pair by at most that share of its length.
        """
        dim = 2 * len(table.freqs)
        shape = (len(positions), *[1] * (before.ndim - 2), dim // 2)
        turn = np.exp(sign * 1j * table.angles(positions)).reshape(shape)
        allowed = np.broadcast_to(
            (rounding + 8 * U + table.allowed(positions)).reshape(shape), (*before.shape[:-1], dim // 2)
        )
        start, end = pairs(before, dim), pairs(after, dim)
        length = np.maximum(np.abs(start), TINY)
        off = np.abs(end - start * turn) / length
        share = off / allowed
        self.unturned = max(self.unturned, float((np.abs(turn - 1) / allowed).max()))
        self.rows, self.last = self.rows + len(positions), max(self.last, int(positions.max()))
        at = np.unravel_index(int(np.argmax(share)), share.shape)
        if math.isnan(self.share) or share[at] <= self.share:
            return
        self.share, self.radians = float(share[at]), 2 * math.asin(min(1.0, float(off[at]) / 2))
        self.evidence = {
            "position": int(positions[at[0]]),
            "pair": int(at[-1]),
            "turned_by": float(np.angle(end[at] / start[at])) if np.abs(start[at]) > TINY else None,
            "expected": float(np.angle(np.broadcast_to(turn, share.shape)[at])),
            "allowed": float(allowed[at]),
        }


class Watch:
    """Listeners for one model, and what they found; set `first` before each call."""

    def __init__(self, model: Transformer, tables: list[Table], rounding: float) -> None:
        self.model, self.tables, self.rounding = model, tables, rounding  # tables by layer
        self.first = 0
        self.turned: dict[tuple[int, str], Turned] = defaultdict(Turned)  # by layer and what was rotated
        self.touched = 0  # numbers before the rope dims that the inverse rotation changed
        self._latent: Tensor | None = None
        self._mixed: F64 = np.zeros(0)
        self._frontiers: dict[tuple[int, str], Frontier] = {}
        self._pooled: dict[tuple[int, str], list[Tensor]] = defaultdict(list)  # rows that are not rotated yet
        self._rows: dict[tuple[int, str], int] = defaultdict(int)

    def listeners(self) -> dict[Site, Listener]:
        """What to attach."""
        return {
            sites.ATTENTION_INPUT: self._input,
            sites.LATENT: self._take_latent,
            sites.QUERY: self._query,
            sites.KV: self._kv,
            sites.ENTRY: self._entries,
            sites.INDEX_QUERY: self._index_query,
            sites.INDEX_KEY: self._keys,
            sites.MIXED: self._take_mixed,
            sites.UNROTATED: self._unrotated,
        }

    def _input(self, layer: int | None, x: Tensor) -> None:
        """Keep the input, and pool what this call will compress."""
        assert layer is not None
        self._x = x.clone()
        attention = self.model.blocks[layer].attention
        if isinstance(attention, HcaAttention):
            self._pool(layer, "entries", attention.compressor)
        if isinstance(attention, CsaAttention):
            self._pool(layer, "index keys", attention.indexer.compressor)

    def _pool(self, layer: int, what: str, compressor: EntryCompressor | KeyCompressor) -> None:
        project, ops = compressor.project, compressor.arithmetic.ops
        if (layer, what) not in self._frontiers:
            overlap, width = isinstance(self.model.blocks[layer].attention, CsaAttention), len(project.norm)
            self._frontiers[layer, what] = Frontier(
                self.model.config.ratio(layer), width, overlap=overlap, device=self.model.device
            )
        frontier, call = self._frontiers[layer, what], observed(self.model).call
        assert call is not None, "no call runs"
        for pooled in frontier.push(*project(self._x, call), ops.pool):
            rows = ops.rms_norm(pooled.to(compressor.arithmetic.dtype), project.norm, compressor.eps)
            self._pooled[layer, what].append(rows)

    def _take_latent(self, layer: int | None, latent: Tensor) -> None:
        del layer
        self._latent = latent.clone()

    def _take_mixed(self, layer: int | None, out: Tensor) -> None:
        del layer
        self._mixed = f64(out)

    def _query(self, layer: int | None, q: Tensor) -> None:
        assert layer is not None
        assert self._latent is not None
        attention = self.model.blocks[layer].attention
        arithmetic = attention.arithmetic
        before = attention.wq_b(self._latent).unflatten(-1, q.shape[1:])
        self._see(layer, "queries", arithmetic.ops.rms_norm(before, None, attention.eps), q)

    def _kv(self, layer: int | None, kv: Tensor) -> None:
        assert layer is not None
        attention = self.model.blocks[layer].attention
        arithmetic = attention.arithmetic
        before = arithmetic.ops.rms_norm(attention.wkv(self._x), attention.kv_norm, attention.eps)
        self._see(layer, "window KV", before, kv)

    def _index_query(self, layer: int | None, q: Tensor) -> None:
        assert layer is not None
        assert self._latent is not None
        attention = self.model.blocks[layer].attention
        assert isinstance(attention, CsaAttention)
        indexer = attention.indexer
        self._see(
            layer,
            "index queries",
            indexer.wq_b(self._latent).unflatten(-1, q.shape[1:]),
            q,
        )

    def _see(self, layer: int, what: str, before: Tensor, after: Tensor) -> None:
        """Compare rows of this call's tokens."""
        positions = np.arange(self.first, self.first + len(after))
        self.turned[layer, what].see(f64(before), f64(after), self.tables[layer], positions, self.rounding, 1)

    def _entries(self, layer: int | None, rows: Tensor) -> None:
        assert layer is not None
        self._compressed(layer, "entries", rows)

    def _keys(self, layer: int | None, rows: Tensor) -> None:
        assert layer is not None
        self._compressed(layer, "index keys", rows)

    def _compressed(self, layer: int, what: str, rows: Tensor) -> None:
        """Compare rows of closed windows, each at the position of its first token."""
        place, ratio = (layer, what), self.model.config.ratio(layer)
        before, start = self._pooled[place].pop(0), self._rows[place]
        self._rows[place] = start + len(rows)
        positions = ratio * np.arange(start, start + len(rows))
        self.turned[place].see(f64(before), f64(rows), self.tables[layer], positions, self.rounding, 1)

    def _unrotated(self, layer: int | None, out: Tensor) -> None:
        assert layer is not None
        after, dim = f64(out), self.model.config.qk_rope_head_dim
        positions = np.arange(self.first, self.first + len(after))
        self.turned[layer, "output"].see(self._mixed, after, self.tables[layer], positions, self.rounding, -1)
        self.touched += int((after[..., :-dim] != self._mixed[..., :-dim]).sum())
