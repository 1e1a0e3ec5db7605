"""The compressor's tail as V4-Pro and V4-Flash launch it, whose widths agree: entries of both kinds, and index keys."""

import torch

from fathom.kernels.compress.triton import compress_at_once, pool, store
from fathom.kernels.formats import rows
from fathom.kernels.formats.stored import TokenRing

HERE = torch.device("cpu")


def tail(t, ratio, series, width, rounding, cache, more=0):
    def run():
        kv, own = torch.empty(t, series * width), torch.empty((series + more) * ratio, series * width)
        ring, position, norm = TokenRing(own, own), torch.zeros((), dtype=torch.int64), torch.empty(width)
        compress_at_once(kv, kv, ring, position, ratio, norm, 1e-6, torch.empty(32), rounding, cache, torch.bfloat16)

    return run


def pooled(windows, ratio, series, width):
    """Windows of a chunk as `kernels.compress.reference.windows` hands them over: columns of what was projected."""
    tokens = torch.empty(windows, ratio, series * width)
    before = tokens[..., :width] if series == 2 else None
    return lambda: pool(tokens[..., -width:], tokens[..., -width:], before, before)


def stored(n, width, cache):
    return lambda: store(cache, 3, torch.empty(n, width, dtype=torch.bfloat16))


BLACKWELL = {
    "CSA key, fp4, a chunk": tail(4096, 4, 2, 128, "index", rows.fp4_keys(8, 128, HERE)),
    "CSA entries of a chunk, pooled": pooled(1024, 4, 2, 512),
    "CSA entries of a chunk, stored in fp8": stored(1024, 512, rows.fp8_entries(1027, 512, 64, HERE)),
}
CASES = BLACKWELL | {
    "CSA entry, fp8, decode": tail(1, 4, 2, 512, "kv", rows.fp8_entries(8, 512, 64, HERE)),
    "HCA entry, decode": tail(1, 128, 1, 512, "none", torch.empty(8, 512, dtype=torch.bfloat16)),
    "CSA key, fp8, a chunk": tail(4096, 4, 2, 128, "index", rows.fp8_keys(8, 128, HERE)),
    "HCA entries of a chunk, pooled": pooled(32, 128, 1, 512),
    "CSA keys of a chunk, stored in fp4": stored(1024, 128, rows.fp4_keys(1027, 128, HERE)),
}
MORE = {
    "CSA keys of a chunk, pooled": pooled(1024, 4, 2, 128),
    "CSA keys of a chunk, stored in fp8": stored(1024, 128, rows.fp8_keys(1027, 128, HERE)),
    "CSA key, fp8 by row, decode": tail(1, 4, 2, 128, "row", rows.fp8_keys(8, 128, HERE)),
    "CSA key, fp4, decode": tail(1, 4, 2, 128, "index", rows.fp4_keys(8, 128, HERE)),
    "CSA entry, fp8, six tokens of which five may be taken back": tail(
        6, 4, 2, 512, "kv", rows.fp8_entries(8, 512, 64, HERE), more=2
    ),
}
