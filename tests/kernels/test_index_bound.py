"""The bound of index scores: above every score, in whatever order fp32 sums it, on inputs made to slip through."""

import math

import numpy as np
import pytest
import torch

from fathom.kernels.indexer import bound as index_bound
from fathom.kernels.indexer.reference import index_scores
from fathom.kernels.quantise.reference import simulate_fp4

pytestmark = pytest.mark.skipif(not index_bound.native(torch.device("cpu")), reason="no native product of int8 here")
NAN, INF = math.nan, math.inf


def generator(seed):
    return torch.Generator().manual_seed(seed)


def cancelling(q, w, keys):
    """Each positive head has a negative twin: scores are what rounding leaves of large terms."""
    h, w = len(w) // 2 * 2, w.abs()
    q[1::2], w[1::2] = q[:h:2], -w[:h:2] * (1 + 1e-6)
    return q, w, keys


def with_large_columns(q, w, keys):
    q[:, 3], keys[::2, -1], keys[1::7, 3] = 1e4, -3e4, 1e4
    return q, w, keys


def with_signed_zeros(q, w, keys):
    q.view(-1)[::3], keys.view(-1)[::5], w[::3] = -0.0, -0.0, -0.0
    return q, w, keys


def with_rows_of_zeros(q, w, keys):
    q[::2], keys[::2] = 0.0, -0.0
    return q, w, keys


def with_one_light_head(q, w, keys):
    w = w.abs()
    w[0] *= 1e-3
    return q, w, keys


def in_fp4(q, w, keys):
    scales = 2.0 ** (torch.arange(len(keys)) % 17 - 8)[:, None]
    return simulate_fp4(q, 32), w, simulate_fp4(keys * scales, 32)


def near_overflow(q, w, keys):
    """Of products, of their sums, of weighted ones; all positive, so that nothing is inf - inf."""
    sizes = 10.0 ** (17 + 3 * torch.arange(len(keys)) / len(keys))
    return q.abs() * 1e19, w.abs() * 10, keys.abs() * sizes[:, None]


def cancelling_whole_numbers(q, w, keys):
    """Nothing is lost in 8 bits: what computed scores have above the true ones is the rounding of fp32 alone."""
    q, keys = torch.full_like(q, 127.0), torch.full_like(keys, 127.0)
    q[1::2, -1], keys[:, -1] = 126.0, torch.arange(len(keys)) % 7 - 3.0
    return q, torch.where(torch.arange(len(w)) % 2 == 0, 1.2345678, -1.2345678), keys


def sums_that_round_up(q, w, keys):
    """Sums of 128 come out 3.9 too large, where a step is 1: found by search over the last digits of the query."""
    return torch.full_like(q, 127.01439), torch.ones_like(w), torch.full_like(keys, 126.0)


def products_that_round_up(q, w, keys):
    """Each is 0.6 of the least number above zero, and comes out as that."""
    return torch.full_like(q, 2.0**-70), w.abs() + 0.1, torch.full_like(keys, 0.6 * 2.0**-79)


def overflow_under_a_light_weight(q, w, keys):
    return q.abs() * 1e20, w.abs() * 1e-30, keys.abs() * 1e20


KINDS = {
    "gaussian": lambda q, w, keys: (q, w, keys),
    "cancelling": cancelling,
    "all negative": lambda q, w, keys: (q, -w.abs(), keys),
    "one light head": with_one_light_head,
    "nearly parallel": lambda q, w, keys: (keys[0] + 1e-3 * q, w.abs(), keys[0] + 1e-3 * keys),  # as large as can be
    "large columns": with_large_columns,
    "huge": lambda q, w, keys: (q * 1e18, w, keys * 1e17),
    "tiny": lambda q, w, keys: (q * 1e-22, w, keys * 1e-21),
    "subnormal": lambda q, w, keys: (q * 1e-40, w * 1e-3, keys * 1e-3),
    "subnormal keys, huge queries": lambda q, w, keys: (q * 1e36, w, keys * 1e-41),
    "weights of all sizes": lambda q, w, keys: (q, w * 10.0 ** (40 * torch.arange(len(w)) / len(w) - 20), keys),
    "signed zeros": with_signed_zeros,
    "rows of zeros": with_rows_of_zeros,
    "bf16": lambda q, w, keys: (q.bfloat16(), w, keys.bfloat16()),
    "fp4": in_fp4,
    "near overflow": near_overflow,
    "cancelling whole numbers": cancelling_whole_numbers,
    "sums that round up": sums_that_round_up,
    "products that round up": products_that_round_up,
    "overflow under a light weight": overflow_under_a_light_weight,
}


def draw(kind, h=8, d=128, n=300):
    """One token's queries [h, d] and head weights [h], and keys [n, d]."""
    g = generator(0)
    return KINDS[kind](torch.randn(h, d, generator=g), torch.randn(h, generator=g), torch.randn(n, d, generator=g))


def in_many_orders(q, w, keys):
    """The score of every key [n] float32, summed in five orders; [5, n]."""
    q, keys = q.float(), keys.float()
    per_head = (q[:, None] * keys).numpy()  # [h, n, d]
    with np.errstate(over="ignore", under="ignore"):
        dots = [
            torch.einsum("hd,nd->hn", q, keys).numpy(),
            np.cumsum(per_head, axis=-1)[..., -1],  # one after the other
            np.cumsum(per_head[..., ::-1], axis=-1)[..., -1],
            np.cumsum(np.sort(per_head, axis=-1), axis=-1)[..., -1],  # from the most negative
        ]
        scores = [np.cumsum(w.numpy()[:, None] * np.maximum(dot, 0), axis=0)[-1] for dot in dots]
        scores.append(np.cumsum((w.numpy()[:, None] * np.maximum(dots[0], 0))[::-1], axis=0)[-1])
    return torch.from_numpy(np.stack(scores))


def passing(q, w, keys, threshold, pairs=1 << 14):
    """`index_bound.passing` as [T, n] bool, of tokens in the order given."""
    queries = index_bound.round_queries(q, w)
    found = torch.zeros(q.shape[0], keys.shape[0], dtype=torch.bool)
    scratch = index_bound.make_scratch(max(pairs, q.shape[0]))
    for place, column in index_bound.passing(queries, index_bound.round_keys(keys), threshold, scratch):
        assert not found[place, column].any(), "a pair came twice"
        found[place, column] = True
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("h", "d"), [(8, 128), (1, 32), (64, 128), (3, 5)])
def test_no_entry_is_ruled_out_by_a_threshold_just_below_its_score(kind, h, d):
    if kind == "fp4" and d % 32:
        d = 32
    q, w, keys = draw(kind, h, d)
    scores = in_many_orders(q, w, keys)
    assert not scores.isnan().any()
    assert scores.isinf().any() == ("overflow" in kind), "the case is not what it is called"
    largest = scores.amax(0)
    below = torch.nextafter(largest, torch.tensor(-INF))
    # token i has the threshold of entry i
    found = passing(q.expand(len(keys), h, d), w.expand(len(keys), h), keys, below)
    ruled_out = ~found
    assert not ruled_out.diagonal().any(), f"entries {ruled_out.diagonal().nonzero()[:5, 0].tolist()}"
    # and no other whose score is above the threshold
    assert not (ruled_out & (largest > below[:, None])).any()


def test_what_is_ruled_out_is_nearly_all_that_can_be():
    g = generator(1)
    q, w, keys = (
        torch.randn(20, 8, 128, generator=g),
        torch.rand(20, 8, generator=g),
        torch.randn(5000, 128, generator=g),
    )
    for x, y in ((q, keys), (simulate_fp4(q, 32), simulate_fp4(keys, 32))):
        scores = index_scores(x, w, y)
        sixteenth = scores.topk(16).values[:, -1]
        found = passing(x, w, y, sixteenth)
        assert (found | (scores <= sixteenth[:, None])).all()
        assert found.sum(1).max() <= 250, "a twentieth of all, where 15 are above: scores would take most of the time"


def test_keys_in_fp4_are_exact_where_their_scales_are_within_eight():
    g = generator(2)
    keys = simulate_fp4(torch.randn(500, 128, generator=g), 32)
    rounded = index_bound.round_keys(keys)
    assert rounded.error == 0
    assert torch.equal(rounded.ints * (1 / rounded.inverse[:, None]), keys)
    assert rounded.ints.abs().max() <= 127


@pytest.mark.parametrize("shut", ["queries", "weights", "all"])
def test_where_no_score_is_above_zero_nothing_passes_zero(shut):
    g = generator(3)
    q, keys = (torch.rand(*shape, generator=g) + 0.1 for shape in ((6, 4, 32), (70, 32)))
    w = torch.randn(6, 4, generator=g)
    if shut == "queries":
        q = -q
    elif shut == "weights":
        w = -w.abs()
    else:
        q, keys = torch.zeros_like(q), -keys
    assert not passing(q, w, keys, torch.zeros(6)).any()
    if shut != "weights":
        assert passing(q, w, keys, torch.full((6,), -1e-45)).all()


def test_not_yet_a_threshold_and_no_more_wanted():
    q, w, keys = draw("gaussian", n=40)
    some = passing(q.expand(3, 8, 128), w.expand(3, 8), keys, torch.tensor([NAN, INF, -INF]))
    assert some.all(1).tolist() == [True, False, True]
    assert not some[1].any()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_key_that_is_not_finite_always_passes_and_hides_no_other(bad):
    q, w, keys = draw("one light head", n=40)
    scores = index_scores(q[None], w[None], keys)[0]
    keys[[0, 17, 39], [5, 0, 127]] = bad
    found = passing(q[None], w[None], keys, scores.median()[None])[0]
    assert found[[0, 17, 39]].all()
    assert found[scores > scores.median()].all()
    assert found.sum() < 35


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["query", "weight"])
def test_a_token_that_is_not_finite_is_named_and_spoils_no_other(bad, where):
    q, w, keys = draw("one light head", n=40)
    q, w = q.repeat(3, 1, 1), w.repeat(3, 1)
    if where == "query":
        q[1, 2, 7] = bad
    else:
        w[1, 2] = bad
    queries = index_bound.round_queries(q, w)
    assert queries.size.isfinite().tolist() == [True, False, True]
    median = index_scores(q[:1], w[:1], keys).median().expand(3)
    found = passing(q, w, keys, median)
    assert torch.equal(found[0], found[2])
    assert found[0].sum() < 35


def test_pairs_in_tiles_are_those_in_one():
    g = generator(4)
    q, w, keys = torch.randn(33, 4, 32, generator=g), torch.randn(33, 4, generator=g), torch.randn(257, 32, generator=g)
    threshold = index_scores(q, w, keys).topk(9).values[:, -1]
    whole = passing(q, w, keys, threshold, pairs=1 << 20)
    assert 33 * 9 <= whole.sum() < 33 * 200
    for pairs in (33, 33 * 7, 33 * 16, 33 * 64):
        assert torch.equal(passing(q, w, keys, threshold, pairs), whole)


@pytest.mark.parametrize(("heads", "width"), [(1, 2), (8, 128), (64, 128), (128, 128)])
def test_sums_fit_int32_and_products_are_exact_at_the_extremes(heads, width):
    assert index_bound.finest(heads, width) * 2 * heads * width * 127**2 < 2**31
    w, keys = torch.ones(1, heads), torch.ones(3, width) * torch.tensor([[1.0], [-1.0], [1.0]])
    q = torch.ones(1, heads, width)
    score = torch.full((1,), float(heads * width))
    assert passing(q, w, keys, torch.nextafter(score, torch.tensor(-INF))).tolist() == [[True, False, True]]
    assert not passing(q, w, keys, score * 1.05).any()


def test_so_many_heads_that_no_sum_fits_are_not_bounded():
    assert index_bound.finest(600, 128) == 0
    assert index_bound.finest(500, 128) == 1
    assert index_bound.finest(1, 1) == 0  # torch's product


@pytest.mark.parametrize("shape", [(1, 2, 1), (1, 128, 1), (3, 2, 70), (7, 33, 5), (513, 128, 257), (64, 5, 1000)])
def test_the_int8_product_is_exact(shape):
    m, k, n = shape
    g = generator(5)
    a, b = (torch.randint(-127, 128, (rows, k), generator=g, dtype=torch.int8) for rows in (m, n))
    a[0], b[0] = 127, -127
    out = torch.empty(m, n, dtype=torch.int32)
    torch._int_mm(a, b.T, out=out)
    assert torch.equal(out.long(), a.long() @ b.long().T)
