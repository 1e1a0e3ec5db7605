"""The attention probe: healthy runs pass, attention to wrong rows fails on the finding that names it."""

import pytest
import torch

from kernels.attention import reference as attention
from probes.ablations import without_entries
from probes.attention.oracle import attend
from probes.attention.probe import QUICK, stored_sinks
from probes.attention.rows import count_rows, looked_at
from probes.fault import Fault
from probes.faults import FAULTS
from probes.finding import Verdict
from probes.probe import run_probe, silent
from probes.subject import Subject
from runtime.options import RunOptions
from tests.make_checkpoint import tiny_config, write_checkpoint

OFF = "distance of the output from the equation's, largest over tokens and heads"
ROWS = "tokens that read other rows than config and selection demand"
ALONE = "distance of the output from what the window alone gives"


def run(probe=QUICK, **subject):
    return run_probe(probe, Subject(**subject), silent).report


def failed(report):
    return {(finding.what, finding.layer) for finding in report.findings if finding.failed}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("attention") / "tiny"
    write_checkpoint(directory, tiny_config(), seed=3)
    return directory


def test_the_healthy_demo_passes():
    report = run()
    assert not report.failed
    found = {(finding.what, finding.layer): finding.measured for finding in report.findings}
    assert [found[ROWS, layer] for layer in range(4)] == [0] * 4
    assert all(found[ALONE, layer] > 0.1 for layer in (1, 2, 3))
    assert (ALONE, 0) not in found  # an SWA layer has nothing but its window


ALL = {(what, layer) for what in (OFF, ROWS) for layer in range(4)}


@pytest.mark.parametrize(
    ("fault", "findings"),
    [
        ("ring-off-by-one", ALL),
        ("sink-in-numerator", ALL),
        ("entries-off-by-one", {(what, layer) for what in (OFF, ROWS) for layer in (1, 2, 3)}),
        ("future-block-visible", {(OFF, 2), (ROWS, 2)}),
        ("rank-0-sinks", {(OFF, layer) for layer in range(4)}),
        ("mscale-in-softmax", {(OFF, layer) for layer in (1, 2, 3)}),
        ("indexer-returns-none", {("tripwire at indexer.selected", 1)}),
    ],
)
def test_each_fault_fails_on_what_names_it(fault, findings):
    assert failed(run(fault=FAULTS[fault])) == findings


@pytest.mark.parametrize(("csa", "hca", "layers"), [(True, False, (1, 3)), (False, True, (2,))])
def test_a_layer_that_sees_its_window_alone_fails(csa, hca, layers):
    fault = Fault("x", "x", "x", ops=lambda ops: without_entries(ops, csa=csa, hca=hca))
    assert failed(run(fault=fault)) == {(what, layer) for what in (OFF, ROWS, ALONE) for layer in layers}


def test_the_evidence_names_the_rows():
    report = run(fault=FAULTS["ring-off-by-one"])
    first = next(finding for finding in report.findings if finding.what == ROWS)
    assert "1 outside the window" in first.evidence["first"]
    assert "wanted" in first.evidence["first"]


@pytest.mark.parametrize("options", [RunOptions(), RunOptions(numerics="plain", dtype="fp32", prefill_chunk=100)])
def test_another_checkpoint_passes(tiny, options):
    assert not run(directory=tiny, options=options).failed


def test_a_model_that_never_leaves_its_window_is_vacuous(tmp_path):
    write_checkpoint(tmp_path, tiny_config(max_position_embeddings=16, rope_scaling=None), seed=1)
    report = run(directory=tmp_path)
    assert [finding.verdict for finding in report.findings] == [Verdict.VACUOUS]
    assert "never leave the window" in report.summary


def test_the_prompt_goes_beyond_the_window_with_entries_of_every_kind(tmp_path):
    for overrides in ({"sliding_window": 300}, {"compress_ratios": [0, 4, 512, 4]}):
        write_checkpoint(tmp_path, tiny_config(**overrides), seed=1)
        assert not run(directory=tmp_path).failed


def test_a_layer_without_a_complete_entry_is_vacuous(tmp_path):
    write_checkpoint(tmp_path, tiny_config(max_position_embeddings=100, rope_scaling=None), seed=1)
    report = run(directory=tmp_path)  # the HCA layer compresses 128 tokens into one
    hollow = [finding for finding in report.findings if finding.verdict is Verdict.VACUOUS]
    assert [finding.layer for finding in hollow] == [2]
    assert all(not finding.failed for finding in report.findings if finding.layer != 2)


def test_the_oracle_is_the_equation_by_hand():
    q = torch.tensor([[2.0, 0.0], [0.0, 0.0]])
    window, entries = torch.tensor([[2.0**0.5, 3.0]]), torch.tensor([[0.0, 1.0], [0.0, 5.0]])
    found = attend(q, window, entries, torch.tensor([0.0, 1.0]))
    e = 2.718281828459045
    # head 0: logits 2, 0, 0 and sink 0; head 1: logits 0, 0, 0 and sink 1
    assert found.window.tolist() == pytest.approx([e**2 / (e**2 + 3), 1 / (3 + e)])
    assert found.entries.tolist() == pytest.approx([2 / (e**2 + 3), 2 / (3 + e)])
    assert found.sink.tolist() == pytest.approx([1 / (e**2 + 3), e / (3 + e)])
    assert found.output[:, 1].tolist() == pytest.approx([(3 * e**2 + 6) / (e**2 + 3), 9 / (3 + e)])
    assert found.alone[:, 1].tolist() == pytest.approx([3 * e**2 / (e**2 + 1), 3 / (1 + e)])


def test_the_oracle_agrees_with_the_reference():
    generator = torch.Generator().manual_seed(0)
    q, sink = torch.randn(1, 4, 32, generator=generator), torch.randn(4, generator=generator)
    ring, entries = torch.randn(8, 32, generator=generator), torch.randn(20, 32, generator=generator)
    selected = torch.tensor([[3, 7, 11, -1]], dtype=torch.int32)
    out = attention.attend(q, ring, 51, 8, entries, 4, selected, sink)[0]  # sees 13 entries, and rows 3 .. 7, 0 .. 3
    found = attend(q[0], ring, entries[[3, 7, 11]], sink)
    assert torch.allclose(found.output.float(), out, atol=1e-6)


def test_rows_are_counted_one_by_one():
    model = Subject().model
    far, selected = torch.tensor([0, 2, 9]), torch.tensor([0, 2, 9, -1], dtype=torch.int32)
    assert count_rows(model, 1, 50, 60, far, selected).tolist() == [[16, 3, 0, 0]] * 4
    assert count_rows(model, 1, 50, 60, torch.tensor([0, 2, 8]), selected).tolist() == [[16, 2, 0, 1]] * 4
    assert count_rows(model, 2, 300, 5, torch.arange(2), None).tolist() == [[16, 2, 0, 0]] * 4
    assert count_rows(model, 2, 300, 5, torch.arange(1), None).tolist() == [[16, 1, 0, 1]] * 4
    assert count_rows(model, 0, 5, None, torch.arange(0), None).tolist() == [[6, 0, 0, 0]] * 4


def test_sinks_come_from_the_file_whatever_was_injected():
    subject = Subject(fault=Fault("x", "x", "x", inject=_spoil_sinks))
    stored = stored_sinks(subject.directory, subject.config)
    assert not torch.equal(subject.model.blocks[1].attention.sink, stored[1])
    assert torch.equal(Subject().model.blocks[1].attention.sink, stored[1])


def _spoil_sinks(model):
    for block in model.blocks:
        block.attention.sink = block.attention.sink + 1


def test_tokens_looked_at_take_every_residue_and_the_edges():
    positions = looked_at(8192, 400, [16, 127])
    assert {position % 4 for position in positions} == {0, 1, 2, 3}
    assert len({position % 128 for position in positions}) == 128
    assert {15, 16, 17, 126, 127, 128, 8191} <= set(positions)
    assert looked_at(3, 400, [16]) == [0, 1, 2]
