"""A document of the demo language as long as a context, with codes told in it at known places."""

import random
from dataclasses import dataclass

from probes.demo_language import words
from probes.demo_language.language import (
    NEEDLE_TOKENS,
    VALUE_AT,
    encode,
    fact,
    fact_sentence,
    filler,
    first_word_opens,
    needle_sentence,
)
from probes.demo_language.vocabulary import BOS

SHORTEST = 1024  # tokens of the first stretch; each of the next ones is as long as all before it
FACTS = 0.1  # of the sentences, as in the documents that the demo was trained on
GAP = 128  # tokens between a code and the first question for it, at least
# Before each mark: a question, the tokens that are decoded there, and what is left of the last sentence.
RESERVED = 64


@dataclass(frozen=True)
class Code:
    """One code of the document, told once."""

    name: str
    code: str
    position: int  # of its value, in the document

    @property
    def question(self) -> list[int]:
        """Ids up to the value: "The code of Alice is"."""
        return encode(needle_sentence(self.name, self.code))[:VALUE_AT]

    @property
    def token(self) -> int:
        """The right answer."""
        return encode(needle_sentence(self.name, self.code))[VALUE_AT]


@dataclass(frozen=True)
class Document:
    """Token ids, the ends of sentences among them, and the codes in the order in which they are told."""

    ids: list[int]
    ends: list[int]  # number of tokens up to and with each sentence
    codes: list[Code]

    def stop_before(self, mark: int) -> int:
        """How many tokens to read so that a sentence ends and RESERVED tokens are left before `mark`."""
        return max(end for end in self.ends if end <= mark - RESERVED)

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
            _, name, code = due.pop(0)
            told.append(Code(name, code, len(ids) + VALUE_AT))
            ids += encode(needle_sentence(name, code), opening=len(ids) == 1)
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
