"""The sink probe: healthy runs pass, each fault fails on the finding that names it, and the oracle is right."""

import itertools
import math

import numpy as np
import pytest
import torch

from kernels.attention import reference as attention
from probes.fault import Fault
from probes.faults import FAULTS
from probes.finding import Verdict
from probes.probe import run_probe, silent
from probes.sink.oracle import ENTRIES, WINDOWS, Attended, Shape, cases
from probes.sink.probe import QUICK
from probes.sink.watch import Heads
from probes.subject import Subject
from runtime.options import RunOptions
from tests.make_checkpoint import micro_config, tiny_config, write_checkpoint

SHAPE = Shape("small", 3, 8, 4)


def report(subject):
    return run_probe(QUICK, subject, silent).report


def failed(subject):
    return [finding.what for finding in report(subject).findings if finding.failed]


def softmax_loop(q, keys, sink):
    """``sum_j exp(l_j) k_j / (exp(sink) + sum_j exp(l_j))`` of one head in Python floats."""
    mass = [math.exp(sum(a * b for a, b in zip(q, key, strict=True)) / math.sqrt(len(q))) for key in keys]
    total = sum(mass) + math.exp(sink)
    return [sum(m * key[c] for m, key in zip(mass, keys, strict=True)) / total for c in range(len(q))]


def test_the_oracle_is_a_softmax_with_a_sink():
    rng = np.random.default_rng(0)
    q, keys, sink = rng.normal(size=(2, 4)), rng.normal(size=(5, 4)), np.array([0.5, -math.inf])
    out = Attended.to(q, keys).output(sink)
    for head in (0, 1):
        assert out[head].tolist() == pytest.approx(softmax_loop(q[head], keys.tolist(), sink[head]))
    assert (Attended.to(q, keys).output(np.array([math.inf, math.inf])) == 0).all()


def test_the_grid_is_every_window_with_every_kind_of_entries():
    grid = [(case.window_state, case.entries_state) for case in cases(SHAPE, torch.float32, 3, 0)]
    assert grid == list(itertools.product(WINDOWS, ENTRIES))
    one_wide = {case.window_state for case in cases(Shape("narrow", 1, 8, 1), torch.float32, 3, 0)}
    assert one_wide == set(WINDOWS) - {"partly filled"}


def test_the_grid_is_what_it_says():
    for case in cases(SHAPE, torch.float32, 3, 0):
        last, window, capacity = case.first + len(case.q) - 1, case.window, len(case.ring)
        full = case.first >= window - 1
        assert full == case.window_state.startswith("full")
        wrapped = max(0, case.first - window + 1) // capacity != last // capacity
        assert wrapped == (case.window_state == "full, ring wrapped"), case.window_state
        seen = [len(row) for row in case.seen]
        finished = [(case.first + i + 1) // case.ratio if case.ratio else 0 for i in range(len(case.q))]
        match case.entries_state:
            case "no entries" | "none finished" | "selection empty":
                assert sum(seen) == 0
            case "all finished" | "all selected":
                assert seen == finished
                assert all(seen)
            case _:
                assert all(0 < some <= most for some, most in zip(seen, finished, strict=True))
                assert not full or seen[-1] < finished[-1]
        # the reference reads the same keys
        out = attention.attend(
            case.q, case.ring, case.first, window, case.entries, case.ratio, case.selected, torch.zeros(3)
        )
        for i, attended in enumerate(case.attended()):
            assert out[i].numpy() == pytest.approx(attended.output(np.zeros(3)), rel=1e-4, abs=1e-5)


def test_rows_that_must_not_be_read_are_noise():
    for case in cases(SHAPE, torch.float32, 3, 0):
        positions = range(max(0, case.first - case.window + 1), case.first + len(case.q))
        unseen = np.setdiff1d(np.arange(len(case.ring)), [p % len(case.ring) for p in positions])
        assert (case.ring[unseen].norm(dim=1) > 50).all()
        assert case.entries is None or (case.entries[-3:].norm(dim=1) > 50).all()


def test_sinks_are_recovered_from_rounded_outputs():
    rng = np.random.default_rng(0)
    sink, heads = np.array([0.5, -3.0, 2.0]), Heads()
    for position in range(50):
        attended = Attended.to(rng.normal(size=(3, 64)), rng.normal(size=(6, 64)))
        out = torch.from_numpy(attended.output(sink)).bfloat16().double().numpy()
        heads.add(out, attended, sink, 2.0**-8, position)
    assert heads.acted() == pytest.approx(sink, abs=0.01)
    assert (np.abs(heads.taken() - heads.taken_by(sink)) < heads.allowed()).all()
    assert heads.unexplained < 1
    assert (np.abs(heads.taken() - heads.taken_by(sink + 0.1)) > heads.allowed()).all()


def test_a_nan_stays_the_worst():
    rng, sink, heads = np.random.default_rng(0), np.zeros(1), Heads()
    for position, factor in enumerate((1.0, math.nan, 1.0)):
        attended = Attended.to(rng.normal(size=(1, 8)), rng.normal(size=(3, 8)))
        heads.add(factor * attended.output(sink), attended, sink, 2.0**-8, position)
    assert math.isnan(heads.unexplained)
    assert heads.position == 1


def test_a_nan_at_an_infinite_sink_is_seen():
    def ops(healthy):
        def attend(q, ring, first, window, entries, ratio, selected, sink):  # exp(sink - sink) where it is infinite
            out = healthy.attend(q, ring, first, window, entries, ratio, selected, sink)
            return torch.where((sink == math.inf)[:, None] & (entries is None), math.nan, out)

        return healthy._replace(attend=attend)

    assert [name.split("sinks ")[1][:4] for name in failed(Subject(fault=Fault("local", "", "", ops=ops)))] == ["+inf"]


def test_the_demo_passes():
    found = report(Subject())
    assert not found.failed, [finding for finding in found.findings if finding.failed]
    assert len(found.findings) < 40


IN_GRID = {"the file's", "0", "-inf", "+inf", "30", "one per head"}


@pytest.mark.parametrize(
    ("fault", "kinds", "share", "unexplained"),
    [
        ("rank-0-sinks", {"the file's", "one per head"}, {0, 1, 2, 3}, set()),
        ("sink-in-numerator", IN_GRID - {"-inf"}, {0, 1, 2, 3}, {0, 1, 2, 3}),
        ("mscale-in-softmax", IN_GRID - {"+inf"}, {1, 2, 3}, {1, 2, 3}),
        ("ring-off-by-one", IN_GRID - {"+inf"}, {0, 1, 2, 3}, {0, 1, 2, 3}),
        ("entries-off-by-one", IN_GRID - {"+inf"}, {1, 3}, {1, 3}),  # the one HCA entry in sight is its own neighbour
        ("future-block-visible", IN_GRID - {"+inf"}, {2}, {2}),
    ],
)
def test_a_fault_fails_on_the_findings_that_name_it(fault, kinds, share, unexplained):
    findings = [finding for finding in report(Subject(fault=FAULTS[fault])).findings if finding.failed]
    grid = {finding.what.split("sinks ")[1].split(":")[0] for finding in findings if finding.layer is None}
    assert grid == kinds
    assert {finding.layer for finding in findings if finding.what.startswith("share")} == share
    assert {finding.layer for finding in findings if finding.what.startswith("part")} == unexplained


def test_sinks_read_from_the_wrong_place_are_seen_in_the_run():
    def inject(model):
        model.blocks[1].attention.sink = model.blocks[3].attention.sink  # the op itself is right

    found = report(Subject(fault=Fault("local", "", "", inject=inject))).findings
    assert [(finding.what[:5], finding.layer) for finding in found if finding.failed] == [("share", 1)]


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (tiny_config(), RunOptions()),
        (tiny_config(), RunOptions(numerics="plain", dtype="fp32")),
        (micro_config(compress_ratios=[0, 0]), RunOptions(numerics="plain")),
        (micro_config(max_position_embeddings=40), RunOptions(numerics="plain")),
    ],
)
def test_other_checkpoints_pass(tmp_path, config, options):
    write_checkpoint(tmp_path, config, seed=1)
    found = report(Subject(directory=tmp_path, options=options))
    assert not found.failed, [finding for finding in found.findings if finding.failed]


@pytest.mark.parametrize("alike", [0.25, -60.0])
def test_sinks_that_cannot_be_told_apart_are_vacuous(tmp_path, alike):
    def adjust(name, values):
        return torch.full_like(values, alike) if name.endswith("attn_sink") else values

    write_checkpoint(tmp_path, micro_config(), seed=1, adjust=adjust)
    found = report(Subject(directory=tmp_path, options=RunOptions(numerics="plain"))).findings
    assert [finding.layer for finding in found if finding.verdict is Verdict.VACUOUS] == [0, 1]
    assert {finding.what for finding in found if finding.failed} == {"sinks of the run"}


def test_infinite_sinks_of_a_checkpoint(tmp_path):
    def adjust(name, values):
        return torch.tensor([math.inf, -math.inf]) if name.endswith("attn_sink") else values

    write_checkpoint(tmp_path, micro_config(), seed=1, adjust=adjust)
    found = report(Subject(directory=tmp_path, options=RunOptions(numerics="plain")))
    assert not found.failed, [finding for finding in found.findings if finding.failed]
