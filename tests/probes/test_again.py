"""A row that stands out, looked at again: what rounding may decide otherwise explains it, and nothing else does."""

import math
from functools import partial

import torch

from fathom.probes.judge.again import Noted, look, near_ties
from fathom.probes.judge.oracle import E2M1_INDEX, E4M3_LINEAR, F64, FACTOR, REPLICAS, Noise

BF16 = torch.bfloat16
AT = torch.tensor([5])


class Rounded:
    """A site that is a linear of numbers rounded to a narrow format; no replica reaches what is two roundings away."""

    def __init__(self, x, form=E4M3_LINEAR):
        self.form, self.weight = form, torch.randn(len(x), 96, dtype=F64, generator=torch.manual_seed(1)) / 8
        self.x = x.double()

    def values(self, noise):
        with noise.of("layers.0.", "site", rows=AT):
            x = noise.moved(self.x[None, None].clone())
            return noise.moved(self.form.rounded(noise.rounding(x, self.form, 1.0)) @ self.weight)

    def run(self, x):
        """What a run gives whose numbers came out as x."""
        return self.form.rounded(x[None].double()) @ self.weight

    def excess(self, theirs, exact, moved):
        spread = (moved[:, 0] - exact).square().mean(0).sum().sqrt()
        return float((theirs - exact).norm() / (FACTOR * spread))

    def at_first(self, theirs):
        exact, *moved = self.values(Noise(BF16))
        return self.excess(theirs, exact, torch.stack(moved))

    def again(self, theirs):
        return look(self.values, partial(self.excess, theirs), int(AT), BF16, 1 << 20)


def codes(amax, seed=0):
    """128 numbers on E2M1's and E4M3's grids, so that none but the largest is near a tie."""
    x = torch.randint(-2, 2, (128,), generator=torch.manual_seed(seed)) + 0.5
    x = x.double()
    x[17] = amax
    return x


def test_a_scale_that_came_out_otherwise_is_explained():
    """The largest is within rounding of where its scale doubles, on one side in float64 and on the other in the run.

    Of E2M1: what E4M3 has in normal numbers is the same under both scales.
    """
    off = 1.5 * 2.0**-6  # half a unit of bf16 is 2^-6 there
    site, other = Rounded(codes(6 - off), E2M1_INDEX), codes(6 + off)
    theirs = site.run(other)
    assert site.at_first(theirs) > 1
    found = site.again(theirs)
    assert (found.ties, found.excess <= 1) == (1, True)


def test_a_heavy_number_that_rounds_otherwise_is_explained():
    x = codes(448.0)
    x[3] = 272 + 1.5  # the middle of 256 and 288; half a unit of bf16 is 1
    other = x.clone()
    other[3] = 272 - 1.5
    site = Rounded(x)
    theirs = site.run(other)
    assert site.at_first(theirs) > 1
    found = site.again(theirs)
    assert (found.ties, found.excess <= 1) == (1, True)


def test_what_rounding_cannot_reach_is_not_explained():
    """A scale and a number far from their ties, and a row that is moved in another direction."""
    site = Rounded(codes(4.5), E2M1_INDEX)
    assert site.again(site.run(codes(6.5))).excess > 1
    x = codes(448.0)
    x[3] = 272 + 8.0
    other = x.clone()
    other[3] = 272 - 8.0
    site = Rounded(x)
    assert site.again(site.run(other)).excess > 1
    x[3] = 272 + 1.5
    site = Rounded(x)
    exact, *moved = site.values(Noise(BF16))
    off = torch.randn(exact.shape, dtype=F64, generator=torch.manual_seed(3))
    spread = float((torch.stack(moved) - exact).square().mean(0).sum().sqrt())
    for times, explained in ((0.5, True), (1.5, False), (4.0, False)):
        theirs = exact + times * FACTOR * spread * off / off.norm()
        assert (site.again(theirs).excess <= 1) == explained, times


def test_near_ties_are_those_within_reach_of_rounding():
    x = codes(448.0)
    x[40], x[41] = 34.0 + 0.4, 34.0 + 0.6  # between 32 and 36: half a unit of bf16 is 2^-3, and four of it may be
    site, noise = Rounded(x), Noted(BF16, 63, 0)
    site.values(noise)
    (seen,) = noise.seen
    assert seen.exact.shape == (1, 128)
    ties = near_ties(noise.seen, int(AT), 1000)
    assert {int(place) for tie in ties for place in tie.at} == {17, 40}  # the largest is at the border of its scale
    assert {tie.row for tie in ties} == {int(AT)}


def test_choices_near_a_tie_are_taken_both_ways():
    """Of five scores the best two: the second and the third are a near tie, the others are not."""
    scores = torch.tensor([[[9.0, 5.0, 5.0 + 2.0**-9, 1.0, -math.inf]]], dtype=F64)
    weight = torch.eye(5, dtype=F64)

    def values(noise):
        with noise.of("layers.0.", "ids", rows=AT):
            ranks = noise.moved(scores.masked_fill(scores.isneginf(), 0)).masked_fill(scores.isneginf(), -math.inf)
            chosen = noise.choosing(ranks, 2, FACTOR).topk(2).indices
            return weight[chosen].sum(2)

    def excess(theirs, exact, moved):
        del moved
        return float((theirs - exact).norm() / 0.5)

    for chosen, explained in (((0, 1), True), ((0, 2), True), ((0, 3), False), ((1, 2), False)):
        theirs = weight[list(chosen)].sum(0)[None]
        assert (look(values, partial(excess, theirs), 5, BF16, 1 << 20).excess <= 1) == explained, chosen


def test_noise_is_of_the_row_whatever_is_beside_it_or_before():
    """To the bit: rows together or alone, in any order of sites, some replicas or many."""
    x = torch.randn(1, 6, 40, dtype=F64, generator=torch.manual_seed(0))
    rows = torch.tensor([3, 9, 10, 11, 40, 41])

    def moved(noise, at, site="a"):
        with noise.of("layers.3.", site, rows=rows[at]):
            noise.moved(x[:, at])
            return noise.summed(noise.moved(x[:, at]), x[:, at].abs())

    whole = moved(Noise(BF16), slice(None))
    noise = Noise(BF16)
    moved(noise, slice(0, 2), "b")
    for row in (4, 0, 2):
        assert torch.equal(moved(noise, slice(row, row + 1)), whole[:, row : row + 1])
    assert torch.equal(moved(Noise(BF16, 100), slice(None))[: 1 + REPLICAS], whole)
    assert torch.equal(moved(Noise(BF16, 40, first=70), slice(None))[1:], moved(Noise(BF16, 110), slice(None))[71:])
    assert not torch.equal(moved(Noise(BF16), slice(None), "b"), whole)
    parts = torch.cat([moved(Noise(BF16), part) for part in (slice(0, 4), slice(4, 6))], 1)
    assert torch.equal(parts, whole)


def test_directions_look_drawn():
    """Of a million signs: as many up as down, neighbours, rows and replicas independent."""
    noise = Noise(torch.float32, 64)
    with noise.of("layers.0.", "x", rows=torch.arange(128)):
        signs = noise.moved(torch.ones(1, 128, 128, dtype=F64))[1:].sub(1).sign()
    few = 5 / signs.numel() ** 0.5
    assert abs(float(signs.mean())) < few
    for one, other in ((signs[:, :, 1:], signs[:, :, :-1]), (signs[:, 1:], signs[:, :-1]), (signs[1:], signs[:-1])):
        assert abs(float((one * other).mean())) < few
    assert float(signs.mean((1, 2)).abs().max()) < 5 / 128
    assert float(signs.mean((0, 1)).abs().max()) < 5 / (64 * 128) ** 0.5
