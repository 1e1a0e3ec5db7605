"""The determinism probe: a run that does not repeat, or that another one reaches into, is named where it begins."""

from dataclasses import replace

import pytest
import torch

from model.observe import sites
from probes.determinism.probe import QUICK, Seen, against, poison, run
from probes.fault import Fault
from probes.faults import FAULTS
from probes.finding import Verdict
from probes.probe import run_probe, silent
from probes.shared.trace import OF_TOKENS, Passed, _multipliers, first_difference, joined, row_digests, traced
from probes.subject import Subject, run_tokens
from tests.make_checkpoint import tiny_config, write_checkpoint


def failed(subject, probe=QUICK):
    """Failed findings, by what comes after the last comma: the circumstance."""
    report = run_probe(probe, subject, silent).report
    found = {}
    for finding in report.findings:
        if finding.failed:
            found.setdefault(finding.what.rpartition(", ")[2], []).append(finding)
    return found


def test_the_demo_repeats_itself():
    report = run_probe(QUICK, Subject(), silent).report
    assert not report.failed, [finding for finding in report.findings if finding.failed]
    (table,) = report.parts
    assert [row[0] for row in table.rows] == [
        "run 2",
        "after prompt B",
        "in turns with B",
        "saved and restored half way",
        "in memory that held NaN",
    ]
    assert all(row[1] == table.rows[0][1] > 300 for row in table.rows)


def test_every_site_is_compared():
    subject = Subject()
    seen = run(subject.model, QUICK._calls(torch.tensor(subject.tokens(QUICK.tokens))))
    assert {one.site for one in seen.passed} == set(sites.SITES)
    assert {one.first for one in seen.passed} == {0, 130, 131}


def test_noise_is_named_where_it_first_comes_in():
    found = failed(Subject(fault=FAULTS["unrepeatable"]))
    assert len(found) == 5
    assert found["run 2"][0].evidence["first"].startswith("attention.mixed of layer 0 in the call at position 0,")


def test_a_frontier_of_the_last_sequence_is_named_and_trips_on_nan():
    found = failed(Subject(fault=FAULTS["stale-frontier"]))
    tensors, caches = found["after prompt B"]
    assert tensors.evidence["first"] == "attention.entry of layer 1 in the call at position 0, from row 0, 1 of 1 rows"
    assert caches.evidence["first"] == "entries.rows of layer 1"
    assert "not finite" in found["in memory that held NaN"][0].evidence["why"], "and the verdicts before it are kept"


def test_a_row_that_is_read_but_not_saved():
    assert set(failed(Subject(fault=FAULTS["ring-off-by-one"]))) == {"saved and restored half way"}


def test_a_ring_that_two_sequences_share_shows_only_in_turns():
    def pooled(model):
        class Pooled(type(model)):
            ring = None

            def new_state(self, max_context, chunk):
                state = super().new_state(max_context, chunk)
                cache = state.layers[2]
                self.ring = self.ring or cache.ring
                cache.ring = cache.components["window"] = self.ring
                return state

        model.__class__ = Pooled

    found = failed(Subject(fault=Fault("pooled", "", "", inject=pooled)))
    assert set(found) == {"in turns with B"}
    assert found["in turns with B"][0].evidence["first"].startswith("attention.mixed of layer 2 in the call at pos")


@pytest.mark.parametrize(
    ("probe", "why"),
    [
        (replace(QUICK, tokens=(1 << 20) + 1), "the run takes 1048577 positions, the model has 1048576"),
        (replace(QUICK, repeats=1), "nothing to be compared with"),
    ],
)
def test_what_could_not_differ_is_vacuous(probe, why):
    report = run_probe(probe, Subject(), silent).report
    assert why in report.summary
    assert [finding.verdict for finding in report.findings] == [Verdict.VACUOUS]


def test_another_prompt_that_is_the_same_is_vacuous(monkeypatch):
    subject = Subject()
    loudest = int(subject.model.embedding.weight.float().norm(dim=1).argmax())
    monkeypatch.setattr(Subject, "tokens", lambda _, count: [loudest] * count)
    report = run_probe(QUICK, subject, silent).report
    assert [finding.what for finding in report.findings if finding.failed] == ["prompt B differs from A"]


def test_another_checkpoint_passes(tmp_path):
    write_checkpoint(tmp_path, tiny_config(compress_ratios=[128, 4, 0, 4]), seed=3, formats="nvfp4")
    subject = Subject(tmp_path)
    assert not failed(replace(subject, options=subject.with_options(numerics="plain", dtype="fp32")))


def test_memory_comes_back_with_nan():
    subject = Subject()
    share = poison(subject.model, [torch.zeros(65, dtype=torch.int64)])
    assert 0 <= share <= 1


def seen(*rows, caches=(1, 2)):
    passed = [Passed(sites.HIDDEN, None, 7 * i, torch.tensor(row)) for i, row in enumerate(rows)]
    return Seen(passed, {(1, "window.recent"): torch.tensor(caches)})


def test_comparing_by_hand():
    first = seen([1, 2], [3, 4])
    same = against(first, "again", seen([1, 2], [3, 4]))
    assert (same.tensors, same.differing, same.first, same.parts) == (2, 0, "", ())
    other = against(first, "again", seen([1, 2], [3, 5], caches=(1, 3)))
    assert (other.differing, other.first) == (1, "hidden in the call at position 7, from row 1, 1 of 2 rows")
    assert other.parts == ("window.recent of layer 1",)
    assert against(first, "again", seen([1, 2], [3, 4, 5])).differing == 1
    assert against(first, "again", seen([1, 2])).first == "1 tensors in all, 2 in the first run"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32, torch.int64])
def test_a_digest_sees_any_one_number(dtype):
    x = torch.arange(12).view(2, 2, 3).to(dtype)
    for at in range(6):
        other = x.clone()
        other[1].view(-1)[at] += 1
        assert (row_digests(x) != row_digests(other)).tolist() == [False, True]
    swapped = x.clone()
    swapped[0, 0] = x[0, 0].flip(0)
    assert (row_digests(x) != row_digests(swapped)).tolist() == [True, False], "order counts"


def test_a_digest_sees_the_sign_of_zero_and_passes_over_padding():
    assert not torch.equal(row_digests(torch.tensor([[0.0]])), row_digests(torch.tensor([[-0.0]])))
    narrow, wide = torch.tensor([[4, -1]], dtype=torch.int32), torch.tensor([[4, -1, -1, -1]], dtype=torch.int32)
    assert torch.equal(row_digests(narrow), row_digests(wide))
    assert not torch.equal(row_digests(narrow), row_digests(torch.tensor([[4, 0]], dtype=torch.int32)))


def test_multipliers_are_odd_and_unlike_each_other():
    some = _multipliers(4096, torch.device("cpu"))
    assert (some % 2).abs().eq(1).all()
    assert len(some.unique()) == 4096
    assert torch.equal(_multipliers(10, torch.device("cpu")), some[:10])
    assert (some.double() / 2**63).mean().abs() < 0.05, "spread over the whole range"


def test_the_first_difference_is_that_of_the_computation():
    subject = Subject()
    tokens = subject.tokens(20)
    runs = []
    for ids in (tokens, [*tokens[:9], tokens[9] ^ 1, *tokens[10:]]):
        with traced(subject.model, OF_TOKENS) as passed:
            run_tokens(subject.model, ids, 8)
        runs.append(joined(passed))
    assert str(first_difference(*runs)) == "embedded, token 9"
    assert first_difference(runs[0], runs[0]) is None
    assert first_difference(*runs, lambda *_: 2) is None, "entry 2 is the first that holds token 9"
    assert {len(rows) for rows in runs[0].values()} == {5, 20}, "all calls, joined: entries and tokens"
