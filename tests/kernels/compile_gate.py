"""Routing of V4-Flash and V4-Pro, for one token and for many."""

import torch

from fathom.kernels.formats.stored import Dense
from fathom.kernels.gate.triton import gate, route, route_weights


def by_score(experts, t):
    return lambda: route(torch.empty(t, experts), torch.empty(experts), 6, 1.5)


def by_table(experts, t):
    return lambda: route_weights(torch.empty(t, experts), torch.empty(t, 6, dtype=torch.int64), 1.5)


def of_one(experts, hidden):
    x, weight = torch.empty(1, hidden, dtype=torch.bfloat16), torch.empty(experts, hidden, dtype=torch.bfloat16)
    return lambda: gate(x, Dense(weight), torch.empty(experts), None, 6, 1.5)


BLACKWELL = {"V4-Flash, a token and its logits": of_one(256, 4096), "V4-Flash, one token": by_score(256, 1)}
CASES = BLACKWELL | {"V4-Flash, a table, one token": by_table(256, 1)}
MORE = {"V4-Pro, 512 tokens": by_score(384, 512)}
