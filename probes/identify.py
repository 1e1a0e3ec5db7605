"""Which known fault explains a difference: the layer is run with each of them, and held against what was recorded.

One layer is built from the files, in float32 and the recording's numerics, with a fault in place, and is given what was
recorded: the layer's input, and at every recorded site before the one that differs the recorded rows, which steer it.
What comes out at the differing site is compared with the recording, as a share of what the oracle leaves unexplained:
1 when the faulty layer gives the recorded rows but for rounding, 0 when it is no nearer to them than the oracle is.

Plain causes come first (`probes.judge.causes`). All of it ends after a time that is given, and says what was not tried.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

from fathom.kernels.formats.stored import Dense
from fathom.kernels.ops import CPU
from fathom.model.attention import Attention
from fathom.model.block import Block
from fathom.model.cache.layers import LayerCache
from fathom.model.call import Call
from fathom.model.checkpoint.census import Census
from fathom.model.checkpoint.weights import Weights, open_weights
from fathom.model.config import ModelConfig
from fathom.model.hyper import HyperHead
from fathom.model.linear import Embedding, WideLinear
from fathom.model.observe import sites
from fathom.model.observe.observer import PLACES, install, listening, observed
from fathom.model.observe.sites import SITES, Listener, Site
from fathom.model.ranks.ranks import ALONE, Ranks
from fathom.model.rope import Rotation, layer_frequencies
from fathom.model.rounding import Rounding
from fathom.model.transformer import Transformer
from fathom.probes.fault import BREAKS_DOWN, Fault, become, healthy_model
from fathom.probes.faults import FAULTS
from fathom.probes.judge.causes import NAMED, Explained, Gap, Place, places, plain
from fathom.probes.judge.checks import Judged, Progress
from fathom.probes.judge.oracle import Ends, Layer, Setting, Unknown
from fathom.probes.judge.recording import BEHIND, OF_ENTRIES, Recording, stored_name
from fathom.runtime.arithmetic import arithmetic
from fathom.runtime.options import RunOptions
from fathom.runtime.sharding import sharding_plan

WHOLE: Final = 0.95  # where one fault explains so much, no second one is looked for
MOST_PLACES: Final = 8  # differing sites at which all faults are tried
BEHIND_ALL: Final = "log-probabilities come from all layers; record sites of them"
PAIRED: Final = 4  # best single faults that are tried with each other fault

_BY_NAME: Final = {site.name: site for site in SITES}
_ORDER: Final = [site.name for site in SITES]


@dataclass(frozen=True, slots=True)
class _Run:
    """What a faulty layer is run on."""

    calls: tuple[Tensor, ...]  # positions of each
    start: Tensor  # streams before the layer, [t, s, hidden] float32
    steered: Mapping[str, Tensor]  # recorded rows of sites before the one that differs, by site

    @property
    def positions(self) -> Tensor:
        """Of all calls."""
        return torch.cat(self.calls)


class _Seen(Exception):
    """The differing site was passed; the rest of the layer is not needed."""


def _of_experts(site: str) -> bool:
    return site.startswith("experts.") or site == sites.STREAMS.name


class Identifier:
    """Tries the known faults on the layers of a recording.

    Parameters
    ----------
    setting
        As it was judged.
    recording
        What was judged.
    census
        Of the checkpoint.
    calls
        Lengths of the calls that the recorded run was made in; their last one repeats.
    others
        Other roundings that the run may have, by what they are called: see `other_numerics`.
    seconds
        After which nothing more is tried.
    gap
        What is to be explained of a site; None: what the oracle leaves unexplained.

    """

    def __init__(
        self,
        setting: Setting,
        recording: Recording,
        census: Census,
        calls: Sequence[int],
        others: Mapping[str, Rounding],
        seconds: float,
        gap: Callable[[Judged], Gap] | None = None,
    ) -> None:
        self.setting, self.recording, self.census, self.calls = setting, recording, census, tuple(calls)
        self.config, self.others = setting.config, others
        self.gap = gap or (lambda judged: Gap(setting, recording, judged))
        self.seconds, self.ends = seconds, time.perf_counter() + seconds

    @property
    def late(self) -> bool:
        """Whether the time is over."""
        return time.perf_counter() > self.ends

    def identify(self, results: Sequence[Judged], progress: Progress) -> list[Place]:
        """What explains each site that differs.

        What was found before is tried first, and is taken where it explains nearly all, or in the same layer half; all
        faults are tried at `MOST_PLACES` sites at most; beyond those, and when the time is over, none is looked for.
        """
        found: list[Place] = []
        differing, searched = places(results), 0
        for number, judged in enumerate(differing):

            def said(what: str, share: float, judged: Judged = judged, number: int = number) -> None:
                progress(f"{judged.name}: {what}", (number + share) / len(differing))

            if self.late:
                found.append(Place(judged, (), f"{self.seconds:g} s were over", looked=False))
                continue
            try:
                gap = self.gap(judged)
                cause = plain(gap, lambda: self.late)
                gap = gap.behind() if judged.site in BEHIND and not cause else gap
                case = None if cause or gap.judged.site not in _BY_NAME else _Case(self, gap)
            except Unknown as unknown:
                found.append(Place(judged, (), unknown.what, tried=False))
                continue
            if case is None:
                found.append(Place(judged, (cause,) if cause else (), "" if cause else BEHIND_ALL, looked=bool(cause)))
                continue
            known = {
                place.faults[0].names: place.judged.layer == judged.layer
                for place in found
                if place.faults and not place.faults[0].plain and place.faults[0].share >= NAMED
            }
            again = [case.explained(names) for names in known]
            again = [fault for fault in again if fault.share >= (NAMED if known[fault.names] else WHOLE)]
            if again:
                found.append(Place(judged, (max(again, key=lambda fault: fault.share),)))
            elif searched < MOST_PLACES:
                searched += 1
                found.append(replace(case.best(said), judged=judged))
            else:
                found.append(Place(judged, (), f"all faults were tried at {MOST_PLACES} sites before", looked=False))
        return found

    def candidates(self, config: ModelConfig, *, in_layer: bool) -> list[str]:
        """Names of the faults that can act in a layer of this config, the other numerics first; or in the head."""
        faults = {
            name: fault
            for name, fault in FAULTS.items()
            if not (fault.between_ranks or fault.in_variants or fault.in_drafts or fault.inapplicable(config))
        }
        if not in_layer:  # the head has ops, and nothing else that a fault changes
            return [name for name, fault in faults.items() if fault.inject is healthy_model]
        return [*self.others, *faults]


class _Case:
    """One differing site: what was recorded, what the oracle has, and what a faulty layer gives."""

    def __init__(self, by: Identifier, gap: Gap) -> None:
        self.by, self.gap, self.judged, self.setting = by, gap, gap.judged, gap.setting
        full, layer = by.config, gap.judged.layer
        self.config = full if layer is None else _of_one_layer(full, layer)
        self.at, self.exact = gap.at, gap.part
        self.few = self._given(self._calls())

    # --- what a fault explains

    def best(self, said: Progress) -> Place:
        """The faults that explain most, best first, and what was not tried.

        Two at once are tried where no single one explains nearly all.
        """
        names = self.by.candidates(self.config, in_layer=self.judged.layer is not None)
        needing = [name for name in names if name in FAULTS and FAULTS[name].whole_calls]
        left = needing if self.whole is None else []
        names = [name for name in names if name not in left]
        found: list[Explained] = []
        for n, name in enumerate(names):
            if self.by.late:
                break
            said(f"trying known fault {n + 1} of {len(names)}", n / len(names))
            found.append(self.explained((name,)))
        why = "" if len(found) == len(names) else f"{len(found)} of {len(names)} faults were tried"
        found.sort(key=lambda fault: -fault.share)
        if found and found[0].share < NAMED and not why and (loose := self.loose) is not None:
            again = [self.explained((name,), loose) for name in names if not self.by.late]
            found = sorted([*again, *found], key=lambda fault: -fault.share)
        if found and found[0].share < WHOLE and not why:
            single = list(found)
            pairs = [(first, second) for n, first in enumerate(single[:PAIRED]) for second in single[n + 1 :]]
            pairs = [pair for pair in pairs if pair[0].share > 0 and not {one.name for one in pair} & {*self.by.others}]
            for n, (first, second) in enumerate(pairs):
                if self.by.late:
                    why = f"all single faults and {n} of {len(pairs)} pairs were tried"
                    break
                said(f"trying two faults at once, {n + 1} of {len(pairs)}", n / len(pairs))
                both = self.explained((first.name, second.name))
                if both.share >= max(NAMED, (1 + first.share) / 2):  # half of what the first leaves
                    found.append(both)
            found.sort(key=lambda fault: -fault.share)
        ended, why = not why, f"{why} in {self.by.seconds:g} s" if why else ""
        if left and (not found or found[0].share < NAMED):
            why = "; ".join([*filter(None, [why]), f"not {', '.join(left)}: not all rows of its calls were recorded"])
        return Place(self.judged, tuple(fault for fault in found if fault.share > 0)[:PAIRED], why, ended=ended)

    def explained(self, names: tuple[str, ...], given: _Run | None = None) -> Explained:
        """What these faults together explain; `given`: in a run that is given this."""
        what = " ".join(FAULTS[name].what for name in names if name in FAULTS)
        return Explained(names, self.share(names, given), what, plain=False)

    def share(self, names: Sequence[str], given: _Run | None = None) -> float:
        """How much nearer the recording is to a run with these faults than to the oracle."""
        faulty = self._faulty(names, given)
        return 0.0 if faulty is None else self.gap.share(faulty)

    # --- a run of the layer

    def _faulty(self, names: Sequence[str], given: _Run | None = None) -> Tensor | None:
        """The site's rows in a run with these faults; None where it breaks down, which theirs did not."""
        faults = [FAULTS[name] for name in names if name in FAULTS]
        others = [self.by.others[name] for name in names if name in self.by.others]
        if given is None:
            given = self.whole if any(fault.whole_calls for fault in faults) else self.few
        if given is None:
            return None
        model = self._model(faults, others[0] if others else self.setting.rounding)
        seen: list[Tensor] = []
        listeners = dict(_steering(given)) | {_BY_NAME[self.judged.site]: self._looking(given, seen)}
        try:
            with observed(model).unchecked(), listening(model, listeners), torch.inference_mode():
                self._run(model, given)
        except _Seen:
            pass
        except BREAKS_DOWN:
            return None
        if not seen:
            return None
        width = max(part.shape[-1] for part in seen)
        if self.judged.site == sites.SELECTED.name:
            width = max(width, self.gap.theirs.shape[1])
            seen = [torch.nn.functional.pad(part, (0, width - part.shape[1]), value=-1) for part in seen]
        rows = torch.cat(seen)
        at = torch.searchsorted(given.positions, self.at) if self.judged.site not in OF_ENTRIES else self.at
        if int(at.max()) >= len(rows):
            return None
        out = self.gap.comparable(rows[at].double())
        return out[:, : self.gap.theirs.shape[1]] if self.judged.site == sites.SELECTED.name else out

    def _run(self, model: Transformer, given: _Run) -> None:
        tokens = self.setting.tokens
        if self.judged.layer is None:
            positions = given.positions
            model.logits(model.hidden(given.start, _Rows(tokens[positions], positions, model)))
            return
        (block,) = model.blocks
        if self._alone:
            become(block.attention, _Skipped)  # its streams are recorded, and steer
        state = model.new_state(len(given.start), max(map(len, given.calls)))
        for positions, start in zip(given.calls, given.start.split([len(call) for call in given.calls]), strict=True):
            block(start, _Rows(tokens[positions], positions, model), state.layers[0])  # type: ignore[arg-type]

    def _model(self, faults: Sequence[Fault], rounding: Rounding) -> Transformer:
        """The layer, or the head, as a model of its own, with faults in place."""
        ops = CPU
        for fault in faults:
            ops = fault.ops(ops)
        full = self.by.config
        options = RunOptions(rounding.runnable.numerics, "fp32")
        ranks = Ranks(ALONE, sharding_plan(full, 1).ranks[0])
        model = Transformer.__new__(Transformer)
        model.config = self.config
        model.arithmetic = arithmetic(options, ops, ranks, full)
        weights = self._weights()
        model.embedding = Embedding(torch.empty(0), model.arithmetic)
        model.blocks = []
        if self.judged.layer is not None:
            rotation = Rotation(layer_frequencies(full, full.layer_kind(self.judged.layer)))
            model.blocks = [Block(full, self.judged.layer, weights, model.arithmetic, rotation)]
        else:
            model.hyper_head = HyperHead(full, "", weights, model.arithmetic)
            model.norm = weights.vector("norm.weight").float()
            model.head = WideLinear(Dense(weights.vector("head.weight")), model.arithmetic)
        install(model, PLACES)
        for fault in faults:
            fault.inject(model)
        return model

    def _weights(self) -> Weights:
        prefix = ("hc_head", "norm", "head") if self.judged.layer is None else (f"layers.{self.judged.layer}.",)
        parameters, checkpoint = self.setting.parameters, self.setting.parameters.checkpoint
        for name in self.by.census.demanded:
            if name.startswith(prefix):
                parameters.mapping(name)  # Unknown where its file is not here
        return open_weights(checkpoint, self.by.census, only=())

    # --- what it is given

    @property
    def _alone(self) -> bool:
        """Whether the experts can be run without the attention, and so row by row."""
        recorded = self.by.recording.tensors
        if not _of_experts(self.judged.site):
            return False
        inner = (
            _ORDER.index(sites.EXPERTS_INPUT.name) < _ORDER.index(self.judged.site) < _ORDER.index(sites.STREAMS.name)
        )
        inputs = (sites.ATTENTION_STREAMS.name, sites.EXPERTS_INPUT.name) if inner else (sites.ATTENTION_STREAMS.name,)
        return any(stored_name(site, self.judged.layer) in recorded for site in inputs)

    def _calls(self) -> tuple[Tensor, ...]:
        """Positions that are run, by call: those that differ, or all up to the last of them."""
        if self.judged.layer is None:
            return (self.at,)
        last = int(self.at[-1])
        if self.judged.site in OF_ENTRIES:
            last = (last + 1) * self.by.config.ratio(self.judged.layer) - 1
        positions = self.at if self._alone else torch.arange(last + 1)
        return tuple(positions.split(_calls(self.by.calls, len(positions))))

    @cached_property
    def whole(self) -> _Run | None:
        """The calls in which rows differ, as long as they were; None where not all of their rows were recorded.

        Where attention is run too, those before them as well.
        """
        if self.judged.layer is None:
            return self.few
        count, last = len(self.setting.tokens), self.few.positions[-1]
        calls = torch.arange(count).split(_calls(self.by.calls, count))
        if self._alone:
            calls = tuple(call for call in calls if bool(torch.isin(call, self.at).any()))
        else:
            calls = tuple(call for call in calls if bool(call[0] <= last))
        try:
            whole = self._given(calls)
        except Unknown:
            return None
        return whole if whole.steered.keys() == self.few.steered.keys() else None

    @property
    def loose(self) -> _Run | None:
        """What `few` is, but that choices and their weights are made again: those recorded may not be those used."""
        chosen = {sites.SELECTED.name, sites.EXPERT_IDS.name, sites.EXPERT_WEIGHTS.name} & self.few.steered.keys()
        left = {name: rows for name, rows in self.few.steered.items() if name not in chosen}
        return replace(self.few, steered=left) if chosen else None

    def _given(self, calls: tuple[Tensor, ...]) -> _Run:
        positions = torch.cat(calls)
        return _Run(calls, self._start(positions), self._steered(positions))

    def _start(self, positions: Tensor) -> Tensor:
        """Streams before the layer, [t, s, hidden] float32; zeros where a recorded site after them steers."""
        config = self.by.config
        nothing = torch.zeros(len(positions), config.hc_mult, config.hidden_size)
        if isinstance(self.exact, Ends):
            last = Layer(self.exact.setting, config.num_hidden_layers - 1, positions)
            return last.value("streams", positions)[0].float()
        if self._alone:
            return nothing
        try:
            return self.exact.before(positions)[0].float()
        except Unknown:
            if stored_name(sites.ATTENTION_INPUT.name, self.judged.layer) in self.by.recording.tensors:
                return nothing
            raise

    def _steered(self, positions: Tensor) -> dict[str, Tensor]:
        """Recorded rows of the sites before the one that differs, for all that is run."""
        if self.judged.layer is None:
            return {}
        found = {}
        for name in _ORDER[: _ORDER.index(self.judged.site)]:
            of_entries = name in OF_ENTRIES
            if of_entries and not self.by.config.ratio(self.judged.layer):
                continue
            count = len(positions) // self.by.config.ratio(self.judged.layer) if of_entries else 0
            at = torch.arange(count) if of_entries else positions
            if self._alone and of_entries:
                continue
            rows = self.by.recording.rows(stored_name(name, self.judged.layer), at)
            if rows is not None:
                found[name] = rows
        if sites.EXPERT_WEIGHTS.name in found and sites.EXPERT_IDS.name not in found:
            del found[sites.EXPERT_WEIGHTS.name]  # in an order that is not known
        if sites.EXPERT_IDS.name in found and sites.EXPERT_WEIGHTS.name not in found:
            del found[sites.EXPERT_IDS.name]  # the weights would be of other experts
        if sites.SELECTED.name in found:
            ids = found[sites.SELECTED.name]
            ids = ids.masked_fill(ids < 0, torch.inf).sort(-1).values
            found[sites.SELECTED.name] = ids.masked_fill(ids.isinf(), -1)
        return found

    def _looking(self, given: _Run, seen: list[Tensor]) -> Listener:
        """Keep what passes, and stop when all of it has."""
        of_entries = self.judged.site in OF_ENTRIES
        wanted = int(self.at[-1]) + 1 if of_entries else len(given.start)

        def look(layer: int | None, x: Tensor) -> None:
            del layer
            seen.append(x.detach().clone())
            if sum(map(len, seen)) >= wanted:
                raise _Seen

        return look


def _steering(given: _Run) -> Iterator[tuple[Site, Listener]]:
    for name, rows in given.steered.items():
        yield _BY_NAME[name], _Steer(rows)


class _Steer:
    """A listener that writes recorded rows over what passes."""

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.done = rows, 0

    def __call__(self, layer: int | None, x: Tensor) -> None:
        """Write the next rows; a selection is as wide as it is here."""
        del layer
        rows = self.rows[self.done : self.done + len(x)]
        self.done += len(x)
        if rows.ndim == 2 and rows.shape[1] > x.shape[1]:
            rows = rows[:, : x.shape[1]]
        if rows.shape == x.shape:
            x.copy_(rows)


class _Rows(Call):
    """A call of tokens, each where it stood; where attention is not run they need not follow each other."""

    def __init__(self, tokens: Tensor, positions: Tensor, model: Transformer) -> None:
        super().__init__(tokens, int(positions[0]), model.arithmetic)
        self.positions = positions

    def places(self, modulus: int) -> Tensor:
        """Positions modulo something, [t] int64."""
        return self.positions % modulus


class _Skipped(Attention):
    """An attention that is not run."""

    def __call__(self, x: Tensor, call: Call, cache: LayerCache) -> Tensor:
        """As many rows as came."""
        del call, cache
        return torch.zeros_like(x)


def _of_one_layer(config: ModelConfig, layer: int) -> ModelConfig:
    """The config of a model that has this layer alone: what faults and caches look at."""
    return replace(
        config,
        num_hidden_layers=1,
        compress_ratios=(config.compress_ratios[layer],),
        layer_kinds=(config.layer_kinds[layer],),
        num_hash_layers=int(config.is_hash(layer)),
    )


def _calls(calls: Sequence[int], tokens: int) -> list[int]:
    """Lengths of calls for so many tokens; the last one that is given repeats."""
    found, left, n = [], tokens, 0
    while left:
        length = min(left, calls[min(n, len(calls) - 1)])
        found.append(length)
        left, n = left - length, n + 1
    return found
