"""Experiment `memory-db`: what states of documents hold, loaded, quantised and merged.

Of a checkpoint that `scripts.train_llama` made and the adapters that `scripts.train_coda` trained over it. Every
question starts from the same state and is one call, " The code of NAME is"; it counts as right when the likeliest next
token is the code. A guess is right in 1 of 90 cases.
"""

import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import ClassVar, Final, NamedTuple

from torch import Tensor, equal

from fathom.model.choices import CODED_BITS
from fathom.model.errors import ConfigError
from fathom.model.llama.transformer import LlamaTransformer
from fathom.model.observe.sites import Site
from fathom.model.state import State
from fathom.model.variants.choice import GroupedCoda
from fathom.model.variants.coda_merge import Kept
from fathom.probes.demo_language.language import encode, needle_document
from fathom.probes.demo_language.prompts import fact_prompts
from fathom.probes.evaluation import Share, ask, divergence, read
from fathom.probes.finding import Finding, Part, Report, Table, Text, at_least, exactly, judged, vacuous
from fathom.probes.probe import Probe, Progress
from fathom.probes.subject import Subject
from fathom.runtime.load import LoadedLlama
from fathom.runtime.memory import new_state
from fathom.runtime.merge import merge, mergeable
from fathom.runtime.quantised_state import load_any_state, quantise_state
from fathom.runtime.statefile import save_state

CODES: Final = 8  # told and asked for in each document
FACTS: Final = 8  # asked after each document: the model knows them by heart
KNOWS: Final = 0.5  # share of codes that a full cache has to find; a guess finds 1 in 90
ROOM: Final = 24  # tokens of the longest question and more
QUESTION: Final = encode("The code of Alice is")
NAME: Final = 3  # of its tokens

BASE, ADAPTERS, BASE_BOUNDED, BOUNDED = "base, full cache", "adapters, full cache", "base, bounded", "adapters, bounded"
IN_ONE_GO, MERGED, UNMOVED = "both read in one go", "merged", "merged, keys where they were"
ABOUT: Final = ("about the first", "about the second")
BOTH: Final = "about both"
RECENT, OLDER, KNOWN = "codes in the window", "codes before it", "facts"


class Question(NamedTuple):
    """What is asked after a document."""

    ids: list[int]
    answer: int
    told: int  # position of the answer in its document; -1: a fact, which no document tells


class Given(NamedTuple):
    """A document and what is asked of it."""

    ids: list[int]  # BOS first
    codes: list[Question]
    facts: list[Question]

    def parts(self, window: int) -> dict[str, list[Question]]:
        """The questions, by what a bounded state can know of their answers."""
        recent = len(self.ids) - window
        return {
            RECENT: [question for question in self.codes if question.told >= recent],
            OLDER: [question for question in self.codes if question.told < recent],
            KNOWN: self.facts,
        }


@dataclass
class Tally:
    """Right answers, document by document, and how far from another state's distribution."""

    documents: list[Share] = field(default_factory=list)
    nats: list[float] = field(default_factory=list)  # KL of the next token after each token of each question

    def add(
        self, found: Sequence[Tensor], questions: Sequence[Question], exact: Sequence[Tensor] | None = None
    ) -> None:
        """Count the answers to a document's questions that are likeliest; `exact` are the logits of the other state."""
        right = (int(rows[-1].argmax()) == question.answer for rows, question in zip(found, questions, strict=True))
        self.documents.append(Share.of(right))
        for wanted, rows in zip(exact or (), found, strict=exact is not None):
            self.nats += divergence(wanted, rows).tolist()

    @property
    def all(self) -> Share:
        """Of all documents."""
        return Share(sum(one.right for one in self.documents), sum(one.total for one in self.documents))

    @property
    def error(self) -> float:
        """Standard error of the mean share over documents; 0 of a single one."""
        shares = [one.share for one in self.documents if one.total]
        return stdev(shares) / len(shares) ** 0.5 if len(shares) > 1 else 0.0


Tallies = dict[str, dict[str, Tally]]  # row -> column


@dataclass
class Length:
    """What was measured of documents of one length."""

    states: Tallies = field(default_factory=dict)
    merged: Tallies = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)  # of a file, by row
    equal: int = 0  # questions whose logits after loading are those of the state that was saved, bit by bit
    asked: int = 0
    kept: list[Kept] = field(default_factory=list)  # by merging with keys moved, over all layers


@dataclass(frozen=True)
class MemoryDb(Probe):
    """Ask states of documents; the fields are knobs."""

    name: ClassVar[str] = "memory-db"
    question: ClassVar[str] = "What does a saved state still know of its document, quantised, and merged with another?"
    reads: ClassVar[tuple[Site, ...]] = ()
    by_name: ClassVar[bool] = True
    of_llama: ClassVar[bool] = True
    in_variants: ClassVar[bool] = True
    background: ClassVar[str] = f"""\
The model is a small Llama that `scripts.train_llama` makes, with CoDA adapters that `scripts.train_coda` trains for a
bounded cache; documents are of the demo language, each telling {CODES} codes once. A state is asked by continuing it
with " The code of NAME is", each question from the same state; right is the code as the likeliest next token (a guess:
1 in 90). Facts ("The capital of France is") are what the model knows by heart: {FACTS} of them after each document.

*In the window*: codes that the ring still holds when the document ends; *before it*: those that only the banks can
know. *KL*: of the next token after every token of every question, from the exact bounded state, in nats. *Bytes*: of
the file; a full cache grows with the document, a bounded one does not. The coded files hold each key and value of ring
and banks in 8 or 4 bits and a float16 length per row; gates, times and counts are exact.

Then two documents in one state. ± is one standard error over the pairs. All rows but the first two are one state of the
same size:

- *both read in one go*: the second document after the first, through the same bounded cache; merging stands in for it.
- *merged*: each document read alone, then `merge`: the second one's keys moved by the first one's length.
- *merged, keys where they were*: the same without moving any key: both documents begin at position 0. Measured here
  alone: `merge` moves keys, because otherwise the second document could not be the shorter one, nor follow the
  first."""
    noticed: ClassVar[str] = ""

    adapters: str = ""  # file of scripts.train_coda
    cache: str = "all=coda:window=64,exact=16,summary=16,block=64"  # what they were trained for
    lengths: tuple[int, ...] = (128, 256, 512, 1024)  # tokens of a document
    pairs: int = 12  # of documents, of each length

    def needs(self, subject: Subject) -> str | None:
        """A Llama of the demo's language, and adapters."""
        if not subject.speaks_demo_language:
            return "the checkpoint does not speak the demo language: no document has answers that it could know"
        return None if self.adapters else "no adapters are given, as in --set adapters=coda/coda_adapters.safetensors"

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """Measure all pairs of all lengths."""
        bounded = (self.cache,)
        options = {
            BASE: subject.options,
            ADAPTERS: replace(subject.options, coda_adapters=self.adapters),
            BASE_BOUNDED: replace(subject.options, kv=bounded),
            BOUNDED: replace(subject.options, kv=bounded, coda_adapters=self.adapters),
        }
        models: dict[str, LoadedLlama] = {}
        for row, chosen in options.items():
            loaded = subject.load_any(chosen)
            if not isinstance(loaded.model, LlamaTransformer):
                raise ConfigError(f"{subject.directory}: no Llama-family model")
            models[row] = loaded
        mergeable(models[BOUNDED], f"cache={self.cache}")
        found = {length: Length() for length in self.lengths}
        for at, (length, one) in enumerate(found.items()):
            for pair in range(self.pairs):
                progress((at + pair / self.pairs) / len(found), f"{length} tokens, pair {pair + 1} of {self.pairs}")
                self._pair(one, models, documents(length, subject.seed + pair, 2))
        return report(found, models[BOUNDED].model.config.num_hidden_layers)

    def _pair(self, found: Length, models: Mapping[str, LoadedLlama], pair: Sequence[Given]) -> None:
        bounded = models[BOUNDED]
        variant = bounded.model.arithmetic.formats.variant(0)
        assert isinstance(variant, GroupedCoda), str(variant)
        parts = pair[0].parts(variant.window)
        with tempfile.TemporaryDirectory() as folder:
            for row, loaded in models.items():
                state, path = behind(loaded, pair[0].ids), Path(folder) / row
                save_state(path, state, loaded, None)
                found.nbytes[row] = path.stat().st_size
                if row != BOUNDED:
                    for column, questions in parts.items():
                        tally(found.states, row, column).add(_asked(loaded, state, questions), questions)
            self._coded(found, bounded, state, parts, Path(folder))
        merged(found, bounded, pair)

    def _coded(
        self, found: Length, loaded: LoadedLlama, live: State, parts: Mapping[str, list[Question]], folder: Path
    ) -> None:
        """Ask the bounded state, exact and coded, through files."""
        rows, wanted = {BOUNDED: folder / BOUNDED}, dict[str, list[Tensor]]()
        for bits in CODED_BITS:
            rows[f"{BOUNDED}, {bits} bits"] = folder / str(bits)
            quantise_state(rows[BOUNDED], bits, folder / str(bits))
        for row, path in rows.items():
            state = new_state(loaded.model, live.max_context, live.chunk, live.position)
            load_any_state(path, state, loaded)
            found.nbytes[row] = path.stat().st_size
            for column, questions in parts.items():
                logits = _asked(loaded, state, questions)
                tally(found.states, row, column).add(logits, questions, wanted.setdefault(column, logits))
                if row == BOUNDED:
                    found.equal += sum(map(equal, logits, _asked(loaded, live, questions)))
                    found.asked += len(questions)


def documents(length: int, seed: int, count: int) -> list[Given]:
    """`count` documents of about `length` tokens, no name of which has a code in another."""
    rng = random.Random(f"database {length} {seed}")  # noqa: S311 -- documents, not secrets
    found: list[Given] = []
    taken: set[int] = set()
    while len(found) < count:
        made = needle_document(rng, length + 7 * CODES, CODES, CODES, chat=False)
        told = [answer for answer in made.answers if answer.source >= 0]
        codes = [
            Question(made.ids[one.position + 1 - len(QUESTION) : one.position + 1], one.token, one.source)
            for one in told
        ]
        names = {question.ids[NAME] for question in codes}
        if names & taken:
            continue
        taken |= names
        end = min(answer.position for answer in told) + 1 - len(QUESTION)
        facts = [
            Question([QUESTION[0], *prompt.ids[2:]], prompt.answer, -1) for prompt in rng.sample(fact_prompts(), FACTS)
        ]
        found.append(Given(made.ids[:end], codes, facts))
    return found


def behind(loaded: LoadedLlama, ids: Sequence[int], room: int = ROOM) -> State:
    """The state after a document, with room for more tokens."""
    state = new_state(loaded.model, len(ids) + room, 512, len(ids))
    read(loaded.model, state, ids, state.chunk)
    return state


def _asked(loaded: LoadedLlama, state: State, questions: Sequence[Question]) -> list[Tensor]:
    return ask(loaded.model, state, [question.ids for question in questions])


def tally(rows: Tallies, row: str, column: str) -> Tally:
    """The tally of a row and column, which may be new."""
    return rows.setdefault(row, {}).setdefault(column, Tally())


def merged(found: Length, loaded: LoadedLlama, pair: Sequence[Given]) -> None:
    """Ask what two documents become in one bounded state about the first and about the second of them.

    For the way that moves no key the longer document is the second.
    """
    a, b = pair
    states = {"the first alone": behind(loaded, a.ids), "the second alone": behind(loaded, b.ids)}
    states[IN_ONE_GO] = behind(loaded, [*a.ids, *b.ids[1:]])
    for row, shift in ((MERGED, None), (UNMOVED, 0)):
        first, second = sorted(pair, key=lambda given: len(given.ids)) if shift == 0 else pair
        states[row] = behind(loaded, first.ids, len(second.ids) + ROOM)
        kept = merge(loaded, states[row], behind(loaded, second.ids), shift)
        if row == MERGED:
            found.kept.append(kept)
    for row, state in states.items():
        both = [*a.codes, *b.codes]
        logits = _asked(loaded, state, both)
        halves = slice(0, len(a.codes)), slice(len(a.codes), None), slice(None)
        for column, part in zip((*ABOUT, BOTH), halves, strict=True):
            tally(found.merged, row, column).add(logits[part], both[part])


# --- what was found


def report(found: Mapping[int, Length], layers: int) -> Report:
    """All of it; `layers` of the model."""
    asked, same = sum(one.asked for one in found.values()), sum(one.equal for one in found.values())
    what = "questions whose logits after loading are those of the state that was saved, bit by bit"
    parts: list[Part] = [_states(length, one) for length, one in found.items()]
    parts += [_merged(length, one) for length, one in found.items()]
    parts += [_kept(found, layers), Text("What merging keeps", "\n\n".join(map(verdict, found, found.values())))]
    longest = max(found)
    findings = (judged(what, same, exactly(asked)), _known(found))
    return Report(headline(longest, found[longest]), findings, tuple(parts), NOT_CLAIMED)


def _known(found: Mapping[int, Length]) -> Finding:
    """A model that finds few codes with a full cache cannot lose them with a bounded one."""
    codes = [_codes(one.states[ADAPTERS]) for one in found.values()]
    share, what = Share(sum(one.right for one in codes), sum(one.total for one in codes)), "codes found, full cache"
    if share.share < KNOWS:
        return vacuous(what, f"{share}: a state cannot lose what is not known, train the model first")
    return judged(what, share.share, at_least(KNOWS))


def headline(length: int, found: Length) -> str:
    """The longest documents in two sentences."""
    states = {row: _codes(by) for row, by in found.states.items()}
    both = {row: by[BOTH].all for row, by in found.merged.items()}
    coded = " and ".join(
        f"{states[f'{BOUNDED}, {bits} bits'].share:.1%} in {bits} bits ({_smaller(found, bits):.2f} times smaller)"
        for bits in CODED_BITS
    )
    return (
        f"Of the codes in a document of {length} tokens, the bounded state finds {states[BOUNDED].share:.1%}, {coded}."
        f" Two such documents merged into one state of the same size: {both[MERGED].share:.1%} of the codes of both,"
        f" where each alone finds {_alone(found):.1%} of its own and reading both in one go"
        f" {both[IN_ONE_GO].share:.1%}."
    )


def verdict(length: int, found: Length) -> str:
    """What merging kept at one length, in words that follow from the numbers."""
    here, one_go, unmoved = (found.merged[row] for row in (MERGED, IN_ONE_GO, UNMOVED))
    alone = _alone(found)
    gain, moves = (_apart(here[BOTH], other[BOTH]) for other in (one_go, unmoved))
    lost = f"{1 - here[BOTH].all.share / alone:.0%}" if alone else "nothing, for there is nothing"
    every, first, second = (
        f"{here[column].all.share:.1%} against {one_go[column].all.share:.1%}" for column in (BOTH, *ABOUT)
    )
    return (
        f"**{length} tokens each.** Of what the two states answer alone, merging loses {lost}. Against reading both in"
        f" one go into the same cache it finds {('fewer', 'as many, within the error', 'more')[gain + 1]}: {every} in"
        f" all, {first} about the first document, {second} about the second. Moving the second one's keys"
        f" {('costs', 'makes no difference beyond the error', 'gains')[moves + 1]}"
        f" ({unmoved[BOTH].all.share:.1%} unmoved)."
    )


def _alone(found: Length) -> float:
    return fmean(by[column].all.share for by, column in zip(list(found.merged.values())[:2], ABOUT, strict=True))


def _apart(a: Tally, b: Tally) -> int:
    """1 or -1: a share is larger or smaller than another by more than both errors; 0: by less."""
    gain = a.all.share - b.all.share
    return 0 if abs(gain) <= a.error + b.error else 1 if gain > 0 else -1


def _states(length: int, found: Length) -> Table:
    rows: list[list[float | str | None]] = []
    for row, by in found.states.items():
        nats = [nat for one in by.values() for nat in one.nats]
        exact = row == BOUNDED or not nats
        kl = (None, None) if exact else (f"{fmean(nats):.1e}", f"{max(nats):.1e}")
        rows.append([row, *(str(by[column].all) for column in (RECENT, OLDER, KNOWN)), *kl, f"{found.nbytes[row]:,}"])
    columns = ("state", RECENT, OLDER, KNOWN, "KL, mean", "KL, largest", "bytes")
    return Table(f"One document of {length} tokens", columns, rows)


def _merged(length: int, found: Length) -> Table:
    rows: list[list[float | str | None]] = []
    for row, by in found.merged.items():
        rows.append([row, *(f"{by[c].all.share:.1%} ± {100 * by[c].error:.1f}" for c in (*ABOUT, BOTH))])
    return Table(f"Two documents of {length} tokens in one state", ("state", *ABOUT, BOTH), rows)


def _kept(found: Mapping[int, Length], layers: int) -> Table:
    columns = (
        "tokens each", "ring, first", "ring, second", "evicted", "exact, first", "exact, second", "exact, lost",
        "averages alone", "averages of two",
    )  # fmt: skip
    rows: list[list[float | str | None]] = [
        [length, *(f"{fmean(column) / layers:.1f}" for column in zip(*one.kept, strict=True))]
        for length, one in found.items()
    ]
    note = "On average over pairs. *Evicted*: ring tokens of the first document, offered to its banks."
    return Table("What merging did, in slots of a layer", columns, rows, note)


def _codes(by: Mapping[str, Tally]) -> Share:
    recent, older = by[RECENT].all, by[OLDER].all
    return Share(recent.right + older.right, recent.total + older.total)


def _smaller(found: Length, bits: int) -> float:
    return found.nbytes[BOUNDED] / found.nbytes[f"{BOUNDED}, {bits} bits"]


NOT_CLAIMED: Final = """\
One model of one seed, one size of cache, documents of one small language made by the generator that made the training
data. A code is one token told in one sentence; what merging does to an argument that runs through a whole text is not
measured. Nothing has attended from one document to the other, so a question that needs both has to join them by
itself."""

FULL = MemoryDb()
QUICK = MemoryDb(lengths=(128,), pairs=1)
