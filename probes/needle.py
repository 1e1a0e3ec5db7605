"""Probe `needle`: codes told once in a document are found again, at every depth and length, and by selection alone.

The documents are those of any model with a tokenizer: of the demo's language where the checkpoint speaks it, of English
elsewhere. Who compares runs asks them too (`documents`, `asked`): `scripts.evaluate --needle`.
"""

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

import torch
from torch import Tensor

from fathom.model.config import LayerKind
from fathom.model.errors import ConfigError
from fathom.model.files import read_text
from fathom.model.observe.sites import Site
from fathom.model.state import State
from fathom.probes.ablations import random_selection, without_entries, without_selection
from fathom.probes.demo_language import words
from fathom.probes.demo_language.language import VALUE_AT, filler, needle_sentence
from fathom.probes.demo_language.prompts import Prompt, common_prompts, needle_prompts
from fathom.probes.demo_language.vocabulary import vocabulary
from fathom.probes.evaluation import Run, ask, read
from fathom.probes.finding import (
    Finding,
    HeatMap,
    Part,
    Report,
    Table,
    Text,
    at_least,
    at_most,
    judged,
    measured,
    vacuous,
)
from fathom.probes.probe import Probe, Progress, room
from fathom.probes.subject import Subject, selects_all
from fathom.runtime.memory import new_state
from fathom.runtime.text.encoding import before_text
from fathom.runtime.text.segments import Text as Said
from fathom.runtime.text.tokenizer import Tokenizer

WRONG: Final = 9  # other codes that the right one is held against, in English: a guess is right one time in ten
DIGITS: Final = 5  # of a code, in English
LEAST: Final = 64  # tokens of a document for each code that it tells and asks for, in English
MAX_TEXT_BYTES: Final = 64 << 20  # of a text that codes are told in
SENTENCE: Final = re.compile(r"(?<=[.!?\n])\s+")  # what ends one in a given text
TRIES: Final = 1000  # draws of a code with as many tokens as the others
SURE: Final = 3  # standard errors beyond which a count is no luck


class Turn(NamedTuple):
    """A question behind a document, the right answer to it and wrong ones of as many tokens."""

    question: tuple[int, ...]
    right: tuple[int, ...]
    wrong: tuple[tuple[int, ...], ...]
    after: tuple[int, ...]  # the rest of the sentence
    depth: float  # where in the document the answer was told, 0 to 1


class Document(NamedTuple):
    """Tokens to read, and questions that follow each other."""

    length: int  # tokens, as they were asked for
    ids: tuple[int, ...]
    turns: tuple[Turn, ...]

    @property
    def room(self) -> int:
        """Positions of all of it."""
        return len(self.ids) + sum(len(turn.question + turn.right + turn.after) for turn in self.turns)


class Answer(NamedTuple):
    """One question, answered."""

    length: int  # of the document, as it was asked for
    read: int  # tokens read before the answer: the length of a prompt that ends there
    depth: float  # where in the document the answer was told, 0 to 1
    margin: float  # logarithm of the right answer's probability over that of the likeliest wrong one
    greedy: bool  # whether greedy decoding says it
    guess: float  # share of guesses that are right


# --- documents


def of_prompt(prompt: Prompt, length: int) -> Document:
    """A document of the demo's language: one token answers, and all others of its kind are wrong."""
    start, turns = prompt.answers[0].position + 1 - VALUE_AT, list[Turn]()
    end, known = start, vocabulary()
    kinds = [{known[" " + word] for word in kind} for kind in (words.CODES, *words.MARKS.values())]
    for at, answer in enumerate(prompt.answers):
        others = next(kind for kind in kinds if answer.token in kind) - {answer.token}
        question = prompt.ids[end : answer.position + 1]
        following = prompt.answers[at + 1].position + 1 - VALUE_AT if at + 1 < len(prompt.answers) else None
        end = answer.position + 2 if following is None else following
        after = prompt.ids[answer.position + 2 : end]
        wrong = tuple((other,) for other in sorted(others))
        turns.append(Turn(question, (answer.token,), wrong, after, max(answer.source, 0) / answer.position))
    return Document(length, prompt.ids[:start], tuple(turns))


def english(
    tokenizer: Tokenizer, before: Sequence[int], length: int, needles: int, seed: int, *,
    haystack: str | None = None, digits: int = DIGITS,
) -> Document:  # fmt: skip
    """A document of about `length` tokens that tells so many people's codes at even depths, and asks for all of them.

    Parameters
    ----------
    tokenizer
        Of the model.
    before
        What the model reads before a text: BOS, or nothing.
    length, needles, seed
        Another seed, other codes and other people. ConfigError where the codes and questions alone are longer.
    haystack
        The text that they are told in, cut at ends of sentences; ConfigError where it is shorter. None: sentences of
        the demo's language, which are plain English, as many as it takes.
    digits
        Of a code.

    """
    rng = random.Random(f"needles {length} {needles} {seed}")  # noqa: S311 -- documents, not secrets

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode([Said(text)], continued=True))

    names = rng.sample(words.NAMES, needles)
    codes = _codes(ids, rng, needles + WRONG, digits, haystack or "")
    told = [needle_sentence(name, code) for name, code in zip(names, codes, strict=False)]
    budget = length - len(before) - 2 * sum(len(ids(f" {sentence}")) for sentence in told)
    if budget < 0:
        raise ConfigError(f"a document of {length} tokens has no room for {needles} codes and questions for them")
    pieces = _sentences(rng, haystack, lambda text: len(ids(f" {text}")), budget)
    for n in reversed(range(needles)):  # the last first, which moves no place of those before it
        pieces.insert(round(len(pieces) * (n + 0.5) / needles), told[n])
    text, turns = " ".join(pieces), list[Turn]()
    answers = [ids(f" {code}") for code in codes]
    for n in rng.sample(range(needles), needles):
        wrong = rng.sample([answer for answer in answers if answer != answers[n]], WRONG)
        question, _, after = f" {told[n]}".partition(f" {codes[n]}")
        turns.append(Turn(ids(question), answers[n], tuple(wrong), ids(after), text.index(told[n]) / len(text)))
    return Document(length, (*before, *tokenizer.encode_text(text)), tuple(turns))


def _codes(
    ids: Callable[[str], tuple[int, ...]], rng: random.Random, count: int, digits: int, haystack: str
) -> list[str]:
    """Different numbers of as many digits and tokens, none of which stands in the text."""
    found: list[str] = []
    for _ in range(TRIES):
        code = str(rng.randrange(10 ** (digits - 1), 10**digits))
        alike = not found or len(ids(f" {code}")) == len(ids(f" {found[0]}"))
        if alike and code not in found and code not in haystack:
            found.append(code)
        if len(found) == count:
            return found
    raise ConfigError(
        f"found no {count} codes of {digits} digits that have as many tokens each and are not in the text"
    )


def _sentences(rng: random.Random, haystack: str | None, tokens: Callable[[str], int], budget: int) -> list[str]:
    """Sentences of at most `budget` tokens together; ConfigError where the text has not as many."""
    given = iter(SENTENCE.split(haystack.strip())) if haystack is not None else None
    found: list[str] = []
    while True:
        sentence = filler(rng) if given is None else next(given, None)
        if sentence is None:
            raise ConfigError(f"the text ends {budget} tokens before a document of this length does")
        budget -= tokens(sentence)
        if budget < 0:
            return found
        found.append(sentence)


# --- answers


def begun(run: Run, document: Document) -> State:
    """The state behind a document, with room for its questions."""
    state = new_state(run.model, document.room, run.chunk, len(document.ids))
    read(run.model, state, document.ids, run.chunk)
    return state


def asked(run: Run, state: State, document: Document, *, token_by_token: bool = False) -> Iterator[Answer]:
    """Ask a document's questions, one behind the other, the right answers given, in a state that `begun` made.

    Each question is a call of its own, so that its answer is read where generation reads it, off the last row of a
    call; or as many calls as it has tokens.
    """
    model = run.model
    given: tuple[int, ...] = ()
    for turn in document.turns:
        ids, candidates = given + turn.question, (turn.right, *turn.wrong)
        hidden = read(model, state, ids, 1 if token_by_token else run.chunk)
        first, position = _logs(model.logits(hidden[-1:])), state.position
        rest = [first[:0]] * len(candidates)
        if len(turn.right) > 1:
            rest = [_logs(logits) for logits in ask(model, state, [answer[:-1] for answer in candidates])]
        rows = [torch.cat((first, more)) for more in rest]  # [tokens of an answer, vocab] for each
        sums = [
            float(row.gather(1, torch.tensor(one)[:, None]).sum()) for row, one in zip(rows, candidates, strict=True)
        ]
        greedy = tuple(rows[0].argmax(-1).tolist()) == turn.right
        yield Answer(document.length, position, turn.depth, sums[0] - max(sums[1:]), greedy, 1 / len(candidates))
        given = turn.right + turn.after


def _logs(logits: Tensor) -> Tensor:
    """Logarithms of probabilities [t, vocab] float64."""
    return logits.cpu().double().log_softmax(-1)


# --- what they mean

# Ways to run the documents; the last two run those that ask for the most common word.
RUN, EVERYTHING, RANDOM, WINDOW = "the run", "every entry", "random selection", "window only"
ARTICLES: Final = {EVERYTHING: "", RANDOM: "a ", WINDOW: "the "}
WORDS, WORDS_WINDOW = "most common word, the run", "most common word, HCA window only"

# The demo checkpoint finds every code at every length from 256 to 16384 (audits/demo-checkpoint.md). One miss in twenty
# leaves room for other numerics, and none for a fault that hits one prompt length in four or one depth in ten.
FOUND = at_least(0.95)
# What luck leaves without the right entries: one code in 90; more with random entries, which in the shortest documents
# are a quarter of all.
BY_CHANCE, BY_WINDOW = at_most(0.5), at_most(0.2)
# Three of the four words have a sixth of the mentions each: guesses are right one time in four, and a lucky handful of
# documents may double that.
COUNTED, NOT_COUNTED = at_least(0.9), at_most(0.7)
DEPTHS: Final = 10  # columns of a map
RATIO, BLOCK = 4, 128  # tokens of an entry in DeepSeek's CSA and HCA layers
BLOCK_PART: Final = 16  # prompt lengths mod 128 that share a row

Right = Callable[[Answer], bool]


def written(answer: Answer) -> bool:
    """Whether greedy decoding says it: what the demo, which was trained for it, is held to."""
    return answer.greedy


def told_apart(answer: Answer) -> bool:
    """Whether it is likelier than wrong ones: what any base model can show."""
    return answer.margin > 0


def share(answers: Sequence[Answer], right: Right) -> float:
    """How many of the answers are right."""
    return sum(map(right, answers)) / len(answers)


def grouped(answers: Sequence[Answer], key: Callable[[Answer], int]) -> dict[int, list[Answer]]:
    """The answers by a key, ascending."""
    groups: dict[int, list[Answer]] = {}
    for answer in answers:
        groups.setdefault(key(answer), []).append(answer)
    return dict(sorted(groups.items()))


def guesses(answers: Sequence[Answer]) -> float:
    """The largest share that guessing explains: its own, and three standard errors of it."""
    chance = sum(answer.guess for answer in answers) / len(answers)
    return chance + SURE * sqrt(chance * (1 - chance) / len(answers))


def demo_findings(found: Mapping[str, Sequence[Answer]]) -> Iterator[Finding]:
    """The run's recall, all in all, by length and by residue; and what the other ways find, which must be little."""
    run = found[RUN]
    residues = {residue: share(group, written) for residue, group in grouped(run, lambda a: a.read % RATIO).items()}
    worst = min(residues, key=residues.__getitem__)
    missed = [f"length {a.length}, prompt of {a.read}, depth {a.depth:.2f}" for a in run if not written(a)]
    yield judged("recall", share(run, written), FOUND, questions=len(run), missed=missed[:8])
    for length, group in grouped(run, lambda a: a.length).items():
        yield judged(f"recall at {length} tokens", share(group, written), FOUND, questions=len(group))
    yield judged(f"recall at the worst prompt length mod {RATIO}", residues[worst], FOUND, residue=worst)
    yield measured("smallest margin of a right code", min(answer.margin for answer in run), "logits")
    yield _control("recall with a random selection", share(found[RANDOM], written), BY_CHANCE.value)
    yield _control("recall with the window only", share(found[WINDOW], written), BY_WINDOW.value)
    if WORDS in found:
        yield judged("most common word", share(found[WORDS], written), COUNTED, questions=len(found[WORDS]))
        what = "most common word with the window only in HCA layers"
        yield _control(what, share(found[WORDS_WINDOW], written), NOT_COUNTED.value)


def english_findings(found: Mapping[str, Sequence[Answer]]) -> Iterator[Finding]:
    """What selection loses against attending to every entry; vacuous where neither finds more than guesses would.

    Nothing is known of how well a model should do. But what it tells apart when it attends to everything it should tell
    apart by selection too, up to luck: of the questions that one of the two answers alone, the difference of the counts
    has a standard error of the root of their number where neither is better.
    """
    run, everything = found[RUN], found[EVERYTHING]
    most, here, there = guesses(run), share(run, told_apart), share(everything, told_apart)
    what = "codes told apart by attending to every entry and not by selection, less those the other way"
    if max(here, there) <= most:
        why = f"{here:.0%} of the codes are told apart, {there:.0%} without selection, no more than guesses: {most:.0%}"
        yield vacuous(what, f"{why}; a model that cannot do the task shows nothing by it")
    else:
        pairs = [(told_apart(one), told_apart(other)) for one, other in zip(run, everything, strict=True)]
        lost, gained = pairs.count((False, True)), pairs.count((True, False))
        yield judged(what, lost - gained, at_most(SURE * sqrt(lost + gained)), lost=lost, gained=gained)
    yield measured("codes told apart", here, questions=len(run), guesses=most)
    yield measured("codes told apart, every entry attended", there)
    yield measured("codes written by greedy decoding", share(run, written))
    for way in (RANDOM, WINDOW):
        # half of what the run has more than guesses: with as much by chance, or without, nothing needed to be selected
        bound = most + max(0.0, here - most) / 2
        yield _control(f"codes told apart, {way}", share(found[way], told_apart), bound)


def _control(what: str, right: float, most: float) -> Finding:
    """A way that must not find the answers: where it does, the task needs nothing that the run has more of."""
    if right <= most:
        return judged(what, right, at_most(most))
    return vacuous(what, f"{right:.0%} of the answers are right all the same, more than {most:.0%}")


def depth_map(way: str, answers: Sequence[Answer], right: Right) -> HeatMap:
    """Recall by the length of the document and by how deep in it the value stands."""
    by_length = grouped(answers, lambda a: a.length)
    values = []
    for group in by_length.values():
        cells = grouped(group, lambda a: min(int(a.depth * DEPTHS), DEPTHS - 1))
        values.append([share(cells[i], right) if i in cells else None for i in range(DEPTHS)])
    return HeatMap(
        f"Codes found, {way}",
        "depth: where in the prompt the code was told",
        "tokens",
        tuple(f"{i / DEPTHS:.1f}" for i in range(DEPTHS)),
        tuple(map(str, by_length)),
        values,
        "Share of right answers. Empty: nothing was told there.",
    )


def by_length(found: Mapping[str, Sequence[Answer]], ways: Sequence[str], title: str, right: Right) -> Table:
    """Share of right answers in each way, and the run's margins."""
    rows: list[list[float | str | None]] = []
    for length, group in grouped(found[ways[0]], lambda a: a.length).items():
        shares = [share([a for a in found[way] if a.length == length], right) for way in ways]
        margins = [a.margin for a in group]
        rows.append([length, len(group), *shares, min(margins), sum(margins) / len(margins)])
    columns = ("tokens", "questions", *ways, "smallest margin", "mean margin")
    note = f"Margins of {ways[0]}, in logits: the right answer above the likeliest wrong one."
    return Table(title, columns, rows, note)


def by_residue(run: Sequence[Answer], right: Right) -> Table:
    """The run's recall and margins by the length of the prompt that an answer ends, mod 4 and mod 128."""
    groups = {f"{r} mod {RATIO}": group for r, group in grouped(run, lambda a: a.read % RATIO).items()}
    for part, group in grouped(run, lambda a: a.read % BLOCK // BLOCK_PART).items():
        groups[f"{part * BLOCK_PART} to {(part + 1) * BLOCK_PART - 1} mod {BLOCK}"] = group
    rows: list[list[float | str | None]] = [
        [name, len(group), share(group, right), min(a.margin for a in group), sum(a.margin for a in group) / len(group)]
        for name, group in groups.items()
    ]
    columns = ("prompt length", "questions", "recall", "smallest margin", "mean margin")
    return Table("By prompt length", columns, rows, "An entry closes every 4 tokens in CSA layers, every 128 in HCA.")


def report(found: Mapping[str, Sequence[Answer]]) -> Report:
    """All of it; a model that was asked in English has been asked without selection too."""
    demo, run = EVERYTHING not in found, found[RUN]
    right, ways = written if demo else told_apart, [way for way in (RUN, EVERYTHING, RANDOM, WINDOW) if way in found]
    short, long = (end(answer.length for answer in run) for end in (min, max))
    span = f"{short} tokens" if short == long else f"{short} to {long} tokens"
    others = ", ".join(f"with {ARTICLES[way]}{way} {share(found[way], right):.1%}" for way in ways[1:])
    margins = f"the smallest margin being {min(answer.margin for answer in run):.2g} logits"
    summary = (
        f"{share(run, right):.1%} of {len(run)} codes are {'found' if demo else 'told apart from wrong ones'} in"
        f" documents of {span}, {margins}; {others}"
    )
    parts: list[Part] = [depth_map(way, found[way], right) for way in ways]
    parts += [by_length(found, ways, "Codes by length", right), by_residue(run, right)]
    if WORDS in found:
        summary += (
            f". The most common word is right in {share(found[WORDS], right):.1%}, without HCA entries in"
            f" {share(found[WORDS_WINDOW], right):.1%}"
        )
        parts.append(by_length(found, (WORDS, WORDS_WINDOW), "Most common word by length", right))
    elif demo:
        parts.append(Text("Most common word", "Not asked: the model has no HCA layer."))
    findings = demo_findings(found) if demo else english_findings(found)
    return Report(f"{summary}.", tuple(findings), tuple(parts), DEMO_SHOWS if demo else ENGLISH_SHOWS)


DEMO_SHOWS: Final = """\
Documents come from the generator that made the training data, with other seeds: this says that the runtime keeps what
the checkpoint can use, not that a model of this size understands text. A fault that misplaces few entries may leave
every answer right; `recall` and `same` look closer. Beyond the lengths it was trained on (2048) the model
extrapolates, and a loss there is the model's until another runtime disagrees."""
ENGLISH_SHOWS: Final = """\
How much a model should find is not known, so its recall has no bound: what has one is what selection loses against
attending to every entry, which the model was not trained with. A fault that misplaces few entries may leave every
answer right; `recall` and `same` look closer."""


@dataclass(frozen=True)
class Needle(Probe):
    """Ask documents for codes told once in them; the fields are knobs."""

    name: ClassVar[str] = "needle"
    question: ClassVar[str] = "Is a code told once found again at every depth and length, and only by selecting it?"
    reads: ClassVar[tuple[Site, ...]] = ()
    background: ClassVar[str] = """\
A CSA layer remembers a long text as one entry per four tokens and attends, for each token, to the few that its indexer
selects. A runtime whose indexer is off, or ranks by the wrong numbers, still writes fluent text and answers short
prompts, because the sliding window holds those. What it loses is a detail told once, long ago.

So documents of filler tell people's codes, each once, and end with questions for them ("The code of Alice is"). The
demo is asked in its own language, and an answer counts when the right code has the highest logit, the words before it
being given; another model is asked in English, and an answer counts when the right code is likelier than nine wrong
ones, which a base model can show too. Each question is a call of its own, so that its answer is read where generation
reads it, off the last row of a call, at prompt lengths of every residue: one public fault gave a wrong last digit at
one prompt length in four.

The same documents are run with a *random selection* (as many entries, drawn at random) and with the *window only*. If
those found the codes too, the task would not need the selection, and the run would show nothing. In English they are
run with *every entry* attended to as well: what that finds, selection should find. The demo's HCA layers have a task of
their own: the most common word of four in the whole text, which no small selection holds."""
    noticed: ClassVar[str] = """\
- Most injected faults that no tripwire stops pass here (see faults.md): a wrong RoPE base, a dropped YaRN, entries
  without rotation, a ring read one row off, a transposed mHC matrix, a dropped ReLU, a few lost keys, FP4 nibbles
  swapped. A needle test that passes says little about a runtime. This one is for the indexer; the other pages are for
  the rest.
- Where a most common word is wrong, it is the checkpoint's error: transformers says the same from the same weights.
  demo-checkpoint.md asks the same of other documents, drawn from other seeds, and of other lengths, and all are right
  there.
- A random selection finds some of the codes in short documents, where it is a large part of all entries, and none in
  long ones."""

    # The demo's language: (length of documents in tokens, how many, codes asked for in each)
    codes: tuple[tuple[int, int, int], ...] = ((256, 8, 8), (1024, 4, 24), (4096, 2, 24), (8192, 2, 24))
    # (length of documents in tokens, how many); three words are asked for in each
    words: tuple[tuple[int, int], ...] = ((512, 4), (2048, 3))
    # English: lengths, as multiples of the tokens up to which every entry is selected; how many of each; codes in each
    lengths: tuple[int, ...] = (2, 4)
    documents: int = 3
    needles: int = 8
    digits: int = DIGITS
    haystack: str = ""  # file of a text that the codes are told in; also the demo is asked in English then

    def needs(self, subject: Subject) -> str | None:
        """Say why this checkpoint cannot be asked."""
        if LayerKind.CSA not in subject.config.layer_kinds:
            return "the model has no CSA layer, so there is no selection to find anything by"
        if subject.prompt is not None:
            return "it makes its own documents, and would not read the given text: --set haystack=FILE does"
        if self._demo(subject):
            return room(subject, max(length for length, *_ in (*self.codes, *self.words)))
        if not (subject.directory / "tokenizer.json").exists():
            return "the checkpoint has no tokenizer.json to read a document with"
        return room(subject, max(self._lengths(subject)))

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """Ask for codes with the run's selection, a random one and none; for words with HCA layers and without."""
        ops, seed, demo = subject.ops, subject.seed, self._demo(subject)
        codes = [*(self._in_demo(seed) if demo else self._in_english(subject))]
        ways = [(RUN, codes, ops)]
        if not demo:
            ways.append((EVERYTHING, codes, without_selection(ops)))
        ways.append((RANDOM, codes, random_selection(ops, seed)))
        ways.append((WINDOW, codes, without_entries(ops, csa=True, hca=False)))
        if demo and LayerKind.HCA in subject.config.layer_kinds:
            words = [of_prompt(one, n) for n, count in self.words for one in common_prompts(n, count, seed)]
            ways += [(WORDS, words, ops), (WORDS_WINDOW, words, without_entries(ops, csa=False, hca=True))]
        whole = sum(document.room for _, documents, _ in ways for document in documents)
        done, found = 0, dict[str, list[Answer]]()
        for way, documents, changed in ways:
            run, found[way] = Run(way, subject.load(ops=changed).model, subject.options.prefill_chunk), []
            for document in documents:
                progress(done / whole, f"{way}, {document.length} tokens")
                found[way] += asked(run, begun(run, document), document)
                done += document.room
        return report(found)

    def _demo(self, subject: Subject) -> bool:
        """Whether the demo's language is what is asked in."""
        return subject.speaks_demo_language and not self.haystack

    def _in_demo(self, seed: int) -> Iterator[Document]:
        for length, count, questions in self.codes:
            for prompt in needle_prompts(length, count, seed, questions):
                yield of_prompt(prompt, length)

    def _in_english(self, subject: Subject) -> Iterator[Document]:
        tokenizer = Tokenizer(subject.directory, subject.config.vocab_size)
        before = tokenizer.encode(before_text(subject.config, tokenizer))
        text = read_text(Path(self.haystack), MAX_TEXT_BYTES, ConfigError) if self.haystack else None
        for length in self._lengths(subject):
            for number in range(self.documents):
                seed = subject.seed * self.documents + number
                yield english(tokenizer, before, length, self.needles, seed, haystack=text, digits=self.digits)

    def _lengths(self, subject: Subject) -> list[int]:
        """Of documents in English: where not every entry is selected, and the codes have room."""
        return [max(multiple * selects_all(subject.config), LEAST * self.needles) for multiple in self.lengths]


FULL = Needle()
QUICK = Needle(codes=((512, 1, 8),), words=((256, 2),), lengths=(2,), documents=2)
