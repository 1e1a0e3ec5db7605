"""Probe `same`: ways to run one prompt that should make no difference, each recorded and held against another."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

from torch import Tensor

from fathom.model.choices import DEPLOYED
from fathom.model.config import ModelConfig
from fathom.model.observe import sites
from fathom.model.observe.sites import Site
from fathom.probes.finding import JSON, Finding, Plot, Report, Table, at_most, broken, judged, number, vacuous
from fathom.probes.judge.checks import Judged, Status
from fathom.probes.judge.oracle import Noise, Parameters, Setting
from fathom.probes.judge.pairs import Apart, Pairs, Side
from fathom.probes.judge.recording import CHOICES, KEPT, OF_ENTRIES, Recording
from fathom.probes.probe import Probe, Progress, room
from fathom.probes.subject import Subject, selects_all
from fathom.probes.ways import OtherFilesError, Way, run
from fathom.runtime.arithmetic import DTYPES

EXPLAINED: Final = at_most(1.0)  # times what rounding explains, see `probes.judge.checks`
FLOOR: Final = 1e-9  # where plots begin: rows that are bit-equal have no logarithm

# Sites that no module of transformers shows: mHC's reading weights are spent inside one, the attention before its
# inverse rotation is a local variable, and an index key or query that is not rounded is not there twice.
HIDDEN_INSIDE: Final = tuple(
    site.name
    for site in (
        *(sites.ATTENTION_PRE, sites.EXPERTS_PRE, sites.MIXED),
        *(sites.INDEX_KEY_USED, sites.INDEX_QUERY_USED),
    )
)

NOT_CLAIMED = """\
That two ways agree does not make them right: op sets and calls share the wiring, and a fault that both have cancels.
The six probes of layers hold every site of a run against an oracle instead. A difference that rounding explains is
below the bounds here (`bits` sees it), and so is a clamp that no activation of this prompt reaches. Of routed experts
the gate and up projections are not compared: they pass by expert, not by token."""


class Pair(NamedTuple):
    """Two ways that should make no difference but for rounding."""

    name: str
    one: Way
    other: Way

    @property
    def alike(self) -> bool:
        """Whether both round the same: then the furthest row is telling, and else the median row."""
        return (self.one.numerics, self.one.dtype) == (self.other.numerics, self.other.dtype)


ONE_CALL, ROUNDED = Way(), Way(DEPLOYED)
OP_SET = Pair("op set", ONE_CALL, Way(other_ops=True))
TRANSFORMERS = Pair("transformers", ONE_CALL, Way(transformers=True))
ROUNDED_OP_SET = Pair("op set, deployed", ROUNDED, Way(DEPLOYED, other_ops=True))
# Calls of 7 take the ways that ops have for few tokens, which round for themselves.
ROUNDED_CALLS = Pair("calls of 7, deployed", ROUNDED, Way(DEPLOYED, chunk=7))
AS_RUN = Pair("calls of 7, deployed in bf16", Way(DEPLOYED, "bf16"), Way(DEPLOYED, "bf16", chunk=7))
NUMERICS = Pair("numerics", ONE_CALL, ROUNDED)
DTYPE = Pair("dtype", ONE_CALL, Way(dtype="bf16"))


def calls(tokens: int) -> Pair:
    """The whole prompt in one call, against calls of `tokens`."""
    return Pair(f"calls of {tokens}", ONE_CALL, Way(chunk=tokens))


class Compared(NamedTuple):
    """What became of a pair."""

    pair: Pair
    results: list[Judged]  # of all sites, up to the first layer in which the two part
    unlike: list[Apart]  # of all sites
    missing: list[str]  # tensors that one run alone has, though both should
    off: tuple[float, float] | None  # how far each is from its oracle where they differ, see `Pairs.off`

    @property
    def first(self) -> Judged | None:
        """The first site that rounding does not explain."""
        return next((one for one in self.results if one.status is Status.DIFFERS), None)

    @property
    def furthest(self) -> tuple[float, Apart, int]:
        """The largest distance of two rows, where, and which row; choices left out."""
        numbers = [one for one in self.unlike if one.site not in CHOICES]
        far = max(numbers, key=lambda one: float(one.distance.max()))
        row = int(far.distance.argmax())
        return float(far.distance[row]), far, int(far.at[row])

    @property
    def rows(self) -> int:
        """How many rows both have."""
        return sum(len(one.at) for one in self.unlike)

    def finding(self, config: ModelConfig, prefix: str = "") -> Finding:
        """The verdict, with the first site that rounding does not explain."""
        first = self.first
        where = self.missing[0] if self.missing else first and first.site
        what = f"{prefix}{self.pair.name}: any row, over what rounding explains"
        what += f", first apart at {where}" if where else ""
        if self.missing:
            return broken(what, f"one run alone has {self.missing[0]}", missing=len(self.missing))
        distance, far, row = self.furthest
        silent = [one for one in self.results if one.status is Status.NOT_JUDGED]
        if first is None and 2 * len(silent) > len(self.results):
            return vacuous(what, f"{len(silent)} of {len(self.results)} sites were not judged, as {silent[0].why}")
        worst = max(self.results, key=lambda one: one.excess)
        shown = first or worst
        evidence: dict[str, JSON] = {
            "site": shown.site,
            **({"token": token(config, shown, shown.first.position)} if shown.first is not None else {}),
            **({"index": list(shown.first.index)} if first and shown.first is not None else {}),
            **({"why": shown.why} if shown.why else {}),
            **({"off_its_oracle": [number(one) for one in self.off]} if self.off else {}),
            "rows": self.rows,
            "bit_equal": self.rows - sum(len(one.other) for one in self.unlike),
            **({"not_judged": len(silent)} if silent else {}),
            "near_ties": sum(one.ties for one in self.results),
            "largest": distance,
            "largest_at": f"{far.name}, {'entry' if far.site in OF_ENTRIES else 'token'} {row}",
        }
        if first and first.excess <= 1:  # no row by itself
            return broken(what, layer=first.layer, **{"why": first.why, **evidence})
        return judged(what, shown.excess, EXPLAINED, layer=shown.layer, **evidence)


def token(config: ModelConfig, one: Judged, position: int) -> int:
    """Position of the token that a row belongs to: an entry stands for the last token of its block."""
    if one.site not in OF_ENTRIES or one.layer is None:
        return position
    return (position + 1) * config.ratio(one.layer) - 1


def side(way: Way, subject: Subject, path: Path, parameters: Parameters) -> Side:
    """A recording of a way, to be judged as what it is."""
    recording = Recording(path, subject.config)
    rounding, noise = way.options(subject).rounding, Noise(DTYPES[way.dtype])
    return Side(recording, Setting(subject.config, parameters, recording.tokens, rounding, recording, noise))


def compared(pair: Pair, one: Side, other: Side, rows: int | None, progress: Callable[[float], None]) -> Compared:
    """Hold two recordings against each other at every site; how far apart numbers are is asked of all layers."""
    layers = one.setting.config.num_hidden_layers
    pairs, results = Pairs(one, other, rows), list[Judged]()
    for layer in (*range(layers), None):
        progress((layers if layer is None else layer) / (layers + 1))
        if any(judged.status is Status.DIFFERS for judged in results):  # where they part first is what is asked
            pairs.compare(layer)
        else:
            results += pairs.ends() if layer is None else pairs.layer(layer)
    names = [{*side.recording.tensors} for side in (one, other)]
    hidden = HIDDEN_INSIDE if pair.one.transformers or pair.other.transformers else ()
    differs = next((judged for judged in results if judged.status is Status.DIFFERS and judged.first), None)
    return Compared(
        pair,
        results,
        list(pairs.unlike.values()),
        sorted(name for name in names[0] ^ names[1] if not name.endswith(hidden)),
        None if differs is None else pairs.off(differs),
    )


@dataclass(frozen=True)
class Same(Probe):
    """Record a prompt in pairs of ways, and compare; the fields are knobs."""

    name: ClassVar[str] = "same"
    question: ClassVar[str] = "Where do two ways to run a prompt first part: which site, layer and token?"
    of_v41: ClassVar[bool] = True
    reads: ClassVar[tuple[Site, ...]] = KEPT
    background: ClassVar[str] = """\
A prompt can be run in many ways that should make no difference: with the equations written out (`reference`) or in
tiles (`cpu`), in one call or in many, by this runtime or by another. Where two of them disagree, one is wrong, and a
comparison of the answers alone says neither which nor where: by the end of a few layers everything differs.

So each way is recorded, every site of every layer, and two recordings are compared with each other as by `compare
--recording A --against B`. What each run should have made of its own input is computed in float64, so that a difference
which came with the input is not counted again, and what is left is measured against what rounding explains there: 1 is
the bound. Numbers that are rounded to FP8 or FP4 and choices of experts and entries may fall otherwise where both
answers were as good. The first site, layer and token beyond the bound is where to look.

Two op sets and two ways to cut a prompt share the wiring of the layers and cannot see a fault in it.
`DeepseekV4ForCausalLM` of transformers, recorded by the exporter that is part of this project, shares the files."""
    noticed: ClassVar[str] = """\
- With activations rounded as deployed, two right op sets part all the same: one value of one token rounds the other
  way, and what follows from it differs, selections and logits included. Judged from the input that each has, they agree
  at every site. So deployed logits cannot be asked to agree closely, and where they are let differ, faults pass; what
  can be asked is agreement at every site from equal inputs.
- Plain and deployed numerics agree too, and fp32 and bf16, each judged by its own rounding."""

    tokens: int = 700  # five blocks of 128 and a part of one; made more where the model needs more, see `length`
    rows: int | None = None  # of a site that are judged, those furthest apart besides; None: as many as are affordable
    # `calls of 7` divides neither 4 nor 128: calls end at every residue of both
    pairs: tuple[Pair, ...] = (OP_SET, calls(7), TRANSFORMERS, NUMERICS, DTYPE, ROUNDED_OP_SET, ROUNDED_CALLS, AS_RUN)

    def length(self, config: ModelConfig) -> int:
        """Tokens to run: at least two entries of each kind, and twice as many as the selection takes."""
        needed = (config.sliding_window, 2 * max(config.compress_ratios), 2 * selects_all(config))
        return max(self.tokens, max(needed) + 4)

    def needs(self, subject: Subject) -> str | None:
        """Entries of every kind, and more of them than are selected."""
        return room(subject, self.length(subject.config))

    def vacuous(self, subject: Subject) -> str | None:
        """Say why the comparison could not show a difference."""
        return "no pair can be run" if all(refused(pair, subject) for pair in self.pairs) else None

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """Record one way after the other, each once."""
        tokens = subject.tokens(self.length(subject.config))
        parameters = Parameters.of(subject.directory, subject.config)
        found, left, sides = list[Compared](), dict[Pair, str](), dict[Way, Side]()
        with tempfile.TemporaryDirectory() as folder:

            def recorded(way: Way) -> Side:
                if way not in sides:
                    path = Path(folder) / f"{len(sides)}.safetensors"
                    run(way, subject, tokens, path)
                    sides[way] = side(way, subject, path, parameters)
                return sides[way]

            for done, pair in enumerate(self.pairs):

                def told(share: float, done: int = done, pair: Pair = pair) -> None:
                    progress((done + share) / len(self.pairs), pair.name)

                told(0)
                why = refused(pair, subject)
                try:
                    one, other = (None, None) if why else (recorded(pair.one), recorded(pair.other))
                except OtherFilesError as error:
                    why, one, other = str(error), None, None  # it does not read every form of the files
                if one is not None and other is not None:
                    found.append(compared(pair, one, other, self.rows, told))
                else:
                    left[pair] = str(why)
        outcomes = [_outcome(one, subject.config) for one in found]
        outcomes += [f"{pair.name} not run ({why})" for pair, why in left.items()]
        count = max((len(one.unlike) for one in found), default=0)
        summary = (
            f"A prompt of {len(tokens)} tokens was run both ways of each pair, and {count} tensors were compared. Worst"
            f" row, over what rounding explains: {'; '.join(outcomes)}."
        )
        parts = (_overview(found, left, subject), _by_site(found), _through_depth(found))
        return Report(summary, tuple(one.finding(subject.config) for one in found), parts, NOT_CLAIMED)


def refused(pair: Pair, subject: Subject) -> str | None:
    """Why a pair cannot be run; None when it can."""
    return pair.one.refused(subject) or pair.other.refused(subject)


# --- the page


def _outcome(one: Compared, config: ModelConfig) -> str:
    """A pair in a few words of the summary."""
    finding = one.finding(config)
    if not finding.failed:
        return f"{one.pair.name} {finding.shown}"
    if "site" not in finding.evidence:  # nothing was judged that could part
        return f"{one.pair.name}: {finding.evidence['why']}"
    at = f"{finding.evidence['site']} of layer {finding.layer}, token {finding.evidence.get('token')}"
    return f"{one.pair.name} parts at {at}"


def _overview(found: Sequence[Compared], left: Mapping[Pair, str], subject: Subject) -> Table:
    """The pairs, one a row."""

    def head(pair: Pair) -> list[float | str | None]:
        return [pair.name, pair.one.says(subject), pair.other.says(subject)]

    rows = []
    for one in found:
        finding = one.finding(subject.config)
        known = finding.evidence
        counts = [one.rows, one.rows - sum(len(apart.other) for apart in one.unlike)]
        rows.append([*head(one.pair), *counts, finding.measured, known.get("largest"), known.get("largest_at")])
    rows += [[*head(pair), None, None, None, None, f"not run: {why}"] for pair, why in left.items()]
    columns = (
        *("pair", "one side", "other side", "rows compared", "bit-equal"),
        *("worst over what rounding explains", "largest distance", "where"),
    )
    note = (
        "Distance of two rows: Euclidean, relative to the longer one, of whatever input each came from; choices left"
        " out. What rounding explains is measured at rows that are not the same: a sample, and those furthest apart."
    )
    return Table("Pairs", columns, rows, note)


def _far(one: Compared, rows: Tensor) -> float:
    return float(rows.max() if one.pair.alike else rows.median())


def _by_site(found: Sequence[Compared]) -> Table:
    """For each site its furthest layer, in every pair."""
    rows: list[list[float | str | None]] = []
    for site in KEPT:
        cells: list[float | str | None] = [site.name]
        for one in found:
            far = [
                float((apart.distance > 0).double().mean()) if site.name in CHOICES else _far(one, apart.distance)
                for apart in one.unlike
                if apart.site == site.name and len(apart.at)
            ]
            cells.append(max(far) if far else None)
        rows.append(cells)
    heads = [f"{one.pair.name}, {'largest' if one.pair.alike else 'median'}" for one in found]
    note = (
        "The furthest row of ways that round alike, the median row of those that do not, each in the layer where it"
        " is furthest; of choices, the share of rows that chose otherwise. Empty: that side does not show it. Deployed"
        " index queries and keys are Hadamard-rotated before they are rounded, and scored so: that they are 1.4 from"
        " plain ones means nothing."
    )
    return Table("By site", ("site", *heads), rows, note)


def _through_depth(found: Sequence[Compared]) -> Plot:
    """How far apart the streams are after each layer."""
    series: dict[str, Sequence[tuple[float, float]]] = {}
    for one in found:
        after = {apart.layer: apart.distance for apart in one.unlike if apart.site == sites.STREAMS.name}
        far = {layer: _far(one, rows) for layer, rows in after.items()}
        finite = {layer: value for layer, value in far.items() if value < float("inf")}
        series[one.pair.name] = [(float(layer or 0), max(FLOOR, value)) for layer, value in finite.items()]
    note = (
        "Residual streams of the two runs of a pair, after each layer: the furthest token where both runs round alike,"
        f" the median token where they do not. {FLOOR:g} stands for equal bits, or nearly."
    )
    return Plot("Through depth", "layer", "relative distance of the streams", series, log_y=True, note=note)


FULL = Same()
# 101 is odd: its calls too end within windows of both kinds.
QUICK = Same(tokens=264, rows=8, pairs=(OP_SET, calls(101), TRANSFORMERS, ROUNDED_OP_SET, ROUNDED_CALLS))
