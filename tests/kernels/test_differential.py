"""Differential attention on every backend, held to float64: heads repeated, one softmax over all that a token sees."""

from itertools import product

import pytest
import torch

from fathom.kernels.differential import cpu, reference
from fathom.kernels.differential.reference import Noise, Own, Past
from tests.kernels.every_backend import HAS_TRITON, every_backend, on_triton
from tests.peak_memory import peak_bytes

if HAS_TRITON:
    from fathom.kernels.differential import triton

HEADS, GROUPS, D, EPS = 6, 2, 16, 1e-6


def own_seen(t, window):
    """Which of `t` keys of their own `t` tokens see, [t, t]."""
    distance = torch.arange(t)[:, None] - torch.arange(t)
    return (distance >= 0) & (distance < (t if window is None else window))


def by_reference(q, noise, norm, eps, past, own):
    """The reference takes segments, each with a mask."""
    segments = [(*past, None)]
    if own is not None:
        seen = own_seen(len(q), own.window)
        segments.append((own.keys.transpose(0, 1), own.values.transpose(0, 1), seen, None))
    if noise is None:
        return reference.attend_segments(q[None], segments)[0]
    return reference.differential_attend(q, *noise, norm, eps, segments)


BACKENDS = {"reference": by_reference, "cpu": cpu.differential_attend}
if HAS_TRITON:

    def by_triton(q, noise, norm, eps, past, own):
        if noise is None:
            return triton.attend(q, None, past, own).to(q.dtype)
        return triton.differential_attend(q, noise, norm, eps, past, own)

    BACKENDS["triton"] = by_triton

# How far results may be off. fp32: sums of up to 300 terms of a few units; the norm multiplies what is off by up to 10.
# BF16: the output is rounded, 2^-9 of values of a few units; the reference also rounds the noise query, 2^-9 of logits
# of a few units. FP16 is 8 times finer; the rest of its bounds is what fp32 is off by.
FP32 = {"reference": 2e-6, "cpu": 3e-6, "triton": 3e-6}
NORMED = {"reference": 1e-5, "cpu": 2e-5, "triton": 3e-5}
NARROW = {
    "reference": {torch.bfloat16: 3e-2, torch.float16: 2**-8},
    "cpu": {torch.bfloat16: 2**-7, torch.float16: 2**-10},
    "triton": {torch.bfloat16: 2**-7, torch.float16: 2**-8},
}

# Numbers in a tile of the CPU op's logits; the other backends run once.
CUTS = {"reference": None, "cpu": 1 << 17, "cpu, tiles of tokens": 700, "cpu, tiles of one token": 20}
IN_TORCH, ON_TRITON = list(CUTS), [name for name in BACKENDS if name == "triton"]
NOT_CPU = ["reference", *ON_TRITON]


@pytest.fixture(params=IN_TORCH + ON_TRITON)
def backend(request, monkeypatch):
    if CUTS.get(request.param):
        monkeypatch.setattr(cpu, "LOGITS", CUTS[request.param])
    torch.use_deterministic_algorithms(mode=True)  # what is allocated without content holds NaN
    yield request.param.partition(",")[0]
    torch.use_deterministic_algorithms(mode=False)


def drawn(t, slots, dtype=torch.float32, heads=HEADS, groups=GROUPS, d=D):
    g = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=g).to(dtype)

    past = Past(normal(groups, slots, d), normal(groups, slots, d), None)
    own = Own(normal(t, groups, d), normal(t, groups, d), None)
    theta = torch.randn(heads, d // 2, generator=g)
    return 2 * normal(t, heads, d), Noise(torch.rand(t, heads, generator=g), theta.cos(), theta.sin()), past, own


@torch.no_grad()
def wanted(q, noise, norm, past, own):
    """The equation in float64; a token that sees nothing gets zeros."""
    t, heads, d = q.shape
    keys, values, seen = past
    seen = torch.ones(t, keys.shape[1], dtype=torch.bool) if seen is None else seen.expand(t, -1)
    if own is not None:
        keys, values = (torch.cat((x, y.transpose(0, 1)), 1) for x, y in zip((keys, values), own[:2], strict=True))
        seen = torch.cat((seen, own_seen(t, own.window)), 1)
    keys, values = (x.double().repeat_interleave(heads // len(x), 0) for x in (keys, values))

    def stream(x):
        logits = torch.einsum("thd,hsd->ths", x, keys) * d**-0.5
        mass = logits.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        return torch.einsum("ths,hsd->thd", mass.where(seen.any(-1)[:, None, None], 0), values)

    out = stream(q.double())
    if noise is not None:
        pairs = torch.view_as_complex(q.double().contiguous().unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs * torch.complex(noise.cos, noise.sin)).flatten(-2)
        out -= noise.lam.double()[..., None] * stream(turned)
    if norm is None:
        return out
    return normed(out, norm)


def normed(x, weight):
    """Each head over its root mean square, in float64."""
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


def off(backend, q, noise, norm, past, own, want=None):
    """The largest error."""
    want = wanted(q, noise, norm, past, own) if want is None else want
    return (BACKENDS[backend](q, noise, norm, EPS, past, own).double() - want).abs().max()


def half(*shape):
    """A mask of about half, which shows slot 3 at least."""
    seen = torch.rand(*shape, generator=torch.Generator().manual_seed(1)) < 0.5
    seen[..., 3] = True
    return seen


def spoiled(backend, past):
    """NaN where no token may look: Triton's op does not read it. For the others what is stored there is finite."""
    if backend != "triton":
        return past
    keys, values = past.keys.clone(), past.values.clone()
    keys[:, ~past.seen], values[:, ~past.seen] = torch.nan, torch.nan
    return Past(keys, values, past.seen)


SEEN = ["all", "slots", "by token"]
WINDOWS = [None, 0, 4]  # no own keys; all of them; a window of 4
GRID = [
    *product(IN_TORCH, [1, 7, 40], [11], SEEN, WINDOWS),
    *product(ON_TRITON, [1], [70], SEEN, WINDOWS),
    *product(ON_TRITON, [13], [70], SEEN[1:], WINDOWS),
]


@pytest.mark.parametrize(("backend", "t", "slots", "seen", "own_window"), GRID, indirect=["backend"])
def test_it_is_the_equation(backend, t, slots, seen, own_window):
    q, noise, past, own = drawn(t, slots)
    own = None if own_window is None else own._replace(window=own_window or None)
    if seen != "all":
        past = past._replace(seen=half(slots) if seen == "slots" else half(t, slots))
    weight = torch.linspace(-1, 2, D)
    ways = {1: [(noise, None)], 7: [(noise, None), (noise, weight)], 13: [(noise, weight)], 40: [(noise, None)]}[t]
    for streams, norm in [(None, None), *ways]:
        want = wanted(q, streams, norm, past, own)
        given = spoiled(backend, past) if seen == "slots" else past
        bound = (FP32 if norm is None else NORMED)[backend]
        assert off(backend, q, streams, norm, given, own, want) < bound, (streams is None, norm is None)


@pytest.mark.parametrize(("heads", "groups"), [(6, 3), (6, 1), (6, 6), (1, 1)])
def test_query_heads_read_the_kv_head_of_their_group(backend, heads, groups):
    q, noise, past, own = drawn(5, 11, heads=heads, groups=groups)
    assert off(backend, q, noise, None, past, own) < FP32[backend]


@pytest.mark.parametrize(("splits", "slots"), [(1, 64), (2, 300), (5, 257), (8, 63)])
def test_decode_however_the_slots_are_split(backend, splits, slots, monkeypatch):
    if backend == "triton":
        monkeypatch.setattr(triton, "SPLITS", splits)
    q, noise, past, own = drawn(1, slots)
    past = past._replace(seen=half(slots))
    for more in (None, own):
        want = wanted(q, noise, None, past, more)
        assert off(backend, q, noise, None, spoiled(backend, past), more, want) < FP32[backend]


def test_parts_in_which_nothing_is_seen(backend):
    q, noise, past, _ = drawn(1, 300)
    past = past._replace(seen=(torch.arange(300) >= 200) & (torch.arange(300) < 210))
    want = wanted(q, noise, None, past, None)
    assert off(backend, q, noise, None, spoiled(backend, past), None, want) < FP32[backend]


# The CPU op takes only masks that show a slot to each token that has no keys of its own.
@pytest.mark.parametrize("backend", NOT_CPU, indirect=True)
def test_nothing_seen_gives_zeros(backend):
    q, noise, past, _ = drawn(3, 80)
    given = spoiled(backend, past._replace(seen=torch.zeros(80, dtype=torch.bool)))
    assert (BACKENDS[backend](q, noise, torch.ones(D), EPS, given, None) == 0).all()
    seen = half(3, 80)
    seen[1] = False
    past = past._replace(seen=seen)
    assert (BACKENDS[backend](q, noise, None, EPS, past, None)[1] == 0).all()
    assert off(backend, q, noise, None, past, None) < FP32[backend]


@pytest.mark.parametrize("slots", [0, 5])
def test_an_empty_past(backend, slots):
    q, noise, past, own = drawn(13, slots)
    assert off(backend, q, noise, None, past, own) < FP32[backend]
    if not slots:
        for norm in (None, torch.ones(D)):
            assert torch.equal(BACKENDS[backend](q, noise, norm, EPS, past, None), torch.zeros_like(q))


@pytest.mark.parametrize("slots", [0, 5])
def test_no_tokens(backend, slots):
    q, noise, past, own = drawn(0, slots)
    for more in (own, None):
        assert BACKENDS[backend](q, noise, None, EPS, past, more).shape == (0, HEADS, D)


@pytest.mark.parametrize(("t", "window"), [(80, None), (80, 33), (80, 1), (33, 1000)])
def test_blocks_over_several_tiles(backend, t, window, monkeypatch):
    if backend == "triton":
        monkeypatch.setattr(triton, "TILE", 32)
    q, noise, past, own = drawn(t, 11, heads=GROUPS)
    assert off(backend, q, noise, None, past, own._replace(window=window)) < FP32[backend]


def test_no_token_sees_a_later_one(backend):
    q, noise, past, own = drawn(24, 11)
    before = BACKENDS[backend](q, noise, None, EPS, past, own)
    own.keys[13:], own.values[13:] = 7, 1e6
    after = BACKENDS[backend](q, noise, None, EPS, past, own)
    assert torch.equal(after[:13], before[:13])
    assert ((after[13:] - before[13:]).abs().amax((1, 2)) > 1).all()


@pytest.mark.parametrize("heads", [2, 8, 80])  # to a KV head: 1, 4, 40
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dtype_is_that_of_the_query(backend, dtype, heads):
    q, noise, past, own = drawn(2, 70, dtype, heads)
    got = BACKENDS[backend](q, noise, None, EPS, past, own)
    assert got.dtype == dtype
    assert (got - wanted(q, noise, None, past, own)).abs().max() < NARROW[backend][dtype]


@every_backend
def test_attend_banks_is_what_is_left_before_the_norm_in_float32(ops):
    q, noise, past, own = drawn(7, 11, torch.bfloat16, d=32)  # a scale of 32^-0.5, which BF16 would round
    for streams in (noise, None):
        got = ops.attend_banks(q, streams, past, own)
        assert got.dtype == torch.float32
        assert (got - wanted(q, streams, None, past, own)).abs().max() < FP32["cpu"]


def test_rows_that_do_not_lie_in_order_are_read_as_they_are(backend):
    q, noise, past, own = drawn(5, 70)
    straight, want = BACKENDS[backend](q, noise, None, EPS, past, own), wanted(q, noise, None, past, own)
    turned = [x.mT.contiguous().mT for x in (q, past.keys, past.values, own.keys, own.values)]
    shifted = torch.cat((past.keys, past.values), dim=1)  # strides between heads that are not those of the slots
    across = noise._replace(lam=noise.lam.T.contiguous().T)
    for x, lam, keys, values in (
        (turned[0], noise, *turned[1:3]),
        (turned[0], noise, shifted[:, :70], shifted[:, 70:]),
        (q, across, *past[:2]),
    ):
        other = own if x is q else Own(*turned[3:], None)
        got = BACKENDS[backend](x, lam, None, EPS, Past(keys, values, None), other)
        assert (got - want).abs().max() < FP32[backend]
        assert backend != "triton" or torch.equal(got, straight)


@pytest.mark.parametrize("place", ["q", "key", "value", "lambda", "infinite value"])
def test_what_is_no_number_is_not_lost(backend, place):
    q, noise, past, _ = drawn(2, 70)
    spoilt = {"q": q[1, 2:3], "key": past.keys[1, 4], "value": past.values[1, 4], "lambda": noise.lam[1, 2:3]}
    spoilt["infinite value"] = past.values[1, 69, 3:5]
    spoilt[place].fill_(torch.inf if place.startswith("inf") else torch.nan)
    got = BACKENDS[backend](q, noise, None, EPS, past, None)
    want = wanted(q, noise, None, past, None)
    assert torch.equal(got.isfinite(), want.isfinite())
    assert place == "infinite value" or torch.equal(got.isnan(), want.isnan())
    assert want.isfinite().any()
    assert not want.isfinite().all()


def test_heads_that_do_not_divide_are_refused(backend):
    q, noise, past, _ = drawn(1, 2, heads=4, groups=3)
    with pytest.raises(AssertionError, match="4 query heads do not divide among 3 KV heads"):
        BACKENDS[backend](q, noise, None, EPS, past, None)


@on_triton
def test_triton_names_widths_that_it_does_not_take():
    q, noise, past, _ = drawn(1, 70, d=8)
    with pytest.raises(NotImplementedError, match="heads of 8"):
        triton.differential_attend(q, noise, None, EPS, past, None)


def test_cpu_scratch_is_two_tiles_of_logits_whatever_there_is_to_see(monkeypatch):
    monkeypatch.setattr(cpu, "LOGITS", 1 << 14)
    t = 96
    for slots in (100, 300):
        q, noise, past, _ = drawn(t, slots)
        peak = peak_bytes(lambda q=q, noise=noise, past=past: cpu.attend(q, noise, past, None))
        queries = 2 * q.nbytes + q.nbytes  # of both streams, and the output
        assert peak < queries + 2 * 4 * (1 << 14) + (1 << 14), slots
        assert peak < 2 * HEADS * t * slots * 4, "less than the logits"


def test_cpu_refuses_gradients():
    q, noise, past, own = drawn(40, 11)
    with pytest.raises(RuntimeError, match="require"):
        cpu.attend(q.requires_grad_(), noise, past, own)


# What only the reference has: its parts, and segments that are merged by their log-sum-exp.


def test_the_noise_query_and_the_norm_are_the_packages():
    package = pytest.importorskip("coda_gqa_l.primitives", reason="CoDA's package is not on every machine")
    q, noise, *_ = drawn(5, 11)
    norm = torch.linspace(0.5, 1.5, D)
    theirs = package._apply_pairwise_rotation(q.transpose(0, 1)[None], noise.cos, noise.sin)[0].transpose(0, 1)
    assert torch.equal(reference.noise_query(q, noise.cos, noise.sin), theirs)
    module = package.HeadwiseRMSNorm(D, EPS).double()
    module.weight.data = norm.double()
    assert torch.equal(module(q.double()), normed(q.double(), norm))


def test_a_quarter_turn_makes_the_noise_query_orthogonal():
    q = drawn(5, 11)[0]
    noise = reference.noise_query(q, torch.zeros(HEADS, D // 2), torch.ones(HEADS, D // 2))
    pairs = (q * noise).unflatten(-1, (-1, 2))
    assert (pairs[..., 0] == -pairs[..., 1]).all()  # each pair's products cancel exactly
    assert (noise.norm(dim=-1) - q.norm(dim=-1)).abs().max() < 1e-6


def test_reference_lse_is_the_log_of_the_sum():
    q, _, past, _ = drawn(5, 11)
    seen, keys = half(5, 11), past.keys.double().repeat_interleave(HEADS // GROUPS, 0)
    _, lse = reference.attend(q[None], *past[:2], seen, None)
    logits = torch.einsum("thd,hsd->ths", q.double(), keys) * D**-0.5
    assert (lse[0] - logits.masked_fill(~seen[:, None], -torch.inf).logsumexp(-1)).abs().max() < 1e-6
    _, lse = reference.attend(q[None], *past[:2], torch.zeros(11, dtype=torch.bool), None)
    assert (lse == -torch.inf).all()


def test_reference_gives_no_mass_to_what_is_not_seen():
    q, _, past, _ = drawn(5, 11)
    keys, values = (x.clone() for x in past[:2])
    keys[:, 4:], values[:, 4:] = 1e4, -1e4
    first = torch.arange(11) < 4
    kept, kept_lse = reference.attend(q[None], past.keys[:, :4], past.values[:, :4], None, None)
    for mask in (first, first.expand(5, -1)):
        out, lse = reference.attend(q[None], keys, values, mask, None)
        assert (out - kept).abs().max() < 1e-6
        assert (lse - kept_lse).abs().max() < 1e-6


def test_reference_segments_are_one_softmax():
    q, _, past, _ = drawn(5, 11)
    q, keys, seen = q / 2, past.keys * 8, half(5, 11)
    seen[2, :7] = False  # a token that sees nothing of the first two segments
    parts = [(keys[:, a:b], past.values[:, a:b], seen[:, a:b], None) for a, b in ((0, 3), (3, 7), (7, 7), (7, 11))]
    want = wanted(q, None, None, Past(keys, past.values, seen), None)
    assert (reference.attend_segments(q[None], parts)[0] - want).abs().max() < 2e-6


def test_reference_bias_of_log_n_is_n_equal_keys():
    """The log-count bias: a slot that stands for n tokens weighs as much as they did."""
    q, _, past, _ = drawn(5, 11)
    counts = torch.tensor([1, 3, 1, 2, 1, 1, 5, 1, 1, 1, 1])
    biased, _ = reference.attend(q[None], *past[:2], None, counts.float().log())
    repeated = Past(*(x.repeat_interleave(counts, 1) for x in past[:2]), None)
    assert (biased[0] - wanted(q, None, None, repeated, None)).abs().max() < 2e-6


def test_no_norm_is_not_a_norm_of_weight_one():
    q, noise, *_ = drawn(5, 11)
    lam = noise.lam / 2
    assert torch.equal(reference.combine(q, q, lam, None, EPS), q - lam[..., None] * q)
    normed = reference.combine(q, q, lam, torch.ones(D), EPS)
    assert (normed.square().mean(-1) - 1).abs().max() < 1e-5  # mean squares of the input are above 1, eps is 1e-6
