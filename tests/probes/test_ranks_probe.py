"""The ranks probe: healthy runs pass, a fault between two ranks is caught and placed, and what ends a rank is said."""

import pytest

from fathom.kernels.ops import CPU
from fathom.model.errors import ConfigError, Tripwire
from fathom.model.ranks.ranks import Group
from fathom.probes import ranks
from fathom.probes.child import ChildError
from fathom.probes.faults import FAULTS
from fathom.probes.finding import Verdict
from fathom.probes.probe import run_probe, silent
from fathom.probes.ranks import QUICK, WAYS, Ranks
from fathom.probes.subject import Subject
from fathom.runtime.options import RunOptions
from tests import gloo
from tests.make_checkpoint import tiny_config, write_checkpoint

BETWEEN = {
    "sinks-of-rank-0": "first apart at attention.mixed, layer 0",
    "replicated-summed-as-partial": "experts.output of layer 0: row 0 filled by 2 ranks, expected exactly one",
    "top-k-of-a-rank-differs": "RankDisagreement: indexer.selected of layer 1",
    "replicated-weight-of-a-rank-differs": "RankDisagreement: experts.ids of layer 3",
    "experts-off-by-one": "first apart at experts.output, layer 0",
    "row-to-the-wrong-rank": "Tripwire: experts.dispatch of layer 0: ",
    "output-lost-between-ranks": "Tripwire: experts.combine of layer 0: ",
    "weights-of-another-slot-on-a-rank": "first apart at experts.output, layer 0",
}


def test_the_faults_between_ranks_are_these():
    assert {name for name, fault in FAULTS.items() if fault.between_ranks} == set(BETWEEN)


# ranks are started for each: of two faults that show in the same way, one waits for the slow tests
LATER = {"top-k-of-a-rank-differs", "experts-off-by-one", "weights-of-another-slot-on-a-rank"}


# and of the others one is found, as on a healthy run, by ranks that are programs of their own, as the probe starts them
PROGRAMS = {"replicated-summed-as-partial"}


def forked(subject, size, tokens, folder):
    """What `probes.ranks.answers_of` returns, by ranks that need not import torch."""
    return gloo.run(size, ended_or_answer, subject, tokens, folder)


def ended_or_answer(group, subject, tokens, folder):
    try:
        return ranks.answer(group, subject, tokens, folder)
    except (ranks.RankDisagreement, Tripwire, RuntimeError) as error:  # the last of gloo, whose other rank has ended
        return error


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LATER else []) for name in BETWEEN]
)
def test_a_fault_between_two_ranks_is_caught_and_its_place_named(name, monkeypatch):
    if name not in PROGRAMS:
        monkeypatch.setattr(ranks, "answers_of", forked)
    report = run_probe(QUICK, Subject(fault=FAULTS[name]), silent).report
    assert report.failed
    failed = [finding for finding in report.findings if finding.failed]
    said = " ".join(f"{finding.what}, layer {finding.layer} {finding.evidence.get('why', '')}" for finding in failed)
    assert BETWEEN[name] in said


def test_a_healthy_run_holds_every_bound_and_counts_every_byte():
    report = run_probe(QUICK, Subject(), silent).report
    assert not report.failed
    assert [finding.verdict for finding in report.findings] == [Verdict.PASS] * 9
    by_rows, whole = report.findings[-2:]
    assert by_rows.what == "2 ranks, experts by rows: bytes of weights held by all"
    assert by_rows.measured == by_rows.bound.value == 5018712
    assert whole.what == "2 ranks, experts whole: bytes of weights held by all"
    assert whole.measured == whole.bound.value > by_rows.measured
    table = report.parts[0]
    ways = {row[1]: row[2] for row in table.rows}
    assert ways["all tokens"] == "all 1"
    assert ways["own tokens"] == "own 1"


def test_it_says_where_it_does_not_apply():
    assert Ranks(sizes=(3,)).needs(Subject()) == "no number of ranks among 3 divides experts and their columns"
    assert "CPU" in Ranks().needs(Subject(options=RunOptions(device="cuda")))
    assert "mine" in Ranks().needs(Subject(ops=CPU._replace(name="mine")))
    assert "2: it starts ranks of its own" in Ranks().needs(Subject(group=Group(0, 2, None)))
    assert "positions" in Ranks(tokens=1 << 21).needs(Subject())


def test_ways_that_the_model_cannot_run_are_left_out_and_named(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, tiny_config(hidden_size=192), seed=0, formats="bf16")
    subject = Subject(tmp_path, RunOptions(numerics="plain"))
    monkeypatch.setattr(ranks, "answers_of", forked)
    report = run_probe(QUICK, subject, silent).report
    assert not report.failed
    assert [row[1] for row in report.parts[0].rows] == [
        *("all tokens", "own tokens", "all tokens, whole experts", "own tokens, whole experts")
    ]
    assert "deployed and own tokens, whole experts, deployed: --numerics deployed: hidden" in report.summary
    monkeypatch.setattr(ranks, "WAYS", dict(list(WAYS.items())[4:]))
    assert "none of its ways can run: --numerics deployed: hidden_size is 192" in QUICK.needs(subject)


def test_ranks_that_all_end_without_an_answer_say_why_in_one_line(tmp_path):
    write_checkpoint(tmp_path, tiny_config(hidden_size=192), seed=0, formats="bf16")
    with pytest.raises(ConfigError, match=r"^--numerics deployed: hidden_size is 192"):
        ranks.answers_of(Subject(tmp_path), 2, [0] * 8, tmp_path)


@pytest.mark.parametrize(
    ("errors", "why", "told"),
    [
        ([Tripwire("logits", None, 3, "NaN", "finite"), ChildError("closed by peer")], "Tripwire: logits at", [0]),
        ([ranks.Answer([], [], {}, []), ChildError("ended with status -9")], "ChildError: ended with status -9", [1]),
    ],
)
def test_a_rank_without_an_answer_fails_the_run(monkeypatch, errors, why, told):
    monkeypatch.setattr(ranks, "answers_of", lambda *_: errors)
    (finding,) = run_probe(QUICK, Subject(), silent).report.findings
    assert finding.failed
    assert finding.evidence["why"].startswith(why)
    assert finding.evidence["ranks"] == told
