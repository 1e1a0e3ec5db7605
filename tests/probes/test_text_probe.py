"""The text probe: a healthy run passes, each fault fails where it is named, and each bound sees the fault it must."""

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch

from fathom.kernels.ops import CPU
from fathom.probes import text
from fathom.probes.fault import PARTS, Fault
from fathom.probes.faults import FAULTS
from fathom.probes.finding import Verdict
from fathom.probes.probe import run_probe, silent
from fathom.probes.subject import Subject
from fathom.probes.text import CASES, QUICK, Case
from fathom.runtime.options import DEMO
from fathom.runtime.sampling import Sampling, sample
from fathom.runtime.text.tokenizer import Tokenizer

FILE = text._File(DEMO / "tokenizer.json")
SUBJECT = Subject()
VOCABULARY = SUBJECT.config.vocab_size
PROMPT = FILE.ids(text.CONVERSATIONS[0].prompt)
LOOSE = Sampling(2.0, seed=1)


def failed(*findings):
    return " ".join(finding.what for finding in findings if finding.failed)


@pytest.fixture(scope="module")
def runs():
    """What `generate` does with these parts, on one model for all."""
    model = SUBJECT.model

    def run(parts, sampling=Sampling(), eos=()):  # noqa: B008 -- it is frozen
        class Given:
            pass

        Given.model, Given.parts = model, parts
        return text._run(Given, PROMPT, sampling, eos)

    return run


def written(parts):
    tokenizer = parts.tokenizer(DEMO, VOCABULARY)
    return failed(
        text._conversations(parts, tokenizer, FILE),
        text._texts(tokenizer, FILE, SUBJECT),
        text._spelled(parts, tokenizer, FILE),
        text._read_back(tokenizer, FILE),
    )


def draws(parts, cases=CASES, count=QUICK.draws):
    return failed(*text._judged_draws(cases, [text._counts(parts.sample, case, count, 0) for case in cases]))


def test_a_healthy_run_passes_and_judges_everything():
    report = run_probe(QUICK, SUBJECT, silent).report
    assert [finding.verdict for finding in report.findings] == [Verdict.PASS] * 16, failed(*report.findings)
    draws = report.parts[0]
    assert len(draws.rows) == len(CASES) + QUICK.rows
    assert {row[3] for row in draws.rows[len(CASES) :]} == {text.KEPT}
    assert "<｜User｜>Capital of France?<｜Assistant｜></think>" in report.parts[-1].text


# --- each fault, where it is named

WRITTEN = {
    "bos-left-out": "a question, token 0: <｜User｜> where <｜begin▁of▁sentence｜> is due",
    "bos-twice": "a question, token 1: <｜begin▁of▁sentence｜> where <｜User｜> is due",
    "thinking-tag-swapped": "a question, token 13: <think> where </think> is due",
    "line-after-think": "a question, thinking, token 14: ",
    "eos-left-out": "system and two turns, token 27: <｜User｜> where <｜end▁of▁sentence｜> is due",
    "controls-out-of-text": "texts that spell a control token and become one, of 31, first",
}
DRAWN = {
    "top-p-off-by-one": "first equal, p reached exactly: id 3 is in the nucleus of 4, and never drawn",
    "top-p-keeps-one-more": "first equal, p reached exactly: id 4 is drawn, and not in the nucleus of 4",
    "temperature-after-top-p": "first hot: id 4 is in the nucleus of 5, and never drawn",
}
RUN = {
    "prompt-one-short": "position 14: another token than </think> is read",
    "eos-ignored": "facts of a run that EOS is to end, otherwise",
    "pending-token-lost": "first behind 2 tokens: nothing is to be read where ĠAbuja is due",
    "pending-token-of-the-step-before": "first behind 2 tokens: Ġbreaks is to be read where ĠAbuja is due",
    "raw-without-bos": "raw prompts encoded otherwise than written, of 8, first",
    "likelihoods-of-twice-the-logits": "log-probabilities told of tokens, off float64 over what rounding explains, at ",
    "last-token-of-an-answer-unread": "conversations of two messages that are read otherwise than written, of 2, first",
}


def test_every_fault_of_the_runtime_is_pursued_here():
    pursued = {name for name, fault in FAULTS.items() if fault.in_runtime}
    assert {*WRITTEN, *DRAWN, *RUN, "ties-to-the-higher-id"} == pursued


@pytest.mark.parametrize("name", WRITTEN)
def test_a_prompt_written_otherwise_is_told_by_its_token(name):
    assert WRITTEN[name] in written(FAULTS[name].parts(PARTS))


@pytest.mark.parametrize("name", DRAWN)
def test_another_nucleus_is_told_by_its_border(name):
    assert DRAWN[name] in draws(FAULTS[name].parts(PARTS))


def test_a_tie_that_goes_to_the_higher_id_is_told():
    assert "id 38 where 10 is due" in failed(text._greedy(FAULTS["ties-to-the-higher-id"].parts(PARTS), 0))


@pytest.mark.parametrize("name", RUN)
def test_a_run_that_reads_or_ends_otherwise_is_told(name):
    report = run_probe(replace(QUICK, draws=50), Subject(fault=FAULTS[name]), silent).report
    assert RUN[name] in failed(*report.findings)


@pytest.mark.parametrize("off", [2**-40, -(2**-40)])
def test_a_log_probability_that_is_off_by_what_no_rounding_explains_is_told(off):
    def likelihood(logits, token, count):
        right = PARTS.likelihood(logits, token, count)
        return right._replace(top=[*right.top[:-1], (right.top[-1][0], right.top[-1][1] + off)])

    assert text._likelihoods(PARTS, CASES).measured <= 1
    assert text._likelihoods(PARTS._replace(likelihood=likelihood), CASES).failed


# --- the power of each bound


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda ids: ids[:-1], "where "),
        (lambda ids: [*ids[:-2], *ids[:-3:-1]], "token "),
    ],
)
def test_texts_encoded_otherwise_are_told(change, told):
    class Other(Tokenizer):
        def encode_text(self, *given):
            return change(super().encode_text(*given))

    assert told in failed(text._texts(Other(DEMO, VOCABULARY), FILE, SUBJECT))


def test_texts_read_back_otherwise_are_told():
    class Stripped(Tokenizer):
        def decode(self, ids):
            return super().decode(ids).strip()

    class Spelled(Tokenizer):
        def decode_segments(self, ids):
            return super().decode_segments(ids)[:-1]

    assert "first ' leading and trailin': read back as 'lead" in failed(
        text._texts(Stripped(DEMO, VOCABULARY), FILE, SUBJECT)
    )
    assert "is due after the message" in failed(text._read_back(Spelled(DEMO, VOCABULARY), FILE))


def test_a_nucleus_by_hand():
    third = Case("", torch.tensor([math.log(2), math.log(5), 0.0, math.log(2)]), 1.0, 0.75)  # 2, 5, 1, 2 tenths
    assert text.nucleus(third) == pytest.approx({1: 5 / 9, 0: 2 / 9, 3: 2 / 9})
    assert list(text.nucleus(third._replace(top_p=0.69))) == [1, 0]
    assert list(text.nucleus(third._replace(top_p=1.0))) == [1, 0, 3, 2]
    assert text.nucleus(third._replace(top_p=0.1)) == {1: 1.0}


@pytest.mark.parametrize(("mass", "draws", "tokens"), [(0.3, 200, 3), (0.01, 400, 8), (0.5, 500, 2)])
def test_the_spread_is_exceeded_as_rarely_as_it_says(mass, draws, tokens):
    """Against the binomial distribution itself, summed."""
    most = text.spread(mass, draws, tokens)
    chances = (math.comb(draws, n) * mass**n * (1 - mass) ** (draws - n) for n in range(draws + 1))
    beyond = sum(chance for n, chance in enumerate(chances) if abs(n - draws * mass) > most)
    assert 0 < beyond * tokens <= text.CHANCE


@pytest.mark.parametrize(("heat", "draws"), [(1.35, QUICK.draws), (1.2, text.FULL.draws)])
def test_a_temperature_that_is_off_is_seen_where_the_nucleus_is_the_same(heat, draws):
    def heated(logits, sampling, generator):
        return sample(logits, replace(sampling, temperature=heat * sampling.temperature), generator)

    (case,) = (case for case in CASES if case.name == "p = 1")
    parts = PARTS._replace(sample=heated)
    assert "over what chance explains, at p = 1" in failed(
        *text._judged_draws([case], [text._counts(parts.sample, case, draws, 0)])
    )


def test_every_token_of_a_constructed_nucleus_has_to_be_drawn():
    for case in CASES:
        due = text.nucleus(case)
        assert QUICK.draws * min(due.values()) > math.log(len(due) / text.CHANCE), case.name


@pytest.mark.parametrize(
    ("generator", "told"),
    [
        (lambda _: torch.Generator().manual_seed(torch.seed() % 2**31), "one seed, twice"),
        (lambda _: torch.Generator().manual_seed(3), "two seeds"),
    ],
)
def test_a_seed_that_decides_nothing_is_told(generator, told):
    parts = PARTS._replace(sample=lambda logits, sampling, given: sample(logits, sampling, generator(given)))
    assert told in failed(text._seeds(parts))


def test_tokens_that_are_not_drawn_from_the_logits_of_their_place_are_told(runs):
    greedy, drawn = runs(PARTS), runs(PARTS, LOOSE)
    assert not failed(*text._chosen(PARTS, greedy, drawn, LOOSE), text._read(SUBJECT, FILE, greedy, drawn))
    late = greedy._replace(logits=greedy.logits.roll(1, 0))
    assert "greedily" in failed(*text._chosen(PARTS, late, drawn, LOOSE))
    assert "is drawn next with this seed" in failed(*text._chosen(PARTS, greedy, drawn, replace(LOOSE, seed=2)))
    narrow = replace(LOOSE, top_p=1e-9)
    assert "is not in the nucleus" in failed(*text._chosen(PARTS, greedy, drawn, narrow))


def test_another_token_read_than_was_drawn_is_told(runs):
    ran = runs(PARTS)
    other = ran._replace(tokens=[*ran.tokens[:3], (ran.tokens[3] + 1) % VOCABULARY, *ran.tokens[4:]])
    assert f"position {len(PROMPT) + 3}: another token" in failed(text._read(SUBJECT, FILE, ran, other))
    longer = ran._replace(position=ran.position + 1)
    assert "another token than the end" in failed(text._read(SUBJECT, FILE, longer))


def test_a_state_that_a_file_changed_is_told(runs):
    def load_state(path, state, loaded):
        pending = PARTS.load_state(path, state, loaded)
        state.layers[0].ring.data.neg_()
        return pending

    def told(drawn, **parts):
        changed = Fault("x", "x", "x", parts=lambda given: given._replace(**parts))
        return failed(text._gone_on(Subject(fault=changed), FILE, drawn, LOOSE))

    drawn = runs(PARTS, LOOSE)
    assert not told(drawn)
    assert "other logits than without the file" in told(drawn, load_state=load_state)
    likeliest = drawn._replace(logits=torch.nn.functional.one_hot(torch.tensor(drawn.tokens), VOCABULARY).float())
    assert told(likeliest).startswith("runs that go on from a saved state")


# --- when it cannot show anything


def test_logits_that_leave_nothing_to_choose_are_vacuous(monkeypatch, runs):
    flat = runs(PARTS)._replace(logits=torch.tensor([[50.0, *[0.0] * 999]] * 3))
    assert text._cases_of(flat, 2) == []
    monkeypatch.setattr(text, "_cases_of", lambda *_: [])
    report = run_probe(replace(QUICK, draws=10), SUBJECT, silent).report
    assert any(finding.verdict is Verdict.VACUOUS for finding in report.findings)


def test_a_tokenizer_without_chat_tokens_is_a_need(tmp_path):
    subject = Subject(tmp_path, ops=CPU)
    shutil.copy(DEMO / "config.json", tmp_path)
    assert QUICK.needs(subject) == "the checkpoint has no tokenizer.json"
    fields = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))
    fields["added_tokens"] = [token for token in fields["added_tokens"] if token["content"] != "<think>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields), encoding="utf-8")
    assert QUICK.needs(subject) == "tokenizer.json has no token <think>: it writes no conversation"
    assert QUICK.needs(SUBJECT) is None
