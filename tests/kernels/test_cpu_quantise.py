"""Blocked mHC and blocked rounding of activations against the reference."""

import pytest
import torch

from kernels.hyper import cpu as hyper
from kernels.hyper.reference import sinkhorn
from kernels.ops import CPU, REFERENCE
from kernels.quantise import cpu as quantise

SETS = (CPU, REFERENCE)
ULP = 2.0**-23  # of float32, relative; bfloat16's is 2^-7


def assert_near(ours, expected, *, ulps, largest):
    """Compare with the reference: some ulp of the largest term of a sum and, in bfloat16, one ulp of the result."""
    assert ours.dtype == expected.dtype
    assert ours.shape == expected.shape
    bound = torch.full_like(expected, ulps * ULP * largest, dtype=torch.float32)
    if ours.dtype == torch.bfloat16:
        bound += expected.float().abs() * 2.0**-7
    assert ((ours.float() - expected.float()).abs() <= bound).all()


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=str)
def streams(request, monkeypatch):
    monkeypatch.setattr(hyper, "TILE", 3 * 4 * 24)  # three tokens
    return torch.randn(10, 4, 48, generator=torch.Generator().manual_seed(0)).to(request.param)[..., ::2]


@pytest.mark.parametrize("t", [0, 1, 2, 3, 4, 10])
def test_hyper(streams, t):
    g = torch.Generator().manual_seed(t)
    streams, s, d = streams[:t], 4, 24
    fn, base = torch.randn((2 + s) * s, s * d, generator=g), torch.randn((2 + s) * s, generator=g)
    scale = torch.tensor([0.5, -1.0, 0.25])
    weights = [ops.hyper_weights(streams, fn, scale, base, 20, 1e-6, 1e-6) for ops in (CPU, REFERENCE)]
    for ours, expected in zip(*weights, strict=True):
        # a sum of 96 terms of up to 4 sizes in another order, then 40 normalisations of numbers below 1
        assert_near(ours, expected, ulps=100, largest=1)
    heads = [ops.head_weights(streams, fn[:s], scale[:1], base[:s], 1e-6, 1e-6) for ops in (CPU, REFERENCE)]
    assert_near(*heads, ulps=100, largest=1)
    pre, post, comb = weights[1]
    y = torch.randn(t, d, generator=g).to(streams.dtype)
    assert_near(CPU.collapse(streams, pre), REFERENCE.collapse(streams, pre), ulps=4, largest=8)
    assert_near(CPU.expand(y, streams, post, comb), REFERENCE.expand(y, streams, post, comb), ulps=4, largest=8)


@pytest.mark.parametrize("eps", [1e-6, 1e-2])  # V4's, which the bound below hides, and one that it does not
@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_sinkhorn_of_large_logits(iterations, eps):
    logits = 8 * torch.randn(500, 4, 4, generator=torch.Generator().manual_seed(1))  # entries down to e^-50
    exact = sinkhorn(logits.double(), iterations, eps)  # in float64: a few roundings an iteration from ours
    assert (hyper.sinkhorn(logits, iterations, eps) - exact).abs().max() < 8 * iterations * ULP


@pytest.mark.parametrize("size", [0.5, 8.0])  # settled in a few steps, and not within 20
@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_a_single_token_has_the_weights_that_it_has_among_others(iterations, size):
    g = torch.Generator().manual_seed(3)
    streams, base = torch.randn(40, 4, 24, generator=g), torch.randn(24, generator=g)
    fn, scale = size * torch.randn(24, 96, generator=g) / 96**0.5, torch.tensor([0.5, -40.0, 1.0])
    together = REFERENCE.hyper_weights(streams, fn, scale, base, iterations, 1e-6, 1e-6)
    alone = [CPU.hyper_weights(token[None], fn, scale, base, iterations, 1e-6, 1e-6) for token in streams]
    for parts, whole in zip(zip(*alone, strict=True), together, strict=True):
        # mixes of up to 40 * 8 sizes move by some ulp, and a sigmoid or softmax by as much
        assert (torch.cat(parts) - whole).abs().max() < 100 * ULP * 40 * size


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_single_token_that_is_not_finite_is_nan(bad):
    streams, fn = torch.ones(1, 4, 24), torch.randn(24, 96, generator=torch.Generator().manual_seed(4))
    streams[0, 2, 5] = bad
    weights = [ops.hyper_weights(streams, fn, torch.ones(3), torch.zeros(24), 20, 1e-6, 1e-6) for ops in SETS]
    for ours, expected in zip(*weights, strict=True):
        assert ours.isnan().all()
        assert expected.isnan().all()


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=str)
def rows(request):
    """Six tokens of three heads, of very different sizes, which do not lie in order; the last holds an infinity."""
    x = torch.randn(3, 6, 32, generator=torch.Generator().manual_seed(5)).transpose(0, 1)
    x = x * torch.tensor([1e-12, 1e-3, 1.0, 30.0, 1e10, 1.0])[:, None, None]
    x[-1, 0, 0] = torch.inf
    return x.to(request.param)


def assert_same_values(call, *inputs):
    """The same as the reference but for a few roundings, NaN at the same places; inputs are left as they were."""
    kept = [x.clone() for x in inputs]
    ours, expected = call(CPU, *inputs), call(REFERENCE, *inputs)
    for x, before in zip(inputs, kept, strict=True):
        assert torch.equal(x, before), "an input was changed"
    ulp = 2.0**-7 if ours.dtype == torch.bfloat16 else 8 * ULP
    size = expected.float().abs().nan_to_num(0, 0, 0).amax(-1, keepdim=True)  # of the row: differences cancel
    assert ours.dtype == expected.dtype
    assert torch.equal(ours.isnan(), expected.isnan())
    assert torch.equal(ours.isinf(), expected.isinf())
    assert ((ours.float() - expected.float()).nan_to_num(0, 0, 0).abs() <= ulp * size).all()


def test_rms_norm(rows):
    weight = torch.randn(32, generator=torch.Generator().manual_seed(6))
    for w in (weight, None):
        assert_same_values(lambda ops, x, w=w: ops.rms_norm(x, w, 1e-6), rows)
        assert_same_values(lambda ops, x, w=w: ops.rms_norm(x, w, 1e-6), rows[:, 1])
        assert_same_values(lambda ops, x, w=w: ops.rms_norm(x, w, 1e-6), rows[:0])


@pytest.mark.parametrize("rope", [2, 8, 32])
def test_rotate(rows, rope):
    turn = torch.randn(6, rope // 2, generator=torch.Generator().manual_seed(7))
    for x in (rows[:-1], rows[:-1, 1], rows[:1], rows[:0]):
        n = len(x)
        assert_same_values(lambda ops, x, c, s: ops.rotate(x, c, s), x, turn[:n].cos(), turn[:n].sin())


def test_swiglu(rows):
    gate, up, weight = rows[:, 0], rows[:, 1], torch.rand(6, generator=torch.Generator().manual_seed(8))
    for limit in (1.0, 10.0, torch.inf):
        assert_same_values(lambda ops, g, u, limit=limit: ops.swiglu(g, u, limit, None), gate, up)
        assert_same_values(lambda ops, g, u, w, limit=limit: ops.swiglu(g, u, limit, w), gate, up, weight)


def assert_bit_equal(ours, expected):
    """The same bits, so that -0.0 is not 0.0, and NaN, of which there are many, at the same places."""
    assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape)
    nan, integers = expected.isnan(), torch.int16 if ours.dtype == torch.bfloat16 else torch.int32
    assert torch.equal(ours.isnan(), nan)
    assert torch.equal(ours.masked_fill(nan, 0).view(integers), expected.masked_fill(nan, 0).view(integers))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [0.0, 1e-38, 1e-30, 1e-6, 1.0, 1e4, 1e30, 5e37])
def test_simulation_is_bit_equal(dtype, size, monkeypatch):
    monkeypatch.setattr(quantise, "TILE", 5 * 128)  # cuts the rows below
    x = (torch.randn(7, 3, 512, generator=torch.Generator().manual_seed(2)) * size).to(dtype)[..., ::2]
    x[0, 0, :3] = x[0, 0].abs().max() * torch.tensor([448.0, 5.0, 1.25]).to(dtype)  # small ones meet subnormal codes
    for group in (64, 128):
        assert_bit_equal(CPU.simulate_fp8(x, group), REFERENCE.simulate_fp8(x, group))
    assert_bit_equal(CPU.simulate_fp4(x, 32), REFERENCE.simulate_fp4(x, 32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("simulate", "group"), [("simulate_fp8", 128), ("simulate_fp4", 32)])
def test_what_rounds_to_zero_keeps_its_sign(simulate, group, dtype):
    x = torch.full((1, group), 1e-6, dtype=dtype)
    x[0, 1::2] = -1e-6
    x[0, 2], x[0, 3], x[0, 4] = 0.0, -0.0, 1.0  # the last fixes the scale
    outs = [getattr(ops, simulate)(x, group) for ops in (CPU, REFERENCE)]
    assert_bit_equal(*outs)
    for out in outs:
        assert (out != 0).sum() == 1
        assert torch.equal(out.signbit(), x.signbit())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("simulate", "group"), [("simulate_fp8", 128), ("simulate_fp8", 64), ("simulate_fp4", 32)])
def test_a_block_with_nan_or_inf_is_nan_and_its_neighbours_are_not(simulate, group, bad, dtype):
    """At every position of the block; alone in zeros, too, where its size is all that the scale can see."""
    for fill in (1.0, 0.0):
        x = torch.full((group, 3, group), fill, dtype=dtype)  # one row for each position
        x[:, 1].fill_diagonal_(bad)
        outs = [getattr(ops, simulate)(x.flatten(1), group).view_as(x) for ops in (CPU, REFERENCE)]
        assert_bit_equal(*outs)
        for out in outs:
            assert out[:, 1].isnan().all()
            assert (out[:, ::2] == fill).all()


@pytest.mark.parametrize("ops", [CPU, REFERENCE], ids=lambda ops: ops.name)
def test_no_tokens_at_all(ops):
    assert ops.simulate_fp8(torch.zeros(0, 128), 128).shape == (0, 128)
    assert ops.simulate_fp4(torch.zeros(0, 4, 64), 32).shape == (0, 4, 64)
