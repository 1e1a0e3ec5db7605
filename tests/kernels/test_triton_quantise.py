"""Rotation and rounding on the GPU's kernels, bit for bit; the Hadamard transform within the rounding of its sums."""

import pytest
import torch

from kernels.quantise import reference as quantise
from kernels.quantise import triton as activations
from kernels.rope import reference as rope

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
FORMS = pytest.mark.parametrize(
    ("simulate", "group"), [("simulate_fp8", 128), ("simulate_fp8", 64), ("simulate_fp4", 32)]
)


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_bit_equal(ours, expected):
    """The same bits, so that -0.0 is not 0.0, and NaN, of which there are many, at the same places."""
    assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape)
    nan, integers = expected.isnan(), torch.int16 if ours.dtype == torch.bfloat16 else torch.int32
    assert torch.equal(ours.isnan(), nan)
    assert torch.equal(ours.masked_fill(nan, 0).view(integers), expected.masked_fill(nan, 0).view(integers))


def both(simulate, x, group):
    return [getattr(ops, simulate)(x, group) for ops in (activations, quantise)]


@DTYPES
@FORMS
@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-30, 1e-6, 1.0, 1e4, 1e30, 5e37])
def test_simulation_is_bit_equal(simulate, group, dtype, size):
    x = (draw(2, 5, 3, 512) * size).to(dtype)[..., ::2]
    x[0, 0, :3] = x[0, 0].abs().max() * torch.tensor([448.0, 5.0, 1.25]).to(dtype)  # small ones meet subnormal codes
    assert_bit_equal(*both(simulate, x, group))


@FORMS
def test_every_bfloat16_is_rounded_as_in_the_reference(simulate, group):
    """All 65536 of them beside the largest code, which makes the scale 1: ties, subnormals, and the NaN blocks."""
    largest = quantise.E4M3_MAX if simulate == "simulate_fp8" else quantise.E2M1_MAX
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    fits = every[every.abs() <= largest]
    fits = torch.cat((fits, torch.zeros(-len(fits) % (group - 1)).bfloat16())).view(-1, group - 1)
    x = torch.cat((torch.full((len(fits), 1), largest).bfloat16(), fits), dim=1)
    assert_bit_equal(*both(simulate, x, group))
    assert_bit_equal(*both(simulate, every.view(-1, group), group))  # every exponent as the size of a block


@FORMS
def test_values_an_ulp_beside_a_tie(simulate, group):
    ties = torch.tensor([m * 2.0**e for m in (1.0625, 1.1875, 1.25, 1.75, 0.5) for e in range(-11, 9)])
    near = torch.cat([ties.view(torch.int32).add(step).view(torch.float32) for step in (-1, 0, 1)])
    near = torch.cat((near, -near))
    largest = quantise.E4M3_MAX if simulate == "simulate_fp8" else quantise.E2M1_MAX
    near = near[near.abs() <= largest]
    x = torch.zeros(len(near), group)
    x[:, 0], x[:, -1] = largest, near
    assert_bit_equal(*both(simulate, x, group))


@DTYPES
@FORMS
def test_what_rounds_to_zero_keeps_its_sign(simulate, group, dtype):
    x = torch.full((1, group), 1e-6, dtype=dtype)
    x[0, 1::2] = -1e-6
    x[0, 2], x[0, 3], x[0, 4] = 0.0, -0.0, 1.0  # the last fixes the scale
    out, expected = both(simulate, x, group)
    assert_bit_equal(out, expected)
    assert (out != 0).sum() == 1
    assert torch.equal(out.signbit(), x.signbit())


@DTYPES
@FORMS
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_a_block_with_nan_or_inf_is_nan_and_its_neighbours_are_not(simulate, group, bad, dtype):
    for fill in (1.0, 0.0):
        places = torch.tensor([0, 1, 13, group - 1])
        x = torch.full((len(places), 3, group), fill, dtype=dtype)
        x[torch.arange(len(places)), 1, places] = bad
        out, expected = (out.view_as(x) for out in both(simulate, x.flatten(1), group))
        assert_bit_equal(out, expected)
        assert out[:, 1].isnan().all()
        assert (out[:, ::2] == fill).all()


def test_a_group_that_is_no_power_of_two():
    assert_bit_equal(*both("simulate_fp8", draw(3, 7, 96), 48))


def test_columns_that_are_no_multiple_of_the_group_are_refused():
    with pytest.raises(AssertionError, match="no multiple"):
        activations.simulate_fp4(torch.zeros(2, 40), 32)


@DTYPES
@pytest.mark.parametrize(("t", "heads", "d", "r"), [
    (5, None, 512, 64), (3, 4, 128, 64), (1, 3, 24, 6), (7, 2, 8, 8), (300, None, 16, 2), (0, 2, 8, 4),
])  # fmt: skip
def test_rotation_is_bit_equal(t, heads, d, r, dtype):
    shape = (t, 2 * d) if heads is None else (t, heads, 2 * d)
    x = draw(4, *shape).to(dtype)[..., ::2]  # no rows that lie in order
    x[:, ..., 0] = -0.0  # of the columns that stay, or of a pair
    x[:1, ..., -1] = torch.inf
    cos, sin = rope.angles(torch.arange(t) * 977, rope.frequencies(r, 1e4))
    cos = cos.T.contiguous().T
    assert_bit_equal(activations.rotate(x, cos, sin), rope.rotate(x, cos, sin))
    assert_bit_equal(activations.rotate(x, cos, -sin), rope.rotate(x, cos, -sin))


@DTYPES
@pytest.mark.parametrize(("t", "heads", "d"), [(3, 4, 128), (1, 1, 2), (5, 3, 12), (200, 2, 16), (0, 2, 8)])
def test_rotation_in_halves_is_bit_equal(t, heads, d, dtype):
    x = draw(5, t, 2 * heads, d).to(dtype)[:, ::2]
    cos, sin = rope.angles(torch.arange(t) + 10**6, rope.frequencies(d, 1e4))
    assert_bit_equal(activations.rotate_halves(x, cos, sin), rope.rotate_halves(x, cos, sin))


def test_more_pairs_than_columns_are_refused():
    with pytest.raises(AssertionError, match="pairs"):
        activations.rotate(torch.zeros(2, 6), torch.ones(2, 4), torch.ones(2, 4))
    with pytest.raises(AssertionError, match="pairs"):
        activations.rotate_halves(torch.zeros(2, 1, 10), torch.ones(2, 4), torch.ones(2, 4))


@DTYPES
@pytest.mark.parametrize("shape", [(3, 1), (5, 2), (2, 9, 128), (1, 512), (40, 64), (0, 8)])
def test_hadamard_is_the_reference_up_to_the_order_of_sums(shape, dtype):
    x = draw(6, *shape).to(dtype)
    ours, expected = activations.hadamard(x), quantise.hadamard(x)
    assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape)
    d = shape[-1]
    # both are d - 1 sums of numbers no larger than |x|_1, each rounded to 2^-24 of that, then scaled and rounded
    bound = 2 * (d - 1) * 2.0**-24 * x.float().abs().sum(-1, keepdim=True) * d**-0.5 + expected.float().abs() * 2**-22
    if dtype == torch.bfloat16:
        bound += expected.float().abs() * 2**-7  # one ulp
    assert ((ours.float() - expected.float()).abs() <= bound).all()


def test_hadamard_of_units_is_the_matrix_of_signs():
    """Exactly, and in natural order: of small integers every sum is exact."""
    j = torch.arange(64)
    signs = torch.tensor([[(-1.0) ** (a & b).bit_count() for a in range(64)] for b in range(64)])
    assert torch.equal(activations.hadamard(torch.eye(64)[j]), signs / 8)


def test_hadamard_keeps_nan_in_its_row():
    x = torch.ones(3, 32)
    x[1, 7] = torch.nan
    assert activations.hadamard(x).isnan().sum(1).tolist() == [0, 32, 0]
