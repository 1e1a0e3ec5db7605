"""What layers compute: six probes that hold one recording of ours against the oracle, as `compare` holds anybody's.

The model is run and recorded as it is asked for, then in fp32 without rounding of activations, and then stressed, with
inputs that a prompt does not bring: streams so short that the eps of every norm shows, experts that must clamp, a head
that reads with nearly no weight. Calls are cut within windows, and tokens at and around the ends of blocks come one by
one. Every row is computed again from the recorded ones before it; `Checks` says what it may differ by. Each probe
judges its sites, and says which mistakes these rows would have shown: what would not show is no evidence.
"""

import itertools
import math
import shutil
import tempfile
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple

import torch
from torch import Tensor

from fathom.model.config import LayerKind, ModelConfig
from fathom.model.observe import sites
from fathom.model.observe.sites import OF_V41, SITES, Listener, Site
from fathom.model.transformer import Transformer
from fathom.probes.finding import (
    JSON,
    Finding,
    HeatMap,
    Part,
    Plot,
    Report,
    Table,
    at_most,
    broken,
    judged,
    measured,
    vacuous,
)
from fathom.probes.judge.checks import Checks, Judged, Status, View
from fathom.probes.judge.faults_v41 import FAULTS
from fathom.probes.judge.oracle import F64, FACTOR, Ends, Layer, Noise, Parameters, Setting, has, layer_of
from fathom.probes.judge.recording import CHOICES, OF_ENTRIES, WHOLE_MODEL, Recording, stored_name
from fathom.probes.probe import Probe, Progress
from fathom.probes.subject import Subject, all_open, restricts
from fathom.probes.verdict import ids_alike
from fathom.probes.ways import record
from fathom.runtime.arithmetic import DTYPES
from fathom.runtime.options import RunOptions

DEEP: Final = 3  # norms behind each other of which each shows its eps
AROUND: Final = 1  # tokens before and after the end of a block that come one by one
REACH: Final = 5.0  # times the clamp that stressed experts are pushed to
UNREAD: Final = 30.0  # what is taken from the base of the stressed head: a sigmoid of it is far below its eps
TELLING: Final = 16  # rows in which a mistake is looked for
CURVES: Final = 8  # layers whose mass is drawn
STRETCHES: Final = 32  # of the prompt: points of such a curve
RANGES: Final = (0, 1, 16, 100)  # positions from which shares of the sinks are averaged
HEAT_MAP_EXPERTS: Final = 32  # more columns are too narrow to read
ODD: Final = 97  # tokens of every other call: it ends within windows
OWN, PLAIN, STRESSED = "as run", "plain fp32", "stressed, plain fp32"
STEERED: Final = (sites.EMBEDDED, sites.ENGRAM_STREAMS, sites.ATTENTION_STREAMS, sites.STREAMS)
ROTATED: Final = (sites.QUERY, sites.KV, sites.ENTRY, sites.INDEX_KEY, sites.INDEX_QUERY, sites.UNROTATED)
BY_HEAD: Final = f"{sites.MIXED.name} by head"
NOT_CLAIMED: Final = (
    "That the files hold good weights, or that a layer was given the right input: each is judged from the recorded rows"
    " before it, so that a fault shows where it is and nowhere else. On several ranks nothing is stressed."
)

_BY_NAME: Final = {site.name: site for site in (*SITES, *OF_V41)}


# --- runs


class Run(NamedTuple):
    """One recording, judged."""

    name: str  # OWN, PLAIN or STRESSED
    setting: Setting
    recording: Recording
    results: list[Judged]


def calls(length: int, chunk: int, alone: Collection[int]) -> list[int]:
    """Lengths of the calls of a prompt: odd ones and those of a run in turn, the positions of `alone` one by one."""
    lengths, together, sizes = [], 0, itertools.cycle((min(ODD, chunk), chunk))
    size = next(sizes)
    for position in range(length):
        together += 1
        whole = together == size
        if whole or position in alone or position + 1 in alone or position + 1 == length:
            lengths.append(together)
            together = 0
        if whole:
            size = next(sizes)
    return lengths


def around_ends(config: ModelConfig, length: int) -> set[int]:
    """Positions at and around the ends of the first and the last blocks and window, and the last ones."""
    sizes = {config.sliding_window, *(ratio for ratio in config.compress_ratios if ratio)}
    ends = {end for size in sizes for end in (size, (length - AROUND) // size * size)} | {length - AROUND}
    return {end + off for end in ends for off in range(-AROUND, AROUND + 1) if 0 < end + off < length}


def runs(subject: Subject, length: int, rows: int, progress: Progress) -> list[Run]:
    """Record and judge a prompt of `length` tokens in all settings, once for all probes of a subject.

    `rows` of each site are judged by replicas, see `Checks`.
    """
    key = (runs, length, rows)
    if key not in subject.shared:
        plain = subject.with_options(numerics="plain", dtype="fp32")
        wanted: dict[str, RunOptions] = {OWN: subject.options}
        if (subject.options.numerics, subject.options.dtype) != ("plain", "fp32"):
            wanted[PLAIN] = plain
        found = []
        for number, (name, options) in enumerate(wanted.items()):
            # What is wrong with single tokens alone is as wrong in one run as in the other.
            alone = around_ends(subject.config, length) if name == OWN else ()
            judge = Judge(subject, options, rows, _share(progress, number, 3))
            found.append(judge(name, calls(length, options.prefill_chunk, alone)))
        if subject.group.size == 1:
            found.append(_stressed(Judge(subject, plain, rows, _share(progress, 2, 3)), found[-1]))
        subject.shared[key] = found
    result: list[Run] = subject.shared[key]
    return result


def _share(progress: Progress, number: int, of: int) -> Progress:
    return lambda share, what: progress((number + share) / of, what)


class Judge(NamedTuple):
    """Records runs of a subject with these options, and judges what was recorded."""

    subject: Subject
    options: RunOptions
    rows: int
    progress: Progress

    @property
    def model(self) -> Transformer:
        """What runs."""
        return self.subject.load(self.options).model

    def __call__(
        self,
        name: str,
        lengths: Sequence[int],
        steer: Mapping[Site, Listener] | None = None,
        changed: Mapping[str, Tensor] | None = None,
    ) -> Run:
        """Record a run in calls of these lengths, steered and with changed parameters, and judge it."""
        subject, config = self.subject, self.subject.config
        folder = tempfile.mkdtemp(prefix="recording-")
        path = Path(folder) / "run.safetensors"
        self.progress(0, f"recording {sum(lengths)} tokens, {name}")
        try:
            record(self.model, subject.tokens(sum(lengths)), lengths, path, steer=steer)
            recording = Recording(path, config)
        except BaseException:
            shutil.rmtree(folder)
            raise
        weakref.finalize(recording, shutil.rmtree, folder)
        parameters = Parameters.of(subject.directory, config)
        parameters.changed |= changed or {}
        noise = Noise(DTYPES[self.options.dtype])
        alike = ids_alike(subject.directory, config)
        setting = Setting(config, parameters, recording.tokens, self.options.rounding, recording, noise, alike=alike)
        checks = Checks(setting, recording, self.rows, every=True, views=views(config))
        results: list[Judged] = []
        for layer in range(config.num_hidden_layers):
            self.progress(layer / config.num_hidden_layers, f"layer {layer}, {name}")
            results += checks.layer(layer)
        results += checks.ends()
        judged = [result for result in results if not (steer and _BY_NAME[result.site] in STEERED)]
        return Run(name, setting, recording, judged)


def views(config: ModelConfig) -> list[tuple[str, View]]:
    """What is judged beside whole rows: the rotated dims alone, and each head of the attention."""

    def rotated(rows: Tensor) -> Tensor:
        return rows[..., -config.qk_rope_head_dim :]

    def by_head(rows: Tensor) -> Tensor:
        return rows.flatten(1, 2)

    return [*((f"{site.name} rotated dims", rotated) for site in ROTATED), (BY_HEAD, by_head)]


# --- the stressed run


def _stressed(judge: Judge, plain: Run) -> Run:
    """Run a prompt whose streams are short, whose experts clamp, and whose head reads with nearly no weight."""
    config, chunk = judge.subject.config, judge.options.prefill_chunk
    span = max(config.sliding_window, *config.compress_ratios)
    length = min(DEEP * span, config.max_position_embeddings)
    stored = plain.setting.parameters.fresh
    changed = {
        name: stored(name) * _pushed(plain, layer)
        for layer in range(config.num_hidden_layers)
        for name in [f"layers.{layer}.ffn_norm.weight"]
    }
    if judge.subject.config.v41 is None:
        changed["hc_head_base"] = stored("hc_head_base") - UNREAD
    steer = {site: _shortened(span, small(config)) for site in STEERED}
    # The last two tokens of each size come by themselves: norms of one token may have a path of their own.
    alone = {end - back for end in range(span, length + 1, span) for back in (1, 2) if end > back}
    with _changed(judge.model, plain):
        return judge(STRESSED, calls(length, chunk, alone), steer, changed)


def _pushed(plain: Run, layer: int) -> float:
    """The power of two that takes gate and up of a layer's shared expert to `REACH` times the clamp."""
    gate, up = (_rows(plain, site, layer) for site in (sites.SHARED_GATE, sites.SHARED_UP))
    least = float(torch.minimum(gate.max(), up.abs().max()))
    power = math.ceil(math.log2(REACH * plain.setting.config.swiglu_limit / least)) if least > 0 else 0
    return 2.0 ** max(0, power)


@contextmanager
def _changed(model: Transformer, plain: Run) -> Iterator[None]:
    """Inside the ``with``, the model computes with the parameters of the stressed run."""
    norms = [block.experts_norm for block in model.blocks]
    heads = [] if model.config.v41 is not None else [model.hyper_head]  # V4.1 has none to read its streams
    for layer, block in enumerate(model.blocks):
        block.experts_norm = block.experts_norm * _pushed(plain, layer)
    bases = [head.base for head in heads]
    for head in heads:
        head.base = head.base - UNREAD
    try:
        yield
    finally:
        for head, base in zip(heads, bases, strict=True):
            head.base = base
        for block, norm in zip(model.blocks, norms, strict=True):
            block.experts_norm = norm


def small(config: ModelConfig) -> list[int]:
    """The RMS of stressed streams, as powers of two, for an equal part of the tokens each.

    A norm takes a factor of sqrt(eps) from what is shorter than that, so the second one's eps shows in streams of eps.
    """
    return [number * round(math.log2(config.rms_norm_eps) / 2) for number in range(1, DEEP + 1)]


def _shortened(span: int, powers: Sequence[int]) -> Listener:
    """A listener that makes rows as short as these powers of two, `span` rows each: their bits stay as they are."""
    passed: dict[int | None, int] = {}

    def listen(layer: int | None, x: Tensor) -> None:
        first = passed.get(layer, 0)
        passed[layer] = first + len(x)
        part = (torch.arange(first, first + len(x), device=x.device) // span).clamp(max=len(powers) - 1)
        exponent = torch.tensor(powers, device=x.device)[part]
        size = torch.frexp(x.to(F64).flatten(1).square().mean(1).sqrt()).exponent
        shape = (len(x), *[1] * (x.ndim - 1))
        x.copy_(torch.ldexp(x.to(F64), (exponent - size).view(shape)))

    return listen


# --- mistakes that these rows would show


class Mistake(NamedTuple):
    """What a runtime may get wrong at a site, and what the site would then be."""

    what: str
    site: Site
    wrong: Callable[[Any, Tensor], Tensor]  # of a layer without replicas and rows [n], to [1, n, ...]
    applies: Callable[[ModelConfig, int], bool] = lambda config, layer: True  # noqa: ARG005
    each: bool = True  # whether every layer must show it, or one of them
    stressed: bool = False  # whether the stressed run must show it, or one of the others
    hidden_to: Callable[[ModelConfig], int] = lambda config: 0  # noqa: ARG005 -- tokens up to which nothing shows it


def altered(**changes: Callable[[ModelConfig], object]) -> Callable[[Layer, Tensor, str], Tensor]:
    """What a site is where a field of the config is another."""

    def wrong(part: Layer, at: Tensor, site: str) -> Tensor:
        config = part.setting.config
        other = replace(config, **{name: value(config) for name, value in changes.items()})  # type: ignore[arg-type]
        return _by(replace(part.setting, config=other), part, at, site)

    return wrong


def _by(setting: Setting, part: Layer | Ends, at: Tensor, site: str) -> Tensor:
    """What a site of the same part is by another setting."""
    other = Ends(setting) if isinstance(part, Ends) else layer_of(setting, part.layer, at)
    return other.computed(site, at)


_EPS = altered(rms_norm_eps=lambda config: 10 * config.rms_norm_eps)
_HC_EPS = altered(hc_eps=lambda config: 10 * config.hc_eps)


def _everywhere(config: ModelConfig, layer: int) -> bool:
    del config, layer
    return True


def _in_v4(config: ModelConfig, layer: int) -> bool:
    del layer
    return config.v41 is None


def _tenfold_eps(
    *at_sites: Site, of_mhc: bool = False, applies: Callable[[ModelConfig, int], bool] = _everywhere
) -> tuple[Mistake, ...]:
    what, wrong = ("the eps of mHC tenfold", _HC_EPS) if of_mhc else ("the eps of norms tenfold", _EPS)

    def of(site: Site) -> Mistake:
        return Mistake(what, site, lambda part, at: wrong(part, at, site.name), applies, stressed=True)

    return tuple(map(of, at_sites))


def _in_v41(config: ModelConfig, layer: int) -> bool:
    return not _in_v4(config, layer)


def _faulty(
    name: str, site: Site, applies: Callable[[ModelConfig, int], bool] = _in_v41, *, each: bool = True, **more: Any
) -> Mistake:
    """A fault of V4.1 runtimes."""

    def wrong(part: Layer | Ends, at: Tensor) -> Tensor:
        return _by(replace(part.setting, layer=FAULTS[name].make(())), part, at, site.name)

    return Mistake(name.replace("-", " "), site, wrong, applies, each, **more)


def _unrotated(site: Site) -> Mistake:
    def wrong(layer: Layer, at: Tensor) -> Tensor:
        places = at * layer.ratio if site.name in OF_ENTRIES else at
        return layer.rotated(layer.computed(site.name, at), places, back=site != sites.UNROTATED)

    return Mistake("left unrotated", site, wrong)


def _transposed(layer: Layer, at: Tensor) -> Tensor:
    post, comb = (layer.value(site.name, at) for site in (sites.EXPERTS_POST, sites.EXPERTS_COMB))
    before, output = (layer.value(site.name, at) for site in (sites.ATTENTION_STREAMS, sites.EXPERTS_OUTPUT))
    return layer.expanded(output, before, post, comb.transpose(-1, -2))


def _with_bias(layer: Layer, at: Tensor) -> Tensor:
    return layer.shares_of(layer.expert_ranks(at), at)


def _by_scores(layer: Layer, at: Tensor) -> Tensor:
    best = layer.expert_scores(at).sort(dim=-1, descending=True, stable=True).indices
    return best[..., : layer.config.num_experts_per_tok].to(F64)


def _unclamped(layer: Layer, at: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of the experts without the clamp of the routed ones, and without that of the shared one."""
    free = layer_of(replace(layer.setting, config=replace(layer.config, swiglu_limit=math.inf)), layer.layer, at)
    right, shared, wrong = layer.computed("experts.output", at), layer.shared_expert(at), free.shared_expert(at)
    return free.computed("experts.output", at) - wrong + shared, right - shared + wrong


def _scored(config: ModelConfig, layer: int) -> bool:
    return not config.is_hash(layer)


def _behind_another(config: ModelConfig, layer: int) -> bool:
    return config.v41 is not None and layer > 0  # the first streams are copies of each other, read by any weights alike


def _pooled(config: ModelConfig, layer: int) -> bool:
    return config.v41 is not None and config.ratio(layer) > 1


def _compressed(config: ModelConfig, layer: int) -> bool:
    return config.layer_kind(layer) is not LayerKind.SWA


# --- the probes


@dataclass(frozen=True)
class LayersProbe(Probe):
    """One row of the table: sites, and the mistakes that they must be able to show."""

    judges: ClassVar[tuple[str, ...]]  # sites, and views of them
    mistakes: ClassVar[tuple[Mistake, ...]]
    of_v41: ClassVar[bool] = True
    tokens: int = 4500  # of the prompt: beyond the demo's original context of 4096
    rows: int = 256  # of each site that are judged with replicas; the others are computed

    def vacuous(self, subject: Subject) -> str | None:
        """Two blocks of every ratio: an entry of the first has nothing before it."""
        config, length = subject.config, self._length(subject.config)
        least = 2 * max(config.sliding_window, *config.compress_ratios)
        return f"{length} tokens are fewer than two windows or blocks, {least}" if length < least else None

    def _length(self, config: ModelConfig) -> int:
        wanted = 2 * max(config.sliding_window, *config.compress_ratios) + 2 * AROUND
        return min(max(self.tokens, wanted), config.max_position_embeddings)

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """Judge the sites of this probe."""
        config = subject.config
        found = runs(subject, self._length(config), self.rows, progress)
        chosen = {run.name: [result for result in run.results if _name(result) in self.judges] for run in found}
        findings = [finding for name, results in chosen.items() for finding in _findings(name, results)]
        length = len(found[0].setting.tokens)
        hidden = [mistake for mistake in self.mistakes if mistake.hidden_to(config) >= length]
        shown = [row for mistake in self.mistakes if mistake not in hidden for row in _shown(mistake, found)]
        findings += [finding for row in shown if (finding := row.finding()) is not None]
        findings += self.known(found, config)
        parts = (_mistakes_table(shown), *self.parts(found, config)) if shown else tuple(self.parts(found, config))
        told = [f" That {one.what} would show: it takes more than {one.hidden_to(config)} tokens." for one in hidden]
        return Report(_summary(found, chosen), tuple(findings), parts, "".join((NOT_CLAIMED, *told)))

    def known(self, found: Sequence[Run], config: ModelConfig) -> Iterator[Finding]:
        """Numbers to know, without a bound."""
        del found, config
        yield from ()

    def parts(self, found: Sequence[Run], config: ModelConfig) -> Iterator[Part]:
        """What explains, beside the findings."""
        del found, config
        yield from ()


def _name(result: Judged) -> str:
    return result.of or result.site


def _findings(run: str, results: Sequence[Judged]) -> Iterator[Finding]:
    for result in results:
        what, first = f"{run}: {_name(result)}, furthest row over its bound", result.first
        where: dict[str, JSON] = {} if first is None else {"position": first.position, "index": list(first.index)}
        values: dict[str, JSON] = (
            {} if first is None else {"run": first.theirs, "float64": first.ours, "rows": len(result.wrong)}
        )
        why: dict[str, JSON] = {"why": result.why} if result.why else {}
        if result.status is Status.NOT_JUDGED:
            if run != STRESSED:  # there it is no check, and none is claimed: see the mistakes
                yield vacuous(what, result.why, layer=result.layer)
        elif result.status is Status.DIFFERS and result.excess <= 1:
            yield broken(what, result.why, layer=result.layer, **where, **values)
        else:
            # 1: the bound is what rounding explains, found by moving every tensor, see `probes.judge.oracle`
            yield judged(what, result.excess, at_most(1), layer=result.layer, **why, **where, **values)


def _summary(found: Sequence[Run], chosen: Mapping[str, Sequence[Judged]]) -> str:
    results = [(name, result) for name, all_of in chosen.items() for result in all_of]
    differing = [(name, result) for name, result in results if result.status is Status.DIFFERS]
    rows = sum(result.rows for _, result in results)
    prompt = f"A prompt of {len(found[0].setting.tokens)} tokens was run in {len(chosen)} ways ({'; '.join(chosen)})."
    if differing:
        name, result = differing[0]
        place = f"{_name(result)}{'' if result.layer is None else f' of layer {result.layer}'}"
        at = "" if result.first is None else f" at position {result.first.position}"
        size = result.why or f"{result.excess:.3g} times its bound"
        count = f"{len(differing)} of {len(results)} tensors differ from a float64 oracle"
        return f"{prompt} {count}; first {place}{at}, {name}: {size}."
    name, worst = max(results, key=lambda one: one[1].excess)
    place = f"{_name(worst)}{'' if worst.layer is None else f' of layer {worst.layer}'}, {name}"
    agree = f"All {rows:,} rows of {len(results)} tensors agree with a float64 oracle"
    return f"{prompt} {agree}; the worst row is at {worst.excess:.3g} of its bound ({place})."


class Shown(NamedTuple):
    """How far a mistake would take a site of a layer, in bounds of the row that shows it most."""

    mistake: Mistake
    layer: int | None
    times: float
    run: str  # that shows it most
    judged: bool  # whether this layer has to show it

    def finding(self) -> Finding | None:
        """A failure where the mistake would not be seen."""
        if self.times > 1 or not self.judged:
            return None
        what = f"{self.mistake.site.name}, {self.mistake.what}"
        return vacuous(what, f"it would move no row by more than {self.times:.2g} of its bound", layer=self.layer)


def _shown(mistake: Mistake, found: Sequence[Run]) -> list[Shown]:
    """Look for a mistake in the layers that have its site."""
    config, site = found[0].setting.config, mistake.site
    among = [run for run in found if (run.name == STRESSED) == mistake.stressed]
    layers: list[int | None] = [None] if mistake.applies(config, 0) else []
    if site.name not in WHOLE_MODEL:
        layers = [
            n for n in range(config.num_hidden_layers) if has(config, n, site.name) and mistake.applies(config, n)
        ]
    most = {layer: max((_times(mistake, run, layer), run.name) for run in among) for layer in layers if among}
    enough = not mistake.each and any(times > 1 for times, _ in most.values())
    return [Shown(mistake, layer, *shown, judged=not enough) for layer, shown in most.items()]


def _times(mistake: Mistake, run: Run, layer: int | None) -> float:
    recorded = run.recording.at(stored_name(mistake.site.name, layer))
    at = recorded[torch.linspace(0, len(recorded) - 1, min(TELLING, len(recorded))).round().long().unique()]
    still = replace(run.setting, noise=Noise(run.setting.noise.dtype, replicas=0))
    parts = [Ends(setting) if layer is None else layer_of(setting, layer, at) for setting in (run.setting, still)]
    wrong = mistake.wrong(parts[1], at)[0]
    if mistake.site.name in CHOICES:
        right = parts[1].computed(mistake.site.name, at)[0]
        return float((wrong.sort(-1).values != right.sort(-1).values).any(-1).sum()) * 2
    moved = parts[0].computed(mistake.site.name, at).flatten(2)
    distance = (wrong.flatten(1) - moved[0]).norm(dim=1)
    spread = (moved[1:] - moved[0]).square().mean(0).sum(1).sqrt() if len(moved) > 1 else torch.zeros_like(distance)
    if not bool(spread.any()):
        return float((distance > 0).sum()) * 2
    return float((distance / (FACTOR * spread).clamp_min(1e-300)).max())


def _mistakes_table(shown: Sequence[Shown]) -> Table:
    """Each mistake with the layer in which it would show least."""
    least: dict[tuple[str, str], Shown] = {}
    for row in shown:
        key = row.mistake.site.name, row.mistake.what
        if key not in least or row.times < least[key].times:
            least[key] = row
    return Table(
        "What these rows would have shown",
        ("site", "mistake", "run", "layer that shows it least", "times the bound"),
        [(site, what, row.run, row.layer, row.times) for (site, what), row in least.items()],
        "Each mistake computed in float64 from the recorded rows; of a choice, and of rows that are looked up, twice"
        " the rows that it would change.",
    )


def _sites_of(judges: Sequence[str]) -> tuple[Site, ...]:
    """Sites of what is judged, each once."""
    return tuple(_BY_NAME[name] for name in dict.fromkeys(name.partition(" ")[0] for name in judges))


def _rows(run: Run, site: Site, layer: int | None) -> Tensor:
    rows = run.recording.rows(stored_name(site.name, layer), None)
    assert rows is not None, f"{site.name} is recorded"
    return rows


class Attention(LayersProbe):
    """What is selected and attended to."""

    name: ClassVar[str] = "attention"
    question: ClassVar[str] = "What does each layer attend to, and what would be lost with the window alone?"
    background: ClassVar[str] = """\
Under one softmax, a token attends to a sink (a learned logit per head, which has no value), to its window (the last
`sliding_window` tokens) and to compressed entries of what lies further back: none in an SWA layer, all that are
complete in an HCA layer (dense), those that the indexer selects in a CSA layer.

A layer that loses its entries still runs, and short prompts are still answered well, because the window covers them.
One V4 runtime ran like that for months: the indexer's weights were looked for under a wrong name behind an `if`, it
returned None, and every CSA layer saw its window alone. Nothing measured where the mass fell.

Here the attention of every token of a run is computed again in float64, from the run's queries, KV, entries and
selections and from the sinks in the checkpoint's file. Where the output agrees, the shares of the softmax found on the
way are those of what really ran."""
    judges: ClassVar[tuple[str, ...]] = (
        sites.INDEX_QUERY_USED.name,
        sites.INDEX_KEY_USED.name,
        sites.CANDIDATES.name,
        sites.SELECTED.name,
        sites.MIXED.name,
    )
    reads: ClassVar[tuple[Site, ...]] = _sites_of(judges)
    mistakes: ClassVar[tuple[Mistake, ...]] = (
        Mistake(
            "the entries lost",
            sites.MIXED,
            lambda layer, at: layer.mixed(at, entries=False),
            _compressed,
        ),
        _faulty("candidates-off", sites.SELECTED, restricts, each=False, hidden_to=all_open),
        _faulty("candidates-not-pinned", sites.CANDIDATES, hidden_to=all_open),
    )

    def parts(self, found: Sequence[Run], config: ModelConfig) -> Iterator[Part]:
        """Where the softmax mass falls."""
        run = found[0]
        at = torch.linspace(0, len(run.setting.tokens) - 1, self.rows).round().long().unique()
        still = replace(run.setting, noise=Noise(run.setting.noise.dtype, replicas=0))
        rows: list[tuple[float | str | None, ...]] = []
        curves: dict[str, list[tuple[float, float]]] = {}
        for layer in range(config.num_hidden_layers):
            part, kind = layer_of(still, layer, at), config.layer_kind(layer)
            mass = part.masses(at)[0]  # [n, heads, 3]
            mixed, alone = part.computed(sites.MIXED.name, at)[0], part.mixed(at, entries=False)[0]
            beyond = at >= config.sliding_window
            away = (mixed - alone).flatten(1).norm(dim=1) / mixed.flatten(1).norm(dim=1)
            means = mass[beyond].mean((0, 1)).tolist()
            least, most = (float(end) for end in mass[..., 2].mean(1).aminmax())
            rows.append((layer, kind.name, *means, least, most, float(away[beyond].mean())))
            if kind is not LayerKind.SWA:
                stretches = torch.stack((at.double(), mass[..., 2].mean(1)), dim=1).tensor_split(STRETCHES)  # [n, 2]
                means_of = [stretch.mean(0).tolist() for stretch in stretches if len(stretch)]
                curves[f"layer {layer}, {kind.name}"] = [(round(place), share) for place, share in means_of]
        columns = ("layer", "kind", "sink", "window", "entries", "least", "most", "from window alone")
        yield Table(
            "Where the softmax mass falls",
            columns,
            rows,
            "Means over heads and tokens beyond the window; least and most mass of a token on entries; last, how far"
            " the output would be from what the window alone gives, as a share of its length.",
        )
        if curves:
            yield Plot(
                "Softmax mass on entries, by position",
                "position",
                "share of the softmax",
                dict(list(curves.items())[:CURVES]),
                note=f"Means over the heads, in {STRETCHES} stretches of the prompt.",
            )


class Projections(LayersProbe):
    """What is projected, normed and pooled."""

    name: ClassVar[str] = "projections"
    question: ClassVar[str] = "Does each layer project, norm and pool its input as the files' weights say?"
    background: ClassVar[str] = """\
Between a layer's input and its attention lie about a dozen small steps: a low-rank query that is normed, then each head
normed again without weights; one KV head; two compressors, each with a value and a gate projection, a bias by position
in the window, a softmax over its tokens, and in CSA layers two series of which an entry takes one from the window
before; index queries without a norm, a signed weight for each index head; and an output that goes through its groups'
own rows at low rank.

Each of these can be wired wrongly and the model still runs: a norm left out or with another eps, a gate scaled, the
bias of the next position, the two series exchanged, weights of heads or groups in another order. Attention itself is
then right, on wrong numbers. Here each step is computed again in float64 from what went into it and from the bytes of
the files."""
    judges: ClassVar[tuple[str, ...]] = (
        sites.EMBEDDED.name,
        *(site.name for site in (sites.ENGRAM_ROWS, sites.ENGRAM_GATE, sites.ENGRAM_STREAMS)),
        sites.LATENT.name,
        sites.QUERY.name,
        sites.KV.name,
        sites.ENTRY.name,
        sites.INDEX_KEY.name,
        sites.INDEX_QUERY.name,
        sites.INDEX_WEIGHTS.name,
        sites.ATTENTION_OUTPUT.name,
        sites.HIDDEN.name,
        sites.LOGITS.name,
    )
    reads: ClassVar[tuple[Site, ...]] = _sites_of(judges)
    mistakes: ClassVar[tuple[Mistake, ...]] = (
        *_tenfold_eps(sites.ENGRAM_GATE, sites.LATENT, sites.KV, sites.ENTRY, sites.INDEX_KEY, sites.HIDDEN),
        *_tenfold_eps(sites.QUERY, applies=_in_v4),  # V4.1 norms no heads
        _faulty("query-head-normed", sites.QUERY),
        _faulty("pairs-shifted", sites.ENTRY, _pooled),
        _faulty("pairs-averaged", sites.ENTRY, _pooled),
        _faulty("index-key-of-entry", sites.INDEX_KEY),
        _faulty("engram-raw-ids", sites.ENGRAM_ROWS),
        _faulty("engram-joint-norm", sites.ENGRAM_GATE),
        _faulty("engram-no-sqrt", sites.ENGRAM_GATE),
    )


class Rope(LayersProbe):
    """What is rotated; the tables up to a million positions are the probe `ops`'s."""

    name: ClassVar[str] = "rope"
    question: ClassVar[str] = "Is everything that carries a position rotated by the right angles of its layer's kind?"
    background: ClassVar[str] = """\
Positions enter a V4 model as rotations: the last dims of queries, keys and index keys are rotated in pairs of
neighbours by angles that grow with the position. There are two tables. Layers that see their window alone (SWA) use
`rope_theta`; layers with compressed entries (CSA, HCA) use `compress_rope_theta` slowed by YaRN, for everything in
them: queries, window, entries, indexer. A compressed entry stands at the first position of its block. Because keys are
values too, the attention's output comes out rotated, and is rotated back.

What goes wrong here without an error: one table for all layers, YaRN on the window layers or nowhere, entries that are
never rotated or rotated elsewhere, an output that is not rotated back, halves paired instead of neighbours, YaRN's
attention scaling where V4 has none. Short prompts hardly show it: the error grows with the position. Here the rotated
dims of all that is rotated are judged by themselves."""
    judges: ClassVar[tuple[str, ...]] = (*(f"{site.name} rotated dims" for site in ROTATED), sites.UNROTATED.name)
    reads: ClassVar[tuple[Site, ...]] = ROTATED
    mistakes: ClassVar[tuple[Mistake, ...]] = (
        *map(_unrotated, ROTATED),
        _faulty("entry-at-end", sites.ENTRY, _pooled),
        _faulty("entry-by-number", sites.ENTRY, _pooled),
    )


class Mhc(LayersProbe):
    """How streams are read, mixed and written."""

    name: ClassVar[str] = "mhc"
    question: ClassVar[str] = "Are the residual streams read, mixed and written as mHC's equations say?"
    background: ClassVar[str] = """\
V4 has several residual streams instead of one. Each sublayer reads one input from them (`pre`, a weight per stream),
writes its output back into all of them (`post`), and mixes them (`comb`, a matrix that Sinkhorn's iterations push
towards doubly stochastic, so that mixing neither creates nor destroys what the streams hold). All three are computed
from the streams themselves, at every token.

What goes wrong here without an error: `comb` used transposed, rows normalised before columns, another number of
iterations, `post` without its factor 2, another eps. A doubly stochastic matrix stays one when it is transposed, and
one that has converged does not show how it got there, so a check of row and column sums cannot see the likeliest
faults."""
    judges: ClassVar[tuple[str, ...]] = (
        *(site.name for site in (sites.ATTENTION_PRE, sites.ATTENTION_POST, sites.ATTENTION_COMB)),
        *(site.name for site in (sites.EXPERTS_PRE, sites.EXPERTS_POST, sites.EXPERTS_COMB)),
        *(site.name for site in (sites.ATTENTION_INPUT, sites.EXPERTS_INPUT, sites.ATTENTION_STREAMS)),
        *(sites.STREAMS.name, sites.FOLDED.name, sites.HIDDEN.name),
    )
    reads: ClassVar[tuple[Site, ...]] = _sites_of(judges)
    mistakes: ClassVar[tuple[Mistake, ...]] = (
        # A doubly stochastic 2 x 2 is its own transpose.
        Mistake("comb transposed", sites.STREAMS, _transposed, lambda config, layer: config.hc_mult > 2),  # noqa: ARG005
        *_tenfold_eps(sites.ATTENTION_PRE, sites.ATTENTION_INPUT, sites.EXPERTS_PRE, sites.EXPERTS_INPUT, sites.HIDDEN),
        *_tenfold_eps(sites.ATTENTION_PRE, of_mhc=True),
        *_tenfold_eps(sites.HIDDEN, of_mhc=True, applies=_in_v4),  # V4.1 has no head that reads its streams
        _faulty("mhc-undelayed", sites.ATTENTION_INPUT, _behind_another),
        _faulty("mhc-pre-recomputed", sites.EXPERTS_INPUT),
        _faulty("mhc-last-mean", sites.FOLDED),
    )

    def known(self, found: Sequence[Run], config: ModelConfig) -> Iterator[Finding]:
        """How the streams grow."""
        sizes = _rows(found[0], sites.STREAMS, config.num_hidden_layers - 1).square().mean((0, 2)).sqrt()
        embedded = _rows(found[0], sites.EMBEDDED, None).square().mean().sqrt()
        what = "RMS of the largest stream after the last layer, over that of the embeddings"
        yield measured(what, float(sizes.max() / embedded))

    def parts(self, found: Sequence[Run], config: ModelConfig) -> Iterator[Part]:
        """Sums of comb by layer, and the streams through depth."""
        run, places = found[0], []
        curves: dict[str, list[tuple[float, float]]] = {f"stream {i}": [] for i in range(config.hc_mult)}
        for layer in range(config.num_hidden_layers):
            for passed, (word, comb, streams) in enumerate(
                (
                    ("attention", sites.ATTENTION_COMB, sites.ATTENTION_STREAMS),
                    ("experts", sites.EXPERTS_COMB, sites.STREAMS),
                )
            ):
                mixing = _rows(run, comb, layer)  # [t, j, k]
                moving = (mixing.diagonal(dim1=1, dim2=2) < mixing.amax(2)).any(1).double().mean()
                column, row = ((mixing.sum(axis) - 1).abs().max() for axis in (1, 2))
                places.append((layer, word, float(column), float(row), float(moving)))
                rms = _rows(run, streams, layer).square().mean((0, 2)).sqrt().tolist()
                for stream, size in enumerate(rms):
                    curves[f"stream {stream}"].append((2.0 * layer + passed + 1, size))
        yield Table(
            "Mixing by sublayer",
            ("layer", "sublayer", "column off 1", "row off 1", "tokens with a stream sent mostly to another"),
            places,
            "Columns are normed last; rows are off by what the iterations leave.",
        )
        yield Plot("RMS of the streams through depth", "sublayers passed", "RMS", dict(curves), log_y=True)


class Sink(LayersProbe):
    """What the sink takes; the attend op over a grid of windows, entries and sinks is the probe `ops`'s."""

    name: ClassVar[str] = "sink"
    question: ClassVar[str] = "Does every head's own sink take its share of the softmax, and nothing else?"
    background: ClassVar[str] = """\
Each attention head has a learned number, its sink: one more logit in the denominator of the softmax, for a key that has
no value. It lets a head attend to nothing. What goes wrong here without an error: the sink is given a value, all ranks
use the sinks of rank 0, the logits are scaled by YaRN's mscale, rows are read that the token may not see. Comparing two
builds cannot show a fault that both share, so every head's output is compared with float64 by itself: among many heads,
one that is wrong is a small part of a row."""
    judges: ClassVar[tuple[str, ...]] = (BY_HEAD,)
    reads: ClassVar[tuple[Site, ...]] = _sites_of(judges)
    mistakes: ClassVar[tuple[Mistake, ...]] = (
        Mistake(
            "the sinks lost", sites.MIXED, lambda layer, at: layer.mixed(at, torch.full_like(layer.sinks, -math.inf))
        ),
        Mistake(
            "each head with the sink of the one before",
            sites.MIXED,
            lambda layer, at: layer.mixed(at, layer.sinks.roll(1)),
            lambda config, layer: config.num_attention_heads > 1,  # noqa: ARG005
        ),
    )

    def parts(self, found: Sequence[Run], config: ModelConfig) -> Iterator[Part]:
        """What sinks take, by position."""
        run = found[0]
        still = replace(run.setting, noise=Noise(run.setting.noise.dtype, replicas=0))
        at = torch.linspace(0, len(run.setting.tokens) - 1, self.rows).round().long().unique()
        at = torch.cat((torch.arange(min(RANGES[-1], len(run.setting.tokens))), at)).unique()
        columns = [f"{low} to {high - 1}" for low, high in itertools.pairwise(RANGES)] + [f"from {RANGES[-1]} on"]
        rows = []
        for layer in range(config.num_hidden_layers):
            mass = layer_of(still, layer, at).masses(at)[0, :, :, 0].mean(1)
            within = [(at >= low) & (at < high) for low, high in itertools.pairwise((*RANGES, len(run.setting.tokens)))]
            means = [float(mass[part].mean()) if bool(part.any()) else None for part in within]
            rows.append((layer, config.layer_kind(layer).name, *means))
        yield Table(
            "Share of the softmax that sinks take, by position",
            ("layer", "kind", *columns),
            rows,
            "Mean over heads and positions, in float64 from what was recorded.",
        )


class Routing(LayersProbe):
    """Which experts a token goes to, with what weight, and what they make of it."""

    name: ClassVar[str] = "routing"
    question: ClassVar[str] = "Does every token reach the right experts, with the right weights, and does each clamp?"
    background: ClassVar[str] = """\
Instead of one large feed-forward network, each layer has many small ones, the experts, and every token uses a few of
them, plus one shared expert that all tokens use. In the first layers a table says which: it is looked up by token id
(hash routing). Later the layer scores its experts for each token, `sqrt(softplus(x W^T))`, adds a bias that was trained
to keep the load even, and takes the best. The bias decides the choice only: the weights with which the experts are
summed are the scores without it, scaled to a fixed sum.

What went wrong in public runtimes, none of it with an error: the table was never filled, so every token went to expert
0; the bias entered the weights; the shared expert, which every rank holds, was summed once per rank; and SwiGLU's clamp
(`swiglu_limit`) was lost in a refactor, for routed and shared experts separately. Here every token's choice, weights
and output are computed again: an expert that is wrong for one token in many is found. Because prompts rarely reach the
clamp, the stressed run's inputs are scaled until experts must clamp."""
    judges: ClassVar[tuple[str, ...]] = (
        *(site.name for site in (sites.EXPERT_IDS, sites.EXPERT_WEIGHTS, sites.SHARED_GATE, sites.SHARED_UP)),
        sites.EXPERTS_OUTPUT.name,
    )
    reads: ClassVar[tuple[Site, ...]] = _sites_of(judges)
    mistakes: ClassVar[tuple[Mistake, ...]] = (
        Mistake("chosen by score alone", sites.EXPERT_IDS, _by_scores, _scored, each=False),
        Mistake(
            "chosen by score, not by table",
            sites.EXPERT_IDS,
            _by_scores,
            lambda config, layer: config.is_hash(layer),
            each=False,
        ),
        Mistake(
            "the bias in the weights",
            sites.EXPERT_WEIGHTS,
            _with_bias,
            lambda config, layer: _scored(config, layer) and config.num_experts_per_tok > 1,
            each=False,
        ),
        Mistake(
            "the shared expert twice",
            sites.EXPERTS_OUTPUT,
            lambda layer, at: layer.computed(sites.EXPERTS_OUTPUT.name, at) + layer.shared_expert(at),
        ),
        _faulty("bias-vl-for-text", sites.EXPERT_IDS, each=False),
        Mistake("routed experts unclamped", sites.EXPERTS_OUTPUT, lambda *part: _unclamped(*part)[0], stressed=True),
        Mistake("shared expert unclamped", sites.EXPERTS_OUTPUT, lambda *part: _unclamped(*part)[1], stressed=True),
    )

    def parts(self, found: Sequence[Run], config: ModelConfig) -> Iterator[Part]:
        """How many tokens go to each expert."""
        run, experts = found[0], config.n_routed_experts
        loads = torch.stack(
            [
                torch.bincount(
                    _rows(run, sites.EXPERT_IDS, layer).long().flatten().clamp(0, experts - 1), minlength=experts
                )
                for layer in range(config.num_hidden_layers)
            ]
        ).double()
        share = loads / loads.sum(1, keepdim=True)
        entropy = -(share * share.clamp_min(1e-300).log()).sum(1) / math.log(max(2, experts))
        yield Table(
            "Load",
            ("layer", "choice by", "experts without a token", "most / mean", "entropy"),
            [
                (
                    layer,
                    "table" if config.is_hash(layer) else "score + bias",
                    int((load == 0).sum()),
                    float(load.max() / load.mean()),
                    float(entropy[layer]),
                )
                for layer, load in enumerate(loads)
            ],
            f"Of {len(run.setting.tokens)} tokens. Entropy of the load as a share of that of an even one.",
        )
        if experts <= HEAT_MAP_EXPERTS:
            tokens = len(run.setting.tokens)
            yield HeatMap(
                "Share of tokens that each expert gets",
                "expert",
                "layer",
                tuple(map(str, range(experts))),
                tuple(f"{n}{' (table)' if config.is_hash(n) else ''}" for n in range(config.num_hidden_layers)),
                (loads / tokens).tolist(),
                f"An even load would put {config.num_experts_per_tok / experts:.3g} everywhere.",
            )


KINDS: Final = (Attention, Projections, Rope, Mhc, Sink, Routing)
FULL: Final = tuple(kind() for kind in KINDS)
# Between the first block of the most and the last, a call of 512, which closes several.
QUICK: Final = tuple(kind(tokens=800, rows=16) for kind in KINDS)
