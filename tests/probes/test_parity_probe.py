"""The parity probe: settings that agree pass, each fault fails at the site that it touches, and distances are right."""

import importlib.util
import math

import pytest
import torch

from fathom.kernels.formats.reference import decode
from fathom.kernels.ops import REFERENCE
from fathom.model.checkpoint.names import Role, translate
from fathom.model.errors import CheckpointError
from fathom.model.observe import sites
from fathom.model.observe.observer import observed
from fathom.probes import parity
from fathom.probes.faults import FAULTS
from fathom.probes.finding import Verdict, at_most
from fathom.probes.parity import (
    COMPARED,
    DEPLOYED_CALLS,
    DEPLOYED_OP_SET,
    DTYPE,
    NUMERICS,
    OP_SET,
    PLAIN,
    QUICK,
    TRANSFORMERS,
    Canonical,
    Comparison,
    Key,
    Pair,
    Parity,
    Trace,
    chunks,
)
from fathom.probes.probe import run_probe, silent
from fathom.probes.subject import Subject, run_tokens
from fathom.runtime.options import DEMO, RunOptions
from tests.make_checkpoint import tiny_config, write_checkpoint

CALLS = chunks(101)


def run(subject, *pairs, probe=QUICK):
    return run_probe(Parity(probe.tokens, pairs) if pairs else probe, subject, silent).report


def comparison(rows, *, bound=1e-3, steered=False):
    """A comparison against a trace that holds `rows`, by site and layer."""
    subject, held = Subject(), Trace()
    for (site, layer), tensor in rows.items():
        held(site, layer, tensor)
    pair = Pair("", PLAIN, PLAIN, at_most(bound), steered=steered)
    return Comparison(pair, subject.config, subject.file_weights, held)


def test_the_healthy_demo_agrees_with_itself_and_with_transformers():
    report = run(Subject())
    assert not report.failed, [finding for finding in report.findings if finding.failed]
    names = ["op set", "calls of 101", "transformers", "op set, deployed", "calls of 7, deployed"]
    assert [finding.what.split(":")[0] for finding in report.findings] == names
    assert all(finding.evidence["rows_beyond"] == 0 < finding.evidence["bit_equal"] for finding in report.findings)
    # fp32 and a few layers: a fifth of the bound, on processors that add up in other orders
    assert all(0 < finding.measured < 1e-5 for finding in report.findings)
    overview, by_site = report.parts[:2]
    assert all(row[4] > 20000 for row in overview.rows), "every site of every layer, row by row"
    assert [row[0] for row in by_site.rows] == [site.name for site in COMPARED]


@pytest.mark.parametrize(
    ("fault", "pair", "site", "layer", "token"),
    [
        ("window-theta", TRANSFORMERS, "attention.query", 0, 1),
        ("compressed-keys-unrotated", TRANSFORMERS, "attention.entry", 1, 7),
        ("parameter-uninitialised", TRANSFORMERS, "experts.input", 3, 0),
        ("relu-dropped", OP_SET, "indexer.selected", 1, None),
        ("comb-transposed", OP_SET, "attention.streams", 0, None),
        ("frontier-lost", CALLS, "attention.entry", 1, 103),  # the first block that the second call closes
        ("stale-frontier", CALLS, "attention.entry", 1, 3),
        ("query-rotated-key-not", DEPLOYED_OP_SET, "indexer.key_used", 1, 3),
        ("fp8-scale-not-power-of-two", DEPLOYED_OP_SET, "attention.latent", 0, 0),
        ("experts-of-few-tokens-unrounded", DEPLOYED_CALLS, "experts.output", 0, 0),
    ],
)
def test_a_fault_is_found_where_it_sits(fault, pair, site, layer, token):
    report = run(Subject(fault=FAULTS[fault]), pair)
    (finding,) = report.findings
    assert finding.verdict is Verdict.FAIL
    assert finding.what.endswith(f"first apart at {site}")
    assert finding.layer == layer
    assert token in (None, finding.evidence["token"])
    assert f"{pair.name} parts at {site} of layer {layer}, token {finding.evidence['token']}," in report.summary
    assert 5e-5 < finding.evidence["by"] <= 2


def test_two_op_sets_share_a_fault_of_the_wiring():
    """What the page claims of them, and why transformers is there."""
    assert not run(Subject(fault=FAULTS["window-theta"]), OP_SET, CALLS).failed


def test_without_transformers_the_page_says_so(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    report = run(Subject(), OP_SET, TRANSFORMERS)
    assert not report.failed
    assert [finding.what for finding in report.findings] == ["op set: distance of any row"]
    assert "transformers not run (transformers is not installed)" in report.summary
    assert report.parts[0].rows[1][-1] == "not run: transformers is not installed"
    assert Parity(pairs=(TRANSFORMERS, DTYPE)).vacuous(Subject()) == "no pair of settings that should agree can be run"


def test_pairs_that_differ_by_design_are_measured():
    report = run(Subject(), OP_SET, NUMERICS)
    finding = report.findings[1]
    assert finding.verdict is Verdict.MEASURED
    assert 1e-3 < finding.measured < finding.evidence["largest"] < 1


def test_other_checkpoints(tmp_path):
    write_checkpoint(tmp_path / "tiny", tiny_config(), seed=3)
    report = run(Subject(tmp_path / "tiny", ops=REFERENCE))
    assert not report.failed, [finding for finding in report.findings if finding.failed]
    assert report.parts[0].rows[0][1:3] == ["reference, plain, fp32, one call", "cpu, plain, fp32, one call"]
    write_checkpoint(tmp_path / "odd", tiny_config(head_dim=32, compress_ratios=[0, 4, 128, 64]), seed=3)
    report = run(Subject(tmp_path / "odd", options=RunOptions("plain", "fp32")), OP_SET, TRANSFORMERS, DEPLOYED_OP_SET)
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
    theirs = parity.transformers_model(DEMO.resolve())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in theirs.modules())


def test_transformers_holds_the_weights_of_the_file():
    weights = Subject().file_weights
    theirs = dict(parity.transformers_model(DEMO.resolve()).state_dict())
    down = torch.stack([decode(weights.matrix(f"layers.2.ffn.experts.{e}.w2.weight")) for e in range(8)])
    assert torch.equal(theirs["model.layers.2.mlp.experts.down_proj"], down)
    assert torch.equal(theirs["lm_head.weight"], weights.vector("head.weight").float())
    assert {translate(name).role for name in theirs} == {Role.WEIGHT, Role.STACKED_GATE_UP, Role.STACKED_DOWN}


def test_a_weight_without_a_place_is_refused(monkeypatch):
    def mistaken(name):
        return translate("model.embed_tokens.weight" if name == "lm_head.weight" else name)

    monkeypatch.setattr(parity, "translate", mistaken)
    with pytest.raises(CheckpointError, match="1 parameters have no place in its model, first head"):
        parity.transformers_model.__wrapped__(DEMO)
    monkeypatch.setattr(parity, "translate", lambda _: None)
    with pytest.raises(CheckpointError, match="is in no dialect"):
        parity.transformers_model.__wrapped__(DEMO)


def test_distances_by_hand():
    one = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    other = torch.tensor([[3.0, 9.0], [0.0, 0.0], [0.0, 2.0], [math.nan, 0.0]])
    pair = comparison({(sites.LATENT, 0): one})
    pair(sites.LATENT, 0, other[:3])  # in two calls
    pair(sites.LATENT, 0, other[3:])
    key = Key(sites.LATENT, 0)
    assert pair.differences[key].tolist() == pytest.approx([5 / math.hypot(3, 9), 0, 1, math.inf])
    assert pair.examples[key] == (0, {"element": [1], "one": 4.0, "other": 9.0})


def test_a_wrong_index_weight_in_a_small_row_is_a_difference():
    """Such a row is held against the usual length; what rounding leaves in it is within the bound, a tenth is not."""
    key, held = Key(sites.INDEX_WEIGHTS, 1), torch.tensor([[1.0, 0.5], [-1.0, 0.8], [0.01, 0.02]])
    rounded, wrong = held.clone(), held.clone()
    rounded[2] += 2e-6
    wrong[2] *= 1.1
    for other, caught in ((rounded, False), (wrong, True)):
        pair = comparison({key: held}, bound=OP_SET.bound.value)
        pair(*key, other)
        assert (pair.differences[key] > pair.pair.limit).tolist() == [False, False, caught]
        assert (key in pair.examples) == caught
    assert pair.examples[key][0] == 2


def test_what_is_missing_or_too_wide_is_infinitely_far():
    key, hidden = Key(sites.LATENT, 0), Key(sites.MIXED, 0)
    pair = comparison({key: torch.ones(3, 2), hidden: torch.ones(3, 2)})
    pair(*key, torch.ones(2, 2))
    pair(sites.KV, 0, torch.ones(1, 2))  # the first run had no such site
    pair.close(hidden=(sites.MIXED,))
    assert pair.differences[key].tolist() == [0, 0, math.inf]
    assert pair.differences[Key(sites.KV, 0)].tolist() == [math.inf]
    assert hidden not in pair.differences
    wide = comparison({key: torch.ones(3, 2)})
    wide(*key, torch.ones(3, 4))
    assert wide.differences[key].tolist() == [math.inf] * 3


def test_an_entry_stands_for_the_last_token_of_its_block():
    pair = comparison({})
    assert pair.token(Key(sites.ENTRY, 1), 2) == 11
    assert pair.token(Key(sites.ENTRY, 2), 0) == 127
    assert pair.token(Key(sites.QUERY, 2), 5) == 5


def picked(scores, mine, theirs):
    """One token, one head with a query of 1, keys that are the scores: what became of the other side's picks."""
    rows = {
        (sites.INDEX_QUERY_USED, 1): torch.ones(1, 1, 1),
        (sites.INDEX_KEY_USED, 1): torch.tensor(scores)[:, None],
        (sites.INDEX_WEIGHTS, 1): torch.ones(1, 1),
        (sites.SELECTED, 1): torch.tensor([mine]),
    }
    pair = comparison(rows)
    goes_on = pair(sites.SELECTED, 1, torch.tensor([theirs]))
    return pair.differences[Key(sites.SELECTED, 1)].item(), goes_on, pair.excused


def test_a_choice_between_equals_is_excused_and_followed():
    key = Key(sites.SELECTED, 1)
    share, goes_on, excused = picked([1.0, -2.0, -3.0, 0.5], [0, 1, 3], [0, 2, 3])  # both are 0 after the ReLU
    assert (share, excused) == (0, {key: [0]})
    assert goes_on.tolist() == [[0, 1, 3]]
    share, goes_on, excused = picked([1.0, 0.2, 0.1, 0.5], [0, 1, 3], [0, 2, 3])
    assert share == pytest.approx(2 / 6)
    assert (goes_on, excused) == (None, {})
    assert picked([1.0, -2.0, -3.0, 0.5], [0, 1, 3], [-1, 0, 3])[0] == pytest.approx(1 / 5), "one pick too few"
    assert picked([1.0, -2.0, -3.0, 0.5], [0, 1, 3], [0, 0, 3])[0] > 0, "one pick twice"


def test_experts_that_score_alike_are_excused_with_their_weights():
    config, weights = Subject().config, Subject().file_weights
    bias = weights.vector("layers.1.ffn.gate.bias").double()
    scores, order = (math.log(2) ** 0.5 + bias).sort()  # of an input of zeros: sqrt(softplus(0)), and the bias
    gaps = scores - scores[0]
    for other, excused in ((order[1], True), (order[-1], False)):
        rows = {
            (sites.EXPERTS_INPUT, 1): torch.zeros(1, config.hidden_size),
            (sites.EXPERT_IDS, 1): order[None, :1],
            (sites.EXPERT_WEIGHTS, 1): torch.ones(1, 1),
        }
        pair = comparison(rows)
        found, scale = pair._scores(Key(sites.EXPERT_IDS, 1), 0)
        assert torch.allclose(found[order], scores)
        assert scale == 0, "zeros round to nothing"
        between = float(gaps[1] + gaps[-1]) / 2 / pair.pair.limit
        pair._scores = lambda *_, told=(found, between): told
        pair(sites.EXPERT_IDS, 1, other[None, None])
        goes_on = pair(sites.EXPERT_WEIGHTS, 1, torch.full((1, 1), 0.25))
        assert pair.excused == ({Key(sites.EXPERT_IDS, 1): [0]} if excused else {})
        assert (goes_on is not None) == excused
        assert pair.differences[Key(sites.EXPERT_WEIGHTS, 1)].item() == (0 if excused else 0.75)


def test_a_table_leaves_nothing_to_excuse():
    rows = {(sites.EXPERTS_INPUT, 0): torch.ones(1, 128), (sites.EXPERT_IDS, 0): torch.tensor([[1, 2]])}
    pair = comparison(rows)
    assert pair(sites.EXPERT_IDS, 0, torch.tensor([[1, 3]])) is None
    assert pair.differences[Key(sites.EXPERT_IDS, 0)].item() == 0.5


def test_steering_puts_the_second_run_back_on_the_first():
    held = torch.tensor([[1.0, 2.0]])
    pair = comparison({(sites.LATENT, 0): held}, steered=True)
    tensor = torch.tensor([[1.0, 5.0]], dtype=torch.bfloat16)
    Canonical(Subject().config, pair).listeners()[sites.LATENT](0, tensor)
    assert tensor.tolist() == [[1.0, 2.0]]
    assert pair.differences[Key(sites.LATENT, 0)].item() > 0.5, "the distance before it was put back"


def test_one_form_for_decisions_and_back():
    seen = {}
    config = Subject().config

    def sink(site, _, tensor):
        seen[site] = tensor
        return tensor

    canonical = Canonical(config, sink)
    picks = torch.tensor([[0, 2, 5, -1], [1, 3, 4, 6]], dtype=torch.int32)
    assert torch.equal(canonical(sites.SELECTED, 1, picks), picks)
    assert seen[sites.SELECTED].shape == (2, config.index_topk)
    assert seen[sites.SELECTED][0].tolist() == [-1] * 13 + [0, 2, 5]
    ids, weights = torch.tensor([[5, 2], [1, 7]]), torch.tensor([[0.9, 0.6], [0.5, 1.0]])
    assert torch.equal(canonical(sites.EXPERT_IDS, 1, ids), ids)
    assert torch.equal(canonical(sites.EXPERT_WEIGHTS, 1, weights), weights)
    assert seen[sites.EXPERT_IDS].tolist() == [[2, 5], [1, 7]]
    torch.testing.assert_close(seen[sites.EXPERT_WEIGHTS], torch.tensor([[0.6, 0.9], [0.5, 1.0]]))
