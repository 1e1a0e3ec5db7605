"""The projections probe: healthy runs pass, and each wrong wiring fails on what it wires."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kernels.compress import reference as pool
from kernels.formats.reference import decode
from kernels.formats.stored import Dense
from kernels.norm import reference as norm
from kernels.rope import reference as rope
from model.config import ModelConfig
from probes.fault import Fault
from probes.faults import FAULTS
from probes.faults_in_wiring import WIRING
from probes.finding import Verdict
from probes.probe import run_probe, silent
from probes.projections.known import BF16_STEP, E4M3_STEP, Known, pooled, product, rms_norm, rotated
from probes.projections.oracle import Series
from probes.projections.page import CLOSE
from probes.projections.probe import QUICK, ProjectionsProbe
from probes.projections.rows import Compared
from probes.rope.oracle import Table
from probes.subject import Subject
from runtime.options import RunOptions
from tests.make_checkpoint import tiny_config, write_checkpoint

PLAIN, OWN = "plain fp32", "deployed bf16"
PLAIN_FP32 = RunOptions(numerics="plain", dtype="fp32")
SHORT = replace(QUICK, tokens=40, rows=8)  # for checkpoints whose longest window is one of 4
BREAKS = {
    "query-norm-skipped": {"queries"},
    "query-normed-to-length-1": {"queries"},
    "pooling-gate-halved": {"entries", "index keys"},
    "position-bias-shifted": {"entries", "index keys"},
    "pooling-without-gate": {"entries", "index keys"},
    "series-swapped": {"entries", "index keys"},
    "index-weights-without-sign": {"index head weights"},
    "index-weights-permuted": {"index head weights"},
    "output-groups-permuted": {"attention output"},
}


def run(probe=QUICK, **subject):
    return run_probe(probe, Subject(**subject), silent).report


def broken(report):
    """Things and numerics that failed."""
    return {tuple(finding.what.split(":")[0].split(", ")) for finding in report.findings if finding.failed}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """An SWA and a CSA layer."""
    directory = tmp_path_factory.mktemp("projections") / "tiny"
    write_checkpoint(directory, tiny_config(num_hidden_layers=2, compress_ratios=[0, 4]), seed=3)
    return directory


def test_the_healthy_demo_passes_and_every_mistake_would_show():
    report = run()
    assert not report.failed
    assert len(report.findings) == 10 + 18  # eight projections, logits and embeddings; in deployed bf16 the eight twice
    plain = {finding.what: finding.measured for finding in report.findings if PLAIN in finding.what}
    assert plain.pop("embeddings, plain fp32: numbers that are not the file's") == 0
    assert all(0 < share < 0.2 for share in plain.values())  # bounded for certain, and so generously
    moved = {(row[0], row[2], row[3]): row[5] for row in report.parts[-1].rows}
    assert len(moved) == 4 * (2 + 1) + 2 * (4 + 4 + 2) + 3  # queries and output; of CSA; of HCA, which has one series
    assert moved["2", "entries", "gate halved"] > 100
    assert min(moved.values()) > 10


@pytest.mark.parametrize("name", BREAKS)
def test_each_fault_fails_on_what_it_wires_and_on_nothing_else(name, tiny):
    found = broken(run(SHORT, directory=tiny, fault=FAULTS[name]))
    assert found == {(thing, numerics) for thing in BREAKS[name] for numerics in (PLAIN, OWN)}


def test_every_fault_in_wiring_has_its_test():
    assert {fault.name for fault in WIRING} == set(BREAKS)


def _scaled(attention, name, by):
    weight = decode(getattr(attention, name))
    setattr(attention, name, Dense(weight * by))


@pytest.mark.parametrize(
    ("name", "things"),
    [
        ("wq_a", {"low-rank query"}),
        ("wkv", {"window KV"}),
        ("wo_a", {"attention output"}),
        ("wo_b", {"attention output"}),
    ],
)
def test_a_column_that_is_off_by_a_hundredth_shows_in_fp32(name, things, tiny):
    def inject(model):
        linear = getattr(model.blocks[1].attention, name)
        by = torch.ones(linear.weight.shape[1])
        by[5] = 1.01
        _scaled(linear, "weight", by)

    report = run(SHORT, directory=tiny, fault=Fault("x", "x", "x", inject=inject), options=PLAIN_FP32)
    assert broken(report) == {(thing, PLAIN) for thing in things}
    assert {finding.layer for finding in report.findings if finding.failed} == {1}


def test_inputs_that_are_not_rounded_show_in_the_runs_own_numerics_alone(tiny):
    fault = Fault("x", "x", "x", ops=lambda ops: ops._replace(simulate_fp8=lambda x, group: x))  # noqa: ARG005
    found = broken(run(SHORT, directory=tiny, fault=fault))
    assert {numerics for _, numerics in found} == {OWN}
    assert {thing for thing, _ in found} >= {"low-rank query", "queries", "window KV", "entries", "attention output"}


class _BiasOfTheFirst:
    """The projections of a compressor that biases a token that comes alone as the first of a window."""

    def __init__(self, project):
        self.project = project

    def __getattr__(self, name):
        return getattr(self.project, name)

    def __call__(self, x, call):
        return self.project(x, SimpleNamespace(first=0, count=1) if len(x) == 1 else call)


class _PoolsNothingBefore:
    """A `pool` to which the first window has a predecessor, of zeros."""

    def __init__(self, pool):
        self.pool = pool

    def __call__(self, kv, gate, previous_kv, previous_gate):
        return self.pool(kv, gate, previous_kv, previous_gate.masked_fill(previous_gate.isinf(), 0))


def _in_decode(model):
    compressor = model.blocks[1].attention.compressor
    compressor.project = _BiasOfTheFirst(compressor.project)


def _in_the_first_window(model):
    compressor = model.blocks[1].attention.compressor
    ops = compressor.arithmetic.ops
    compressor.arithmetic = compressor.arithmetic._replace(ops=ops._replace(pool=_PoolsNothingBefore(ops.pool)))


@pytest.mark.parametrize(("inject", "positions"), [(_in_decode, {32, 36}), (_in_the_first_window, {0})])
def test_an_entry_that_is_wrong_shows(inject, positions, tiny):
    report = run(SHORT, directory=tiny, fault=Fault("x", "x", "x", inject=inject), options=PLAIN_FP32)
    failed = [finding for finding in report.findings if finding.failed]
    assert [finding.what.split(",")[0] for finding in failed] == ["entries"]
    assert failed[0].evidence["position"] in positions


def test_rows_of_the_embedding_and_of_the_head_that_are_others_show(tiny):
    def inject(model):
        model.embedding.weight = model.embedding.weight.roll(1, 0)
        model.head.weight = Dense(model.head.weight.data.roll(1, 0))

    found = broken(run(SHORT, directory=tiny, fault=Fault("x", "x", "x", inject=inject)))
    assert found == {(thing, numerics) for thing in ("embeddings", "logits") for numerics in (PLAIN, OWN)}


def test_a_window_that_two_calls_share_is_looked_at(tiny):
    found = broken(run(SHORT, directory=tiny, fault=FAULTS["frontier-lost"]))
    assert {thing for thing, _ in found} == {"entries", "index keys"}


@pytest.mark.parametrize("options", [PLAIN_FP32, RunOptions(numerics="plain"), RunOptions(dtype="fp32")])
def test_other_numerics_pass(options, tiny):
    report = run(SHORT, directory=tiny, options=options)
    assert not report.failed
    assert len({finding.what.split(":")[0].split(", ")[1] for finding in report.findings}) == 1 + (
        options != PLAIN_FP32
    )


def test_a_model_that_closes_one_window_is_vacuous(tmp_path):
    write_checkpoint(tmp_path, tiny_config(max_position_embeddings=255), seed=3)
    report = run(SHORT, directory=tmp_path)
    assert [finding.verdict for finding in report.findings] == [Verdict.VACUOUS]
    assert "255 tokens close fewer than two windows of 128" in report.summary


def test_a_prompt_is_as_long_as_two_windows_need():
    config = ModelConfig.from_json(tiny_config(), "x")
    assert SHORT._length(config) == 2 * 128 + 4


def test_a_bias_that_is_the_same_at_every_position_is_vacuous(tmp_path):
    def adjust(name, values):
        return values[:1].expand_as(values).clone() if name.endswith("ape") else values

    config = tiny_config(num_hidden_layers=2, compress_ratios=[0, 4])
    write_checkpoint(tmp_path, config, seed=3, adjust=adjust)
    report = run(SHORT, directory=tmp_path)
    assert {finding.what for finding in report.findings if finding.failed} == {
        "entries: position bias a token late",
        "index keys: position bias a token late",
    }


def test_layers_are_taken_from_both_ends_of_each_kind():
    ratios = [0, *[4, 128] * 4]
    config = ModelConfig.from_json(tiny_config(num_hidden_layers=9, compress_ratios=ratios), "x")
    assert ProjectionsProbe(layers=1)._layers(config) == [0, 1, 2]
    assert ProjectionsProbe(layers=3)._layers(config) == [0, 1, 2, 5, 6, 7, 8]
    assert ProjectionsProbe(layers=8)._layers(config) == list(range(9))


# --- the oracle


def known(x):
    return Known.exact(x.double().numpy())


def within(found, wanted):
    """The largest error of fp32, as a share of what the oracle allows."""
    return float((np.abs(found.double().numpy() - wanted.value) / wanted.error).max())


def test_products_norms_rotations_and_pooling_bound_what_fp32_does():
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(64, 512, generator=generator), torch.randn(96, 512, generator=generator)
    gain = torch.randn(96, generator=generator)
    made, first = product(known(x), Dense(w)), x @ w.T
    assert 1e-3 < within(first, made) < 1
    assert made.value == pytest.approx((x.double() @ w.double().T).numpy())
    normed = rms_norm(made, gain.double().numpy(), 1e-6)
    assert 1e-3 < within(norm.rms_norm(first, gain, 1e-6), normed) < 1
    freqs, positions = rope.frequencies(64, 10000.0), torch.arange(3000, 3064)
    turned = rotated(normed, Table.of(64, 10000.0, None), positions.numpy())
    again = rope.rotate(norm.rms_norm(first, gain, 1e-6), *rope.angles(positions, freqs))
    assert 1e-3 < within(again, turned) < 1
    kv, gate = made.reshape(8, 8, 96), (3 * x[:, :96]).reshape(8, 8, 96)
    assert 1e-3 < within(pool.pool(first.reshape(8, 8, 96), gate, None, None), pooled(kv, known(gate))) < 1


def test_an_entry_pools_the_next_series_before_it_and_its_own():
    kv = torch.tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0], [8.0, 80.0], [16.0, 160.0]])  # [next | own], width 1
    bias = np.array([[0.0, 0.0], [0.0, np.log(3.0)]])  # the second token of a window counts threefold in its own series
    series = Series(known(kv), known(torch.zeros(5, 2)), bias, 1)
    assert series.pooled().value[:, 0].tolist() == pytest.approx([(10 + 3 * 20) / 4, (1 + 2 + 40 + 3 * 80) / 6])
    wrong = series.mistaken()
    assert wrong["no gate"].pooled().value[:, 0].tolist() == pytest.approx([15, (1 + 2 + 40 + 80) / 4])
    assert wrong["series swapped"].pooled().value[0, 0] == pytest.approx(1.5)  # bias goes with its series
    assert wrong["position bias a token late"].pooled().value[0, 0] == pytest.approx((3 * 10 + 20) / 4)


def test_roundings_of_what_was_seen_are_no_matter_of_chance():
    x = known(torch.randn(4, 128, generator=torch.Generator().manual_seed(0)))
    assert x.e4m3(128).step == 0
    made = product(x.e4m3(128), Dense(torch.eye(128)))
    assert made.bf16().step == BF16_STEP
    assert made.bf16().e4m3(64, -64).step == BF16_STEP + E4M3_STEP
    assert (made.e4m3(64, -64).value[:, -64:] == made.value[:, -64:]).all()


def test_a_nan_is_the_worst_row_there_is():
    wanted = Known(np.ones((3, 4)), np.full((3, 4), 1e-3))
    found = np.ones((3, 4))
    found[1, 2] = np.nan
    one = Compared.of("x", 0, found, wanted, {}, np.arange(3))
    assert np.isnan(one.share)
    assert one.evidence["position"] == 1
    found[1, 2] = 1.002
    assert Compared.of("x", 0, found, wanted, {}, np.arange(3)).share == pytest.approx(1)
    assert CLOSE == 2**-8
