"""Entries in a fitted basis: decoded, attended to and summed as stored, and that the bits of a row are its own."""

import math

import pytest
import torch

from fathom.kernels.formats import basis_fit, basis_rows, rows
from fathom.kernels.formats.basis_fit import Sample
from fathom.kernels.formats.rows_reference import decode
from fathom.kernels.formats.stored import EigenKeys, Slots
from fathom.kernels.ops import REFERENCE
from tests.kernels.every_backend import HAS_TRITON, OP_SETS, on_triton

if HAS_TRITON:
    from fathom.kernels.attention import triton as attention_triton

ON_CPU = torch.device("cpu")
BACKENDS = {ops.name: ops.attend for ops in OP_SETS if ops is not REFERENCE}
WAYS = [("cpu", -2.0), ("cpu", 6.0), ("cpu", 30.0), *([("triton", 6.0)] if HAS_TRITON else [])]
D, ROPE = 128, 32
NOPE = D - ROPE


def generator(seed):
    return torch.Generator().manual_seed(seed)


def entries(n, kind="decaying", seed=1, d=D, rope=ROPE):
    """Rows of length d^0.5 with a mean, whose nope dims are flat, of low rank, or have a few loud columns."""
    g = generator(seed)
    nope = d - rope
    mix, _ = torch.linalg.qr(torch.randn(nope, nope, generator=generator(7)))
    x = torch.randn(n, d, generator=g)
    match kind:
        case "decaying":
            x[:, :nope] = (x[:, :nope] * 1.05 ** -torch.arange(nope)) @ mix.T + torch.randn(
                nope, generator=generator(8)
            )
        case "low rank":
            x[:, :nope] = (x[:, :nope] * torch.where(torch.arange(nope) < nope // 4, 1.0, 0.02)) @ mix.T
        case "outlier":
            x[:, :2] *= 20
    return x * d**0.5 / x.norm(dim=1, keepdim=True)


def sample(x, seed=3, heads=4):
    seen = torch.arange(len(x)) < torch.linspace(len(x) // 2, len(x), 16)[:, None]
    return Sample(x, torch.randn(16, heads, x.shape[1], generator=generator(seed)), seen)


@pytest.fixture(scope="module")
def fitted():
    found = basis_fit.fit(sample(entries(2000)), ROPE, 6, 100_000)
    assert found.pays
    return found


def written(x, found):
    stored = basis_rows.allocate(len(x), found.fit, ROPE, found.rope_bits, 0, ON_CPU)
    rows.write(stored, 0, x)
    return stored


def test_rows_decode_as_the_equation_says(fitted):
    x = entries(200, seed=2)
    stored = written(x, fitted)
    wanted = decode(stored)
    for found in (rows.read(stored, 0, 200), rows.take(stored, torch.arange(200))):
        assert (found - wanted).abs().max() < 2e-6 * D**0.5
    index = torch.tensor([199, 0, 7, 7])
    assert torch.equal(rows.take_as_stored(stored, index), rows.read_as_stored(stored, 0, 200)[index])
    assert torch.equal(rows.read_as_stored(rows.first(stored, 9), 3, 7), rows.read_as_stored(stored, 3, 7))
    error = (wanted - x).square().sum().item() / x.square().sum().item()
    assert error == pytest.approx(fitted.based.measured, rel=0.1)
    assert error < 0.5 * 6.44e-4, "half of what a rotation loses at the same bytes"


def test_bytes_of_a_row_and_of_what_rows_share(fitted):
    few, many = (basis_rows.allocate(n, fitted.fit, ROPE, fitted.rope_bits, 0, ON_CPU) for n in (3, 10))
    assert rows.nbytes(many) - rows.nbytes(few) == 7 * fitted.row_bytes
    assert rows.nbytes(few) - 3 * fitted.row_bytes == basis_fit.shared_bytes(NOPE) == NOPE * NOPE + 6 * NOPE + 6
    assert sum(plane.nbytes for plane in rows.planes(many).values()) == 10 * fitted.row_bytes
    assert fitted.row_bytes == sum(fitted.bits) * 16 // 8 + 2 + ROPE * fitted.rope_bits // 8 + 2
    assert fitted.row_bytes + basis_fit.shared_bytes(NOPE) / 100_000 <= basis_fit.rotated_bytes(D, 6)
    assert (rows.length(many), rows.width(many)) == (10, D)
    assert rows.nbytes(basis_rows.allocate(10, fitted.fit, ROPE, 8, 0, torch.device("meta"))) > 0


def test_a_row_is_coded_alike_whatever_is_beside_it(fitted):
    x = entries(130, seed=5) * torch.exp(torch.randn(130, 1, generator=generator(6)))
    whole = rows.planes(written(x, fitted))
    together = basis_rows.project(fitted.fit, x[:, :NOPE])
    for chunk in (1, 4, 7, 128):
        apart = torch.cat([basis_rows.project(fitted.fit, part) for part in x[:, :NOPE].split(chunk)])
        assert torch.equal(apart, together), chunk
        stored = basis_rows.allocate(130, fitted.fit, ROPE, fitted.rope_bits, 0, ON_CPU)
        for start in range(0, 130, chunk):
            rows.write(stored, start, x[start : start + chunk])
        assert all(torch.equal(plane, whole[name]) for name, plane in rows.planes(stored).items()), chunk
    shuffled = torch.randperm(130, generator=generator(9))
    moved = rows.planes(written(x[shuffled], fitted))
    assert all(torch.equal(plane, whole[name][shuffled]) for name, plane in moved.items())


def test_coefficients_are_those_of_the_inverse():
    """Refined once: of columns rounded to int8, ``B^T`` alone is the inverse to 1 % only."""
    found = basis_fit._basis(entries(2000, d=512, rope=64)[:, :448])
    x = entries(50, seed=4, d=512, rope=64)[:, :448]
    basis = found.basis.double() * found.basis_scale.double()
    wanted = torch.linalg.solve(basis, (x - found.mean.float()).double().T).T
    off = (basis_rows.project(found, x) - wanted).norm() / wanted.norm()
    transposed = ((x - found.mean.float()).double() @ basis - wanted).norm() / wanted.norm()
    assert off < 5e-4
    assert transposed > 5e-3


@pytest.mark.parametrize("how", ["all", "masked", "gathered"])
@pytest.mark.parametrize(("ops", "sink"), WAYS, ids=str)
def test_attention_on_codes_is_attention_to_what_they_stand_for(fitted, ops, how, sink, monkeypatch):
    """With a mean, and sinks that take a little, most and nearly all of the mass: weights of entries sum to less."""
    g = generator(11)
    t, h, n = 9 if ops == "cpu" else 3, 4, 400
    if ops == "triton":  # of which a call's queries are in the basis two tokens at a time
        monkeypatch.setattr(attention_triton, "QUERIES", 2 * h)
    q, ring = 2 * torch.randn(t, h, D, generator=g), torch.randn(40, D, generator=g)
    stored, sinks = written(entries(n, seed=12), fitted), torch.full((h,), sink)
    k = {"all": 0, "masked": 390, "gathered": 20}[how]
    picks = [torch.randperm(395, generator=g)[:k].sort().values for _ in range(t)]
    selected = torch.stack(picks).int() if k else None
    given = (q, ring, 1595, 16)
    wanted = REFERENCE.attend(*given, stored, 4, selected, sinks)
    attend = BACKENDS[ops]
    found = attend(*given, stored, 4, selected, sinks)
    size = wanted.square().mean().sqrt()
    assert ((found - wanted).abs().max() / size) < 2e-5
    nope = stored.nope._replace(mean=torch.zeros_like(stored.nope.mean), basis=stored.nope.basis.clone())
    without = stored._replace(nope=nope)
    assert ((attend(*given, without, 4, selected, sinks) - wanted).abs().max() / size) > 0.05


@pytest.mark.parametrize("ops", BACKENDS)
@pytest.mark.parametrize("k", [None, 20])
def test_biases_lag_and_what_is_not_seen(fitted, ops, k):
    """One token, whose programs are several; then one that sees the window alone; and no row is lost that it sees."""
    g = generator(17)
    q, ring, sinks = 2 * torch.randn(1, 4, D, generator=g), torch.randn(20, D, generator=g), torch.zeros(4)
    stored, bias = written(entries(60, seed=18), fitted), torch.randn(60, generator=g)
    stored.gain[40:] = torch.nan
    selected = None if k is None else torch.randperm(60, generator=g)[None, :k].int()
    for first, hidden in ((4 * 45, 5), (10, 5)):
        for first_at in (first, *([torch.tensor(first)] if ops == "triton" else [])):
            given = (q, ring, first, 16, Slots(stored, bias, hidden), 4, selected, sinks)
            found = BACKENDS[ops](q, ring, first_at, *given[3:])
            wanted = REFERENCE.attend(*given)
            assert ((found - wanted).abs().max() / wanted.square().mean().sqrt()) < 2e-5
    stored.gain[:40] = torch.nan
    assert BACKENDS[ops](q, ring, 4 * 45, 16, Slots(stored, bias, 5), 4, selected, sinks).isnan().all()


@on_triton
def test_narrow_products_of_triton_err_by_fp16(fitted):
    """A logit by 2^-11 of both lengths, and a sum by 2^-11 of a row's, queries, keys and masses 2^-12 each; BF16's half
    an ulp of masses for the window's keys, and of the result.
    """
    g = generator(19)
    q, ring = torch.randn(1, 4, D, generator=g).bfloat16(), torch.randn(20, D, generator=g).bfloat16()
    stored, sinks = written(entries(60, seed=20), fitted), torch.zeros(4)
    given = (q, ring, 4 * 60, 16, stored, 4, None, sinks)
    found, wanted = BACKENDS["triton"](*given).float(), REFERENCE.attend(q.float(), ring.float(), *given[2:])
    length = max(decode(stored).norm(dim=1).max(), ring.float().norm(dim=1).max())
    logit = q.float().norm(dim=-1).max() * length * D**-0.5
    assert (found - wanted).abs().max() <= (2 * logit + 1) * 2**-11 * length + 2**-8 * 4


def test_scores_and_sums_are_those_of_the_rows(fitted):
    """In fp64 terms: relative to the rms of scores; weights that sum to a tenth bring a tenth of the mean."""
    stored = written(entries(300, seed=13), fitted)
    plain = decode(stored).double()
    q = torch.randn(8, D, generator=generator(14))
    wanted = q.double() @ plain.mT
    scores = rows.query_as_stored(stored, q) @ rows.read_as_stored(stored, 0, 300).mT
    assert (scores - wanted).abs().max() / wanted.square().mean().sqrt() < 3e-6
    weights = 0.1 * torch.rand(8, 300, generator=generator(15)).softmax(-1)
    total = weights.double() @ plain
    found = rows.sum_as_read(stored, weights @ rows.read_as_stored(stored, 0, 300))
    assert (found - total).abs().max() / total.square().mean().sqrt() < 3e-6
    normed = total - 0.9 * torch.cat((stored.nope.mean.double(), torch.zeros(ROPE)))  # as if weights summed to 1
    assert (normed - total).norm() / total.norm() > 1


def test_rows_unlike_those_of_the_fit(fitted, monkeypatch):
    """Rows ten times as long have a gain; without one they would be clipped. What is no number is NaN as a whole."""
    x = entries(12, seed=16)
    x[4:8] *= 10
    x[8, 3], x[9, -1], x[10, 0] = torch.nan, torch.inf, -torch.inf
    x[11] = 0
    stored = written(x, fitted)
    assert stored.gain[:4].max() <= 1.5
    assert stored.gain[4:8].min() >= 4
    back = rows.read(stored, 0, 12)
    assert back[8:11].isnan().all()
    error = (back - x).square().sum(1)[:8] / x.square().sum(1)[:8]
    monkeypatch.setattr(basis_rows, "GAINS", (1.0,))
    clipped = (rows.read(written(x, fitted), 0, 8) - x[:8]).square().sum(1) / x[:8].square().sum(1)
    assert (error[4:] < 0.1 * clipped[4:]).all()
    assert (error[:4] <= 1.01 * clipped[:4]).all()
    assert back[11].isfinite().all()


# --- whether a basis pays


@pytest.mark.parametrize(
    ("kind", "bits", "won"),
    [("flat", 4, False), ("flat", 6, False), ("flat", 8, False), ("low rank", 4, True), ("low rank", 6, True)],
)
def test_a_basis_is_for_entries_that_have_one(kind, bits, won):
    found = basis_fit.fit(sample(entries(3000, kind)), ROPE, bits, 100_000)
    assert found.pays is won
    assert 0.8 < found.based.measured / found.based.predicted < 1.1, "a gain, which no prediction knows, makes it less"
    assert found.rotated.measured == pytest.approx(found.rotated.predicted, rel=0.15)
    if won:
        assert found.based.measured < 0.25 * found.rotated.measured
        assert found.based.attention < 0.5 * found.rotated.attention


def test_loud_columns_are_told_as_they_are():
    """Two columns hold most of the energy: the row's length is not that of the others, and predictions are rougher."""
    found = basis_fit.fit(sample(entries(3000, "outlier")), ROPE, 4, 100_000)
    assert found.based.measured == pytest.approx(found.based.predicted, rel=0.3)
    wins = [ours < theirs for ours, theirs in zip(found.based, found.rotated, strict=True)]
    assert found.pays is all(wins)


def test_a_basis_that_few_entries_share_does_not_pay():
    x = sample(entries(3000, "low rank"))
    assert basis_fit.fit(x, ROPE, 6, 100).based is None, "97 bytes of basis for an entry of 98"
    losses = [basis_fit.fit(x, ROPE, 6, context).based for context in (150, 300, 1000, 10_000)]
    assert [loss.predicted for loss in losses] == sorted((loss.predicted for loss in losses), reverse=True)
    assert not basis_fit.fit(x, ROPE, 6, 150).pays
    assert basis_fit.fit(x, ROPE, 6, 10_000).pays


def test_a_fit_to_few_entries_is_found_out():
    """Half of them twice the nope dims, or none is fitted; a fit to the fewest predicts what it loses of others."""
    few = basis_fit.fit(sample(entries(600, "flat")), ROPE, 8, 100_000).based
    assert 0.8 < few.measured / few.predicted < 1.2, "variances of the entries that were fitted would promise half"
    assert basis_fit.least_entries(NOPE) == 4 * NOPE == 384
    refused = basis_fit.fit(sample(entries(383, "low rank")), ROPE, 6, 100_000)
    assert (refused.based, refused.pays) == (None, False)
    assert refused.why_none == "too few entries: 383, wants 384"
    enough = basis_fit.fit(sample(entries(384, "low rank")), ROPE, 6, 100_000)
    assert enough.pays
    assert enough.why_none == ""
    assert (
        basis_fit.fit(sample(entries(384, "low rank")), ROPE, 6, 100).why_none == "no bytes are left beside the basis"
    )
    nothing = Sample(torch.zeros(0, D), torch.zeros(0, 4, D), torch.zeros(0, 0, dtype=torch.bool))
    assert math.isnan(basis_fit.fit(nothing, ROPE, 6, 100).rotated.measured)


def test_what_attention_loses_has_a_say():
    """Of a hundred entries one is unlike the others, and these alone are attended to: best on the whole is not best."""
    x = entries(3000, "low rank", seed=21)
    rare = torch.arange(3000) % 100 == 0
    x[rare] = entries(3000, "flat", seed=22)[rare]
    found = basis_fit.fit(sample(x)._replace(seen=rare.expand(16, -1)), ROPE, 4, 100_000)
    assert found.based.predicted < found.rotated.predicted
    assert found.based.measured < 0.5 * found.rotated.measured
    assert found.based.attention > 2 * found.rotated.attention
    assert not found.pays


def test_attention_to_all_entries_is_judged_by_those_not_fitted_to():
    """Oracle, a token at a time; where tokens select, by all that they selected."""
    x, g = entries(40), generator(41)
    back = x + 0.1 * torch.randn(40, D, generator=g) * torch.where(torch.arange(40) < 30, 1.0, 3.0)[:, None]
    prefix = torch.arange(40) < torch.tensor([25, 31, 36, 40])[:, None]  # the first sees no entry that is held out
    picked = prefix & (torch.rand(4, 40, generator=g) < 0.5)
    queries = torch.randn(4, 3, D, generator=g)

    def lost(seen):
        shares = []
        for q, row in zip(queries.double(), seen, strict=True):
            if row.any():
                wanted, got = (
                    (q @ part[row].double().T / D**0.5).softmax(-1) @ part[row].double() for part in (x, back)
                )
                shares.append((got - wanted).square().sum() / wanted.square().sum())
        return (sum(shares) / len(shares)).item()

    held = torch.arange(40) >= 30
    for seen, wanted in ((prefix, lost(prefix & held)), (picked, lost(picked))):
        loss = basis_fit._loss(Sample(x, queries, seen), 10, back, 0.0)
        assert loss.attention == pytest.approx(wanted, rel=1e-5)
    assert lost(prefix & held) > 1.5 * lost(prefix), "entries that were fitted to would flatter it"


@pytest.mark.parametrize(
    ("width", "group"), [(448, 64), (64, 16), (192, 32), (96, 16), (16, 4), (8, 0), (36, 4), (0, 0)]
)
def test_groups(width, group):
    assert basis_fit.group_of(width) == group


def test_bytes_are_divided_as_brute_force_divides_them():
    g = generator(31)
    error = {bits: torch.rand(64, generator=g).double() * 4.0**-bits for bits in (0, 2, 4, 6, 8)}
    for row_bytes in (40.0, 66.5, 90.0):
        best = basis_fit.allocate(error, 20.0, 32, row_bytes)
        group = 16
        sums = {bits: lost.view(4, group).sum(1).tolist() for bits, lost in error.items()}
        options = []
        for rope_bits in basis_fit.ROPE_BITS:
            left = (row_bytes - 2 - basis_fit.rotated_bytes(32, rope_bits)) * 8 / group
            for bits in torch.cartesian_prod(*[torch.tensor([0, 2, 4, 6, 8])] * 4).tolist():
                if sum(bits) <= left and left >= 2:
                    charged = sum(sums[b][i] * (4 if b == 0 else 1) for i, b in enumerate(bits))
                    lost = sum(sums[b][i] for i, b in enumerate(bits)) + 20.0 * basis_fit.lloyd_max.distortion(
                        rope_bits
                    )
                    options.append((rope_bits, charged, lost))
        least = {r: min((c, lost) for rb, c, lost in options if rb == r) for r in {option[0] for option in options}}
        assert best.squared_error == pytest.approx(min(lost for _, lost in least.values()))
    assert basis_fit.allocate(error, 20.0, 32, 12.0) is None


def test_a_basis_holds_no_rows(fitted):
    assert isinstance(fitted.fit, EigenKeys)
    assert fitted.fit.codes.shape[0] == 0
