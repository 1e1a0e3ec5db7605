"""The recall probe: healthy runs pass, faults of the indexer fail on the finding that names them."""

from dataclasses import replace

import pytest
import torch

from fathom.kernels.formats.rows import length
from fathom.kernels.formats.stored import Fp4Keys, Fp8Keys
from fathom.kernels.indexer.reference import index_scores, select
from fathom.kernels.ops import CPU, REFERENCE
from fathom.model.cache.layers import CsaCache
from fathom.model.observe import sites
from fathom.model.observe.observer import listening
from fathom.probes.fault import Fault
from fathom.probes.faults import FAULTS
from fathom.probes.finding import Verdict
from fathom.probes.probe import run_probe, silent
from fathom.probes.recall import (
    FULL,
    QUICK,
    Recall,
    Spectrum,
    compare,
    constructed_attention,
    constructed_selections,
    correlations,
    draw,
    exact_scores,
    rounding_error,
)
from fathom.probes.shared.recorder import Recorder
from fathom.probes.subject import Subject, run_tokens
from fathom.runtime.options import RunOptions
from tests.grids import on_demand
from tests.make_checkpoint import micro_config, tiny_config, write_checkpoint

HELD = "index keys held otherwise than written"
LEVEL = "share of rows whose best and k-th score are equal"
A = "recall, oracle A, mean over rows, lowest over lengths and residues"
WORSE = "worse entries selected than fp32 rounding explains, most for one token"
CORRELATION = "correlation of the scores with those of unrounded q and k, mean over rows, lowest over lengths"
B = "recall, oracle B, mean over rows, lowest over lengths"
UPTO = "constructed, up to 4096 entries: rows, of 276, whose selection has not the best scores"
BEYOND = "constructed, entries beyond 4096: rows, of 828, whose selection has not the best scores"
EQUAL = "constructed, equal scores: rows, of 1104, that do not take the lower entry"
READ = "constructed, selected entries and all: rows, of 644, that do not attend once to each of them"


def run(probe=QUICK, **subject):
    return run_probe(probe, Subject(**subject), silent).report


def failed(report):
    return {finding.what for finding in report.findings if finding.failed}


def of(report, what):
    return [finding for finding in report.findings if finding.what == what]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("recall") / "tiny"
    write_checkpoint(directory, tiny_config(), seed=3)
    return directory


def test_the_healthy_demo_passes():
    report = run()
    assert not report.failed
    assert [finding.measured for finding in of(report, A)] == [1, 1]  # both CSA layers
    assert [finding.measured for finding in of(report, WORSE)] == [0, 0]
    assert all(0.8 < finding.measured < 1 for finding in of(report, B))  # FP4 costs something


@pytest.mark.parametrize(
    ("fault", "findings"),
    [
        ("per-head-keys", {A, WORSE, B, UPTO, BEYOND}),
        ("relu-dropped", {A, WORSE, UPTO, BEYOND}),
        ("key-columns-permuted", {A, WORSE, B, UPTO, BEYOND}),
        ("keys-lost", {A, WORSE, UPTO, BEYOND, EQUAL}),
        ("query-rotated-key-not", {CORRELATION, B}),
        ("indexer-compressor-not-loaded", {LEVEL, CORRELATION}),
        ("entries-wrapped", {BEYOND}),
        ("ties-to-the-higher-entry", {EQUAL}),
        ("first-tile-again", {READ}),
        ("selected-wrapped", {READ}),
        ("entries-of-the-first-tile-alone", {READ}),
        ("entries-off-by-one", {READ}),
        *on_demand(  # seen in what is constructed alone, below
            ("late-keys-of-a-long-call", {BEYOND}),
            ("narrow-keys-scaled-as-the-one-before", {UPTO, BEYOND, EQUAL}),
            ("late-selections-of-a-long-call", {READ}),
            ("late-entries-of-a-long-call", {READ}),
            ("gathered-entries-scaled-as-the-one-before", {READ}),
        ),
    ],
)
def test_each_fault_fails_on_what_names_it(fault, findings):
    assert failed(run(fault=FAULTS[fault])) == findings


def test_the_evidence_says_which_side_is_not_rotated():
    (first, _) = of(run(fault=FAULTS["query-rotated-key-not"]), CORRELATION)
    assert first.evidence["queries_off_their_rotation"] < 0.2
    assert first.evidence["keys_off_their_rotation"] > 1


def test_a_key_that_the_cache_does_not_hold_as_written_is_found():
    def inject(model):
        class Forgetful(type(model)):
            def __call__(self, tokens, state):
                hidden = super().__call__(tokens, state)
                for cache in state.layers:
                    if isinstance(cache, CsaCache):
                        cache.keys.data[3, 0] += 1
                return hidden

        model.__class__ = Forgetful

    report = run(fault=Fault("x", "x", "x", inject=inject))
    assert failed(report) == {HELD}
    assert [finding.measured for finding in of(report, HELD)] == [1, 1]


@pytest.mark.parametrize("options", [RunOptions(), RunOptions(numerics="plain", dtype="fp32")])
def test_another_checkpoint_passes(tiny, options):
    report = run(directory=tiny, options=options)
    assert not report.failed
    if options.numerics == "plain":  # nothing is rounded, so the oracles agree
        assert [finding.measured for finding in of(report, B)] == [1, 1]


def test_the_context_is_as_long_as_the_selection_asks_for(tmp_path):
    assert QUICK._lengths(Subject().config) == (300,)
    assert replace(QUICK, lengths=(64,))._lengths(Subject().config) == (128,)  # of 16 entries the demo selects all
    write_checkpoint(tmp_path, micro_config(index_topk=512), seed=1)
    assert QUICK._lengths(Subject(directory=tmp_path).config) == (4096,)
    assert not run(directory=tmp_path, options=RunOptions(numerics="plain")).failed
    write_checkpoint(tmp_path, micro_config(index_topk=512, max_position_embeddings=2051, rope_scaling=None), seed=1)
    assert QUICK.needs(Subject(directory=tmp_path)) == "the run takes 2052 positions, the model has 2051"
    write_checkpoint(tmp_path, micro_config(compress_ratios=[0, 128]), seed=1)
    assert "no CSA layer" in (QUICK.needs(Subject(directory=tmp_path)) or "")


def test_tokens_that_select_all_they_see_are_left_out():
    report = run(replace(QUICK, lengths=(80,)))
    # the last 64 tokens are 16 .. 79; token 67 is the first that sees 17 entries
    assert [finding.evidence["rows"] for finding in of(report, LEVEL)] == [13, 13]


def test_a_recorder_keeps_the_rows_of_its_positions_whatever_the_calls():
    subject, positions = Subject(), [0, 6, 7, 13, 14, 29]
    everything = Recorder((sites.KV, sites.INDEX_KEY, sites.SELECTED))
    chosen = Recorder((sites.KV, sites.INDEX_KEY, sites.SELECTED), positions)
    with listening(subject.model, everything.listeners()), listening(subject.model, chosen.listeners()):
        run_tokens(subject.model, subject.tokens(30), 7)
    for site in (sites.KV, sites.SELECTED):
        assert everything.rows(site, 1).shape[0] == 30
        assert torch.equal(chosen.rows(site, 1), everything.rows(site, 1)[positions])
    assert chosen.rows(sites.SELECTED, 1)[0].tolist() == [-1] * 7  # of 7 entries in the end, none for the first token
    assert torch.equal(chosen.rows(sites.INDEX_KEY, 1), everything.rows(sites.INDEX_KEY, 1))  # a row per entry: all


def test_draws_of_no_more_than_are_selected_are_vacuous():
    report = run(Recall(lengths=(300,), drawn_entries=(1024,), drawn_top_ks=(512, 1024), drawn_tokens=2))
    assert not any(finding.failed for finding in report.findings if finding.layer is not None)
    (vacuous,) = of(report, "drawn, top-k 1024")  # 1024 entries, 1024 selected
    assert vacuous.verdict is Verdict.VACUOUS
    judged = [finding for finding in report.findings if "top-k 512" in finding.what]
    assert [finding.verdict for finding in judged] == [Verdict.PASS, Verdict.PASS, Verdict.MEASURED, Verdict.PASS]


@pytest.mark.parametrize("fault", ["keys-lost", *on_demand("relu-dropped", "key-columns-permuted")])
def test_a_draw_at_real_dimensions_catches_faulty_ops(fault):
    probe = replace(FULL, lengths=(300,), drawn_entries=(2048,), drawn_top_ks=(512,), drawn_tokens=2)
    failures = failed(run(probe, fault=FAULTS[fault]))
    assert "drawn, top-k 512: recall, oracle A, mean over rows, lowest over sizes" in failures


def test_exact_scores_are_those_of_the_equation():
    q = torch.tensor([[[1.0, 2.0], [-1.0, 0.0]]])  # one token, two heads
    keys = torch.tensor([[1.0, 1.0], [-2.0, 0.5], [0.0, 0.0]])
    weights = torch.tensor([[2.0, -1.0]])
    # head 0: 3, -1, 0 -> 3, 0, 0; head 1: -1, 2, 0 -> 0, 2, 0; 2 * first - second
    assert exact_scores(q, weights, keys).tolist() == [[6, -2, 0]]
    generator = torch.Generator().manual_seed(0)
    q, keys = torch.randn(3, 4, 16, generator=generator), torch.randn(50, 16, generator=generator)
    weights = torch.randn(3, 4, generator=generator)
    exact, single = exact_scores(q, weights, keys), index_scores(q, weights, keys)
    assert ((exact - single).abs() <= rounding_error(q, weights, keys)).all()
    assert rounding_error(q, weights, keys).max() < 1e-3 * exact.abs().max()  # and it is no empty bound


def test_compare_counts_hits_ties_and_what_no_rounding_explains():
    ulp = 2.0**-22  # of fp32 at 3
    scores = torch.tensor([[9.0, 3.0, 3.0 - ulp, 3.0 - 3 * ulp, -9.0, 7.0]] * 6, dtype=torch.float64)
    visible = torch.tensor([6, 6, 6, 6, 6, 5])
    selected = torch.tensor([[0, 1, 5], [0, 2, 5], [0, 3, 5], [0, 4, 5], [0, 0, 5], [0, 1, 2]])
    error = torch.full((6, 1), 2 * ulp, dtype=torch.float64)
    found = compare(selected, scores, visible, 3, error)
    assert found.recall.tolist() == pytest.approx([1, 1, 2 / 3, 2 / 3, 2 / 3, 1])
    assert found.ties.tolist() == [0, 1, 0, 0, 0, 0]
    assert found.passed_over.tolist() == [0, 0, 0, 1, 0, 0]
    assert found.kept[0] == pytest.approx(1)
    assert found.kept[3] < found.kept[4] < 1  # an entry below average is worse than none
    assert compare(selected, scores, visible, 3).passed_over.tolist() == [0, 0, 1, 1, 0, 0]


def test_an_entry_that_is_not_visible_never_counts():
    scores = torch.tensor([[1.0, 2.0, 3.0, 99.0]], dtype=torch.float64)
    found = compare(torch.tensor([[2, 3]]), scores, torch.tensor([3]), 2)
    assert found.recall.tolist() == [0.5]
    assert found.passed_over.tolist() == [1]


def test_correlations_look_at_visible_entries_alone_and_survive_constants():
    a = torch.tensor([[1.0, 2.0, 3.0, -50.0], [5.0, 5.0, 5.0, 5.0]], dtype=torch.float64)
    b = torch.tensor([[2.0, 4.0, 6.0, 70.0], [1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    assert correlations(a, b, torch.tensor([3, 4])).tolist() == pytest.approx([1, 0])


def test_draws_have_the_spectrum_they_are_given():
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(32, 32, generator=generator)
    rows = torch.randn(4000, 32, generator=generator) @ mixing + 3
    like = Spectrum.of(rows[:, None].expand(-1, 2, -1), rows, torch.ones(4000, 2))
    drawn = like.keys(40_000, generator).double()
    assert torch.allclose(drawn.mean(0), rows.double().mean(0), atol=0.2)
    ours, theirs = torch.cov(drawn.T), torch.cov(rows.double().T)
    assert (ours - theirs).norm() < 0.05 * theirs.norm()


def test_a_draw_counts_what_a_selection_misses():
    model = Subject().model
    like = Spectrum(
        torch.zeros(1, 128, dtype=torch.float64),
        torch.eye(128, dtype=torch.float64)[None],
        torch.zeros(128, dtype=torch.float64),
        torch.eye(128, dtype=torch.float64),
        torch.tensor([[1.0], [-0.5]]),
    )

    def half(q, head_weights, keys, first, ratio, k):  # half of what it selects is the right half
        return torch.cat((select(q, head_weights, keys, first, ratio, k // 2), torch.full((2, k // 2), -1)), 1)

    arithmetic = model.arithmetic
    try:
        model.arithmetic = arithmetic._replace(ops=arithmetic.ops._replace(select=half))
        ((found,), negative) = draw(model, like, (256,), (128,), 2, 0, silent)
    finally:
        model.arithmetic = arithmetic
    assert (found.a.recall < 0.51).all()
    assert 0.3 < negative < 0.7
    assert (found.narrow.recall > 0.9).all()  # that one is of the oracle's scores, not of the selection


def with_ops(**ops):
    """The demo's model with other ops, for the constructed calls alone."""

    class Model:
        device = torch.device("cpu")
        arithmetic = Subject().model.arithmetic

    Model.arithmetic = Model.arithmetic._replace(ops=CPU._replace(**ops))
    return Model


@pytest.mark.parametrize("ops", [CPU, REFERENCE], ids=lambda ops: ops.name)
def test_there_is_one_right_answer_to_what_is_constructed(ops):
    model = with_ops(select=ops.select, attend=ops.attend)
    assert [finding.measured for finding in constructed_selections(model, 3)] == [0, 0, 0]
    assert constructed_attention(model, 3).measured == 0


def test_one_entry_that_is_not_selected_shows():
    model = with_ops(select=lambda *given: (found := CPU.select(*given)).masked_fill(found == 4096, 0))
    assert [finding.what for finding in constructed_selections(model, 0) if finding.failed] == [BEYOND]


@pytest.mark.parametrize(
    ("fault", "what", "place"),
    [
        ("late-keys-of-a-long-call", BEYOND, "top 16 of 4099 entries, token 30 of 40: without entry 4097"),
        ("late-selections-of-a-long-call", READ, "600 selected of 640 entries, token 1 of 40, not to number 257"),
        ("late-entries-of-a-long-call", READ, "all of 5000 entries, token 1 of 40"),
        ("gathered-entries-scaled-as-the-one-before", READ, "16 selected of 40 entries in FP8, token 1 of 1"),
        ("narrow-keys-scaled-as-the-one-before", UPTO, "top 16 of 2048 entries in FP8, token 1 of 1"),
    ],
)
def test_what_is_constructed_says_which_calls_and_which_form_are_wrong(fault, what, place):
    faulty = FAULTS[fault].ops(CPU)
    model = with_ops(select=faulty.select, attend=faulty.attend)
    findings = [constructed_attention(model, 0)] if what == READ else constructed_selections(model, 0)
    (found,) = (finding for finding in findings if finding.what == what)
    assert found.evidence["first"][0].startswith(place)


@pytest.mark.parametrize("form", ["in FP8", "in FP4"])
def test_keys_of_each_form_are_of_scales_that_matter(form):
    def select(q, head_weights, keys, *given):
        if {"in FP8": Fp8Keys, "in FP4": Fp4Keys}[form] is type(keys):
            keys = keys._replace(scale=keys.scale[:1].expand_as(keys.scale).contiguous())
        return CPU.select(q, head_weights, keys, *given)

    firsts = [
        found.evidence["first"][0] for found in constructed_selections(with_ops(select=select), 0) if found.failed
    ]
    assert len(firsts) == 2
    assert all(form in first for first in firsts)


@pytest.mark.parametrize("place", [0, 15])
def test_one_row_that_attention_reads_twice_shows(place):
    def attend(q, ring, first, window, entries, ratio, selected, sink):
        every = torch.arange(length(entries), dtype=torch.int32).repeat(len(q), 1)
        selected = every if selected is None else selected.clone()
        selected[0, place] = selected[0, place - 1]
        return CPU.attend(q, ring, first, window, entries, ratio, selected, sink)

    found = constructed_attention(with_ops(attend=attend), 0)
    assert found.measured == 42, "the first row of each call"
    assert found.evidence["first"][0].endswith(f"not to number {place + 1} of them")
