"""Hyper-connections on every backend against one equation in float64: weights, Sinkhorn's steps, reading, writing."""

import pytest
import torch

from fathom.kernels.hyper import reference
from tests.kernels.every_backend import HAS_TRITON, ULP, every_backend, on_triton

if HAS_TRITON:
    from triton.runtime import interpreter

    from fathom.kernels.hyper import triton, triton_streams
    from fathom.kernels.triton_ops import TRITON
    from fathom.scripts.bench.gpu_cases import WEIGHTS
    from tests.interpreter import truncated_dot

NAN, INF = torch.nan, torch.inf
S, EPS, NORM_EPS = 4, 1e-3, 1e-2  # of a size that no bound below hides
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
# tokens and columns: none, one, several splits, more tokens than have programs of their own
SHAPES = pytest.mark.parametrize(("t", "d"), [(0, 8), (1, 24), (2, 150), (17, 70)])


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    if HAS_TRITON:
        monkeypatch.setattr(triton, "SPAN", 32)
        monkeypatch.setattr(triton, "MOST", 8)
        monkeypatch.setattr(triton, "SPLITS", (2, 4))
        monkeypatch.setattr(triton_streams, "COLUMNS", 128)


def draw(t, d, dtype, s=S):
    g = torch.Generator().manual_seed(t)
    streams = torch.randn(t, s, 2 * d, generator=g).to(dtype)[..., ::2]  # rows that do not lie in order
    fn = torch.randn((2 + s) * s, s * d, generator=g) * (s * d) ** -0.5
    base, scale = torch.randn((2 + s) * s, generator=g), torch.tensor([0.5, -1.0, 0.25])
    return streams, fn, scale, base


def exact_sinkhorn(logits, iterations, eps, order=(2, 1)):
    """Rows are axis 2, columns axis 1."""
    mass = logits.double().exp()
    comb = mass / mass.sum(2, keepdim=True) + eps
    for axis in (1, *order * (iterations - 1)):
        comb = comb / (comb.sum(axis, keepdim=True) + eps)
    return comb


def exact_weights(streams, fn, scale, base, iterations, eps, norm_eps):
    flat, s = streams.double().flatten(1), streams.shape[1]
    mixes = flat @ fn.double().T / (flat.square().mean(1, keepdim=True) + norm_eps).sqrt()
    parts = torch.tensor([s, s, s * s])
    pre, post, logits = (mixes * scale.double().repeat_interleave(parts) + base.double()).split(parts.tolist(), 1)
    comb = exact_sinkhorn(logits.unflatten(1, (s, s)), iterations, eps)
    return 1 / (1 + (-pre).exp()) + eps, 2 / (1 + (-post).exp()), comb


def exact_collapse(streams, pre):
    return torch.einsum("tsd,ts->td", streams.double(), pre.double())


def exact_expand(y, streams, post, comb):
    return torch.einsum("td,tk->tkd", y.double(), post.double()) + torch.einsum(
        "tjd,tjk->tkd", streams.double(), comb.double()
    )


def assert_near(ours, exact, dtype, *, ulps, largest=1.0):
    """Some ulp of float32 of the largest term of a sum and, in bfloat16, what one rounding of the result may be."""
    assert (ours.dtype, ours.shape) == (dtype, exact.shape)
    bound = ulps * ULP * largest + exact.abs() * (2.0**-8 if dtype == torch.bfloat16 else 0)
    assert ((ours.double() - exact).abs() <= bound).all()


def read_arguments(t, d, dtype):
    norm = torch.rand(d, generator=torch.Generator().manual_seed(t + 1)) + 0.5
    return *draw(t, d, dtype), 20, EPS, NORM_EPS, norm, 1e-1


@DTYPES
@SHAPES
@every_backend
def test_streams_are_read_as_the_equation_says(ops, t, d, dtype):
    *given, norm, norm_eps = read_arguments(t, d, dtype)
    weights, exact = ops.hyper_weights(*given), exact_weights(*given)
    # a mix is a sum of 4 d products of sizes near (4 d)^-0.5, which split and tiled is out by a few ulp of its
    # largest terms; a sigmoid shrinks that, and 40 normalisations of numbers below 1 add an ulp each
    for ours, wanted, ulps in zip(weights, exact, (16, 16, 64), strict=True):
        assert_near(ours, wanted, torch.float32, ulps=ulps)
    streams, fn, scale, base, *_ = given
    head = ops.head_weights(streams, fn[:S], scale[:1], base[:S], EPS, NORM_EPS)
    assert_near(head, exact[0], torch.float32, ulps=16)
    x, *together = ops.read_streams(*given, norm, norm_eps)
    for ours, apart in zip(together, weights, strict=True):
        assert torch.equal(ours, apart)  # the same sums make them
    collapsed = exact_collapse(streams, exact[0]).to(dtype).double()
    normed = collapsed / (collapsed.square().mean(1, keepdim=True) + norm_eps).sqrt() * norm.double()
    # the norm divides by the mean size, and its rows are sums of four products within 16 ulp; bf16 rounds twice
    bound = 64 * ULP * 8 + normed.abs() * (2.0**-6 if dtype == torch.bfloat16 else 0)
    assert (x.dtype, x.shape) == (dtype, (t, d))
    assert ((x.double() - normed).abs() <= bound).all()


@pytest.mark.parametrize("eps", [1e-6, 1e-2])  # V4's, which the bound below hides, and one that it does not
@pytest.mark.parametrize("iterations", [1, 2, 20])
@every_backend
def test_sinkhorn_keeps_the_order_of_its_steps(ops, iterations, eps):
    """Logits so far apart that rows have not converged: what is normalised last shows."""
    streams, fn, _, base = draw(20, 16, torch.float32)
    given = streams, fn, torch.tensor([1.0, 1.0, 8.0]), 4 * base, iterations, eps, 1e-6
    # logits up to 40 are out by 16 ulp of the mixes times 8, and their exponentials by as much; then two an iteration
    bound = (128 + 8 * iterations) * ULP
    assert (ops.hyper_weights(*given)[2] - exact_weights(*given)[2]).abs().max() <= bound


LOGITS = [[0.3, -1.2, 2.0, 0.1], [1.5, 0.2, -0.7, 0.9], [-0.4, 0.6, 0.8, -2.2], [2.5, 1.1, -1.3, 0.4]]


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_sinkhorn_is_its_steps_in_float64(iterations, eps):
    logits = 8 * torch.randn(500, 4, 4, generator=torch.Generator().manual_seed(1))  # entries down to e^-50
    ours, exact = reference.sinkhorn(logits, iterations, eps), exact_sinkhorn(logits, iterations, eps)
    assert (ours - exact).abs().max() < 8 * iterations * ULP
    logits = torch.tensor([LOGITS])
    ours, exact = reference.sinkhorn(logits, iterations, eps), exact_sinkhorn(logits, iterations, eps)
    assert (ours - exact).abs().max() < 4 * iterations * ULP  # a few roundings of numbers below 1 per iteration
    assert (ours.sum(1) - 1).abs().max() < 4 * eps  # columns came last: eps and rounding
    if iterations == 2:  # far from converged, so that order and orientation show
        assert (ours.sum(2) - 1).abs().max() > 1e-3
        assert (ours - exact_sinkhorn(logits, 2, eps, order=(1, 2))).abs().max() > 1e-3
        assert (ours - exact.mT).abs().max() > 1e-1


@pytest.mark.parametrize("size", [0.5, 8.0])  # settled in a few steps, and not within 20
@pytest.mark.parametrize("iterations", [1, 2, 20])
@every_backend
def test_a_token_alone_has_the_weights_of_the_equation(ops, iterations, size):
    streams, fn, _, base = draw(2 if ops.name == "triton" else 40, 24, torch.float32)
    given = size * fn, torch.tensor([0.5, -40.0, 1.0]), base, iterations, 1e-6, 1e-6
    alone = [ops.hyper_weights(token[None], *given) for token in streams]
    for parts, exact in zip(zip(*alone, strict=True), exact_weights(streams, *given), strict=True):
        # mixes of up to 40 * 8 sizes move by some ulp, and a sigmoid or softmax by as much
        assert (torch.cat(parts) - exact).abs().max() < 100 * ULP * 40 * size


@DTYPES
@SHAPES
@every_backend
def test_collapse_and_expand_are_their_sums(ops, t, d, dtype):
    streams, *given = draw(t, d, dtype)
    weights = (part.float() for part in exact_weights(streams, *given, 20, EPS, NORM_EPS))
    pre, post, comb = (torch.stack((part, part), dim=-1)[..., 0] for part in weights)  # not in order either
    y = torch.randn(t, 2 * d, generator=torch.Generator().manual_seed(7)).to(dtype)[:, 1::2]
    ulps = 5 if ops.name == "triton" else 4  # four or five products of numbers below 8
    assert_near(ops.collapse(streams, pre), exact_collapse(streams, pre), dtype, ulps=ulps, largest=8)
    assert_near(ops.expand(y, streams, post, comb), exact_expand(y, streams, post, comb), dtype, ulps=ulps, largest=8)


@every_backend
def test_collapse_reads_and_expand_writes_transposed(ops):
    streams = torch.tensor([[[1.0, 2.0], [10.0, 20.0]]])
    assert ops.collapse(streams, torch.tensor([[2.0, 0.5]])).tolist() == [[7.0, 14.0]]
    comb, post = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), torch.tensor([[0.0, 100.0]])
    new = ops.expand(torch.tensor([[1.0, -1.0]]), streams, post, comb)
    # stream 0: 1 * (1, 2) + 3 * (10, 20); stream 1: 2 * (1, 2) + 4 * (10, 20) + 100 * (1, -1)
    assert new.tolist() == [[[31.0, 62.0], [142.0, -16.0]]]


@every_backend
def test_read_twice_is_the_same_bits(ops):
    given = read_arguments(1, 130, torch.bfloat16)
    for first, second in zip(ops.read_streams(*given), ops.read_streams(*given), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize(("t", "bad"), [(17, NAN), (17, INF), (1, NAN), (1, INF), (1, -INF)])
@every_backend
def test_what_is_not_finite_makes_the_weights_of_its_token_nan_and_of_no_other(ops, t, bad):
    streams, fn, scale, base, *rest = read_arguments(t, 70, torch.float32)
    streams[-1, 3, 69] = bad
    head = ops.head_weights(streams, fn[:S], scale[:1], base[:S], EPS, NORM_EPS)
    for found in (head, *ops.read_streams(streams, fn, scale, base, *rest)):
        assert found[-1].isnan().all()
        assert found[:-1].isfinite().all()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@every_backend
def test_what_is_not_finite_spoils_its_column_alone(ops, bad):
    (streams, *_), y, spoilt = draw(3, 70, torch.float32), torch.ones(3, 70), torch.zeros(3, S, 70, dtype=torch.bool)
    streams[1, 2, 65], y[0, 3], spoilt[1, :, 65], spoilt[0, :, 3] = bad, bad, True, True
    assert torch.equal(~ops.expand(y, streams, torch.ones(3, S), torch.ones(3, S, S)).isfinite(), spoilt)
    spoilt[0] = False
    assert torch.equal(~ops.collapse(streams, torch.ones(3, S)).isfinite(), spoilt[:, 0])


@pytest.mark.parametrize("s", [1, 2, 3, 8])
@every_backend
def test_there_may_be_other_numbers_of_streams(ops, s):
    streams, *rest = draw(3, 20, torch.float32, s)
    given = streams, *rest, 3, EPS, NORM_EPS
    if ops.name == "triton" and s == 3:
        with pytest.raises(AssertionError, match="power of two"):
            ops.hyper_weights(*given)
        return
    exact, y = exact_weights(*given), streams[:, 0]
    for ours, wanted in zip(ops.hyper_weights(*given), exact, strict=True):
        assert_near(ours, wanted, torch.float32, ulps=64)
    post, comb = exact[1].float(), exact[2].float()
    written = exact_expand(y, streams, post, comb)
    assert_near(ops.expand(y, streams, post, comb), written, torch.float32, ulps=5, largest=8)


@on_triton
@DTYPES
def test_triton_reads_a_token_of_a_few_as_it_does_alone(dtype):
    streams, *given = read_arguments(16, 24, dtype)
    alone = [TRITON.read_streams(token[None], *given) for token in streams]
    for t in range(1, 17):
        for together, one in zip(TRITON.read_streams(streams[:t], *given), zip(*alone[:t], strict=True), strict=True):
            assert torch.equal(together, torch.cat(one))


@on_triton
@DTYPES
def test_triton_reads_many_tokens_in_tiles(dtype):
    """Two tiles of tokens, of which one is short, and splits of a few blocks each, of which one is short too."""
    given = (*draw(65, 150, dtype), 20, EPS, NORM_EPS)
    for ours, exact, ulps in zip(TRITON.hyper_weights(*given), exact_weights(*given), (16, 16, 64), strict=True):
        assert_near(ours, exact, torch.float32, ulps=ulps)


@on_triton
def test_triton_refuses_what_does_not_fit():
    _, fn, scale, base = draw(2, 12, torch.float32, 3)
    with pytest.raises(AssertionError, match="15 rows of fn for 4 streams"):
        TRITON.hyper_weights(torch.zeros(2, 4, 9), fn, scale, base, 3, EPS, NORM_EPS)
    with pytest.raises(AssertionError, match="want 40 columns"):
        TRITON.head_weights(torch.zeros(2, 4, 10), fn[:4], scale, base, EPS, NORM_EPS)


@on_triton
@pytest.mark.interpreted
def test_sums_that_are_cut_off_stay_short(monkeypatch):
    """By tensor cores, whose errors are all to one side: 28,672 columns of V4-Pro as a chunk has them, in one split.

    Within a 32nd of what `scripts.bench gpu` allows; in one sum they are off by more than all of it, as on an H200.
    """
    monkeypatch.setattr(triton, "SPLITS", (1, 1))
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", truncated_dot)
    g = torch.Generator().manual_seed(0)
    streams, fn = torch.randn(17, S, 7168, generator=g).bfloat16(), torch.randn(24, S * 7168, generator=g)
    given = streams, fn * (S * 7168) ** -0.5, torch.ones(3), torch.randn(24, generator=g), 20, 1e-6, 1e-6
    found, wanted = TRITON.hyper_weights(*given), reference.hyper_weights(*given)
    assert max(WEIGHTS.error(*both) for both in zip(found, wanted, strict=True)) < 2**-5
