"""The probe of ops: its equations are right to fifty digits, its grid is what it says, and faults fail by name."""

import itertools
import math

import mpmath  # torch requires sympy, which requires it
import pytest
import torch

from fathom.kernels.attention import reference as attention
from fathom.kernels.ops import CPU, REFERENCE, mass_unit, noted
from fathom.model.config import Yarn
from fathom.probes import ops as ops_probe
from fathom.probes.fault import Fault
from fathom.probes.faults import FAULTS
from fathom.probes.ops import ENTRIES, LOGITS, POSITIONS, QUICK, WINDOWS, Angles, Shape, attended, cases, sinkhorn
from fathom.probes.probe import run_probe, silent
from fathom.probes.subject import Subject
from fathom.runtime.arithmetic import DTYPES
from fathom.runtime.options import RunOptions
from tests.make_checkpoint import micro_config, tiny_config, write_checkpoint

SHAPE = Shape("small", 3, 8, 4)
F64 = torch.float64


def report(subject):
    return run_probe(QUICK, subject, silent).report


def failed(subject):
    return [finding for finding in report(subject).findings if finding.failed]


# --- the equations


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_sinkhorn_is_what_fifty_digits_give(iterations):
    with mpmath.workdps(50):
        eps = mpmath.mpf("1e-6")
        mass = [[mpmath.exp(mpmath.mpf(value)) for value in row] for row in LOGITS]
        comb = [[value / mpmath.fsum(row) + eps for value in row] for row in mass]
        for step in range(2 * iterations - 1):
            if step % 2:
                comb = [[value / (mpmath.fsum(row) + eps) for value in row] for row in comb]
            else:
                sums = [mpmath.fsum(column) + eps for column in zip(*comb, strict=True)]
                comb = [[value / total for value, total in zip(row, sums, strict=True)] for row in comb]
        exact = [float(value) for row in comb for value in row]
    ours = sinkhorn(torch.tensor(LOGITS, dtype=F64), iterations, 1e-6)
    assert ours.flatten().tolist() == pytest.approx(exact, rel=1e-12)


def test_every_variant_of_sinkhorn_is_far_away():
    logits = torch.tensor(LOGITS, dtype=F64)
    right = sinkhorn(logits, 20, 1e-6)
    for wrong in (
        sinkhorn(logits.T, 20, 1e-6).T,  # columns first
        sinkhorn(logits, 20, 1e-6).T,
        sinkhorn(logits, 19, 1e-6),
        sinkhorn(logits, 21, 1e-6),
        sinkhorn(logits, 20, 0.0),
    ):
        assert (wrong / right - 1).abs().max() > 1000 * 8 * 2 * 20 * 2.0**-24  # times what `streams` allows


def exact_frequency(dim, theta, yarn, pair):
    """Radians per position with 50 digits."""
    kept = mpmath.power(theta, -mpmath.mpf(2 * pair) / dim)
    if yarn is None:
        return kept

    def turning(times):
        original = yarn.original_max_position_embeddings
        return dim * mpmath.log(original / (times * 2 * mpmath.pi)) / (2 * mpmath.log(theta))

    low, high = mpmath.floor(turning(yarn.beta_fast)), mpmath.ceil(turning(yarn.beta_slow))
    slowed = min(max((pair - low) / (high - low), 0), 1)
    return kept / yarn.factor * slowed + kept * (1 - slowed)


@pytest.mark.parametrize(
    ("theta", "yarn"), [(10000, None), (160000, Yarn(16, 65536, 32, 1)), (160000, Yarn(16, 4096, 32, 1))], ids=str
)
def test_angles_are_what_fifty_digits_give(theta, yarn):
    angles = Angles.of(64, theta, yarn)
    with mpmath.workdps(50):
        for position, pair in itertools.product(POSITIONS, (1, 16, 31)):
            angle = position * exact_frequency(64, theta, yarn, pair)
            cos, sin = (torch.full((1, 32), float(part(angle)), dtype=F64) for part in (mpmath.cos, mpmath.sin))
            apart, _ = angles.off(cos, sin, torch.tensor([position]))
            assert apart[0, pair] < 1e-8
    apart, allowed = angles.off(torch.ones(1, 32), torch.zeros(1, 32), torch.tensor([100]))
    assert (apart > 100 * allowed).all()  # what is not rotated at all shows in every pair


def test_attention_is_a_softmax_with_a_sink():
    generator = torch.Generator().manual_seed(0)
    q, keys = torch.randn(2, 4, generator=generator), torch.randn(5, 4, generator=generator, dtype=F64)
    sinks = torch.tensor([0.5, -math.inf], dtype=F64)
    out, _ = attended(q, keys, sinks, 0.0)
    for head in (0, 1):
        mass = [math.exp(sum(a * b for a, b in zip(q[head].tolist(), key, strict=True)) / 2) for key in keys.tolist()]
        total = sum(mass) + math.exp(sinks[head])
        wanted = [sum(m * key[c] for m, key in zip(mass, keys.tolist(), strict=True)) / total for c in range(4)]
        assert out[head].tolist() == pytest.approx(wanted)
    assert (attended(q, keys, torch.full((2,), math.inf, dtype=F64), 0.0)[0] == 0).all()


def fits(case, got, sinks, unit=2.0**-8):
    """The largest error of bf16 outputs over what is allowed, masses being rounded to a share `unit`."""
    known = [attended(q, case.keys(token), sinks, 2**-8, unit) for token, q in enumerate(case.q)]
    return max(float(((one - wanted).abs() / off).max()) for one, (wanted, off) in zip(got.to(F64), known, strict=True))


def by_rounded_masses(case, sinks, bits):
    """Attention in float64 but for masses, which are rounded to so many bits."""
    out = []
    for token, q in enumerate(case.q):
        keys = case.keys(token)
        logits = q.to(F64) @ keys.T / q.shape[1] ** 0.5
        mass = (logits - logits.amax(1, keepdim=True)).exp()
        total = mass.sum(1) + (sinks - logits.amax(1)).exp()
        step = 2 ** (mass.log2().floor() - bits + 1)
        out.append((mass / step).round() * step @ keys / total[:, None])
    return torch.stack(out).bfloat16()


def test_rounded_masses_have_a_bound_of_their_own():
    """bf16's 8 bits stay within it, 6 do not; nor do 8, within what fp32 masses are allowed."""
    sinks, worst = torch.linspace(-4, 4, 4, dtype=F64), {}
    for case in cases(Shape("small", 4, 64, 32), torch.bfloat16, 3, 0):
        for bits, unit in ((8, 2**-8), (6, 2**-8), (8, 0.0)):
            share = fits(case, by_rounded_masses(case, sinks, bits), sinks, unit)
            worst[bits, unit] = max(worst.get((bits, unit), 0), share)
    assert 0.3 < worst[8, 2**-8] <= 1
    assert worst[6, 2**-8] > 1.5
    assert worst[8, 0.0] > 5


def test_masses_are_rounded_by_triton_alone():
    assert mass_unit(CPU, torch.bfloat16) == mass_unit(REFERENCE, torch.bfloat16) == 0
    triton = pytest.importorskip("fathom.kernels.triton_ops", reason="Triton is not on every platform").TRITON
    assert [mass_unit(of, torch.bfloat16) for of in (triton, noted(triton, {}))] == [2**-8, 2**-8]
    assert mass_unit(triton, torch.float32) == 0
    sinks, worst = torch.linspace(-4, 4, 4, dtype=F64), 0.0
    for case in cases(Shape("small", 4, 64, 32), torch.bfloat16, 2, 0):
        given = case.q, case.ring, case.first, case.window, case.entries, case.ratio, case.selected, sinks.float()
        worst = max(worst, fits(case, triton.attend(*given), sinks))
    assert 0.3 < worst <= 1


# --- the grid


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
                assert all(0 < part <= most for part, most in zip(seen, finished, strict=True))
                assert not full or seen[-1] < finished[-1]
        # the reference reads the same keys, and no row of strays
        given = case.q, case.ring, case.first, window, case.entries, case.ratio, case.selected, torch.zeros(3)
        out = attention.attend(*given)
        for token, q in enumerate(case.q):
            wanted, _ = attended(q, case.keys(token), torch.zeros(3, dtype=F64), 0.0)
            assert torch.allclose(out[token].to(F64), wanted, rtol=1e-4, atol=1e-5)


def test_rows_that_must_not_be_read_are_large():
    for case in cases(SHAPE, torch.float32, 3, 0):
        positions = {p % len(case.ring) for p in range(max(0, case.first - case.window + 1), case.first + len(case.q))}
        unseen = [row for row in range(len(case.ring)) if row not in positions]
        assert (case.ring[unseen].norm(dim=1) > 50).all()
        assert case.entries is None or (case.entries[-3:].norm(dim=1) > 50).all()


# --- runs


def test_the_demo_passes():
    found = report(Subject())
    assert not found.failed, [finding for finding in found.findings if finding.failed]
    assert f"all {len(found.findings)} results" in found.summary


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (tiny_config(), RunOptions(numerics="plain", dtype="fp32")),
        (micro_config(compress_ratios=[0, 0]), RunOptions(numerics="plain")),
        (micro_config(max_position_embeddings=40), RunOptions(numerics="plain")),
    ],
)
def test_other_checkpoints_pass(tmp_path, config, options):
    write_checkpoint(tmp_path, config, seed=1)
    assert failed(Subject(directory=tmp_path, options=options)) == []


IN_GRID = {"the file's", "0", "-inf", "+inf", "30", "one per head"}


@pytest.mark.parametrize(
    ("fault", "kinds"),
    [
        ("rank-0-sinks", {"the file's", "one per head"}),
        ("sink-in-numerator", IN_GRID - {"-inf"}),
        ("mscale-in-softmax", IN_GRID - {"+inf"}),
        ("ring-off-by-one", IN_GRID - {"+inf"}),
        ("entries-off-by-one", IN_GRID - {"+inf"}),
        ("future-block-visible", IN_GRID - {"+inf"}),
    ],
)
@pytest.mark.parametrize("unit", [0.0, 2.0**-8], ids=["masses of fp32", "masses of bf16"])
def test_a_fault_of_attend_fails_the_sinks_that_name_it(fault, kinds, unit, monkeypatch):
    """What is allowed where masses are rounded to bf16 hides none."""
    monkeypatch.setattr(ops_probe, "mass_unit", lambda _, dtype: unit if dtype == torch.bfloat16 else 0.0)
    monkeypatch.setattr(ops_probe, "DTYPES", {"bf16": torch.bfloat16} if unit else DTYPES)
    found = failed(Subject(fault=FAULTS[fault]))
    assert {finding.what.split("sinks ")[1].split(":")[0] for finding in found} == kinds
    assert all({"window", "entries", "head", "column"} <= set(finding.evidence) for finding in found)


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        ("row-first-sinkhorn", "comb after 20 iterations"),
        ("post-not-doubled", "post of logit 0"),
        ("comb-transposed", "streams 1, 2, 4, 8"),
        ("window-theta", "table of SWA layers"),
        ("yarn-dropped", "table of CSA layers"),
        ("rope-halves", "quarter turn of heads"),
    ],
)
def test_a_fault_of_another_op_fails_by_name(fault, what):
    assert any(finding.what.startswith(what) for finding in failed(Subject(fault=FAULTS[fault])))


def test_a_nan_at_an_infinite_sink_is_seen():
    def ops(healthy):
        def attend(q, ring, first, window, entries, ratio, selected, sink):  # exp(sink - sink) where it is infinite
            out = healthy.attend(q, ring, first, window, entries, ratio, selected, sink)
            return torch.where((sink == math.inf)[:, None] & (entries is None), math.nan, out)

        return healthy._replace(attend=attend)

    (finding,) = failed(Subject(fault=Fault("local", "", "", ops=ops)))
    assert "sinks +inf" in finding.what


@pytest.mark.parametrize("side", ["gate", "up"])
def test_a_clamp_that_is_one_percent_wide_is_seen(side):
    def ops(healthy):
        def swiglu(gate, up, limit, weight):
            wide = healthy.swiglu(gate, up, 1.01 * limit, weight)
            beyond = gate > limit if side == "gate" else up.abs() > limit
            return torch.where(beyond, wide, healthy.swiglu(gate, up, limit, weight))

        return healthy._replace(swiglu=swiglu)

    found = failed(Subject(fault=Fault("local", "", "", ops=ops)))
    assert {finding.what.split(" around")[0] for finding in found} == {
        "SwiGLU of shared experts",
        "SwiGLU of routed experts",
    }


def test_the_full_grid_is_at_the_dims_of_v4_too():
    assert {(64, 512), (128, 512)} == {(shape.heads, shape.width) for shape in type(QUICK)().shapes}
