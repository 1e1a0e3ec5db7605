"""Rounding of activations on every backend, bit for bit, and the Hadamard transform, against equations in float64."""

import math

import pytest
import torch

from fathom.kernels.ops import CPU, REFERENCE
from fathom.kernels.quantise import reference as quantise
from tests.kernels.every_backend import ULP

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


@pytest.fixture(params=["reference", "cpu", "triton"])
def ops(request):
    if request.param == "triton":
        return pytest.importorskip("fathom.kernels.triton_ops", reason="Triton is not on every platform").TRITON
    return {"reference": REFERENCE, "cpu": CPU}[request.param]


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- E4M3 and E2M1 blocks

# Codes in ascending order, and the smallest size of a block that its scale follows
E4M3 = [m / 512 for m in range(8)] + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)][:-1]
FORMATS = {
    "simulate_fp8": (torch.tensor(E4M3).double(), 1e-4),
    "simulate_fp4": (torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]).double(), 6 * 2.0**-126),
}
FORMS = pytest.mark.parametrize(
    ("simulate", "group"), [("simulate_fp8", 128), ("simulate_fp8", 64), ("simulate_fp4", 32)]
)


def largest_of(simulate):
    return FORMATS[simulate][0][-1].item()


def between(codes):
    return (codes[1:] + codes[:-1]) / 2


def simulated(simulate, x, group):
    """The equation: ``s = 2^ceil(log2(max(amax, smallest) / largest))`` and the code next to ``x / s``, ties to even.

    The quotient is a float32: the product with the rounded inverse of `largest`.
    """
    codes, smallest = FORMATS[simulate]
    blocks = x.double().unflatten(-1, (-1, group))
    amax = blocks.abs().amax(-1, keepdim=True).clamp_min(smallest)
    ratio = (amax * (1 / codes[-1]).float().double()).float().double()
    fraction, exponent = ratio.frexp()  # ratio = fraction * 2^exponent, 1/2 <= fraction < 1
    scale = torch.where(ratio.isfinite(), 2.0 ** (exponent - (fraction == 0.5).int()).double(), torch.nan)
    size = blocks.abs() / scale
    low, high = (torch.searchsorted(between(codes), size, right=right) for right in (False, True))  # differ in a tie
    nearest = codes[torch.where(low % 2 == 0, low, high)]
    return (nearest.copysign(blocks) * scale).flatten(-2).float().to(x.dtype)


def assert_simulated(ops, simulate, x, group):
    """The same bits, so that -0.0 is not 0.0, and NaN, of which there are many, at the same places."""
    return assert_same(getattr(ops, simulate)(x, group), simulated(simulate, x, group))


def assert_same(ours, expected):
    assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape)
    nan, integers = expected.isnan(), torch.int16 if ours.dtype == torch.bfloat16 else torch.int32
    assert torch.equal(ours.isnan(), nan)
    assert torch.equal(ours.masked_fill(nan, 0).view(integers), expected.masked_fill(nan, 0).view(integers))
    return ours


@DTYPES
@FORMS
def test_blocks_of_all_sizes_are_rounded(ops, simulate, group, dtype):
    for size in (0.0, 1e-38, 1e-30, 1e-6, 1.0, 1e4, 1e30, 5e37):
        x = (draw(2, 5, 3, 512) * size).to(dtype)[..., ::2]
        x[0, 0, :3] = x[0, 0].abs().max() * torch.tensor([448.0, 5.0, 1.25]).to(dtype)  # small ones: subnormal codes
        assert_simulated(ops, simulate, x, group)


def beside_largest(simulate, points, group):
    """Blocks that begin with the largest code, so that their scale is 1; the rest of the last is zero."""
    largest = torch.tensor(largest_of(simulate)).to(points.dtype)
    points = points[points.abs() <= largest]
    points = torch.cat((points, points.new_zeros(-len(points) % (group - 1)))).view(-1, group - 1)
    return torch.cat((largest.expand(len(points), 1), points), 1)


@FORMS
def test_every_code_and_tie_and_what_lies_an_ulp_beside_is_rounded(ops, simulate, group):
    codes = FORMATS[simulate][0]
    points = torch.cat((codes, between(codes))).float()
    points = torch.cat((points, *(points.nextafter(torch.tensor(side)) for side in (torch.inf, -torch.inf))))
    x = beside_largest(simulate, torch.cat((points, -points)), group)
    for power in (-22, -20, 0, 3, 119) if simulate == "simulate_fp8" else (-126, -20, 0, 3, 125):  # of the scale
        assert_simulated(ops, simulate, x * 2.0**power, group)


@FORMS
def test_every_bfloat16_is_rounded(ops, simulate, group):
    """All 65536 of them beside the largest code: ties, subnormals; then as the sizes of blocks: NaN, infinities."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    assert_simulated(ops, simulate, beside_largest(simulate, every, group), group)
    assert_simulated(ops, simulate, every.view(-1, group), group)


@DTYPES
@FORMS
def test_what_rounds_to_zero_keeps_its_sign(ops, simulate, group, dtype):
    x = torch.full((1, group), 1e-6, dtype=dtype)
    x[0, 1::2] = -1e-6
    x[0, 2], x[0, 3], x[0, 4] = 0.0, -0.0, 1.0  # the last fixes the scale
    out = assert_simulated(ops, simulate, x, group)
    assert (out != 0).sum() == 1
    assert torch.equal(out.signbit(), x.signbit())


@DTYPES
@FORMS
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_a_block_with_nan_or_inf_is_nan_and_its_neighbours_are_not(ops, simulate, group, bad, dtype):
    """At every position of the block; alone in zeros, too, where its size is all that the scale can see."""
    places = torch.tensor([0, 1, 13, group - 1] if ops.name == "triton" else range(group))
    for fill in (1.0, 0.0):
        x = torch.full((len(places), 3, group), fill, dtype=dtype)
        x[torch.arange(len(places)), 1, places] = bad
        out = assert_simulated(ops, simulate, x.flatten(1), group).view_as(x)
        assert out[:, 1].isnan().all()
        assert (out[:, ::2] == fill).all()


@pytest.mark.parametrize(("simulate", "group", "largest"), [("simulate_fp8", 128, 448.0), ("simulate_fp4", 32, 6.0)])
def test_a_block_beyond_the_largest_code_takes_the_next_scale(ops, simulate, group, largest):
    """By some ulp, of which the first may be lost in the quotient, and by one of bfloat16; the rest of the block shows.

    It is the smallest code, which under twice the scale is a tie with zero.
    """
    x = torch.full((6, group), FORMATS[simulate][0][1].item())
    beyond = torch.tensor([0, 1, 2, 3, 4, 1 << 16], dtype=torch.int32)  # in last places
    x[:, 0] = (torch.tensor(largest).view(torch.int32) + beyond).view(torch.float32)
    out = assert_simulated(ops, simulate, x, group)
    assert (out[:, 0] == largest).all()  # 450 / 2 rounds to 224, 6.03 / 2 to 3
    assert (out[:, 1] == 0).tolist()[::5] == [False, True]
    assert quantise.power_of_two_scale(x[::5].amax(1), largest).tolist() == [1.0, 2.0]


@DTYPES
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_simulation_is_idempotent_and_near(ops, dtype, size):
    x = (draw(6, 8 if ops.name == "triton" else 64, 256) * size).to(dtype)
    fp8, fp4 = ops.simulate_fp8(x, 64), ops.simulate_fp4(x, 32)
    assert torch.equal(ops.simulate_fp8(fp8, 64), fp8)
    assert torch.equal(ops.simulate_fp4(fp4, 32), fp4)
    amax = x.float().unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True)
    # the widest gap of E2M1 is 2 scales, and a scale is less than amax / 3
    assert ((fp4.float() - x.float()).abs().unflatten(-1, (-1, 32)) <= amax / 3).all()
    # half a unit of three mantissa bits, or half the smallest code (2^-9) of the smallest scale allowed
    floor = 2.0**-10 * 2 * max(1e-4, x.abs().max().item()) / 448
    assert ((fp8.float() - x.float()).abs() <= x.float().abs() / 16 + floor).all()


def test_a_group_need_not_be_a_power_of_two_but_must_divide_the_columns(ops):
    assert_simulated(ops, "simulate_fp8", draw(3, 7, 96), 48)
    for simulate in (ops.simulate_fp8, ops.simulate_fp4):
        with pytest.raises(AssertionError, match="no multiple"):
            simulate(torch.zeros(2, 40), 32)


def test_no_tokens_at_all_are_rounded(ops):
    assert ops.simulate_fp8(torch.zeros(0, 128), 128).shape == (0, 128)
    assert ops.simulate_fp4(torch.zeros(0, 4, 64), 32).shape == (0, 4, 64)


# --- rows as ranks send them


def assert_packed(ops, x, group):
    """The bytes of the reference but for codes of NaN, and the bits of `simulate_fp8`, rounded once more or not."""
    packed, wanted, d = ops.pack_fp8(x, group), REFERENCE.pack_fp8(x, group), x.shape[1]
    assert (packed.dtype, packed.shape) == (torch.uint8, (len(x), d + d // group))
    nan = (wanted[:, :d] & 0x7F) == 0x7F
    assert torch.equal(packed[:, :d].masked_fill(nan, 0), wanted[:, :d].masked_fill(nan, 0))
    assert torch.equal(packed[:, d:], wanted[:, d:])
    assert torch.equal(packed[:, d:] == 255, nan.unflatten(1, (-1, group)).any(2))
    ours = assert_same(ops.unpack_fp8(packed, group, x.dtype), simulated("simulate_fp8", x, group))
    kept = ours[~ours.isinf().any(1)]
    assert_same(ops.simulate_fp8(kept, group), kept)
    assert_same(ops.unpack_fp8(ops.pack_fp8(kept, group), group, x.dtype), kept)
    return ours


@DTYPES
@pytest.mark.parametrize(("width", "group"), [(512, 128), (448, 64), (96, 48)])
def test_packed_rows_hold_what_simulate_fp8_leaves(ops, width, group, dtype):
    for size in (0.0, 1e-38, 1e-6, 1.0, 1e30, 1e35):
        x = (draw(2, 9, 2 * width) * size).to(dtype)[:, ::2]
        x[0, :3] = x[0].abs().max() * torch.tensor([448.0, 5.0, 1.25]).to(dtype)  # small ones: subnormal codes
        x[1, 5], x[2, 6], x[3, 7], x[4, 8] = torch.nan, torch.inf, -torch.inf, -0.0
        out = assert_packed(ops, x, group)
        assert out.isnan().sum(1).tolist() == [0, group, group, group, 0, 0, 0, 0, 0]
        assert out[4, 8].signbit()


@pytest.mark.parametrize("group", [128, 64])
def test_every_bfloat16_is_packed(ops, group):
    """All of them beside the largest code, then as the sizes of blocks."""
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    assert_packed(ops, beside_largest("simulate_fp8", every, group), group)
    assert_packed(ops, every.view(-1, group), group)


@DTYPES
def test_what_was_rounded_is_not_rounded_once_more(ops, dtype):
    """Blocks of every scale there is, whose largest are 224 to 448 of it: by ulps above 224 it may be another then.

    Beside each all codes and what lies between two. Of the largest scale, what rounds to 2^128 is infinite.
    """
    codes, ulps = FORMATS["simulate_fp8"][0], torch.arange(-3, 4)
    tops = torch.tensor([224.0, 232, 240, 248, 256, 264, 416, 432, 440, 448])
    if dtype == torch.float32:
        tops = ((tops.view(torch.int32)[:, None] + ulps).view(torch.float32)).flatten()
    else:
        tops = ((tops.bfloat16().view(torch.int16)[:, None] + ulps).to(torch.int16).view(torch.bfloat16)).flatten()
    tops = tops.double().clamp(max=448)
    beside = torch.cat((codes, between(codes)))
    beside = torch.cat((beside, -beside)).unflatten(0, (-1, 1)).T  # [1, n]
    beside = torch.minimum(beside, tops[:, None]).maximum(-tops[:, None])
    blocks = torch.cat((tops[:, None], beside), 1)
    group = blocks.shape[1]
    for power in (-22, -21, 0, 119, 120) if ops.name == "triton" else range(-22, 121):
        x = (blocks * 2.0**power).to(dtype)
        x = x[x.isfinite().all(1)]
        out = assert_packed(ops, x, group)
        assert bool(out.isinf().any()) == (power == 120)
        assert not out.isnan().any()


def test_no_rows_at_all_are_packed_and_what_is_no_packed_row_is_refused(ops):
    packed = ops.pack_fp8(torch.zeros(0, 256), 128)
    assert packed.shape == (0, 258)
    assert ops.unpack_fp8(packed, 128, torch.bfloat16).shape == (0, 256)
    with pytest.raises(AssertionError, match="no multiple"):
        ops.pack_fp8(torch.zeros(2, 200), 128)
    with pytest.raises(AssertionError, match="no codes in groups of 128"):
        ops.unpack_fp8(torch.zeros(2, 256, dtype=torch.uint8), 128, torch.bfloat16)


# --- the scale itself, which only the reference has as a function


def test_reference_scale_reads_the_last_bit_of_the_mantissa():
    assert quantise.power_of_two_scale(torch.tensor([1.0, 1 + ULP, 2 - ULP, 2.0]), 1.0).tolist() == [1.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_reference_scale_of_what_is_not_finite_is_nan(bad):
    assert quantise.power_of_two_scale(torch.tensor([bad, 1.0]), 1.0).isnan().tolist() == [True, False]
    x = torch.ones(1, 128)
    x[0, 7] = bad
    values, scale = quantise.quantise_fp8(x, 64)
    assert values.float().isnan().tolist()[0] == [True] * 64 + [False] * 64
    assert scale.isnan().tolist() == [[True, False]]


@pytest.mark.parametrize("largest", [448, 6])
def test_reference_scale_of_every_bf16_amax_is_the_smallest_that_fits(largest):
    amax = torch.arange(0x80, 0x7F80, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)  # normal and finite
    amax = amax[amax.float() >= largest * 2.0**-126]  # below, callers clamp
    scale = quantise.power_of_two_scale(amax, float(largest)).double()
    assert (scale.frexp().mantissa == 0.5).all(), "no power of two"
    have, need = scale * largest, amax.double()  # float64 rounds neither
    assert (need <= have).all()
    assert (have < 2 * need).all()


# --- the Hadamard transform


def signs(d):
    """``(-1)^popcount(i & j)``, from a table of all popcounts."""
    ones = torch.tensor([i.bit_count() for i in range(d)])
    return 1.0 - 2 * (ones[torch.arange(d)[:, None] & torch.arange(d)] % 2).double()


@DTYPES
@pytest.mark.parametrize("shape", [(3, 1), (5, 2), (2, 9, 128), (1, 512), (40, 64), (0, 8)])
def test_hadamard_is_the_sum_of_its_equation(ops, shape, dtype):
    x, d = draw(6, *shape).to(dtype), shape[-1]
    ours, expected = ops.hadamard(x), x.double() @ signs(d) * d**-0.5
    assert (ours.dtype, ours.shape) == (dtype, x.shape)
    # d - 1 sums of numbers no larger than |x|_1, each rounded to 2^-24 of that, then scaled and rounded
    bound = (d - 1) * 2.0**-24 * x.double().abs().sum(-1, keepdim=True) * d**-0.5 + expected.abs() * ULP
    if dtype == torch.bfloat16:
        bound += expected.abs() * 2.0**-8
    assert ((ours.double() - expected).abs() <= bound).all()


def test_hadamard_of_whole_numbers_is_exact_and_in_natural_order(ops):
    """Of whole numbers every sum is exact: a root and a product round, of 64 columns not even these."""
    assert torch.equal(ops.hadamard(torch.eye(64)).double(), signs(64) / 8)
    x = torch.randint(-8, 9, (128,), generator=torch.Generator().manual_seed(4)).float()
    expected = x.double() @ signs(128) / math.sqrt(128)
    assert ops.hadamard(x).tolist() == pytest.approx(expected.tolist(), rel=4 * ULP, abs=1e-12)


def test_hadamard_is_its_own_inverse_and_keeps_dot_products(ops):
    q, k = draw(5, 2, 10, 128).unbind()
    rotated_q, rotated_k = ops.hadamard(q), ops.hadamard(k)
    bound = 128 * ULP * q.norm(dim=-1) * k.norm(dim=-1)
    assert ((rotated_q * rotated_k).sum(-1) - (q * k).sum(-1)).abs().le(bound).all()
    assert (ops.hadamard(rotated_q) - q).abs().max() < 128 * ULP * q.norm(dim=-1).max()


def test_hadamard_keeps_nan_in_its_row_and_refuses_other_widths(ops):
    x = torch.ones(3, 32)
    x[1, 7] = torch.nan
    assert ops.hadamard(x).isnan().sum(1).tolist() == [0, 32, 0]
    with pytest.raises(AssertionError, match="no power of two"):
        ops.hadamard(torch.ones(3, 24))


# --- what is put together of these


@DTYPES
@pytest.mark.parametrize("shape", [(7, 32), (2, 9, 128), (1, 512), (0, 64)])
def test_index_rows_are_transformed_then_rounded(ops, shape, dtype):
    x = draw(8, *shape).to(dtype)
    x[-1:, ..., 5] = torch.nan
    ours, apart = ops.round_index(x, 32), ops.simulate_fp4(ops.hadamard(x), 32)
    assert torch.equal(ours.isnan(), apart.isnan())
    assert torch.equal(ours.nan_to_num(9), apart.nan_to_num(9))
