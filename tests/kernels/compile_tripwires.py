"""What must never happen, of one token of V4-Flash and V4-Pro: all of a layer in one launch."""

import torch

from fathom.kernels.formats import rows
from fathom.kernels.tripwires.triton import checksums, columns, finite, measure, routing, selection, stored

ON_CPU = torch.device("cpu")


def position():
    return torch.empty((), dtype=torch.int64)


def new(width, dtype=torch.bfloat16):
    return torch.empty(1, width, dtype=dtype)


def streams(hidden):
    return finite(torch.empty(1, 4, hidden, dtype=torch.bfloat16))


def layer(hidden, k, entries, keys, dtype=torch.bfloat16):
    """Of CSA, in the order of the model."""
    return lambda: measure(
        [
            columns(torch.empty(1, 4, 4)),
            stored(new(512, dtype), entries(), position(), 4),
            stored(new(128, dtype), keys(), position(), 4),
            *finite(torch.empty(1, 64, 128, dtype=dtype)),
            *finite(torch.empty(1, 64)),
            selection(torch.empty(1, k, dtype=torch.int32), position(), 4, 4096),
            *streams(hidden),
            columns(torch.empty(1, 4, 4)),
            routing(torch.empty(1, 6, dtype=torch.int64), torch.empty(1, 6), 1.5, 256),
            *streams(hidden),
        ],
        torch.empty(64),
        3,
    )


CASES = {
    "CSA, FP8 entries and FP4 keys": layer(
        4096, 512, lambda: rows.fp8_entries(64, 512, 64, ON_CPU), lambda: rows.fp4_keys(64, 128, ON_CPU)
    ),
    "what ranks compare": lambda: checksums([new(512)]),
}
MORE = {
    "CSA, entries in fp32 and FP8 keys": layer(
        7168, 1024, lambda: torch.empty(64, 512), lambda: rows.fp8_keys(64, 128, ON_CPU), torch.float32
    ),
    "logits": lambda: measure(finite(torch.empty(1, 129280)), torch.empty(64), 3),
}
