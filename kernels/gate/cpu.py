"""Routing, a token at a time: k is small, so that experts are kept in order as they are seen."""

import numpy as np
import torch
from numba import types
from torch import Tensor

from fathom.kernels.compiled import array, compiled, each_of, kept_array, loop

_INT, _F32, _IDS = types.int64, types.float32[::1], types.int64[::1]


@loop
def _score(logit):
    """The root of the softplus, which is linear beyond 20 as torch's is."""
    return np.sqrt(logit if logit > np.float32(20) else np.log1p(np.exp(logit)))


@loop
def _weigh(t, logits, experts, k, scale, ids, weights):
    mass = np.float32(0)
    for i in range(t * k, t * k + k):
        weights[i] = _score(logits[t * experts + ids[i]])
        mass += weights[i]
    for i in range(t * k, t * k + k):
        weights[i] = np.float32(scale) * weights[i] / mass


@loop
def _route_tokens(low, high, logits, bias, experts, k, scale, ids, weights):
    top = np.empty(k, np.float32)
    for t in range(low, high):
        for expert in range(experts):
            score, place = _score(logits[t * experts + expert]) + bias[expert], min(expert, k)
            # behind its equals, which have the lower index; NaN stands before all numbers, as in a sort
            while place and (score > top[place - 1] or (np.isnan(score) and not np.isnan(top[place - 1]))):
                place -= 1
                if place + 1 < k:
                    top[place + 1], ids[t * k + place + 1] = top[place], ids[t * k + place]
            if place < k:
                top[place], ids[t * k + place] = score, expert
        _weigh(t, logits, experts, k, scale, ids, weights)


@compiled((_F32, _F32, _INT, _INT, _INT, types.float64, _IDS, _F32))
def _route(logits, bias, tokens, experts, k, scale, ids, weights):
    each_of(_route_tokens, tokens, tokens * experts * 16, (logits, bias, experts, k, scale, ids, weights))


@compiled((_F32, _INT, _INT, _INT, types.float64, _IDS, _F32))
def _weigh_all(logits, tokens, experts, k, scale, ids, weights):
    for t in range(tokens):
        _weigh(t, logits, experts, k, scale, ids, weights)


def route(logits: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """Pick k experts: `kernels.gate.reference.route`."""
    t, experts = logits.shape
    assert k <= experts, f"{k} of {experts} experts"
    ids, weights = torch.empty(t, k, dtype=torch.int64), torch.empty(t, k)
    _route(array(logits.contiguous()), kept_array(bias), t, experts, k, scale, array(ids), array(weights))
    return ids, weights


def route_weights(logits: Tensor, ids: Tensor, scale: float) -> Tensor:
    """Weights of given experts: `kernels.gate.reference.route_weights`."""
    (t, experts), k = logits.shape, ids.shape[1]
    weights = torch.empty(t, k)
    _weigh_all(array(logits.contiguous()), t, experts, k, scale, array(ids.contiguous()), array(weights))
    return weights
