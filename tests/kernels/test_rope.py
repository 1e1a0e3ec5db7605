"""Frequencies and angles against Python floats, and both rotations of every backend against the complex product."""

import itertools
import math

import pytest
import torch

from fathom.kernels.ops import REFERENCE
from fathom.kernels.rope import reference as rope
from tests.kernels.every_backend import HALF_BF16, OP_SETS, ULP, both_dtypes, draw, every_backend

POSITIONS = (0, 127, 4096, 65535, 10**6)
ULPS = 2  # of the largest number: two products and a sum


def slowed(i):
    # YaRN of V4's config (factor 16, 65536 positions, beta 32 and 1) ramps from pair 15 to pair 25 at theta 160000
    ramp = min(max((i - 15) / 10, 0), 1)
    return 160000.0 ** (-i / 32) * (1 - ramp + ramp / 16)


V4 = rope.yarn_frequencies(64, 160000.0, factor=16, original_context=65536, beta_fast=32, beta_slow=1)
ROPES = {
    "theta 10000": (rope.frequencies(64, 10000.0), [10000.0 ** (-i / 32) for i in range(32)]),
    "theta 160000, YaRN": (V4, [slowed(i) for i in range(32)]),
}


@pytest.mark.parametrize("name", ROPES)
def test_frequencies(name):
    ours, expected = ROPES[name]
    # a power (about 2 ulp), a reciprocal, and up to four roundings of the ramp
    assert ours.tolist() == pytest.approx(expected, rel=8 * ULP, abs=0)


def test_llama3_keeps_short_waves_slows_long_ones_and_interpolates_between():
    """Llama 3.1-8B: by its own numbers in float64, pair by pair."""
    found = rope.llama3_frequencies(
        128, 500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192
    )
    shares = set()
    for i, value in enumerate(found.tolist()):
        f = 500000.0 ** (-i / 64)
        share = min(max((8192 * f / (2 * math.pi) - 1) / 3, 0), 1)  # of turns within the old context, from 1 to 4
        shares.add(share)
        assert value == pytest.approx((1 - share) * f / 8 + share * f, rel=1e-5, abs=0)
    assert {0, 1} < shares, "some are kept, some slowed, and some between"


@pytest.mark.parametrize("name", ROPES)
def test_angles(name):
    freqs, _ = ROPES[name]
    cos, sin = rope.angles(torch.tensor(POSITIONS), freqs)
    for (t, position), (i, f) in itertools.product(enumerate(POSITIONS), enumerate(freqs.tolist())):
        angle = torch.tensor(position * f).item()  # the product is exact in float64: one rounding, as in the equation
        assert abs(cos[t, i].item() - math.cos(angle)) < 2 * ULP
        assert abs(sin[t, i].item() - math.sin(angle)) < 2 * ULP


@pytest.mark.parametrize("name", ROPES)
def test_angles_lose_what_the_docstring_says(name):
    freqs, _ = ROPES[name]
    positions = torch.arange(10**6 - 5000, 10**6)
    cos, sin = (part.double() for part in rope.angles(positions, freqs))
    exact = positions[:, None] * freqs.double()
    off = (torch.atan2(sin, cos) - exact).remainder(2 * math.pi)
    off = torch.minimum(off, 2 * math.pi - off)
    noise = 4 * ULP  # of the cosine and sine themselves
    assert (off <= exact * 2**-24 + noise).all()
    worst = off.amax(0)
    assert worst[0] < noise, "frequency 1: the angle is the position"
    assert 0.9 * 2**-5 < worst[1] < 2**-5 + noise  # between 2^19 and 2^20 float32 is spaced by 2^-4
    assert (worst[2:] < 2**-5 + noise).all()


def turned(x, cos, sin, *, halves):
    """Pairs as complex numbers in float64: of each half one, or neighbours among the trailing columns."""
    half = cos.shape[1]
    a, b = x.double().split(half, -1) if halves else x[..., -2 * half :].double().unflatten(-1, (half, 2)).unbind(-1)
    turn = torch.complex(cos.double(), sin.double())
    pairs = torch.view_as_real(torch.complex(a, b) * (turn[:, None] if x.ndim == 3 else turn))
    return pairs.mT.flatten(-2) if halves else torch.cat((x[..., : -2 * half].double(), pairs.flatten(-2)), -1)


def check(ops, x, cos, sin, *, halves):
    """Near the complex product, and there and back again; of Triton the reference's bits. `x` is left as it was."""
    rotate, before = ops.rotate_halves if halves else ops.rotate, x.clone()
    ours, exact = rotate(x, cos, sin), turned(x, cos, sin, halves=halves)
    assert torch.equal(x, before), "the input was changed"
    assert (ours.dtype, ours.shape) == (x.dtype, x.shape)
    kept = 0 if halves else x.shape[-1] - 2 * cos.shape[1]
    assert torch.equal(ours[..., :kept], x[..., :kept])
    largest = x.double().abs().amax(-1, keepdim=True) if x.numel() else torch.zeros(())
    bound = ULPS * ULP * largest + (HALF_BF16 * exact.abs() if x.dtype == torch.bfloat16 else 0)
    assert ((ours.double() - exact).abs() <= bound).all()
    if x.dtype == torch.float32:
        assert ((rotate(ours, cos, -sin) - x).abs() <= 1.5 * ULPS * ULP * largest).all()
    if ops.name == "triton":
        assert_bit_equal(ours, getattr(REFERENCE, rotate.__name__)(x, cos, sin))


def assert_bit_equal(ours, expected):
    """The same bits, so that -0.0 is not 0.0, and NaN, of which there are many, at the same places."""
    nan, integers = expected.isnan(), torch.int16 if ours.dtype == torch.bfloat16 else torch.int32
    assert torch.equal(ours.isnan(), nan)
    assert torch.equal(ours.masked_fill(nan, 0).view(integers), expected.masked_fill(nan, 0).view(integers))


@every_backend
@both_dtypes
@pytest.mark.parametrize(("t", "heads", "d", "r"), [
    (5, None, 512, 64), (5, 3, 96, 64), (1, 3, 24, 6), (7, 2, 8, 8), (300, None, 16, 2), (0, 2, 8, 4),
    (3, 4, 128, "halves"), (1, 1, 2, "halves"), (5, 3, 12, "halves"), (200, 2, 16, "halves"), (0, 2, 8, "halves"),
])  # fmt: skip
def test_neighbours_among_the_trailing_columns_turn_or_one_half_against_the_other(ops, dtype, t, heads, d, r):
    x = draw(*([heads] if heads else []), 2 * d, t) * 10.0 ** (torch.arange(t) % 7 * 4 - 12)  # tokens of any size
    x = x.movedim(-1, 0).to(dtype)[..., ::2]  # no rows that lie in order
    x[..., 0] = -0.0  # of the columns that stay, or of a pair
    cos, sin = rope.angles(torch.arange(t) * 9977, V4 if r == 64 else rope.frequencies(d if r == "halves" else r, 1e4))
    check(ops, x, cos.T.contiguous().T, sin, halves=r == "halves")


@every_backend
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_pair(ops, halves, bad):
    x, (cos, sin) = torch.ones(2, 1, 8), rope.angles(torch.arange(3, 5), rope.frequencies(8, 1e4))
    x[0, 0, 1] = bad
    ours, reference = ((op.rotate_halves if halves else op.rotate)(x, cos, sin) for op in (ops, REFERENCE))
    assert (~ours.isfinite()).nonzero().tolist() == [[0, 0, column] for column in ((1, 5) if halves else (0, 1))]
    if ops.name == "triton":
        assert_bit_equal(ours, reference)


@every_backend
def test_dot_products_of_equal_distances_are_kept(ops):
    cos, sin = rope.angles(torch.tensor([3, 10, 103, 110]), rope.frequencies(64, 10000.0))
    q, k = draw(2, 1, 64).unbind()
    turned_q, turned_k = (ops.rotate(x.expand(4, -1), cos, sin) for x in (q, k))
    near, far = turned_q[1] @ turned_k[0], turned_q[3] @ turned_k[2]  # both seven positions apart
    assert abs(near - far) < 1e-4
    assert abs(near - q[0] @ k[0]) > 0.1


@pytest.mark.parametrize("ops", OP_SETS[2:], ids=lambda ops: ops.name)
def test_triton_refuses_more_pairs_than_columns(ops):
    for rotate, x in ((ops.rotate, torch.zeros(2, 6)), (ops.rotate_halves, torch.zeros(2, 1, 10))):
        with pytest.raises(AssertionError, match="pairs"):
            rotate(x, torch.ones(2, 4), torch.ones(2, 4))


@every_backend
@both_dtypes
@pytest.mark.parametrize(("t", "heads", "d", "r", "kv_group"), [
    (5, None, 512, 64, 64), (3, 4, 96, 6, 0), (1, None, 80, 16, 32), (0, None, 72, 8, 64), (300, 2, 40, 8, 0),
])  # fmt: skip
def test_rows_are_normed_rotated_and_rounded_as_one_after_the_other(ops, dtype, t, heads, d, r, kv_group):
    x = draw(t, *([heads] if heads else []), 2 * d).to(dtype)[..., ::2]
    x[-1:, ..., 5] = torch.nan
    angles = rope.angles(torch.arange(t) * 9977, rope.frequencies(r, 1e4))
    for weight in (None, draw(d)):
        ours = ops.norm_rotate(x, weight, 1e-6, *angles, kv_group)
        apart = ops.rotate(ops.rms_norm(x, weight, 1e-6), *angles)
        if kv_group:
            apart[..., :-r] = ops.simulate_fp8(apart[..., :-r].contiguous(), kv_group)
        assert_bit_equal(ours, apart)
