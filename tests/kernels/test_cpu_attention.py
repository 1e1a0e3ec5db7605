"""Blocked attention and selection against the reference, on inputs made to catch a read or a tie gone wrong."""

import itertools
import math
import zlib
from functools import partial

import pytest
import torch

from kernels.attention import cpu as attention
from kernels.indexer import cpu as indexer
from kernels.ops import CPU, REFERENCE
from tests.peak_memory import peak_bytes

ULP = 2.0**-23  # of float32, relative; bfloat16's is 2^-7
DENSE, GATHERED = float("inf"), 0.0
INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def seeded(*parts):
    return torch.Generator().manual_seed(zlib.crc32(repr(parts).encode()))


def strided(x):
    """The same values with a stride in the last dim, large noise between them."""
    noisy = torch.full((*x.shape, 2), 100.0).to(x.dtype)
    noisy[..., 0] = x
    return noisy[..., 0]


def make(t, h, d, window, first, n, k, *, spare=0, nan=True, dtype=torch.float32):
    """Arguments of `attend`; rows that no token may see hold NaN or noise of std 100."""
    generator = seeded(t, h, d, window, first, n, k)

    def unseen(rows):
        return torch.full((rows, d), torch.nan) if nan else 100 * torch.randn(rows, d, generator=generator)

    ring = unseen(window + t - 1 + spare)
    for position in range(max(0, first - window + 1), first + t):
        ring[position % len(ring)] = torch.randn(d, generator=generator)
    entries, selected = None, None
    if n is not None:
        entries, visible = unseen(n), min((first + t) // 4, n)
        entries[:visible] = torch.randn(visible, d, generator=generator)
    if k is not None:
        selected = torch.stack([torch.randperm(max(n, k), generator=generator)[:k] for _ in range(t)]).int()
        pads = torch.tensor([INT_MIN, -1, n, INT_MAX]).int()[torch.randint(4, (t, k), generator=generator)]
        selected = torch.where(torch.rand(t, k, generator=generator) < 0.3, pads, selected)
    sink = torch.randn(h, generator=generator)
    sink[::3], sink[1::3] = -torch.inf, torch.inf
    q = torch.randn(t, h, d, generator=generator)
    tensors = [None if x is None else strided(x) for x in (q.to(dtype), ring.to(dtype), entries, selected, sink)]
    q, ring, entries, selected, sink = tensors
    return q, ring, first, window, None if entries is None else entries.to(dtype), 4, selected, sink


def assert_same(ours, expected, *, rows):
    """Compare with the reference.

    Both compute in fp32 and round once. Masses carry the rounding of logits of size about 4, and their sums over some
    hundred keys run in another order: 64 ulp of the largest key. In bfloat16 the one rounding may then fall on the
    other side: one ulp of the result more.
    """
    assert ours.dtype == expected.dtype
    assert torch.equal(ours.isfinite(), expected.isfinite()), "a row that must not be read was read"
    bound = torch.full_like(expected, 64 * ULP * rows, dtype=torch.float32)
    if ours.dtype == torch.bfloat16:
        bound += expected.float().abs() * 2.0**-7
    error = (ours.float() - expected.float()).abs()
    assert (error <= bound).all(), f"off by {error.max()} at {(error - bound).argmax()}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize(
    ("t", "window", "first", "spare"),
    [(1, 1, 0, 0), (1, 8, 3, 0), (5, 1, 1000, 0), (5, 8, 0, 3), (70, 16, 5, 0), (33, 128, 100_003, 5), (3, 40, 77, 0)],
)
def test_window_alone(t, window, first, spare, nan, dtype):
    args = make(t, 5, 32, window, first, None, None, spare=spare, nan=nan, dtype=dtype)
    assert_same(CPU.attend(*args), REFERENCE.attend(*args), rows=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reading", [DENSE, GATHERED])
@pytest.mark.parametrize(("n", "k"), [(0, 3), (3, 3), (4, 3), (40, 3), (300, 17), (300, 300), (300, None), (0, None)])
@pytest.mark.parametrize(("t", "first"), [(1, 0), (1, 2000), (7, 0), (40, 1100)])
def test_window_and_entries(t, first, n, k, reading, dtype):
    args = make(t, 3, 16, 8, first, n, k, dtype=dtype)
    for ours in (attention.attend(*args, dense_up_to=reading), CPU.attend(*args)):
        assert_same(ours, REFERENCE.attend(*args), rows=4)


@pytest.mark.parametrize("reading", [DENSE, GATHERED])
@pytest.mark.parametrize("n", [15, 16, 17, 32, 33])
def test_tile_boundaries(n, reading, monkeypatch):
    monkeypatch.setattr(attention, "ROWS", 12)  # 4 tokens
    monkeypatch.setattr(attention, "LOGITS", 16 * 12)  # 16 keys
    monkeypatch.setattr(attention, "KEYS", 16 * 16)
    for t, k in itertools.product((1, 2, 3, 4, 5), (None, 15, 16, 17)):
        args = make(t, 3, 16, 20, 4 * n + 100, n, k)
        assert_same(attention.attend(*args, dense_up_to=reading), REFERENCE.attend(*args), rows=4)


@pytest.mark.parametrize("k", [None, 40])
def test_a_token_does_not_depend_on_its_chunk(k):
    q, ring, first, window, entries, ratio, selected, sink = make(90, 16, 32, 24, 700, 300, k)
    whole = CPU.attend(q, ring, first, window, entries, ratio, selected, sink)
    for i in (0, 1, 63, 64, 65, 89):
        chosen = None if selected is None else selected[i : i + 1]
        alone = CPU.attend(q[i : i + 1], ring, first + i, window, entries, ratio, chosen, sink)
        assert_same(alone, whole[i : i + 1], rows=4)


@pytest.mark.parametrize("reading", [DENSE, GATHERED])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", ["window", "selected", "visible", "q"])
def test_what_a_token_sees_is_never_lost(place, bad, reading):
    """Not even where a sink of +inf takes all mass, for 0 times NaN is NaN."""
    q, ring, first, window, entries, ratio, _, _ = make(1, 3, 16, 8, 100, 25, None)
    selected = None if place == "visible" else torch.tensor([[3, 7, -1]]).int()
    sink = torch.tensor([-torch.inf, 0.0, torch.inf])
    args = (q, ring, first, window, entries, ratio, selected, sink)
    ways = (partial(attention.attend, dense_up_to=reading), CPU.attend, REFERENCE.attend)
    for out in (attend(*args) for attend in ways):
        assert out.isfinite().all()
        assert (out[0, 2] == 0).all()
    {"window": ring[100 % 8], "selected": entries[7], "visible": entries[24], "q": q[0].T}[place][5] = bad
    for out in (attend(*args) for attend in ways):
        # an infinite key of mass 0 shows in its own dim alone; a mass of NaN in all
        assert (out[0, :, 5] if place != "q" and math.isinf(bad) else out[0]).isnan().all()


def test_the_noise_would_be_noticed():
    """The tests above rest on unseen rows moving the answer: widen the window by one and it must move."""
    q, ring, first, window, *rest = make(5, 24, 32, 8, 50, None, None, spare=4, nan=False)
    wider = REFERENCE.attend(q, ring, first, window + 1, *rest)
    assert (wider - CPU.attend(q, ring, first, window, *rest)).abs().max() > 10


def whole_scores(t, h, d, n, k, *, first):
    """Small whole numbers: scores are exact in fp32 whatever the order, ties are real, and many of them are 0."""
    g = seeded(t, h, d, n, k)
    q, keys = torch.randint(-2, 3, (t, h, d), generator=g).float(), torch.randint(-1, 2, (n, d), generator=g).float()
    weights = torch.randint(-1, 2, (t, h), generator=g).float()  # -1 * relu(0) is -0.0, which ties with 0.0
    keys[min((first + t) // 4, n) :] = torch.nan
    return strided(q), strided(weights), strided(keys), first, 4, k


@pytest.mark.parametrize(("t", "h"), [(1, 1), (1, 16), (70, 16), (30, 64)])
@pytest.mark.parametrize("n", [0, 1, 16, 17, 18, 900, 1500])
@pytest.mark.parametrize("first", [0, 50, 3500, 100_000])
def test_select_with_ties(t, h, n, first):
    for k in (1, 17, 512):
        args = whole_scores(t, h, 4, n, k, first=first)
        ours, expected = CPU.select(*args), REFERENCE.select(*args)
        assert ours.dtype == expected.dtype
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("n", [19, 20, 21, 39, 40, 41, 100])
def test_select_across_merges(n, monkeypatch):
    monkeypatch.setattr(indexer, "PER_HEAD", 21)  # 7 entries per tile of scores
    monkeypatch.setattr(indexer, "FIRST", 1)  # k entries before anything is compared
    monkeypatch.setattr(indexer, "MERGED", 20)  # 20 entries per merge for one token, k for three
    # 40 tokens see entry counts that differ by ten, which is two merges of five
    for (t, k), first in itertools.product(((1, 5), (3, 7), (3, 19), (3, 20), (40, 5)), (0, 2 * n, 4 * n)):
        args = whole_scores(t, 3, 4, n, k, first=first)
        assert torch.equal(CPU.select(*args), REFERENCE.select(*args))


def test_packed_scores_order_as_floats_and_both_zeros_tie():
    scores = torch.tensor([[3.0, -torch.inf, 0.0, -0.0, 1e-45, -1e-45, torch.inf, -2.0, 0.0, 3.0]])
    order = indexer._pack(scores, 7).argsort(descending=True)[0].tolist()
    assert order == [6, 0, 9, 4, 2, 3, 8, 5, 7, 1]


def test_select_where_every_score_is_zero():
    q, keys = torch.full((3, 2, 4), -1.0), torch.ones(5000, 4)
    out = CPU.select(q, torch.ones(3, 2), keys, 20_000, 4, 512)
    assert torch.equal(out, torch.arange(512).int().expand(3, 512))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_select_of_bad_scores_stays_in_range(bad):
    q, weights, keys, _, ratio, k = whole_scores(6, 2, 4, 400, 50, first=10**6)
    keys[::3] = bad
    out = CPU.select(q, weights, keys, 1590, ratio, k)
    for i, row in enumerate(out.tolist()):
        assert row == sorted(set(row)), "repeated or out of order"
        assert row[0] >= 0
        assert row[-1] < min((1590 + i + 1) // 4, 400)


def test_memory_does_not_grow_with_the_context():
    # 32 tokens, 2 heads, 200 000 entries. Logits of all would take 51 MB, scores without heads 26 MB, and gathered
    # rows 34 MB. A tile of logits is 2 MiB and so is one of keys; with masks, packed scores and the temporaries of an
    # expression, no more than eight such tiles live at once.
    t, h, d, n, k = 32, 2, 64, 200_000, 4096
    g = seeded(0)
    q, ring = torch.randn(t, h, d, generator=g), torch.randn(128 + t, d, generator=g)
    entries = torch.randn(n, d, generator=g).bfloat16()
    first, sink = 4 * n, torch.zeros(h)
    weights = torch.randn(t, h, generator=g)
    bound = 16 * 2**20
    assert peak_bytes(lambda: CPU.attend(q, ring, first, 128, entries, 4, None, sink)) < bound
    assert peak_bytes(lambda: CPU.select(q, weights, entries, first, 4, k)) < bound
    selected = torch.arange(0, n, n // k)[:k].int().expand(t, k)
    assert peak_bytes(lambda: CPU.attend(q, ring, first, 128, entries, 4, selected, sink)) < bound
    assert peak_bytes(lambda: torch.einsum("thd,nd->tn", q, entries.float())) > 4 * bound, "the measure is blind"
