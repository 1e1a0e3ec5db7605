"""The variants probe: healthy runs pass, each fault fails on the finding that names it, and the oracles are right."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from fathom.kernels.formats import coded_rows
from fathom.kernels.ops import CPU
from fathom.model.cache.entries import Entries
from fathom.probes import variants
from fathom.probes.fault import PARTS
from fathom.probes.faults import FAULTS
from fathom.probes.finding import Verdict
from fathom.probes.probe import run_probe, silent
from fathom.probes.shared.alive import peak_alive
from fathom.probes.subject import Subject
from fathom.probes.variants import OPTIMUM, QUICK, SMALL
from fathom.runtime.options import RunOptions
from tests.make_checkpoint import tiny_config, write_checkpoint

IN_VARIANTS = [name for name, fault in FAULTS.items() if fault.in_variants]
CODA, SHARD = f"all={SMALL}", "all=shard"


def failed(*findings):
    return [finding.what for finding in findings if finding.failed]


def parts(name):
    return FAULTS[name].parts(PARTS)


def model(kv, fault=None):
    return variants._model(Subject(fault=fault and FAULTS[fault]), *kv)


def ids(count):
    return torch.tensor(Subject().tokens(count))


# --- oracles


@pytest.mark.parametrize("window", [None, 9])
def test_attention_in_float64_is_torchs(window):
    tokens = variants.draw(300, 1)
    position = torch.arange(300)
    seen = position <= position[:, None]
    if window is not None:
        seen &= position > position[:, None] - window
    k, v = (x.double().transpose(0, 1).repeat_interleave(4, 0) for x in (tokens.k, tokens.v))
    wanted = scaled_dot_product_attention(tokens.q.double().transpose(0, 1), k, v, attn_mask=seen).transpose(0, 1)
    assert (variants.attended(tokens, window) - wanted).abs().max() < 1e-13


def test_a_sink_takes_its_share_of_attention():
    q, keys = torch.randn(3, 2, 8), torch.randn(5, 8)
    hidden = torch.zeros(3, 5, dtype=torch.bool)
    hidden[0, 2:] = True
    out, weights = variants.attention(q, keys, torch.tensor([0.0, math.log(7)]), hidden)
    mass = (q.double() @ keys.double().T * 8**-0.5).exp().masked_fill(hidden[:, None], 0)
    total = mass.sum(-1) + torch.tensor([1.0, 7.0])
    torch.testing.assert_close(out, mass @ keys.double() / total[..., None])
    torch.testing.assert_close(weights[..., 0].exp(), torch.tensor([1.0, 7.0]) / total)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_pair_is_rotated_as_by_hand(interleaved):
    x, angle = torch.arange(8.0)[None, None], torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    out = variants.rotated(x, angle, interleaved=interleaved)[0, 0].tolist()
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + 4) for i in range(4)]
    for i, (a, b) in enumerate(pairs):
        cos, sin = math.cos(float(angle[0, i])), math.sin(float(angle[0, i]))
        assert (out[a], out[b]) == pytest.approx((a * cos - b * sin, a * sin + b * cos), abs=1e-12)


def test_divergence_is_zero_of_equals_and_grows_with_the_distance():
    whole = torch.randn(50, 8, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = torch.randn(50, 8, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert variants.divergence(whole, whole).abs().max() < 1e-15
    little, much = (variants.divergence(whole, whole + size * noise) for size in (1e-3, 1e-2))
    assert (little > 0).all()
    assert float(much.mean()) == pytest.approx(100 * float(little.mean()), rel=0.05)
    assert float(little.mean()) == pytest.approx(0.5e-6, rel=0.3), "half the variance of the logits' error"


def test_a_codebooks_error_is_integrated():
    for bits, optimum in OPTIMUM.items():
        error = variants.distortion(PARTS.codebook(bits, torch.device("cpu")).double())
        assert error == pytest.approx(optimum, rel=1e-3), bits
    one = math.sqrt(2 / math.pi)  # the mean of |x|
    stretched = torch.tensor([-2 * one, 2 * one], dtype=torch.float64)
    assert variants.distortion(stretched) == pytest.approx(1, rel=1e-6)  # 1 - 2 c E|x| + c^2, c twice that
    errors = [f.evidence["error"] for f in variants.codebooks(parts("shard-codebook-unfinished"))]
    assert 2e-4 < errors[-1] < 3e-3, "2.1e-3 after 20 iterations from quantiles was reported; ours start elsewhere"
    assert errors[1] == pytest.approx(OPTIMUM[2], rel=1e-3), "few centroids converge at once"


def test_bytes_are_those_of_what_was_written():
    entries = Entries(4, coded_rows.allocate(10, 64, 8, torch.device("cpu"), 0))
    assert variants.counted("", entries, lambda: None).evidence["held"] == 0
    finding = variants.counted("", entries, lambda: entries.append(torch.randn(1, 64)))
    assert finding.evidence["held"] == 10 * (64 + 2) == entries.nbytes(), "signs are a constant"


def test_the_peak_is_of_what_is_alive_at_once():
    def run():
        a = torch.ones(1000)
        b = a[10:] + 1  # a view is nothing new
        del a
        return b * 2

    assert peak_alive(run) == 4 * (1000 + 990)
    assert peak_alive(lambda: [torch.ones(10) + 1 for _ in range(50)]) == 40 * 51


def test_orders_are_whole_and_end_in_single_tokens():
    orders = variants.orders(275, (1, 3, 68), 24)
    assert all(sum(sizes) == 275 for sizes in orders.values())
    assert list(orders) == ["calls of 3", "calls of 68", "one call, then 24 steps"]
    assert orders["calls of 68"] == [68, 68, 68, 68, 3]
    assert orders["one call, then 24 steps"] == [251, *[1] * 24]


# --- healthy


def test_a_healthy_run_passes_and_judges_every_promise():
    report = run_probe(QUICK, Subject(), silent).report
    assert failed(*report.findings) == []
    told = [finding.what for finding in report.findings if finding.verdict is Verdict.PASS]
    for promise in (
        "GQA, coda, window 48 and 48 tokens: distance",
        "without banks: distance from attention to 16 tokens",
        "GQA, shard, 68 tokens, no more than sinks and window",
        "relative identity in float64, pairs of halves",
        "relative identity in float64, pairs of neighbours",
        "codebook of 8 bits",
        "GQA, shard, calls of 1, 128: stored tensors that differ",
        "GQA, coda, saved at 161",
        "GQA, shard, saved at 85",
        *(f"Llama-3.1-8B, {tokens} tokens: held" for tokens in (4096, 8192, 16384, 32768)),
        "scratch of a decoded token over the middle",
        "scratch of a decoded token over the stream",
        "scratch of a decoded token over entries",
        "512 steps: KL",
        "V4, coda, windows of all entries of 139 tokens",
        "V4, coda, rows in turns",
        "V4, shard, rows in turns",
        "V4, coda, keys: bytes told",
        "V4, shard, entries: bytes told",
        "mass of all rows",
        "attention to their means",
        "V4, coda, saved at 133",
        "V4, shard, saved at 133",
        "V4, shard, entries of 6 bits: squared error",
        "V4, shard, keys of 8 bits: squared error",
        "V4, shard at 8 bits, 1024 entries: KL of attention",
        "V4, shard in a basis, 120 entries with a mean, sinks to 30: attention",
        "V4, shard in a basis, rows in turns of 1, 128",
        "index keys: recall of 256 of 1024",
    ):
        assert any(promise in what for what in told), promise
    assert "57.98 / 101.98 / 189.98 / 365.98 MiB" in report.summary


# --- each fault, on the measurement that names it: the whole probe on each is test_fault_matrix's


def drifted(given):
    (one,) = variants.gqa_drifts(given, 512, 0, coda=False)
    yield one.grown("shard")


def put_back(model):
    yield variants.restored(model, "coda", ids(139), 6)


GROUPED = {
    "shard-mean-omitted": (lambda p: variants.identity(p, 0), "relative identity"),
    "shard-distance-negated": (lambda p: variants.rebuilt(p, 0, 90), "scores of rebuilt keys"),
    "shard-pairs-swapped": (lambda p: variants.rebuilt(p, 0, 90), "rebuilt keys, all components"),
    "shard-norm-of-the-call": (lambda p: variants.gqa_cut_alike(p, (1, 64), 0, 0), "length stored with a row"),
    "shard-codebook-unfinished": (variants.codebooks, "codebook of 8 bits"),
    "shard-stream-coded-again": (drifted, "median of the last quarter"),
    "shard-basis-not-counted": (variants.published, "4096 tokens: held"),
    "shard-all-decoded": (
        lambda p: variants.gqa_scratch(p, (8192, 16384), 0),
        "over the stream, 16384 tokens against 8192: growth",
    ),
    "coda-ring-one-short": (lambda p: variants.gqa_exact(p, 48, 0), "window 48 and 48 tokens: distance"),
    "coda-targets-not-counted": (lambda p: variants.gqa_counted(p, 0), "GQA, coda: bytes told"),
    "coda-ring-restored-from-its-start": (lambda p: variants.gqa_restored(p, (), 0), "GQA, coda, saved at 161"),
}
ROWS = {
    "shard-norm-of-the-call": (SHARD, lambda m: variants.rows_kept(m, "shard", (1, 128), 120, 0), "rows in turns"),
    "shard-codebook-unfinished": (
        SHARD,
        lambda m: variants.rows_kept(m, "shard", (1,), 120, 0),
        "shard, keys of 8 bits: squared error",
    ),
    "shard-index-keys-in-4-bits": (SHARD, lambda m: variants.recalls(m, 1024, 256, (), 0), "index keys: recall"),
    "shard-entries-in-2-bits": (
        SHARD,
        lambda m: variants.rows_kept(m, "shard", (1,), 120, 0),
        "shard, entries of 6 bits: squared error",
    ),
    "shard-basis-mean-omitted": (
        SHARD,
        lambda m: variants.in_a_basis(m, 120, (1, 128), 0),
        "attention, largest error",
    ),
    "shard-all-decoded": (SHARD, lambda m: variants.scratch(m.arithmetic.ops, m.device, 4, 128, 6), "growth"),
    "coda-replaced-entry-forgotten": (CODA, lambda m: variants.masses(m, 120, 0), "mass of all rows"),
    "coda-entry-in-both-banks": (CODA, lambda m: variants.masses(m, 120, 0), "mass of all rows"),
    "coda-mean-weighs-as-one": (CODA, lambda m: variants.means(m, 120, 0), "attention to their means"),
    "coda-sink-weighed": (CODA, lambda m: variants.means(m, 120, 0), "attention to their means"),
    "coda-means-not-counted": (
        CODA,
        lambda m: variants.rows_kept(m, "coda", (128,), 120, 0),
        "coda, entries: bytes told",
    ),
    "coda-counts-not-restored": (CODA, put_back, "saved at 133"),
}
RUNS = ("coda-window-one-short", "coda-unfinished-entry-visible")


@pytest.mark.parametrize(("heads", "width"), [(4, 64), (2, 16), (128, 64), (64, 512)])
def test_scratch_is_that_of_a_full_tile_whatever_the_width_of_a_row(heads, width):
    assert not failed(*variants.scratch(CPU, variants.CPU, heads, width, 6))


def test_every_fault_of_a_variant_is_pursued_here():
    assert {*GROUPED, *ROWS, *RUNS} == set(IN_VARIANTS)
    assert len(IN_VARIANTS) == 22


@pytest.mark.parametrize("name", GROUPED)
def test_a_fault_on_grouped_query_layers_fails_where_it_is_named(name):
    measure, what = GROUPED[name]
    assert any(what in told for told in failed(*measure(parts(name))))  # and none in the healthy run above


def half_a_window(settings, *more):
    """What is evicted is more than both banks hold."""
    return PARTS.coda(replace(settings, window=settings.window // 2), *more)


def test_every_draw_of_every_length_is_held_against_the_full_cache():
    first, second = variants.gqa_exact_at(PARTS, (96, 192), 2, 0)
    assert not failed(first, second)
    assert 0 < first.evidence["least"] < first.measured
    assert "192 tokens in a window of as many" in second.what
    assert len(failed(*variants.gqa_exact_at(PARTS._replace(coda=half_a_window), (96, 192), 2, 0))) == 2


@pytest.mark.parametrize("name", ROWS)
def test_a_fault_on_v4s_layers_fails_where_it_is_named(name):
    kv, measure, what = ROWS[name]
    assert any(what in told for told in failed(*measure(model([kv], name))))


@pytest.mark.parametrize("name", RUNS)
def test_a_window_of_all_entries_is_the_full_cache_and_of_one_less_is_not(name):
    full, coda = model([], name), model(variants.kept_whole(Subject().config, 139), name)
    found = variants.exact(full, coda, ids(139), (), 6)
    assert found.failed
    assert found.measured > 1e-4


def test_4_bits_of_an_index_key_are_below_the_gate_and_8_above():
    held, four = list(variants.recalls(model([SHARD]), 2048, 512, (4,), 0))[:2]
    assert (held.evidence["bits"], four.evidence["bits"]) == (8, 4)
    assert not held.failed
    assert four.measured < 0.97


@pytest.mark.parametrize(
    ("kv", "fault"),
    [
        (SHARD, None),
        (f"{SHARD}:bits=8", "shard-codebook-unfinished"),
        (f"{SHARD}:bits=8", "shard-entries-in-2-bits"),
    ],
)
def test_attention_to_worse_codes_than_8_bits_need_not_be_is_told(kv, fault):
    found = list(variants.attentions(model([kv], fault), 1024, 0))
    assert len(found) == 2
    assert all(finding.failed for finding in found)


def test_attention_to_8_bits_diverges_as_far_as_their_error_says():
    """Half the variance of a logit's error, with logits near N(0, 1): the sink and the spread take a little away."""
    for finding in variants.attentions(model([f"{SHARD}:bits=8"]), 1024, 0):
        assert finding.measured == pytest.approx(OPTIMUM[8] / 2, rel=0.25)


def test_widths_without_a_basis_are_said():
    config = Subject().config
    assert variants.without_basis(config) is None
    assert "122 columns and 6 that" in variants.without_basis(replace(config, qk_rope_head_dim=6))
    assert "0 columns and 128 that" in variants.without_basis(replace(config, qk_rope_head_dim=128))


def test_entries_in_a_basis_have_a_mean_and_sinks_a_share():
    given = variants.around_a_mean(2000, 128, 0)
    assert float(given.mean(0).square().mean()) == pytest.approx(1, rel=0.3)
    assert float(given.var(0).mean()) == pytest.approx(1, rel=0.05)
    found = next(variants.in_a_basis(model([SHARD], "shard-basis-not-counted"), 120, (1, 128), 0))
    least, *_, most = found.evidence["mass_of_entries"].values()
    assert least > 0.5
    assert most < 0.01


# --- when it cannot show anything


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"cuts": (4,)}, "one way to cut"),
        ({"entries": 20}, "too few entries"),
        ({"steps": 100}, "too few entries"),
        ({"keys": 512}, "too few entries"),
    ],
)
def test_what_shows_nothing_is_vacuous(changes, why):
    assert why in replace(QUICK, **changes).vacuous(Subject())


def test_what_the_model_has_no_positions_for_is_a_need():
    assert "positions" in replace(QUICK, read=1 << 21).needs(Subject())


def test_a_model_of_other_widths_is_held_to_what_it_has(tmp_path):
    """Rows of 80 columns cannot be rotated, and a model of windows has no variant: the rest is judged all the same."""
    write_checkpoint(tmp_path, tiny_config(), seed=0)
    report = run_probe(QUICK, Subject(tmp_path, RunOptions(numerics="plain")), silent).report
    assert failed(*report.findings) == []
    told = [finding.what for finding in report.findings]
    assert any("V4, coda" in what for what in told)
    assert not any("V4, shard" in what for what in told)
    assert "head_dim is 80" in report.parts[-1].text
