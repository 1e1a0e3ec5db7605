"""`route` and `route_weights` of every backend against Python's sort and floats."""

import math

import pytest
import torch

from fathom.kernels.formats.stored import Dense
from fathom.kernels.gate import reference
from tests.kernels.every_backend import ULP, every_backend, seeded


def weighed(logits, scale):
    scores = [math.sqrt(math.log1p(math.exp(logit))) for logit in logits]
    return pytest.approx([scale * score / sum(scores) for score in scores], rel=8 * ULP)


@every_backend
def test_the_bias_selects_but_does_not_weigh(ops):
    logits = torch.tensor([[1.0, 1.0, -2.0, 1.0, 3.0]])
    bias = torch.tensor([0.0, 0.0, 9.0, 0.0, -9.0])
    ids, weights = ops.route(logits, bias, 3, 2.5)
    assert ids.tolist() == [[2, 0, 1]]  # 0, 1 and 3 tie: the lower ones
    assert weights[0].tolist() == weighed([-2.0, 1.0, 1.0], 2.5)


@every_backend
def test_of_equal_scores_the_lower_experts_are_chosen_and_weights_sum_to_the_scale(ops):
    logits = torch.randint(-2, 3, (200, 64), generator=seeded(7)).float()  # five values on 64 experts: ties everywhere
    ids, weights = ops.route(logits, torch.zeros(64), 6, 1.5)
    for row, chosen, weight in zip(logits.tolist(), ids.tolist(), weights.tolist(), strict=True):
        assert chosen == sorted(range(64), key=lambda e: (-row[e], e))[:6]
        assert weight == weighed([row[e] for e in chosen], 1.5)
    assert (weights.sum(-1) - 1.5).abs().max() < 8 * ULP
    assert torch.equal(weights, ops.route_weights(logits, ids, 1.5))


@every_backend
def test_given_experts_are_weighed_in_their_order_whatever_their_rank(ops):
    weights = ops.route_weights(torch.tensor([[-3.0, 0.0, 30.0, 2.0]]), torch.tensor([[1, 0, 2]]), 2.0)
    assert weights[0].tolist() == weighed([0.0, -3.0, 30.0], 2.0)
    assert [part.shape for part in ops.route(torch.zeros(0, 8), torch.zeros(8), 3, 1.0)] == [(0, 3)] * 2  # no token


@every_backend
def test_a_logit_that_is_nan_is_chosen_and_makes_its_token_nan(ops):
    """As in a sort, where NaN stands before all numbers; among several the lower index."""
    logits = torch.randn(4, 300, generator=seeded(1))
    logits[1, 200] = logits[1, 7] = logits[3, 299] = math.nan
    logits[2, 4] = math.inf
    ids, weights = ops.route(logits, torch.zeros(300), 3, 1.0)
    assert ids[1, :2].tolist() == [7, 200]
    assert (ids[2, 0], ids[3, 0]) == (4, 299)
    assert weights.isnan().any(1).tolist() == [False, True, True, True]  # of infinity: infinity by infinity
    assert torch.equal(ids, reference.route(logits, torch.zeros(300), 3, 1.0)[0])


@every_backend
@pytest.mark.parametrize("k", [1, 5])
def test_all_experts_may_be_chosen_and_rows_need_not_lie_in_order(ops, k):
    logits = torch.randn(k, 6, generator=seeded(2)).T
    ids, weights = ops.route(logits, torch.arange(k).float(), k, 2.0)
    expected = reference.route(logits, torch.arange(k).float(), k, 2.0)
    assert torch.equal(ids, expected[0])
    torch.testing.assert_close(weights, expected[1], rtol=8 * ULP, atol=0)
    assert torch.equal(weights, ops.route_weights(logits, ids, 2.0))


@every_backend
@pytest.mark.parametrize("t", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_and_routing_in_one_are_one_after_the_other(ops, t, dtype):
    """To the bit, again and again, of experts that fill tiles and of some that do not; columns are split."""
    for experts in (4, 70, 128):
        g = seeded(experts)
        weight = Dense(torch.randn(experts, 2048, generator=g).to(dtype))
        x, bias = torch.randn(t, 2048, generator=g).to(dtype), torch.randn(experts, generator=g)
        logits = ops.linear(x, weight, wide=True)
        for _ in range(2):
            ids, weights = ops.gate(x, weight, bias, None, 3, 1.5)
            wanted = ops.route(logits, bias, 3, 1.5)
            assert torch.equal(ids, wanted[0])
            assert torch.equal(weights, wanted[1])
            given = ids.flip(1)
            found = ops.gate(x, weight, None, given, 3, 1.5)
            assert torch.equal(found[0], given)
            assert torch.equal(found[1], ops.route_weights(logits, given, 1.5))
