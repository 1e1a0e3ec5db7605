"""The sinks that acted in a run, recovered from what its attention returned."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from model.config import LayerKind, ModelConfig
from model.observe import sites
from model.observe.sites import Listener, Site
from probes.shared.narrow import F64, f64
from probes.sink.oracle import TINY, Attended

READS = (sites.QUERY, sites.KV, sites.ENTRY, sites.SELECTED, sites.MIXED)
LEAST = 1e-6  # of a token's weight, where the file's sink takes nothing or all
DEVIATIONS = 6.0  # of independent roundings: what a mean of them stays below


@dataclass
class Heads:
    """The heads of one layer over the sampled tokens: keys kept a share of the softmax, the sink took the rest.

    Means over tokens weigh each by how much it says about the sink: what its share would move for a change of the sink,
    over the variance that rounding gives it.
    """

    log_mass: list[F64] = field(default_factory=list)  # per token [h], of the keys
    kept: list[F64] = field(default_factory=list)  # per token [h], the run's output along `bare`, over its length
    weight: list[F64] = field(default_factory=list)  # per token [h]
    variance: list[F64] = field(default_factory=list)  # per token [h], of `kept` by rounding
    unexplained: float = 0.0  # largest part of an output that no sink gives, as a share of what rounding allows
    position: int = -1  # where that was
    head: int = -1

    def add(self, out: F64, attended: Attended, sink: F64, rounding: float, position: int) -> None:
        """Take in the output [h, d] of one token."""
        bare, fp32 = attended.bare, np.linalg.norm(attended.allowed(sink, 0.0), axis=1)
        size = np.maximum((bare**2).sum(1), TINY)
        kept, right = (out * bare).sum(1) / size, attended.kept(sink)
        share = np.linalg.norm(out - kept[:, None] * bare, axis=1) / (fp32 + rounding * np.linalg.norm(out, axis=1))
        head = int(np.argmax(share))
        if not (share[head] <= self.unexplained or math.isnan(self.unexplained)):
            self.unexplained, self.position, self.head = float(share[head]), position, head
        # A rounding is even over +- `rounding` of each number, at worst: variance a third of the square. What fp32 may
        # be off stands at six deviations.
        noise = rounding**2 / 3 * ((attended.output(sink) * bare) ** 2).sum(1) / size**2
        if attended.keys == 1:
            # The output is one number times a key: of FP8 its values are few, and equal ones round alike. Nothing
            # averages out then, so the largest error that they can add up to stands at six deviations.
            noise = (rounding * np.abs(attended.output(sink) * bare).sum(1) / size / DEVIATIONS) ** 2
        variance = noise + (fp32 / np.sqrt(size) / DEVIATIONS) ** 2
        self.log_mass.append(attended.log_mass)
        self.kept.append(kept)
        self.variance.append(variance)
        self.weight.append((right * (1 - right) + LEAST) / variance)

    def shares(self, sink: F64) -> F64:
        """Share of the softmax that sinks [h] take at each token: [t, h]."""
        with np.errstate(over="ignore"):  # a sink of -inf takes nothing: 1 / inf
            out: F64 = 1 / (1 + np.exp(np.stack(self.log_mass) - sink))
        return out

    def taken_by(self, sink: F64) -> F64:
        """Mean share that sinks [h] take: [h]."""
        return self._mean(self.shares(sink))

    def taken(self) -> F64:
        """Mean share that the run's took: [h]."""
        return self._mean(1 - np.stack(self.kept))

    def allowed(self) -> F64:
        """How far `taken` may be from what the right sinks take, by rounding: [h]."""
        weight = np.stack(self.weight)
        out: F64 = DEVIATIONS * np.sqrt((weight**2 * np.stack(self.variance)).sum(0)) / weight.sum(0)
        return out

    def acted(self) -> F64:
        """The sink of each head that takes what was taken, by bisection; infinite where nothing or all was: [h]."""
        taken = self.taken()
        low, high = np.full_like(taken, -100.0), np.full_like(taken, 100.0)
        for _ in range(60):
            middle = (low + high) / 2
            less = self.taken_by(middle) < taken
            low, high = np.where(less, middle, low), np.where(less, high, middle)
        return np.where(taken <= 0, -np.inf, np.where(taken >= 1, np.inf, (low + high) / 2))

    def confused(self, sink: F64) -> F64:
        """By how much `taken_by` would move if a head used another one's sink, the most telling one: [h]."""
        right = self.taken_by(sink)
        other: F64 = np.max([np.abs(self.taken_by(np.roll(sink, by)) - right) for by in range(len(sink))], axis=0)
        return other

    def _mean(self, of: F64) -> F64:
        weight = np.stack(self.weight)
        out: F64 = (of * weight).sum(0) / weight.sum(0)
        return out


class Watch:
    """Listeners that recover the sinks of every layer at sampled positions; set `first` before each call."""

    def __init__(
        self, config: ModelConfig, sinks: Sequence[F64], rounding: float, sampled: Sequence[int], tokens: int
    ) -> None:
        self.config, self.sinks, self.rounding = config, sinks, rounding  # sinks [h] of each layer, from the file
        self.sampled, self.first = sampled, 0
        self.heads: dict[int, Heads] = defaultdict(Heads)
        width, layers = config.head_dim, range(config.num_hidden_layers)
        self._kv = [np.zeros((tokens, width)) for _ in layers]
        self._entries = [np.zeros((tokens // (config.ratio(layer) or tokens + 1), width)) for layer in layers]
        self._filled = [0 for _ in layers]
        self._query, self._selected = torch.zeros(0), torch.zeros(0)

    def listeners(self) -> dict[Site, Listener]:
        """What to attach."""
        return {
            sites.QUERY: self._take_query,
            sites.KV: self._take_kv,
            sites.ENTRY: self._take_entries,
            sites.SELECTED: self._take_selected,
            sites.MIXED: self._attended,
        }

    def _take_query(self, layer: int | None, q: Tensor) -> None:
        del layer
        self._query = q.clone()

    def _take_selected(self, layer: int | None, selected: Tensor) -> None:
        del layer
        self._selected = selected.clone()

    def _take_kv(self, layer: int | None, kv: Tensor) -> None:
        assert layer is not None
        self._kv[layer][self.first : self.first + len(kv)] = f64(kv)

    def _take_entries(self, layer: int | None, rows: Tensor) -> None:
        assert layer is not None
        start = self._filled[layer]
        self._filled[layer] = start + len(rows)
        self._entries[layer][start : start + len(rows)] = f64(rows)

    def _attended(self, layer: int | None, out: Tensor) -> None:
        assert layer is not None
        for position in self.sampled:
            i = position - self.first
            if not 0 <= i < len(out):
                continue
            window = self._kv[layer][max(0, position - self.config.sliding_window + 1) : position + 1]
            keys = np.concatenate((window, self._entries[layer][self._seen(layer, i, position)]))
            attended = Attended.to(f64(self._query[i]), keys)
            self.heads[layer].add(f64(out[i]), attended, self.sinks[layer], self.rounding, position)

    def _seen(self, layer: int, i: int, position: int) -> list[int]:
        """Entries that the token at `position`, row i of this call, attends to."""
        if self.config.layer_kind(layer) is LayerKind.SWA:
            return []
        finished = (position + 1) // self.config.ratio(layer)
        if self.config.layer_kind(layer) is LayerKind.HCA:
            return list(range(finished))
        return [entry for entry in self._selected[i].tolist() if 0 <= entry < finished]
