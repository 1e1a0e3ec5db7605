"""Attention of one token in float64, with its softmax mass by kind; nothing of `kernels` is used here."""

from typing import NamedTuple

import torch
from torch import Tensor


class Attended(NamedTuple):
    """What one token attends to and what comes of it."""

    output: Tensor  # [h, d]
    alone: Tensor  # [h, d], with no entry in sight
    sink: Tensor  # [h] share of the softmax
    window: Tensor  # [h] share
    entries: Tensor  # [h] share


def attend(q: Tensor, window: Tensor, entries: Tensor, sink: Tensor) -> Attended:
    """Attend from one token to the KV of its window and to its entries, with a sink per head.

    Equation: ``o_h = sum_j exp(l_j) kv_j / (exp(sink_h) + sum_j exp(l_j))``, ``l_j = q_h . kv_j d^-0.5``; keys are
    values, one KV head for all, and the sink has no value. Source: DeepSeek `sparse_attn`, paper section 2.3.

    Parameters
    ----------
    q
        [h, d].
    window, entries
        [w, d] and [n, d], w at least 1.
    sink
        [h] finite.

    """
    keys = torch.cat((window, entries)).double()
    logits = q.double() @ keys.T * q.shape[1] ** -0.5  # [h, w + n]
    peak = torch.maximum(logits.amax(1), sink.double())
    weights, of_sink = torch.exp(logits - peak[:, None]), torch.exp(sink.double() - peak)
    near, far = weights.split([len(window), len(entries)], dim=1)
    total = weights.sum(1) + of_sink
    near_keys = keys[: len(window)]
    without = near.sum(1) + of_sink
    return Attended(
        output=weights @ keys / total[:, None],
        alone=near @ near_keys / without[:, None],
        sink=of_sink / total,
        window=near.sum(1) / total,
        entries=far.sum(1) / total,
    )
