"""Rotary embedding: which angles each kind of layer turns by, and what is turned by them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from model.config import LayerKind, ModelConfig
from model.observe.observer import listening
from model.observe.sites import Site
from model.transformer import Transformer
from probes import finding
from probes.finding import Finding, Part, Plot, Report, at_most, exactly, judged, vacuous
from probes.probe import Probe, Progress, one_rank
from probes.rope import checks
from probes.rope import watch as rope_watch
from probes.rope.oracle import POSITIONS, Table, apart
from probes.rope.watch import Turned, Watch
from probes.shared.narrow import f64
from probes.subject import Subject, run_tokens
from runtime.arithmetic import DTYPES

WORDS = {
    "queries": "queries turned at their tokens' positions",
    "window KV": "window KV turned at its tokens' positions",
    "entries": "compressed entries turned at the first position of their block",
    "index queries": "index queries turned at their tokens' positions",
    "index keys": "index keys turned at the first position of their block",
    "output": "attention output turned back at its tokens' positions",
}
TELLING = 10.0  # a rotation that was left out must show as so many roundings
BF16 = 2.0**-8  # half an ulp of bf16, as a share of the number
DRAWN = 21  # powers of two of positions in the plot: up to 2^20


@dataclass(frozen=True)
class Rope(Probe):
    """Compare the tables, the op and every rotation of a run with float64."""

    name: ClassVar[str] = "rope"
    question: ClassVar[str] = "Is everything that carries a position rotated by the right angles of its layer's kind?"
    reads: ClassVar[tuple[Site, ...]] = rope_watch.READS
    background: ClassVar[str] = """\
Positions enter a V4 model as rotations: the last dims of queries, keys and index keys are turned in pairs of neighbours
by angles that grow with the position. There are two tables. Layers that see their window alone (SWA) use `rope_theta`;
layers with compressed entries (CSA, HCA) use `compress_rope_theta` slowed by YaRN, for everything in them: queries,
window, entries, indexer. A compressed entry stands at the first position of its block. Because keys are values too, the
attention's output comes out rotated, and is turned back.

What goes wrong here in silence: one table for all layers, YaRN on the window layers or nowhere, entries that are never
rotated or rotated elsewhere, an output that is not turned back, halves paired instead of neighbours, YaRN's attention
scaling where V4 has none. Short prompts hardly show it: the error grows with the position. This probe compares the
tables with their formulas up to position 10^6, and every rotation of a run with what went into it.

Errors are given as a share of what rounding allows. A share just below 1 is what to expect: among many thousand values
one is always rounded by nearly half a unit in the last place. A fault gives tens and more."""
    noticed: ClassVar[str] = """\
- As far as the demo's YaRN reaches, an angle that is computed in fp32 is off by less than storing the rotated number in
  bf16 costs; beyond, the angle is the larger error. The fastest pair turns by one radian per token, a frequency that
  fp32 holds exactly, and has no error at all.
- What YaRN slows has hardly turned before either: the slowest pair (*longest wave*) does not get round once within the
  longest context.
- In the window layer the window is shorter than one turn of most pairs.
- The rotation of the run is as exact as bf16 allows. Had the entries been left unrotated, it would be far outside (last
  column)."""

    tokens: int = 4500  # of the prompt: beyond the demo's original context of 4096

    def needs(self, subject: Subject) -> str | None:
        """All weights in one process."""
        return one_rank(subject, "it takes weights out of the model, and a rank holds only its part of them")

    def vacuous(self, subject: Subject) -> str | None:
        """Without rotated dims there is nothing to look at."""
        del subject
        return None

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """Compare tables, then the op, then a run."""
        model, config = subject.model, subject.config
        rounding = torch.finfo(DTYPES[subject.options.dtype]).eps / 2
        tables = {kind: Table.of_kind(config, kind) for kind in LayerKind if kind in config.layer_kinds}
        progress(0.0, "tables and golden values")
        still = (
            *checks.tables_of(model, tables),
            *checks.golden(config, model.device),
            *checks.op(model.arithmetic.ops, model, DTYPES[subject.options.dtype], rounding, subject.seed),
        )
        count = max(self.tokens, 2 * max(config.compress_ratios) + 4)  # entries at position 0 show no rotation
        watch = _watched(subject, min(count, config.max_position_embeddings), tables, rounding, progress)
        of_kind = _by_kind(watch, config)
        table = max(math.inf if found.measured is None else found.measured for found in still[: len(tables)])
        worst = max(of_kind.values(), key=lambda found: math.inf if math.isnan(found[1].share) else found[1].share)
        return Report(
            f"{len(tables)} tables are within {table:.3g} of what fp32 allows up to position"
            f" {max(POSITIONS)}. In {watch.first} tokens, {sum(turned.rows for turned in watch.turned.values())} rows"
            f" were rotated; the worst is {worst[1].share:.3g} of what rounding allows away from its angle.",
            (
                *still,
                *_judged(of_kind),
                *_missing(of_kind, config),
                judged("numbers before the rope dims that turning back changed", watch.touched, exactly(0)),
            ),
            tuple(_parts(config, model, tables, of_kind)),
            "Not that the projections before a rotation are right: what went in is taken from the run. Angles are"
            " judged as fp32 gives them; what that costs at long positions is in the plot, and is shared by every"
            " implementation that multiplies position by frequency in fp32.",
        )


Rotations = dict[tuple[LayerKind, str], tuple[int, Turned]]  # by kind and what is rotated: a layer, and what it did

FULL = Rope()
QUICK = Rope(tokens=300)


def _watched(
    subject: Subject, count: int, tables: dict[LayerKind, Table], rounding: float, progress: Progress
) -> Watch:
    model, tokens = subject.model, subject.tokens(count)
    watch = Watch(model, [tables[kind] for kind in subject.config.layer_kinds], rounding)
    chunk = min(subject.options.prefill_chunk, len(tokens))
    state = model.new_state(len(tokens), chunk)
    with torch.inference_mode(), listening(model, watch.listeners()):
        for first in range(0, len(tokens), chunk):
            progress(0.1 + 0.9 * first / len(tokens), "rotations of the run")
            watch.first = first
            run_tokens(model, tokens[first : first + chunk], chunk, state)
    watch.first = len(tokens)
    return watch


def _by_kind(watch: Watch, config: ModelConfig) -> Rotations:
    """The worst layer of each kind for each thing that is rotated, with the rows of all layers."""
    of_kind: Rotations = {}
    for (layer, what), turned in watch.turned.items():
        place = (config.layer_kind(layer), what)
        known = of_kind.get(place)
        if known is None:
            of_kind[place] = (layer, turned)
            continue
        worse = (layer, turned) if not turned.share <= known[1].share and not math.isnan(known[1].share) else known
        of_kind[place] = (
            worse[0],
            replace(
                worse[1],
                rows=turned.rows + known[1].rows,
                unturned=min(turned.unturned, known[1].unturned),
                last=max(turned.last, known[1].last),
            ),
        )
    return of_kind


def _judged(of_kind: Rotations) -> Iterator[Finding]:
    for (kind, what), (layer, turned) in of_kind.items():
        words = f"{kind.name} layers: {WORDS[what]}, off over what rounding allows, worst"
        if turned.unturned < TELLING:
            why = f"without any rotation it would be {turned.unturned:.2g}: rows at position 0, or too few"
            yield vacuous(words, why, layer=layer)
            continue
        # One rounding of each number to the activations' dtype moves a pair by at most that share of its length
        yield judged(words, turned.share, at_most(1), layer=layer, rows=turned.rows, **turned.evidence)


def _missing(of_kind: Rotations, config: ModelConfig) -> Iterator[Finding]:
    """A prompt that closes no window shows nothing of entries."""
    for kind in tuple(LayerKind):
        if kind in config.layer_kinds and kind is not LayerKind.SWA and (kind, "entries") not in of_kind:
            yield vacuous(f"{kind.name} layers: {WORDS['entries']}", "the prompt closed no window")


def _parts(
    config: ModelConfig, model: Transformer, tables: dict[LayerKind, Table], of_kind: Rotations
) -> Iterator[Part]:
    yield finding.Table(
        "The table of each kind of layer",
        ("kind", "layers", "theta", "YaRN", "entries at", "shortest wave", "longest wave", "kept", "between", "slowed"),
        [_row(config, kind, table) for kind, table in tables.items()],
        "Waves in tokens: after so many, a pair has turned once. Pairs are kept as without YaRN, slowed by its factor,"
        " or between the two. Entry e stands at position e times its ratio, the first of its block.",
    )
    yield finding.Table(
        "What was rotated in the run",
        ("kind", "what", "rows", "last position", "off, radians", "off, of rounding", "if left out"),
        [
            (kind.name, what, turned.rows, turned.last, turned.radians, turned.share, turned.unturned)
            for (kind, what), (_, turned) in of_kind.items()
        ],
        "The worst pair of all layers of the kind; the last column is what leaving the rotation out would make of it,"
        " in units of the rounding allowed.",
    )
    curves: dict[str, Sequence[tuple[float, float]]] = {
        kind.name: _errors(model, config, kind, table)
        for kind, table in tables.items()
        if kind is not LayerKind.HCA or LayerKind.CSA not in tables  # the two share a table
    }
    yield Plot(
        "Error of an angle in fp32",
        "position",
        "radians",
        curves | {"half an ulp of bf16": [(1.0, BF16), (2.0 ** (DRAWN - 1), BF16)]},
        log_x=True,
        log_y=True,
        note="Largest of all pairs and of 256 positions up to the one drawn, against float64: position times frequency"
        " is rounded to fp32."
        " Where the curves cross the line, the angle loses more than storing the rotated number in bf16 does.",
    )


def _row(config: ModelConfig, kind: LayerKind, table: Table) -> tuple[float | str | None, ...]:
    layers = [layer for layer, of in enumerate(config.layer_kinds) if of is kind]
    yarn, ratio = table.yarn, config.ratio(layers[0])
    kept, slowed = int((table.slowed == 0).sum()), int((table.slowed == 1).sum())
    return (
        kind.name,
        ", ".join(map(str, layers)),
        table.theta,
        "off" if yarn is None else f"x{yarn.factor:g} from {yarn.original_max_position_embeddings}",
        f"{ratio} e" if ratio else None,
        *(2 * math.pi / float(freq) for freq in (table.freqs[0], table.freqs[-1])),
        *(kept, len(table.freqs) - kept - slowed, slowed),
    )


def _errors(model: Transformer, config: ModelConfig, kind: LayerKind, table: Table) -> list[tuple[float, float]]:
    """Largest error of an angle of the run's table, up to each power of two.

    Steps are odd: the product with a position of many factors 2 is rounded less than others.
    """
    rotation = model.blocks[config.layer_kinds.index(kind)].attention.rotation
    points = []
    for first in (1 << power for power in range(DRAWN)):
        count, step = min(256, first), (first // 512) | 1
        start = first - (count - 1) * step  # the upper half of what lies below, and more of it where that is little
        cos, sin = (f64(part) for part in rotation.at(start, count, step))
        off = apart(cos, sin, table.angles(start + step * np.arange(count)))
        points.append((float(first), float(off.max())))
    return points
