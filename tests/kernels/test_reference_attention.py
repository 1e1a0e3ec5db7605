"""Reference attention, indexer, mHC and linears against plain float64 loops and Python's sort."""

import itertools
import math

import pytest
import torch

from kernels.attention import reference as attention
from kernels.formats.stored import Dense
from kernels.hyper import reference as hyper
from kernels.indexer import reference as indexer
from kernels.linear import reference as linear

ULP = 2.0**-23  # of float32, relative


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def softmax_loop(q, keys, sink):
    """``sum_j exp(l_j) k_j / (exp(sink) + sum_j exp(l_j))`` of one head in Python floats; q holds the scaling."""
    logits = [sum(a * b for a, b in zip(q, key, strict=True)) for key in keys]
    mass = [math.exp(value) for value in logits]
    total = sum(mass) + math.exp(sink)
    return [sum(m * key[c] for m, key in zip(mass, keys, strict=True)) / total for c in range(len(q))]


@pytest.mark.parametrize("first", [0, 2, 37])
@pytest.mark.parametrize("selecting", [False, True])
def test_attend_is_a_softmax_over_window_entries_and_sink(first, selecting):
    t, h, d, window, ratio, n = 5, 2, 8, 4, 4, 9
    g = seeded(first)
    history = torch.randn(first + t, d, generator=g)
    ring = torch.full((window + t - 1 + 2, d), torch.nan)
    for position in range(max(0, first - window + 1), first + t):
        ring[position % len(ring)] = history[position]
    q, entries = torch.randn(t, h, d, generator=g), torch.randn(n, d, generator=g)
    sink = torch.tensor([0.5, -torch.inf])
    selected = torch.tensor([[2, 0, -1], [8, 1, 9], [0, 1, 2], [-(2**31), 2**31 - 1, 3], [4, -1, -1]]).int()
    ours = attention.attend(q, ring, first, window, entries, ratio, selected if selecting else None, sink)
    for i, head in itertools.product(range(t), range(h)):
        position = first + i
        visible = min((position + 1) // ratio, n)
        chosen = selected[i].tolist() if selecting else range(visible)
        keys = history[max(0, position - window + 1) : position + 1].tolist()
        keys += [entries[e].tolist() for e in chosen if 0 <= e < visible]
        scaled = [v / math.sqrt(d) for v in q[i, head].tolist()]
        expected = softmax_loop(scaled, keys, sink[head].item())
        assert ours[i, head].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_attend_sinks_at_infinity():
    q, ring = torch.randn(1, 3, 8, generator=seeded(0)), torch.randn(4, 8, generator=seeded(1))
    sink = torch.tensor([torch.inf, -torch.inf, 0.0])
    out = attention.attend(q, ring, 3, 4, None, 0, None, sink)[0]
    assert (out[0] == 0).all()  # all mass on the sink, which has no value
    weights = (q[0, 1] @ ring.T * 8**-0.5).softmax(-1)
    assert (out[1] - weights @ ring).abs().max() < 1e-6  # no sink at all


def test_attend_refuses_an_entry_that_is_selected_twice():
    q, ring, sink, entries = torch.zeros(2, 1, 8), torch.zeros(8, 8), torch.zeros(1), torch.eye(8)

    def attend(*rows):
        return attention.attend(q, ring, 9, 4, entries, 4, torch.tensor(rows).int(), sink)

    attend([1, 0, -1, -1], [0, 1, 5, 5])  # no entries: -1, and 5 at positions before 23
    with pytest.raises(AssertionError, match=r"token 1 selects an entry twice: \[1, 0, 1\]"):
        attend([1, 0, -1, -1], [1, 0, -1, 1])


def test_attend_has_no_entry_before_its_block_is_complete():
    ring, sink = torch.zeros(8, 8), torch.full((1,), -torch.inf)
    entries = torch.ones(1, 8)
    out = attention.attend(torch.zeros(5, 1, 8), ring, 0, 4, entries, 4, None, sink)[:, 0, 0]
    # positions 0, 1, 2 see no entry; 3 sees one among 4 + 1 keys, as does 4
    assert out.tolist() == pytest.approx([0, 0, 0, 0.2, 0.2], abs=1e-7)


def test_select_against_sorted():
    t, h, d, n, k, first, ratio = 40, 3, 4, 30, 7, 60, 4
    g = seeded(2)
    q, keys = (torch.randint(-1, 2, (rows, d), generator=g).float() for rows in (t * h, n))
    q, weights = q.view(t, h, d), torch.randint(-1, 2, (t, h), generator=g).float()
    ours = indexer.select(q, weights, keys, first, ratio, k).tolist()
    ties = 0
    for i in range(t):
        visible = min((first + i + 1) // ratio, n)
        scores = [
            sum(w * max(sum(a * b for a, b in zip(row, key, strict=True)), 0) for w, row in zip(ws, rows, strict=True))
            for key in keys[:visible].tolist()
            for ws, rows in [(weights[i].tolist(), q[i].tolist())]
        ]
        best = sorted(range(visible), key=lambda e: (-scores[e], e))
        assert ours[i] == sorted(best[:k]) + [-1] * max(0, k - visible)
        ties += k < visible and scores[best[k - 1]] == scores[best[k]]
    assert ties > 10, "the cut never fell into a tie: the test shows nothing about them"


@pytest.mark.parametrize(("n", "k"), [(0, 4), (3, 4), (4, 4)])
def test_select_pads_with_minus_one(n, k):
    out = indexer.select(torch.ones(2, 1, 4), torch.ones(2, 1), torch.ones(n, 4), 6, 4, k)
    assert out.tolist() == [[0, -1, -1, -1][:n], [0, 1, -1, -1][:n]]


def normalised(comb, axis, eps):
    s = range(len(comb))
    if axis == "rows":
        return [[comb[i][j] / (sum(comb[i]) + eps) for j in s] for i in s]
    return [[comb[i][j] / (sum(comb[m][j] for m in s) + eps) for j in s] for i in s]


def sinkhorn_loop(logits, iterations, eps, *, order=("rows", "columns")):
    s = range(len(logits))
    start = [[math.exp(v) for v in row] for row in logits]
    comb = [[start[i][j] / sum(start[i]) + eps for j in s] for i in s]
    comb = normalised(comb, "columns", eps)
    for _ in range(iterations - 1):
        for axis in order:
            comb = normalised(comb, axis, eps)
    return comb


LOGITS = [[0.3, -1.2, 2.0, 0.1], [1.5, 0.2, -0.7, 0.9], [-0.4, 0.6, 0.8, -2.2], [2.5, 1.1, -1.3, 0.4]]


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_sinkhorn_golden(iterations):
    ours = hyper.sinkhorn(torch.tensor(LOGITS), iterations, 1e-6)
    expected = torch.tensor(sinkhorn_loop(LOGITS, iterations, 1e-6))
    assert (ours - expected).abs().max() < 4 * iterations * ULP  # a few roundings of numbers below 1 per iteration
    assert (ours.sum(-2) - 1).abs().max() < 4e-6  # columns came last: eps and rounding
    if iterations == 2:  # far from converged, so that order and orientation show
        swapped = torch.tensor(sinkhorn_loop(LOGITS, 2, 1e-6, order=("columns", "rows")))
        assert (ours.sum(-1) - 1).abs().max() > 1e-3
        assert (ours - swapped).abs().max() > 1e-3
        assert (ours - expected.T).abs().max() > 1e-1


def test_hyper_weights_golden():
    t, s, d = 3, 2, 5
    g = seeded(3)
    streams, fn = torch.randn(t, s, d, generator=g), torch.randn((2 + s) * s, s * d, generator=g)
    scale, base = torch.tensor([0.5, -1.0, 2.0]), torch.randn((2 + s) * s, generator=g)
    pre, post, comb = hyper.hyper_weights(streams, fn, scale, base, 20, 1e-6, 1e-2)

    def sigmoid(v):
        return 1 / (1 + math.exp(-v))

    for i in range(t):
        flat = streams[i].flatten().tolist()
        root = math.sqrt(sum(v * v for v in flat) / len(flat) + 1e-2)
        mixes = [sum(a * b for a, b in zip(row, flat, strict=True)) / root for row in fn.tolist()]
        scaled = [m * scale[min(j // s, 2)].item() + base[j].item() for j, m in enumerate(mixes)]
        assert pre[i].tolist() == pytest.approx([sigmoid(v) + 1e-6 for v in scaled[:s]], rel=1e-5)
        assert post[i].tolist() == pytest.approx([2 * sigmoid(v) for v in scaled[s : 2 * s]], rel=1e-5)
        rows = sinkhorn_loop([scaled[2 * s : 3 * s], scaled[3 * s :]], 20, 1e-6)
        assert comb[i].flatten().tolist() == pytest.approx([v for row in rows for v in row], rel=1e-4)
    head = hyper.head_weights(streams, fn[:s], scale[:1], base[:s], 1e-6, 1e-2)
    assert (head - pre).abs().max() < 4 * ULP  # the same equation; a product of other width may sum in another order


def test_collapse_reads_and_expand_writes_transposed():
    streams = torch.tensor([[[1.0, 2.0], [10.0, 20.0]]])
    assert hyper.collapse(streams, torch.tensor([[2.0, 0.5]])).tolist() == [[7.0, 14.0]]
    comb, post = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), torch.tensor([[0.0, 100.0]])
    new = hyper.expand(torch.tensor([[1.0, -1.0]]), streams, post, comb)
    # stream 0: 1 * (1, 2) + 3 * (10, 20); stream 1: 2 * (1, 2) + 4 * (10, 20) + 100 * (1, -1)
    assert new.tolist() == [[[31.0, 62.0], [142.0, -16.0]]]


def test_linears_against_loops():
    g = seeded(4)
    x, weight = torch.randn(3, 4, 6, generator=g), torch.randn(20, 6, generator=g)
    grouped = linear.grouped_linear(x, Dense(weight), 4)  # four groups of five rows
    for i, group in itertools.product(range(3), range(4)):
        expected = [
            sum(a * b for a, b in zip(x[i, group].tolist(), row, strict=True))
            for row in weight[5 * group : 5 * group + 5].tolist()
        ]
        assert grouped[i, group].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
        alone = linear.linear(x[:, group], Dense(weight))[i, 5 * group : 5 * group + 5]
        assert alone.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)
