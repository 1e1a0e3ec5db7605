"""Differential attention against the package `coda-gqa-l`, torch's own attention and plain float64 sums."""

import math

import pytest
import torch
from coda_gqa_l.primitives import HeadwiseRMSNorm, _apply_pairwise_rotation
from torch.nn.functional import scaled_dot_product_attention

from kernels.differential.reference import attend, attend_segments, combine, differential_attend, noise_query

HEADS, GROUPS, D, T, SLOTS = 6, 3, 8, 5, 11


def case(seed=0, heads=HEADS, groups=GROUPS, slots=SLOTS):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, m, D, generator=g) for n, m in ((T, heads), (groups, slots), (groups, slots)))
    lam, theta = torch.rand(T, heads, generator=g), torch.randn(heads, D // 2, generator=g)
    seen = torch.rand(T, slots, generator=g) < 0.6
    seen[:, 0] = True
    return q, k, v, lam, theta, seen


def by_sdpa(q, k, v, seen):
    """torch's attention in float64, with KV heads repeated."""
    repeat = q.shape[1] // k.shape[0]
    k, v = (part.double().repeat_interleave(repeat, 0) for part in (k, v))
    return scaled_dot_product_attention(q.double().transpose(0, 1), k, v, attn_mask=seen).transpose(0, 1)


def test_the_noise_query_is_the_packages_rotation():
    q, *_, theta, _ = case()
    theirs = _apply_pairwise_rotation(q.transpose(0, 1)[None], theta.cos(), theta.sin())[0].transpose(0, 1)
    assert torch.equal(noise_query(q, theta.cos(), theta.sin()), theirs)


def test_a_quarter_turn_makes_the_noise_query_orthogonal():
    q = case()[0]
    cos, sin = torch.zeros(HEADS, D // 2), torch.ones(HEADS, D // 2)
    noise = noise_query(q, cos, sin)
    pairs = (q * noise).unflatten(-1, (-1, 2))
    assert (pairs[..., 0] == -pairs[..., 1]).all()  # each pair's products cancel exactly
    assert (noise.norm(dim=-1) - q.norm(dim=-1)).abs().max() < 1e-6


@pytest.mark.parametrize(("heads", "groups"), [(6, 3), (6, 1), (6, 6), (1, 1)])
def test_attend_is_softmax_attention_with_grouped_queries(heads, groups):
    q, k, v, *_, seen = case(heads=heads, groups=groups)
    out, _ = attend(torch.stack((q, 2 * q)), k, v, seen, None)
    for stream, scaled in zip(out, (q, 2 * q), strict=True):
        assert (stream - by_sdpa(scaled, k, v, seen)).abs().max() < 2e-6


def test_lse_is_the_log_of_the_sum():
    q, k, v, *_, seen = case()
    _, lse = attend(q[None], k, v, seen, None)
    for i, head in ((0, 0), (3, 5)):
        logits = [sum(a * b for a, b in zip(q[i, head].tolist(), row, strict=True)) for row in k[head // 2].tolist()]
        total = sum(math.exp(x / math.sqrt(D)) for x, s in zip(logits, seen[i].tolist(), strict=True) if s)
        assert lse[0, i, head].item() == pytest.approx(math.log(total), abs=1e-6)


def test_what_is_not_seen_does_not_count():
    q, k, v, *_ = case()
    noisy_k, noisy_v = k.clone(), v.clone()
    noisy_k[:, 4:], noisy_v[:, 4:] = 1e4, -1e4
    first = torch.arange(SLOTS) < 4
    for mask in (first, first.expand(T, -1)):
        out, lse = attend(q[None], noisy_k, noisy_v, mask, None)
        kept, kept_lse = attend(q[None], k[:, :4], v[:, :4], None, None)
        assert (out - kept).abs().max() < 1e-6
        assert (lse - kept_lse).abs().max() < 1e-6


def test_nothing_seen_gives_zeros():
    q, k, v, lam, theta, _ = case()
    nothing = torch.zeros(SLOTS, dtype=torch.bool)
    out, lse = attend(q[None], k, v, nothing, None)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    segments = [(k, v, nothing, None), (k[:, :0], v[:, :0], None, None)]
    both = differential_attend(q, lam, theta.cos(), theta.sin(), torch.ones(D), 1e-6, segments)
    assert (both == 0).all()


def test_segments_are_one_softmax():
    q, k, v, *_, seen = case()
    seen[2, :7] = False  # a token that sees nothing of the first two segments
    whole, _ = attend(q[None], k * 8, v, seen, None)
    cuts = ((0, 3), (3, 7), (7, 7), (7, 11))
    parts = [(k[:, a:b] * 8, v[:, a:b], seen[:, a:b], None) for a, b in cuts]
    assert (attend_segments(q[None], parts) - whole).abs().max() < 2e-6


def test_a_bias_of_log_n_is_n_equal_keys():
    """The log-count bias: a slot that stands for n tokens weighs as much as they did."""
    q, k, v, *_ = case()
    counts = torch.tensor([1, 3, 1, 2, 1, 1, 5, 1, 1, 1, 1])
    repeated, _ = attend(q[None], k.repeat_interleave(counts, 1), v.repeat_interleave(counts, 1), None, None)
    biased, _ = attend(q[None], k, v, None, counts.float().log())
    assert (biased - repeated).abs().max() < 2e-6


@pytest.mark.parametrize("norm", ["full", "identity"])
def test_the_whole_is_signal_less_lambda_noise_then_the_norm(norm):
    q, k, v, lam, theta, seen = case(4)
    weight = torch.linspace(-1, 2, D) if norm == "full" else None
    out = differential_attend(q, lam, theta.cos(), theta.sin(), weight, 1e-6, [(k, v, seen, None)])
    pairs = torch.view_as_complex(q.double().unflatten(-1, (-1, 2)).contiguous())
    noise = torch.view_as_real(pairs * torch.polar(torch.ones_like(theta), theta)).flatten(-2)
    expected = by_sdpa(q, k, v, seen) - lam[..., None].double() * by_sdpa(noise, k, v, seen)
    if weight is not None:
        theirs = HeadwiseRMSNorm(D).double()
        theirs.weight.data = weight.double()
        expected = theirs(expected)
    assert (out - expected).abs().max() < 1e-5


def test_identity_is_not_a_norm_of_weight_one():
    q, lam = 5 * case()[0], case()[3]
    assert torch.equal(combine(q, q, lam / 2, None, 1e-6), q - lam[..., None] / 2 * q)
    normed = combine(q, q, lam / 2, torch.ones(D), 1e-6)
    assert (normed.square().mean(-1) - 1).abs().max() < 1e-5  # mean squares of the input are above 1, eps is 1e-6


def test_the_output_has_the_dtype_of_the_query():
    q, k, v, lam, theta, seen = case()
    args = (lam, theta.cos(), theta.sin(), None, 1e-6)
    narrow = differential_attend(q.bfloat16(), *args, [(k.bfloat16(), v.bfloat16(), seen, None)])
    wide = differential_attend(q.bfloat16().float(), *args, [(k.bfloat16().float(), v.bfloat16().float(), seen, None)])
    assert narrow.dtype == torch.bfloat16
    # one rounding of the noise query to BF16 (2^-9 relative, logits of a few units), one of the output
    assert (narrow.float() - wide).abs().max() < 3e-2


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(AssertionError, match="4 query heads do not divide among 3 KV heads"):
        attend(torch.zeros(1, 1, 4, D), torch.zeros(3, 2, D), torch.zeros(3, 2, D), None, None)
