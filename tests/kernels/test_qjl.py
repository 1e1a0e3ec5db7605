"""The sketch of what codes leave out: the estimate against its formula, its bias, and the bits of a row."""

import pytest
import torch

from fathom.kernels.formats import coded_rows, qjl

CPU = torch.device("cpu")


def generator(seed):
    return torch.Generator().manual_seed(seed)


def written(x, bits, seed=None):
    held = qjl.sketched_rows(*x.shape, bits, CPU, seed)
    qjl.write(held, 0, x)
    return held


def scores(held, q):
    n = held.residual.shape[0] if isinstance(held, qjl.SketchedRows) else held.norm.shape[0]
    return qjl.query(held, q) @ qjl.read_hadamard(held, 0, n).mT


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_sketch_takes_one_bit_of_each_code_and_a_length(bits):
    planes = qjl.planes(qjl.sketched_rows(5, 128, bits, CPU))
    assert sum(plane.nbytes for plane in planes.values()) == 5 * (16 * bits + 4)
    assert sum(plane.nbytes for plane in qjl.planes(coded_rows.allocate(5, 128, bits, CPU)).values()) == 5 * (
        16 * bits + 2
    )


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("bits", [2, 4])
def test_scores_are_the_formula(bits, seed):
    """``q . x^ + sqrt(pi / 2) / d |r| (S H q) . sign(S r)`` in float64, from the row itself and what its code says."""
    x, q = torch.randn(30, 64, generator=generator(1)), torch.randn(7, 64, generator=generator(2))
    held = written(x, bits, seed)
    decoded = coded_rows.read(held.rows, 0, 30)
    left = coded_rows.signed_hadamard(x - decoded, held.rows.signs).double()
    matrix, turned = qjl.gaussian(64, CPU).double(), coded_rows.signed_hadamard(q, held.rows.signs).double()
    correction = (turned @ matrix.mT) @ (left @ matrix.mT).sign().mT * left.norm(dim=1) * (torch.pi / 2) ** 0.5 / 64
    wanted = q.double() @ decoded.double().mT + correction
    assert (scores(held, q) - wanted).abs().max() < 1e-2 * correction.square().mean().sqrt()  # |r| in float16
    plain = coded_rows.allocate(30, 64, bits, CPU, seed)
    qjl.write(plain, 0, x)
    assert (scores(plain, q) - q @ coded_rows.read(plain, 0, 30).mT).abs().max() < 1e-5


def test_codes_alone_shrink_scores_and_the_sketch_puts_it_right():
    """The slope of estimate over score: 1 - 0.363 with codes of one bit, 1 with their sketch."""
    x = torch.randn(2000, 128, generator=generator(3))
    q = x[:200] + torch.randn(200, 128, generator=generator(4))
    true = q @ x.mT
    held = written(x, 2, seed=1)

    def slope(estimate):
        return float((estimate * true).sum() / true.square().sum())

    assert slope(scores(held.rows, q)) == pytest.approx(1 - 0.3634, abs=0.01)
    assert slope(scores(held, q)) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_row_has_the_same_bits_in_any_chunk(chunk):
    x = torch.randn(70, 64, generator=generator(5))
    whole, held = written(x, 3, 5), qjl.sketched_rows(70, 64, 3, CPU, 5)
    for low in range(0, 70, chunk):
        qjl.write(held, low, x[low : low + chunk])
    assert all(torch.equal(plane, qjl.planes(whole)[name]) for name, plane in qjl.planes(held).items())


def test_rows_of_zeros_and_of_what_is_no_number():
    x = torch.ones(4, 64)
    x[0], x[1, 5] = 0, torch.nan
    got = scores(written(x, 3), torch.ones(1, 64))[0]
    assert got[0] == 0
    assert got[1].isnan()
    assert got[2:].isfinite().all()
