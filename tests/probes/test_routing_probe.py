"""The routing probe: passes on what is healthy, and names what is not."""

import dataclasses

import numpy as np
import pytest
import torch

from probes.faults import FAULTS
from probes.finding import Report, Text, Verdict
from probes.probe import run_probe, silent
from probes.routing.clamp import Pushed, push_findings
from probes.routing.layer import Captured, compare
from probes.routing.probe import QUICK
from probes.shared.moe import Experts, Scores
from probes.subject import Subject
from runtime.options import RunOptions
from tests.make_checkpoint import tiny_config, write_checkpoint

PUSHED = "{} pushed past the clamp, distance from float64"
MIXTURE = "tokens whose sum over experts and one shared expert is further than 0.0039 from float64"
WEIGHTS = "weights against unbiased scores, as a share of what fp32 rounding explains"


def failures(report: Report) -> dict[str, Verdict]:
    return {finding.what: finding.verdict for finding in report.findings if finding.failed}


def test_the_healthy_demo_passes():
    heard = []
    run = run_probe(QUICK, Subject(), lambda share, _: heard.append(share))
    assert not run.report.failed, failures(run.report)
    assert heard == sorted(heard)
    assert heard[-1] == 1
    assert "layers, 0 were not what gate, bias and table" in run.report.summary
    (text,) = [part.text for part in run.report.parts if isinstance(part, Text)]
    assert text.startswith("No value of the shared path went beyond the clamp")


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("hash-table-zeroed", "tables of hash routing, as held, that are not the files'"),
        ("bias-in-weights", WEIGHTS),
        ("routed-clamp-dropped", PUSHED.format("routed experts")),
        ("shared-clamp-dropped", PUSHED.format("shared expert")),
        ("shared-expert-twice", MIXTURE),
        ("fp4-nibbles-swapped", MIXTURE),
        ("scales-shifted", MIXTURE),
    ],
)
def test_a_fault_fails_the_finding_that_names_it(fault, what):
    report = run_probe(QUICK, Subject(fault=FAULTS[fault]), silent).report
    assert failures(report).get(what) is Verdict.FAIL


@pytest.mark.parametrize(("lost", "kept"), [("routed", "shared expert"), ("shared", "routed experts")])
def test_a_lost_clamp_is_told_from_the_other(lost, kept):
    report = run_probe(QUICK, Subject(fault=FAULTS[f"{lost}-clamp-dropped"]), silent).report
    assert PUSHED.format(kept) not in failures(report)
    (found,) = [f for f in report.findings if f.layer == 0 and f.what.startswith(lost) and f.failed]
    assert found.evidence["distance_from_unclamped"] < 1e-6
    assert found.measured > 1


def test_a_table_with_two_rows_exchanged_is_found():
    subject = Subject()
    gate = subject.model.blocks[0].experts.gate
    gate.table = gate.table.clone()
    gate.table[[700, 701]] = gate.table[[701, 700]]
    report = QUICK.measure(subject, silent)
    assert list(failures(report)) == ["tables of hash routing, as held, that are not the files'"]


def test_other_experts_than_the_best_are_found():
    subject = Subject()
    gate = subject.model.blocks[2].experts.gate
    gate.bias = gate.bias.flip(0)
    report = QUICK.measure(subject, silent)
    (found,) = [finding for finding in report.findings if finding.failed]
    assert found.layer == 2
    assert found.what == "experts that are not the top of score + bias, tokens"


@pytest.mark.parametrize(
    ("overrides", "formats", "options"),
    [
        ({"num_hash_layers": 0}, "nvfp4", RunOptions()),
        ({"num_hash_layers": 4}, "bf16", RunOptions(numerics="plain", dtype="fp32")),
    ],
)
def test_other_checkpoints_pass(tmp_path, overrides, formats, options):
    write_checkpoint(tmp_path, tiny_config(**overrides), seed=3, formats=formats)
    report = run_probe(QUICK, Subject(directory=tmp_path, options=options), silent).report
    assert not report.failed, failures(report)


def test_biases_of_zero_are_vacuous(tmp_path):
    def unbiased(name, values):
        return torch.zeros_like(values) if name.endswith("gate.bias") else values

    write_checkpoint(tmp_path, tiny_config(), seed=3, formats="bf16", adjust=unbiased)
    found = failures(run_probe(QUICK, Subject(directory=tmp_path), silent).report)
    assert found == {
        "choice by score + bias": Verdict.VACUOUS,
        "weights against unbiased scores": Verdict.VACUOUS,
    }


def test_all_experts_chosen_is_vacuous(tmp_path):
    write_checkpoint(tmp_path, tiny_config(n_routed_experts=2), seed=3, formats="bf16")
    assert QUICK.needs(Subject(directory=tmp_path)) == "every token goes to all 2 experts"


def test_an_expert_that_cannot_be_pushed_is_vacuous():
    (found,) = push_findings({("shared", 3): [Pushed(0.0, 0.01, 0.01, 2.0, 50.0)]}, close=2**-8)
    assert found.verdict is Verdict.VACUOUS
    assert found.layer == 3


def test_scores_by_hand():
    scores = Scores(np.array([[0.5, 1.0, 2.0]]), np.array([1.6, 0.0, 0.0]), np.full((1, 3), 1e-6))
    ids, near = scores.choice(2)
    assert ids.tolist() == [[0, 2]]
    assert not near
    assert scores.weights(ids, 1.5).tolist() == [[0.3, 1.2]]
    assert scores.weights(ids, 1.5, biased=True)[0, 0] == pytest.approx(1.5 * 2.1 / 4.1)
    tie = dataclasses.replace(scores, bias=np.array([0.5 + 1e-7, 0.0, 0.0]))
    assert tie.choice(2)[1].all()


def test_activation_by_hand():
    subject = Subject(options=RunOptions(dtype="fp32"))
    oracle = Experts(subject.config, subject.file_weights, subject.options)
    gate, up = np.array([[20.0, -20.0, 0.0]]), np.array([[-30.0, 30.0, 1.0]])
    silu = 10 / (1 + np.exp(-10.0))
    wanted = [[-silu * 10 * 0.5, -20 / (1 + np.exp(20.0)) * 10 * 0.5, 0]]
    np.testing.assert_allclose(oracle.activation(gate, up, np.array([0.5]), 10.0), wanted, rtol=1e-15)


def test_one_token_that_went_elsewhere_is_counted():
    subject = Subject()
    config = subject.config
    oracle = Experts(config, subject.file_weights, subject.options)
    x = np.random.default_rng(0).normal(size=(3, config.hidden_size))
    scores = Scores.of(x, oracle.weights, 1, hashed=False)
    ids, _ = scores.choice(2)
    ids[1] = (ids[1] + 1) % config.n_routed_experts
    weights = scores.weights(ids, config.routed_scaling_factor)
    routed, shared = oracle.mixture(x, 1, ids, weights)
    seen = Captured(x, ids, weights, oracle.kept(routed + shared))
    found = compare(seen, 1, [0, 5, 6], oracle, rows=3)
    assert found.wrong == [1]
    assert found.equal == 1
    assert found.weight_error == 0
