"""Attention with a sink in float64, and the grid of inputs that the sink probe feeds to the op."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from probes.shared.narrow import F64, f64

U = 2.0**-24  # half an ulp of fp32, as a share of the number
LAMBDA = 6.0  # a sum of n products rounds to within LAMBDA sqrt(n) U of the sum of their sizes (Higham and Mary 2019)
TINY = 1e-30  # allowed where everything is 0


@dataclass(frozen=True, slots=True)
class Attended:
    """What one token's heads get from the keys they see, before any sink: keys are values too."""

    bare: F64  # [h, d] softmax over the keys alone, applied to them
    log_mass: F64  # [h] log of sum_j exp(logit_j)
    sizes: F64  # [h, d] the same with absolute values: what roundings are shares of
    logit_error: F64  # [h] what fp32 may be off in a logit
    keys: int

    @classmethod
    def to(cls, q: F64, keys: F64) -> "Attended":
        """Attend from q [h, d] to keys [n, d], with ``logit_j = q . k_j / sqrt(d)``."""
        d = q.shape[1]
        logits = q @ keys.T / np.sqrt(d)  # [h, n]
        peak = logits.max(1, keepdims=True)
        mass = np.exp(logits - peak)
        total = mass.sum(1, keepdims=True)
        share = mass / total
        summed = (np.abs(q) @ np.abs(keys).T / np.sqrt(d)).max(1)  # [h] sizes that one logit sums
        # The products of a logit, and its difference from the peak
        error = (LAMBDA * np.sqrt(d) + 4) * U * summed + 4 * U * np.abs(logits).max(1)
        return cls(share @ keys, (peak + np.log(total))[:, 0], share @ np.abs(keys), error, len(keys))

    def kept(self, sink: F64) -> F64:
        """Share of the softmax that the keys keep from sinks [h]; the rest has no value. [h]."""
        with np.errstate(over="ignore"):  # a sink far above the logits keeps nothing: 1 / inf
            out: F64 = 1 / (1 + np.exp(sink - self.log_mass))
        return out

    def output(self, sink: F64) -> F64:
        """``sum_j exp(l_j) kv_j / (exp(sink) + sum_j exp(l_j))``: [h, d]."""
        out: F64 = self.bare * self.kept(sink)[:, None]
        return out

    def error(self, sink: F64) -> F64:
        """What fp32 may be off in `output`, as a share of `sizes` times `kept`: [h].

        Logits that are off by e move a softmax by a factor of at most exp(2 e); the rest are the sums over keys.
        """
        finite = np.where(np.isfinite(sink), np.abs(sink), 0)
        out: F64 = np.expm1(2 * (self.logit_error + 4 * U * finite)) + (LAMBDA * np.sqrt(self.keys) + 8) * U
        return out

    def allowed(self, sink: F64, rounding: float) -> F64:
        """What may be off in each number of the op's output, whose dtype rounds to a share `rounding`: [h, d]."""
        fp32: F64 = (self.error(sink) * self.kept(sink))[:, None] * self.sizes
        return rounding * np.abs(self.output(sink)) + fp32 + TINY


WINDOWS = ("one key", "partly filled", "full", "full, ring wrapped")
ENTRIES = (
    "no entries",
    "none finished",
    "all finished",
    "selection empty",
    "selection padded",
    "some selected",
    "all selected",
)
NOISE = 100.0  # rows that no token may see: reading one of them cannot go unnoticed


@dataclass(frozen=True, slots=True)
class Shape:
    """Dims of an attention."""

    name: str
    heads: int
    width: int
    window: int


@dataclass(frozen=True, slots=True)
class Case:
    """One input of the attend op, all but the sink, and which keys each token sees."""

    window_state: str
    entries_state: str
    q: Tensor  # [t, h, d]
    ring: Tensor  # [capacity, d]
    first: int
    window: int
    entries: Tensor | None  # [n, d]
    ratio: int
    selected: Tensor | None  # [t, k] int32
    seen: tuple[tuple[int, ...], ...]  # entries that each token sees

    def attended(self) -> list[Attended]:
        """Attend in float64, token by token."""
        ring, capacity = f64(self.ring), len(self.ring)
        entries = ring[:0] if self.entries is None else f64(self.entries)
        found = []
        for i, seen in enumerate(self.seen):
            position = self.first + i
            held = [p % capacity for p in range(max(0, position - self.window + 1), position + 1)]
            found.append(Attended.to(f64(self.q[i]), np.concatenate((ring[held], entries[list(seen)]))))
        return found


def cases(shape: Shape, dtype: torch.dtype, tokens: int, seed: int) -> Iterator[Case]:
    """Every window with every kind of entries, as far as the dims allow it."""
    generator = torch.Generator().manual_seed(seed)
    for window_state, entries_state in itertools.product(WINDOWS, ENTRIES):
        t = 1 if window_state == "one key" else tokens
        first, capacity = _place(window_state, shape.window, t)
        if first < 0:
            continue
        ratio = 1 if first + t < 8 else 4
        ratio = first + t + 1 if entries_state == "none finished" else ratio
        done = (first + t) // ratio
        seen = [list(range((first + i + 1) // ratio)) for i in range(t)]
        selected = _selection(entries_state, seen, done, generator)
        if selected is not None:
            seen = [sorted(set(row) & set(of)) for row, of in zip(selected.tolist(), seen, strict=True)]
        yield Case(
            window_state,
            entries_state,
            (2 * torch.randn(t, shape.heads, shape.width, generator=generator)).to(dtype),
            _ring(first, t, capacity, shape, generator).to(dtype),
            first,
            shape.window,
            None if entries_state == "no entries" else _entries(done, shape.width, generator).to(dtype),
            0 if entries_state == "no entries" else ratio,
            selected,
            tuple(() if entries_state == "no entries" else tuple(row) for row in seen),
        )


def _place(window_state: str, window: int, t: int) -> tuple[int, int]:
    """Position of the first token, and rows of the ring; -1 where the window is too small for the state."""
    least = window + t - 1
    match window_state:
        case "one key":
            return 0, least
        case "partly filled":
            return (window - t) // 2, least
        case "full":
            return 2 * window, 3 * window + t
        case _:
            return 7 * least + min(1, window - 1), least


def _ring(first: int, t: int, capacity: int, shape: Shape, generator: torch.Generator) -> Tensor:
    """KV of the positions that are seen, and noise in all other rows."""
    ring = NOISE * torch.randn(capacity, shape.width, generator=generator)
    for position in range(max(0, first - shape.window + 1), first + t):
        ring[position % capacity] = torch.randn(shape.width, generator=generator)
    return ring


def _entries(done: int, width: int, generator: torch.Generator) -> Tensor:
    """Finished entries, and three unfinished ones of noise."""
    entries = torch.randn(done + 3, width, generator=generator)
    entries[done:] *= NOISE
    return entries


def _selection(state: str, seen: list[list[int]], done: int, generator: torch.Generator) -> Tensor | None:
    """[t, k] int32, or None where the state has no selection."""
    match state:
        case "selection empty":
            return torch.full((len(seen), 4), -1, dtype=torch.int32)
        case "selection padded":  # half of what is finished, among everything that is no entry
            pads = [-1, done, done + 3, 2**31 - 1, -(2**31)]
            return torch.tensor([[*range(0, done, 2), *pads] for _ in seen], dtype=torch.int32)
        case "some selected":
            k = max(1, done // 8)
            rows = [torch.randperm(len(of), generator=generator)[:k].sort().values.tolist() for of in seen]
            return torch.tensor([row + [-1] * (k - len(row)) for row in rows], dtype=torch.int32)
        case "all selected":
            return torch.tensor([[*of, *[-1] * (done - len(of))] for of in seen], dtype=torch.int32)
        case _:
            return None
