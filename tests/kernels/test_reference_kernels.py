"""Reference ops on activations against oracles that share nothing with them: Python floats, fractions, plain loops."""

import bisect
import itertools
import math
import struct
from fractions import Fraction

import pytest
import torch

from kernels.compress import reference as pool
from kernels.gate import reference as gate
from kernels.norm import reference as norm
from kernels.quantise import reference as quantise
from kernels.rope import reference as rope
from kernels.swiglu import reference as swiglu

POSITIONS = (0, 127, 4096, 65535, 10**6)
ULP = 2.0**-23  # of float32, relative


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def float32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


def plain_frequencies(theta):
    return [theta ** (-2 * i / 64) for i in range(32)]


def slowed_frequencies(theta):
    # YaRN of V4's config (factor 16, 65536 positions, beta 32 and 1) ramps from pair 15 to pair 25 at theta 160000
    ramp = [min(max((i - 15) / 10, 0), 1) for i in range(32)]
    return [f * (1 - r) + f / 16 * r for f, r in zip(plain_frequencies(theta), ramp, strict=True)]


def v4_yarn(theta):
    return rope.yarn_frequencies(64, theta, factor=16, original_context=65536, beta_fast=32, beta_slow=1)


ROPES = {
    "theta 10000": (rope.frequencies(64, 10000.0), plain_frequencies(10000.0)),
    "theta 160000, YaRN": (v4_yarn(160000.0), slowed_frequencies(160000.0)),
}


@pytest.mark.parametrize("name", ROPES)
def test_rope_frequencies(name):
    ours, expected = ROPES[name]
    for ours_i, expected_i in zip(ours.tolist(), expected, strict=True):
        # a power (about 2 ulp), a reciprocal, and up to four roundings of the ramp
        assert abs(ours_i / expected_i - 1) < 8 * ULP


@pytest.mark.parametrize("name", ROPES)
def test_rope_angles(name):
    freqs, _ = ROPES[name]
    cos, sin = rope.angles(torch.tensor(POSITIONS), freqs)
    for (t, position), (i, f) in itertools.product(enumerate(POSITIONS), enumerate(freqs.tolist())):
        turned = float32(position * f)  # the product is exact in float64: one rounding, as in the equation
        assert abs(cos[t, i].item() - math.cos(turned)) < 2 * ULP
        assert abs(sin[t, i].item() - math.sin(turned)) < 2 * ULP


@pytest.mark.parametrize("name", ROPES)
def test_rope_angles_lose_what_the_docstring_says(name):
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


@pytest.mark.parametrize("shape", [(5, 96), (5, 3, 96)])
def test_rotate_turns_neighbouring_pairs_of_the_trailing_dims(shape):
    x = torch.randn(shape, generator=seeded(0))
    cos, sin = rope.angles(torch.tensor(POSITIONS), v4_yarn(160000.0))
    out = rope.rotate(x, cos, sin)
    assert torch.equal(out[..., :32], x[..., :32])
    pairs, turn = x[..., 32:].reshape(5, -1, 32, 2), torch.complex(cos.double(), sin.double())[:, None]
    expected = torch.view_as_real(torch.view_as_complex(pairs.double()) * turn).reshape(x[..., 32:].shape)
    assert (out[..., 32:] - expected).abs().max() < 4 * ULP * x.abs().max()  # two products and a sum
    assert (rope.rotate(out, cos, -sin) - x).abs().max() < 8 * ULP * x.abs().max()


def test_rotate_keeps_dot_products_of_equal_distances():
    cos, sin = rope.angles(torch.tensor([3, 10, 103, 110]), rope.frequencies(64, 10000.0))
    q, k = torch.randn(2, 1, 64, generator=seeded(1)).unbind()
    turned_q, turned_k = rope.rotate(q.expand(4, -1), cos, sin), rope.rotate(k.expand(4, -1), cos, sin)
    near, far = turned_q[1] @ turned_k[0], turned_q[3] @ turned_k[2]  # both seven positions apart
    assert abs(near - far) < 1e-4
    assert abs(near - q[0] @ k[0]) > 0.1


def test_rms_norm():
    x, weight = torch.randn(3, 50, generator=seeded(2)), torch.randn(50, generator=seeded(3))
    for row, normed, bare in zip(x, norm.rms_norm(x, weight, 1e-2), norm.rms_norm(x, None, 1e-2), strict=True):
        root = math.sqrt(sum(v * v for v in row.tolist()) / 50 + 1e-2)
        for v, w, y, z in zip(row.tolist(), weight.tolist(), normed.tolist(), bare.tolist(), strict=True):
            assert y == pytest.approx(v / root * w, rel=8 * ULP)
            assert z == pytest.approx(v / root, rel=8 * ULP)


def test_hadamard_signs_are_the_parity_of_common_bits():
    d = 128
    x = torch.randint(-8, 9, (d,), generator=seeded(4)).float()
    for j, y in enumerate(quantise.hadamard(x).tolist()):
        exact = sum((-1) ** (i & j).bit_count() * v for i, v in enumerate(x.tolist())) / math.sqrt(d)
        assert y == pytest.approx(exact, rel=4 * ULP, abs=1e-12)  # whole sums are exact; a root and a product round


def test_hadamard_is_its_own_inverse_and_keeps_dot_products():
    q, k = torch.randn(2, 10, 128, generator=seeded(5)).unbind()
    rotated_q, rotated_k = quantise.hadamard(q), quantise.hadamard(k)
    bound = 128 * ULP * q.norm(dim=-1) * k.norm(dim=-1)
    assert ((rotated_q * rotated_k).sum(-1) - (q * k).sum(-1)).abs().le(bound).all()
    assert (quantise.hadamard(rotated_q) - q).abs().max() < 128 * ULP * q.norm(dim=-1).max()


def nearest_even(value, codes):
    """The element of `codes`, values in code order, next to `value`; of two equally near, the even code."""
    above = bisect.bisect_left(codes, value)
    neighbours = range(max(above - 1, 0), min(above + 1, len(codes)))
    return codes[min(neighbours, key=lambda code: (abs(Fraction(value) - codes[code]), code % 2))]


def around_every_boundary(codes):
    """Every code, every midpoint of two codes, and the float32 on either side of each."""
    points = sorted({*codes, *((a + b) / 2 for a, b in itertools.pairwise(codes))})
    exact = torch.tensor([float(p) for p in points])
    up, down = torch.full_like(exact, torch.inf), torch.full_like(exact, -torch.inf)
    return torch.cat((exact, exact.nextafter(up), exact.nextafter(down).clamp(min=0)))


E4M3 = [Fraction(m, 512) for m in range(8)] + [
    Fraction(8 + m, 8) * Fraction(2) ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)
]
E2M1 = [Fraction(v) for v in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]


@pytest.mark.parametrize("power", [-20, 0, 3])
@pytest.mark.parametrize(("codes", "group"), [(E4M3, 128), (E2M1, 32)])
def test_rounding_to_the_narrow_format(codes, group, power):
    points = around_every_boundary(codes)
    points = points[points <= float(codes[-1])]
    points = torch.cat((points, -points))
    points = torch.cat((points, torch.zeros(-len(points) % (group - 1)))).view(-1, group - 1)
    largest = torch.full((len(points), 1), float(codes[-1]))  # fixes the scale at 2^power
    x = torch.cat((largest, points), dim=1) * 2.0**power
    simulate = quantise.simulate_fp8 if codes is E4M3 else quantise.simulate_fp4
    rounded = simulate(x, group)
    for value, ours in zip(x.flatten().tolist(), rounded.flatten().tolist(), strict=True):
        expected = nearest_even(abs(value) / 2.0**power, codes) * Fraction(2) ** power
        assert abs(Fraction(ours)) == expected, f"{value} became {ours}, want {float(expected)}"
        assert expected == 0 or (ours < 0) == (value < 0)


def test_amax_beyond_the_largest_code_takes_the_next_scale():
    for simulate, group, largest in ((quantise.simulate_fp8, 128, 448.0), (quantise.simulate_fp4, 32, 6.0)):
        x = torch.full((2, group), 0.25)
        x[0, 0], x[1, 0] = largest, largest * (1 + 2**-7)  # one bf16 ulp more
        assert simulate(x, group)[:, 0].tolist() == [largest, largest]  # 451.5 / 2 rounds to 224, 6.05 / 2 to 3
        assert quantise.power_of_two_scale(x.amax(1), largest).tolist() == [1.0, 2.0]


def test_scale_reads_the_last_bit_of_the_mantissa():
    assert quantise.power_of_two_scale(torch.tensor([1.0, 1 + ULP, 2 - ULP, 2.0]), 1.0).tolist() == [1.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_scale_of_what_is_not_finite_is_nan(bad):
    assert quantise.power_of_two_scale(torch.tensor([bad, 1.0]), 1.0).isnan().tolist() == [True, False]
    x = torch.ones(1, 128)
    x[0, 7] = bad
    values, scale = quantise.quantise_fp8(x, 64)
    assert values.float().isnan().tolist()[0] == [True] * 64 + [False] * 64
    assert scale.isnan().tolist() == [[True, False]]


@pytest.mark.parametrize("largest", [448, 6])
def test_power_of_two_scale_of_every_bf16_amax(largest):
    amax = torch.arange(0x80, 0x7F80, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)  # normal and finite
    amax = amax[amax.float() >= largest * 2.0**-126]  # below, callers clamp
    scales = quantise.power_of_two_scale(amax, float(largest))
    for value, scale in zip(amax.tolist(), scales.tolist(), strict=True):
        numerator, denominator = value.as_integer_ratio()
        assert math.frexp(scale)[0] == 0.5, "no power of two"
        s_numerator, s_denominator = scale.as_integer_ratio()
        need, have = numerator * s_denominator, s_numerator * denominator * largest
        assert need <= have < 2 * need, f"amax {value}: {scale} is not the smallest power of two that fits"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_simulation_is_idempotent_and_near(dtype, size):
    x = (torch.randn(64, 256, generator=seeded(6)) * size).to(dtype)
    fp8, fp4 = quantise.simulate_fp8(x, 64), quantise.simulate_fp4(x, 32)
    assert torch.equal(quantise.simulate_fp8(fp8, 64), fp8)
    assert torch.equal(quantise.simulate_fp4(fp4, 32), fp4)
    amax = x.float().unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True)
    # the widest gap of E2M1 is 2 scales, and a scale is less than amax / 3
    assert ((fp4.float() - x.float()).abs().unflatten(-1, (-1, 32)) <= amax / 3).all()
    # half a unit of three mantissa bits, or half the smallest code (2^-9) of the smallest scale allowed
    floor = 2.0**-10 * 2 * max(1e-4, x.abs().max().item()) / 448
    assert ((fp8.float() - x.float()).abs() <= x.float().abs() / 16 + floor).all()


def test_gate_bias_selects_but_does_not_weigh():
    logits = torch.tensor([[1.0, 1.0, -2.0, 1.0, 3.0]])
    bias = torch.tensor([0.0, 0.0, 9.0, 0.0, -9.0])
    ids, weights = gate.route(logits, bias, 3, 2.5)
    assert ids.tolist() == [[2, 0, 1]]  # 0, 1 and 3 tie: the lower ones
    scores = [math.sqrt(math.log1p(math.exp(v))) for v in (-2.0, 1.0, 1.0)]
    assert weights[0].tolist() == pytest.approx([2.5 * s / sum(scores) for s in scores], rel=8 * ULP)


def test_gate_ties_and_sum_at_scale():
    logits = torch.randint(-2, 3, (200, 64), generator=seeded(7)).float()  # five values on 64 experts: ties everywhere
    ids, weights = gate.route(logits, torch.zeros(64), 6, 1.5)
    for row, chosen in zip(logits.tolist(), ids.tolist(), strict=True):
        assert chosen == sorted(range(64), key=lambda e: (-row[e], e))[:6]
    assert (weights.sum(-1) - 1.5).abs().max() < 8 * ULP
    assert torch.equal(weights, gate.route_weights(logits, ids, 1.5))


def test_swiglu_clamps_and_weighs():
    gates, ups = torch.tensor([[50.0, -50.0, 1.0, 50.0]]), torch.tensor([[50.0, -50.0, -0.5, -50.0]])

    def silu(v):
        return v / (1 + math.exp(-v))

    # the gate has no lower clamp: silu(-50), not silu(-10)
    expected = [silu(10) * 10, silu(-50) * -10, silu(1) * -0.5, silu(10) * -10]
    assert swiglu.swiglu(gates, ups, 10.0, None)[0].tolist() == pytest.approx(expected, rel=4 * ULP)
    weighed = swiglu.swiglu(gates, ups, 10.0, torch.tensor([0.25]))
    assert weighed[0].tolist() == pytest.approx([0.25 * v for v in expected], rel=4 * ULP)


@pytest.mark.parametrize("overlap", [False, True])
def test_pool_is_one_softmax_per_channel(overlap):
    n, r, d = 3, 4, 5
    kv, gates, before_kv, before_gates = torch.randn(4, n, r, d, generator=seeded(8)).unbind()
    gates[1, 2], before_gates[0] = -torch.inf, -torch.inf  # a token taken out; no window before the first
    ours = pool.pool(kv, gates, before_kv if overlap else None, before_gates if overlap else None)
    for e, c in itertools.product(range(n), range(d)):
        tokens = [(before_gates[e, j, c].item(), before_kv[e, j, c].item()) for j in range(r) if overlap]
        tokens += [(gates[e, j, c].item(), kv[e, j, c].item()) for j in range(r)]
        total = sum(math.exp(g) for g, _ in tokens)
        expected = sum(math.exp(g) * v for g, v in tokens) / total
        assert ours[e, c].item() == pytest.approx(expected, rel=16 * ULP, abs=16 * ULP)
