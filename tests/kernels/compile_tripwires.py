"""What must never happen, of a call of V4-Flash and V4-Pro: all of a layer in one launch."""

import torch

from fathom.kernels.formats import rows
from fathom.kernels.tripwires.triton import (
    NOTHING,
    checksums,
    columns,
    finite,
    measure,
    routing,
    selection,
    stored,
    within,
)

ON_CPU = torch.device("cpu")


def run(*measures):
    measure(list(measures), torch.full((64,), NOTHING), 3)


def layer(hidden, k, entries, keys, dtype=torch.bfloat16, t=1):
    """Of CSA, in the order of the model."""
    n, first, streams = -(-t // 4), torch.empty((), dtype=torch.int64), torch.empty(t, 4, hidden, dtype=dtype)
    return lambda: run(
        columns(torch.empty(t, 4, 4), 1e-5),
        stored(torch.empty(n, 512, dtype=dtype), entries(), first, t, 4),
        stored(torch.empty(n, 128, dtype=dtype), keys(), first, t, 4),
        finite(torch.empty(t, 64, 128, dtype=dtype)),
        finite(torch.empty(t, 64)),
        selection(torch.empty(t, k, dtype=torch.int32), first, 4, 4096, k),
        finite(streams),
        columns(torch.empty(t, 4, 4), 1e-5),
        routing(torch.empty(t, 6, dtype=torch.int64), torch.empty(t, 6), 1.5, 256, 1e-5),
        finite(streams),
    )


CASES = {
    "CSA, FP8 entries and FP4 keys": layer(
        4096, 512, lambda: rows.fp8_entries(64, 512, 64, ON_CPU), lambda: rows.fp4_keys(64, 128, ON_CPU)
    ),
    "coded rows": lambda: run(within(torch.empty(5), torch.empty(5))),
    "what ranks compare": lambda: checksums([torch.empty(1, 512, dtype=torch.bfloat16)]),
}
MORE = {
    "CSA, entries in fp32 and FP8 keys": layer(
        7168, 1024, lambda: torch.empty(64, 512), lambda: rows.fp8_keys(64, 128, ON_CPU), torch.float32
    ),
    "a chunk, FP8 entries and FP8 keys": layer(
        4096, 512, lambda: rows.fp8_entries(64, 512, 64, ON_CPU), lambda: rows.fp8_keys(64, 128, ON_CPU), t=96
    ),
    "logits": lambda: run(finite(torch.empty(1, 129280))),
}
