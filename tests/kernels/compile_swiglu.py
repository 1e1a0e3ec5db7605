"""The activation of V4-Flash's and V4-Pro's experts, with routing weights and without."""

import torch

from fathom.kernels.swiglu.triton import swiglu


def of(t, width, dtype=torch.bfloat16, weighted=False):
    gate, up = torch.empty(t, width, dtype=dtype), torch.empty(t, width, dtype=dtype)
    return lambda: swiglu(gate, up, 10.0, torch.empty(t) if weighted else None)


CASES = {
    "routed, V4-Pro": of(512, 3072, weighted=True),
    "shared, V4-Flash, one token": of(1, 2048),
}
MORE = {
    "fp32": of(512, 3072, torch.float32),
}
