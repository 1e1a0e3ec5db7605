"""Activations as V4-Pro and V4-Flash round and rotate them."""

import torch

from fathom.kernels.quantise.triton import (
    fp8_codes,
    hadamard,
    norm_rotate,
    pack_fp8,
    rotate,
    rotate_halves,
    round_index,
    simulate_fp4,
    simulate_fp8,
    unpack_fp8,
)


def x(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16)


def turns(t, pairs):
    return torch.empty(t, pairs), torch.empty(t, pairs)


CASES = {
    "input of a linear": lambda: simulate_fp8(x(1, 7168), 128),
    "index query, rounded": lambda: simulate_fp4(x(1, 64, 128)),
    "index query, turned": lambda: hadamard(x(1, 64, 128)),
    "index query, turned and rounded": lambda: round_index(x(1, 64, 128), 32),
    "codes of an expert's input": lambda: fp8_codes(x(1, 7168), 128),
    "row that ranks send each other": lambda: pack_fp8(x(1, 7168), 128),
    "row that a rank was sent": lambda: unpack_fp8(torch.empty(1, 7224, dtype=torch.uint8), 128, torch.bfloat16),
    "query": lambda: norm_rotate(x(1, 128, 512), None, 1e-6, *turns(1, 32), 0),
    "KV": lambda: norm_rotate(x(1, 512), torch.empty(512), 1e-6, *turns(1, 32), 64),
    "values, rotated back": lambda: rotate(x(1, 128, 512), *turns(1, 32)),
    "query of the Llama family": lambda: rotate_halves(x(1, 32, 128), *turns(1, 64)),
}
MORE = {
    "window KV": lambda: simulate_fp8(x(1, 448), 64),
    "index query": lambda: rotate(x(1, 64, 128), *turns(1, 32)),
}
