"""Top-k by digits selects what a stable sort does, to the entry, with a program to a row and with many."""

import math

import pytest
import torch

from kernels.indexer import reference as indexer
from kernels.indexer import topk
from kernels.indexer.topk import top_k, top_k_into

NAN, INF = math.nan, math.inf


@pytest.fixture(params=["whole rows", "parts"])
def way(request, monkeypatch):
    """Both ways, in tiles of 1024, and of 64 in two parts."""
    small = {"WHOLE_ROWS": 1 << 30, "WHOLE_ENTRIES": 0, "PART": 64, "PARTS": 2}
    for name, value in small.items() if request.param == "parts" else [("TILE", 1024)]:
        monkeypatch.setattr(topk, name, value)
    return request.param


@pytest.fixture
def sorted_(way, monkeypatch):
    """The reference's selection of given scores, for both ways."""
    del way
    monkeypatch.setattr(indexer, "index_scores", lambda scores, *_: scores)
    return lambda scores, first, ratio, k: indexer.select(scores, None, scores.T, first, ratio, k)


def hard_rows(n):
    """Ties at the k-th place, both zeros, infinities, the smallest numbers, one digit that differs, all equal."""
    g = torch.Generator().manual_seed(0)
    near = torch.randint(-200, 200, (n,), generator=g)
    return torch.stack((
        torch.randint(-3, 4, (n,), generator=g).float(),
        torch.tensor([0.0, -0.0])[torch.randint(2, (n,), generator=g)],
        torch.tensor([-INF, INF, -1.0, 3e38])[torch.randint(4, (n,), generator=g)],
        near * 2.0**-149,
        (near + 0x3F800100).int().view(torch.float32),  # beside 1, ends in every byte
        (near.abs() % 7 << 16).add(0x40000000).int().view(torch.float32).neg(),
        torch.full((n,), -2.5),
        torch.randn(n, generator=g),
    ))  # fmt: skip


def test_entries_are_those_of_a_stable_sort(sorted_):
    scores = hard_rows(260)
    assert torch.equal(top_k(scores, 4 * 260, 4, 17), sorted_(scores, 4 * 260, 4, 17))


@pytest.mark.parametrize("k", [1, 199])
def test_one_may_be_picked_or_left(k, sorted_):
    scores = hard_rows(200)[:1]
    assert torch.equal(top_k(scores, 800, 4, k), sorted_(scores, 800, 4, k))


def test_what_a_token_does_not_see_is_not_read(sorted_):
    scores = hard_rows(200)[[0, 4]]
    want = sorted_(scores, 520, 3, 20)
    beyond = torch.arange(200) >= indexer.visible_entries(520, 2, 3, scores.device)[:, None]
    scores[beyond] = torch.tensor([NAN, INF]).repeat(300)[: int(beyond.sum())]
    for first in (520, torch.tensor(520)):
        assert torch.equal(top_k(scores, first, 3, 20), want)


@pytest.mark.parametrize("first", [0, 70])
def test_rows_that_see_fewer_than_k_end_in_minus_one(first, sorted_):
    scores = torch.full((5, 40), -INF)  # seen all the same
    want = sorted_(scores, first, 4, 18)
    assert torch.equal(top_k(scores, torch.tensor(first), 4, 18), want)
    assert first == 0 or (want == -1).any()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 1)])
def test_there_may_be_nothing_to_pick_from(shape):
    assert torch.equal(top_k(torch.zeros(shape), 100, 4, 8), torch.zeros(shape[0], min(8, shape[1]), dtype=torch.int32))


def test_rows_lie_as_they_do(sorted_):
    scores = hard_rows(100)[[0, 7]]
    want = sorted_(scores, 600, 4, 30)
    assert torch.equal(top_k(scores.T.contiguous().T, 600, 4, 30), want)
    assert torch.equal(top_k(torch.cat((scores, scores), 1)[:, :100], 600, 4, 30), want)


def test_nothing_is_written_beside_the_rows(sorted_):
    scores = torch.cat((hard_rows(100)[6:7], torch.zeros(1, 100)))  # all are equal, so more than k could be taken
    out = torch.full((4, 20), -7, dtype=torch.int32)
    top_k_into(out[1:3], scores, torch.tensor(100), 120, 3)
    assert torch.equal(out[1:3], sorted_(scores, 220, 3, 20))
    assert (out[[0, 3]] == -7).all()


def test_tokens_stand_behind_the_first(sorted_):
    out = torch.empty(1, 20, dtype=torch.int32)
    scores = torch.arange(100.0)[None]
    top_k_into(out, scores, torch.tensor(100), 60, 3)
    assert torch.equal(out, sorted_(scores, 160, 3, 20))


def test_a_nan_leaves_its_row_visible_and_distinct(sorted_):
    scores = hard_rows(130)[[0, 0]]
    want = sorted_(scores, 400, 4, 50)
    scores[1, ::3] = NAN
    scores[1, 1::5] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)  # all bits set
    found = top_k(scores, 400, 4, 50)
    assert torch.equal(found[0], want[0])
    row = found[1].tolist()
    assert row == sorted(set(row))
    assert row[0] >= 0
    assert row[-1] < 402 // 4


def test_many_rows_and_long_ones_go_their_ways(monkeypatch):
    launched = []
    for name in ("_whole", "_count", "_collect"):
        spy = type(
            "Spy", (), {"__getitem__": lambda _, grid, name=name: lambda *_, **__: launched.append((name, grid))}
        )
        monkeypatch.setattr(topk, name, spy())
    top_k(torch.empty(1, 262144), 1 << 20, 4, 512)
    assert launched == [("_count", (1, 128))] * 4 + [("_collect", (1, 128))]
    launched.clear()
    top_k(torch.empty(3, 300001), 1 << 21, 4, 512)  # parts of two tiles
    assert launched[-1] == ("_collect", (3, 74))
    launched.clear()
    top_k(torch.empty(64, 20000), 1 << 20, 4, 512)
    top_k(torch.empty(1, 16384), 1 << 20, 4, 512)
    assert launched == [("_whole", (64,)), ("_whole", (1,))]


def test_more_entries_than_a_tile_holds(way, sorted_, monkeypatch):
    monkeypatch.setattr(topk, "PARTS", 4)
    n = 2500 if way == "whole rows" else 450  # 4 parts of two tiles
    scores = torch.randint(-40, 40, (1, n), generator=torch.Generator().manual_seed(1)).float()
    for k in (100, 445):
        assert torch.equal(top_k(scores, 4 * n - 5, 4, k), sorted_(scores, 4 * n - 5, 4, k))
