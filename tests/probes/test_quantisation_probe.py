"""The quantisation probe: its oracle against torch's own casts, and that it names what rounds wrong."""

from dataclasses import replace

import pytest
import torch

from fathom.kernels.formats.stored import Fp8
from fathom.kernels.ops import CPU, REFERENCE
from fathom.probes.fault import Fault
from fathom.probes.faults import FAULTS
from fathom.probes.finding import Report, Table, Verdict
from fathom.probes.judge.oracle import E2M1_INDEX, E4M3, E4M3_LINEAR, E4M3_ROW, hadamard
from fathom.probes.probe import run_probe, silent
from fathom.probes.quantisation import QUICK, Stored, off_grid, one_kind, roundings, run_pair
from fathom.probes.subject import Subject, run_tokens
from fathom.runtime.options import RunOptions
from tests.make_checkpoint import fp8, tiny_config, write_checkpoint

CAST = "simulate_fp{} in groups of {}: values unlike an independent cast"
GRID = "simulate_fp{} in groups of {}: blocks that are no {} numbers times a power of two"
HELD = "{}, E8M0 scales: matrices whose bytes, as held, are not the files'"
KEYS = "index keys as scored, values unlike float64, worst layer"
STORED = "KV and entries as stored, blocks that are no E4M3 numbers times a power of two"


def failures(report: Report) -> dict[str, Verdict]:
    return {finding.what: finding.verdict for finding in report.findings if finding.failed}


def with_ops(change) -> Subject:
    return Subject(fault=Fault("local", "a fault of this test", "here", ops=change))


# --- the oracle


def pinned(x, largest):
    """Rows of one block whose last number gives it the scale 1."""
    return torch.cat((x.double(), torch.full((*x.shape[:-1], 1), largest)), -1)


def test_e4m3_is_torchs_cast():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert torch.equal(E4M3[~codes.isnan()], codes[~codes.isnan()].double())
    codes = codes[~codes.isnan()].sort().values
    x = torch.cat((codes, (codes[1:] + codes[:-1]) / 2, 40 * torch.randn(5000, generator=torch.manual_seed(0))))
    x = x.clamp(-448, 448)[:, None]
    assert torch.equal(E4M3_ROW.rounded(pinned(x, 448))[:, :1], x.to(torch.float8_e4m3fn).double())


def test_e2m1_takes_ties_to_even():
    x = torch.zeros(1, 31)
    x[0, :10] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, 0.26])
    found = E2M1_INDEX.rounded(pinned(x, 6))[0, :10]
    assert found.tolist() == [0, 1, 1, 2, 2, 4, 4, 6, 0, 0.5]
    assert found[8].signbit()


def test_scales_by_hand():
    """The step of a block's small numbers says what its scale was."""
    for amax, scale in ((448, 1), (449, 2), (1, 2**-8), (447 * 2.0**-20, 2.0**-20), (1e-9, 2.0**-22)):
        small = torch.tensor([[2.0**-9 * scale, amax]], dtype=torch.float64)
        assert E4M3_ROW.rounded(small)[0, 0] == small[0, 0], amax
        assert E4M3_ROW.rounded(small * torch.tensor([0.5, 1]))[0, 0] == 0, amax
    for amax, scale in ((6, 1), (6.1, 2), (3, 0.5)):
        small = pinned(torch.full((1, 31), 0.5 * scale), amax)
        assert torch.equal(E2M1_INDEX.rounded(small)[:, :31], small[:, :31])
        assert not E2M1_INDEX.rounded(small * torch.tensor([*[0.5] * 31, 1]))[:, :31].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_the_reference(dtype):
    for rounding in roundings(REFERENCE):
        for x in rounding.cases(seed=1).values():
            rounding.add("case", x.to(dtype))
        assert (rounding.unlike, rounding.off_grid) == (0, 0), rounding
        assert rounding.values > 4000


def test_hadamard_by_hand():
    x = torch.tensor([[1.0, 2, 3, 4]], dtype=torch.float64)
    assert hadamard(x).tolist() == [[5, -1, -2, 0]]
    assert torch.allclose(hadamard(hadamard(x)), x)


def test_off_grid_knows_a_scale_that_is_no_power_of_two():
    x = torch.randn(50, 128, dtype=torch.float64, generator=torch.manual_seed(0))
    scale = x.abs().amax(1, keepdim=True) / 448

    def off(y):
        return off_grid(y, E4M3_LINEAR).tolist()

    assert all(off((x / scale).to(torch.float8_e4m3fn).double() * scale))
    assert not any(off(E4M3_LINEAR.rounded(x)))
    assert all(off(x))


def test_the_cases_reach_every_number_of_a_format_and_every_tie():
    given = roundings(CPU)[-1].cases(seed=0)["every number of the format and every midpoint"].abs().unique().tolist()
    assert given == [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6]


# --- the probe


def test_the_healthy_demo_passes():
    heard = []
    report = run_probe(QUICK, Subject(), lambda share, _: heard.append(share)).report
    assert not report.failed, failures(report)
    assert heard == sorted(heard)
    assert heard[-1] == 1
    kl = next(f for f in report.findings if f.what == "KL from plain to deployed, mean over positions")
    assert 1e-6 < kl.measured < 1e-4


@pytest.mark.parametrize(
    ("fault", "whats"),
    [
        (
            "fp8-scale-not-power-of-two",
            [CAST.format(8, 128), CAST.format(8, 64), GRID.format(8, 128, "E4M3"), GRID.format(8, 64, "E4M3"), STORED],
        ),
        ("scales-shifted", [HELD.format("FP4"), HELD.format("FP8")]),
        ("fp4-nibbles-swapped", [HELD.format("FP4")]),
        ("query-rotated-key-not", [KEYS]),
    ],
)
def test_a_fault_fails_the_findings_that_name_it(fault, whats):
    found = failures(run_probe(QUICK, Subject(fault=FAULTS[fault]), silent).report)
    assert {what: found.get(what) for what in whats} == dict.fromkeys(whats, Verdict.FAIL)


def test_ties_rounded_up_are_found():
    def ties_up(ops):
        return ops._replace(simulate_fp4=lambda x, group: ops.simulate_fp4(x * (1 + 2**-20), group))

    report = run_probe(QUICK, with_ops(ties_up), silent).report
    assert CAST.format(4, 32) in failures(report)
    assert GRID.format(4, 32, "E2M1") not in failures(report)


def test_kv_that_is_not_rounded_is_found():
    def unrounded(ops):
        return ops._replace(simulate_fp8=lambda x, group: x if group == 64 else ops.simulate_fp8(x, group))

    found = failures(run_probe(QUICK, with_ops(unrounded), silent).report)
    assert STORED in found
    assert "KV as stored, median token's distance from float64, worst layer" in found


def test_numerics_that_round_nothing_are_vacuous():
    def nothing(ops):
        return ops._replace(simulate_fp8=lambda x, _: x, simulate_fp4=lambda x, _: x, hadamard=lambda x: x)

    found = failures(run_probe(QUICK, with_ops(nothing), silent).report)
    assert found["KL from plain to deployed, mean over positions"] is Verdict.VACUOUS


def test_widths_without_deployed_numerics_are_vacuous(tmp_path):
    write_checkpoint(tmp_path, tiny_config(head_dim=32), seed=3, formats="bf16")
    run = run_probe(QUICK, Subject(directory=tmp_path, options=RunOptions(numerics="plain")), silent)
    (finding,) = run.report.findings
    assert finding.verdict is Verdict.VACUOUS
    assert "no deployed numerics" in finding.evidence["why"]


def test_a_model_that_closes_no_window_is_vacuous(tmp_path):
    write_checkpoint(tmp_path, tiny_config(max_position_embeddings=100, rope_scaling=None), seed=3)
    assert QUICK.vacuous(Subject(tmp_path)) == "100 tokens close no window of 128"


@pytest.mark.parametrize(
    ("overrides", "formats", "options"),
    [
        ({"compress_ratios": [0, 0, 128, 128]}, "nvfp4", RunOptions(numerics="plain")),
        ({"num_hash_layers": 4}, "bf16", RunOptions(dtype="fp32")),
        ({}, "base", RunOptions()),
    ],
)
def test_other_checkpoints_pass_and_are_not_held_to_the_demos_bounds(tmp_path, overrides, formats, options):
    write_checkpoint(tmp_path, tiny_config(**overrides), seed=3, formats=formats)
    probe = replace(QUICK, alone=True)
    report = run_probe(probe, Subject(directory=tmp_path, options=options), silent).report
    assert not report.failed, failures(report)
    kl = next(f for f in report.findings if f.what == "KL from plain to deployed, mean over positions")
    assert kl.verdict is Verdict.MEASURED
    assert kl.measured > 1e-3


def test_one_kind_of_rounding_costs_no_more_than_all():
    """But for a tenth: a few tokens that go to another expert in one run and not in the other weigh as much."""
    report = replace(QUICK, alone=True).measure(Subject(), silent)
    (table,) = [p for p in report.parts if isinstance(p, Table) and p.title == "One kind of rounding at a time"]
    streams = {row[0]: row[-1] for row in table.rows}
    assert len(streams) == 4
    assert all(0 < share < 1.1 * streams["all"] for name, share in streams.items() if name != "all")


def test_one_kind_of_rounding_is_one_kind():
    x = torch.randn(4, 128, generator=torch.manual_seed(0))
    rounded = {
        name: [
            not torch.equal(op(x, group), x)
            for op, group in ((o.simulate_fp8, 128), (o.simulate_fp8, 64), (o.simulate_fp4, 32))
        ]
        for name, o in one_kind(CPU).items()
    }
    assert rounded == {
        "inputs of linears alone": [True, False, False],
        "KV and entries alone": [False, True, False],
        "index queries and keys alone": [False, False, True],
    }


def test_a_model_beside_itself_is_not_apart():
    subject = Subject()
    pair = run_pair(subject.model, subject.model, subject.tokens(140), 64, lambda _: None, {})
    assert max(pair.kl) == 0
    assert len(pair.kl) == 140
    assert pair.loss[0] == pair.loss[1]
    logits = subject.model.logits(run_tokens(subject.model, subject.tokens(140), 64)[0]).double().log_softmax(-1)
    following = torch.tensor(subject.tokens(140)[1:])
    assert pair.loss[0] == pytest.approx(-logits[:-1].gather(1, following[:, None]).sum().item())
    assert set(pair.common) == {("indexer.selected", 1), ("indexer.selected", 3)} | {
        ("experts.ids", layer) for layer in (1, 2, 3)
    }
    assert {both == of for both, of in pair.common.values()} == {True}
    assert {apart for apart, _ in pair.difference.values()} == {0}
    # 16 of more than 16 entries are a choice from position 67 on
    assert pair.common["indexer.selected", 1] == (16 * (140 - 67), 16 * (140 - 67))


def test_stored_bytes_that_are_wrong_are_counted():
    data, scale = fp8(torch.randn(130, 256, generator=torch.manual_seed(0)))
    data.view(torch.uint8)[0, :3] = torch.tensor([0x7F, 0xFF, 0x80], dtype=torch.uint8)
    minus_zeros = int((data.view(torch.uint8) == 0x80).sum())
    stored = Stored("FP8")
    stored.add("w", Fp8(data, scale * torch.tensor([[1, 1], [1, 1.5]])), Fp8(data, scale))
    assert (stored.nan_bytes, stored.minus_zeros, stored.bad_scales) == (2, minus_zeros, 1)
    assert stored.differing == ["w"]
    assert stored.blocks == 4
    assert stored.exponents == [int(end.log2()) for end in (scale.min(), scale.max())]


def test_a_block_that_leaves_half_its_range_unused_is_counted():
    codes = torch.full((128, 256), 1.0).to(torch.float8_e4m3fn)
    codes.view(torch.uint8)[0, 0] = 0x7E  # 448
    stored = Stored("FP8")
    stored.add("w", Fp8(codes, torch.ones(1, 2)), Fp8(codes, torch.ones(1, 2)))
    assert (stored.blocks, stored.half_used, stored.differing) == (2, 1, [])
