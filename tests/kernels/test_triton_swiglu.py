import pytest
import torch

from kernels.swiglu.reference import swiglu as reference
from kernels.swiglu.triton import swiglu

ULP = 2.0**-23  # of float32


def seeded(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(("t", "width"), [(1, 1), (3, 7), (2, 1025), (0, 64), (5, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("limit", [10.0, 1.0, float("inf")])
def test_as_in_the_reference(t, width, dtype, weighted, limit):
    g = seeded(t)
    gate, up = torch.randn(2, t, width, generator=g).mul(8).to(dtype).unbind()
    weight = torch.rand(t, generator=g) if weighted else None
    ours = swiglu(gate, up, limit, weight)
    assert ours.dtype == dtype
    # an exponential (2 ulp), a sum, a quotient and two products; in bf16 one of its own where that falls on a boundary
    bound = 2.0**-7 if dtype == torch.bfloat16 else 8 * ULP
    torch.testing.assert_close(ours, reference(gate, up, limit, weight), rtol=bound, atol=1e-37)


def test_the_gate_has_no_lower_clamp():
    gate, up = torch.tensor([[50.0, -50.0, -3.0, 50.0]]), torch.tensor([[50.0, -50.0, 7.0, -50.0]])
    ours = swiglu(gate, up, 2.0, None)
    torch.testing.assert_close(ours, reference(gate, up, 2.0, None), rtol=8 * ULP, atol=1e-37)
    assert ours[0, 1] != 0


def test_what_is_not_finite_stays_so():
    """NaN is not clamped to a limit, as a maximum would; -inf as a gate is NaN in both, for 0 times infinity is."""
    inf, nan = float("inf"), float("nan")
    values = torch.tensor([0.0, -0.0, 1.0, -200.0, 200.0, inf, -inf, nan])
    gate, up = (part.contiguous() for part in torch.meshgrid(values, values, indexing="ij"))
    for limit in (10.0, inf):
        for weight in (None, torch.tensor([1.0, nan, 0.0, inf, 1.0, 2.0, 1.0, 1.0])):
            ours, theirs = swiglu(gate, up, limit, weight), reference(gate, up, limit, weight)
            torch.testing.assert_close(ours, theirs, rtol=8 * ULP, atol=1e-37, equal_nan=True)


def test_halves_of_one_matrix_and_columns_apart():
    both = torch.randn(3, 80, generator=seeded(1))
    for gate, up in ((both[:, :40], both[:, 40:]), (both[:, ::2], both[:, 1::2])):
        torch.testing.assert_close(swiglu(gate, up, 1.0, None), reference(gate, up, 1.0, None), rtol=8 * ULP, atol=0)
