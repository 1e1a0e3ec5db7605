"""`swiglu` of every backend against its equation in float64."""

import math

import pytest
import torch

from tests.kernels.every_backend import HALF_BF16, ULP, both_dtypes, draw, every_backend, seeded

INF, NAN = math.inf, math.nan
ULPS = 8  # an exponential (2 ulp), a sum, a quotient and two products
# Six tokens of very different sizes, which do not lie in order, the last with an infinity
APART = draw(2, 32, 6).mT * torch.tensor([1e-12, 1e-3, 1.0, 30.0, 1e10, 1.0])[:, None]
APART[0, -1, 0] = INF
BOTH = 8 * draw(3, 80)
INPUTS = [8 * draw(2, *shape) for shape in ((1, 1), (3, 7), (2, 1025), (0, 64))]
INPUTS += [APART, (BOTH[:, :40], BOTH[:, 40:].clone()), (BOTH[:, ::2], BOTH[:, 1::2])]  # a half; columns apart


def check(ops, gate, up, limit, weight, ulps=ULPS):
    """The same but for some ulp of each number, and infinities and NaN where they belong; inputs are left as they were.

    The equation is of float32 in one thing: what it cannot hold is 0 before an infinite weight multiplies it.
    """
    before = [x.clone() for x in (gate, up)]
    ours = ops.swiglu(gate, up, limit, weight)
    for x, old in zip((gate, up), before, strict=True):
        assert torch.equal(x.nan_to_num(7.5), old.nan_to_num(7.5)), "an input was changed"
    g, u = (torch.where(x > limit, limit, x.double()) for x in (gate, up))
    exact = (g / (1 + torch.exp(-g))).float() * torch.where(u < -limit, -limit, u)
    exact = exact if weight is None else exact * weight.double()[:, None]
    assert ours.dtype == gate.dtype
    bound = ulps * ULP + (HALF_BF16 if gate.dtype == torch.bfloat16 else 0)
    torch.testing.assert_close(ours.double(), exact, rtol=bound, atol=1e-37, equal_nan=True)
    return ours


@every_backend
@both_dtypes
@pytest.mark.parametrize("parts", INPUTS, ids=lambda parts: f"{tuple(parts[0].shape)}")
@pytest.mark.parametrize("limit", [10.0, 1.0, INF])
def test_gate_and_up_are_clamped_and_multiplied(ops, dtype, parts, limit):
    for weight in (torch.rand(len(parts[0]), generator=seeded(8)), None):
        check(ops, *(part if part.dtype == dtype else part.to(dtype) for part in parts), limit, weight)


@every_backend
def test_the_gate_has_no_lower_clamp(ops):
    gate, up = torch.tensor([[50.0, -50.0, 1.0, 50.0, -3.0]]), torch.tensor([[50.0, -50.0, -0.5, -50.0, 7.0]])
    for limit, weight in ((10.0, None), (10.0, torch.tensor([0.25])), (2.0, None)):
        ours = check(ops, gate, up, limit, weight, ulps=4 if ops.name == "reference" else ULPS)
        assert ours[0, 1] != 0


@every_backend
def test_what_is_not_finite_stays_so(ops):
    """NaN is not clamped to a limit, as a maximum would; -inf as a gate is NaN, for 0 times infinity is."""
    values = torch.tensor([0.0, -0.0, 1.0, -200.0, 200.0, INF, -INF, NAN])
    gate, up = (part.contiguous() for part in torch.meshgrid(values, values, indexing="ij"))
    for limit in (10.0, INF):
        for weight in (None, torch.tensor([1.0, NAN, 0.0, INF, 1.0, 2.0, 1.0, 1.0])):
            check(ops, gate, up, limit, weight)
