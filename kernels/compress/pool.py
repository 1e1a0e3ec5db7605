"""Gated pooling of a window of tokens into one compressed entry."""

import torch
from torch import Tensor


def pool(kv: Tensor, gate: Tensor, previous_kv: Tensor | None, previous_gate: Tensor | None) -> Tensor:
    """Pool each window by a softmax over its tokens, channel by channel.

    Equation: ``c[n, d] = sum_j softmax_j(gate[n, :, d]) kv[n, j, d]``; with overlap, j runs over the previous window's
    first series and this window's second (paper section 2.3.1: Ca and Cb), as one softmax over 2r tokens.

    Parameters
    ----------
    kv, gate
        [n, r, d] float32; `gate` holds the position bias already.
    previous_kv, previous_gate
        [n, r, d] float32, or None where windows do not overlap (HCA). A gate of -inf takes a token out: the first
        window has no predecessor.

    Returns
    -------
    Tensor
        [n, d] float32.

    """
    assert kv.dtype == torch.float32, f"kv: {kv.dtype}, want float32"
    if previous_kv is not None and previous_gate is not None:
        kv = torch.cat((previous_kv, kv), dim=1)  # [n, 2r, d]
        gate = torch.cat((previous_gate, gate), dim=1)
    return (kv * gate.softmax(dim=1)).sum(dim=1)


def pool_scratch(tokens: int, width: int, series: int) -> int:
    """Bytes alive at most in `pool` of the windows of so many tokens, the result aside: series joined, and products."""
    return tokens * width * 4 * (8 if series == 2 else 2)
