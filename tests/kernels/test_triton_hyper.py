"""mHC on the GPU's kernels against its equations: op by op, and from one sublayer to the next."""

import pytest
import torch

from kernels.hyper import reference
from kernels.hyper import triton as hyper

ULP = 2.0**-23  # of float32, relative
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
# tokens and columns: none, one, several splits and more than are added at a time, a second tile of tokens
SHAPES = pytest.mark.parametrize(("t", "d"), [(0, 8), (1, 24), (2, 150), (19, 70)])
S = 4


@pytest.fixture(autouse=True)
def two_splits_at_a_time(monkeypatch):
    monkeypatch.setattr(hyper, "SPLITS", 2)


def draw(t, d, dtype, s=S):
    g = torch.Generator().manual_seed(t)
    streams = torch.randn(t, s, 2 * d, generator=g).to(dtype)[..., ::2]  # rows that do not lie in order
    fn = torch.randn((2 + s) * s, s * d, generator=g) * (s * d) ** -0.5
    base, scale = torch.randn((2 + s) * s, generator=g), torch.tensor([0.5, -1.0, 0.25])
    return streams, fn, scale, base


def assert_near(ours, expected, *, ulps, largest=1.0):
    """Some ulp of float32 of the largest term of a sum and, in bfloat16, one ulp of the result."""
    assert (ours.dtype, ours.shape) == (expected.dtype, expected.shape)
    bound = torch.full_like(expected, ulps * ULP * largest, dtype=torch.float32)
    if ours.dtype == torch.bfloat16:
        bound += expected.float().abs() * 2.0**-7
    assert ((ours.float() - expected.float()).abs() <= bound).all()


@DTYPES
@SHAPES
def test_weights(t, d, dtype):
    streams, fn, scale, base = draw(t, d, dtype)
    wide = streams.double(), fn.double(), scale.double(), base.double()
    ours = hyper.hyper_weights(streams, fn, scale, base, 20, 1e-6, 1e-6)
    for got, expected, like in zip(ours, exact_weights(*wide), ("pre", "post", "comb"), strict=True):
        # a mix is a sum of 4 d products of sizes near (4 d)^-0.5, which split and tiled is out by a few ulp of its
        # largest terms; a sigmoid shrinks that, and 40 normalisations of numbers below 1 add an ulp each
        assert_near(got, expected.float(), ulps=64 if like == "comb" else 16)
    head = hyper.head_weights(streams, fn[:S], scale[:1], base[:S], 1e-6, 1e-6)
    expected = torch.sigmoid(mixes(*wide[:2])[:, :S] * wide[2][0] + wide[3][:S]) + 1e-6
    assert_near(head, expected.float(), ulps=16)


def mixes(streams, fn):
    flat = streams.flatten(1)
    return flat @ fn.T * (flat.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def exact_weights(streams, fn, scale, base):
    """In float64, with Sinkhorn's own: it is exact in any dtype it is given."""
    found = mixes(streams, fn)
    pre = torch.sigmoid(found[:, :S] * scale[0] + base[:S]) + 1e-6
    post = 2 * torch.sigmoid(found[:, S : 2 * S] * scale[1] + base[S : 2 * S])
    logits = (found[:, 2 * S :] * scale[2] + base[2 * S :]).unflatten(-1, (S, S))
    return pre, post, reference.sinkhorn(logits, 20, 1e-6)


@pytest.mark.parametrize("eps", [1e-6, 1e-2])  # V4's, which the bound below hides, and one that it does not
@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_sinkhorn_keeps_the_order_of_its_steps(iterations, eps):
    """Logits so far apart that rows have not converged: what is normalised last shows."""
    streams, fn, _, base = draw(20, 16, torch.float32)
    scale = torch.tensor([1.0, 1.0, 8.0])
    comb = hyper.hyper_weights(streams, fn, scale, 4 * base, iterations, eps, 1e-6)[2]
    logits = mixes(streams.double(), fn.double())[:, 2 * S :] * 8 + 4 * base[2 * S :].double()
    expected = reference.sinkhorn(logits.unflatten(-1, (S, S)), iterations, eps)
    # logits up to 40 are out by 16 ulp of the mixes times 8, and their exponentials by as much; then two an iteration
    assert (comb - expected).abs().max() <= (128 + 8 * iterations) * ULP


@DTYPES
@SHAPES
def test_collapse_and_expand(t, d, dtype):
    streams, fn, scale, base = draw(t, d, dtype)
    pre, post, comb = reference.hyper_weights(streams, fn, scale, base, 20, 1e-6, 1e-6)
    pre, post, comb = (torch.stack((part, part), dim=-1)[..., 0] for part in (pre, post, comb))  # not in order either
    y = torch.randn(t, 2 * d, generator=torch.Generator().manual_seed(7)).to(dtype)[:, 1::2]
    # four or five products of numbers below 8
    assert_near(hyper.collapse(streams, pre), reference.collapse(streams, pre), ulps=5, largest=8)
    ours = hyper.expand(y, streams, post, comb)
    assert_near(ours, reference.expand(y, streams, post, comb), ulps=5, largest=8)


def arguments(t, d, dtype):
    """Of `read_streams`: small integers, which are exact in both dtypes."""
    streams, fn, scale, base = draw(t, d, dtype)
    g = torch.Generator().manual_seed(t + 1)
    streams = torch.randint(-4, 5, streams.shape, generator=g).to(dtype)
    return streams, fn, scale, base, 20, 1e-6, 1e-6, torch.rand(d, generator=g) + 0.5, 1e-5


@DTYPES
@SHAPES
def test_read_is_its_ops_one_after_the_other(t, d, dtype):
    given = arguments(t, d, dtype)
    ours, expected = hyper.read_streams(*given), reference.read_streams(*given)
    assert ours[0].dtype == dtype
    # the norm divides by the mean size, and its rows are sums of four products within 16 ulp; bf16 rounds twice
    bound = 64 * ULP * 8 + expected[0].float().abs() * (2.0**-6 if dtype == torch.bfloat16 else 0)
    assert ((ours[0].float() - expected[0].float()).abs() <= bound).all()
    for got, wanted, ulps in zip(ours[1:], expected[1:], (32, 32, 128), strict=True):
        assert_near(got, wanted, ulps=ulps)
    apart = hyper.hyper_weights(*given[:7])
    for got, wanted in zip(ours[1:], apart, strict=True):  # the same sums make them
        assert torch.equal(got, wanted)


def test_read_twice_is_the_same_bits():
    given = arguments(3, 130, torch.bfloat16)
    for first, second in zip(hyper.read_streams(*given), hyper.read_streams(*given), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_with_its_token(bad):
    given = list(arguments(19, 70, torch.float32))
    given[0][18, 3, 69] = bad
    for ours, expected in zip(hyper.read_streams(*given), reference.read_streams(*given), strict=True):
        assert torch.equal(ours.isfinite(), expected.isfinite())
        assert ours[:18].isfinite().all()
        assert not ours[18].isfinite().all()


@pytest.mark.parametrize("s", [1, 2, 8])
def test_other_numbers_of_streams(s):
    streams, fn, scale, base = draw(3, 20, torch.float32, s)
    ours, expected = (ops.hyper_weights(streams, fn, scale, base, 3, 1e-6, 1e-6) for ops in (hyper, reference))
    for pair in zip(ours, expected, strict=True):
        assert_near(*pair, ulps=64)
    y = streams[:, 0]
    ours, expected = (ops.expand(y, streams, *expected[1:]) for ops in (hyper, reference))
    assert_near(ours, expected, ulps=5, largest=8)


def test_what_does_not_fit_is_refused():
    streams, fn, scale, base = draw(2, 12, torch.float32, 3)
    with pytest.raises(AssertionError, match="power of two"):
        hyper.hyper_weights(streams, fn, scale, base, 3, 1e-6, 1e-6)
    with pytest.raises(AssertionError, match="15 rows of fn for 4 streams"):
        hyper.hyper_weights(torch.zeros(2, 4, 9), fn, scale, base, 3, 1e-6, 1e-6)
    with pytest.raises(AssertionError, match="want 40 columns"):
        hyper.head_weights(torch.zeros(2, 4, 10), fn[:4], scale, base, 1e-6, 1e-6)
