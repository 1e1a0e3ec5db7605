"""Probe `drafting`: drafts change no token and nothing that is remembered, and heads draft as their equations say."""

import copy
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from statistics import mean, quantiles
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

import torch
from torch import Tensor

from fathom.model.checkpoint.census import census
from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.checkpoint.mtp import Head
from fathom.model.choices import LOOKUP, PLAIN
from fathom.model.config import ModelConfig
from fathom.model.draft import Drafts
from fathom.model.errors import ConfigError, Tripwire
from fathom.model.observe import sites
from fathom.model.observe.observer import listening
from fathom.model.observe.sites import Site
from fathom.model.rounding import ROUNDINGS
from fathom.model.state import State
from fathom.model.transformer import Transformer
from fathom.probes.demo_language import prompts
from fathom.probes.finding import (
    JSON,
    Finding,
    Part,
    Report,
    Table,
    at_most,
    exactly,
    judged,
    measured,
    some,
    tripped,
    vacuous,
)
from fathom.probes.judge.draft_oracle import FAULTS, RIGHT, Dspark, Dspark41, Mtp, Reading, acts, skipping
from fathom.probes.judge.oracle import F64, FACTOR, REPLICAS, Noise, Parameters
from fathom.probes.probe import Probe, Progress, one_rank, room
from fathom.probes.shared.trace import Trace, named
from fathom.probes.subject import Subject, another, run_tokens
from fathom.runtime.drafting import Drafter, Drafting, HeadDrafter, check_draft, drafting
from fathom.runtime.generate import Generation
from fathom.runtime.load import LoadedV4
from fathom.runtime.options import DEMO, RunOptions
from fathom.runtime.sampling import Sampling

if TYPE_CHECKING:
    from array import array

HEADS_OF_DEMO: Final = (DEMO.parent / "demo-mtp", DEMO.parent / "demo-dspark")  # its checkpoint with a head each
DRAFTS: Final = 5  # at a time in runs that generate, as the flag has it
SHORTEST: Final = 192  # tokens of a document, of which a text may be the beginning
NOTHING: Final = 2.0**-20  # of a bound: more than roundings of float64 are, in sums of another shape
SEEDED: Final = Sampling(0.8, 0.95)
OWN, NONE = -1, -2  # turns: the head drafts, nobody does; others are how many drafts are the right tokens
TURNS: Final = (OWN, NONE, OWN, 2, OWN, 0, NONE, OWN)
TOLD: Final = "one who knows them"  # drafts texts of a checkpoint whose own drafters may be right in none
EARLY, LATE = "taps-one-layer-early", "taps-one-layer-late"
SKIPPED: Final = "skipped-where-nothing-was-drafted"


@dataclass(frozen=True)
class DraftingProbe(Probe):
    """Take drafts back, generate with them, and compute them again."""

    name: ClassVar[str] = "drafting"
    question: ClassVar[str] = "Does drafting change a token or what is remembered, and do heads draft as they should?"
    of_v41: ClassVar[bool] = True
    reads: ClassVar[tuple[Site, ...]] = (sites.STREAMS,)
    in_drafts: ClassVar[bool] = True
    background: ClassVar[str] = """\
A drafter guesses what the model will say next, one call of the model runs the guesses, and those that the model would
have chosen itself stay. Done right this changes the number of calls and nothing else. What goes wrong there is silent,
since a draft is never said unless the model agrees.

**What is remembered.** Tokens that were rejected have been run: they are in the ring of the window, they may have
closed a window of 4 or 128 and left an entry and an index key, and the *frontier* of each compressor holds them in
place of tokens that are yet needed. SGLang corrupted the states of compressors while the room for drafts was fixed at
four (sglang#34189), a partial restore brought back the wrong rows (lucebox#713). Nothing fails, and answers get worse.
The probe runs right and wrong tokens in one call from many positions, takes the wrong ones back, and compares every
buffer of every cache, and the logits of the tokens after it, bit by bit with a run that never had them.

**The text.** Rows of one call must have the bits of calls of one token, or near ties are decided in another way: ds4
lost the identity of greedy texts twice, in a product of the compressors and in a threshold of the indexer
(antirez/ds4#658, #913). The probe generates texts with and without drafts, greedily and with a seed.

**The heads.** A head that computes something else still drafts, only worse; who sees 57 % of drafts accepted does not
know that it could be 69 %, as vLLM did not while its draft layers rotated with YaRN (vllm#48304). Others borrowed a
layer of another kind (antirez/ds4#411), fed the second draft with the collapsed streams
(GDzhu01/vllm-ascend-deepseekv4#132), or gave the head no streams of tokens behind which nothing was drafted. The probe
lets a head draft in the loop that generates, with steps in between in which nothing is drafted, or wrong tokens are,
and holds its logits and confidence against float64, computed from the streams that a run without drafts leaves. What
differs is compared with every wrong reading of the equations that we know of."""
    noticed: ClassVar[str] = """\
Looking up what came before drafts nearly as well as a trained head does, on this language, and costs nothing: the demo
repeats itself. Where a head earns its place is the first draft of a sentence that was not there yet.

The heads of the demo are not small beside it: DSpark's three stages are nearly the model's four layers, and so a draft
costs nearly a token. That texts get faster at all with it says that calls of several rows are cheap.

DSpark's confidence errs on the careful side: from the second place on more drafts are accepted than it expects.

All wrong readings of the equations move the drafts by many times the bound, and none of them changes a text."""

    drafts: int = 7  # at a time where they are taken back: the most that a call verifies
    apart: int = 1  # positions from one start to the next
    every: bool = True  # number of right tokens in such a call, not some
    after: int = 2  # tokens run one by one after a rollback
    chains: int = 8  # of calls that begin where the last one was taken back to, from each segment's begin
    texts: int = 200
    new_tokens: int = 24  # of each text
    read: tuple[int, ...] = (2, 13, 40, 132)  # tokens in front of what a head drafts
    written: int = 24  # tokens that are generated then
    moments: int = 8  # of them at which the head's drafts are computed again, at most

    def needs(self, subject: Subject) -> str | None:
        """Positions, and a run that may draft."""
        options = subject.with_options(draft=LOOKUP, draft_tokens=self.drafts)
        try:
            check_draft(subject.config, options, subject.ops)
        except ConfigError as error:
            return str(error)
        longest = max(_segments(subject.config, self.drafts)[-1].last + 2 * (self.drafts + 1), *self.read)
        return one_rank(subject, "drafts are computed again from all streams") or room(subject, 2 * longest)

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """States first, then what heads draft, then texts."""
        config, heads = subject.config, _heads(subject)
        segments = _segments(config, self.drafts)
        rolled = [found for segment in segments for found in self._rolled_back(subject, segment, progress)]
        moments: dict[Head, list[Moment]] = {}
        pairs: dict[str, list[Pair]] = {}
        try:
            for done, (kind, of_head) in enumerate(heads.items()):
                progress(0.2 + 0.5 * done / len(heads), f"drafts of {kind}")
                moments[kind] = self._moments(of_head, kind)
            pairs = self._texts(subject, heads, progress)
            ended = []
        except Tripwire as trip:  # what states have shown is not lost
            ended = [tripped(trip)]
        accepted = {name: _acceptance(of) for name, of in pairs.items() if name != TOLD}
        findings = [
            *_state_findings(rolled),
            *(finding for kind, of in moments.items() for finding in _equation_findings(kind, of)),
            *(finding for name, of in pairs.items() for finding in _text_findings(name, of, shown=TOLD in pairs)),
            *(finding for name, of in accepted.items() for finding in _measured(name, of, pairs[name])),
            *ended,
        ]
        parts: list[Part] = [_acceptance_table(accepted), _state_table(rolled)]
        parts += [_readings_table(kind, of) for kind, of in moments.items()]
        return Report(_summary(rolled, pairs, moments), tuple(findings), tuple(parts), NOT_CLAIMED)

    # --- what is remembered

    def _rolled_back(self, subject: Subject, segment: "Segment", progress: Progress) -> Iterator["Rolled"]:
        """From positions of a segment, one call of right and wrong tokens, of which the wrong ones are taken back."""
        plain, most = _token_by_token(subject, segment, self.drafts), self.drafts + 1
        for start in range(segment.first, segment.last + 1, self.apart):
            progress(0.2 * start / (segment.last + 1), f"drafts taken back at position {start}")
            for right in range(1, most + 1) if self.every else (1, most // 2, most):
                for wrong in range(most - right + 1) if self.every else (most - right,):
                    state = copy.deepcopy(plain.states[start])
                    yield _taken_back(subject.model, plain, state, Block(start, right, wrong), self.after)
        for chain in range(self.chains):
            draw = random.Random(f"chain {chain} {segment.first} {subject.seed}")  # noqa: S311 -- not a secret
            state, same = copy.deepcopy(plain.states[segment.first]), True
            while state.position <= segment.last and same:  # behind a difference nothing more is said
                right = draw.randint(1, most)
                block = Block(state.position, right, draw.randint(0, most - right))
                rolled = _taken_back(subject.model, plain, state, block, 0)
                same = not rolled.caches
                yield rolled

    # --- what heads draft

    def _moments(self, subject: Subject, kind: Head) -> list["Moment"]:
        """Moments of runs in which the head drafts, and what the oracle makes of them."""
        return [moment for length in self.read for moment in self._moments_behind(subject, kind, length)]

    def _moments_behind(self, subject: Subject, kind: Head, length: int) -> Iterator["Moment"]:
        options = subject.with_options(numerics="plain", dtype="fp32", draft=kind.option, draft_tokens=DRAFTS)
        loaded, text = subject.load(options), Text(subject.tokens(length), Sampling())
        greedy = _written(subject, loaded.model, text, self.written, None).record.tokens
        by = _drafting(options, loaded)
        assert isinstance(by.drafter, HeadDrafter), f"{kind} drafts"
        turns = Turns(by.drafter, [*text.prompt, *greedy], subject.config)
        run = _written(subject, loaded.model, text, self.written, by._replace(drafter=turns))
        sequence = [*text.prompt, *run.record.tokens]
        equations = Equations.behind(subject, kind, loaded.model, sequence, length)
        for place in torch.linspace(0, len(turns.kept) - 1, min(self.moments, len(turns.kept))).round().int().tolist():
            known, drafts = turns.kept[place]
            yield equations.moment(known, drafts, [at for at in turns.alone if at < known - 1])

    # --- texts

    def _texts(self, subject: Subject, heads: Mapping[Head, Subject], progress: Progress) -> dict[str, list["Pair"]]:
        """The same texts without drafts and with them, in turn, by what drafts."""
        by_name = {LOOKUP: subject} | {kind.option: of_head for kind, of_head in heads.items()}
        if not subject.speaks_demo_language:
            by_name[TOLD] = subject
        pairs: dict[str, list[Pair]] = {name: [] for name in by_name}
        for number, text in enumerate(_chosen_texts(subject, self.texts)):
            progress(0.7 + 0.3 * number / self.texts, f"text {number} of {self.texts}")
            plain = _written(subject, subject.model, text, self.new_tokens, None)
            for name, of_name in by_name.items():
                options = of_name.with_options(draft=LOOKUP if name == TOLD else name, draft_tokens=DRAFTS)
                loaded = of_name.load(of_name.options if name in {LOOKUP, TOLD} else options)
                by = _drafting(options, loaded)
                if name == TOLD:
                    by = by._replace(drafter=Told([*text.prompt, *plain.record.tokens], subject.config))
                kept = Kept(by.drafter)
                run = _written(of_name, loaded.model, text, self.new_tokens, by._replace(drafter=kept))
                pairs[name].append(Pair(text, plain, run, kept.confidence))
        return pairs


def _drafting(options: RunOptions, loaded: LoadedV4) -> Drafting:
    by = drafting(options, loaded.head)
    assert by is not None, "options of a run that drafts"
    return by


def _heads(subject: Subject) -> dict[Head, Subject]:
    """The checkpoint with its own head, if it has one; the demo with each of those that were trained for it."""
    subjects = [subject]
    if subject.directory.resolve() == DEMO:
        subjects += [replace(subject, directory=folder) for folder in HEADS_OF_DEMO if folder.is_dir()]
    found = {}
    for one in subjects:
        kind = census(Checkpoint.open(one.directory).shapes(), one.config, where=str(one.directory)).mtp_head
        if kind is not None:
            found[kind] = one
    return found


# --- what is remembered


class Segment(NamedTuple):
    """Positions from which tokens are run and taken back."""

    first: int
    last: int


def _segments(config: ModelConfig, drafts: int) -> list[Segment]:
    """The start of a sequence up to the window's end, and around the ends of longer windows of compressors."""
    ratios = {ratio for ratio in config.compress_ratios if ratio > config.sliding_window}
    ends = sorted(ratios | {2 * max(config.sliding_window, *config.compress_ratios)})
    return [Segment(0, config.sliding_window + 1), *(Segment(end - drafts - 2, end + 1) for end in ends)]


class Plain(NamedTuple):
    """A segment's tokens, run one by one."""

    tokens: Tensor  # [t] int64, of the whole sequence
    states: dict[int, State]  # copies, by how many tokens they hold
    caches: dict[int, Trace]  # what these held
    logits: dict[int, Tensor]  # [vocab] after the token at a position


@torch.inference_mode()
def _token_by_token(subject: Subject, segment: Segment, drafts: int) -> Plain:
    """Run a segment, and what blocks from its last position need."""
    model, chunk = subject.model, subject.options.prefill_chunk
    stop = segment.last + 2 * (drafts + 1)
    ids = subject.tokens(stop)
    state = model.new_state(stop, chunk, rewind=drafts)
    if segment.first:
        run_tokens(model, ids[: segment.first], chunk, state)
    plain = Plain(torch.tensor(ids, device=model.device), {}, {}, {})
    for position in range(segment.first, stop):
        plain.states[position], plain.caches[position] = copy.deepcopy(state), Trace.of([], state)
        (plain.logits[position],) = model.logits(model(plain.tokens[position : position + 1], state))
    return plain


class Block(NamedTuple):
    """A call of right tokens from a position on, and wrong ones behind them."""

    start: int
    right: int
    wrong: int

    def __str__(self) -> str:
        return f"{self.right} right and {self.wrong} wrong from position {self.start}"


class Rolled(NamedTuple):
    """A block whose wrong tokens were taken back, against a run that never had them."""

    block: Block
    buffers: int  # compared
    caches: list[str]  # places in them that differ
    rows: int  # of logits, compared
    logits: list[int]  # positions at which they differ


@torch.inference_mode()
def _taken_back(model: Transformer, plain: Plain, state: State, block: Block, after: int) -> Rolled:
    """Run a block, take its wrong tokens back, and run some tokens more."""
    stop = block.start + block.right
    others = [another(token, model.config) for token in plain.tokens[stop : stop + block.wrong].tolist()]
    wrong = torch.tensor(others, dtype=torch.int64, device=model.device)
    rows = [*model.logits(model(torch.cat((plain.tokens[block.start : stop], wrong)), state))[: block.right]]
    if block.wrong:
        state.rewind(stop)
    places, buffers = _other_places(state, plain.caches[stop]), len(plain.caches[stop].caches)
    for position in range(stop, stop + after if not places else stop):
        rows += model.logits(model(plain.tokens[position : position + 1], state))
        places = places or _other_places(state, plain.caches[position + 1])
        buffers += len(plain.caches[position + 1].caches)
    off = [block.start + n for n, row in enumerate(rows) if not torch.equal(row, plain.logits[block.start + n])]
    return Rolled(block, buffers, places, len(rows), off)


def _other_places(state: State, wanted: Trace) -> list[str]:
    """Where caches do not stand where the position says; or else, in which parts they hold something else."""
    at = state.position
    astray = [
        f"{named(layer, stand.site)} stands at {stand.found}, not {stand.wanted}"
        for layer, cache in enumerate(state.layers)
        for stand in cache.stands(at, at)
    ]
    if astray:
        return astray
    found = Trace.of([], state)
    places = []
    for layer, part in wanted.other_caches(found):
        off = (found.caches[layer, part] != wanted.caches[layer, part]).nonzero()
        places.append(f"{named(layer, part)}, row {int(off[0])}, at position {at}")
    return places


def _state_findings(rolled: Sequence[Rolled]) -> Iterator[Finding]:
    if not any(one.block.wrong for one in rolled):
        yield vacuous("buffers after drafts were taken back", "no draft was wrong")
        return
    buffers, rows = sum(one.buffers for one in rolled), sum(one.rows for one in rolled)
    places = [f"{place} ({one.block})" for one in rolled for place in one.caches]
    told = f", first {places[0]}" if places else ""
    what = f"buffers of caches, of {buffers}, that rejected drafts leave otherwise{told}"
    yield judged(what, len(places), exactly(0), **some(places))
    off = [f"position {at} ({one.block})" for one in rolled for at in one.logits]
    told = f", first {off[0]}" if off else ""
    yield judged(f"rows of logits, of {rows}, that drafts change{told}", len(off), exactly(0), **some(off))


def _state_table(rolled: Sequence[Rolled]) -> Table:
    sizes = sorted({one.block[1:] for one in rolled})
    rows = []
    for size in sizes:
        among = [one for one in rolled if one.block[1:] == size]
        rows.append(
            [*size, len(among), sum(map(len, (one.caches for one in among))), sum(bool(one.logits) for one in among)]
        )
    return Table(
        "Drafts that were removed",
        ("right tokens of a call", "wrong ones behind them", "calls", "buffers that differ", "calls with other logits"),
        rows,
        "Against a run that has the right tokens alone, one by one: every buffer of every cache, and every row of"
        " logits, bit by bit.",
    )


# --- what heads draft


class Turns:
    """Drafts of a head, of nobody, and of one who knows what comes, in turn; the head's are kept."""

    def __init__(self, drafter: HeadDrafter, ahead: Sequence[int], config: ModelConfig) -> None:
        self.drafter, self.ahead, self.config = drafter, ahead, config
        self.count = 0
        self.kept: list[tuple[int, Drafts]] = []  # tokens that were known, and what the head drafted behind them
        self.alone: list[int] = []  # positions that were run in a call of one token

    def __call__(self, tokens: "array[int]", most: int) -> list[int]:
        """Draft as it is whose turn."""
        turn, known = TURNS[self.count % len(TURNS)], len(tokens)
        self.count += 1
        if turn == OWN:
            drafted = self.drafter(tokens, most)
            assert self.drafter.drafts is not None, "it has drafted"
            self.kept.append((known, self.drafter.drafts))
            return drafted
        if turn == NONE:
            self.alone.append(known - 1)
            return []
        return _mixed(self.ahead[known : known + most], turn, self.config)


class Told:
    """Drafts of which the first are right, by what it was told: none, one, two and so on, in turn."""

    def __init__(self, ahead: Sequence[int], config: ModelConfig) -> None:
        self.ahead, self.config = ahead, config
        self.count = 0

    def __call__(self, tokens: "array[int]", most: int) -> list[int]:
        """Draft."""
        right, known = self.count % (most + 1), len(tokens)
        self.count += 1
        return _mixed(self.ahead[known : known + most], right, self.config)


def _mixed(ahead: Sequence[int], right: int, config: ModelConfig) -> list[int]:
    """Tokens that come, so many of them; and others for the rest."""
    return [token if place < right else another(token, config) for place, token in enumerate(ahead)]


class Moment(NamedTuple):
    """A head's drafts at one moment against float64, in bounds."""

    position: int  # of the last token, behind which they are
    over: dict[str, list[float]]  # of logits and confidence: each row over its bound
    left: dict[str, float]  # by wrong reading: the furthest row from what it gives
    moved: dict[str, float]  # by wrong reading: by how much it moves a row from what is right, at most


class Equations(NamedTuple):
    """What the oracle computes drafts from."""

    config: ModelConfig
    parameters: Parameters
    kind: Head
    sequence: Tensor  # [t] int64
    streams: dict[int, Tensor]  # [t - 1, s, hidden] float64 behind some layers; -1: before the first

    @classmethod
    def behind(
        cls, subject: Subject, kind: Head, model: Transformer, sequence: Sequence[int], prompt: int
    ) -> "Equations":
        """Run a sequence without drafts: the prompt as ever, then token by token."""
        config = subject.config
        parameters = Parameters.of(subject.directory, config, head=True)
        wanted = {tap - early for tap in _taps(kind, config) for early in (0, 1, *((-1,) if config.v41 else ()))}
        heard: dict[int, list[Tensor]] = {layer: [] for layer in wanted}

        def hear(layer: int | None, streams: Tensor) -> None:
            if layer in heard:
                heard[layer].append(streams.to(device="cpu", dtype=F64, copy=True))

        def hear_embedded(layer: int | None, rows: Tensor) -> None:
            del layer
            hear(-1, rows[:, None].expand(-1, config.hc_mult, -1))

        state, run = model.new_state(len(sequence), subject.options.prefill_chunk), list(sequence[:-1])
        with listening(model, {sites.STREAMS: hear, sites.EMBEDDED: hear_embedded}):
            run_tokens(model, run[:prompt], state.chunk, state)
            run_tokens(model, run[prompt:], 1, state)
        streams = {layer: torch.cat(parts) for layer, parts in heard.items()}
        return cls(config, parameters, kind, torch.tensor(sequence), streams)

    @property
    def oracle(self) -> type[Mtp] | type[Dspark]:
        """What computes drafts."""
        if self.kind is Head.MTP:
            return Mtp
        return Dspark if self.config.v41 is None else Dspark41

    def drafts(
        self, known: int, chosen: Sequence[int], reading: Reading, *, early: int = 0, replicas: int = 0
    ) -> dict[str, Tensor]:
        """Logits [r, k, vocab] behind so many tokens, where these drafts were chosen, and confidence [r, 1, k]."""
        config, k, given = self.config, len(chosen), torch.tensor(chosen)
        taps = [self.streams[tap - early][: known - 1] for tap in _taps(self.kind, config)]
        noise = Noise(torch.float32, replicas)
        how = {"stages": self.kind.stages, "rounding": ROUNDINGS[PLAIN], "noise": noise, "reading": reading}
        head = self.oracle(config, self.parameters, **how)  # type: ignore[arg-type]
        if isinstance(head, Mtp):
            return {"logits": head.draft(taps[0], self.sequence[1:known], k, given).logits}
        assert config.dspark is not None, "it drafts by DSpark"
        block, noisy = config.dspark.block_size, config.dspark.noise_token_id
        slots = torch.tensor([int(self.sequence[known - 1]), *[noisy] * (block - 1)])
        padded = torch.cat((given, given.new_zeros(block - k)))  # what is behind the last draft changes none before it
        found = head.draft(head.main_keys(torch.stack(taps, 1)), slots, padded)
        return {"logits": found.logits[:, :k], "confidence": found.confidence[:, None, :k]}

    def moment(self, known: int, drafts: Drafts, alone: Sequence[int]) -> Moment:
        """Judge drafts behind so many tokens, of which those at some positions were run in calls of one token."""
        ours = {"logits": drafts.logits.to(device="cpu", dtype=F64)}
        if drafts.confidence is not None:
            ours["confidence"] = drafts.confidence.to(device="cpu", dtype=F64)[None]
        right = self.drafts(known, drafts.tokens, RIGHT, replicas=REPLICAS)
        bounds = {part: FACTOR * (x[1:] - x[0]).square().mean(0).sum(-1).sqrt() for part, x in right.items()}  # [rows]

        def over(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {part: (some[part] - others[part]).norm(dim=-1) / bounds[part] for part in bounds}

        exact = {part: x[0] for part, x in right.items()}
        oracle = self.oracle
        wrong = {name: (reading, 0) for name, reading in FAULTS.items() if acts(reading, oracle)}
        wrong |= {EARLY: (RIGHT, 1), SKIPPED: (skipping(alone), 0)}
        if self.config.v41 is not None:  # where V4 reads: behind the layers that are named, not before them
            wrong[LATE] = RIGHT, -1
        left, moved = {}, {}
        for name, (reading, early) in wrong.items():
            other = {part: x[0] for part, x in self.drafts(known, drafts.tokens, reading, early=early).items()}
            left[name], moved[name] = (_most(over(one, other)) for one in (ours, exact))
        return Moment(known - 1, {part: x.tolist() for part, x in over(ours, exact).items()}, left, moved)


def _taps(kind: Head, config: ModelConfig) -> tuple[int, ...]:
    """Layers behind which a head reads the streams."""
    if kind is Head.MTP:
        return (config.num_hidden_layers - 1,)
    return config.draft_taps


def _most(over: Mapping[str, Tensor]) -> float:
    return max(float(x.max()) for x in over.values())


def _equation_findings(kind: Head, moments: Sequence[Moment]) -> Iterator[Finding]:
    """Each part of the drafts, where it is furthest off; and the wrong reading that would give them."""
    wrong = [moment for moment in moments if any(max(rows) > 1 for rows in moment.over.values())]
    by_reading = {name: max(moment.left[name] for moment in wrong) for name in moments[0].left} if wrong else {}
    for part in moments[0].over:
        worst = max(moments, key=lambda moment: max(moment.over[part]))
        measure, place = max((over, place) for place, over in enumerate(worst.over[part], 1))
        evidence: dict[str, JSON] = {"behind position": worst.position, "moments": len(moments)}
        told = ""
        if part == "logits":
            evidence["place"] = place
        if measure > 1:
            name = min(by_reading, key=by_reading.__getitem__)
            told = f", as if {name}" if by_reading[name] <= 1 else ""
            if by_reading[name] < measure / 2:
                evidence |= {"nearest reading": name, "which leaves, of its bound": by_reading[name]}
        # 1: the bound is what rounding explains, found by moving every tensor, see `probes.judge.oracle`
        yield judged(f"{kind}: {part} of drafts, furthest over its bound{told}", measure, at_most(1), **evidence)
    for name in moments[0].moved:
        most = max(moment.moved[name] for moment in moments)
        if most <= 1 and (most > NOTHING or name in {EARLY, LATE, SKIPPED}):
            yield vacuous(f"{kind}: drafts if {name}", f"it would move none by more than {most:.2g} of its bound")


def _readings_table(kind: Head, moments: Sequence[Moment]) -> Table:
    most = {name: max(moment.moved[name] for moment in moments) for name in moments[0].moved}
    return Table(
        f"What drafts of {kind} would have shown",
        ("wrong reading", "times the bound"),
        [[name, times] for name, times in most.items() if times > NOTHING],
        "Each computed in float64 from the same streams, at the moment that it moves most. What is not here is of the"
        " other head, of deployed numerics, or of tokens that these moments do not see.",
    )


# --- texts


class Text(NamedTuple):
    """What is read, and how it goes on."""

    prompt: list[int]
    sampling: Sampling

    def __str__(self) -> str:
        return f"{len(self.prompt)} tokens, {'seeded' if self.sampling.temperature else 'greedy'}"


class Written(NamedTuple):
    """A run."""

    record: Generation
    caches: Trace  # that it left


class Kept:
    """A drafter of which the confidence is kept, where it tells one."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.confidence: list[Tensor] = []  # [k] each

    def __call__(self, tokens: "array[int]", most: int) -> list[int]:
        """Draft."""
        drafted, by = self.drafter(tokens, most), self.drafter
        if isinstance(by, HeadDrafter) and by.drafts is not None and by.drafts.confidence is not None:
            self.confidence.append(by.drafts.confidence)
        return drafted


class Pair(NamedTuple):
    """A text without drafts and with them."""

    text: Text
    plain: Written
    drafted: Written
    confidence: list[Tensor]  # of each draft, where its head tells one

    @property
    def apart(self) -> str | None:
        """Where the two differ first, in words; None where nowhere."""
        tokens = (run.record.tokens for run in (self.drafted, self.plain))
        for place, (one, other) in enumerate(zip_longest(*tokens)):
            if one != other:
                return f"{self.text}: token {place} is {one}, {other} without drafts"
        return None


def _written(subject: Subject, model: Transformer, text: Text, limit: int, by: Drafting | None) -> Written:
    record, chunk = Generation(), subject.options.prefill_chunk
    state = model.new_state(len(text.prompt) + limit - 1, chunk, rewind=by.most if by else 0)
    how = {"limit": limit, "sampling": text.sampling, "progress": lambda _: None, "record": record, "drafting": by}
    for _ in subject.parts.generate(model, state, text.prompt, eos=(), **how):
        pass
    return Written(record, Trace.of([], state))


def _chosen_texts(subject: Subject, count: int) -> Iterator[Text]:
    """Beginnings of documents, of lengths around the ends of windows and of whole ones; every other one seeded."""
    config = subject.config
    sizes = sorted({config.sliding_window, *(ratio for ratio in config.compress_ratios if ratio)}, reverse=True)
    ends = [times * size + off for off in (0, 1, -1) for times in (1, 2) for size in sizes]
    lengths = [None, *ends]
    for number in range(count):
        length, seed = lengths[number % len(lengths)], subject.seed + number
        sampling = replace(SEEDED, seed=seed) if number % 2 else Sampling()
        yield Text(_document(replace(subject, seed=seed), length, number), sampling)


def _document(subject: Subject, length: int | None, number: int) -> list[int]:
    """The beginning of a document, or, without a length, all of one up to its last answer."""
    if not subject.speaks_demo_language or subject.prompt is not None:
        return subject.tokens(length or SHORTEST)
    kinds = (prompts.common_replies, prompts.needle_prompts, prompts.common_prompts, prompts.needle_replies)
    (document,) = kinds[number // 2 % len(kinds)](max(2 * (length or 0), SHORTEST), 1, subject.seed)
    return list(document.ids[:length])


def _text_findings(name: str, pairs: Sequence[Pair], *, shown: bool = False) -> Iterator[Finding]:
    """Texts, and what their runs left; where all drafts were accepted, or none, that nothing changes shows nothing.

    `shown`: the same texts are drafted by one who is right at times, so that others need not be.
    """
    apart = [place for pair in pairs if (place := pair.apart)]
    left = [
        f"{pair.text}: {named(*parts[0])}"
        for pair in pairs
        if pair.apart is None and (parts := pair.plain.caches.other_caches(pair.drafted.caches))
    ]
    drafted, accepted = (sum(of) for of in _counts(pairs))
    for what, places in (
        (f"texts, of {len(pairs)}, that drafts by {name} change", apart),
        (f"texts, of {len(pairs)}, by {name} that are the same and leave other caches", left),
    ):
        if places or 0 < accepted < drafted:
            yield judged(what + (f", first {places[0]}" if places else ""), len(places), exactly(0), **some(places))
        elif shown and name != TOLD:
            yield measured(what, 0, accepted=accepted, drafted=drafted)
        else:
            yield vacuous(what, f"{accepted} of {drafted} drafts were accepted")


def _counts(pairs: Sequence[Pair]) -> tuple[list[int], list[int]]:
    """How many drafts were run at each place, and how many of them accepted."""
    records = [pair.drafted.record for pair in pairs]
    counts = [record.drafted for record in records], [record.accepted for record in records]
    drafted, accepted = ([sum(of) for of in zip_longest(*some, fillvalue=0)] for some in counts)
    return drafted, accepted


# --- acceptance


class Place(NamedTuple):
    """Drafts at one place of a draft, in greedy texts."""

    drafted: int
    accepted: int
    expected: float | None  # share, as confidence tells it; None: it does not

    @property
    def share(self) -> float:
        """Accepted of those that were run."""
        return self.accepted / self.drafted


def _acceptance(pairs: Sequence[Pair]) -> list[Place]:
    greedy = [pair for pair in pairs if not pair.text.sampling.temperature]
    drafted, accepted = _counts(greedy)
    chances = [told.sigmoid().cumprod(0).tolist() for pair in greedy for told in pair.confidence]
    expected = [mean(at for at in of if at is not None) for of in zip_longest(*chances)]
    return [Place(*counts) for counts in zip_longest(drafted, accepted, expected)]


def _measured(name: str, places: Sequence[Place], pairs: Sequence[Pair]) -> Iterator[Finding]:
    for number, place in enumerate(places, 1):
        expected: dict[str, JSON] = {} if place.expected is None else {"expected by confidence": place.expected}
        what = f"{name}: share of drafts accepted at place {number}, greedy"
        yield measured(what, place.share, drafted=place.drafted, **expected)
    ratios = [pair.drafted.record.decode_s / pair.plain.record.decode_s for pair in pairs]
    if len(ratios) > 1:
        low, middle, high = quantiles(ratios, n=4)
        yield measured(f"{name}: time of a token with drafts over that without, median", middle, quartiles=[low, high])


def _acceptance_table(accepted: Mapping[str, Sequence[Place]]) -> Table:
    return Table(
        "Drafts that were accepted, greedy",
        ("drafts by", "place", "run", "accepted", "share", "share that confidence expects"),
        [
            [name, number, place.drafted, place.accepted, place.share, place.expected]
            for name, places in accepted.items()
            for number, place in enumerate(places, 1)
        ],
        "A draft at a place is accepted where all before it were; of those that were run.",
    )


def _summary(
    rolled: Sequence[Rolled], pairs: Mapping[str, Sequence[Pair]], moments: Mapping[Head, Sequence[Moment]]
) -> str:
    other = sum(bool(one.caches) for one in rolled)
    apart = ", ".join(f"{sum(pair.apart is not None for pair in of)} of {len(of)} by {by}" for by, of in pairs.items())
    said = [f"Texts that differ when tokens are drafted: {apart}"] if pairs else []
    said.append(f"After {len(rolled)} calls with wrong drafts that were removed again, {other} times the caches differ")
    for kind, of in moments.items():
        furthest = max(max(map(max, moment.over.values())) for moment in of)
        told = f"The drafts of {kind} were compared with a float64 oracle at {len(of)} positions"
        said.append(f"{told}; the worst is at {furthest:.2g} of its bound")
    if not moments:
        said.append("The checkpoint has no draft head to judge")
    return f"{'. '.join(said)}."


NOT_CLAIMED = """\
That a head drafts well: how many drafts are accepted is measured, and depends on what it was trained on. That its
equations are those of DeepSeek where none are published: how MTP is fed, and what it is fed for a second draft,
is vLLM's. Heads are compared with float64 in plain fp32; deployed numerics round the same products. Drafts of which the
model accepts one with another probability, as rejection sampling does, are made nowhere here. Times are those of one
machine and one thread: on a GPU a call of six rows costs about what a call of one does."""

FULL = DraftingProbe()
QUICK = DraftingProbe(apart=3, every=False, chains=2, texts=4, new_tokens=12, read=(40,), written=20, moments=2)
