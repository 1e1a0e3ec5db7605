"""`route` and `route_weights`, of which there is one implementation, against Python's sort and floats."""

import math

import pytest
import torch

from kernels.gate.reference import route, route_weights
from tests.kernels.every_backend import ULP, seeded


def weighed(logits, scale):
    scores = [math.sqrt(math.log1p(math.exp(logit))) for logit in logits]
    return pytest.approx([scale * score / sum(scores) for score in scores], rel=8 * ULP)


def test_the_bias_selects_but_does_not_weigh():
    logits = torch.tensor([[1.0, 1.0, -2.0, 1.0, 3.0]])
    bias = torch.tensor([0.0, 0.0, 9.0, 0.0, -9.0])
    ids, weights = route(logits, bias, 3, 2.5)
    assert ids.tolist() == [[2, 0, 1]]  # 0, 1 and 3 tie: the lower ones
    assert weights[0].tolist() == weighed([-2.0, 1.0, 1.0], 2.5)


def test_of_equal_scores_the_lower_experts_are_chosen_and_weights_sum_to_the_scale():
    logits = torch.randint(-2, 3, (200, 64), generator=seeded(7)).float()  # five values on 64 experts: ties everywhere
    ids, weights = route(logits, torch.zeros(64), 6, 1.5)
    for row, chosen, weight in zip(logits.tolist(), ids.tolist(), weights.tolist(), strict=True):
        assert chosen == sorted(range(64), key=lambda e: (-row[e], e))[:6]
        assert weight == weighed([row[e] for e in chosen], 1.5)
    assert (weights.sum(-1) - 1.5).abs().max() < 8 * ULP
    assert torch.equal(weights, route_weights(logits, ids, 1.5))


def test_given_experts_are_weighed_in_their_order_whatever_their_rank():
    weights = route_weights(torch.tensor([[-3.0, 0.0, 30.0, 2.0]]), torch.tensor([[1, 0, 2]]), 2.0)
    assert weights[0].tolist() == weighed([0.0, -3.0, 30.0], 2.0)
    assert [part.shape for part in route(torch.zeros(0, 8), torch.zeros(8), 3, 1.0)] == [(0, 3)] * 2  # no token
