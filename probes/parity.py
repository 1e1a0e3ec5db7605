"""Probe `parity`: two settings of one model, compared at every site; names the first site, layer and token apart.

The first run is held in full, of the second only one number for each row as it goes by: how far it is from the first. A
row is a token, or an entry, which stands for the last token of its block.
"""

import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fathom.kernels.formats.reference import decode
from fathom.kernels.ops import CPU, REFERENCE, Ops
from fathom.model.checkpoint.census import census
from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.checkpoint.names import Kind, Meaning, Role, expert_name, parameters, translate
from fathom.model.checkpoint.weights import Weights, open_weights
from fathom.model.choices import DEPLOYED as AS_DEPLOYED
from fathom.model.config import LayerKind, ModelConfig, check_widths
from fathom.model.errors import CheckpointError, ConfigError
from fathom.model.observe import sites
from fathom.model.observe.observer import listening
from fathom.model.observe.sites import Listener, Site
from fathom.model.rounding import ROUNDINGS
from fathom.probes.finding import JSON, Bound, Finding, Plot, Report, Table, at_most, judged, measured, number
from fathom.probes.probe import Probe, Progress, room
from fathom.probes.subject import Subject, run_tokens, selects_all

# Largest relative distance of two rows that only the order of sums keeps apart. fp32 rounds by 2^-24 = 6e-8, so a sum
# of 512 terms in another order is off by some sqrt(512) of that, 1.4e-6, in each of a layer's few sums. transformers
# computes RoPE's frequencies by another formula, an ulp apart: at position 700 that is an angle of up to 4e-5 in the
# few fastest of many dims. Both together, with seven sums.
SAME = at_most(5e-5)
FLOOR = 1e-9  # where plots begin: rows that are bit-equal have no logarithm
# One expert's rows come in the order of the experts, not of the tokens; what it adds is in EXPERTS_OUTPUT.
COMPARED = tuple(site for site in sites.SITES if site not in (sites.ROUTED_GATE, sites.ROUTED_UP))
DECISIONS = (sites.SELECTED, sites.EXPERT_IDS)  # sets of integers
OF_ENTRIES = (sites.ENTRY, sites.INDEX_KEY, sites.INDEX_KEY_USED)

NOT_CLAIMED = """\
That two settings agree does not make them right: op sets and chunks share the wiring, and transformers may err where
this runtime does. Both sides of the comparison with transformers decode the file with `kernels.formats.reference`;
`load` checks that decoding by another path. A difference of one ulp is below every bound here (`bits` sees it),
and so is a clamp that no activation of this prompt reaches."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to run the model."""

    numerics: str = "plain"
    dtype: str = "fp32"
    other_ops: bool = False  # the op set that the run does not use
    chunk: int | None = None  # tokens in a call; None: all of them
    transformers: bool = False

    def says(self, subject: Subject) -> str:
        """Words for a table."""
        if self.transformers:
            return "transformers, fp32, one call"
        ops = other_ops(subject.ops).name if self.other_ops else subject.ops.name
        return f"{ops}, {self.numerics}, {self.dtype}, {f'calls of {self.chunk}' if self.chunk else 'one call'}"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two settings and what is demanded of them.

    Where activations are rounded to FP8 or FP4, sums in another order move the few values that lie within 1e-6 of a tie
    by a whole step, and everything that is computed from them. Such a pair is `steered`: after every site the second
    run goes on from where the first was, and only `share` of a site's rows must hold the bound.
    """

    name: str
    one: Setting
    other: Setting
    bound: Bound | None = None  # None: they differ by design and are measured
    share: float = 1.0  # of the rows of each site that must hold the bound
    steered: bool = False

    @property
    def alike(self) -> bool:
        """Whether both round activations the same: then the farthest row is telling, and else the median row."""
        return (self.one.numerics, self.one.dtype) == (self.other.numerics, self.other.dtype)

    @property
    def limit(self) -> float:
        """From which distance on a row is an example, and within which a decision's scores are equal."""
        return math.inf if self.bound is None else self.bound.value

    @property
    def demands(self) -> str:
        """The bound and where it has to hold, in words; empty for a pair that is measured."""
        if self.bound is None:
            return ""
        rows = "" if self.share == 1 else f" in {self.share:.0%} of a site's rows"
        return f"{self.bound}{rows}{', steered' if self.steered else ''}"

    def refused(self, subject: Subject) -> str | None:
        """Why the pair cannot run on this model and machine; None when it can."""
        if (self.one.transformers or self.other.transformers) and (why := without_transformers(subject.config)):
            return why
        if "deployed" in (self.one.numerics, self.other.numerics):
            try:
                check_widths(subject.config, ROUNDINGS[AS_DEPLOYED])
            except ConfigError as error:
                return str(error)
        return None


PLAIN, DEPLOYED = Setting(), Setting(numerics="deployed")
OP_SET = Pair("op set", PLAIN, Setting(other_ops=True), SAME)
TRANSFORMERS = Pair("transformers", PLAIN, Setting(transformers=True), SAME)
UNSTEERED = Pair("op set, deployed, not steered", DEPLOYED, Setting("deployed", other_ops=True))
# A row of the widest model's experts holds 10^4 rounded values: a few rows in a hundred hold one that is moved.
DEPLOYED_OP_SET = replace(UNSTEERED, name="op set, deployed", bound=SAME, share=0.75, steered=True)
# Calls of 7 take the ways that ops have for few tokens, which round for themselves.
DEPLOYED_CALLS = replace(DEPLOYED_OP_SET, name="calls of 7, deployed", other=replace(DEPLOYED, chunk=7))
NUMERICS = Pair("numerics", PLAIN, DEPLOYED)
DTYPE = Pair("dtype", PLAIN, Setting(dtype="bf16"))


def chunks(tokens: int) -> Pair:
    """The whole prompt in one call, against calls of `tokens`."""
    return Pair(f"calls of {tokens}", PLAIN, Setting(chunk=tokens), SAME)


def other_ops(ops: Ops) -> Ops:
    """The op set that a run with `ops` is held against."""
    return CPU if ops.name == REFERENCE.name else REFERENCE


@dataclass(frozen=True)
class Parity(Probe):
    """Compare pairs of settings on one prompt; the fields are knobs."""

    name: ClassVar[str] = "parity"
    question: ClassVar[str] = "Where do two settings that should agree first part: which site, layer and token?"
    reads: ClassVar[tuple[Site, ...]] = COMPARED
    background: ClassVar[str] = """\
A model can be run in many ways that should make no difference: with the equations written out (`reference`) or in tiles
(`cpu`), the prompt in one call or in many, by this runtime or by another. Where two of them disagree, one is wrong,
and a comparison of the answers alone says neither which nor where: by the end of a few layers everything differs.

So both sides are watched at every site, in the order in which a token passes them, and each row (a token's query, its
streams, an entry) is compared by itself: the distance of the two rows, relative to the longer. The first site, layer
and token beyond the bound is where to look. Two op sets and two chunkings share the wiring of the layers and cannot see
a fault in it; `DeepseekV4ForCausalLM` of transformers shares nothing but the file, which is decoded to fp32 for it.

Where activations are rounded to FP8 and FP4, the last bit of a sum can decide a whole step of the format, and whatever
follows from that differs. Such a pair is *steered*: after every site the second run is put back on the first, so that
each site is compared from equal inputs."""
    noticed: ClassVar[str] = """\
- The two op sets are no closer to each other than this one is to transformers, and all select the same entries.
  It need not be so: a selection may end among entries at the ReLU's zero, where any choice is as good, and `torch.topk`
  may choose otherwise than this runtime (the lowest entry). Such a token is excused and goes on with the first run's
  choice.
- With activations rounded as deployed, two right op sets part all the same: one value of one token rounds the other
  way, and what follows from it differs, selections and logits included. Put back on the first run after each site, they
  agree within the bound: all of it was that rounding. So deployed logits cannot be asked to agree closely, and where
  they are let differ, faults pass; what can be asked is agreement at every site from equal inputs.
- Judging the median row of the deployed op sets, without putting them back, passes on this checkpoint and fires on a
  healthy one with random weights: an HCA entry carries one flipped value of a block of tokens to every later token.
- Rounding as deployed changes what is selected, and moves the logits of the median token, more than BF16 alone."""

    tokens: int = 700  # five blocks of 128 and a part of one; made more where the model needs more, see `length`
    # `calls of 7` divides neither 4 nor 128: calls end at every residue of both
    pairs: tuple[Pair, ...] = (
        *(OP_SET, chunks(7), TRANSFORMERS, NUMERICS, DTYPE),
        *(DEPLOYED_OP_SET, DEPLOYED_CALLS, UNSTEERED),
    )

    def length(self, config: ModelConfig) -> int:
        """Tokens to run: at least two entries of each kind, and twice as many as the selection takes."""
        needed = (config.sliding_window, 2 * max(config.compress_ratios), 2 * selects_all(config))
        return max(self.tokens, max(needed) + 4)

    def needs(self, subject: Subject) -> str | None:
        """Entries of every kind, and more of them than are selected."""
        return room(subject, self.length(subject.config))

    def vacuous(self, subject: Subject) -> str | None:
        """Say why the comparison could not show a difference."""
        if all(pair.bound is None or pair.refused(subject) for pair in self.pairs):
            return "no pair of settings that should agree can be run"
        return None

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """Hold one side of each pair, and compare the other as it runs."""
        tokens, weights = subject.tokens(self.length(subject.config)), subject.file_weights
        held: tuple[Setting, Trace] | None = None  # of one setting at a time: pairs that share it stand together
        compared: list[Comparison] = []
        for done, pair in enumerate(self.pairs):
            progress(done / len(self.pairs), pair.name)
            if pair.refused(subject):
                continue
            if held is None or held[0] != pair.one:
                held = pair.one, Trace()
                run(pair.one, subject, tokens, held[1])
            comparison = Comparison(pair, subject.config, weights, held[1])
            run(pair.other, subject, tokens, comparison)
            comparison.close(HIDDEN_INSIDE if pair.other.transformers else ())
            compared.append(comparison)
        refused = {pair: why for pair in self.pairs if (why := pair.refused(subject))}
        bounded = [one for one in compared if one.pair.bound is not None]
        outcomes = [*map(_outcome, bounded), *(f"{pair.name} not run ({why})" for pair, why in refused.items())]
        count = max(len(one.keys) for one in compared)
        summary = (
            f"A prompt of {len(tokens)} tokens was run with both settings of a pair, and {count} sites were compared."
            f" Largest relative distance of a row: {'; '.join(outcomes)}."
        )
        parts = (_overview(compared, refused, subject), _by_site(compared), _through_depth(compared))
        return Report(summary, tuple(one.finding() for one in compared), parts, NOT_CLAIMED)


def run(setting: Setting, subject: Subject, tokens: list[int], sink: "Sink") -> None:
    """Run the prompt and show `sink` everything that passes."""
    canonical = Canonical(subject.config, sink)
    if setting.transformers:
        run_transformers(subject.directory.resolve(), tokens, canonical)
        return
    options = subject.with_options(numerics=setting.numerics, dtype=setting.dtype)
    model = subject.load(options, other_ops(subject.ops) if setting.other_ops else None).model
    with listening(model, canonical.listeners()):
        model.logits(run_tokens(model, tokens, setting.chunk or len(tokens))[0])


# --- what passes in a run

# What passes at a site of a layer, in the form of `Canonical`; returns what the run is to go on with, None for the same
Sink = Callable[[Site, int | None, Tensor], Tensor | None]


class Key(NamedTuple):
    """A site of a layer."""

    site: Site
    layer: int | None

    def __str__(self) -> str:
        return self.site.name if self.layer is None else f"{self.site.name} of layer {self.layer}"


class Canonical:
    """Between a model and a sink: brings what passes into a form in which equal means equal, and back.

    That form is float32 on the CPU; selections [t, index_topk] ascending after as many -1 as it takes, whatever the
    entries so far; expert ids ascending and their weights in the same order; both int64.
    """

    def __init__(self, config: ModelConfig, sink: Sink) -> None:
        self.top_k, self.sink = config.index_topk, sink
        self.order = torch.empty(0)  # of the experts that passed last: their weights come next

    def __call__(self, site: Site, layer: int | None, tensor: Tensor) -> Tensor | None:
        """Show `tensor` to the sink; returns what to go on with, in the shape, order and dtype of `tensor`."""
        x = tensor.detach().cpu()
        if site == sites.SELECTED:
            x = functional.pad(x.long(), (0, max(0, self.top_k - x.shape[1])), value=-1).sort(dim=1).values
        elif site == sites.EXPERT_IDS:
            x, self.order = x.long().sort(dim=1)
        elif site == sites.EXPERT_WEIGHTS:
            x = x.float().gather(1, self.order)
        new = self.sink(site, layer, x if site in DECISIONS else x.float())
        if new is None:
            return None
        if site == sites.SELECTED:
            entries = torch.where(new < 0, torch.iinfo(torch.int64).max, new).sort(dim=1).values[:, : tensor.shape[1]]
            new = torch.where(entries < torch.iinfo(torch.int64).max, entries, -1)
        elif site in (sites.EXPERT_IDS, sites.EXPERT_WEIGHTS):
            new = torch.empty_like(new).scatter_(1, self.order, new)
        return new.to(tensor)

    def listeners(self) -> dict[Site, Listener]:
        """One for each site, for `listening`. They write into what passes where the sink wants it so."""

        def at(site: Site) -> Listener:
            def listen(layer: int | None, tensor: Tensor) -> None:
                new = self(site, layer, tensor)
                if new is not None:
                    tensor.copy_(new)

            return listen

        return {site: at(site) for site in COMPARED}


class Trace(dict[Key, Tensor]):
    """Everything that passed in one run, in the order of the computation."""

    def __call__(self, site: Site, layer: int | None, tensor: Tensor) -> None:
        """Keep it."""
        key = Key(site, layer)
        self[key] = torch.cat((self[key], tensor)) if key in self else tensor.clone()


class Place(NamedTuple):
    """A site of a layer, and how far apart its rows are."""

    key: Key
    value: float  # of the row which a share of `pair.share` of the rows do not exceed: of all, the farthest
    row: int  # the one of `value`
    first: int  # the first row beyond the bound, where there is one


@dataclass
class Comparison:
    """A second run against a held one: a sink for what passes in it.

    Attributes
    ----------
    pair
        Its limit is the difference from which on a row is an example, and within which scores are equal. Steered, the
        second run is put back on the first after every site: what differs there then is what was computed since the
        site before. With the rows that go into caches, these are put back too.
    config, weights
        Of the checkpoint. The gates' weights say how close two experts were.
    held
        The first run.
    differences
        For each site and layer [rows] float32: ``|a - b| / max(|a|, |b|)``, Euclidean over the row, so 0 to 2; of
        decisions the share that is in one set only. Infinite where a row is missing, too wide, or not finite.
    keys
        Sites and layers that were compared, in the order of the first run; filled by `close`.
    examples
        The first row beyond the limit, by site and layer: its number, and where in it both are farthest apart.
    excused
        Rows whose decision fell otherwise between choices that are equal within the limit. The second run goes on with
        the decision of the first.
    """

    pair: Pair
    config: ModelConfig
    weights: Weights
    held: Trace
    differences: dict[Key, Tensor] = field(default_factory=dict)
    keys: list[Key] = field(default_factory=list)
    examples: dict[Key, tuple[int, dict[str, JSON]]] = field(default_factory=dict)
    excused: dict[Key, list[int]] = field(default_factory=dict)

    def __call__(self, site: Site, layer: int | None, tensor: Tensor) -> Tensor | None:
        """Compare the next rows of a site."""
        key = Key(site, layer)
        known = self.differences.get(key, torch.empty(0))
        first = len(known)
        one = self.held[key][first : first + len(tensor)] if key in self.held else tensor.new_empty(0)
        if one.shape != tensor.shape:
            self.differences[key] = torch.cat((known, torch.full((len(tensor),), math.inf)))
            return None
        taken = self._excuse(key, first, one, tensor)
        goes_on = torch.where(taken.view(-1, *[1] * (one.ndim - 1)), one, tensor)
        least = _usual(self.held[key]) if site == sites.INDEX_WEIGHTS else 0.0
        rows = _shares(one, goes_on) if site in DECISIONS else _distances(one.flatten(1), goes_on.flatten(1), least)
        self.differences[key] = torch.cat((known, rows))
        beyond = (rows > self.pair.limit).nonzero()
        if len(beyond) and key not in self.examples:
            at = int(beyond[0])
            off = (one[at].double() - tensor[at].double()).abs().nan_to_num(nan=math.inf)
            element = tuple((off == off.max()).nonzero()[0].tolist())  # torch.unravel_index would import sympy, for 2 s
            sides = {"one": float(one[at][element]), "other": float(tensor[at][element])}
            self.examples[key] = first + at, {"element": list(element)} | sides
        return one if self.pair.steered else goes_on if taken.any() else None

    def close(self, hidden: tuple[Site, ...] = ()) -> None:
        """Count rows that never came as infinitely far, and let the first run go.

        `hidden` are sites that the second side does not show.
        """
        for key, rows in self.held.items():
            known = self.differences.get(key, torch.empty(0))
            if len(known) < len(rows) and key.site not in hidden:
                self.differences[key] = torch.cat((known, torch.full((len(rows) - len(known),), math.inf)))
        unheard = [key for key in self.differences if key not in self.held]
        self.keys = [key for key in self.held if key in self.differences] + unheard
        self.held = Trace()

    def token(self, key: Key, row: int) -> int:
        """Position of the token that a row belongs to."""
        if key.site not in OF_ENTRIES or key.layer is None:
            return row
        return (row + 1) * self.config.ratio(key.layer) - 1

    def places(self) -> Iterator[Place]:
        """Every site and layer that was compared, in the order of the computation."""
        for key in self.keys:
            rows = self.differences[key]
            if len(rows):
                row = int(rows.argsort(stable=True)[math.ceil(self.pair.share * len(rows)) - 1])
                beyond = (rows > self.pair.limit).nonzero()
                yield Place(key, rows[row].item(), row, int(beyond[0]) if len(beyond) else row)

    @property
    def worst(self) -> Place:
        """Where the rows are farthest apart."""
        return max(self.places(), key=lambda place: place.value)

    @property
    def apart(self) -> Place | None:
        """The first place beyond the bound."""
        return next((place for place in self.places() if place.value > self.pair.limit), None)

    def finding(self, prefix: str = "") -> Finding:
        """The verdict with the first place apart; of a pair without a bound, what it costs."""
        pair = self.pair
        if pair.bound is None:
            rows = self.differences[Key(sites.LOGITS, None)]
            what = f"{prefix}{pair.name}: distance of the logits, median token"
            return measured(what, rows.median().item(), largest=rows.max().item(), token=int(rows.argmax()))
        worst, apart = self.worst, self.apart
        place = apart or worst
        rows_of = "any row" if pair.share == 1 else f"any row but the farthest {1 - pair.share:.0%} of a site"
        row, example = self.examples.get(place.key, (-1, {}))
        evidence: dict[str, JSON] = {
            "site": place.key.site.name,
            "token": self.token(place.key, place.first),
            "by": self.differences[place.key][place.first].item(),
            **(example if row == place.first else {}),
            "largest_at": f"{worst.key}, token {self.token(worst.key, worst.row)}",
            "rows": self.count(lambda rows: rows >= 0),
            "rows_beyond": self.count(lambda rows: rows > pair.limit),
            "bit_equal": self.count(lambda rows: rows == 0),
            "equals_excused": sum(map(len, self.excused.values())),
        }
        first = f", first apart at {apart.key.site.name}" if apart else ""
        what = f"{prefix}{pair.name}: distance of {rows_of}{first}"
        return judged(what, worst.value, pair.bound, layer=place.key.layer, **evidence)

    def count(self, which: Callable[[Tensor], Tensor]) -> int:
        """How many rows of all sites are so far apart."""
        return sum(int(which(rows).sum()) for rows in self.differences.values())

    def _excuse(self, key: Key, first: int, one: Tensor, other: Tensor) -> Tensor:
        """Which rows go on with the first run's decision: [rows] bool. With the ids of a row go their weights."""
        taken = torch.zeros(len(one), dtype=torch.bool)
        if key.site == sites.EXPERT_WEIGHTS:
            excused = self.excused.get(Key(sites.EXPERT_IDS, key.layer), [])
            taken[[row - first for row in excused if row >= first]] = True
        elif key.site in DECISIONS and math.isfinite(self.pair.limit):
            for at in (one != other).any(1).nonzero().flatten().tolist():
                taken[at] = self._equally_good(key, first + at, one[at], other[at])
            if taken.any():
                self.excused.setdefault(key, []).extend((first + taken.nonzero().flatten()).tolist())
        return taken

    def _equally_good(self, key: Key, row: int, one: Tensor, other: Tensor) -> bool:
        """Whether the picks that were exchanged had scores that the limit does not tell apart."""
        ours, theirs = set(one.tolist()), set(other.tolist())
        exchanged = ours ^ theirs
        if len(ours) != len(theirs) or -1 in exchanged:  # one side has a pick twice, or fewer picks
            return False
        scores, scale = self._scores(key, row)
        between = scores[sorted(exchanged)]
        return bool(between.max() - between.min() <= self.pair.limit * scale)

    def _scores(self, key: Key, row: int) -> tuple[Tensor, float]:
        """What the first run's decision was made by, in fp64 from what it was given, and the size of its terms."""
        layer = key.layer
        assert layer is not None, f"{key} has no layer"
        if key.site == sites.SELECTED:
            q = self.held[Key(sites.INDEX_QUERY_USED, layer)][row].double()  # [h, d]
            keys = self.held[Key(sites.INDEX_KEY_USED, layer)].double()  # [n, d]
            head_weights = self.held[Key(sites.INDEX_WEIGHTS, layer)][row].double()
            largest = (head_weights.abs() * q.norm(dim=1)).sum() * keys.norm(dim=1).max()
            return head_weights @ (q @ keys.T).relu(), float(largest)
        x = self.held[Key(sites.EXPERTS_INPUT, layer)][row].double()
        gate = self.weights.vector(f"layers.{layer}.ffn.gate.weight").cpu().double()
        scores = functional.softplus(gate @ x).sqrt()
        if self.config.is_hash(layer):
            return scores, 0.0  # a table leaves nothing to choose
        bias = self.weights.vector(f"layers.{layer}.ffn.gate.bias").cpu().double()
        return scores + bias, float(gate.norm(dim=1).max() * x.norm())


def _shares(one: Tensor, other: Tensor) -> Tensor:
    """Share of each row's picks that only one side has: [rows] float32, 0 to 1."""
    shares = torch.zeros(len(one))
    for at in (one != other).any(1).nonzero().flatten().tolist():
        ours, theirs = ({pick for pick in side[at].tolist() if pick >= 0} for side in (one, other))
        shares[at] = len(ours ^ theirs) / (len(ours) + len(theirs))
    return shares


def _usual(rows: Tensor) -> float:
    """Root mean square length of rows [n, h] that are a few sums each.

    What rounding leaves is a share of the terms, which are as large in all rows: where a row of one or two such sums
    cancels, it is the larger beside what remains.
    """
    return float(rows.square().sum(1).mean().sqrt())


def _distances(one: Tensor, other: Tensor, least: float) -> Tensor:
    """[rows, n] twice to [rows]: Euclidean distance, relative to the longer of two rows, or to `least`.

    0 between two rows of zeros, infinite with a NaN.
    """
    off = (one - other).norm(dim=1)
    relative = torch.where(off == 0, 0.0, off / torch.maximum(one.norm(dim=1), other.norm(dim=1)).clamp(min=least))
    return relative.nan_to_num(nan=math.inf, posinf=math.inf)


# --- the page


def _outcome(one: Comparison) -> str:
    """A pair that has a bound, in a few words of the summary."""
    apart = one.apart
    if apart is None:
        return f"{one.pair.name} {one.worst.value:.1e}"
    token = one.token(apart.key, apart.first)
    return f"{one.pair.name} parts at {apart.key}, token {token}, at most by {number(apart.value)}"


def _overview(compared: Sequence[Comparison], refused: dict[Pair, str], subject: Subject) -> Table:
    """The pairs, one a row."""

    def head(pair: Pair) -> list[float | str | None]:
        return [pair.name, pair.one.says(subject), pair.other.says(subject), pair.demands]

    rows = []
    for one in compared:
        worst = one.worst
        at = f"{worst.key}, token {one.token(worst.key, worst.row)}"
        rows.append([*head(one.pair), one.count(lambda rows: rows >= 0), worst.value, at])
    rows += [[*head(pair), None, None, f"not run: {why}"] for pair, why in refused.items()]
    columns = ("pair", "one side", "other side", "bound", "rows compared", "largest", "where")
    note = "Distance of two rows: Euclidean, relative to the longer one; of a decision, the share that differs."
    return Table("Pairs", columns, rows, note)


def _far(one: Comparison, rows: Tensor) -> float:
    return float(rows.max() if one.pair.alike else rows.median())


def _by_site(compared: Sequence[Comparison]) -> Table:
    """For each site its farthest layer, in every pair."""
    rows: list[list[float | str | None]] = []
    for site in COMPARED:
        of_pairs = [
            [_far(one, rows) for key, rows in one.differences.items() if key.site == site and len(rows)]
            for one in compared
        ]
        rows.append([site.name, *(max(far) if far else None for far in of_pairs)])
    heads = [f"{one.pair.name}, {'largest' if one.pair.alike else 'median'}" for one in compared]
    note = (
        "The farthest row of settings that round alike, the median row of those that do not, each in the layer where it"
        " is farthest. Empty: that side does not show it. Deployed index queries and keys are Hadamard-rotated before"
        " they are rounded, and scored so: that they are 1.4 from plain ones means nothing."
    )
    return Table("By site", ("site", *heads), rows, note)


def _through_depth(compared: Sequence[Comparison]) -> Plot:
    """How far apart the streams are after each layer."""
    series: dict[str, Sequence[tuple[float, float]]] = {}
    for one in compared:
        after = {key.layer: rows for key, rows in one.differences.items() if key.site == sites.STREAMS}
        far = {layer: _far(one, rows) for layer, rows in after.items()}
        series[one.pair.name] = [(float(layer or 0), max(FLOOR, x)) for layer, x in far.items() if math.isfinite(x)]
    note = (
        "Residual streams of the two runs of a pair, after each layer: the farthest token where both runs round alike,"
        f" the median token where they do not. {FLOOR:g} stands for equal bits, or nearly."
    )
    return Plot("Through depth", "layer", "relative distance of the streams", series, log_y=True, note=note)


# --- transformers' `DeepseekV4ForCausalLM` as the other side, imported when it is asked for and not before

LAYER_TYPES = {
    LayerKind.SWA: "sliding_attention",
    LayerKind.CSA: "compressed_sparse_attention",
    LayerKind.HCA: "heavily_compressed_attention",
}
SAME_NAME = (
    *("vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("qk_rope_head_dim", "q_lora_rank", "num_experts_per_tok", "n_routed_experts", "n_shared_experts"),
    *("routed_scaling_factor", "rope_theta", "compress_rope_theta", "max_position_embeddings", "hc_mult"),
    *("hc_sinkhorn_iters", "hc_eps", "num_hash_layers", "swiglu_limit", "sliding_window", "o_groups", "o_lora_rank"),
    *("index_n_heads", "index_head_dim", "index_topk", "rms_norm_eps"),
)
YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
LARGEST = 8 << 30  # bytes of fp32 parameters that are decoded to build it
# Sites that none of its modules shows: mHC's reading weights are spent inside theirs, the attention before the inverse
# rotation is a local variable, and an index key or query that is not rounded is not there twice.
HIDDEN_INSIDE = (
    *(sites.ATTENTION_PRE, sites.EXPERTS_PRE, sites.MIXED),
    *(sites.INDEX_KEY_USED, sites.INDEX_QUERY_USED),
)


def without_transformers(config: ModelConfig) -> str | None:
    """Why transformers cannot be the other side for this model here; None when it can."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed"
    if config.n_shared_experts != 1:
        return f"transformers builds one shared expert, the model has {config.n_shared_experts}"
    ratios = {ratio for ratio, kind in zip(config.compress_ratios, config.layer_kinds, strict=True) if kind == "hca"}
    if len(ratios) > 1:
        return f"transformers has one ratio for all HCA layers, the model has {sorted(ratios)}"
    nbytes = sum(4 * prod(parameter.shape) for parameter in parameters(config).values())
    if nbytes > LARGEST:
        return f"the parameters take {nbytes / 2**30:.0f} GiB in fp32, more than {LARGEST >> 30}"
    return None


@cache
def transformers_model(directory: Path) -> Any:
    """Return a `DeepseekV4ForCausalLM` in fp32 on the CPU that holds the checkpoint's weights, decoded.

    CheckpointError unless each of its parameters was filled and each of the checkpoint's was used.
    """
    transformers = importlib.import_module("transformers")
    config = ModelConfig.from_file(directory / "config.json")
    yarn, kinds = config.rope_scaling, list(zip(config.layer_kinds, config.compress_ratios, strict=True))
    default = {LAYER_TYPES[LayerKind.CSA]: 4, LAYER_TYPES[LayerKind.HCA]: 128}
    theirs = transformers.DeepseekV4Config(
        **{name: getattr(config, name) for name in SAME_NAME},
        layer_types=[LAYER_TYPES[kind] for kind, _ in kinds],
        compress_rates=default | {LAYER_TYPES[kind]: ratio for kind, ratio in kinds if ratio},
        rope_parameters={} if yarn is None else {"rope_type": "yarn"} | {name: getattr(yarn, name) for name in YARN},
        num_nextn_predict_layers=0,
        attn_implementation="eager",
    )
    model = transformers.DeepseekV4ForCausalLM(theirs).float().eval()
    checkpoint = Checkpoint.open(directory)
    weights = open_weights(checkpoint, census(checkpoint.shapes(), config, where=str(directory)))
    stored = {name: parameter.kind for name, parameter in parameters(config).items()}
    for name, parameter in model.state_dict().items():
        values = _values(name, weights, stored, config.n_routed_experts)
        if values.shape != parameter.shape:
            raise CheckpointError(f"transformers: {name} is {list(parameter.shape)}, the file's {list(values.shape)}")
        parameter.copy_(values)
    if unread := weights.unread():
        raise CheckpointError(f"transformers: {len(unread)} parameters have no place in its model, first {unread[0]}")
    return model


def _values(theirs: str, weights: Weights, kinds: dict[str, Kind], experts: int) -> Tensor:
    """What one of transformers' parameters holds: float32, or int64 for a table."""
    meaning = translate(theirs)
    if meaning is None:
        raise CheckpointError(f"transformers: its parameter {theirs} is in no dialect")

    def stack(meaning: Meaning, *parts: str) -> Tensor:
        prefix = meaning.parameter.removesuffix(".ffn.experts")
        names = [[expert_name(prefix, n, part) for part in parts] for n in range(experts)]
        return torch.stack([torch.cat([decode(weights.matrix(name)) for name in of_one]) for of_one in names])

    match meaning.role, kinds.get(meaning.parameter):
        case Role.STACKED_GATE_UP, _:
            return stack(meaning, "w1", "w3")
        case Role.STACKED_DOWN, _:
            return stack(meaning, "w2")
        case _, "matrix":
            return decode(weights.matrix(meaning.parameter))
        case _, "i64":
            return weights.table(meaning.parameter)
        case _:
            return weights.vector(meaning.parameter).float()


def run_transformers(directory: Path, tokens: list[int], sink: Sink) -> None:
    """Run the prompt in one uncached call and hand on what passes at every site but those of `HIDDEN_INSIDE`.

    Of what the sink returns, selections, experts and their weights are gone on with.
    """
    model = transformers_model(directory)
    hooks = _Hooks(sink)
    try:
        hooks.watch(model)
        with torch.inference_mode():
            model(torch.tensor(tokens)[None], use_cache=False)
    finally:
        for handle in hooks.handles:
            handle.remove()


Part = Callable[[Any], Tensor]  # of a module's output, or of its positional arguments


def _whole(out: Any) -> Tensor:
    """Theirs have a batch axis of one in front, ours do not."""
    x: Tensor = out[0]
    return x


class _Hooks:
    """Forward hooks on the modules of a model."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.handles: list[Any] = []
        self.angles: tuple[Tensor, Tensor] | None = None  # of the layer that is running
        module = importlib.import_module("transformers.models.deepseek_v4.modeling_deepseek_v4")
        self.rotate = module.apply_rotary_pos_emb

    def show(self, module: Any, layer: int | None, *shown: tuple[Site, Part], before: bool = False) -> None:
        """Show parts of a module's output, or of its positional arguments."""

        def hook(_module: Any, given: Any, *out: Any) -> None:
            for site, part in shown:
                self.sink(site, layer, part(given if before else out[0]))

        put = module.register_forward_pre_hook if before else module.register_forward_hook
        self.handles.append(put(hook))

    def watch(self, model: Any) -> None:
        """Watch every module that shows a site."""
        show = self.show
        show(model.model.embed_tokens, None, (sites.EMBEDDED, _whole))
        for layer, block in enumerate(model.model.layers):
            mlp, post, comb = block.mlp, (lambda o: o[0][0]), (lambda o: o[1][0])  # mHC returns post, comb, collapsed
            show(block.attn_hc, layer, (sites.ATTENTION_POST, post), (sites.ATTENTION_COMB, comb))
            show(block.input_layernorm, layer, (sites.ATTENTION_INPUT, _whole))
            self._watch_attention(block.self_attn, layer)
            show(block.ffn_hc, layer, (sites.ATTENTION_STREAMS, lambda given: given[0][0]), before=True)
            show(block.ffn_hc, layer, (sites.EXPERTS_POST, post), (sites.EXPERTS_COMB, comb))
            show(block.post_attention_layernorm, layer, (sites.EXPERTS_INPUT, _whole))
            self._watch_gate(mlp.gate, layer)
            show(mlp.shared_experts.gate_proj, layer, (sites.SHARED_GATE, _whole))
            show(mlp.shared_experts.up_proj, layer, (sites.SHARED_UP, _whole))
            show(mlp, layer, (sites.EXPERTS_OUTPUT, _whole))
            show(block, layer, (sites.STREAMS, _whole))
        show(model.model.norm, None, (sites.HIDDEN, _whole))
        show(model.lm_head, None, (sites.LOGITS, _whole))

    def _watch_gate(self, gate: Any, layer: int) -> None:
        def hook(_module: Any, _given: Any, out: Any) -> Any:
            logits, weights, ids = out  # without a batch axis
            new_ids = self.sink(sites.EXPERT_IDS, layer, ids)
            new_weights = self.sink(sites.EXPERT_WEIGHTS, layer, weights)
            return logits, weights if new_weights is None else new_weights, ids if new_ids is None else new_ids

        self.handles.append(gate.register_forward_hook(hook))

    def _watch_attention(self, attention: Any, layer: int) -> None:
        heads = (attention.num_heads, attention.head_dim)

        def keep_angles(_module: Any, _given: Any, named: Any) -> None:
            self.angles = named["position_embeddings"][attention.rope_layer_type]

        def rotated(x: Tensor) -> Tensor:  # [1, h, t, d] -> [t, h, d]
            assert self.angles is not None, "kept before the attention runs"
            out: Tensor = self.rotate(x, *self.angles)
            return out[0].transpose(0, 1)

        self.handles.append(attention.register_forward_pre_hook(keep_angles, with_kwargs=True))
        show = self.show
        show(attention.q_a_norm, layer, (sites.LATENT, _whole))
        show(attention.q_b_norm, layer, (sites.QUERY, rotated))
        show(attention.kv_norm, layer, (sites.KV, lambda o: rotated(o[:, None])[:, 0]))
        if attention.compressor is not None:
            show(attention.compressor, layer, (sites.ENTRY, lambda o: o[0][0, 0]))
        if attention.layer_type == LAYER_TYPES[LayerKind.CSA]:
            self._watch_indexer(attention.compressor.indexer, layer)
        unrotated: Part = lambda given: given[0][0].flatten(1).unflatten(-1, heads)  # noqa: E731 -- as its neighbours
        show(attention.o_a_proj, layer, (sites.UNROTATED, unrotated), before=True)
        show(attention, layer, (sites.ATTENTION_OUTPUT, lambda o: o[0][0]))

    def _watch_indexer(self, indexer: Any, layer: int) -> None:
        # they scale the scores by one root and the weights by the other, we scale the weights by both
        scale = indexer.head_dim**-0.5 * indexer.num_heads**-0.5
        query, key = (sites.INDEX_QUERY, lambda given: given[0][0]), (sites.INDEX_KEY, lambda given: given[1][0])
        self.show(indexer.scorer, layer, query, key, before=True)
        self.show(indexer.scorer.weights_proj, layer, (sites.INDEX_WEIGHTS, lambda o: o[0] * scale))

        def hook(_module: Any, _given: Any, out: Tensor) -> Tensor:
            new = self.sink(sites.SELECTED, layer, out[0])
            return out if new is None else new[None]

        self.handles.append(indexer.register_forward_hook(hook))


FULL = Parity()
# Few calls, because each decodes the experts' weights anew; 101 is odd: its calls too end within windows of both kinds.
QUICK = Parity(tokens=264, pairs=(OP_SET, chunks(101), TRANSFORMERS, DEPLOYED_OP_SET, DEPLOYED_CALLS))
