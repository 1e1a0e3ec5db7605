"""The running softmax of attention in tiles, on a CPU: largest logit, sum and values of the tiles so far."""

from typing import NamedTuple

import torch
from torch import Tensor


class Softmax(NamedTuple):
    """Of rows of queries; updated in place, everything float32."""

    peak: Tensor  # [..., rows] largest logit so far; it begins finite, so that no difference of peaks is inf - inf
    total: Tensor  # [..., rows] sum of exp(logit - peak)
    values: tuple[Tensor, ...]  # [..., rows, d] each, sums of exp(logit - peak) * value

    def fold(self, logits: Tensor) -> Tensor:
        """Take in a tile's logits [..., rows, m], which are written over; returns its masses, exp(logit - peak).

        Products of masses and values are added by the caller, to one of `values`: all are scaled here to the new peak.
        """
        peak = torch.maximum(self.peak, logits.amax(-1))
        masses = logits.sub_(peak[..., None]).exp_()
        shrink = torch.exp(self.peak - peak)
        self.peak.copy_(peak)
        self.total.mul_(shrink).add_(masses.sum(-1))
        for value in self.values:
            value.mul_(shrink[..., None])
        return masses
