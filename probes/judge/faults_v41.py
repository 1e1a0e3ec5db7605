"""Faults of DeepSeek-V4.1 runtimes, each a layer of the oracle in which one equation is wrong.

A fault is tried on the oracle itself: a wrong layer is given what was recorded before a site, and what it computes
there is compared with the recording, as `probes.judge.causes` compares plain causes.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, Final, NamedTuple

import torch
from torch import Tensor

from fathom.model.checkpoint.tensor_mapping import Form
from fathom.model.choices import PLAIN
from fathom.model.config import check_widths
from fathom.model.errors import ConfigError
from fathom.model.observe import sites
from fathom.model.rounding import ALL_FP8, FP4, NONE, RECORD, ROUNDINGS
from fathom.probes.judge.causes import NAMED, Explained, Gap, Place, places, plain
from fathom.probes.judge.checks import OFF_GRID, Judged, Progress
from fathom.probes.judge.engram import table_rows
from fathom.probes.judge.oracle import (
    CANDIDATES,
    E2M1_INDEX,
    F64,
    SELECTED,
    Ends,
    Noise,
    Parameters,
    Setting,
    Unknown,
    hadamard,
    layer_of,
)
from fathom.probes.judge.oracle_v41 import Layer41, held_form
from fathom.probes.judge.recording import Recording

MOST_TOLD: Final = 4  # faults of a site, best first


class Fault41(NamedTuple):
    """A fault of V4.1 runtimes."""

    what: str  # in a sentence
    seen: str  # where it was met, or who warns of it
    make: Callable[[Sequence[int]], type[Layer41]]  # of the lengths of a run's calls


FAULTS: dict[str, Fault41] = {}


def fault(name: str, what: str, seen: str) -> Callable[[type[Layer41]], type[Layer41]]:
    """Name a wrong layer."""

    def note(wrong: type[Layer41]) -> type[Layer41]:
        FAULTS[name] = Fault41(what, seen, lambda _: wrong)
        return wrong

    return note


def by_calls(name: str, what: str, seen: str) -> Callable[[Callable[[Sequence[int]], type[Layer41]]], None]:
    """Name a wrong layer that depends on where calls begin."""

    def note(make: Callable[[Sequence[int]], type[Layer41]]) -> None:
        FAULTS[name] = Fault41(what, seen, make)

    return note


def starts(calls: Sequence[int], tokens: int) -> Tensor:
    """The first position of the call that each position is in, [t]; the last length repeats."""
    found: list[Tensor] = []
    start = number = 0
    while start < tokens:
        count = calls[min(number, len(calls) - 1)]
        found.append(torch.full((count,), start))
        start, number = start + count, number + 1
    return torch.cat(found)[:tokens]


# --- the official code's own


@by_calls(
    "index-key-slot",
    "In decode, at every position that completes no pair, layers of ratio 2 score the index keys of the last source.",
    "DeepSeek's model.py for V4.1-Flash, and six projects that followed it",
)
def _index_key_slot(calls: Sequence[int]) -> type[Layer41]:
    class Wrong(Layer41):
        def finished_scores(self, at: Tensor) -> Tensor:
            right = super().finished_scores(at)
            first = starts(calls, len(self.setting.tokens))
            alone = torch.bincount(first, minlength=len(first))[first] == 1
            stale = alone[at] & ((at + 1) % self.ratio != 0)
            if self.ratio == 1 or self.config.entry_source(self.layer) != self.layer or not bool(stale.any()):
                return right
            keys = self.of_layer(self.own.kv_sources[-1], "indexer.key_used", self.entries)
            scores = self.scored(at, keys[:, : len(self.entries)])
            return torch.where(stale[:, None], scores, right)

    return Wrong


# --- mHC


@fault(
    "mhc-pre-recomputed",
    "The experts read the streams by weights of those streams, not by the attention's.",
    "expected of a port of V4's block",
)
class _MhcPreRecomputed(Layer41):
    def read_by(self, part: str, at: Tensor) -> Tensor:
        return super().read_by(part, at) if part == "attention" else self.value("experts.pre", at)


@fault(
    "mhc-undelayed",
    "Each sublayer reads the streams by weights of its own streams, as in V4.",
    "ports of V4's block; every set of notes warns of it",
)
class _MhcUndelayed(Layer41):
    def read_by(self, part: str, at: Tensor) -> Tensor:
        return self.value(f"{part}.pre", at)


@fault("mhc-last-mean", "The streams behind the last layer are averaged.", "expected of a port that lacks hc_head")
class _MhcLastMean(Layer41):
    def fold_weights(self, at: Tensor) -> Tensor:
        return torch.full_like(super().fold_weights(at), 1 / self.config.hc_mult)


@fault("post-not-doubled", "What writes a sublayer's output to the streams lacks its factor 2.", "V4 runtimes")
class _PostNotDoubled(Layer41):
    def post(self, streams: Tensor, part: str) -> Tensor:
        return super().post(streams, part) / 2


@fault("comb-transposed", "The mixing of the streams is transposed.", "V4 runtimes")
class _CombTransposed(Layer41):
    def comb(self, streams: Tensor, part: str) -> Tensor:
        return super().comb(streams, part).mT


@fault("eps-1e-6", "RMS norms add V4's epsilon, 1e-6: rows that are tiny come out too small.", "expected of a V4 port")
class _Eps1e6(Layer41):
    def rms_norm(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return self.noise.moved(y if weight is None else y * weight)


# --- attention


@fault(
    "query-head-normed",
    "Each head of the query is normed, as in V4.",
    "ik_llama.cpp: perplexity 244 with it, 2.24 without",
)
class _QueryHeadNormed(Layer41):
    def _query_unrotated(self, at: Tensor) -> Tensor:
        return self.rms_norm(self.passed("attention.query_unnormed", at))


@fault(
    "base-theta",
    "Queries and window KV of layers with a ratio are rotated by the base of those without.",
    "V4 runtimes",
)
class _BaseTheta(Layer41):
    def with_plain_base(self, x: Tensor, at: Tensor, *, back: bool = False) -> Tensor:
        theta, yarn = self.rope_theta, self.yarn
        self.rope_theta, self.yarn = self.config.rope_theta, None
        out = self.rotated(x, at, back=back)
        self.rope_theta, self.yarn = theta, yarn
        return out

    def _query(self, at: Tensor) -> Tensor:
        return self.with_plain_base(self.passed("attention.query_unrotated", at), at)

    def turned_keys(self, kv: Tensor, at: Tensor) -> Tensor:
        return self.cached(self.with_plain_base(kv, at))

    def _unrotated(self, at: Tensor) -> Tensor:
        return self.with_plain_base(self.value("attention.mixed", at), at, back=True)


@fault("no-inverse-rotation", "The attention's output is not rotated back.", "V4 runtimes")
class _NoInverseRotation(Layer41):
    def _unrotated(self, at: Tensor) -> Tensor:
        return self.value("attention.mixed", at)


@fault("sinks-dropped", "The softmax has no sink.", "V4 runtimes")
class _SinksDropped(Layer41):
    def mixed(self, at: Tensor, sinks: Tensor | None = None, *, entries: bool = True) -> Tensor:
        return super().mixed(at, torch.full_like(self.sinks if sinks is None else sinks, -1e30), entries=entries)


@fault("entries-never-seen", "The attention reads the window alone.", "V4 runtimes: a mask padded with ones")
class _EntriesNeverSeen(Layer41):
    def mixed(self, at: Tensor, sinks: Tensor | None = None, *, entries: bool = True) -> Tensor:
        del entries
        return super().mixed(at, sinks, entries=False)


class _Kept(Layer41):
    """One that keeps one cache in another format than the run, where that rounds."""

    forms: ClassVar[dict[str, str]]  # site -> choice of `Rounding.kv`

    def in_form(self, rows: Tensor, site: str) -> Tensor:
        if self.rounding.kv == NONE or site not in self.forms:
            return super().in_form(rows, site)
        self.check(site)
        right, self.rounding = self.rounding, replace(self.rounding, kv=self.forms[site])
        rows = super().in_form(rows, site)
        self.rounding = right
        return rows

    def check(self, site: str) -> None:
        """Unknown where the format's blocks do not divide the widths of the model."""
        try:
            check_widths(self.config, replace(ROUNDINGS[PLAIN], kv=self.forms[site]))
        except ConfigError as error:
            raise Unknown(str(error)) from None

    def kept(self, site: str, rows: Tensor) -> Tensor | None:
        if site not in self.forms:
            return None
        self.check(site)
        return held_form(self.config, self.forms[site], site, rows)


@fault(
    "window-v4-record",
    "Window KV is kept as V4's: E4M3 by 64 without the dims of rope, which stay.",
    "vLLM 0.33 but on SM100, SGLang but on SM100 and gfx950",
)
class _WindowV4Record(_Kept):
    forms: ClassVar = {sites.KV.name: RECORD}


@fault("entry-in-fp8", "Entries are kept in E4M3 by 32 columns, not in E2M1 by 16.", "vLLM 0.33 on SM100 with FlashMLA")
class _EntryInFp8(_Kept):
    forms: ClassVar = {sites.ENTRY.name: ALL_FP8}


@fault(
    "entry-v4-record", "Entries are kept in V4's record, E4M3 by 64 without the dims of rope.", "vLLM 0.33 but on SM100"
)
class _EntryV4Record(_Kept):
    forms: ClassVar = {sites.ENTRY.name: RECORD}


# --- compressor, and what is shared


@fault("entry-at-end", "Entries are rotated by the position of their last token.", "V4 runtimes")
class _EntryAtEnd(Layer41):
    def entry_positions(self, at: Tensor) -> Tensor:
        return at * self.ratio + self.ratio - 1


@fault("entry-by-number", "Entries are rotated by their number, not by a position.", "V4 runtimes")
class _EntryByNumber(Layer41):
    def entry_positions(self, at: Tensor) -> Tensor:
        return at


@fault(
    "pairs-shifted", "An entry pools the tokens one before its own: pairs are cut elsewhere.", "chunks of odd length"
)
class _PairsShifted(Layer41):
    def pooled(self, parameter: str, width: int, at: Tensor) -> Tensor:
        return super().pooled(parameter, width, at) if self.ratio == 1 else self.pooled_from(parameter, at, 1)


@fault("pairs-averaged", "An entry is the mean of its tokens: the gates are not used.", "expected of a port")
class _PairsAveraged(Layer41):
    def pooled(self, parameter: str, width: int, at: Tensor) -> Tensor:
        if self.ratio == 1:
            return super().pooled(parameter, width, at)
        wkv = self.parameters[self.name(f"{parameter}.wkv.weight")]
        tokens = (at[:, None] * self.ratio + torch.arange(self.ratio)).flatten()
        mean: Tensor = (self.value("attention.input", tokens) @ wkv.T).unflatten(1, (-1, self.ratio)).mean(2)
        return mean


@fault("pairs-overlap", "An entry pools the pair before its own too, as V4's do.", "expected of a V4 port")
class _PairsOverlap(Layer41):
    def pooled(self, parameter: str, width: int, at: Tensor) -> Tensor:
        if self.ratio == 1:
            return super().pooled(parameter, width, at)
        tokens = at[:, None] * self.ratio + torch.arange(-self.ratio, self.ratio)
        x = self.value("attention.input", tokens.clamp_min(0).flatten())
        kv, gate = (x @ self.parameters[self.name(f"{parameter}.{one}.weight")].T for one in ("wkv", "wgate"))
        kv, gate = (rows.unflatten(1, tokens.shape) for rows in (kv, gate))
        share = gate.masked_fill((tokens < 0)[..., None], -math.inf).softmax(2)
        pooled: Tensor = (kv * share).sum(2)
        return pooled


@fault(
    "selection-stale",
    "Layers that share a selection take that of the source before theirs.",
    "notes of bring-ups; graphs whose padding keeps another's rows",
)
class _SelectionStale(Layer41):
    def value(self, site: str, at: Tensor) -> Tensor:
        source = self.config.selection_source(self.layer) if self.ratio else self.layer
        before = [one for one in self.own.index_sources if one < source]
        if site != SELECTED or source == self.layer or not before:
            return super().value(site, at)
        stale = self.of_layer(before[-1], site, at)
        seen: Tensor = stale.masked_fill(stale >= ((at + 1) // self.ratio)[:, None], -1)
        return seen


# --- indexer


@fault("hadamard-kept", "Index queries and keys are multiplied by V4's Hadamard matrix.", "expected of a V4 port")
class _HadamardKept(Layer41):
    def index_rounded(self, x: Tensor) -> Tensor:
        return (
            self.narrow(hadamard(x), E2M1_INDEX) if self.rounding.index == FP4 else super().index_rounded(hadamard(x))
        )


@fault(
    "index-key-of-entry",
    "Index keys are made of the entries as stored, rotated and rounded.",
    "a comment of DeepSeek's code warns of the order in place",
)
class _IndexKeyOfEntry(Layer41):
    def _index_key_unnormed(self, at: Tensor) -> Tensor:
        return self.linear(self.value("attention.entry", at), "attn.indexer.wk.weight")


@fault("index-key-of-rotated", "Index keys are made of the rotated latent, before it is rounded.", "as the one before")
class _IndexKeyOfRotated(Layer41):
    def _index_key_unnormed(self, at: Tensor) -> Tensor:
        rotated = self.rotated(self.passed("attention.entry_unrotated", at), at * self.ratio)
        return self.linear(rotated, "attn.indexer.wk.weight")


@fault("index-key-unrotated", "Index keys are not rotated.", "V4 runtimes")
class _IndexKeyUnrotated(Layer41):
    def _index_key(self, at: Tensor) -> Tensor:
        return self.passed("indexer.key_unrotated", at)


@fault("index-weights-unscaled", "Weights of index heads lack the root of the number of heads.", "V4 runtimes")
class _IndexWeightsUnscaled(Layer41):
    def _index_weights(self, at: Tensor) -> Tensor:
        weights: Tensor = super()._index_weights(at) * self.config.index_n_heads**0.5
        return weights


@fault(
    "candidates-off",
    "Indexers behind the candidates' layer select from all entries.",
    "expected; shows beyond 16,384 entries",
)
class _CandidatesOff(Layer41):
    def index_scores(self, at: Tensor) -> Tensor:
        return self.finished_scores(at)


@fault(
    "candidates-not-pinned", "The block of the newest entry is not always a candidate.", "expected, as the one before"
)
class _CandidatesNotPinned(Layer41):
    def block_scores(self, at: Tensor) -> Tensor:
        return self.best_of_blocks(at)


@fault("candidates-own", "Indexers behind the candidates' layer open blocks by their own scores.", "expected: as above")
class _CandidatesOwn(Layer41):
    def of_layer(self, source: int, site: str, at: Tensor) -> Tensor:
        if site == CANDIDATES and source != self.layer:
            return self._candidates(at)
        return super().of_layer(source, site, at)


# --- Engram


@by_calls(
    "engram-lookback", "N-grams begin anew with each call: earlier tokens count as padding.", "ATOM and vLLM keep them"
)
def _engram_lookback(calls: Sequence[int]) -> type[Layer41]:
    class Wrong(Layer41):
        def _engram_rows(self, at: Tensor) -> Tensor:
            return self.rows_of(at, starts(calls, len(self.setting.tokens)))

    return Wrong


@fault("engram-raw-ids", "N-grams are of token ids, where ids that spell alike should be one.", "expected of a port")
class _EngramRawIds(Layer41):
    def _engram_rows(self, at: Tensor) -> Tensor:
        numbers = torch.arange(self.config.vocab_size)
        return self.found_rows(table_rows(self.config, self.layer, self.setting.tokens, numbers, at))


@fault("engram-pad-raw", "Before the first token n-grams have the id that pads, not its number.", "expected of a port")
class _EngramPadRaw(Layer41):
    def _engram_rows(self, at: Tensor) -> Tensor:
        alike, pad = self.setting.alike, self.own.engram.pad_token_id
        if alike is None or int(alike[pad]) == pad:
            raise Unknown("its number is not known, or is the id")
        return self.found_rows(table_rows(self.config, self.layer, self.setting.tokens, alike, at, blank=pad))


@fault("engram-joint-norm", "The streams are normed together, where each is normed by itself.", "expected of a port")
class _EngramJointNorm(Layer41):
    def stream_factor(self, streams: Tensor) -> Tensor:
        joint = streams.square().mean((-1, -2), keepdim=True)
        return torch.rsqrt(joint + self.config.rms_norm_eps)[..., 0].expand(streams.shape[:-1])


@fault("engram-no-sqrt", "The gate is a sigmoid of the product, not of its signed root.", "expected of a port")
class _EngramNoSqrt(Layer41):
    def gate_of(self, g: Tensor) -> Tensor:
        return torch.sigmoid(g)


@fault("engram-not-before", "N-grams are not added before the layer: after it, or not at all.", "expected of a port")
class _EngramNotBefore(Layer41):
    def before(self, at: Tensor) -> Tensor:
        return self.arriving(at)


# --- experts


@fault("bias-vl-for-text", "Experts of text are chosen by the bias for images.", "expected: both are stored")
class _BiasVlForText(Layer41):
    def expert_ranks(self, at: Tensor) -> Tensor:
        return self.expert_scores(at) + self.parameters[self.name("ffn.gate.bias_vl")]


@fault("selection-bias-dropped", "Experts are chosen by their scores alone, without the bias.", "V4 runtimes")
class _SelectionBiasDropped(Layer41):
    def expert_ranks(self, at: Tensor) -> Tensor:
        return self.expert_scores(at)


@fault("biased-weights", "Weights of the chosen experts are made of the biased scores.", "expected of a port")
class _BiasedWeights(Layer41):
    def _expert_weights(self, at: Tensor) -> Tensor:
        return self.shares_of(self.expert_ranks(at), at)


@fault("route-scale-dropped", "Weights of experts lack the routed scaling factor.", "V4 runtimes")
class _RouteScaleDropped(Layer41):
    def shares_of(self, scores: Tensor, at: Tensor) -> Tensor:
        return super().shares_of(scores, at) / self.config.routed_scaling_factor


@fault("clamps-dropped", "Gate and up of experts are not clamped.", "V4 runtimes")
class _ClampsDropped(Layer41):
    def activated(self, gate: Tensor, up: Tensor, weight: Tensor | None = None) -> Tensor:
        y = torch.nn.functional.silu(gate) * up
        return self.noise.moved(y if weight is None else y * weight)


# --- weights


class _Misread(Parameters):
    """Parameters of which those in FP8 are decoded otherwise."""

    def __init__(self, right: Parameters) -> None:
        vars(self).update(vars(right))
        self.kept = {}

    def fresh(self, name: str) -> Tensor:
        mapping = self.mapping(name)
        right, of_fp8 = super().fresh(name), mapping.form is Form.FP8 and mapping.part is None
        return self.misread(right, self.checkpoint.read(mapping.weight)) if of_fp8 else right

    def rows(self, name: str, ids: Tensor) -> Tensor:
        mapping, found = self.mapping(name), super().rows(name, ids)
        of_fp8 = mapping.form is Form.FP8_ROWS
        return self.misread(found, self.checkpoint.rows(mapping.weight, ids)) if of_fp8 else found

    def misread(self, right: Tensor, values: Tensor) -> Tensor:
        """Numbers of what they should be, and of the stored values."""
        raise NotImplementedError


class _Halved(_Misread):
    def misread(self, right: Tensor, values: Tensor) -> Tensor:
        del values
        return right / 2


class _Unscaled(_Misread):
    def misread(self, right: Tensor, values: Tensor) -> Tensor:
        del right
        return values.to(F64)


class _OfMisread(Layer41):
    """A layer of such parameters."""

    misread: ClassVar[type[_Misread]]

    def __init__(self, setting: Setting, layer: int, at: Tensor) -> None:
        if not isinstance(setting.parameters, _Misread):
            setting = replace(setting, parameters=self.misread(setting.parameters))
        super().__init__(setting, layer, at)


@fault(
    "fp8-as-fnuz",
    "FP8 weights count half: their bytes are read as AMD's E4M3, -0 aside.",
    "notes of bring-ups on gfx942; vLLM#45681",
)
class _Fp8AsFnuz(_OfMisread):
    misread = _Halved


@fault("fp8-scales-ignored", "FP8 weights are used without their scales.", "ports that read blocks of 128, not of 32")
class _Fp8ScalesIgnored(_OfMisread):
    misread = _Unscaled


# --- which of them explains a difference


def explained(
    setting: Setting,
    recording: Recording,
    results: Sequence[Judged],
    calls: Sequence[int],
    seconds: float,
    said: Progress,
    gap_of: Callable[[Judged], Gap] | None = None,
) -> list[Place]:
    """What explains each site that differs, best first; plain causes before faults. `gap_of` as for `Identifier`."""
    found: list[Place] = []
    differing, ends = places(results), time.perf_counter() + seconds

    def late() -> bool:
        return time.perf_counter() > ends

    for number, judged in enumerate(differing):
        said(f"{judged.name}, known faults", number / len(differing))
        if late():
            found.append(Place(judged, (), f"{seconds:g} s were over", looked=False))
            continue
        try:
            gap = gap_of(judged) if gap_of else Gap(setting, recording, judged)
            cause = plain(gap, late)
        except Unknown as unknown:
            found.append(Place(judged, (), unknown.what, tried=False))
            continue
        faults, why = [cause] if cause else list[Explained](), ""
        for tried, name in enumerate(() if cause else FAULTS):
            if late():
                why = f"{tried} of {len(FAULTS)} faults were tried in {seconds:g} s"
                break
            faults += share(gap, name, calls)
        faults.sort(key=lambda one: -one.share)
        found.append(Place(judged, tuple(one for one in faults if one.share > 0)[:MOST_TOLD], why, ended=not why))
    return agreed(found)


def share(gap: Gap, name: str, calls: Sequence[int]) -> Iterator[Explained]:
    """What a fault explains of a gap; nothing where it cannot be in this model, or not be computed."""
    try:
        found = explains(gap, FAULTS[name].make(calls))
    except Unknown:
        return
    yield Explained((name,), found, FAULTS[name].what, plain=False)


def explains(gap: Gap, wrong: type[Layer41]) -> float:
    """How much nearer the recording is to a wrong layer than to the oracle; of a format, the rows that are in it."""
    still = replace(gap.setting, noise=Noise(gap.setting.noise.dtype, replicas=0), layer=wrong)
    part = Ends(still) if gap.judged.layer is None else layer_of(still, gap.judged.layer, gap.at)
    if gap.judged.why == OFF_GRID and isinstance(part, Layer41):
        kept = part.kept(gap.judged.site, gap.theirs)
        return 0.0 if kept is None else float((kept == gap.theirs).all(-1).double().mean())
    return gap.share(gap.comparable(part.computed(gap.judged.site, gap.at)[0]))


def agreed(found: Sequence[Place]) -> list[Place]:
    """The same, but where two faults explain a site alike, the one that explains more sites comes first."""
    often: dict[tuple[str, ...], int] = {}
    for place in found:
        for one in place.faults:
            often[one.names] = often.get(one.names, 0) + (one.share >= NAMED)

    def order(one: Explained) -> tuple[float, int]:
        return -round(one.share, 2), -often[one.names]

    return [replace(place, faults=tuple(sorted(place.faults, key=order))) for place in found]
