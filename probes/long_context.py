"""Experiment `long-context`: one prefill of up to a million tokens, measured and questioned on its way.

A document of the demo language is read once. At each mark the walk stops: how fast were the last calls, how long takes
a token, which op takes what, how much memory, and are codes told so far back still found.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NamedTuple

import torch
from torch import Tensor

from fathom.kernels.formats.stored import Fp4
from fathom.kernels.ops import Ops
from fathom.model.observe.sites import Site
from fathom.model.state import State
from fathom.model.transformer import Transformer
from fathom.probes.demo_language import words
from fathom.probes.demo_language.language import (
    NEEDLE_TOKENS,
    VALUE_AT,
    encode,
    fact,
    fact_sentence,
    filler,
    first_word_opens,
    needle_sentence,
)
from fathom.probes.demo_language.vocabulary import BOS
from fathom.probes.evaluation import Snapshot, ask, margin, restore, snapshot
from fathom.probes.finding import Finding, HeatMap, Part, Plot, Report, Table, Text, at_most, exactly, judged, measured
from fathom.probes.memory import ITEM_BYTES, cache_bytes, live_bytes
from fathom.probes.probe import Probe, Progress, room
from fathom.probes.subject import Subject
from fathom.runtime.plan.planner import Plan, Planner
from fathom.runtime.report import cpuinfo, peak_memory

MIB: Final = 1 << 20

# --- the document

SHORTEST: Final = 1024  # tokens of the first stretch; each of the next ones is as long as all before it
FACTS: Final = 0.1  # of the sentences, as in the documents that the demo was trained on
GAP: Final = 128  # tokens between a code and the first question for it, at least
RESERVED: Final = 64  # before each mark: a question, the tokens decoded there, what is left of the last sentence
SENTENCE: Final = 16  # tokens of the longest sentence and more: the text before a mark ends with one


class Code(NamedTuple):
    """One code of the document, told once."""

    question: list[int]  # up to the value: "The code of Alice is"
    token: int  # the right answer
    position: int  # of its value, in the document


class Document(NamedTuple):
    """Token ids, the ends of sentences among them, and the codes in the order in which they are told."""

    ids: list[int]
    ends: list[int]  # number of tokens up to and with each sentence
    codes: list[Code]

    def stop_before(self, mark: int, reserved: int = RESERVED) -> int:
        """How many tokens to read so that a sentence ends and `reserved` tokens are left before `mark`."""
        return max(end for end in self.ends if end <= mark - reserved)

    def told_before(self, position: int) -> list[Code]:
        """Codes that may be asked for at `position`."""
        return [code for code in self.codes if code.position < position - GAP]


def long_document(length: int, seed: int) -> Document:
    """Return a document of exactly `length` tokens.

    The language has as many distinct codes as it has names, 66. They are shared out evenly over stretches, each as long
    as all text before it (the first has SHORTEST tokens), evenly within each: a text of any length has codes told in
    its last half, its last quarter and so on, and at its very beginning. No name and no code comes twice.
    """
    rng = random.Random(f"long context {length} {seed}")  # noqa: S311 -- documents, not secrets
    places = code_places(length, len(words.NAMES))
    names, codes = rng.sample(words.NAMES, len(places)), rng.sample(words.CODES, len(places))
    due = list(zip(places, names, codes, strict=True))
    ids, ends, told = [BOS], [1], []
    while len(ids) < length:
        if due and len(ids) >= due[0][0]:
            sentence = needle_sentence(*due.pop(0)[1:])
            whole = encode(sentence)
            told.append(Code(whole[:VALUE_AT], whole[VALUE_AT], len(ids) + VALUE_AT))
            ids += encode(sentence, opening=len(ids) == 1)
        else:
            is_fact = len(ids) > 1 and rng.random() < FACTS
            ids += first_word_opens(encode(fact_sentence(*fact(rng)) if is_fact else filler(rng)), ids[-1])
        ends.append(len(ids))
    return Document(ids[:length], [end for end in ends if end <= length], told)


def code_places(length: int, most: int) -> list[int]:
    """Positions, ascending, from which on the codes are to be told: at most `most`."""
    stretches = [(0, min(SHORTEST, length))]
    while stretches[-1][1] < length:
        start = stretches[-1][1]
        if 2 * length < 3 * start:  # too short for a stretch of its own
            stretches[-1] = (stretches[-1][0], length)
        else:
            stretches.append((start, min(2 * start, length)))
    each = most // len(stretches)
    reserved = RESERVED + GAP + 4 * NEEDLE_TOKENS  # not so near the end that a question there could not be asked
    return [
        start + (stop - start - reserved) * (2 * i + 1) // (2 * each) for start, stop in stretches for i in range(each)
    ]


# --- where the time goes

REST: Final = "the rest"  # what no op takes: embedding, calls of ops, caches, the interpreter
STREAMS: Final = frozenset({"hyper_weights", "head_weights", "collapse", "read_streams", "expand"})
ROUNDING: Final = frozenset({"simulate_fp8", "simulate_fp4", "hadamard", "round_index", "pack_fp8", "unpack_fp8"})
COMPONENTS: Final = (
    "select", "attend, CSA", "attend, HCA", "attend, SWA", "linears, FP4 experts", "linears, others", "mHC", "rounding",
    "other ops", REST,
)  # fmt: skip


def component(op: str, given: tuple[Any, ...]) -> str:
    """What a call of an op counts as."""
    if op == "attend":
        entries, selected = given[4], given[6]
        return f"attend, {'SWA' if entries is None else 'HCA' if selected is None else 'CSA'}"
    if op in {"linear", "grouped_linear"}:
        return f"linears, {'FP4 experts' if isinstance(given[1], Fp4) else 'others'}"
    return op if op == "select" else "mHC" if op in STREAMS else "rounding" if op in ROUNDING else "other ops"


@dataclass
class Clock:
    """Processor seconds of this process by component, and all in all, since `start`.

    Processor time, because other work may share the machine: what waits for its turn is not counted.
    """

    spent: dict[str, float] = field(default_factory=dict)
    began: float = 0.0

    def start(self) -> None:
        """Begin anew."""
        self.spent = dict.fromkeys(COMPONENTS, 0.0)
        self.began = time.process_time()

    def stop(self) -> dict[str, float]:
        """Return seconds by component; what no op took is the rest."""
        whole = time.process_time() - self.began
        return self.spent | {REST: whole - sum(self.spent.values())}

    def watch(self, ops: Ops) -> Ops:
        """Return the op set with this clock around every op."""
        alone = {name: op for name, op in ops._asdict().items() if callable(op) and name != "compress"}  # calls others
        return ops._replace(**{name: self._timed(name, op) for name, op in alone.items()})

    def _timed(self, name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            began = time.process_time()
            out = op(*given, **named)
            self.spent[component(name, given)] += time.process_time() - began
            return out

        return timed


# --- the walk

LAST: Final = 8  # calls before a mark whose time counts there
DECODED: Final = 32  # tokens that are decoded at each mark


class Answer(NamedTuple):
    """One question, answered."""

    position: int  # of the code
    back: float  # how far back it was told, as a share of what was read: near 1, at the beginning
    rank: int  # of the right token: 0 is right
    probability: float
    margin: float  # its logit above the best other one
    planted: bool  # whether the likeliest token is a code of this document at all


@dataclass(frozen=True)
class Mark:
    """What was measured at a mark; times are of calls of the full chunk, and of calls of one token, in seconds."""

    length: int  # the mark
    read: int  # tokens read when the questions were asked
    prefill_wall: list[float]
    prefill_processor: list[float]
    prefill_components: dict[str, float]  # median processor seconds of a call
    decode_wall: list[float]
    decode_processor: list[float]
    decode_components: dict[str, float]
    cache_bytes: dict[str, int]  # filled so far
    peak_bytes: int  # of the process, so far
    answers: list[Answer]
    seconds: float  # since the beginning, questions included


class Call(NamedTuple):
    """Times of one call."""

    tokens: int
    wall: float
    processor: float
    components: dict[str, float]


@dataclass
class Walk:
    """A model on its way through a document."""

    model: Transformer
    clock: Clock  # around the model's ops
    document: Document
    marks: Sequence[int]  # ascending; the last is the context
    chunk: int
    questions: int  # at each mark, at most
    decoded: int = DECODED
    reserved: int = RESERVED

    def __post_init__(self) -> None:
        self.ids = torch.tensor(self.document.ids, device=self.model.device)
        self.base_bytes = peak_memory(self.model.device.type)
        self.state: State = self.model.new_state(self.marks[-1], self.chunk)
        self.calls: list[Call] = []
        self.last_full: dict[int, Snapshot] = {}  # before the last call of the full chunk before each mark
        self.began = time.perf_counter()

    def run(self, progress: Progress) -> Iterator[Mark]:
        """Read up to every mark; yields what was found at each.

        The last mark is reached exactly: its last tokens are decoded one by one.
        """
        for mark in self.marks:
            stop, since = self.document.stop_before(mark, self.reserved), len(self.calls)
            while self.state.position < stop:
                if self.chunk <= stop - self.state.position < 2 * self.chunk:
                    self.last_full[mark] = snapshot(self.state)
                self.calls.append(self.call(min(self.chunk, stop - self.state.position)))
                progress(self.state.position / self.marks[-1], f"{self.state.position} tokens")
            prefill = [call for call in self.calls[since:] if call.tokens == self.chunk][-LAST:]
            read, answers = self.state.position, self.ask()
            left = mark - self.state.position if mark == self.marks[-1] else self.decoded
            decode = [self.call(1) for _ in range(left)]
            yield Mark(
                mark,
                read,
                [call.wall for call in prefill],
                [call.processor for call in prefill],
                medians(prefill),
                [call.wall for call in decode],
                [call.processor for call in decode],
                medians(decode),
                filled_bytes(self.state),
                peak_memory(self.model.device.type),
                answers,
                time.perf_counter() - self.began,
            )

    def call(self, tokens: int) -> Call:
        """Read the next tokens of the document."""
        first = self.state.position
        began, worked = time.perf_counter(), time.process_time()
        self.clock.start()
        hidden = self.model(self.ids[first : first + tokens], self.state)
        if tokens == 1:
            self.model.logits(hidden)
        components = self.clock.stop()
        return Call(tokens, time.perf_counter() - began, time.process_time() - worked, components)

    def held(self) -> Iterator[tuple[int, int]]:
        """Yield each mark and the bytes that the last call of the full chunk before it holds at once.

        These calls are run again, from where they began, after the walk: to count takes so much memory itself that the
        peak of the process would be its own. They write the same entries once more.
        """
        for mark, saved in self.last_full.items():
            restore(self.state, saved)
            self.clock.start()
            yield mark, live_bytes(self.model, self.state, self.ids[saved.position : saved.position + self.chunk])
            self.clock.stop()

    def ask(self) -> list[Answer]:
        """Ask for codes told so far, each from the same point; the text goes on as if nothing had been asked."""
        read, planted = self.state.position, {code.token for code in self.document.codes}
        codes = spread(self.document.told_before(read), self.questions)
        self.clock.start()
        found = ask(self.model, self.state, [code.question for code in codes])
        return [judge(logits[-1], code, read, planted) for logits, code in zip(found, codes, strict=True)]


def judge(logits: Tensor, code: Code, read: int, planted: set[int]) -> Answer:
    """What logits [vocab] say to the question for a code."""
    rank, best = int((logits > logits[code.token]).sum()), int(logits.argmax())
    probability = logits.softmax(0)[code.token].item()
    return Answer(
        code.position, 1 - code.position / read, rank, probability, margin(logits, code.token), best in planted
    )


def spread(codes: Sequence[Code], most: int) -> list[Code]:
    """At most `most` of the codes, evenly, the first and the last among them where there are two."""
    if len(codes) <= most:
        return list(codes)
    return [codes[i * (len(codes) - 1) // max(1, most - 1)] for i in range(most)]


def medians(calls: Sequence[Call]) -> dict[str, float]:
    """Median processor seconds of the calls, by component; empty where there are no calls."""
    if not calls:
        return {}
    return {name: statistics.median(call.components[name] for call in calls) for name in COMPONENTS}


def filled_bytes(state: State) -> dict[str, int]:
    """Bytes of the caches' parts that hold something at the state's position, by component."""
    found: dict[str, int] = {}
    for cache in state.layers:
        for name, part in cache.components.items():
            size = sum(tensor.nbytes for tensor in part.tensors(state.position).values())
            found[name] = found.get(name, 0) + size
    return found


# --- what was found

FULL_TILES: Final = 32768  # tokens from which on every tile is full: nothing but caches may take more
GROWTH: Final = 4.0  # MiB that a call's tensors may grow by all the same
BUCKETS: Final = {
    "last 1/16": 1 / 16,
    "1/16 to 1/8": 1 / 8,
    "1/8 to 1/4": 1 / 4,
    "1/4 to 1/2": 1 / 2,
    "first half": 1.0,
}
GROWING: Final = ("select", "attend, CSA", "attend, HCA", "attend, SWA", "linears, FP4 experts", "linears, others")


@dataclass(frozen=True)
class Found:
    """What a walk measured."""

    context: int
    position: int  # of the state at the end
    chunk: int
    seconds: float
    processor: str
    base_bytes: int  # of the process before
    allocated_bytes: dict[str, int]  # of the caches, by component
    marks: list[Mark]
    call_bytes: dict[int, int]  # by mark, of the last full call before it

    def rate(self, mark: Mark, clock: str) -> float | None:
        """Median tokens per second of the last calls before a mark; None where there were none of full length."""
        times = getattr(mark, f"prefill_{clock}")
        return self.chunk / statistics.median(times) if times else None

    def beyond(self, mark: Mark) -> float:
        """MiB of the process beyond what it took before."""
        return (mark.peak_bytes - self.base_bytes) / MIB


def report(found: Found, by_hand: dict[str, int], plan: Plan) -> Report:
    """Return the report of a walk.

    Parameters
    ----------
    found
        What was measured.
    by_hand
        Bytes of the caches by component, from the config without asking the runtime.
    plan
        Of the run, by which it would have been refused if it did not fit.

    """
    last, context = found.marks[-1], found.context
    full = next((mark for mark in found.marks if mark.length >= FULL_TILES), last)
    right = {mark.length: sum(answer.rank == 0 for answer in mark.answers) for mark in found.marks}
    asked = sum(len(mark.answers) for mark in found.marks)
    held, span = sum(by_hand.values()), f"from {full.length} tokens to {last.length}"
    findings = [
        judged("position of the state at the end", found.position, exactly(context)),
        judged("bytes of all caches", sum(found.allocated_bytes.values()), exactly(held), "B"),
        judged("the same as planned", plan.cache_bytes, exactly(held), "B"),
        judged(
            "tensors of a call, at the mark where they are most",
            max(found.call_bytes.values()) / MIB,
            at_most(plan.call.nbytes / MIB),
            "MiB",
        ),
        *(_grown(found, full, last, span) if full is not last else []),
        measured("peak of the process beyond what it took before", found.beyond(last), "MiB"),
        measured("peak of the process", last.peak_bytes / MIB, "MiB"),
        measured("the same as planned", (plan.needed + plan.mapped_weights) / MIB, "MiB"),
        measured("codes found, all marks", sum(right.values()) / max(1, asked), questions=asked),
        *(
            measured(f"codes found at {mark.length} tokens", right[mark.length] / len(mark.answers))
            for mark in found.marks
            if mark.answers
        ),
    ]
    rate, decode = found.rate(last, "processor"), 1e3 * statistics.median(last.decode_processor)
    reads = "" if rate is None else f"a second of CPU time reads {rate:.0f} tokens and "
    summary = (
        f"{context} tokens of context in {found.seconds / 60:.0f} minutes on one core ({found.processor}), the last"
        f" {len(last.decode_wall)} of them decoded. At the end {reads}a decoded token takes {decode:.0f} ms; of"
        f" {len(last.answers)} codes told in the text, {right[last.length]} are found."
    )
    parts = [*_speeds(found), *_components(found), _memory(found, plan), *_retrieval(found.marks)]
    return Report(summary, tuple(findings), tuple(parts), NOT_CLAIMED)


def _grown(found: Found, full: Mark, last: Mark, span: str) -> list[Finding]:
    grown = (found.call_bytes[last.length] - found.call_bytes[full.length]) / MIB
    process = (last.peak_bytes - full.peak_bytes) / MIB
    return [
        judged(f"and they grew {span}", grown, at_most(GROWTH), "MiB"),
        measured(f"the process grew {span}", process, "MiB"),
    ]


def _span(values: Sequence[float], scale: float) -> str:
    """Smallest to largest."""
    return f"{scale * min(values):.3g} to {scale * max(values):.3g}" if values else "-"


def _speeds(found: Found) -> list[Part]:
    rows, clocks = [], ("processor", "wall")
    for mark in found.marks:
        slow = [found.chunk / seconds for seconds in mark.prefill_wall]
        decode = [1e3 * statistics.median(getattr(mark, f"decode_{clock}")) for clock in clocks]
        spans = _span(slow, 1), _span(mark.decode_wall, 1e3)
        rates = [found.rate(mark, clock) for clock in clocks]
        rows.append([mark.length, *rates, spans[0], *decode, spans[1], mark.seconds / 60])
    columns = (
        "tokens", "prefill tokens/s, processor", "wall", "from .. to", "decode ms, processor", "wall", "from .. to",
        "minutes so far",
    )  # fmt: skip
    note = (
        f"Medians of the last calls of {found.chunk} tokens before each mark (up to {LAST}) and of the tokens that are"
        f" decoded at it ({DECODED} or more). Processor: seconds that this process computed. Wall: seconds that passed,"
        f" while other work shared the machine. Minutes include the questions. {overlaps(found.marks)}"
    )
    prefill: dict[str, Sequence[tuple[float, float]]] = {
        clock: [(mark.length, rate) for mark in found.marks if (rate := found.rate(mark, clock)) is not None]
        for clock in clocks
    }
    decoded: dict[str, Sequence[tuple[float, float]]] = {
        clock: [(mark.length, 1e3 * statistics.median(getattr(mark, f"decode_{clock}"))) for mark in found.marks]
        for clock in clocks
    }
    x, title = "tokens of context", "A decoded token by context"
    return [
        Plot("Prefill by context", x, "tokens per second", prefill, log_x=True, log_y=True),
        Table("How fast", columns, rows, note.strip()),
        Plot(title, x, "milliseconds", decoded, log_x=True, log_y=True, note=overlaps(found.marks)),
    ]


def overlaps(marks: Sequence[Mark]) -> str:
    """Where the spread of a decoded token does not tell a mark from the one before."""
    ends = [(min(mark.decode_wall), max(mark.decode_wall)) for mark in marks]
    alike = [
        str(mark.length)
        for mark, (low, high), (below, above) in zip(marks[1:], ends[1:], ends, strict=False)
        if low <= above and below <= high
    ]
    if not alike:
        return "" if len(marks) == 1 else "No spread of a decoded token overlaps that of the mark before."
    return (
        f"The spread of a decoded token overlaps that of the mark before at {', '.join(alike)} tokens: there a smaller"
        " or larger median is noise until shown otherwise."
    )


def _components(found: Found) -> list[Part]:
    parts: list[Part] = []
    for what, name in (("prefill", "a call"), ("decode", "a decoded token")):
        spent = {mark.length: getattr(mark, f"{what}_components") for mark in found.marks}
        rows = [[length, *(1e3 * one[part] for part in COMPONENTS)] for length, one in spent.items() if one]
        note = "Medians in milliseconds of the processor, each of its own."
        parts.append(Table(f"Where the time of {name} goes", ("tokens", *COMPONENTS), rows, note))
    marks = [mark for mark in found.marks if mark.prefill_components]
    series: dict[str, Sequence[tuple[float, float]]] = {
        part: [(mark.length, 1e3 * mark.prefill_components[part]) for mark in marks] for part in GROWING
    }
    note = (
        "The indexer scores every entry, and grows with their number. Attention of HCA layers to all entries of 128"
        " tokens grows as well, 32 times slower. CSA attends to as many as ever."
    )
    x, y = "tokens of context", f"milliseconds of a call of {found.chunk} tokens"
    return [*parts, Plot("What grows with the context", x, y, series, log_x=True, log_y=True, note=note)]


def _memory(found: Found, plan: Plan) -> Table:
    parts = list(found.allocated_bytes)
    rows: list[list[float | str | None]] = []
    for mark in found.marks:
        filled = [mark.cache_bytes.get(part, 0) / MIB for part in parts]
        call = found.call_bytes.get(mark.length)
        held = [sum(filled), None if call is None else call / MIB, mark.peak_bytes / MIB, found.beyond(mark)]
        rows.append([mark.length, *filled, *held])
    caches = [sum(kind.get(part, 0) for kind in plan.caches.values()) / MIB for part in parts]
    whole = (plan.needed + plan.mapped_weights) / MIB
    rows.append(["planned", *caches, plan.cache_bytes / MIB, plan.call.nbytes / MIB, whole, None])
    note = (
        "Of each cache, what is filled at a mark; all of it is allocated, and touched, before the first token. A call:"
        " the tensors that the last full call before the mark holds at once, counted where torch allocates, in a second"
        " run of that call after the walk. The process: its peak so far, and how much of it came after the model was"
        f" loaded; {plan.reserve >> 20} MiB of what is planned for it are no tensors: the interpreter, libraries, and"
        " what the C library keeps of freed memory, as much as the run of a million tokens took."
    )
    columns = ("tokens", *parts, "all caches", "a call", "the process", "after loading")
    return Table("Memory, in MiB", columns, rows, note)


def _retrieval(marks: Sequence[Mark]) -> list[Part]:
    asked = [mark for mark in marks if mark.answers]
    if not asked:
        return [Text("What is found", "No code was told early enough to be asked for.")]
    values: list[list[float | None]] = []
    for mark in asked:
        cells: list[list[bool]] = [[] for _ in BUCKETS]
        for answer in mark.answers:
            cells[next(i for i, edge in enumerate(BUCKETS.values()) if answer.back <= edge)].append(answer.rank == 0)
        values.append([sum(cell) / len(cell) if cell else None for cell in cells])
    depths = HeatMap(
        "Codes found by depth and length",
        "how far back the code was told, as a share of the text",
        "tokens",
        tuple(BUCKETS),
        tuple(str(mark.length) for mark in asked),
        values,
        "Share of right answers. Codes are told in stretches, each of which is as long as all before it.",
    )
    return [_answers(asked), _margins(asked), depths]


def _answers(marks: Sequence[Mark]) -> Table:
    rows = []
    for mark in marks:
        answers = mark.answers
        wrong = [answer for answer in answers if answer.rank]
        rows.append([
            mark.length, len(answers), len(answers) - len(wrong),
            statistics.median(a.probability for a in answers), min(a.probability for a in answers),
            min(a.margin for a in answers), max(a.rank for a in answers), sum(a.planted for a in wrong),
        ])  # fmt: skip
    columns = (
        "tokens", "questions", "right", "median probability", "smallest", "smallest margin", "largest rank",
        "wrong, but a code of the document",
    )  # fmt: skip
    note = (
        f"Every code that was told at least {GAP} tokens before is asked for, each from the same state; probability and"
        " rank (0 is right) are of the right code among all tokens, margins in logits above the best other one."
    )
    return Table("What is found", columns, rows, note)


def _margins(marks: Sequence[Mark]) -> Plot:
    cuts = {"smallest": 0.0, "median": 0.5, "largest": 1.0}
    ordered = {mark.length: sorted(answer.margin for answer in mark.answers) for mark in marks}
    series: dict[str, Sequence[tuple[float, float]]] = {
        name: [(length, values[round(cut * (len(values) - 1))]) for length, values in ordered.items()]
        for name, cut in cuts.items()
    }
    title, y = "By how much the right code leads", "logits above the best other token"
    return Plot(title, "tokens of context", y, series, log_x=True)


NOT_CLAIMED: Final = """\
Rates are those of this model (four layers, hidden size 128), on one core, while other work shared the machine: wall
times have the spread that is given, processor times leave out waiting but not the cache and the memory bandwidth that
others took.

Codes are found by a model that was trained on documents of up to 2048 tokens of this very kind, with its RoPE scaled
for 65,536: what it finds beyond is extrapolation, and what it misses there is the model's until another runtime
disagrees. One document was read: of two codes told at the same place, one may be found and the other not. That the
selection is exact at every length is for the tests to show, not for this page."""


@dataclass(frozen=True)
class LongContext(Probe):
    """Walk through one document; the fields are knobs."""

    name: ClassVar[str] = "long-context"
    question: ClassVar[str] = "What does a long context take, and what is still found in it?"
    reads: ClassVar[tuple[Site, ...]] = ()
    by_name: ClassVar[bool] = True
    background: ClassVar[str] = """\
One document of the demo language is read once, to the last position of the context. At marks on the way the walk stops
and measures: the last calls of the prefill, 32 tokens decoded one by one, where their time went, memory so far. And it
asks. People's codes are told in the text, each once, 66 in all, which is as many as the language has names. At each
mark every code told so far is asked for, each from the same state: rings and frontiers are put back afterwards, and
entries are only ever added, so it is enough to forget those that came after.

What grows: in a CSA layer the indexer scores every entry for every token, one for each 4 tokens, with 8 heads of 128.
It does not do so in fp32. Products of 8-bit integers give an upper bound of each score, and only entries whose
bound lies above a token's k-th best score so far are scored (`kernels/indexer/bound.py` has the proof)."""
    noticed: ClassVar[str] = """\
- Memory beside the caches does not know the context: a call holds as much at the end as where its tiles are first full.
  It was not so before it was counted: where many entries of one token came close to its best, the table into which they
  were merged had as many columns for every token. The page that stood here before failed on it.
- The process is another matter. It takes more than caches and tensors, and some of it comes late: what the C library
  keeps of freed blocks, the products' own buffers, and what this script remembers (its calls, and a copy of rings and
  frontiers for each mark).
- Every code is found beyond the length that RoPE was scaled for; then fewer with each doubling. The model's, not the
  runtime's: the selection is exact. At the end most codes of the second half are found and few of the first, and most
  wrong answers are other codes of the document.
- Selection takes most of a call of a long context, and most of a decoded token at the end."""

    lengths: tuple[int, ...] = tuple(1 << i for i in range(10, 21))  # the marks, ascending
    questions: int = 66  # at each mark, at most: all codes

    def needs(self, subject: Subject) -> str | None:
        """Say why this checkpoint cannot be asked."""
        if not subject.speaks_demo_language:
            return "the checkpoint does not speak the demo language: no document has answers that it could know"
        return room(subject, self.lengths[-1])

    def vacuous(self, subject: Subject) -> str | None:
        """Say why nothing could be asked, or timed."""
        if self.lengths[0] < SHORTEST:
            return f"{self.lengths[0]} tokens are too few for a question, want at least {SHORTEST}"
        if (chunk := subject.options.prefill_chunk) > (most := self.lengths[0] - RESERVED - SENTENCE):
            return f"before {self.lengths[0]} tokens a call has {most}, and those of this run have {chunk}"
        return None

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """Walk, then count what calls hold."""
        clock, began, context = Clock(), time.perf_counter(), self.lengths[-1]
        loaded, options = subject.load(ops=clock.watch(subject.ops)), subject.options
        clock.start()
        document = long_document(context, subject.seed)
        walk = Walk(loaded.model, clock, document, self.lengths, options.prefill_chunk, self.questions)
        marks = list(walk.run(progress))
        found = Found(
            context,
            walk.state.position,
            options.prefill_chunk,
            time.perf_counter() - began,
            cpuinfo("model name") or "unknown",
            walk.base_bytes,
            walk.state.nbytes(),
            marks,
            dict(walk.held()),
        )
        item, formats = ITEM_BYTES[options.dtype], (options.entry_format, options.key_format)
        planned = cache_bytes(subject.config, context, options.prefill_chunk, item, formats)
        planner = Planner(subject.config, loaded.census, loaded.sharding, options, 0, subject.ops.name)
        return report(found, planned, planner.plan(context))


FULL = LongContext()
QUICK = LongContext(lengths=(1024,), questions=4)
