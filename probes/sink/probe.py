"""Sinks: a softmax with the right one in its denominator, whatever else a token sees."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from kernels.ops import Ops
from model.observe.observer import listening
from model.observe.sites import Site
from probes.finding import JSON, Finding, HeatMap, Part, Report, Table, at_most, judged, vacuous
from probes.probe import Probe, Progress
from probes.shared.narrow import F64, f64
from probes.sink import watch as sink_watch
from probes.sink.oracle import ENTRIES, WINDOWS, Case, Shape, cases
from probes.sink.watch import Heads, Watch
from probes.subject import Subject, run_tokens
from runtime.arithmetic import DTYPES

V4 = (Shape("V4-Flash", 64, 512, 128), Shape("V4-Pro", 128, 512, 128))
SINKS = ("the file's", "0", "-inf", "+inf", "30", "one per head")
TELLING = 4.0  # a layer can tell its heads' sinks apart when confusing two moves the share by this many roundings
RANGES = (0, 1, 16, 100)  # positions from which shares are averaged, each up to the next
LISTED = 32  # heads that are listed one by one; of more, the worst of each layer


@dataclass(frozen=True)
class Sink(Probe):
    """Feed the attend op a grid of inputs, and recover the sinks that acted in a run."""

    name: ClassVar[str] = "sink"
    question: ClassVar[str] = "Does every head's own sink take its share of the softmax, and nothing else?"
    reads: ClassVar[tuple[Site, ...]] = sink_watch.READS
    background: ClassVar[str] = """\
Each attention head has a learned number, its sink: one more logit in the denominator of the softmax, for a key that has
no value. It lets a head attend to nothing. An attention kernel has to get it right for every mixture of what a token
can see: a window of one key, half full, or wrapped around its ring; compressed entries that are absent, unfinished,
selected or not.

What goes wrong here in silence: the sink is given a value, all ranks use the sinks of rank 0, the logits are scaled by
YaRN's mscale, rows are read that the token may not see. Comparing two builds cannot show a fault that both share, so
this probe compares with float64. The op is fed a grid of inputs with noise in every row that must not be read. Then a
prompt is run, and from what the attention of each layer really returned, and the keys it saw, the sink of each head is
solved for and compared with the checkpoint's bytes.

Errors are given as a share of what rounding allows. A share just below 1 is what to expect: among many thousand values
one is always rounded by nearly half a unit in the last place. A fault gives tens and more."""
    noticed: ClassVar[str] = """\
- The sinks of the demo checkpoint never went far from zero, where training began. They still decide the first tokens:
  with few keys, a head may give nearly all of the softmax to its sink (*share, largest*).
- Then keys outnumber them, and CSA layers give them next to nothing. A fault of the sinks is one of short prompts and
  of the beginnings of long ones.
- For that reason, a first form of this probe that trusted all tokens alike could not tell one head's sink from
  another's in a layer of this very run, and said so by failing as vacuous. Weighted by what each token says about the
  sink, nearly all come back close, from nothing but bf16 outputs; the others are of sinks that never take much."""

    tokens: int = 1500  # of the prompt
    sampled: int = 200  # of them, at which sinks are recovered: the first half in a row, then spread out
    chunk: int = 64  # tokens per call: the ring wraps many times
    shapes: tuple[Shape, ...] = V4  # dims of the grid beside the model's own
    grid_tokens: int = 3  # tokens per call of the op; with one key there is one

    def needs(self, subject: Subject) -> str | None:
        """One head cannot be given another one's sink."""
        return "the model has one attention head" if subject.config.num_attention_heads == 1 else None

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """Compare the op over the grid, then recover the run's sinks."""
        config, rounding = subject.config, torch.finfo(DTYPES[subject.options.dtype]).eps / 2
        weights = subject.file_weights
        sinks = [f64(weights.vector(f"layers.{layer}.attn.attn_sink")) for layer in range(config.num_hidden_layers)]
        own = Shape("the model's", config.num_attention_heads, config.head_dim, config.sliding_window)
        grids = [Grid(shape, sinks[-1]) for shape in (own, *self.shapes)]
        for i, grid in enumerate(grids):
            progress(0.6 * i / len(grids), f"attend at {grid.shape.name} dims")
            grid.run(subject, self.grid_tokens)
        watch = self._watched(subject, sinks, rounding, progress)
        return Report(
            _summary(grids, watch, sinks),
            (
                *(finding for grid in grids for finding in grid.findings()),
                *(finding for layer, heads in watch.heads.items() for finding in _in_run(layer, heads, sinks[layer])),
            ),
            (*(grid.heat_map() for grid in grids), *_tables(watch, sinks)),
            "Not that the right keys were attended to: the run's own queries, keys and selection are taken as given"
            " (the probes `rope` and `recall` judge those).",
        )

    def _watched(self, subject: Subject, sinks: list[F64], rounding: float, progress: Progress) -> Watch:
        model, config = subject.model, subject.config
        tokens = subject.tokens(min(self.tokens, config.max_position_embeddings))
        half = min(self.sampled // 2, len(tokens))
        spread = np.linspace(half, len(tokens) - 1, self.sampled - half).round().astype(int).tolist()
        watch = Watch(config, sinks, rounding, sorted({*range(half), *spread}), len(tokens))
        chunk = min(self.chunk, len(tokens))
        state = model.new_state(len(tokens), chunk)
        with listening(model, watch.listeners()):
            for first in range(0, len(tokens), chunk):
                progress(0.6 + 0.4 * first / len(tokens), "sinks in the run")
                watch.first = first
                run_tokens(model, tokens[first : first + chunk], chunk, state)
        return watch


FULL = Sink()
QUICK = Sink(tokens=200, sampled=40, shapes=(), grid_tokens=5)


@dataclass
class Grid:
    """The attend op at one set of dims over all windows, entries, sinks and dtypes."""

    shape: Shape
    learned: F64  # [h] sinks of the file
    compared: int = 0
    worst: dict[str, tuple[float, dict[str, JSON]]] = field(default_factory=dict)  # by sink: share, where
    cells: dict[tuple[str, str], float] = field(default_factory=dict)  # by window and entries: share, fp32 inputs

    def run(self, subject: Subject, tokens: int) -> None:
        """Compare every case with float64."""
        ops, device = subject.model.arithmetic.ops, subject.model.device
        for dtype in DTYPES.values():
            for case in cases(self.shape, dtype, tokens, subject.seed):
                attended = case.attended()
                for name in SINKS:
                    sink = self._sinks(name)
                    got = f64(_attend(ops, case, sink, device))
                    wanted = np.stack([one.output(sink) for one in attended])
                    allowed = np.stack([one.allowed(sink, torch.finfo(dtype).eps / 2) for one in attended])
                    self._see(name, case, dtype, np.abs(got - wanted) / allowed)

    def _sinks(self, name: str) -> F64:
        heads = self.shape.heads
        if name == "the file's":
            return np.resize(self.learned, heads)
        if name == "one per head":  # no two alike, whatever the checkpoint holds
            return np.linspace(-4.0, 4.0, heads)
        return np.full(heads, float(name))

    def _see(self, sink: str, case: Case, dtype: torch.dtype, share: F64) -> None:
        self.compared += 1
        token, head, column = (int(i) for i in np.unravel_index(int(np.argmax(share)), share.shape))
        largest, cell = float(share[token, head, column]), (case.window_state, case.entries_state)
        if dtype is torch.float32:
            self.cells[cell] = float(np.maximum(self.cells.get(cell, 0.0), largest))  # NaN stays NaN
        known = self.worst.get(sink, (-1.0, {}))[0]
        if math.isnan(known) or largest <= known:
            return
        where = {"window": case.window_state, "entries": case.entries_state, "dtype": str(dtype)}
        self.worst[sink] = largest, where | {"token": token, "head": head, "column": column}

    def findings(self) -> Iterator[Finding]:
        """One for each kind of sink: the kinds that fail name the cause."""
        for sink in SINKS:
            share, where = self.worst[sink]
            # 1: rounding to the output's dtype and fp32 sums, derived number by number in `Attended`
            what = f"attend at {self.shape.name} dims, sinks {sink}: error over what rounding allows, worst"
            yield judged(what, share, at_most(1), "", **where)

    def heat_map(self) -> HeatMap:
        """Error by window and entries."""
        shape = self.shape
        return HeatMap(
            f"Error of attend at {shape.name} dims: {shape.heads} heads x {shape.width}, window {shape.window}",
            "what the token sees beside its window",
            "window",
            ENTRIES,
            WINDOWS,
            [[_clipped(self.cells.get((window, entries))) for entries in ENTRIES] for window in WINDOWS],
            "Largest error over all sinks, tokens and columns, as a share of what fp32 sums may be off; 1 and more is a"
            " fault. Inputs in fp32: in bf16, the rounding of the output alone uses up nearly all that is allowed.",
        )


def _attend(ops: Ops, case: Case, sink: F64, device: torch.device) -> Tensor:
    entries = None if case.entries is None else case.entries.to(device)
    selected = None if case.selected is None else case.selected.to(device)
    sinks = torch.from_numpy(sink).float().to(device)
    q, ring = case.q.to(device), case.ring.to(device)
    return ops.attend(q, ring, case.first, case.window, entries, case.ratio, selected, sinks)


def _clipped(share: float | None) -> float | None:
    return None if share is None else min(share, 1.0) if math.isfinite(share) else 1.0


def _in_run(layer: int, heads: Heads, sink: F64) -> Iterator[Finding]:
    """What the outputs of one layer say about its sinks."""
    taken, right, allowed = heads.taken(), heads.taken_by(sink), heads.allowed()
    head = int(np.argmax(np.abs(taken - right) / allowed))
    acted = heads.acted()[head]
    confused = heads.confused(sink)
    if not (confused > TELLING * allowed).any():
        yield vacuous(
            "sinks of the run",
            f"no head's share would move by {TELLING:g} times the rounding allowed if it used another head's sink"
            f" (at most {confused.max():.2g}): the sinks are alike, or take nothing",
            layer=layer,
        )
    yield judged(
        "share of the softmax that the sink took, off the file's, worst head",
        abs(float(taken[head] - right[head])),
        # Six standard deviations of a mean of independent roundings, of the output and of fp32
        at_most(float(allowed[head])),
        layer=layer,
        head=head,
        file=float(sink[head]),
        acted=float(acted),
        taken=float(taken[head]),
        would_move_by=float(confused[head]),
    )
    yield judged(
        "part of an output that no sink gives, over what rounding allows, worst",
        heads.unexplained,
        at_most(1),  # an output is the softmax over the keys, scaled by what the sink leaves, and rounded once
        layer=layer,
        position=heads.position,
        head=heads.head,
    )


def _summary(grids: list[Grid], watch: Watch, sinks: list[F64]) -> str:
    worst = float(np.max([share for grid in grids for share, _ in grid.worst.values()]))
    off = [float(np.abs(heads.taken() - heads.taken_by(sinks[layer])).max()) for layer, heads in watch.heads.items()]
    return (
        f"Over {sum(grid.compared for grid in grids)} inputs the op is within {worst:.3g} of what rounding allows of"
        f" float64. In the run, sinks took {_mean(watch, sinks):.1%} of the softmax, and the share of every head is"
        f" within {np.max(off):.1e} of what the file's sink takes."
    )


def _mean(watch: Watch, sinks: list[F64]) -> float:
    return float(np.mean([heads.shares(sinks[layer]).mean() for layer, heads in watch.heads.items()]))


def _tables(watch: Watch, sinks: list[F64]) -> Iterator[Part]:
    rows: list[tuple[float | str | None, ...]] = []
    every = sum(len(sink) for sink in sinks) <= LISTED
    for layer, heads in watch.heads.items():
        sink, acted = sinks[layer], heads.acted()
        off = np.abs(heads.taken() - heads.taken_by(sink)) / heads.allowed()
        shown = range(len(sink)) if every else (int(np.argmax(off)),)
        shares = heads.shares(sink)
        kind = watch.config.layer_kind(layer).name
        rows += [
            (layer, kind, h, *(float(x[h]) for x in (sink, acted, shares.mean(0), shares.max(0))), float(off[h]))
            for h in shown
        ]
    yield Table(
        "The sinks that acted",
        ("layer", "kind", "head", "sink, file", "sink, run", "share, mean", "share, largest", "off, of rounding"),
        rows,
        f"Sinks as the file has them, and as solved for from the run's outputs at {len(watch.sampled)} positions; the"
        " share of the softmax that the file's takes there, on average and at most; and the error of the run's share,"
        " as a part of what rounding allows." + ("" if every else " Of each layer, the head that is worst."),
    )
    columns = [f"{low} .. {high - 1}" for low, high in pairwise(RANGES[1:])]
    yield Table(
        "Share of the softmax that sinks take, by position",
        ("layer", "kind", "first token", *columns, f"from {RANGES[-1]} on"),
        [
            (layer, watch.config.layer_kind(layer).name, *_by_range(heads.shares(sinks[layer]), watch.sampled))
            for layer, heads in watch.heads.items()
        ],
        "The file's sinks, mean over heads and sampled positions.",
    )


def _by_range(shares: F64, positions: Sequence[int]) -> list[float | None]:
    """Mean of shares [t, h] over each of RANGES; None for one without a position."""
    at = np.array(positions)
    parts = [shares[(at >= low) & (at < high)] for low, high in pairwise((*RANGES, 1 << 62))]
    return [float(part.mean()) if len(part) else None for part in parts]
