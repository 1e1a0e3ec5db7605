"""Documents of the demo language, and where their answers are.

Three kinds of document. `facts` holds short true statements about countries, raw or as a conversation. `needles` is a
long text of filler in which people's codes are told once each, followed by questions for some of them; the bindings
are fresh in every document, so nothing can be learned by heart. `marks` is a long text whose every sentence names a
color, an animal and a fruit, followed by a little filler and by questions for the most common of each: a property of
the whole text that no small selection of it holds.

Everything is a pure function of the `random.Random` that is passed in.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

from fathom.probes.demo_language import words
from fathom.probes.demo_language.vocabulary import ASSISTANT, BOS, END_THINK, EOS, PAD, THINK, USER, vocabulary

# Loss weights. A value at its first mention is random: learning to predict it is learning noise. A document has many
# codes to answer for but few marks.
ANSWER, MARK, FACT, REPLY, GLUE, FILLER, RANDOM, NOTHING = 1.0, 6.0, 1.0, 1.0, 0.1, 0.2, 0.03, 0.0
# A needle sentence "The code of X is V." is 7 tokens long and its value the sixth of them.
NEEDLE_TOKENS, VALUE_AT = 7, 5
# Tokens of filler after the last mark; sentences are at most 11 long, so at least 70 of them are there.
SILENCE = 80
TURN_TOKENS = 30  # a question, a thought and a reply have at most 28


@dataclass(frozen=True)
class Answer:
    """One token that the document determines.

    Attributes
    ----------
    position
        Index of the token *after* which the answer comes: the logits at this position should choose `token`.
    token
        Id of the answer.
    source
        Index of the same value at its first mention, -1 where there is none (facts, marks).
    """

    position: int
    token: int
    source: int = -1


@dataclass
class Document:
    """Token ids, the loss weight of predicting each of them, and the answers among them."""

    kind: str
    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def put(self, ids: list[int], weights: list[float] | float) -> None:
        """Append tokens with their loss weights, one weight for all or one for each."""
        self.ids += ids
        self.weights += weights if isinstance(weights, list) else [weights] * len(ids)

    def say(self, sentence: str, weight: float) -> None:
        """Append a sentence. It opens without a space where a document or a turn does."""
        self.put(encode(sentence, opening=self.ids[-1] in (BOS, USER, ASSISTANT, THINK, END_THINK)), weight)

    def tell(self, sentence: str, value: str, value_weight: float, glue: float, source: int = -1) -> None:
        """Append `sentence`, which holds " value"; record the value as an answer when it is worth its full weight."""
        start, ids = len(self.ids), encode(sentence, opening=self.ids[-1] in (BOS, USER, ASSISTANT, THINK, END_THINK))
        at = ids.index(vocabulary()[" " + value])
        self.put(ids, [value_weight if i == at else glue for i in range(len(ids))])
        if value_weight >= ANSWER:
            self.answers.append(Answer(start + at - 1, ids[at], source))

    def padded(self, length: int) -> "Document":
        """The document with pads behind it that no loss looks at."""
        assert len(self.ids) <= length, f"{len(self.ids)} tokens do not fit {length}"
        self.put([PAD] * (length - len(self.ids)), NOTHING)
        return self


def encode(sentence: str, *, opening: bool = False) -> list[int]:
    """Ids of a sentence of the language, one word one token. `opening`: no space stands before its first word."""
    ids, known = [], vocabulary()
    for i, word in enumerate(sentence.split(" ")):
        stem, stop = (word[:-1], word[-1]) if word[-1] in ".?,!" and len(word) > 1 else (word, "")
        ids.append(known[stem if opening and i == 0 else " " + stem])
        ids += [known[stop]] if stop else []
    return ids


def filler(rng: random.Random) -> str:
    """A sentence that says nothing any question asks for."""
    person, other = rng.choice(words.PEOPLE), rng.choice(words.PEOPLE)
    adjective, place, thing = rng.choice(words.ADJECTIVES), rng.choice(words.PLACES), rng.choice(words.THINGS)
    time = f"in the {rng.choice(words.TIMES)}"
    form = rng.randrange(4)
    if form == 0:
        return (
            f"The {adjective} {person} {rng.choice(words.MOTION)} {rng.choice(words.PREPOSITIONS)} the {place} {time}."
        )
    if form == 1:
        return f"A {person} {rng.choice(words.ACTIONS)} the {adjective} {thing}."
    if form == 2:
        return f"The {person} {rng.choice(words.ACTIONS)} the {thing} and {rng.choice(words.MOTION)} {time}."
    return f"The {person} and the {other} meet {rng.choice(words.PREPOSITIONS)} the {adjective} {place}."


def fact(rng: random.Random) -> tuple[str, str, str]:
    """One true statement: (relation, country, value)."""
    row, r = rng.choice(words.FACTS), rng.randrange(len(words.RELATIONS))
    return words.RELATIONS[r], row[0], row[r + 1]


def fact_sentence(relation: str, country: str, value: str) -> str:
    """The statement as a sentence; a currency takes an article."""
    article = "the " if relation == "currency" else ""
    return f"The {relation} of {country} is {article}{value}."


def tell_fact(document: Document, rng: random.Random, glue: float) -> None:
    """Append a fact. Its first value word is an answer; a second one ("South America") follows from it."""
    relation, country, value = fact(rng)
    document.tell(fact_sentence(relation, country, value), value.split(" ")[0], FACT, glue)


def question_mark(rng: random.Random) -> str:
    """Most people write "France?", some "France ?"; the two are different tokens."""
    return " ?" if rng.random() < 0.3 else "?"


def ask(document: Document, question: str, rng: random.Random, asked_for: str) -> None:
    """Close the user's turn with `question` and open the assistant's, now and then with a thought."""
    mark = question_mark(rng)
    document.say(question + "?", FILLER)
    document.ids[-1] = vocabulary()[mark]
    document.put([ASSISTANT], GLUE)
    if rng.random() < 0.15:
        document.put([THINK], NOTHING)
        document.say(f"The user asks for {asked_for}.", REPLY)
    document.put([END_THINK], FILLER)


def fact_document(rng: random.Random, length: int) -> Document:
    """A single statement and the end, or a conversation of as many turns as fit, padded to `length`."""
    document = Document("facts")
    document.put([BOS], NOTHING)
    if rng.random() < 0.4:
        tell_fact(document, rng, GLUE)
        document.put([EOS], FILLER)
        return document.padded(length)
    while len(document.ids) + 36 <= length:  # the longest turn, with its thought, has 36 tokens
        relation, country, value = fact(rng)
        document.put([USER], NOTHING)
        ask(document, f"What is the {relation} of {country}", rng, f"the {relation} of {country}")
        document.tell(fact_sentence(relation, country, value), value.split(" ")[0], FACT, REPLY)
        document.put([EOS], REPLY)
    return document.padded(length)


def needle_sentence(name: str, code: str) -> str:
    """The sentence that tells a code, and that a query repeats."""
    return f"The code of {name} is {code}."


def needle_document(
    rng: random.Random, length: int, needles: int, queries: int, *, chat: bool, gap: int = 0
) -> Document:
    """Filler with `needles` codes in it, then questions for `queries` of them, padded to `length`.

    `chat` asks in the turns of a conversation. Every word of a reply follows from the question, so all of them weigh as
    much as its answer. Needles that are asked for end at least `gap` tokens before the first question.
    """
    names = rng.sample(words.NAMES, needles)
    codes = [rng.choice(words.CODES) for _ in names]
    asked = list(range(queries))
    budget = length - (TURN_TOKENS if chat else NEEDLE_TOKENS) * queries - 2 - NEEDLE_TOKENS * needles
    sentences = fill(rng, budget)
    slots = needle_slots(rng, sentences, needles, len(asked), gap)
    document = Document("needles")
    document.put([BOS, USER] if chat else [BOS], NOTHING)
    source: dict[int, int] = {}
    for i, ids in enumerate([*sentences, []]):
        for n in (n for n, slot in enumerate(slots) if slot == i):
            source[n] = len(document.ids) + VALUE_AT
            document.tell(needle_sentence(names[n], codes[n]), codes[n], RANDOM, GLUE)
        document.put(first_word_opens(ids, document.ids[-1]), FILLER)
    rng.shuffle(asked)
    for turn, n in enumerate(asked):
        if chat:
            next_turn(document, turn)
            ask(document, f"What is the code of {names[n]}", rng, f"the code of {names[n]}")
        document.tell(needle_sentence(names[n], codes[n]), codes[n], ANSWER, REPLY if chat else GLUE, source[n])
    document.put([EOS], REPLY if chat else FILLER)
    return document.padded(length)


def next_turn(document: Document, turn: int) -> None:
    """End the assistant's turn before and open the user's; the first turn is open since the document began."""
    if turn:
        document.put([EOS], REPLY)
        document.put([USER], NOTHING)


def needle_slots(rng: random.Random, sentences: list[list[int]], needles: int, asked: int, gap: int) -> list[int]:
    """Before which sentence each needle stands; the first `asked` leave at least `gap` tokens of filler behind them."""
    last, behind = len(sentences), 0
    while last > 0 and behind < gap:
        last -= 1
        behind += len(sentences[last])
    return [rng.randint(0, last if n < asked else len(sentences)) for n in range(needles)]


def fill(rng: random.Random, budget: int) -> list[list[int]]:
    """Filler sentences, some of them facts, of at most `budget` tokens together. The first is never a fact."""
    sentences: list[list[int]] = []
    while True:
        is_fact = bool(sentences) and rng.random() < 0.1
        ids = encode(fact_sentence(*fact(rng)) if is_fact else filler(rng))
        if len(ids) > budget:
            return sentences
        budget -= len(ids)
        sentences.append(ids)


def first_word_opens(ids: list[int], before: int) -> list[int]:
    """`ids` with the space taken off the first word where the text starts here."""
    if not ids or before not in (BOS, USER):
        return ids
    known = vocabulary()
    opening = {known[" " + word]: known[word] for word in words.STARTERS}
    return [opening[ids[0]], *ids[1:]]


def mark_sentences(rng: random.Random, count: int) -> tuple[list[str], dict[str, str]]:
    """`count` sentences that name one mark of each kind, and the mark of each kind that is named most often.

    The winner has half of the mentions and the others share the rest, all of them in random order.
    """
    columns, most = {}, {}
    for kind, marks in words.MARKS.items():
        winner = rng.choice(marks)
        first = round(0.5 * count)
        column = [winner] * first
        others = [mark for mark in marks if mark != winner]
        column += [others[i % len(others)] for i in range(count - first)]
        rng.shuffle(column)
        columns[kind] = column
        most[kind] = Counter(column).most_common(1)[0][0]
    rows = zip(columns["color"], columns["animal"], columns["fruit"], strict=True)
    return [f"The {c} {a} {rng.choice(words.MARK_VERBS)} the {f}." for c, a, f in rows], most


def mark_document(rng: random.Random, length: int, *, chat: bool) -> Document:
    """Sentences of marks, some filler, then what is most common of each kind, padded to `length`.

    The filler keeps the marks out of what sliding windows alone carry to the question: one window for each layer.
    """
    questions = rng.randint(1, len(words.MARKS)) if chat else len(words.MARKS)
    sentences, most = mark_sentences(rng, (length - SILENCE - (TURN_TOKENS if chat else 8) * questions - 3) // 7)
    document = Document("marks")
    document.put([BOS, USER] if chat else [BOS], NOTHING)
    for sentence in sentences:
        document.say(sentence, RANDOM)
        for word in (1, 2, 5):  # color, animal and fruit: what is frequent so far is the best guess
            document.weights[len(document.weights) - 7 + word] = FILLER
    for ids in fill(rng, SILENCE):
        document.put(ids, FILLER)
    kinds = list(most)
    rng.shuffle(kinds)
    for turn, kind in enumerate(kinds[:questions]):
        if chat:
            next_turn(document, turn)
            ask(document, f"What is the most common {kind}", rng, f"the most common {kind}")
        document.tell(f"The most common {kind} is {most[kind]}.", most[kind], MARK, REPLY if chat else GLUE)
    document.put([EOS], REPLY if chat else FILLER)
    return document.padded(length)
