"""Selection by bounds: the reference's exactly where scores are exact, whatever the tiles, ties and outliers."""

import functools
import itertools
import math

import pytest
import torch

from kernels.formats import rows
from kernels.indexer import bound as index_bound
from kernels.indexer import cpu as indexer
from kernels.indexer.reference import index_scores
from kernels.ops import CPU, REFERENCE
from kernels.quantise.reference import simulate_fp4
from tests.peak_memory import peak_bytes

ON_CPU = torch.device("cpu")
NAN, INF = math.nan, math.inf
native = pytest.mark.skipif(not index_bound.native(ON_CPU), reason="no native product of int8 here")


def generator(seed):
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def bounded(monkeypatch):
    """Every call that may be bounded is, and it is noted."""
    calls = []
    way = indexer._best_bounded
    for name in ("FEW_ROWS", "FEW_ENTRIES", "SPARSE"):
        monkeypatch.setattr(indexer, name, 0)
    monkeypatch.setattr(indexer, "_best_bounded", lambda *given: calls.append(1) or way(*given))
    return calls


def small_tiles(monkeypatch):
    """Tiles that end everywhere, blocks of three pairs, and merges of a few pairs each."""
    for name, value in {"KEYS": 4 * 90, "PAIRS": 40 * 64, "PENDING": 50, "BLOCK": 3, "SCORED": 60}.items():
        monkeypatch.setattr(indexer, name, value)


def whole_numbers(t, h, n, k, first, *, d=4, seed=0):
    """Scores exact in fp32 in every order; ties are common, most of all at 0."""
    g = generator(seed)
    q, keys = torch.randint(-2, 3, (t, h, d), generator=g).float(), torch.randint(-1, 2, (n, d), generator=g).float()
    weights = torch.randint(-1, 3, (t, h), generator=g).float()
    keys[min((first + t) // 4, n) :] = NAN
    return q, weights, keys, first, 4, k


@native
@pytest.mark.parametrize(("t", "h"), [(1, 1), (40, 3), (90, 8), (10, 64)])
@pytest.mark.parametrize("first", [0, 390, 10**6])
@pytest.mark.parametrize("tiles", ["small", "as they are"])
def test_ties_are_those_of_the_reference(t, h, first, tiles, bounded, monkeypatch):
    if tiles == "small":
        small_tiles(monkeypatch)
    for n, k in itertools.product((90, 400), (1, 16)):
        args = whole_numbers(t, h, n, k, first)
        assert torch.equal(CPU.select(*args), REFERENCE.select(*args))
    assert bounded or first == t == 0 or (first + t) // 4 <= 1


@native
def test_scores_of_fp4_numbers_select_as_the_reference_does(bounded, monkeypatch):
    # Twice a number of E2M1 is a whole one of at most 12. With scales from 1/8 to 1, products of two and sums of 128 of
    # these are whole multiples of 2^-8 below 2^15, exact in fp32, and so they are times weights of up to 8.
    g = generator(1)
    q = simulate_fp4(torch.randn(60, 8, 128, generator=g).clamp(-2.9, 2.9), 32)
    keys = simulate_fp4(torch.randn(1500, 128, generator=g).clamp(-2.9, 2.9) + 0.05, 32)
    weights = torch.randint(-2, 9, (60, 8), generator=g).float()
    args = (q.bfloat16(), weights, keys.bfloat16(), 5900, 4, 16)
    expected = REFERENCE.select(*args)
    assert torch.equal(CPU.select(*args), expected)
    small_tiles(monkeypatch)
    assert torch.equal(CPU.select(*args), expected)
    assert len(bounded) >= 2


@native
@pytest.mark.parametrize("form", ["fp8", "fp4"])
def test_narrow_keys_select_as_their_numbers_do(form, bounded):
    g = generator(7)
    keys = rows.fp8_keys(3000, 128, ON_CPU) if form == "fp8" else rows.fp4_keys(3000, 128, ON_CPU)
    rows.write(keys, 0, torch.randn(3000, 128, generator=g))
    q, weights = simulate_fp4(torch.randn(64, 8, 128, generator=g), 32), torch.randn(64, 8, generator=g)
    ours = CPU.select(q, weights, keys, 12_000, 4, 16)
    assert torch.equal(ours, CPU.select(q, weights, rows.read(keys, 0, 3000), 12_000, 4, 16))
    assert len(bounded) == 2


@native
@pytest.mark.parametrize("weights_are", ["mixed", "positive"])
def test_real_scores_differ_from_the_reference_by_near_ties_alone(weights_are, bounded):
    t, h, d, n, k = 50, 8, 128, 5000, 16
    g = generator(8)
    q, keys, weights = torch.randn(t, h, d, generator=g), torch.randn(n, d, generator=g), torch.randn(t, h, generator=g)
    if weights_are == "positive":
        weights = weights.abs()
    ours = CPU.select(q, weights, keys, 10**6, 4, k).long()
    assert bounded
    scores = torch.einsum("th,thn->tn", weights.double(), torch.einsum("thd,nd->thn", q.double(), keys.double()).relu())
    least = scores.topk(k).values[:, -1]
    size = torch.einsum("th,n->tn", weights.double().abs() * q.double().norm(dim=-1), keys.double().norm(dim=-1))
    off = (d + h + 2) * 2.0**-24 * size.amax(1)  # what fp32 may round of a score
    assert (scores.gather(1, ours).amin(1) >= least - 2 * off).all()
    assert (ours.diff(dim=1) > 0).all()


@native
def test_equal_keys_have_equal_scores_wherever_they_stand():
    g = generator(9)
    q, weights, key = (
        torch.randn(50, 8, 128, generator=g),
        torch.randn(50, 8, generator=g),
        torch.randn(128, generator=g),
    )
    keys = torch.randn(500, 128, generator=g)
    copies = torch.randperm(500, generator=g)[:200]
    keys[copies] = key
    for count in (1, 2, 15, 16, 17, 33, 200):
        token, entry = torch.arange(50).repeat_interleave(count), copies[:count].repeat(50)
        mixed = torch.randperm(len(token), generator=g)
        scores = indexer._scores_of(q, weights, keys, token[mixed], entry[mixed])
        alone = torch.cat([indexer._scores_of(q, weights, keys, t[None], copies[:1]) for t in torch.arange(50)])
        assert torch.equal(scores, alone[token[mixed]])


@native
def test_equal_keys_are_taken_in_order(bounded):
    # Scores of these are not exact, so what is equal is so by the arithmetic alone.
    g = generator(10)
    q, weights = torch.randn(40, 8, 128, generator=g), torch.rand(40, 8, generator=g)
    keys = torch.randn(30, 128, generator=g).repeat(100, 1)
    out = CPU.select(q, weights, keys, 10**6, 4, 16)
    best = torch.einsum("th,thn->tn", weights, torch.einsum("thd,nd->thn", q, keys[:30]).relu()).argmax(1)
    assert torch.equal(out, best[:, None].int() + 30 * torch.arange(16).int())
    assert bounded


@native
@pytest.mark.parametrize("case", ["negative weights", "no weights", "one key", "shut"])
def test_tokens_that_bounds_say_nothing_about_are_scored(case, bounded, monkeypatch):
    monkeypatch.setattr(indexer, "HARD", 20)
    q, weights, keys, first, ratio, k = whole_numbers(60, 3, 2000, 16, 10**6, d=8)
    weights = {"negative weights": -weights.abs() - 1, "no weights": weights * 0}.get(case, weights.abs() + 1)
    weights[::2] = weights[::2].abs()  # other tokens are as ever
    if case == "one key":
        keys[:] = keys[0]
    elif case == "shut":
        q[1::2], keys = -q[1::2].abs(), keys.abs()
    args = (q, weights, keys, first, ratio, k)
    assert torch.equal(CPU.select(*args), REFERENCE.select(*args))
    assert bounded


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("place", ["keys", "all keys", "weights"])
def test_bad_numbers_leave_rows_visible_and_distinct_in_merges_too(bad, place, monkeypatch):
    for name, value in {"FIRST": 60, "MERGED": 6 * 55, "PER_HEAD": 100}.items():
        monkeypatch.setattr(indexer, name, value)
    q, weights, keys, _, ratio, k = whole_numbers(6, 2, 400, 50, 10**6)
    if place == "weights":
        weights[2:4] = bad
    else:
        keys[:: 1 if place == "all keys" else 3] = bad
    for i, row in enumerate(CPU.select(q, weights, keys, 1590, ratio, k).tolist()):
        assert row == sorted(set(row)), "repeated or out of order"
        assert row[0] >= 0
        assert row[-1] < min((1590 + i + 1) // 4, 400)


@native
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("place", ["keys", "q", "weights", "all keys"])
def test_bad_numbers_leave_rows_visible_and_distinct(bad, place, bounded):
    q, weights, keys, _, ratio, k = whole_numbers(6, 2, 400, 50, 10**6)
    if place == "keys":
        keys[::3] = bad
    elif place == "all keys":
        keys[:] = bad
    elif place == "q":
        q[2:4] = bad
    else:
        weights[2:4] = bad
    args = (q, weights, keys, 1590, ratio, k)
    out = CPU.select(*args)
    assert bounded
    for i, row in enumerate(out.tolist()):
        assert row == sorted(set(row)), "repeated or out of order"
        assert row[0] >= 0
        assert row[-1] < min((1590 + i + 1) // 4, 400)
    if place in {"q", "weights"}:
        assert torch.equal(out[[0, 1, 4, 5]], REFERENCE.select(*args)[[0, 1, 4, 5]])


@native
def test_an_infinite_score_is_selected(bounded):
    g = generator(11)
    q, weights, keys = (
        torch.rand(20, 4, 16, generator=g),
        torch.rand(20, 4, generator=g) + 0.1,
        torch.randn(900, 16, generator=g),
    )
    keys[700, 3], keys[555] = INF, 3e38  # one infinite, one whose product with a query overflows
    out = CPU.select(q * 10, weights, keys, 10**6, 4, 8)
    assert bounded
    assert (out == 700).any(1).all()
    assert (out == 555).any(1).all()


@native
def test_memory_of_bounds_does_not_grow_with_the_context():
    # Buffers of tiles are 3 MiB, 2048 keys in fp32 and their copies as much; scores of all would take 14 MB.
    g = generator(12)
    q, weights = torch.randn(128, 8, 128, generator=g).bfloat16(), torch.rand(128, 8, generator=g)
    keys = torch.randn(27_000, 128, generator=g).bfloat16()
    taken = [peak_bytes(functools.partial(CPU.select, q, weights, keys[:n], 4 * n, 4, 16)) for n in (9000, 27_000)]
    assert taken[1] < 12 * 2**20, taken
    assert taken[1] < 1.1 * taken[0], taken


@native
def test_a_first_limit_is_reached_by_k_entries_of_each_token(monkeypatch):
    g = generator(13)
    q, weights, keys = (
        torch.randn(30, 4, 32, generator=g),
        torch.randn(30, 4, generator=g),
        torch.randn(500, 32, generator=g),
    )
    queries, scratch = index_bound.round_queries(q, weights), index_bound.make_scratch(1 << 16)
    scores = index_scores(q, weights, keys)
    for recent, fewest in ((1024, 400), (100, 500), (40, 300)):
        monkeypatch.setattr(indexer, "RECENT", recent)
        reached = indexer._reached(q, weights, keys, queries, scratch, fewest, 16)
        near = scores[:, max(0, fewest - recent) : fewest]
        assert ((near > reached[:, None] - 1e-4).sum(1) >= 16).all()
        assert (reached > near.median(1).values).all() or recent == 40, "hardly better than none"
    assert indexer._reached(q, weights, keys, queries, scratch, 31, 16).isnan().all()
    keys[250:] = NAN
    assert indexer._reached(q, weights, keys, queries, scratch, 300, 16).isnan().any()
    assert indexer._reached(q * 0, -weights.abs() * INF, keys[:200], queries, scratch, 200, 16).isnan().all()
