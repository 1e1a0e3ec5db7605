"""Bits: whether a prompt gives the same bits however it is cut, repeated or followed, and what each token sees."""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple

import torch
from torch import Tensor

from fathom.kernels.ops import CPU, Ops, mass_unit
from fathom.model.cache.entries import Entries
from fathom.model.cache.layers import LayerCache
from fathom.model.cache.shared import SharedCache
from fathom.model.cache.window import WindowRing
from fathom.model.config import LayerKind, ModelConfig
from fathom.model.errors import ConfigError, Tripwire
from fathom.model.observe import sites
from fathom.model.observe.observer import listening
from fathom.model.observe.sites import Listener, Site
from fathom.model.state import State
from fathom.model.transformer import Transformer
from fathom.probes.finding import (
    JSON,
    Finding,
    HeatMap,
    Report,
    Table,
    at_most,
    broken,
    exactly,
    judged,
    measured,
    vacuous,
)
from fathom.probes.probe import Probe, Progress, room
from fathom.probes.shared.calls import Attend
from fathom.probes.shared.exact import attend_off, exact, exact_linears
from fathom.probes.shared.recorder import Recorder
from fathom.probes.shared.trace import EVERY, OF_TOKENS, Difference, Passed, Trace, named, traced
from fathom.probes.subject import Subject, all_open, another, restricts, run_tokens
from fathom.runtime.options import check_options

# A key whose share of a token's softmax is below the last bit of all numbers of the output moves nothing: with bf16 and
# a few hundred numbers in an output row, about 1e-5. Trained models give that to few keys that they attend to at all.
# A window that is one token short loses one of 16 in each row of the demo: 0.06, and 0.02 where entries are seen too.
UNMOVED = 0.01
# fp32 and fp64 rank the same entries unless two scores are within an fp32 rounding of a sum, about one row in thousands
# where the last entry selected is as close to the first that is not.
UNEQUAL_SELECTIONS = 0.01
LOUD = 100.0  # of what stands in rows of caches that nobody has written: a softmax that reads one gives it much weight
BIN = 16  # tokens to a cell of the map
SLOW = 16  # calls of fewer tokens are run up to `small_upto` only
RESTRICTED: Final = 1024  # tokens of a prompt that is run to see candidates restrict a selection, at most
FEW: Final = (1, 2, 3, 4, 5, 6, 7, 8)  # tokens of calls for which ops have a way of their own
# Sums that are in another order in such a call: `Tally` holds them against exact ones.
REORDERED: Final = (sites.MIXED, sites.SELECTED, sites.CANDIDATES)
# Ways to store entries and index keys, each form of each once; the same bits come back from all of them.
FORMS: Final = (("dtype", "dtype"), ("fp8", "fp4"), ("dtype", "fp8"))
FORMS_OF_V41: Final = (("dtype", "dtype"), ("dtype", "fp4"))  # whose other forms are not built


AFTER, TURNS, RESTORED = "after prompt B", "in turns with B", "saved and restored half way"
STALE = "in memory that held NaN"
BEYOND_WINDOW: Final = {
    LayerKind.HCA: "To its right rows see the token through its block's entry, from the end of the block on: a stair of"
    " one step per block.",
    LayerKind.CSA: "Beyond it a row moves where it selected an entry that holds something of the token.",
}


class Compared(NamedTuple):
    """A run against one that it should equal."""

    differences: list[Difference]
    parts: list[tuple[int, str]] | None = None  # of caches that differ: layer, component.part; None: not compared
    trip: Tripwire | None = None  # what ended it

    @classmethod
    def of(cls, run: Trace, wanted: Trace) -> "Compared":
        """Compare all of it."""
        return cls(wanted.differences(run), wanted.other_caches(run))

    @property
    def place(self) -> str | None:
        """The first place that differs."""
        if self.trip is not None:
            return str(self.trip)
        return str(self.differences[0]) if self.differences else named(*self.parts[0]) if self.parts else None


Runs = dict[str, dict[str, Compared]]  # by what was done, and by which run of it


@dataclass(frozen=True)
class Bits(Probe):
    """What a layer sees; and runs that should be equal, of prompts that are followed, cut and repeated."""

    name: ClassVar[str] = "bits"
    question: ClassVar[str] = "Does a prompt give the same bits, however it is cut, repeated or followed?"
    reads: ClassVar[tuple[Site, ...]] = EVERY
    of_v41: ClassVar[bool] = True
    background: ClassVar[str] = """\
What a token comes to depends on the tokens before it and on nothing else: not on those after it, not on how the prompt
was cut into calls, not on what ran before. Nothing ends a run that breaks the rule, and answers stay fluent.

**What a token sees.** The sliding window may be off by one; a layer may look at a compressed entry (one row per 4 or
per 128 tokens) whose block is not finished, and so at tokens that come later; the indexer may select such an entry. In
prefill the later tokens are all there, so a leak makes a prompt look *better* understood than it can be. The rule for a
token at position t is: entries e < (t + 1) // ratio, and the last `sliding_window` positions, its own included. The
probe reads every selection. It runs each attention layer by itself, changes one row of its input, and notes which rows
of the output move: exactly those may that have the changed row in their window or in an entry they attend to. And in
the whole model it changes token t + 1, then everything after t: nothing up to t may move by a bit, at any site.

**How a prompt is cut.** Prefill takes a chunk of tokens at a time, decode one. Between calls everything that later
tokens need must be carried: the ring with the KV of the last tokens, compressed entries and index keys, and the
*frontier* of each compressor, the tokens of the block that is not finished. What is lost there depends on where the cut
falls within a block of 4 or of 128 tokens. The probe runs prompts in one call, in calls of other sizes, and token by
token over the ends of blocks, and compares every row at every site and every part of every cache. All caches have room
for a block more than the prompt, and what was not written yet holds loud noise: to look at an entry too early is to
look at that. Two correct runs in bf16 differ in last bits, because fp32 sums are taken in another order, and a bound
that allows for it would hide a lost token. So all sums are taken in fp64 and rounded once, and the comparison is for
equal bits; rings, frontiers and the order of calls are the run's own. The run's own attention and selection get the
same arguments in every one of these calls, and may differ from the exact ones by one rounding; Triton's attention,
which rounds the masses of its softmax to bf16 before they multiply bf16 keys, by what these roundings may do too. What
else ops do for few tokens alone, exact ones in their place would hide: so the run itself goes through calls of 1 to 8
tokens, put back on a long call after every site, and on a CPU, where each sum has one order, has its bits.

**How rows are stored.** Entries and index keys may be kept in FP8 and FP4, in which deployed numerics has rounded them
already: a run that keeps them so must have every bit of one that does not.

**What ran before.** A kernel may race, or read memory that was never written. Or something survives from one sequence
to the next: an open window that is not cleared, a ring that still holds another prompt's KV; DeepSeek's own code, as we
read it, does not clear the compressor's state when a new sequence begins. The probe runs prompt A again, after another
prompt, in turns with it, saved and restored half way, and in memory that the last sequence left full of NaN. The other
prompt repeats the token with the largest embedding, so that what leaks from it is not small."""
    noticed: ClassVar[str] = """\
Nothing differs: not over any cut, not token by token, not after another prompt. We had expected to need some excuse for
bf16, and with sums in fp64 there is none to make.

The run's own arithmetic is another matter, as the findings *as run* show: a matrix product with other rows may sum in
another order, and a number then falls on the other side of a bf16 rounding. Only where the future was changed do exact
products change nothing on this checkpoint. An E4M3 activation times an E2M1 weight has few bits, and hardly a sum of
such products has to be rounded in fp32: an exact sum has no order. In plain fp32 the effect is there in very short
prompts, always at `experts.output`, where an expert's batch had got a token more or a token less.

The reach of single layers came out sharper than we had dared to demand: the rows that moved are the rows that should,
to the last one and on both sides, although an HCA entry averages a whole block of tokens and is then rounded to E4M3.
The rope columns, which are not rounded, give every token away.

The run that is saved and restored has caught something that we did not build it for. With every read of the ring off
by one row (one of the injected faults) all plain repetitions agree, and only the restored run departs: the row before
the oldest that a token may see is not saved, because it should not be read."""

    # What a token sees. Tokens of the prompt, at least, run in one call, so that blocks of the future exist.
    tokens: int = 384
    changed: tuple[int, ...] = tuple(range(260))  # positions changed in the input of single layers: 0 .. 2 * 128 + 3
    per_kind: int = 4  # layers of each kind that are looked at one by one
    # t of the whole model: every residue of 4, and both sides of the ends and middles of blocks of 128
    kept: tuple[int, ...] = (0, 1, 2, 3, 6, 7, 63, 64, 126, 127, 128, 129, 254, 255, 256, 257, 258, 259)
    # How it is cut: all residues of 4 with nothing before them, the middle of a block of 128, and around one, two and
    # four of them.
    chunks: tuple[int, ...] = (1, 3, 4, 127, 128, 129, 512)
    lengths: tuple[int, ...] = (
        *(1, 2, 3, 4, 5, 6, 7, 8, 63, 66, 97, 124, 125, 126, 127, 128, 129, 130, 131, 132, 133),
        *(253, 254, 255, 256, 257, 258, 259, 260, 512, 513, 515, 518),
    )
    # longest prompt in calls of fewer than 16 tokens, which take most of the time; more where the window is longer
    small_upto: int = 260
    decoded: int = 6  # tokens one by one after a prefill: from three before the end of a block to two behind it
    # What ran before: tokens of A, at least two blocks of 128 and a ring that wraps.
    repeated: int = 300
    chunk: int = 64
    last: int = 4  # of A's tokens, run one by one at the end
    repeats: int = 3

    def needs(self, subject: Subject) -> str | None:
        """Positions for the longest prompt, and for a block more."""
        config = subject.config
        cut = self._lengths(config)[-1] + self.decoded + max(config.compress_ratios)
        few = _long(config, 0, 4) + sum(FEW)
        return room(subject, max(_long(config, self.tokens, 16), cut, few, _long(config, self.repeated, 4)))

    def vacuous(self, subject: Subject) -> str | None:
        """Without a ring that wraps, nothing is carried in it that could be lost; a run is compared with another."""
        window = subject.config.sliding_window
        if not any(window + chunk - 1 < length for chunk, length in self._grid(subject.config)):
            return f"no ring wraps: the window has {window} tokens, and no prompt is longer than it and a call"
        return "one run has nothing to be compared with" if self.repeats < 2 else None

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """Run all experiments."""
        reaches, findings = self.seen(subject, progress)
        groups = Runs()
        for experiment in (self.followed, self.cut, self.few, self.stored, self.repeat):
            more, others = experiment(subject, progress)
            groups |= more
            findings += [finding for what, runs in more.items() for finding in judge(what, runs)] + others
        moved = sum(int(one.moved.sum()) for one in reaches)
        wrong = sum(int((one.moved & ~one.expected).sum()) for one in reaches)
        places = {what: [run.place for run in runs.values()] for what, runs in groups.items()}
        differ = {what: [place for place in of if place] for what, of in places.items()}
        count = len(EVERY if subject.config.v41 is not None else sites.SITES)
        summary = (
            f"A prompt was run {sum(map(len, places.values()))} times: cut into other calls, decoded token by token,"
            " cached in another format, repeated, or followed by other tokens."
            f" {sum(map(len, differ.values()))} of these runs differ by a bit at any of {count} sites or in"
            f" the caches. Changing one token in the input of a layer changed {moved:,} rows of its output, {wrong} of"
            " them rows that may not see this token."
        )
        table = Table(
            "Runs that should be equal",
            ("what was done", "runs", "that differ", "first place"),
            [(what, len(of), len(differ[what]), next(iter(differ[what]), None)) for what, of in places.items()],
            "Bit by bit: every row of every site, and every part of every cache; of prompts that other tokens follow,"
            " the rows up to these.",
        )
        kinds = {subject.config.layer_kind(one.layer): one for one in reversed(reaches) if len(one.moved) >= 2 * BIN}
        maps = [heat_map(kind, one) for kind, one in kinds.items() if kind in BEYOND_WINDOW]
        few = all_open(subject.config)
        open_ = f" That candidates restrict a selection: it takes more than {few} tokens." if few > RESTRICTED else ""
        return Report(summary, tuple(findings), (table, *maps), NOT_CLAIMED + open_)

    def seen(self, subject: Subject, progress: Progress) -> tuple[list["Reach"], list[Finding]]:
        """What was selected, and which rows single layers see, in one call."""
        config, model = subject.config, subject.model
        watched = sites.ATTENTION_INPUT, sites.SELECTED, sites.CANDIDATES
        length, recorder = _long(config, self.tokens, 16), Recorder(watched)
        positions = sorted({*self.changed, max(0, max(config.compress_ratios) - 1)})  # the last of a block among them
        with listening(model, recorder.listeners()):
            run_tokens(model, subject.tokens(length), length)
        csa = [layer for layer in range(config.num_hidden_layers) if config.selects(layer)]
        blocks = None if config.v41 is None else recorder.rows(sites.CANDIDATES, config.v41.candidate_source)
        chosen = {layer: recorder.rows(sites.SELECTED, layer) for layer in csa}
        findings = [selections(config, chosen, blocks)] if csa else []
        reaches: list[Reach] = []
        for layer in (layers := self._layers(config)):
            progress(0.2 * len(reaches) / len(layers), f"layer {layer}, token by token")
            inputs = recorder.rows(sites.ATTENTION_INPUT, layer).to(model.device)
            reaches.append(reach(model, layer, inputs, positions))
            findings += reached(reaches[-1])
        return reaches, findings

    def _layers(self, config: ModelConfig) -> list[int]:
        """Up to `per_kind` layers of each kind, first and last among them; none that reads another's entries."""
        layers: set[int] = set()
        alone = [n for n in range(config.num_hidden_layers) if config.makes_entries(n) or not config.ratio(n)]
        for kind in {config.layer_kind(layer) for layer in alone}:
            of_kind = [layer for layer in alone if config.layer_kind(layer) is kind]
            step = max(1, -(-(len(of_kind) - 1) // (self.per_kind - 1)))
            layers |= {*of_kind[::step], of_kind[-1]}
        return sorted(layers)

    def followed(self, subject: Subject, progress: Progress) -> tuple[Runs, list[Finding]]:
        """Change the future in the whole model, and look at the past.

        An expert gets the tokens that were routed to it, and a product with one row is summed in another order than one
        with two: so that the future cannot reach the past by rounding, matrix products are exact.
        """
        model = subject.load(subject.with_options(dtype="bf16"), exact_linears(subject.ops)).model
        config = subject.config
        tokens = subject.tokens(_long(config, self.tokens, 16))
        other = [another(token, config, config.vocab_size // 2) for token in tokens]
        kept = sorted({*self.kept, max(0, max(config.compress_ratios) - 2)})  # behind it, the last token of a block

        def run(ids: list[int]) -> Trace:
            return whole(model, torch.tensor(ids, device=model.device), model.new_state(len(ids), len(ids)))

        def upto(t: int) -> Callable[[Site, int | None], int]:
            """Rows of tokens up to t, or entries of blocks finished by then; logits are those of the last token."""
            return lambda site, layer: (
                t + 1 if site.shape.startswith("t ") else 0 if layer is None else (t + 1) // config.ratio(layer)
            )

        before, still = run(tokens), list[int]()
        runs: Runs = {"token t + 1 changed": {}, "every token after t changed": {}}
        for done, t in enumerate(kept):
            progress(0.2 + 0.2 * done / len(kept), f"changing what comes after {t}")
            alone = run([*tokens[: t + 1], other[t + 1], *tokens[t + 2 :]])
            rest = run([*tokens[: t + 1], *other[t + 1 :]])
            for group, found in zip(runs.values(), (alone, rest), strict=True):
                group[f"t = {t}"] = Compared(before.differences(found, upto(t)))
            if before.rows[sites.HIDDEN, None][t + 1] == alone.rows[sites.HIDDEN, None][t + 1]:
                still.append(t + 1)
        if not still:
            return runs, []
        why = f"changing token {still[0]} did not move its own row: a model that does not read its input leaks none"
        return runs, [vacuous("a changed token moves its own row", why)]

    def _lengths(self, config: ModelConfig) -> list[int]:
        """Those asked for, both sides of a block's end, a ring that wraps in short calls, and candidates; ascending."""
        block, few = max(config.compress_ratios), all_open(config)
        restricted = {few + 5} if 0 < few <= RESTRICTED else set[int]()
        return sorted({*self.lengths, max(1, block - 3), block + 3, config.sliding_window + 5, *restricted})

    def _grid(self, config: ModelConfig) -> Iterator[tuple[int, int]]:
        """Every chunk with every length that it cuts, ascending."""
        small = max(self.small_upto, config.sliding_window + 5)
        for chunk in sorted(self.chunks):
            for length in self._lengths(config):
                if chunk < length and (chunk >= SLOW or length <= small):
                    yield chunk, length

    def cut(self, subject: Subject, progress: Progress) -> tuple[Runs, list[Finding]]:
        """Compare prompts in many calls, and such as are decoded on, with the same in one call."""
        tally, config = Tally(), subject.config
        model = subject.load(subject.with_options(dtype="bf16"), tally.watched(subject.ops)).model
        lengths, spare = self._lengths(config), max(config.compress_ratios)
        tokens = subject.tokens(lengths[-1] + self.decoded)
        ids, generator = torch.tensor(tokens, device=model.device), torch.Generator().manual_seed(subject.seed)

        def state(length: int, chunk: int) -> State:
            return loud(model.new_state(length + spare, chunk), generator)

        wanted: dict[int, Trace] = {}
        decoded, cuts = dict[str, Compared](), dict[str, Compared]()
        for done, length in enumerate(lengths):
            progress(0.4 + 0.15 * done / len(lengths), f"{length} tokens in one call, then one by one")
            more = length + self.decoded
            wanted |= {size: whole(model, ids[:size], state(size, size)) for size in {length, more} - wanted.keys()}
            passed, last = list[Passed](), state(more, length)
            for call in (ids[:length], *ids[length:more].split(1)):
                step(model, call, last, passed)
            name = f"{length} tokens ({length % 4} mod 4, {length % 128} mod 128)"
            decoded[name] = Compared.of(joined(passed, last), wanted[more])
        for done, chunk in enumerate(self.chunks):
            progress(0.55 + 0.3 * done / len(self.chunks), f"calls of {chunk}")
            cut = [length for size, length in self._grid(config) if size == chunk]
            runs = prefixes(model, ids, chunk, cut, state(cut[-1], chunk)) if cut else ()
            for length, run in zip(cut, runs, strict=True):
                cuts[f"{length} tokens in calls of {chunk}"] = Compared.of(run, wanted[length])
        groups = {f"decoded on, {self.decoded} tokens one by one": decoded, "cut into calls": cuts}
        return groups, [*tally.findings(), *self._drift(subject, tokens)]

    def _drift(self, subject: Subject, tokens: list[int]) -> Iterator[Finding]:
        """How far apart the run itself ends up, in its own arithmetic: no bound, see the background."""
        model = subject.model
        wanted = model.logits(run_tokens(model, tokens, len(tokens))[0])
        for chunk in self.chunks:
            if SLOW <= chunk < len(tokens):
                logits = model.logits(run_tokens(model, tokens, chunk)[0])
                distance = ((logits - wanted).norm() / wanted.norm()).item()
                same = (logits.argmax(1) == wanted.argmax(1)).float().mean().item()
                what = f"as run, in calls of {chunk}: distance of all logits from those in one call"
                yield measured(what, distance, "of their norm", same_argmax=round(same, 4))

    def few(self, subject: Subject, progress: Progress) -> tuple[Runs, list[Finding]]:
        """Hold calls of few tokens of the run itself, in its own arithmetic, against one call of all tokens."""
        progress(0.83, f"calls of up to {FEW[-1]}")
        model, first = subject.model, _long(subject.config, 0, 4)
        ids = torch.tensor(subject.tokens(first + sum(FEW)), device=model.device)
        whole = Recorder(OF_TOKENS)
        with listening(model, whole.listeners()):
            step(model, ids, model.new_state(len(ids), len(ids)), [], (), logits=len(ids))
        back, state = PutBack(whole), model.new_state(len(ids), first)
        with listening(model, back.listeners()):
            for call in ids.split([first, *FEW]):
                step(model, call, state, [], (), logits=len(call))
        return {}, [back.finding(judge=subject.ops.name == CPU.name)]

    def stored(self, subject: Subject, progress: Progress) -> tuple[Runs, list[Finding]]:
        """Compare the run with those that store entries and index keys in other forms."""
        progress(0.84, "other forms of caches")
        options, length = subject.options, _long(subject.config, self.repeated, 4)
        calls = self._calls(subject, subject.tokens(length))
        wanted, runs = again(subject.model, calls), dict[str, Compared]()
        for entries, keys in FORMS if subject.config.v41 is None else FORMS_OF_V41:
            try:
                other = replace(options, entry_format=entries, key_format=keys)
                check_options(subject.config, other, subject.directory)
            except ConfigError:  # it does not hold this run's numbers, or the model has no such caches
                continue
            if other != options:
                run = again(subject.load(other).model, calls)
                runs[f"entries in {entries}, index keys in {keys}"] = Compared(wanted.differences(run))
        return {"stored in another form": runs} if runs else {}, []

    def repeat(self, subject: Subject, progress: Progress) -> tuple[Runs, list[Finding]]:
        """Run A in all its circumstances."""
        model, length = subject.model, _long(subject.config, self.repeated, 4)
        ranks = model.arithmetic.ranks
        norms = ranks.whole(model.embedding.weight.float().norm(dim=1), 0, ranks.shards.vocabulary)
        norms[list(subject.config.of_images)] = 0
        a, b = (self._calls(subject, ids) for ids in (subject.tokens(length), [int(norms.argmax())] * length))
        first, stale = again(model, a), 0.0
        runs: Runs = {}
        for name in (*(f"run {number}" for number in range(2, self.repeats + 1)), AFTER, TURNS, RESTORED, STALE):
            progress(0.85 + 0.15 * len(runs) / (self.repeats + 3), f"prompt A, {name}")
            if name == AFTER:
                other = again(model, b)
            if name == STALE:
                stale = poison(model, b)
            try:
                found = Compared.of(again(model, a, b, name), first)
            except Tripwire as trip:  # what the earlier runs found should not be lost
                found = Compared([], None, trip)
            runs[name] = {"prompt A": found}
        findings = [measured("share of NaN in new memory that was not written yet", stale)]
        if not first.differences(other):
            findings.append(vacuous("prompt B differs from A", "B gave the same tensors: it could leave nothing else"))
        return runs, findings

    def _calls(self, subject: Subject, tokens: list[int]) -> list[Tensor]:
        """Calls of A's sizes: chunks, and the last tokens one by one."""
        ids = torch.tensor(tokens, device=subject.model.device)
        return [*ids[: -self.last].split(self.chunk), *ids[-self.last :].split(1)]


def _long(config: ModelConfig, tokens: int, more: int) -> int:
    """Tokens of a prompt that is longer than the window and than a block of any kind."""
    return max(tokens, max(config.sliding_window, *config.compress_ratios) + more)


def judge(what: str, runs: Mapping[str, Compared]) -> Iterator[Finding]:
    """Judge runs that should be equal to others: rows of sites, and what is left in caches."""
    for name, run in runs.items():
        if run.trip is not None:
            yield broken(f"{what}: a tripwire ended the run", str(run.trip), layer=run.trip.layer, run=name)
            return
    wrong = {name: run.differences for name, run in runs.items() if run.differences}
    layer, evidence = None, dict[str, JSON]()
    if wrong:
        name, places = next(iter(wrong.items()))
        logits = sum(any(place.site is sites.LOGITS for place in of) for of in wrong.values())
        layer, evidence = places[0].layer, {"first run": name, "first place": str(places[0])}
        evidence |= {"sites of layers there": len(places), "runs with other logits": logits}
    yield judged(
        f"{what}: runs, of {len(runs)}, that differ at a site", len(wrong), exactly(0), layer=layer, **evidence
    )
    caches = {name: run.parts for name, run in runs.items() if run.parts is not None}
    if not caches:
        return
    left = {name: parts for name, parts in caches.items() if parts}
    layer, evidence = None, {}
    if left:
        name, parts = next(iter(left.items()))
        components = sorted({part.split(".")[0] for of in left.values() for _, part in of})
        layer, evidence = parts[0][0], {"first run": name, "first part": named(*parts[0]), "components": components}
    yield judged(f"{what}: runs that leave something else in caches", len(left), exactly(0), layer=layer, **evidence)


# --- runs


@torch.inference_mode()
def step(
    model: Transformer,
    call: Tensor,
    state: State,
    passed: list[Passed],
    watched: Sequence[Site] = OF_TOKENS,
    logits: int = 1,
) -> None:
    """One call, and the logits of its last tokens; what passes is appended to `passed`."""
    with traced(model, watched, passed):
        model.logits(model(call, state)[-logits:])


def joined(passed: Sequence[Passed], state: State) -> Trace:
    """A run with the logits of its last call alone: how many calls there are depends on the cut."""
    trace = Trace.of(passed, state)
    trace.rows[sites.LOGITS, None] = trace.rows[sites.LOGITS, None][-1:]
    return trace


def whole(model: Transformer, ids: Tensor, state: State) -> Trace:
    """A prompt in one call."""
    passed: list[Passed] = []
    step(model, ids, state, passed)
    return joined(passed, state)


def prefixes(model: Transformer, ids: Tensor, chunk: int, lengths: Iterable[int], state: State) -> Iterator[Trace]:
    """Run each of the prompts ``ids[:length]``, `lengths` ascending, in calls of `chunk` and one for the rest.

    They share their full calls: at each length a copy of the state takes the rest.
    """
    passed: list[Passed] = []
    for length in lengths:
        while state.position + chunk <= length:
            step(model, ids[state.position : state.position + chunk], state, passed)
        rest, end, tail = ids[state.position : length], state, list[Passed]()
        if len(rest):
            end = copy.deepcopy(state)
            step(model, rest, end, tail)
        yield joined(passed + tail, end)


def loud(state: State, generator: torch.Generator) -> State:
    """Fill what is not written yet of rings, entries and index keys with noise, where rows are tensors."""
    for cache in state.layers:
        for component in cache.components.values():
            if isinstance(component, WindowRing | Entries) and isinstance(component.data, Tensor):
                component.data.copy_(torch.randn(component.data.shape, generator=generator).mul_(LOUD))
    return state


def _state(model: Transformer, calls: Sequence[Tensor]) -> State:
    """A state of exactly the size that a sequence needs."""
    return model.new_state(sum(map(len, calls)), max(map(len, calls)))


def again(model: Transformer, calls: Sequence[Tensor], others: Sequence[Tensor] = (), circumstance: str = "") -> Trace:
    """Run a sequence in a new state, with the calls of another one in its way as the circumstance says."""
    state, passed = _state(model, calls), list[Passed]()
    beside = _state(model, others) if circumstance == TURNS else None
    for done, call in enumerate(calls):
        if circumstance == RESTORED and done == len(calls) // 2:
            at = state.position
            saved = [{name: part.clone() for name, part in cache.tensors(at).items()} for cache in state.layers]
            model(others[0], model.new_state(len(others[0]), len(others[0])))
            state = _state(model, calls)
            for cache, parts in zip(state.layers, saved, strict=True):
                cache.restore(at, parts)
            state.position = at
        step(model, call, state, passed, EVERY)
        if beside is not None:
            model(others[done], beside)
    return Trace.of(passed, state)


def poison(model: Transformer, calls: Sequence[Tensor]) -> float:
    """Leave memory of the size of a state's buffers behind, full of NaN, for the allocator to hand out again.

    Returns the share of NaN in buffers that are allocated next, without being written: how much of it comes back.
    """
    state = _state(model, calls)
    buffers = [
        buffer
        for cache in state.layers
        for component in cache.components.values()
        for buffer in vars(component).values()
        if isinstance(buffer, Tensor) and buffer.is_floating_point()  # numbers of tokens are no numbers to lose
    ]
    kinds = [(buffer.shape, buffer.dtype, buffer.device) for buffer in buffers]
    for buffer in buffers:
        buffer.fill_(float("nan"))
    del state, buffers, buffer
    fresh = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in kinds]
    return sum(int(one.isnan().sum()) for one in fresh) / sum(one.numel() for one in fresh)


class PutBack:
    """Listeners that compare what passes with a run before, row by row, and let the run go on with that one's rows.

    So what differs at a site was computed since the site before. The run before is one call.
    """

    def __init__(self, whole: Recorder) -> None:
        self.whole, self.seen, self.rows = whole, Counter[tuple[str, int | None]](), 0
        self.apart: list[tuple[Difference, float]] = []  # the first row of each tensor that differs; how far the tensor

    def listeners(self) -> dict[Site, Listener]:
        """One for each site with a row per token or entry."""
        return {site: partial(self._passed, site) for site in OF_TOKENS}

    def _passed(self, site: Site, layer: int | None, x: Tensor) -> None:
        key = site.name, layer
        first, self.seen[key] = self.seen[key], self.seen[key] + len(x)
        wanted = self.whole.rows(site, layer)[first : first + len(x)].to(x.device)
        if site in (sites.SELECTED, sites.CANDIDATES):  # as wide as there are entries, or blocks of them
            wanted = wanted[:, : x.shape[1]]
        if site not in REORDERED:
            self.rows += len(x)
            other = (x != wanted).flatten(1).any(1).nonzero()
            if len(other):
                off = float((x.double() - wanted.double()).norm() / wanted.double().norm())
                self.apart += [(Difference(site, layer, first + int(row)), off) for row in other]
        x.copy_(wanted)

    def finding(self, *, judge: bool) -> Finding:
        """How many rows differ; where the order of sums follows from the shape of a call, that is only measured."""
        what = f"as run, calls of {FEW[0]} to {FEW[-1]} put back on one call: rows, of {self.rows}, of other bits"
        layer, evidence = None, dict[str, JSON]()
        if self.apart:
            (first, _), (worst, off) = self.apart[0], max(self.apart, key=lambda one: one[1])
            layer, evidence = first.layer, {"first place": str(first), "farthest": str(worst), "off by": off}
        if judge:
            return judged(what, len(self.apart), exactly(0), layer=layer, **evidence)
        return measured(what, len(self.apart), layer=layer, **evidence)


class Tally:
    """How the run's own attention and selection differed from the exact ones, given the same arguments."""

    def __init__(self) -> None:
        self.calls, self.rows, self.unequal = 0, 0, 0  # attend calls; rows selected for, and those chosen differently
        self.worst = 0.0  # of attend: |difference| over what is allowed
        self.at: dict[str, dict[str, JSON]] = {}  # the call of the worst, and the first that selects otherwise

    def watched(self, ops: Ops) -> Ops:
        """Exact ops that also compute `ops`' own attention and selection, and note the difference."""
        exactly_so = exact(ops)

        def attend(*given: Any) -> Tensor:
            call = Attend(*given)
            out, own = exactly_so.attend(*given), ops.attend(*given)
            # one rounding to bf16 (8 bits) may fall on the other side, and an fp32 sum of a few hundred terms may be
            # off by 2^-16 of the largest numbers that go into it; and what rounding masses does, where they are
            allowed = out.abs().float() * 2**-7 + out.abs().amax(-1, keepdim=True).float() * 2**-16
            allowed += attend_off(mass_unit(ops, call.ring.dtype), *given).float()
            off = (own.float() - out.float()).abs()
            self.calls += 1
            worst = torch.where(off == 0, 0.0, off / allowed).max()
            if not worst <= self.worst:  # a NaN is worse than anything
                self.at["attend"] = {"tokens": len(call.q), "at position": call.first, "ratio": call.ratio}
            self.worst = worst.clamp(min=self.worst).item()  # a NaN stays, as it would not in Python's max
            return out

        def noted(what: str) -> Callable[..., Tensor]:
            def choose(*given: Any) -> Tensor:
                out: Tensor = getattr(exactly_so, what)(*given)
                own, first = getattr(ops, what)(*given), given[3]
                unequal = (own != out).any(1).nonzero()[:, 0]
                self.rows += len(out)
                self.unequal += len(unequal)
                if len(unequal):
                    self.at.setdefault("select", {"token": first + int(unequal[0]), "of a call at": first})
                return out

            return choose

        chosen = {what: noted(what) for what in ("select", "open_blocks", "select_open")}
        return exactly_so._replace(attend=attend, **chosen)

    def findings(self) -> Iterator[Finding]:
        """Judge what the run's own ops made of the same arguments."""
        what = f"the run's own attention in the same {self.calls} calls, largest difference from fp64"
        yield judged(what, self.worst, at_most(1.0), "of a bf16 rounding", **self.at.get("attend", {}))
        if self.rows:
            what = f"the run's own selections for the same {self.rows} rows, share that differ from fp64"
            share = self.unequal / self.rows
            yield judged(what, share, at_most(UNEQUAL_SELECTIONS), **self.at.get("select", {}))


# --- what a token sees


def selections(config: ModelConfig, by_layer: dict[int, Tensor], blocks: Tensor | None = None) -> Finding:
    """Judge every selection [t, k]: distinct entries e < (t + 1) // ratio, and min(top-k, visible) of them.

    Where candidates restrict a layer of V4.1, of the entries in open `blocks` [t, n].
    """
    wrong: list[dict[str, JSON]] = []
    for layer, rows in by_layer.items():
        for t, row in enumerate(rows.tolist()):
            able = set(range((t + 1) // config.ratio(layer)))
            if blocks is not None and config.v41 is not None and restricts(config, layer):
                opened = set(blocks[t].tolist())
                able = {entry for entry in able if entry // config.v41.candidate_block_size in opened}
            chosen = {entry for entry in row if entry in able}
            if not len(chosen) == sum(entry != -1 for entry in row) == min(config.index_topk, len(able)):
                wrong.append({"csa layer": layer, "t": t, "visible": len(able), "selected": row})
    total = sum(len(rows) for rows in by_layer.values())
    what = f"selections of {total} that are not min(top-k, visible) finished blocks, all CSA layers"
    return judged(what, len(wrong), exactly(0), **(wrong[0] if wrong else {}))


class Reach(NamedTuple):
    """Which output rows of a layer moved when one input row changed, and which had to."""

    layer: int
    positions: Sequence[int]  # of the input rows that were changed, one at a time
    moved: Tensor  # [p, t] bool
    expected: Tensor  # [p, t] bool: the changed token is in the row's window, or in an entry that it attends to


def reach(model: Transformer, layer: int, inputs: Tensor, positions: Sequence[int]) -> Reach:
    """Change row p of `inputs` [t, hidden] for each p of `positions`, in one layer, all t tokens in one call.

    The layer's rows mix nowhere else, and all shapes stay the same, so an output row that does not see the changed
    token keeps every bit.
    """
    before, chosen_before = _attention(model, layer, inputs)
    moved, expected = [], []
    for p in positions:
        changed = inputs.clone()
        changed[p] = -changed[p]  # as large as before: nothing saturates, and no token has this input
        after, chosen_after = _attention(model, layer, changed)
        moved.append((after != before).flatten(1).any(1))
        expected.append(sees(model.config, layer, p, len(inputs), chosen_before, chosen_after))
    return Reach(layer, positions, torch.stack(moved), torch.stack(expected))


def sees(config: ModelConfig, layer: int, position: int, tokens: int, *selected: Tensor | None) -> Tensor:
    """Which of `tokens` rows see something of the token at `position`: [t] bool.

    In their window; or in a finished entry, of a CSA layer one that is among those `selected` [t, k]. A token is in its
    own block's entry, and with overlap (CSA of V4) in the next block's too, which pools this one's first series.
    """
    row = torch.arange(tokens)
    seen = (row >= position) & (row < position + config.sliding_window)
    if ratio := config.ratio(layer):
        selects = config.layer_kind(layer) is LayerKind.CSA
        overlap = selects and config.v41 is None
        for entry in range(position // ratio, position // ratio + 1 + overlap):
            attended = [(chosen == entry).any(1) for chosen in selected if chosen is not None]
            seen |= (entry < (row + 1) // ratio) & (torch.stack(attended).any(0) if selects else True)
    return seen


@torch.inference_mode()
def _attention(model: Transformer, layer: int, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
    """Output before the inverse rotation [t, heads, head_dim], and the selection [t, k] of a CSA layer, on the CPU."""
    recorder = Recorder((sites.MIXED, sites.SELECTED))
    with listening(model, recorder.listeners()):
        cache = model.new_state(len(inputs), len(inputs)).layers[layer]
        assert isinstance(cache, LayerCache)
        tokens = torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device)
        if isinstance(cache, SharedCache) and cache.tokens is not None:  # the layer writes them, not its attention
            cache.tokens.write(0, tokens[:, None])
        model.blocks[layer].attention(inputs, model.call(tokens, 0), cache)
    chosen = model.config.layer_kind(layer) is LayerKind.CSA
    return recorder.rows(sites.MIXED, layer), recorder.rows(sites.SELECTED, layer) if chosen else None


def reached(one: Reach) -> Iterator[Finding]:
    """Judge the reach of one layer."""
    earlier = torch.arange(one.moved.shape[1]) < torch.tensor(one.positions)[:, None]  # [p, t]
    beyond, lost = one.moved & ~one.expected, one.expected & ~one.moved

    def first(pairs: Tensor) -> dict[str, JSON]:
        if not pairs.any():
            return {}
        p, t = pairs.nonzero()[0].tolist()
        return {"token changed": one.positions[p], "row": t}

    for what, pairs in (
        ("rows moved by a token that comes after them", beyond & earlier),
        ("rows moved by a past token outside of their window and attended entries", beyond & ~earlier),
    ):
        yield judged(what, int(pairs.sum()), exactly(0), layer=one.layer, **first(pairs))
    what = "share of rows not moved by a token of their window or attended entries"
    share = int(lost.sum()) / int(one.expected.sum())
    yield judged(what, share, at_most(UNMOVED), layer=one.layer, **first(lost))


def heat_map(kind: LayerKind, one: Reach) -> HeatMap:
    """Share of pairs of a changed token and a row in which the row moved."""
    columns = torch.stack([part.mean(1) for part in one.moved.float().split(BIN, 1)], 1)  # [p, bins]
    groups = torch.tensor(one.positions) // BIN
    return HeatMap(
        f"Rows of layer {one.layer} ({kind.name}) that move when one token changes",
        "row of the output, from position",
        "token changed, from position",
        tuple(str(start) for start in range(0, one.moved.shape[1], BIN)),
        tuple(str(int(group) * BIN) for group in groups.unique()),
        [columns[groups == group].mean(0).tolist() for group in groups.unique()],
        f"The band along the diagonal is the window. {BEYOND_WINDOW[kind]} Left of the diagonal lies the past, where"
        " nothing may move.",
    )


NOT_CLAIMED = """\
That the run's own bf16 arithmetic is the same for every cut: it is not, as the measured distances show, and cannot be
while fp32 sums change their order. That what all runs agree on is right: a fault that is the same in every call is for
other probes, and so is whether the entries that a token may see are the *right* ones for it (`recall`). Lengths between
the listed ones, and residues of 128 that do not occur among them, were not run. Single layers are run from position 0
and in one call; where a changed token moves a row, nothing is said about how much.
That another number of threads, another machine, op set or torch gives the same bits: it need not, sums change their
order. That two processes agree. Races that a CPU run of this size cannot have. Memory is filled with NaN before it is
freed, but the allocator decides whether the next sequence gets it."""

FULL = Bits()
QUICK = Bits(
    tokens=144,
    changed=(0, 64, 127),
    kept=(62, 126),
    chunks=(3, 127),
    lengths=(),
    small_upto=0,
    repeated=132,
    last=2,
    chunk=130,  # restored where prefill ends
    repeats=2,
)
