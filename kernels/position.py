"""The position of a call's first token, as kernels take it."""

import torch
from torch import Tensor


def position(first: int | Tensor, device: torch.device) -> Tensor:
    """[] int64 on the device; of a number made there, of a tensor itself, whose value no one waits for."""
    if isinstance(first, Tensor):
        assert first.shape == (), f"first: {tuple(first.shape)}, want one number"
        assert first.dtype == torch.int64, f"first: {first.dtype}, want int64"
        return first
    return torch.full((), first, dtype=torch.int64, device=device)
