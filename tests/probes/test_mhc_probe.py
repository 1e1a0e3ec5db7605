"""The mHC probe: healthy runs pass, each fault fails on the finding that names it, and the oracle is right."""

from dataclasses import replace

import mpmath  # torch requires sympy, which requires it
import numpy as np
import pytest
import torch

from model.observe.observer import observed
from probes.fault import Fault
from probes.faults import FAULTS
from probes.finding import Verdict
from probes.mhc import oracle
from probes.mhc.probe import QUICK
from probes.mhc.watch import Worst
from probes.probe import run_probe, silent
from probes.subject import Subject
from runtime.options import RunOptions
from tests.make_checkpoint import micro_config, tiny_config, write_checkpoint


def report(subject, probe=QUICK):
    return run_probe(probe, subject, silent).report


def failed(subject, probe=QUICK):
    return [finding.what for finding in report(subject, probe).findings if finding.failed]


def golden(iterations):
    """Sinkhorn of the golden logits with 50 digits."""
    with mpmath.workdps(50):
        eps = mpmath.mpf("1e-6")
        mass = [[mpmath.exp(mpmath.mpf(value)) for value in row] for row in oracle.GOLDEN_LOGITS]
        comb = [[value / mpmath.fsum(row) + eps for value in row] for row in mass]
        for step in range(2 * iterations - 1):
            if step % 2:
                comb = [[value / (mpmath.fsum(row) + eps) for value in row] for row in comb]
            else:
                sums = [mpmath.fsum(column) + eps for column in zip(*comb, strict=True)]
                comb = [[value / total for value, total in zip(row, sums, strict=True)] for row in comb]
        return [float(value) for row in comb for value in row]


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_the_golden_comb_is_what_fifty_digits_give(iterations):
    assert oracle.GOLDEN_COMB[iterations] == pytest.approx(golden(iterations), rel=1e-11)
    ours = oracle.sinkhorn(np.array(oracle.GOLDEN_LOGITS), iterations, oracle.GOLDEN_EPS)
    assert ours.flatten() == pytest.approx(golden(iterations), rel=1e-11)


def test_every_variant_of_sinkhorn_is_far_from_the_golden_comb():
    logits, right = np.array(oracle.GOLDEN_LOGITS), np.array(oracle.GOLDEN_COMB[20]).reshape(4, 4)

    def off(comb):
        return np.abs(comb / right - 1).max() / oracle.sinkhorn_error(20)

    assert off(oracle.sinkhorn(logits.T, 20, 1e-6).T) > 1000  # columns first
    assert off(oracle.sinkhorn(logits, 20, 1e-6).T) > 1000
    assert off(oracle.sinkhorn(logits, 19, 1e-6)) > 1000
    assert off(oracle.sinkhorn(logits, 21, 1e-6)) > 1000
    assert off(oracle.sinkhorn(logits, 20, 0.0)) > 1000


def test_written_by_hand():
    streams = np.array([[[1.0], [10.0]]])
    comb = np.array([[[0.25, 0.75], [0.5, 0.5]]])  # [j, k]: stream j to k
    new, sizes = oracle.written(np.array([[100.0]]), streams, np.array([[1.0, 2.0]]), comb)
    assert new[0, :, 0].tolist() == [100 + 0.25 + 5, 200 + 0.75 + 5]
    assert sizes.tolist() == new.tolist()


def test_worst_keeps_a_nan():
    worst = Worst()
    for got in (1.0, np.nan, 9.0):
        worst.see(np.array([[got]]), np.zeros((1, 1)), np.ones(1), 0, 7)
    assert np.isnan(worst.share)
    assert worst.evidence["position"] == 7


def test_the_demo_passes():
    found = report(Subject())
    assert not found.failed, found.findings
    assert len(found.findings) < 40


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("comb-transposed", "golden direction"),
        ("comb-transposed", "streams against post"),
        ("row-first-sinkhorn", "golden comb, 20 iterations"),
        ("one-sinkhorn-iteration", "comb against Sinkhorn"),
        ("one-sinkhorn-iteration", "rows of comb off 1"),
        ("post-not-doubled", "golden post"),
        ("post-not-doubled", "post against the formula"),
        ("parameter-uninitialised", "input of a sublayer"),
    ],
)
def test_a_fault_fails_on_the_finding_that_names_it(fault, what):
    assert any(name.startswith(what) for name in failed(Subject(fault=FAULTS[fault])))


def test_a_transposed_comb_fails_nothing_else():
    names = failed(Subject(fault=FAULTS["comb-transposed"]))
    assert [name.split()[0] for name in names] == ["golden", "streams"]


def changed(**parameters):
    """A fault in the values of one mHC of the last layer."""

    def inject(model):
        for name, change in parameters.items():
            part = model.blocks[-1].experts_streams
            setattr(part, name, change(getattr(part, name)))

    return Fault("local", "", "", inject=inject)


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (changed(base=lambda x: x + torch.tensor([0.01] + [0.0] * 23)), "pre against the formula"),
        (changed(fn=lambda x: x.bfloat16().float()), "post against the formula"),
        (changed(scale=lambda x: x * torch.tensor([1, 1, 1.001])), "comb against Sinkhorn"),
        (changed(iterations=lambda x: x - 1), "rows of comb off 1"),
    ],
)
def test_slightly_wrong_parameters_are_seen(fault, what):
    assert any(name.startswith(what) for name in failed(Subject(fault=fault)))


@pytest.mark.parametrize(
    ("by", "ranges"), [(1.0, ["pre, largest", "post, largest"]), (-1.0, ["pre, least", "post, least"])]
)
def test_weights_out_of_range_are_seen(by, ranges):
    def ops(healthy):
        def hyper_weights(*of):
            pre, post, comb = healthy.hyper_weights(*of)
            return pre + by, post + by, comb

        return healthy._replace(hyper_weights=hyper_weights)

    names = failed(Subject(fault=Fault("local", "", "", ops=ops)))
    assert [name for name in names if name.startswith(("pre, ", "post, "))] == ranges


def test_a_wrong_head_is_seen():
    def inject(model):
        model.hyper_head.base = model.hyper_head.base.roll(1)

    names = failed(Subject(fault=Fault("local", "", "", inject=inject)))
    assert [name.split()[0] for name in names] == ["output"]


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (tiny_config(), RunOptions(prefill_chunk=17)),
        (tiny_config(), RunOptions(numerics="plain", dtype="fp32")),
        (micro_config(), RunOptions(numerics="plain")),  # two streams
    ],
)
def test_other_checkpoints_pass(tmp_path, config, options):
    write_checkpoint(tmp_path, config, seed=1)
    found = report(Subject(directory=tmp_path, options=options))
    assert not found.failed, [finding for finding in found.findings if finding.failed]


def symmetric(name, values):
    """Every comb symmetric, whatever the streams are: transposed or not is all the same."""
    if name.endswith(("hc_attn_fn", "hc_ffn_fn")):
        return torch.cat((values[:8], torch.zeros_like(values[8:])))
    if name.endswith(("hc_attn_base", "hc_ffn_base")):
        return torch.cat((values[:8], torch.eye(4).flatten()))
    return values


def test_a_comb_that_is_its_own_transpose_is_vacuous(tmp_path):
    write_checkpoint(tmp_path, tiny_config(), seed=1, adjust=symmetric)
    found = report(Subject(directory=tmp_path)).findings
    vacuous = [finding for finding in found if finding.verdict is Verdict.VACUOUS]
    assert [finding.layer for finding in vacuous] == [0, 1, 2, 3]
    assert {finding.what for finding in found if finding.failed} == {"direction of comb in the run"}


def test_one_stream_is_vacuous(tmp_path):
    write_checkpoint(tmp_path, micro_config(hc_mult=1), seed=1)
    subject = Subject(directory=tmp_path, options=RunOptions(numerics="plain"))
    assert report(subject).findings[0].verdict is Verdict.VACUOUS


def test_no_listener_stays():
    subject = Subject(fault=FAULTS["one-sinkhorn-iteration"])  # ends in a tripwire
    assert report(subject).failed
    assert not observed(subject.model).listening


def test_only_its_own_tripwire_is_its_finding():
    assert run_probe(QUICK, Subject(fault=FAULTS["indexer-returns-none"]), silent).tripped
    assert not run_probe(QUICK, Subject(fault=FAULTS["row-first-sinkhorn"]), silent).tripped


def test_a_probe_longer_than_the_model_allows_is_cut(tmp_path):
    write_checkpoint(tmp_path, tiny_config(max_position_embeddings=32), seed=1)
    assert "32 tokens" in report(Subject(directory=tmp_path), replace(QUICK, tokens=100)).summary
