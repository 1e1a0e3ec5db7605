"""Codes of four channels: k-means finds clusters, keeps empty centroids, and does not depend on tiles."""

import pytest
import torch

from fathom.kernels.formats import product_quantise
from fathom.kernels.shard.reference import rotated_values

CPU = torch.device("cpu")


def generator(seed):
    return torch.Generator().manual_seed(seed)


def fitted(v, size=100):
    values = product_quantise.codebook_values(*v.shape, CPU)
    product_quantise.fit(values, lambda: iter(v.split(size)))
    return values


def decoded(values):
    return rotated_values(values.codes, values.codebook.float(), values.largest.float())


def test_k_means_finds_clusters_that_lie_apart():
    centres = 20 * torch.randn(8, 4, generator=generator(1))
    points = centres.repeat(50, 1) + 0.1 * torch.randn(400, 4, generator=generator(2))
    found = product_quantise.k_means(points, 8, 30, seed=3)
    means = points.double().view(50, 8, 4).mean(0)
    distance = (found.double()[:, None] - means).norm(dim=2)
    assert sorted(distance.argmin(1).tolist()) == list(range(8))
    assert distance.amin(1).max() < 1e-5


def test_centroids_without_points_stay():
    points = torch.tensor([[1.0, 0, 0, 0], [0, 2.0, 0, 0], [0, 0, 3.0, 0]]).repeat(5, 1)
    found = product_quantise.k_means(points, 8, 30, seed=0)
    assert found.isfinite().all()
    assert {tuple(row) for row in found.tolist()} == {tuple(row) for row in points.tolist()}
    assert torch.equal(found[product_quantise.nearest(points, found)], points)
    assert product_quantise.nearest(points, found).max() <= 3, "of equal centroids the first"


def test_nearest_against_all_distances(monkeypatch):
    monkeypatch.setattr(product_quantise, "TILE", 16)
    points, centroids = torch.randn(50, 4, generator=generator(1)), torch.randn(9, 4, generator=generator(2))
    wanted = (points.double()[:, None] - centroids.double()).square().sum(2).argmin(1)
    assert torch.equal(product_quantise.nearest(points, centroids), wanted)


def test_more_rounds_lower_the_error():
    points = torch.randn(2000, 4, generator=generator(5))
    errors = []
    for rounds in (0, 3, 30):
        found = product_quantise.k_means(points, 32, rounds, seed=1)
        errors.append(float((points - found[product_quantise.nearest(points, found)]).square().mean()))
    assert errors[0] > 1.2 * errors[1] > 1.2 * errors[2]


def test_values_of_unlike_channels_at_two_bits():
    """kv-variants: 0.0997 of the variance on normal data; the rate-distortion bound is 0.0625."""
    v = torch.randn(600, 2, 64, generator=generator(3)) * torch.exp(torch.randn(2, 64, generator=generator(4)))
    values = fitted(v)
    assert values.codes.numel() == v.numel() / 4
    assert torch.equal(values.largest, v.abs().amax(0).half())
    error = (decoded(values) - v).square().mean(0) / v.square().mean(0)  # of each channel: none is left behind
    assert 0.0625 < error.mean() < 0.105
    assert error.max() < 0.2


@pytest.mark.parametrize("points", [50, 1 << 16])
def test_codes_do_not_depend_on_the_tiles(points, monkeypatch):
    monkeypatch.setattr(product_quantise, "POINTS", points)
    monkeypatch.setattr(product_quantise, "ROUNDS", 3)
    v = torch.randn(37, 2, 8, generator=generator(3))
    whole = fitted(v, 37)
    for size in (1, 5, 36):
        assert all(torch.equal(a, b) for a, b in zip(fitted(v, size), whole, strict=True))


def test_a_sample_is_spread_over_the_whole_sequence(monkeypatch):
    """Its second half lies elsewhere: a fit that saw the first alone would be far off."""
    monkeypatch.setattr(product_quantise, "POINTS", 500)
    v = torch.randn(400, 1, 8, generator=generator(3))
    v[200:] += 10
    seen = []
    k_means = product_quantise.k_means
    monkeypatch.setattr(
        product_quantise, "k_means", lambda points, *rest: seen.append(len(points)) or k_means(points, *rest)
    )
    assert (decoded(fitted(v)) - v).square().mean() < 0.2
    assert seen == [400]  # of 800, every second


def test_channels_of_zeros():
    v = torch.randn(30, 1, 8, generator=generator(3))
    v[:, 0, 2] = 0
    assert decoded(fitted(v))[:, 0, 2].eq(0).all()
