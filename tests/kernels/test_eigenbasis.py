"""Keys in their eigenbasis: exact, deterministic, bits spent where brute force would spend them."""

import itertools

import pytest
import torch

from fathom.kernels.formats import eigenbasis, lloyd_max
from fathom.kernels.formats.eigenbasis import measured_distortion, published_distortion

CPU = torch.device("cpu")


def generator(seed):
    return torch.Generator().manual_seed(seed)


def decaying(n, width, seed=1):
    """Rows of unlike columns, mixed, with a mean: std 4, 4 / 1.2, 4 / 1.2^2, .. along hidden directions."""
    g = generator(seed)
    mix, _ = torch.linalg.qr(torch.randn(width, width, generator=g))
    sizes = 4 * 1.2 ** -torch.arange(width, dtype=torch.float32)
    return torch.randn(n, width, generator=g) * sizes @ mix.mT + 3 * torch.randn(width, generator=g)


def tiles(x, size=100):
    return lambda: iter(x.split(size))


def fitted(x, rank, *, distortion=None, group=8, size=100):
    width = x.shape[1]
    kept = rank if distortion is None else min(width, 2 * rank)
    keys = eigenbasis.eigen_keys(*x.shape, rank, kept, 0 if distortion is None else kept // group, CPU)
    eigenbasis.fit(keys, tiles(x, size), distortion)
    return keys


def rebuilt(keys):
    """All rows by the formula, float64."""
    c = eigenbasis.coefficients(keys, 0, keys.codes.shape[0]).double()
    return c * keys.basis_scale.double() @ keys.basis.double().mT + keys.mean.double()


def test_moments_do_not_depend_on_the_tiles():
    x = decaying(250, 16)
    mean, covariance = eigenbasis.moments(tiles(x, 7))
    assert (mean - x.double().mean(0)).abs().max() < 1e-12
    assert (covariance - torch.cov(x.double().mT, correction=0)).abs().max() < 1e-11


def test_basis_is_that_of_the_singular_value_decomposition():
    x = decaying(200, 24).double()
    centred = x - x.mean(0)
    _, singular, right = torch.linalg.svd(centred)
    basis, variance = eigenbasis.eigenbasis(torch.cov(x.mT, correction=0), 10)
    assert (variance - singular[:10].square() / 200).abs().max() < 1e-10
    assert ((basis * right[:10].mT).sum(0).abs() - 1).abs().max() < 1e-9
    assert (basis.mT @ basis - torch.eye(10)).abs().max() < 1e-12


def test_the_largest_component_of_a_column_is_positive():
    x = decaying(200, 24).double()
    basis, _ = eigenbasis.eigenbasis(torch.cov(x.mT, correction=0), 24)
    assert (basis.gather(0, basis.abs().argmax(0, keepdim=True)) > 0).all()
    equal = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])  # (1, -1) and (1, 1): of equals the first
    assert torch.allclose(eigenbasis.eigenbasis(equal, 2)[0], torch.tensor([[1.0, 1.0], [-1.0, 1.0]]).double() / 2**0.5)


def test_int8_columns():
    basis, _ = eigenbasis.eigenbasis(torch.cov(decaying(200, 32).mT), 20)
    columns, scale = eigenbasis.quantise_basis(basis)
    assert (columns.dtype, scale.dtype) == (torch.int8, torch.float16)
    assert columns.abs().amax(0).ge(126).all()
    used = columns.double() * scale.double()
    assert ((used - basis).abs() <= scale.double() * 0.51 + 127 * scale.double() * 2.0**-11).all()
    assert (used.mT @ used - torch.eye(20)).abs().max() < 0.02
    zeros, scale = eigenbasis.quantise_basis(torch.zeros(4, 1))
    assert zeros.eq(0).all()
    assert scale.eq(0).all()


@pytest.mark.parametrize("distortion", [measured_distortion, published_distortion])
@pytest.mark.parametrize("seed", range(6))
def test_allocation_is_the_best_there_is(seed, distortion):
    variance = torch.exp(3 * torch.randn(4, generator=generator(seed))).tolist()

    def total(bits):
        return sum(v * distortion(b) for v, b in zip(variance, bits, strict=True))

    for budget in range(0, 34, 3):
        chosen = eigenbasis.allocate(variance, budget, distortion)
        assert sum(chosen) <= budget
        every = itertools.product(eigenbasis.DP_BITS, repeat=4)
        assert total(chosen) == pytest.approx(min(total(bits) for bits in every if sum(bits) <= budget), rel=1e-12)


def test_distortions():
    assert [round(measured_distortion(b), 6) for b in (0, 2, 4, 6, 8)] == [4.0, 0.117482, 0.009501, 0.000644, 4.1e-5]
    assert [published_distortion(b) for b in (0, 2, 4)] == [4.0, 1 / 48, 1 / 768]
    variance = [4.0, 2.0, 1.0, 1.0]
    assert eigenbasis.allocate(variance, 12, measured_distortion) == [4, 4, 2, 2]
    assert eigenbasis.allocate([1.0] * 3, 4, measured_distortion) == [2, 2, 0], "equals: the first get the bits"


def test_int4_scale_is_the_best_clip():
    c = torch.randn(4000, 3, generator=generator(2)) * torch.tensor([1.0, 5.0, 0.01])
    scale = eigenbasis._int4_scale(tiles(c))

    def error(steps):
        return (c - (c / steps).round().clamp(-7, 7) * steps).square().mean(0) / c.square().mean(0)

    assert (error(scale) < 0.0135).all()  # kv-variants: 0.0129 on normal data
    assert (error(c.abs().amax(0) / 7) > 0.02).all()
    for share in torch.linspace(0.05, 1, 77):
        assert (error(scale) < error(c.abs().amax(0) / 7 * share) * 1.01).all()


def test_int4_codes_are_nibbles_beside_eight():
    x = decaying(300, 24)
    keys = fitted(x, 12)
    used = keys.basis.double() * keys.basis_scale.double()
    c = (x.double() - keys.mean.double()) @ used / keys.scale.double()
    low, high = (keys.codes & 15).long() - 8, (keys.codes >> 4).long() - 8
    assert (low.min(), high.max()) >= (-7, -7)
    for nibble, columns in ((low, slice(0, None, 2)), (high, slice(1, None, 2))):  # the even component is low
        assert (nibble - c[:, columns].clamp(-7, 7)).abs().max() < 0.5 + 1e-3
    assert torch.equal(eigenbasis.coefficients(keys, 5, 6), eigenbasis.coefficients(keys, 0, 300)[5:6])


@pytest.mark.parametrize("distortion", [None, measured_distortion, published_distortion])
def test_error_is_what_was_dropped_and_what_was_rounded(distortion):
    """Within 10 %: coefficients are normal here, columns of int8 nearly orthogonal."""
    x = decaying(3000, 32)
    keys = fitted(x, 16, distortion=distortion)
    assert keys.codes.shape == (3000, 8)
    _, variance = eigenbasis.eigenbasis(torch.cov(x.double().mT, correction=0), 32)
    if distortion is None:
        expected = 0.0129 * variance[:16].sum() + variance[16:].sum()
    else:
        bits = [b for b in keys.bits.tolist() for _ in range(8)]
        assert bits == sorted(bits, reverse=True)
        expected = sum(v * (lloyd_max.distortion(b) if b else 1) for v, b in zip(variance.tolist(), bits, strict=True))
    error = (x.double() - rebuilt(keys)).square().sum(1).mean()
    assert float(error) == pytest.approx(float(expected), rel=0.1)


def test_the_rule_decides_where_bits_go():
    """Eight directions of std 10 and 24 of std 1, 8 bits for four groups of eight.

    int4 of 16: 0.0129 * 808 + 16 = 26.4. Measured, [4, 2, 2, 0]: 0.0095 * 800 + 0.1175 * 16 + 8 = 17.5. The published
    rule believes that 2 bits leave 1 / 48, and gives all groups 2: 0.1175 * 824 = 96.8.
    """
    g = generator(1)
    mix, _ = torch.linalg.qr(torch.randn(32, 32, generator=g))
    x = torch.randn(6000, 32, generator=g) * torch.tensor([10.0] * 8 + [1.0] * 24) @ mix.mT
    for rule, error, bits in (
        (None, 26.4, []),
        (measured_distortion, 17.5, [4, 2, 2, 0]),
        (published_distortion, 96.8, [2, 2, 2, 2]),
    ):
        keys = fitted(x, 16, distortion=rule, size=1000)
        assert keys.bits.tolist() == bits
        assert float((x - rebuilt(keys)).square().sum(1).mean()) == pytest.approx(error, rel=0.1)


def test_fewer_tokens_than_components_and_columns_that_never_vary():
    x = decaying(5, 24)
    x[:, 3] = 2.0
    keys = fitted(x, 12)
    assert rebuilt(keys).isfinite().all()
    assert (x - rebuilt(keys)).square().sum() / (x - x.mean(0)).square().sum() < 0.02
    same = x[:1].repeat(5, 1)
    assert (rebuilt(fitted(same, 12)) - same).abs().max() < same.abs().max() * 2.0**-10, "the mean alone, in float16"


def test_the_same_rows_give_the_same_bits():
    x = decaying(300, 24)
    one, other = fitted(x, 8, distortion=measured_distortion), fitted(x, 8, distortion=measured_distortion)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
