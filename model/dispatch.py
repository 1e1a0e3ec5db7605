"""Bringing tokens to experts and their outputs back."""

from collections.abc import Iterator

import torch
from torch import Tensor


def by_expert(ids: Tensor, experts: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Group routed tokens by expert.

    Parameters
    ----------
    ids
        [t, k] int64, the experts of each token, distinct within a row.
    experts
        Number of experts.

    Yields
    ------
    tuple[int, Tensor, Tensor]
        Each expert that has tokens, in ascending order, with the rows [n] of its tokens, ascending, and their slots [n]
        in 0 .. k - 1.

    """
    order = ids.flatten().argsort(stable=True)
    counts = torch.bincount(ids.flatten(), minlength=experts).tolist()
    start = 0
    for expert, count in enumerate(counts):
        if count:
            places = order[start : start + count]
            yield expert, places // ids.shape[1], places % ids.shape[1]
            start += count
