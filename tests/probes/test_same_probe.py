"""The probe `same`: ways that agree pass, a fault fails at the site that it touches, what is not run is told."""

import importlib.util
from importlib import metadata

import pytest
import torch
from safetensors.torch import load_file, save_file

from fathom.kernels.ops import REFERENCE
from fathom.model.observe.observer import observed
from fathom.probes import same, ways
from fathom.probes.faults import FAULTS
from fathom.probes.finding import Verdict
from fathom.probes.judge.checks import Judged, Status
from fathom.probes.judge.pairs import Apart
from fathom.probes.judge.recording import KEPT
from fathom.probes.probe import run_probe, silent
from fathom.probes.same import (
    AS_RUN,
    DTYPE,
    NUMERICS,
    OP_SET,
    QUICK,
    ROUNDED_CALLS,
    ROUNDED_OP_SET,
    TRANSFORMERS,
    Compared,
    Same,
    calls,
    token,
)
from fathom.probes.subject import Subject, run_tokens
from fathom.probes.ways import Way, without_transformers
from fathom.runtime.options import RunOptions
from tests.make_checkpoint import tiny_config, write_checkpoint

CALLS = calls(101)


def run(subject, *pairs):
    return run_probe(Same(QUICK.tokens, QUICK.rows, pairs or QUICK.pairs), subject, silent).report


def test_the_healthy_demo_agrees_with_itself_and_with_transformers():
    report = run(Subject())
    assert not report.failed, [finding for finding in report.findings if finding.failed]
    names = ["op set", "calls of 101", "transformers", "op set, deployed", "calls of 7, deployed"]
    assert [finding.what.split(":")[0] for finding in report.findings] == names
    assert all(0 < finding.measured < 0.7 for finding in report.findings)
    assert all(0 < finding.evidence["bit_equal"] < finding.evidence["rows"] for finding in report.findings)
    overview, by_site = report.parts[:2]
    assert all(row[3] > 20000 for row in overview.rows), "every site of every layer, row by row"
    assert [row[0] for row in by_site.rows] == [site.name for site in KEPT]


@pytest.mark.parametrize(
    ("fault", "pair", "site", "layer", "at"),
    [
        ("window-theta", TRANSFORMERS, "attention.query", 0, None),
        ("compressed-keys-unrotated", TRANSFORMERS, "attention.entry", 1, None),
        ("parameter-uninitialised", TRANSFORMERS, "experts.input", 3, None),
        ("relu-dropped", OP_SET, "indexer.selected", 1, None),
        ("comb-transposed", OP_SET, "attention.streams", 0, 0),
        ("frontier-lost", CALLS, "attention.entry", 1, 103),  # the first block that the second call closes
        ("stale-frontier", CALLS, "attention.entry", 1, 3),
        ("query-rotated-key-not", ROUNDED_OP_SET, "indexer.key_used", 1, 3),
        ("fp8-scale-not-power-of-two", ROUNDED_OP_SET, "attention.latent", 0, 0),
        ("experts-of-few-tokens-unrounded", ROUNDED_CALLS, "experts.output", 0, 0),
        ("frontier-lost", AS_RUN, "attention.entry", 1, 7),
    ],
)
def test_a_fault_is_found_where_it_sits(fault, pair, site, layer, at):
    report = run(Subject(fault=FAULTS[fault]), pair)
    (finding,) = report.findings
    assert finding.verdict is Verdict.FAIL
    assert finding.what.endswith(f"first apart at {site}")
    assert finding.layer == layer
    assert at in (None, finding.evidence["token"])
    assert f"{pair.name} parts at {site} of layer {layer}, token {finding.evidence['token']}" in report.summary
    assert finding.measured > 2
    off = finding.evidence["off_its_oracle"]
    assert max(map(float, off)) > 2, "at least one of the two is off the oracle"


def test_the_side_that_is_wrong_is_told():
    """The op set of the run has the fault, the other has none."""
    (finding,) = run(Subject(fault=FAULTS["comb-transposed"]), OP_SET).findings
    wrong, right = map(float, finding.evidence["off_its_oracle"])
    assert right < 1 < wrong


def test_two_op_sets_share_a_fault_of_the_wiring():
    """What the page claims of them, and why transformers is there."""
    assert not run(Subject(fault=FAULTS["window-theta"]), OP_SET, CALLS).failed


def test_ways_of_unlike_rounding_agree_each_by_its_own():
    report = run(Subject(), NUMERICS, DTYPE)
    assert not report.failed
    assert all(finding.evidence["largest"] > 0.5 for finding in report.findings), "though far apart"


@pytest.mark.parametrize(
    ("release", "run"), [("5.17.0", False), ("4.60", False), ("5.23rc1", True), ("6.0.0.dev0", True)]
)
def test_a_transformers_that_is_too_old_is_not_run(release, run, monkeypatch):
    monkeypatch.setattr(metadata, "version", lambda _: release)
    why = without_transformers(Subject())
    assert why is None if run else why == f"transformers {release} is installed, want 5.23 or later"


def test_without_transformers_the_page_says_so(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    report = run(Subject(), OP_SET, TRANSFORMERS)
    assert not report.failed
    assert [finding.what for finding in report.findings] == ["op set: any row, over what rounding explains"]
    assert "transformers not run (transformers is not installed)" in report.summary
    assert report.parts[0].rows[1][-1] == "not run: transformers is not installed"
    assert Same(pairs=(TRANSFORMERS,)).vacuous(Subject()) == "no pair can be run"


def test_other_checkpoints(tmp_path):
    write_checkpoint(tmp_path / "tiny", tiny_config(), seed=3)
    report = run(Subject(tmp_path / "tiny", ops=REFERENCE))
    assert not report.failed, [finding for finding in report.findings if finding.failed]
    assert report.parts[0].rows[0][1:3] == ["reference, plain, fp32, one call", "cpu, plain, fp32, one call"]
    assert "transformers not run (transformers:" in report.summary, "its loader wants a quantization_config"
    write_checkpoint(tmp_path / "odd", tiny_config(head_dim=32, compress_ratios=[0, 4, 128, 64]), seed=3)
    report = run(Subject(tmp_path / "odd", options=RunOptions("plain", "fp32")), OP_SET, TRANSFORMERS, ROUNDED_OP_SET)
    assert not report.failed
    assert "transformers not run (transformers has one ratio for all HCA layers" in report.summary
    assert "op set, deployed not run (--numerics deployed: head_dim" in report.summary


def test_a_single_index_weight_that_cancels_is_no_difference(tmp_path):
    write_checkpoint(tmp_path, tiny_config(index_n_heads=1), seed=1)
    assert not run(Subject(tmp_path), OP_SET).failed


def test_a_prompt_that_selects_everything_is_vacuous(tmp_path):
    write_checkpoint(tmp_path, tiny_config(max_position_embeddings=200, rope_scaling=None), seed=0)
    report = run(Subject(tmp_path))
    assert [finding.verdict for finding in report.findings] == [Verdict.VACUOUS]
    assert QUICK.length(Subject().config) == 264
    write_checkpoint(tmp_path / "wide", tiny_config(index_topk=100), seed=0)
    assert QUICK.length(Subject(tmp_path / "wide").config) == 4 * 2 * 100 + 4


def test_models_are_left_as_they_were():
    subject = Subject()
    tokens = subject.tokens(40)
    before = run_tokens(subject.load(subject.with_options(numerics="plain", dtype="fp32")).model, tokens, 40)[0]
    run(subject, OP_SET)
    model = subject.load(subject.with_options(numerics="plain", dtype="fp32")).model
    assert torch.equal(run_tokens(model, tokens, 40)[0], before)
    assert not observed(model).listening


def test_a_tensor_that_one_run_lacks_fails(monkeypatch):
    def without(way, subject, tokens, path):
        ways.run(way, subject, tokens, path)
        if way.other_ops:
            tensors = load_file(path)
            save_file({name: x for name, x in tensors.items() if name != "layers.2.attention.entry"}, path)

    monkeypatch.setattr(same, "run", without)
    (finding,) = run(Subject(), OP_SET).findings
    assert finding.failed
    assert finding.what.endswith("first apart at layers.2.attention.entry")
    assert finding.evidence["why"] == "one run alone has layers.2.attention.entry"


def test_a_comparison_of_which_most_was_not_judged_shows_nothing():
    results = [Judged(0, "attention.kv", 4, why="nothing but noise"), Judged(0, "attention.query", 4)]
    unlike = [Apart(0, "attention.kv", torch.arange(4), torch.ones(4))]
    results.append(Judged(0, "streams", 4, rows=4, bound=1.0, status=Status.AGREES))
    finding = Compared(OP_SET, results, unlike, [], None).finding(Subject().config)
    assert finding.verdict is Verdict.VACUOUS
    assert finding.evidence["why"] == "2 of 3 sites were not judged, as nothing but noise"
    assert same._outcome(Compared(OP_SET, results, unlike, [], None), Subject().config) == (
        "op set: 2 of 3 sites were not judged, as nothing but noise"
    )
    finding = Compared(OP_SET, results[1:], unlike, [], None).finding(Subject().config)
    assert finding.verdict is Verdict.PASS
    assert finding.evidence["not_judged"] == 1


def test_runs_without_a_tensor_in_common_fail():
    finding = Compared(OP_SET, [], [], ["embedded"], None).finding(Subject().config)
    assert finding.verdict is Verdict.FAIL
    assert finding.evidence == {"why": "one run alone has embedded", "missing": 1}


def test_an_entry_stands_for_the_last_token_of_its_block():
    config = Subject().config
    assert token(config, Judged(1, "attention.entry", 0), 2) == 11
    assert token(config, Judged(2, "attention.entry", 0), 0) == 127
    assert token(config, Judged(2, "attention.query", 0), 5) == 5


def test_transformers_with_other_weights_than_the_files_writes_no_recording(tmp_path):
    """It would draw what is missing, and drop what has no place."""
    folder = tmp_path / "demo"
    folder.mkdir()
    for path in Subject().directory.iterdir():
        (folder / path.name).symlink_to(path.resolve())
    files = sorted(folder.glob("*.safetensors"))
    tensors = load_file(files[-1])
    name = max(tensors)
    files[-1].unlink()
    save_file({other: x for other, x in tensors.items() if other != name}, files[-1], {"format": "pt"})
    with pytest.raises(ways.CheckpointError, match=r"^transformers: "):
        ways.run(Way(transformers=True), Subject(folder), [0, 5, 7], tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()
