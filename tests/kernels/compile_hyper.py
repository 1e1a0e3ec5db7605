"""mHC as V4-Pro and V4-Flash launch it: one token, and a chunk of a prompt."""

import torch

from fathom.kernels.hyper import triton as hyper

S, ROWS = 4, 24


def shapes(t, d, dtype=torch.bfloat16):
    streams, fn = torch.empty(t, S, d, dtype=dtype), torch.empty(ROWS, S * d)
    return streams, fn, torch.empty(3), torch.empty(ROWS), torch.empty(t, S), torch.empty(t, S, S)


def read(t, d):
    streams, fn, scale, base, _, _ = shapes(t, d)
    return lambda: hyper.read_streams(streams, fn, scale, base, 20, 1e-6, 1e-6, torch.empty(d), 1e-6)


def weights(t, d, dtype):
    streams, fn, scale, base, _, _ = shapes(t, d, dtype)
    return lambda: hyper.hyper_weights(streams, fn, scale, base, 20, 1e-6, 1e-6)


def head(t, d):
    streams, fn, _, base, _, _ = shapes(t, d)
    return lambda: hyper.head_weights(streams, fn[:S], torch.empty(1), base[:S], 1e-6, 1e-6)


CASES = {
    "read for a sublayer, V4-Pro": read(1, 7168),
    "read for a sublayer, V4-Flash, a chunk": read(4096, 4096),
    "head": head(2, 7168),
}
MORE = {
    "read for a sublayer, V4-Flash": read(1, 4096),
    "first sublayer, in fp32": weights(1, 7168, torch.float32),
    "a chunk, in fp32": weights(4096, 4096, torch.float32),
}
