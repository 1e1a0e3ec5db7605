"""The probes of what layers compute: healthy runs pass, one wrong row of many fails where it is, and what shows nothing
says so."""

import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from fathom.kernels.formats.stored import Fp8
from fathom.kernels.ops import CPU
from fathom.kernels.quantise.reference import simulate_fp8
from fathom.model.observe import sites
from fathom.model.observe.observer import observed
from fathom.probes import layers
from fathom.probes.fault import Fault
from fathom.probes.faults import FAULTS
from fathom.probes.finding import Verdict
from fathom.probes.judge.checks import Checks, Status
from fathom.probes.judge.recording import Recording
from fathom.probes.layers import OWN, QUICK, Judge, around_ends, calls, runs, small, views
from fathom.probes.probe import run_probe, silent
from fathom.probes.subject import Subject
from fathom.runtime.options import DEMO, RunOptions
from tests import fp8_sums
from tests.make_checkpoint import micro_config, tiny_config, write_checkpoint

BY_NAME = {probe.name: probe for probe in QUICK}
ROWS, LENGTH = QUICK[0].rows, QUICK[0].tokens


@pytest.fixture(scope="module")
def demo():
    return Subject()


def report(name, subject):
    return run_probe(BY_NAME[name], subject, silent).report


def failures(subject, *, names=tuple(BY_NAME)):
    """What failed, by probe: layer and what."""
    found = {name: report(name, subject) for name in names}
    return {name: [(f.layer, f.what) for f in it.findings if f.failed] for name, it in found.items() if it.failed}


# --- a healthy run


@pytest.mark.parametrize("name", BY_NAME)
def test_the_demo_passes(demo, name):
    found = report(name, demo)
    assert not found.failed, [finding for finding in found.findings if finding.failed]
    assert f"{LENGTH} tokens" in found.summary


MEASURED = (
    0.044  # mean error of FP8 products of normal numbers on an H200, in half-ulps of bf16 of the rms: audits/gpu.md
)


def test_runs_whose_products_are_summed_by_fp8_tensor_cores_agree(demo):
    """All sites of a deployed run, with products of FP8 and FP4 weights that lose more bits than a GPU's do."""
    g = torch.Generator().manual_seed(0)
    x = simulate_fp8(torch.randn(32, 1024, generator=g).bfloat16(), 128)
    codes = torch.randn(64, 1024, generator=g).mul(64).clamp(-448, 448).to(torch.float8_e4m3fn)
    exact = x.double() @ codes.double().T
    ours = fp8_sums.linear(x, Fp8(codes, torch.ones(1, 8)), wide=True)
    assert (ours - exact).abs().mean() > MEASURED * 2**-8 * exact.square().mean().sqrt()

    subject = Subject(ops=CPU._replace(linear=fp8_sums.linear))
    run = Judge(subject, subject.options, ROWS, silent)(OWN, calls(200, 64, ()))
    assert not [result for result in run.results if result.status is not Status.AGREES]
    exact = Judge(demo, demo.options, ROWS, silent)(OWN, calls(200, 64, ()))
    ours, others = (load_file(one.recording.path) for one in (run, exact))
    moved = {name for name in others if not torch.equal(ours[name], others[name])}
    assert {"layers.0.attention.latent", "layers.0.experts.output"} <= moved, moved


def test_the_headline_is_the_worst_finding(demo):
    found = report("routing", demo)
    worst = max(finding.measured for finding in found.findings)
    assert f"the worst row is at {worst:.3g} of its bound" in found.summary


def test_every_site_is_judged_by_some_probe(demo):
    judged = {result.of or result.site for run in runs(demo, LENGTH, ROWS, silent) for result in run.results}
    assert judged == {name for probe in QUICK for name in probe.judges} - {site.name for site in sites.OF_V41}


def test_every_row_is_looked_at(demo):
    for run in runs(demo, LENGTH, ROWS, silent):
        assert all(result.rows == result.recorded for result in run.results if not result.of), run.name


def test_the_same_tokens_come_one_by_one_around_the_ends_of_blocks():
    config = Subject().config
    for length, chunk in ((800, 512), (4500, 512), (301, 7)):
        lengths = calls(length, chunk, around_ends(config, length))
        assert sum(lengths) == length
        assert max(lengths) == chunk
        assert min(layers.ODD, chunk) in lengths
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        alone = {start for start, count in zip(starts, lengths, strict=False) if count == 1}
        for ratio in (4, 128):
            assert {ratio, length // ratio * ratio - ratio} & alone, (length, ratio)
        assert {127, 128, 129} <= alone  # the token that closes the first HCA block, and those beside it


# --- one row that is wrong


def judged_again(demo, tmp_path, site, change, *, run, layer):
    """Judge one site of a recording of which something was changed: by what was judged."""
    healthy = of_run(demo, run)
    tensors = load_file(healthy.recording.path)
    change(tensors)
    save_file(tensors, tmp_path / "changed.safetensors")
    recording = Recording(tmp_path / "changed.safetensors", demo.config)
    setting = replace(healthy.setting, theirs=recording)
    checks = Checks(setting, recording, ROWS, every=True, views=views(demo.config))
    return {result.of or result.site: result for result in checks.layer(layer, only=[site.name])}


def of_run(demo, name):
    return next(run for run in runs(demo, LENGTH, ROWS, silent) if run.name == name)


# Sites whose rows are numbers, but those of the layer's ends.
OF_NUMBERS = [
    site
    for site in sites.SITES
    if site.name in {name for probe in QUICK for name in probe.judges}
    and site not in (sites.EMBEDDED, sites.HIDDEN, sites.LOGITS, sites.SELECTED, sites.EXPERT_IDS)
]


@pytest.mark.parametrize("site", OF_NUMBERS, ids=lambda site: site.name)
def test_one_row_off_by_three_times_its_bound_is_found(demo, tmp_path, site):
    """Once its bound; once for its own rounding, which may point the other way; once as bounds are drawn each time."""
    name = f"layers.1.{site.name}"

    def judged(by):
        """The site, of which one row is off by this much."""

        def change(tensors):
            x = tensors[name]
            row = x[place(x)].double()
            off = torch.randn(row.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
            x[place(x)] = (row + by(row) * off / off.norm()).to(x.dtype)
            rows.append((place(x), float(row.norm())))

        return judged_again(demo, tmp_path, site, change, run="as run", layer=1)[site.name]

    def place(x):
        return len(x) * 5 // 7  # of no sample: neither near an end nor at a border

    rows = []
    bound = judged(lambda row: 10 * row.norm()).first.bound
    (row, length), *_ = rows
    assert bound < 0.3 * length  # what is allowed is no free pass
    found = judged(lambda _: 3 * bound or length / 1000)  # what is stored narrow may not be off its grid at all
    assert found.status is Status.DIFFERS
    assert set(found.wrong) == {row}


def test_one_wrong_choice_of_experts_is_found(demo, tmp_path):
    def change(tensors):
        ids = tensors["layers.1.experts.ids"]
        ids[211, 0] = next(expert for expert in range(demo.config.n_routed_experts) if expert not in ids[211])

    found = judged_again(demo, tmp_path, sites.EXPERT_IDS, change, run="as run", layer=1)[sites.EXPERT_IDS.name]
    assert found.status is Status.DIFFERS
    assert found.wrong == [211]


def test_one_wrong_entry_of_the_table_is_found(demo, tmp_path):
    def change(tensors):
        ids = tensors["layers.0.experts.ids"]
        ids[212, 0] = next(expert for expert in range(demo.config.n_routed_experts) if expert not in ids[212])

    found = judged_again(demo, tmp_path, sites.EXPERT_IDS, change, run="as run", layer=0)[sites.EXPERT_IDS.name]
    assert found.wrong == [212]


def test_one_head_that_is_wrong_is_found_by_its_own_rows(demo, tmp_path):
    def change(tensors):
        x = tensors["layers.2.attention.mixed"]
        x[200, 1] = (x[200, 1].float() * 1.004).to(x.dtype)

    found = judged_again(demo, tmp_path, sites.MIXED, change, run="plain fp32", layer=2)
    assert found[layers.BY_HEAD].wrong == [200]


def test_wrong_rope_dims_are_judged_by_themselves(demo, tmp_path):
    rope = demo.config.qk_rope_head_dim

    def change(tensors):
        tensors["layers.2.attention.kv"][100, :-rope] *= 1.25  # the other dims

    found = judged_again(demo, tmp_path, sites.KV, change, run="as run", layer=2)
    assert found["attention.kv"].status is Status.DIFFERS
    assert found["attention.kv rotated dims"].status is Status.AGREES


def test_numbers_that_are_not_finite_are_found(demo, tmp_path):
    def change(tensors):
        tensors["layers.3.experts.output"][250, 3] = math.nan

    found = judged_again(demo, tmp_path, sites.EXPERTS_OUTPUT, change, run="plain fp32", layer=3)[
        sites.EXPERTS_OUTPUT.name
    ]
    assert found.first.position == 250


# --- faults


NAMED = {
    "experts-wrong-for-some-tokens": ("routing", sites.EXPERTS_OUTPUT, {"routing"}),
    "pairs-beyond-capacity-lost": ("routing", sites.EXPERTS_OUTPUT, {"routing"}),
    "hyper-head-without-eps": ("mhc", sites.HIDDEN, {"mhc", "projections"}),
    "first-logits-of-a-long-call": ("projections", sites.LOGITS, {"projections"}),
    "rank-0-sinks": ("sink", sites.MIXED, {"sink", "attention"}),
}


@pytest.mark.parametrize("fault", NAMED)
def test_a_fault_fails_where_it_is_and_nowhere_else(fault):
    name, site, failing = NAMED[fault]
    found = failures(Subject(fault=FAULTS[fault]))
    assert set(found) == failing
    assert any(site.name in what for _, what in found[name])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "name", "place"),
    [
        ("eps-tenfold", "projections", sites.LATENT),
        ("eps-tenfold", "mhc", sites.ATTENTION_INPUT),
        ("one-token-post-off", "mhc", sites.ATTENTION_POST),
        ("window-theta", "rope", sites.QUERY),
        ("compressed-keys-unrotated", "rope", sites.ENTRY),
        ("series-swapped", "projections", sites.ENTRY),
        ("output-groups-permuted", "projections", sites.ATTENTION_OUTPUT),
        ("comb-transposed", "mhc", sites.STREAMS),
        ("post-not-doubled", "mhc", sites.EXPERTS_POST),
        ("future-block-visible", "attention", sites.MIXED),
        ("mscale-in-softmax", "sink", sites.MIXED),
        ("selection-bias-dropped", "routing", sites.EXPERT_IDS),
        ("bias-in-weights", "routing", sites.EXPERT_WEIGHTS),
        ("routed-clamp-dropped", "routing", sites.EXPERTS_OUTPUT),
        ("shared-clamp-dropped", "routing", sites.EXPERTS_OUTPUT),
        ("shared-expert-twice", "routing", sites.EXPERTS_OUTPUT),
        ("experts-of-the-next-rank", "routing", sites.EXPERTS_OUTPUT),
        ("weights-of-another-slot", "routing", sites.EXPERTS_OUTPUT),
        ("pair-lost", "routing", sites.EXPERTS_OUTPUT),
        ("pair-counted-twice", "routing", sites.EXPERTS_OUTPUT),
    ],
)
def test_a_fault_of_the_library_is_seen_at_its_site(fault, name, place):
    subject = Subject(fault=FAULTS[fault])
    assert any(place.name in what for _, what in failures(subject, names=[name])[name])


def test_a_tripwire_ends_all_six_and_leaves_no_listener():
    subject = Subject(fault=FAULTS["indexer-returns-none"])
    assert all(run_probe(probe, subject, silent).tripped for probe in QUICK)
    assert not observed(subject.model).listening


def test_the_stressed_run_leaves_the_model_as_it_was(demo):
    model = demo.load(demo.with_options(numerics="plain", dtype="fp32")).model
    again = Subject().load(demo.with_options(numerics="plain", dtype="fp32")).model
    runs(demo, LENGTH, ROWS, silent)
    assert torch.equal(model.hyper_head.base, again.hyper_head.base)
    for block, fresh in zip(model.blocks, again.blocks, strict=True):
        assert torch.equal(block.experts_norm, fresh.experts_norm)


# --- what shows nothing


def test_streams_of_a_common_size_do_not_show_an_eps(monkeypatch):
    monkeypatch.setattr(layers, "small", lambda config: [0] * len(small(config)))
    subject = Subject()
    hollow = [f for f in report("projections", subject).findings if f.verdict is Verdict.VACUOUS]
    assert {f.what for f in hollow} >= {f"{site.name}, the eps of norms tenfold" for site in (sites.QUERY, sites.KV)}


def symmetric(name, values):
    """Every comb symmetric, whatever the streams are: transposed or not is all the same."""
    if name.endswith(("hc_attn_fn", "hc_ffn_fn")):
        return torch.cat((values[:8], torch.zeros_like(values[8:])))
    if name.endswith(("hc_attn_base", "hc_ffn_base")):
        return torch.cat((values[:8], torch.eye(4).flatten()))
    return values


@pytest.mark.parametrize(
    ("name", "config", "adjust", "hollow"),
    [
        ("mhc", tiny_config(), symmetric, "comb transposed"),
        (
            "sink",
            micro_config(),
            lambda name, x: torch.full_like(x, 0.25) if "attn_sink" in name else x,
            "the one before",
        ),
        ("sink", micro_config(), lambda name, x: torch.full_like(x, -60.0) if "attn_sink" in name else x, "sinks lost"),
    ],
    ids=["comb", "alike", "idle"],
)
def test_a_checkpoint_that_would_hide_a_mistake_is_vacuous(tmp_path, name, config, adjust, hollow):
    write_checkpoint(tmp_path, config, seed=1, adjust=adjust)
    found = report(name, Subject(directory=tmp_path, options=RunOptions(numerics="plain")))
    assert {f.verdict for f in found.findings if f.failed} == {Verdict.VACUOUS}
    assert any(hollow in f.what for f in found.findings if f.failed)


def test_a_context_without_two_blocks_is_vacuous(tmp_path):
    write_checkpoint(tmp_path, tiny_config(max_position_embeddings=100, rope_scaling=None), seed=1)
    found = report("attention", Subject(directory=tmp_path))
    assert [finding.verdict for finding in found.findings] == [Verdict.VACUOUS]
    assert "100 tokens are fewer than two" in found.summary


# --- other models


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (tiny_config(), RunOptions(prefill_chunk=17)),
        (micro_config(), RunOptions(numerics="plain")),  # two streams
        (micro_config(compress_ratios=[0, 0]), RunOptions(numerics="plain", dtype="fp32")),
    ],
    ids=["tiny", "micro", "window"],
)
def test_other_checkpoints_pass(tmp_path, config, options):
    write_checkpoint(tmp_path, config, seed=1)
    subject = Subject(directory=tmp_path, options=options)
    assert failures(subject) == {}


def test_infinite_sinks_of_a_checkpoint(tmp_path):
    def adjust(name, values):
        return torch.tensor([math.inf, -math.inf]) if name.endswith("attn_sink") else values

    write_checkpoint(tmp_path, micro_config(), seed=1, adjust=adjust)
    subject = Subject(directory=tmp_path, options=RunOptions(numerics="plain"))
    assert failures(subject, names=["sink"]) == {}


def test_a_parameter_that_is_not_the_files_is_seen():
    def inject(model):
        model.blocks[1].attention.sink = model.blocks[3].attention.sink  # the op itself is right

    found = failures(Subject(fault=Fault("local", "", "", inject=inject)), names=["sink"])
    assert {layer for layer, _ in found["sink"]} == {1}
    assert DEMO.is_dir()
