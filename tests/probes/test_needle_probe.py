"""The needle probe: the demo finds its codes, a wrong selection does not, and a run that shows nothing fails."""

import random
from dataclasses import replace

import pytest
import torch

from fathom.model.errors import ConfigError
from fathom.probes import needle
from fathom.probes.ablations import random_selection, without_entries
from fathom.probes.demo_language.language import filler
from fathom.probes.demo_language.prompts import needle_prompts
from fathom.probes.evaluation import Run
from fathom.probes.fault import Fault
from fathom.probes.faults import FAULTS
from fathom.probes.finding import Verdict
from fathom.probes.needle import (
    EVERYTHING,
    FULL,
    QUICK,
    RANDOM,
    RUN,
    WINDOW,
    Answer,
    asked,
    begun,
    demo_findings,
    depth_map,
    english,
    english_findings,
    of_prompt,
    told_apart,
)
from fathom.probes.probe import run_probe, silent
from fathom.probes.subject import Subject, run_tokens
from fathom.runtime.options import DEMO
from fathom.runtime.text.segments import BOS
from fathom.runtime.text.tokenizer import Tokenizer
from tests.llama_model import load_ours, oracle, their_logits, write_tokenizer
from tests.make_checkpoint import tiny_config, write_checkpoint

CODES = replace(QUICK, codes=((512, 1, 4),), words=((256, 1),))


def report(subject, probe=CODES):
    return run_probe(probe, subject, silent).report


def failed(subject, probe=CODES):
    return {finding.what for finding in report(subject, probe).findings if finding.failed}


@pytest.fixture(scope="module")
def healthy():
    return report(Subject(), QUICK)


def test_the_demo_finds_its_codes_by_selecting_them(healthy):
    assert not healthy.failed, [finding for finding in healthy.findings if finding.failed]
    measured = {finding.what: finding.measured for finding in healthy.findings}
    assert measured["recall"] == measured["recall at 512 tokens"] == measured["most common word"] == 1
    assert measured["recall with a random selection"] <= 0.5
    assert measured["smallest margin of a right code"] > 5
    assert [part.title for part in healthy.parts[:3]] == [f"Codes found, {way}" for way in (RUN, RANDOM, WINDOW)]


def test_prompts_end_at_every_residue(healthy):
    table = next(part for part in healthy.parts if part.title == "By prompt length")
    assert [row[:2] for row in table.rows[:4]] == [[f"{residue} mod 4", 2] for residue in range(4)]


@pytest.mark.parametrize("name", ["indexer-compressor-not-loaded", "query-rotated-key-not", "key-columns-permuted"])
def test_a_wrong_ranking_loses_codes(name):
    assert failed(Subject(fault=FAULTS[name])) == {
        "recall",
        "recall at 512 tokens",
        "recall at the worst prompt length mod 4",
    }


def test_hca_without_its_entries_loses_the_most_common_word():
    cut = Fault("cut", "", "", ops=lambda ops: without_entries(ops, csa=False, hca=True)._replace(name=ops.name))
    assert failed(Subject(fault=cut), QUICK) == {"most common word"}


@pytest.mark.parametrize("control", ["random_selection", "without_entries"])
def test_a_control_that_finds_the_answers_is_vacuous(monkeypatch, control):
    """As it would be in a document that fits the window, or whose entries are all selected."""
    monkeypatch.setattr(needle, control, lambda ops, *_, **__: ops)
    found = [finding for finding in report(Subject()).findings if finding.failed]
    whats = {
        "random_selection": ["recall with a random selection"],
        "without_entries": ["recall with the window only", "most common word with the window only in HCA layers"],
    }
    assert [finding.what for finding in found] == whats[control]
    assert {finding.verdict for finding in found} == {Verdict.VACUOUS}


def test_other_checkpoints_cannot_be_asked(tmp_path):
    write_checkpoint(tmp_path, tiny_config(), seed=0)
    assert QUICK.needs(Subject(tmp_path)) == "the checkpoint has no tokenizer.json to read a document with"
    long = replace(FULL, codes=((2_000_000, 1, 1),))
    assert long.needs(Subject()) == "the run takes 2000000 positions, the model has 1048576"


def answer(read, *, right=True, guess=0.1, length=1024, depth=0.5):
    return Answer(length, read, depth, 1.0 if right else -1.0, right, guess)


def misses(run):
    return {way: [one._replace(margin=-1.0, greedy=False) for one in run] for way in (RANDOM, WINDOW)}


def test_one_prompt_length_in_four_is_seen():
    """The public fault: all answers right but those of one residue; overall it would be three in four."""
    run = [answer(read, right=read % 4 != 3 or read >= 20) for read in range(200)]
    found = {finding.what: finding for finding in demo_findings({RUN: run} | misses(run))}
    assert found["recall"].verdict is Verdict.PASS
    worst = found["recall at the worst prompt length mod 4"]
    assert (worst.verdict, worst.measured, worst.evidence["residue"]) == (Verdict.FAIL, 0.9, 3)
    assert found["recall"].evidence["missed"][0] == "length 1024, prompt of 3, depth 0.50"


def test_the_map_puts_answers_where_they_stand():
    told = [answer(9, length=256, depth=0.0), answer(9, right=False, length=256, depth=0.05), answer(9, depth=1.0)]
    shown = depth_map(RUN, told, told_apart)
    assert shown.rows == ("256", "1024")
    assert shown.values[0] == [0.5, *[None] * 9]
    assert shown.values[1] == [*[None] * 9, 1.0]


def test_each_answer_is_read_off_the_last_row_of_a_call():
    """And its margin is that of the logits of one run of the whole prompt."""
    subject = Subject()
    (prompt,) = needle_prompts(300, 1, 0, 6)
    document, run = of_prompt(prompt, 300), Run("run", subject.model, 64)
    ends, model = [], run.model

    class Watched:
        arithmetic, config, device, new_state = model.arithmetic, model.config, model.device, model.new_state

        def __call__(self, ids, state):
            hidden = model(ids, state)
            ends.append(state.position)
            return hidden

        def logits(self, hidden):
            return model.logits(hidden)

    watched = Run("run", Watched(), 64)
    told = list(asked(watched, begun(watched, document), document))
    assert [one.read for one in told] == [one.position + 1 for one in prompt.answers]
    assert {one.read for one in told} <= set(ends)
    assert max(b - a for a, b in zip([0, *ends], ends, strict=False)) <= 64
    logits = subject.model.logits(run_tokens(subject.model, list(prompt.ids), 512)[0])
    for one, wanted, turn in zip(told, prompt.answers, document.turns, strict=True):
        row = logits[wanted.position]
        others = max(float(row[token]) for (token,) in turn.wrong)
        assert len(turn.wrong) == 89
        assert one.margin == pytest.approx(float(row[wanted.token]) - others, abs=0.1)  # BF16, calls of other lengths
        assert one.greedy == (int(row.argmax()) == wanted.token)
        assert one.depth == wanted.source / wanted.position
        assert prompt.ids[wanted.source] == wanted.token


# --- in English


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    theirs = oracle(vocab_size=264, bos_token_id=256, max_position_embeddings=2048, num_hidden_layers=2)
    theirs.save_pretrained(path)
    write_tokenizer(path)
    return path, theirs


def test_an_answer_of_several_tokens_is_as_likely_as_transformers_finds_it(llama):
    path, theirs = llama
    document = english(Tokenizer(path, 264), [256], 700, 3, 0)
    run = Run("run", load_ours(path).model, 128)
    told, before = list(asked(run, begun(run, document), document)), list(document.ids)
    for one, turn in zip(told, document.turns, strict=True):
        before += turn.question
        assert one.read == len(before)
        sums, likeliest = [], None
        for candidate in (turn.right, *turn.wrong):
            assert len(candidate) == len(turn.right) == 6, "a space and five digits"
            logs = (
                their_logits(theirs, torch.tensor([*before, *candidate])).double().log_softmax(-1)[len(before) - 1 : -1]
            )
            sums.append(sum(float(row[token]) for row, token in zip(logs, candidate, strict=True)))
            likeliest = likeliest or logs.argmax(-1).tolist()
        assert one.margin == pytest.approx(sums[0] - max(sums[1:]), abs=1e-4)
        assert one.greedy == (tuple(likeliest) == turn.right)
        before += turn.right + turn.after


@pytest.mark.parametrize("haystack", [None, "It rained.  The well was full! " * 400])
def test_a_document_tells_codes_at_even_depths_and_asks_for_all(haystack):
    tokenizer = Tokenizer(DEMO, 1024)
    document = english(tokenizer, [0], 2000, 8, 5, haystack=haystack)
    text, turns = tokenizer.decode(document.ids[1:]), document.turns
    assert 1900 < document.room <= 2000
    assert sorted(turn.depth for turn in turns) == pytest.approx([(i + 0.5) / 8 for i in range(8)], abs=0.04)
    told = []
    for turn in turns:
        question, right = tokenizer.decode(turn.question), tokenizer.decode(turn.right)
        assert text.count(question + right + tokenizer.decode(turn.after)) == 1
        assert turn.right not in turn.wrong
        assert len({*turn.wrong}) == 9
        assert {len(answer) for answer in (turn.right, *turn.wrong)} == {len(turn.right)}
        told.append(right)
    assert len({*told}) == 8
    wrong = {tokenizer.decode(answer) for turn in turns for answer in turn.wrong}
    assert wrong & {*told}, "other codes of the document are among the wrong ones"
    assert wrong - {*told}, "and codes that are not in it"
    assert english(tokenizer, [0], 2000, 8, 5, haystack=haystack) == document
    assert english(tokenizer, [0], 2000, 8, 6, haystack=haystack) != document


@pytest.mark.parametrize(
    ("length", "haystack", "says"),
    [
        (4000, "It rained. " * 50, "the text ends"),
        (90, None, "no room for 8 codes"),
        (900, "It rained.", "the text ends"),
    ],
)
def test_documents_that_cannot_be_made_are_refused(length, haystack, says):
    with pytest.raises(ConfigError, match=says):
        english(Tokenizer(DEMO, 1024), [0], length, 8, 0, haystack=haystack)


def test_any_text_is_asked_in_and_the_indexer_has_to_find_the_codes(tmp_path):
    """English words that the demo knows, and codes that it knows: it finds them as any model does, and by selection."""
    rng = random.Random(0)
    (tmp_path / "text").write_text(" ".join(filler(rng) for _ in range(400)))
    subject, knobs = Subject(), {"haystack": str(tmp_path / "text"), "digits": 2}
    probe = replace(QUICK, lengths=(16,), documents=1, needles=16, **knobs)
    found = {finding.what: finding for finding in report(subject, probe).findings}
    assert not [finding for finding in found.values() if finding.failed]
    assert found["codes told apart"].measured == found["codes told apart, every entry attended"].measured == 1
    lost = next(iter(found))
    # an indexer that ranks by something else, in the run alone
    broken = replace(
        subject, fault=Fault("drawn", "", "", ops=lambda ops: random_selection(ops, 0)._replace(name=ops.name))
    )
    finding = {one.what: one for one in report(broken, probe).findings}[lost]
    assert finding.verdict is Verdict.FAIL
    assert finding.measured > finding.bound.value


def test_what_selection_loses_is_judged_against_luck_and_guesses():
    def judged(run, everything):
        found = {RUN: [answer(0, right=one) for one in run], EVERYTHING: [answer(0, right=one) for one in everything]}
        return next(english_findings(found | misses(found[RUN])))

    assert judged([True] * 20, [True] * 20).verdict is Verdict.PASS
    assert judged([True] * 12 + [False] * 8, [True] * 20).verdict is Verdict.PASS, "8 is within 3 times the root of 8"
    assert judged([True] * 10 + [False] * 10, [True] * 20).verdict is Verdict.FAIL
    assert judged([False] * 20, [True] * 20).verdict is Verdict.FAIL
    assert judged([True] * 20, [False] * 20).verdict is Verdict.PASS
    nothing = judged([True, *[False] * 19], [False] * 20)
    assert nothing.verdict is Verdict.VACUOUS
    assert "a model that cannot do the task shows nothing by it" in nothing.evidence["why"]


def test_a_model_that_cannot_do_the_task_says_so(tmp_path):
    write_checkpoint(tmp_path, tiny_config(vocab_size=512, bos_token_id=256), seed=0)
    write_tokenizer(tmp_path, BOS.name)
    probe = replace(QUICK, lengths=(32,), documents=1, needles=4)
    verdicts = [finding.verdict for finding in report(Subject(tmp_path), probe).findings]
    assert verdicts[0] is Verdict.VACUOUS
    assert Verdict.FAIL not in verdicts
