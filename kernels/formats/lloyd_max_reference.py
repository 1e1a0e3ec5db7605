"""Lloyd-Max: the scalar quantisers of least squared error for N(0, 1).

A codebook of b bits has 2^b centroids, each the mean of N(0, 1) between the midpoints to its neighbours. The density is
log-concave, so there is one such codebook (Fleischer, 1964). It is solved for once in float64.
"""

import math
from functools import cache

import torch
from torch import Tensor

BITS = range(1, 9)
_NEWTON_STEPS = 30  # 4 to 8 are needed; each more changes the last bits only


@cache
def codebook(bits: int, device: torch.device) -> Tensor:
    """Centroids in ascending order, [2^bits] float32; shared, not to be written to."""
    half = _positive_centroids(bits)
    return torch.cat((-half.flip(0), half)).float().to(device)


@cache
def distortion(bits: int) -> float:
    """Mean squared error of the codebook on N(0, 1): 0.3634 at 1 bit, 4.12e-5 at 8.

    Equation: ``1 - sum_i P_i c_i^2``, P_i the mass of cell i, which holds because centroids are the means of their
    cells. At 8 bits the subtraction loses five of float64's sixteen digits.
    """
    half = _positive_centroids(bits)
    _, mass = _cells(half)
    return 1.0 - 2.0 * float((mass * half * half).sum())


@cache
def _positive_centroids(bits: int) -> Tensor:
    """The upper half of the codebook, [2^(bits - 1)] float64; the lower half is its mirror image.

    Newton's method on "each centroid is the mean of its cell", from the points of Panter and Dite (1951): quantiles of
    N(0, 3), the density of N(0, 1) to the power 1/3. Lloyd's iteration has the same fixed point and needs thousands of
    steps at 8 bits.
    """
    assert bits in BITS, f"{bits} bits, want 1 to 8"
    count = 1 << (bits - 1)
    places = (torch.arange(count, dtype=torch.float64) + 0.5) / (2 * count) + 0.5
    centroids: Tensor = math.sqrt(3) * torch.special.ndtri(places)
    for _ in range(_NEWTON_STEPS):
        mean, mass = _cells(centroids)
        edge = (centroids[1:] + centroids[:-1]) / 2
        density = torch.exp(-edge * edge / 2) / math.sqrt(2 * math.pi)
        upper = density * (edge - mean[:-1]) / mass[:-1] / 2  # d mean_i / d c_i and d c_(i+1), by its upper edge
        lower = density * (mean[1:] - edge) / mass[1:] / 2  # d mean_i / d c_i and d c_(i-1), by its lower edge
        jacobian = torch.eye(count, dtype=torch.float64) - torch.diag(upper, 1) - torch.diag(lower, -1)
        jacobian[:-1, :-1] -= torch.diag(upper)
        jacobian[1:, 1:] -= torch.diag(lower)
        centroids = centroids - torch.linalg.solve(jacobian, centroids - mean)
    return centroids


def _cells(half: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and mass of N(0, 1) in each cell of the upper half of a codebook, which begins at 0 and ends at infinity."""
    inner = (half[1:] + half[:-1]) / 2
    edges = torch.cat((inner.new_zeros(1), inner, inner.new_full((1,), float("inf"))))
    density = torch.exp(-edges * edges / 2) / math.sqrt(2 * math.pi)
    beyond = torch.special.erfc(edges / math.sqrt(2)) / 2  # mass above each edge, exact in the tail
    mass = beyond[:-1] - beyond[1:]
    mean: Tensor = (density[:-1] - density[1:]) / mass
    return mean, mass
