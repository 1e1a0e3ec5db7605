"""What a state still knows of its document, by questions for codes that the document told once each.

Every question starts from a copy of the state and is one call, " The code of NAME is"; it counts as right when the
likeliest next token is the code. A guess is right in 1 of 90 cases.
"""

import random
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Final, NamedTuple

import torch
from torch import Tensor

from model.choices import CODED_BITS
from model.state import State
from model.variants.choice import GroupedCoda
from model.variants.coda_merge import Kept
from probes.demo_language.language import encode, needle_document
from probes.demo_language.prompts import fact_prompts
from runtime.generate import prefill
from runtime.load import LoadedLlama
from runtime.memory import new_state
from runtime.merge import merge
from runtime.quantised_state import load_any_state, quantise_state
from runtime.statefile import save_state

CODES: Final = 8  # told and asked for in each document
FACTS: Final = 8  # asked after each document: the model knows them by heart
ROOM: Final = 24  # tokens of the longest question and more
QUESTION: Final = encode("The code of Alice is")
NAME: Final = 3  # of its tokens
# Rows and columns.
BOUNDED: Final = "adapters, bounded"
IN_ONE_GO: Final = "both read in one go"
MERGED: Final = "merged"
UNMOVED: Final = "merged, keys where they were"
ABOUT: Final = ("about the first", "about the second")
BOTH: Final = "about both"
RECENT: Final = "codes in the window"
OLDER: Final = "codes before it"
KNOWN: Final = "facts"


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


@dataclass
class Score:
    """Right answers of all, and how far from another state's distribution."""

    right: int = 0
    total: int = 0
    nats: list[float] = field(default_factory=list)  # KL of the next token after each token of each question
    shares: list[float] = field(default_factory=list)  # of right answers, by what was added up

    @property
    def share(self) -> float:
        """Of right answers; NaN where nothing was asked."""
        return self.right / self.total if self.total else float("nan")

    @property
    def error(self) -> float:
        """Standard error of the mean share over what was added up; 0 of a single one."""
        return stdev(self.shares) / len(self.shares) ** 0.5 if len(self.shares) > 1 else 0.0

    def to_json(self) -> dict[str, object]:
        """Return what was counted, and of the distances the mean and the largest; None where there are none."""
        nats = {"kl_mean": fmean(self.nats) if self.nats else None, "kl_max": max(self.nats, default=None)}
        return {"right": self.right, "total": self.total, "shares": self.shares} | nats

    def add(self, other: "Score") -> None:
        """Take in what another document showed."""
        self.shares += [other.share] if other.total else []
        self.right, self.total, self.nats = (
            self.right + other.right,
            self.total + other.total,
            self.nats + other.nats,
        )


class Scores(dict[str, dict[str, Score]]):
    """What was asked of each kind of state: row -> column -> score."""

    def add(self, row: str, column: str, score: Score) -> None:
        """Take in what one document showed."""
        self.setdefault(row, {}).setdefault(column, Score()).add(score)


def documents(length: int, seed: int, count: int) -> list[Given]:
    """`count` documents of about `length` tokens, no name of which has a code in another."""
    rng = random.Random(f"database {length} {seed}")  # noqa: S311 -- documents, not secrets
    found: list[Given] = []
    taken: set[int] = set()
    while len(found) < count:
        made = needle_document(rng, length + 7 * CODES, CODES, CODES, chat=False)
        codes = [
            Question(made.ids[answer.position + 1 - len(QUESTION) : answer.position + 1], answer.token, answer.source)
            for answer in made.answers
            if answer.source >= 0
        ]
        names = {question.ids[NAME] for question in codes}
        if names & taken:
            continue
        taken |= names
        end = min(answer.position for answer in made.answers if answer.source >= 0) + 1 - len(QUESTION)
        facts = [
            Question([QUESTION[0], *prompt.ids[2:]], prompt.answer, -1) for prompt in rng.sample(fact_prompts(), FACTS)
        ]
        found.append(Given(made.ids[:end], codes, facts))
    return found


def read(loaded: LoadedLlama, ids: Sequence[int], room: int = ROOM) -> State:
    """The state after a document, with room for more tokens."""
    state = new_state(loaded.model, len(ids) + room, 512, len(ids))
    prefill(loaded.model, state, ids, lambda _: None)
    return state


@torch.inference_mode()
def ask(loaded: LoadedLlama, state: State, questions: Iterable[Question]) -> list[Tensor]:
    """Logits [t, vocab] float32 after each token of each question, each of which starts from `state`."""
    model = loaded.model
    return [model.logits(model(torch.tensor(question.ids), deepcopy(state))).float() for question in questions]


def score(found: Sequence[Tensor], questions: Sequence[Question], exact: Sequence[Tensor] | None = None) -> Score:
    """Count the answers that are likeliest; with `exact`, how far each distribution is from the one of that."""
    right = sum(int(logits[-1].argmax()) == question.answer for logits, question in zip(found, questions, strict=True))
    nats: list[float] = []
    for logits, wanted in zip(found, exact, strict=True) if exact is not None else ():
        p, q = wanted.log_softmax(-1), logits.log_softmax(-1)
        nats += (p.exp() * (p - q)).sum(-1).tolist()
    return Score(right, len(questions), nats)


def parts(given: Given, window: int) -> dict[str, list[Question]]:
    """The questions of a document, by what a bounded state can know of their answers."""
    recent = len(given.ids) - window
    return {
        RECENT: [question for question in given.codes if question.told >= recent],
        OLDER: [question for question in given.codes if question.told < recent],
        KNOWN: given.facts,
    }


@dataclass
class Files:
    """What was seen of the files of bounded states."""

    nbytes: dict[str, int] = field(default_factory=dict)  # of a file, by row
    equal: int = 0  # questions whose logits after loading are those of the state that was saved, bit by bit
    asked: int = 0


def measure_full(scores: Scores, row: str, loaded: LoadedLlama, given: Given, window: int) -> None:
    """Ask one state, that of a run of any cache."""
    state = read(loaded, given.ids)
    for column, questions in parts(given, window).items():
        scores.add(row, column, score(ask(loaded, state, questions), questions))


def measure_coded(scores: Scores, files: Files, loaded: LoadedLlama, given: Given, folder: Path) -> None:
    """Ask the bounded state of a document, exact and coded, through files."""
    variant = loaded.model.arithmetic.formats.variant(0)
    assert isinstance(variant, GroupedCoda), str(variant)
    live, exact = read(loaded, given.ids), folder / "exact"
    save_state(exact, live, loaded, None)
    rows = {BOUNDED: exact} | {f"{BOUNDED}, {bits} bits": folder / str(bits) for bits in CODED_BITS}
    wanted: dict[str, list[Tensor]] = {}
    for bits in CODED_BITS:
        quantise_state(exact, bits, folder / str(bits))
    for row, path in rows.items():
        state = new_state(loaded.model, len(given.ids) + ROOM, 512, len(given.ids))
        load_any_state(path, state, loaded)
        files.nbytes[row] = path.stat().st_size
        for column, questions in parts(given, variant.window).items():
            found = ask(loaded, state, questions)
            scores.add(row, column, score(found, questions, wanted.setdefault(column, found)))
            if path == exact:
                files.equal += sum(map(torch.equal, found, ask(loaded, live, questions)))
                files.asked += len(questions)


def measure_merged(scores: Scores, kept: dict[str, list[Kept]], loaded: LoadedLlama, pair: Sequence[Given]) -> None:
    """Ask what two documents become in one bounded state about the first and about the second of them.

    `kept` gets what each way of merging kept. For the way that moves no key the longer document is the second.
    """
    a, b = pair
    states = {"the first alone": read(loaded, a.ids), "the second alone": read(loaded, b.ids)}
    states[IN_ONE_GO] = read(loaded, [*a.ids, *b.ids[1:]])
    for row, shift in ((MERGED, None), (UNMOVED, 0)):
        first, second = sorted(pair, key=lambda given: len(given.ids)) if shift == 0 else pair
        states[row] = read(loaded, first.ids, len(second.ids) + ROOM)
        kept.setdefault(row, []).append(merge(loaded, states[row], read(loaded, second.ids), shift))
    for row, state in states.items():
        about = [score(ask(loaded, state, given.codes), given.codes) for given in pair]
        for column, found in zip(ABOUT, about, strict=True):
            scores.add(row, column, found)
        both = Score(about[0].right + about[1].right, about[0].total + about[1].total)
        scores.add(row, BOTH, both)
