"""`rms_norm` of every backend against its equation in float64."""

import math

import pytest
import torch

from tests.kernels.every_backend import HALF_BF16, ULP, both_dtypes, draw, every_backend

ULPS = {"reference": 8, "cpu": 8, "triton": 4}  # a root, a quotient, two products, and the order of the sum
# Five tokens of three heads, of very different sizes, which do not lie in order
APART = draw(3, 5, 32).transpose(0, 1) * torch.tensor([1e-12, 1e-3, 1.0, 30.0, 1e10])[:, None, None]
SHAPES = [(1, 1), (3, 5), (2, 3, 64), (4, 1000), (0, 64)]
INPUTS = [*(10 * draw(*shape) for shape in SHAPES), APART, APART[:, 1], APART[:0], APART[:2].mT]


def check(ops, x, weight, eps):
    """The same but for some ulp of each number; `x` is left as it was."""
    before = x.clone()
    ours = ops.rms_norm(x, weight, eps)
    assert torch.equal(x, before), "the input was changed"
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * (1 if weight is None else weight.double())
    assert ours.dtype == x.dtype
    bound = ULPS[ops.name] * ULP + (HALF_BF16 if x.dtype == torch.bfloat16 else 0)
    torch.testing.assert_close(ours.double(), exact, rtol=bound, atol=0)


@every_backend
@both_dtypes
@pytest.mark.parametrize("x", INPUTS, ids=lambda x: f"{tuple(x.shape)}")
def test_rows_have_unit_mean_square_times_the_weight(ops, dtype, x):
    x = x.to(dtype)
    for weight, eps in ((draw(x.shape[-1], seed=1), 1e-2), (None, 1e-6)):
        check(ops, x, weight, eps)


@every_backend
@both_dtypes
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row(ops, dtype, bad):
    x = torch.ones(3, 8).to(dtype)
    x[1, 2] = bad
    for weight in (None, draw(8)):
        ours = ops.rms_norm(x, weight, 1e-6)
        assert ours.isfinite().all(1).tolist() == [True, False, True]
        assert ours.isnan()[1].tolist() == [math.isnan(bad) or column == 2 for column in range(8)]
        assert (ours[1].nan_to_num(0) == 0).all(), "what an infinity divides"
