"""Rows of the last positions in a buffer of fixed size: that of position p is row ``p % capacity``."""

import torch
from torch import Tensor


def write(data: Tensor, first: int, rows: Tensor) -> None:
    """Store `rows` [t, d] for positions ``first ..``; of more than `data` [capacity, d] holds, the last."""
    capacity, t = data.shape[0], rows.shape[0]
    if t > capacity:
        first, rows, t = first + t - capacity, rows[t - capacity :], capacity
    start = first % capacity
    head = min(t, capacity - start)
    data[start : start + head] = rows[:head]
    if head < t:
        data[: t - head] = rows[head:]


def read(data: Tensor, first: int, stop: int) -> Tensor:
    """Rows of positions ``first .. stop - 1``, a copy: [stop - first, d]."""
    return data[torch.arange(first, stop, device=data.device) % data.shape[0]]
