"""Streams of V4-Pro read and written apart from their weights, as taps and the head need them."""

import torch

from fathom.kernels.hyper.triton_streams import collapse, expand

STREAMS = torch.empty(2, 4, 7168, dtype=torch.bfloat16)
CASES = {
    "collapse": lambda: collapse(STREAMS, torch.empty(2, 4)),
    "expand": lambda: expand(STREAMS[:, 0], STREAMS, torch.empty(2, 4), torch.empty(2, 4, 4)),
}
