"""Evaluation prompts of the demo language: token ids and what must come after them."""

import random
from dataclasses import dataclass

from fathom.probes.demo_language import words
from fathom.probes.demo_language.language import (
    Answer,
    Document,
    encode,
    fact_sentence,
    mark_document,
    needle_document,
)
from fathom.probes.demo_language.vocabulary import ASSISTANT, BOS, END_THINK, EOS, USER, vocabulary

MOST_NEEDLES = 24
GAP = 128
SHORTEST = {"needle": 64, "common": 192}  # tokens that what is told, and the question for it, always fit into


@dataclass(frozen=True)
class Prompt:
    """Ids to feed, BOS first, and the answers: after `answers[i].position`, the token `answers[i].token` must come.

    A prompt with one answer ends right before it. With several, all questions but the last are answered in the ids
    (teacher forcing), so that one forward pass measures all of them.
    """

    kind: str
    ids: tuple[int, ...]
    answers: tuple[Answer, ...]

    @property
    def answer(self) -> int:
        """The token that must come after the last id."""
        return self.answers[-1].token


def cut(document: Document) -> Prompt:
    """The document up to its last answer, which is left out."""
    last = document.answers[-1].position
    return Prompt(document.kind, tuple(document.ids[: last + 1]), tuple(document.answers))


def needle_prompts(length: int, count: int, seed: int, questions: int = 1, *, chat: bool = False) -> list[Prompt]:
    """`count` documents of about `length` tokens with codes in them, each asked for `questions` of the codes.

    A document of n tokens holds n / 24 codes, at least 4 and at most 24; those that are asked for end at least 128
    tokens (a quarter of the document where it is shorter than 512) before the first question.
    """
    needles = max(4, questions, min(MOST_NEEDLES, length // 24))
    rng = random.Random(f"needles {length} {seed}")  # noqa: S311 -- documents, not secrets
    gap = min(GAP, length // 4)
    return [cut(needle_document(rng, length, needles, questions, chat=chat, gap=gap)) for _ in range(count)]


def common_prompts(length: int, count: int, seed: int, *, chat: bool = False) -> list[Prompt]:
    """`count` documents of about `length` tokens, each asked for its most common color, animal and fruit.

    In a conversation, for one to three of them, each in its turn.
    """
    rng = random.Random(f"marks {length} {seed}")  # noqa: S311 -- documents, not secrets
    return [cut(mark_document(rng, length, chat=chat)) for _ in range(count)]


def reply(document: Document) -> Prompt:
    """The first reply of a conversation: every token of it, the end included, is an answer.

    When each of them is the likeliest token after those before it, greedy decoding writes exactly this reply.
    """
    start = document.ids.index(END_THINK) + 1
    end = document.ids.index(EOS, start)
    answers = tuple(Answer(i - 1, document.ids[i]) for i in range(start, end + 1))
    return Prompt(f"{document.kind} reply", tuple(document.ids[:end]), answers)


def needle_replies(length: int, count: int, seed: int) -> list[Prompt]:
    """Conversations that ask for one code of a document of about `length` tokens."""
    rng = random.Random(f"needle replies {length} {seed}")  # noqa: S311 -- documents, not secrets
    needles, gap = max(4, min(MOST_NEEDLES, length // 24)), min(GAP, length // 4)
    return [reply(needle_document(rng, length, needles, 1, chat=True, gap=gap)) for _ in range(count)]


def common_replies(length: int, count: int, seed: int) -> list[Prompt]:
    """Conversations that ask for what is most common in a document of about `length` tokens."""
    rng = random.Random(f"mark replies {length} {seed}")  # noqa: S311 -- documents, not secrets
    return [reply(mark_document(rng, length, chat=True)) for _ in range(count)]


def fact_prompts(*, chat: bool = False) -> list[Prompt]:
    """The 228 facts that were taught, each cut right before its value: 57 countries, four relations."""
    prompts = []
    for row in words.FACTS:
        for relation, value in zip(words.RELATIONS, row[1:], strict=True):
            said = encode(fact_sentence(relation, row[0], value), opening=True)
            token = vocabulary()[" " + value.split(" ")[0]]
            question = encode(f"What is the {relation} of {row[0]}?", opening=True)
            before = [BOS, USER, *question, ASSISTANT, END_THINK] if chat else [BOS]
            ids = (*before, *said[: said.index(token)])
            prompts.append(Prompt(relation, ids, (Answer(len(ids) - 1, token),)))
    return prompts
