"""The demo language: its answers are where it says, its documents follow from the seed, one word is one token."""

import random

import pytest

from fathom.probes.demo_language import words
from fathom.probes.demo_language.language import (
    Document,
    encode,
    fact_document,
    fact_sentence,
    mark_document,
    needle_document,
)
from fathom.probes.demo_language.prompts import (
    common_prompts,
    common_replies,
    fact_prompts,
    needle_prompts,
    needle_replies,
)
from fathom.probes.demo_language.vocabulary import (
    BOS,
    END_THINK,
    EOS,
    PAD,
    SPECIAL,
    build_tokenizer,
    vocabulary,
    vocabulary_size,
)

TOKENIZER = build_tokenizer()


def documents(seed: int) -> list[Document]:
    rng = random.Random(seed)
    return [
        fact_document(rng, 64),
        fact_document(rng, 128),
        needle_document(rng, 256, 6, 5, chat=False),
        needle_document(rng, 256, 6, 5, chat=True),
        mark_document(rng, 256, chat=False),
        mark_document(rng, 256, chat=True),
    ]


@pytest.mark.parametrize("seed", range(20))
def test_every_answer_is_the_token_after_its_position_and_at_its_source(seed):
    for document in documents(seed):
        assert document.answers, document.kind
        for answer in document.answers:
            assert document.ids[answer.position + 1] == answer.token
            if answer.source >= 0:
                assert document.ids[answer.source] == answer.token
                assert answer.source < answer.position


@pytest.mark.parametrize("seed", range(20))
def test_the_source_belongs_to_the_name_that_is_asked_for(seed):
    rng = random.Random(seed)
    document = needle_document(rng, 256, 6, 6, chat=False)
    for answer in document.answers:
        name = document.ids[answer.position - 1]  # "The code of NAME is": the position is that of "is"
        assert document.ids[answer.source - 2] == name


@pytest.mark.parametrize("seed", range(5))
def test_documents_are_a_function_of_the_seed(seed):
    first, again, other = documents(seed), documents(seed), documents(seed + 100)
    assert [d.ids for d in first] == [d.ids for d in again]
    assert [d.ids for d in first] != [d.ids for d in other]


@pytest.mark.parametrize("seed", range(10))
def test_a_document_is_padded_to_its_length_and_pads_weigh_nothing(seed):
    for document, length in zip(documents(seed), (64, 128, 256, 256, 256, 256), strict=True):
        assert len(document.ids) == len(document.weights) == length
        assert document.ids[0] == BOS
        end = len(document.ids) - document.ids[::-1].index(EOS)
        assert set(document.ids[end:]) <= {PAD}
        assert not any(document.weights[end:])


@pytest.mark.parametrize("seed", range(10))
def test_the_tokenizer_reads_a_document_as_the_generator_wrote_it(seed):
    for document in documents(seed):
        text = TOKENIZER.decode(document.ids, skip_special_tokens=False)
        assert TOKENIZER.encode(text, add_special_tokens=False).ids == document.ids


def test_every_word_with_its_space_is_one_token():
    for word in words.words():
        assert TOKENIZER.encode(" " + word).ids == [vocabulary()[" " + word]]


@pytest.mark.parametrize(
    "text", ["héllo wörld", "你好, Alice!", "tab\tand\nline", "  two spaces", "🙂", "a|b｜c▁d", ""]
)
def test_any_text_survives_the_tokenizer(text):
    ids = TOKENIZER.encode(text).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert all(len(SPECIAL) <= i < vocabulary_size() for i in ids)


def test_special_tokens_have_the_ids_of_their_order_and_no_bos_is_added():
    assert [TOKENIZER.token_to_id(text) for text in SPECIAL] == list(range(len(SPECIAL)))
    assert TOKENIZER.encode("The capital of France is").ids == encode("The capital of France is", opening=True)


def test_the_model_has_a_row_for_every_token():
    assert TOKENIZER.get_vocab_size() == vocabulary_size()


def test_marks_occur_in_no_other_sentence():
    marks = {mark for kind in words.MARKS.values() for mark in kind}
    others = (words.PEOPLE, words.THINGS, words.PLACES, words.ADJECTIVES, words.MOTION, words.ACTIONS)
    assert not marks & {word for group in others for word in group}


@pytest.mark.parametrize("seed", range(10))
def test_the_mark_asked_for_is_the_most_frequent_by_far(seed):
    ids = mark_document(random.Random(seed), 512, chat=False)
    for answer in ids.answers:
        body = ids.ids[: ids.answers[0].position]
        kind = next(k for k in words.MARKS.values() if answer.token in {vocabulary()[" " + m] for m in k})
        counts = sorted(((body.count(vocabulary()[" " + m]), vocabulary()[" " + m]) for m in kind), reverse=True)
        assert counts[0][1] == answer.token
        assert counts[0][0] > 2 * counts[1][0]


@pytest.mark.parametrize("length", [256, 512, 2048])
def test_a_needle_prompt_ends_before_its_answer_and_keeps_its_distance(length):
    for prompt in needle_prompts(length, 4, seed=3):
        (answer,) = prompt.answers
        assert answer.position == len(prompt.ids) - 1
        assert prompt.answer == answer.token
        assert length - 40 <= len(prompt.ids) <= length
        assert answer.position - answer.source >= min(128, length // 4)
        assert prompt.ids[answer.source] == answer.token


def test_a_prompt_with_several_questions_holds_the_earlier_answers():
    (prompt,) = needle_prompts(1024, 1, seed=0, questions=16)
    assert len(prompt.answers) == 16
    assert all(prompt.ids[a.position + 1] == a.token for a in prompt.answers[:-1])


@pytest.mark.parametrize("replies", [needle_replies, common_replies])
def test_a_reply_is_the_assistants_whole_turn(replies):
    for prompt in replies(512, 6, seed=2):
        said = [a.token for a in prompt.answers]
        assert said[-1] == EOS
        assert said[:-1] == list(prompt.ids[prompt.answers[0].position + 1 :])
        assert TOKENIZER.decode(said).startswith("The ")


def test_every_word_of_a_chat_reply_has_the_weight_of_an_answer():
    document = needle_document(random.Random(4), 256, 4, 2, chat=True)
    for start in (i for i, token in enumerate(document.ids) if token == END_THINK):
        end = document.ids.index(EOS, start)
        assert min(document.weights[start + 1 : end + 1]) >= 1.0


def test_prompts_of_another_seed_are_other_prompts():
    assert needle_prompts(512, 1, seed=0) == needle_prompts(512, 1, seed=0)
    assert needle_prompts(512, 1, seed=0) != needle_prompts(512, 1, seed=1)
    assert common_prompts(512, 1, seed=0) != common_prompts(512, 1, seed=1)


def test_fact_prompts_ask_for_every_fact_once():
    prompts = fact_prompts()
    assert len(prompts) == 57 * 4
    assert len({p.ids for p in prompts}) == len(prompts)
    text = TOKENIZER.decode(list(prompts[0].ids), skip_special_tokens=True)
    assert text == "The capital of France is"
    assert prompts[0].answer == vocabulary()[" Paris"]
    assert fact_sentence("currency", "Japan", "yen") == "The currency of Japan is the yen."
