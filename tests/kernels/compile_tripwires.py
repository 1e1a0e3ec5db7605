"""What must never happen, of one token of V4-Flash."""

import torch

from kernels.formats import rows
from kernels.tripwires.triton import columns, routing, selection, stored

ON_CPU = torch.device("cpu")


def cells():
    return torch.empty(64)


def position():
    return torch.empty((), dtype=torch.int64)


def back(make, width, dtype=torch.bfloat16):
    return lambda: stored(torch.empty(1, width, dtype=dtype), make(), position(), 4, cells(), 3)


CASES = {
    "columns": lambda: columns(torch.empty(1, 4, 4), cells(), 3),
    "routing": lambda: routing(torch.empty(1, 6, dtype=torch.int64), torch.empty(1, 6), 1.5, 256, cells(), 3),
    "selection": lambda: selection(torch.empty(1, 512, dtype=torch.int32), position(), 4, 4096, cells(), 3),
    "FP8 entries": back(lambda: rows.fp8_entries(64, 512, 64, ON_CPU), 512),
    "FP4 keys": back(lambda: rows.fp4_keys(64, 128, ON_CPU), 128),
}
MORE = {
    "FP8 keys": back(lambda: rows.fp8_keys(64, 128, ON_CPU), 128),
    "entries in fp32": back(lambda: torch.empty(64, 512), 512, torch.float32),
}
