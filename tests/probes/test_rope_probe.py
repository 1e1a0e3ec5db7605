"""The rope probe: healthy runs pass, each fault fails on the findings that name it, and the oracle is right."""

import cmath
import math
from dataclasses import replace

import mpmath  # torch requires sympy, which requires it
import numpy as np
import pytest
import torch

from model.config import LayerKind
from probes.fault import Fault
from probes.faults import FAULTS
from probes.finding import Verdict
from probes.probe import run_probe, silent
from probes.rope.oracle import GOLDEN, GOLDEN_DIM, GOLDEN_PAIRS, POSITIONS, Table, apart, pairs
from probes.rope.probe import QUICK
from probes.rope.watch import Turned
from probes.subject import Subject
from runtime.options import RunOptions
from tests.make_checkpoint import micro_config, tiny_config, write_checkpoint


def report(subject, probe=QUICK):
    return run_probe(probe, subject, silent).report


def failed(fault):
    """What fails, without the words after a colon or comma."""
    found = report(Subject(fault=fault)).findings
    return {finding.what.split(", ")[0].split(": over")[0] for finding in found if finding.failed}


def exact_frequency(theta, yarn, pair):
    """Radians per position with 50 digits."""
    dim = GOLDEN_DIM
    kept = mpmath.power(theta, -mpmath.mpf(2 * pair) / dim)
    if yarn is None:
        return kept

    def pair_that_turns(times):
        original = yarn.original_max_position_embeddings
        return dim * mpmath.log(original / (times * 2 * mpmath.pi)) / (2 * mpmath.log(theta))

    low, high = mpmath.floor(pair_that_turns(yarn.beta_fast)), mpmath.ceil(pair_that_turns(yarn.beta_slow))
    slowed = min(max((pair - low) / (high - low), 0), 1)
    return kept / yarn.factor * slowed + kept * (1 - slowed)


@pytest.mark.parametrize("which", list(GOLDEN), ids=str)
def test_the_golden_angles_are_what_fifty_digits_give(which):
    assert [0, *GOLDEN[which]] == list(POSITIONS)
    with mpmath.workdps(50):
        for position, known in GOLDEN[which].items():
            for pair, (cos, sin) in zip(GOLDEN_PAIRS, known, strict=True):
                angle = position * exact_frequency(*which, pair)
                assert (cos, sin) == (
                    pytest.approx(float(mpmath.cos(angle)), rel=1e-9),
                    pytest.approx(float(mpmath.sin(angle)), rel=1e-9),
                )


@pytest.mark.parametrize("which", list(GOLDEN), ids=str)
def test_the_oracle_gives_the_golden_angles(which):
    angles = Table.of(GOLDEN_DIM, *which).angles(np.array(list(GOLDEN[which])))[:, list(GOLDEN_PAIRS)]
    for row, known in zip(angles, GOLDEN[which].values(), strict=True):
        assert (np.cos(row), np.sin(row)) == (
            pytest.approx([cos for cos, _ in known], abs=1e-8),
            pytest.approx([sin for _, sin in known], abs=1e-8),
        )


def test_directions_apart():
    assert apart(np.cos([3.1]), np.sin([3.1]), np.array([-3.1])) == pytest.approx([2 * math.pi - 6.2])
    assert apart(np.cos([0.5]), np.sin([0.5]), np.array([0.5 + 200 * math.pi])) == pytest.approx([0], abs=1e-12)


def test_pairs_are_neighbours_of_the_last_dims():
    assert pairs(np.arange(8.0), 4).tolist() == [4 + 5j, 6 + 7j]


def test_turned_by_hand():
    table, turned = Table.of(4, 100.0, None), Turned()  # frequencies 1 and 0.1
    before = np.array([[9.0, 1.0, 2.0, 3.0, 4.0]])
    a, b = ((x * cmath.exp(1j * angle)) for x, angle in ((1 + 2j, 7.0), (3 + 4j, 0.7)))
    after = np.array([[-1.0, a.real, a.imag, b.real, b.imag]])
    turned.see(before, after, table, np.array([7]), 1e-9, 1)
    assert turned.share < 1e-3
    assert (turned.rows, turned.last) == (1, 7)
    turned.see(after, before, table, np.array([7]), 1e-9, -1)
    assert turned.share < 1e-3
    turned.see(before, after, table, np.array([8]), 1e-9, 1)
    assert turned.radians == pytest.approx(1.0)
    assert turned.evidence["pair"] == 0
    turned.see(before, after * math.nan, table, np.array([7]), 1e-9, 1)
    turned.see(before, after, table, np.array([7]), 1e-9, 1)
    assert math.isnan(turned.share)


def test_the_demo_passes():
    found = report(Subject())
    assert not found.failed, [finding for finding in found.findings if finding.failed]
    assert len(found.findings) < 40


def of_run(*kinds, without=()):
    """Names of the findings about everything that layers of these kinds rotate in a run."""
    tokens = {"queries turned at their tokens' positions", "window KV turned at its tokens' positions"}
    output = {"attention output turned back at its tokens' positions"}
    entries = {"compressed entries turned at the first position of their block"}
    keys = {
        "index queries turned at their tokens' positions",
        "index keys turned at the first position of their block",
    }
    of = {"SWA": tokens | output, "HCA": tokens | output | entries, "CSA": tokens | output | entries | keys}
    return {f"{kind} layers: {what}" for kind in kinds for what in of[kind] if what.split()[0] not in without}


def only(*things):
    """Of the findings about a run, those about things that begin so."""
    return {name for name in of_run("SWA", "CSA", "HCA") if name.split(": ")[1].startswith(things)}


SLOW = " with YaRN x16"


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        ("window-theta", {"table of SWA layers: angle off theta 10000"} | of_run("SWA")),
        ("yarn-on-window-layers", {"table of SWA layers: angle off theta 10000"} | of_run("SWA")),
        (
            "yarn-dropped",
            {f"table of {kind} layers: angle off theta 160000{SLOW}" for kind in ("CSA", "HCA")} | of_run("CSA", "HCA"),
        ),
        (
            "rope-halves",
            {"golden quarter turn: neighbours (a", "inverse restores"} | of_run("SWA", "CSA", "HCA"),
        ),
        ("compressed-keys-unrotated", only("compressed", "index keys")),
        ("no-inverse-rotation", only("attention output")),
        ("mscale-in-softmax", set()),  # the angles are right
    ],
)
def test_a_fault_fails_on_the_findings_that_name_it(fault, names):
    assert failed(FAULTS[fault]) == names


def test_entries_at_the_last_position_of_their_block_are_seen():
    class Late:
        def __init__(self, rotation):
            self.rotation = rotation

        def at(self, first, count, step=1):
            return self.rotation.at(first + step - 1, count, step)

    def inject(model):
        for layer in (1, 3):
            compressor = model.blocks[layer].attention.compressor
            compressor.rotation = Late(compressor.rotation)

    what = "compressed entries turned at the first position of their block"
    names = failed(Fault("local", "", "", inject=inject))
    assert f"CSA layers: {what}" in names
    assert names & of_run("SWA", "HCA") == set()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda cos, sin: (1.02 * cos, 1.02 * sin), "length of (cos"),
        (lambda cos, sin: (cos.bfloat16().float(), sin.bfloat16().float()), "table of SWA layers"),
    ],
)
def test_tables_that_are_scaled_or_coarse_are_seen(change, name):
    def inject(model):
        rotation = model.blocks[0].attention.rotation
        at = rotation.at
        rotation.at = lambda *of: change(*at(*of))

    assert any(what.startswith(name) for what in failed(Fault("local", "", "", inject=inject)))


def test_an_op_that_touches_other_dims_is_seen():
    def ops(healthy):
        return healthy._replace(rotate=lambda x, cos, sin: 1.5 * healthy.rotate(x, cos, sin))

    names = failed(Fault("local", "", "", ops=ops))
    assert {"golden quarter turn: neighbours (a", "numbers before the rope dims that turning back changed"} <= names


@pytest.mark.parametrize(
    ("config", "options", "kinds"),
    [
        (tiny_config(), RunOptions(prefill_chunk=37), 3),
        (tiny_config(head_dim=88, qk_rope_head_dim=24), RunOptions(numerics="plain", dtype="fp32"), 3),
        (micro_config(rope_scaling=None), RunOptions(numerics="plain"), 2),
        (micro_config(compress_ratios=[0, 0]), RunOptions(numerics="plain"), 1),
    ],
)
def test_other_checkpoints_pass(tmp_path, config, options, kinds):
    write_checkpoint(tmp_path, config, seed=1)
    found = report(Subject(directory=tmp_path, options=options))
    assert not found.failed, [finding for finding in found.findings if finding.failed]
    assert len([finding for finding in found.findings if finding.what.startswith("table of")]) == kinds


@pytest.mark.parametrize(("positions", "vacuous"), [(100, {"HCA"}), (200, {"HCA"}), (300, set())])
def test_too_few_entries_are_vacuous(positions, vacuous, tmp_path):
    write_checkpoint(tmp_path, tiny_config(max_position_embeddings=positions, rope_scaling=None), seed=1)
    found = report(Subject(tmp_path), replace(QUICK, tokens=1)).findings  # of HCA none, one at position 0, two
    names = {finding.what for finding in found if finding.verdict is Verdict.VACUOUS}
    assert {name.split()[0] for name in names} == vacuous
    assert {finding.what for finding in found if finding.failed} == names


def test_kinds_of_the_table(tmp_path):
    write_checkpoint(tmp_path, tiny_config(), seed=1)
    config = Subject(directory=tmp_path).config
    assert Table.of_kind(config, LayerKind.SWA).yarn is None
    assert Table.of_kind(config, LayerKind.HCA).freqs[0] == 1
    slowed = Table.of_kind(config, LayerKind.CSA).slowed
    assert slowed[0] == 0
    assert slowed[-1] == 1
    assert torch.tensor(slowed).diff().min() >= 0
