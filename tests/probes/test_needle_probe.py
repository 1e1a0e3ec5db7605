"""The needle probe: the demo finds its codes, a wrong selection does not, and a run that shows nothing fails."""

from dataclasses import replace

import pytest
import torch

from probes.ablations import without_entries
from probes.demo_language.prompts import needle_prompts
from probes.fault import Fault
from probes.faults import FAULTS
from probes.finding import Verdict
from probes.needle import probe as needle
from probes.needle.answers import Answer, answers, calls
from probes.needle.probe import FULL, QUICK
from probes.needle.report import RANDOM, RUN, WINDOW, depth_map, findings
from probes.probe import run_probe, silent
from probes.subject import Subject, run_tokens
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
    assert [finding.verdict for finding in report(Subject(tmp_path)).findings] == [Verdict.VACUOUS]
    long = replace(FULL, codes=((2_000_000, 1, 1),))
    assert long.needs(Subject()) == "the run takes 2000000 positions, the model has 1048576"


def test_one_prompt_length_in_four_is_seen():
    """The public fault: all answers right but those of one residue; overall it would be three in four."""
    run = [Answer(1024, read, 0.5, -1.0 if read % 4 == 3 and read < 20 else 1.0) for read in range(200)]
    found = {finding.what: finding for finding in findings({RUN: run, RANDOM: [], WINDOW: []} | _misses(run))}
    assert found["recall"].verdict is Verdict.PASS
    worst = found["recall at the worst prompt length mod 4"]
    assert (worst.verdict, worst.measured, worst.evidence["residue"]) == (Verdict.FAIL, 0.9, 3)
    assert found["recall"].evidence["missed"][0] == "length 1024, prompt of 3, depth 0.50"


def _misses(run):
    return {way: [answer._replace(margin=-1.0) for answer in run] for way in (RANDOM, WINDOW)}


def test_the_map_puts_answers_where_they_stand():
    told = [Answer(256, 200, 0.0, 1.0), Answer(256, 200, 0.05, -1.0), Answer(512, 400, 1.0, 1.0)]
    shown = depth_map(RUN, told)
    assert shown.rows == ("256", "512")
    assert shown.values[0] == [0.5, *[None] * 9]
    assert shown.values[1] == [*[None] * 9, 1.0]


def test_each_answer_is_read_off_the_last_row_of_a_call():
    (prompt,) = needle_prompts(300, 1, 0, 6)
    lengths = calls(prompt, 64, apart=True)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    assert {answer.position + 1 for answer in prompt.answers} <= set(ends)
    assert set(range(64, len(prompt.ids), 64)) <= set(ends)
    assert ends[-1] == len(prompt.ids)
    assert max(lengths) <= 64
    assert calls(prompt, 64, apart=False) == [64] * (len(prompt.ids) // 64) + [len(prompt.ids) % 64]


def test_margins_are_those_of_the_logits():
    subject = Subject()
    (prompt,) = needle_prompts(256, 1, 0, 4)
    logits = subject.model.logits(run_tokens(subject.model, list(prompt.ids), 512)[0])
    told = list(answers(subject.model, prompt, 256, 512, apart=False))
    assert [answer.read for answer in told] == [answer.position + 1 for answer in prompt.answers]
    for answer, asked in zip(told, prompt.answers, strict=True):
        row = logits[asked.position].tolist()
        right = row.pop(asked.token)
        assert answer.margin == pytest.approx(
            right - max(row), abs=0.1
        )  # calls of other lengths round otherwise in BF16
        assert answer.depth == asked.source / asked.position
        assert prompt.ids[asked.source] == asked.token
    wrong = replace(prompt, answers=tuple(replace(answer, token=answer.token + 1) for answer in prompt.answers))
    for answer, asked in zip(answers(subject.model, wrong, 256, 512, apart=False), wrong.answers, strict=True):
        row = logits[asked.position]
        assert answer.margin == pytest.approx((row[asked.token] - row.max()).item(), abs=0.1)
        assert not answer.right
