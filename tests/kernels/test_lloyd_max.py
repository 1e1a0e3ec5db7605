"""Lloyd-Max codebooks against published tables and quadrature; packed codes against Python's integers."""

import itertools

import mpmath
import pytest
import torch

from fathom.kernels.formats import lloyd_max
from fathom.kernels.formats import lloyd_max_reference as reference

CPU = torch.device("cpu")
# Optimum for N(0, 1): Max (1960) to 5 bits; 6 and 8 bits as in the literature on the same recursion.
MSE = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009501, 5: 0.002505, 6: 6.44e-4, 8: 4.12e-5}
MAX_1960 = {  # positive output levels, "Quantizing for minimum distortion", table I
    1: [0.7980],
    2: [0.4528, 1.510],
    3: [0.2451, 0.7560, 1.344, 2.152],
    4: [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733],
}
bits_of_a_code = pytest.mark.parametrize("bits", lloyd_max.BITS)


@pytest.mark.parametrize("bits", MSE)
def test_distortion_is_the_published_optimum(bits):
    assert lloyd_max.distortion(bits) == pytest.approx(MSE[bits], rel=0.01)
    x = torch.randn(300_000, generator=torch.Generator().manual_seed(bits))
    measured = (x - lloyd_max.decode(lloyd_max.encode(x, bits), bits)).double().square().mean()
    assert float(measured) == pytest.approx(MSE[bits], rel=0.02)  # 300 000 samples: 0.3 % and the tail's few


@pytest.mark.parametrize("bits", MAX_1960)
def test_centroids_are_those_of_max(bits):
    half = torch.tensor(MAX_1960[bits])
    table = lloyd_max.codebook(bits, CPU)
    assert (table - torch.cat((-half.flip(0), half))).abs().max() < 6e-4  # four printed digits


@pytest.mark.parametrize("bits", [2, 5, 8])
def test_each_centroid_is_the_mean_of_its_cell(bits):
    half = [mpmath.mpf(c) for c in reference._positive_centroids(bits).tolist()]
    edges = [mpmath.mpf(0), *[(a + b) / 2 for a, b in itertools.pairwise(half)], mpmath.inf]
    for i in {0, len(half) // 2, len(half) - 1}:
        mass = mpmath.quad(mpmath.npdf, edges[i : i + 2])
        mean = mpmath.quad(lambda x: x * mpmath.npdf(x), edges[i : i + 2]) / mass
        assert abs(mean - half[i]) < 1e-12


@bits_of_a_code
def test_codes_name_the_nearest_centroid_and_ties_go_down(bits):
    table = lloyd_max.codebook(bits, CPU).double()
    assert (table.diff() > 0).all()
    assert torch.equal(table, -table.flip(0))
    x = 2 * torch.randn(5000, generator=torch.Generator().manual_seed(1))
    assert torch.equal(lloyd_max.encode(x, bits).long(), (x.double()[:, None] - table).abs().argmin(1))
    zero = torch.tensor([0.0, -0.0])  # between the two middle ones at every number of bits
    assert lloyd_max.encode(zero, bits).tolist() == [len(table) // 2 - 1] * 2
    ends = torch.tensor([-torch.inf, torch.inf])
    assert lloyd_max.encode(ends, bits).tolist() == [0, len(table) - 1]


@bits_of_a_code
def test_packed_bytes_are_the_codes_as_one_long_integer(bits):
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (37, 48), generator=generator, dtype=torch.uint8)
    packed = lloyd_max.pack(codes, bits)
    assert packed.shape == (37, 6 * bits)
    for row, stored in zip(codes.tolist(), packed.tolist(), strict=True):
        number = sum(code << (i * bits) for i, code in enumerate(row))
        assert bytes(stored) == number.to_bytes(6 * bits, "little")
    assert torch.equal(lloyd_max.unpack(packed, bits), codes)
    table = torch.randn(1 << bits, generator=generator)
    words = lloyd_max.word_table(table)
    assert torch.equal(lloyd_max.look_up(packed, bits, words), table[codes.long()])
    assert lloyd_max.look_up(packed[:0], bits, words).shape == (0, 48)
    assert torch.equal(lloyd_max.decode_packed(packed, bits), lloyd_max.codebook(bits, CPU)[codes.long()])
