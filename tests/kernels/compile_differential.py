"""Differential attention as Llama-3.1-8B with CoDA's cache of 256 + 64 + 64 slots runs it: decode, and a block."""

import torch

from fathom.kernels.differential.triton import Noise, Own, Past, attend, differential_attend


def tokens(t, *, own):
    narrow = {"dtype": torch.bfloat16}
    slots = torch.empty(2, 8, 384, 128, **narrow)
    keys = torch.empty(2, t, 8, 128, **narrow)
    noise = Noise(torch.empty(t, 32), torch.empty(32, 64), torch.empty(32, 64))
    past = Past(slots[0], slots[1], torch.empty(384, dtype=torch.bool))
    given = Own(keys[0], keys[1], 256) if own else None
    return lambda: differential_attend(torch.empty(t, 32, 128, **narrow), noise, torch.empty(128), 1e-6, past, given)


def signal(t, *, own):
    """Without noise queries, as a model calls it, whose adapters make heads of them."""
    narrow = {"dtype": torch.bfloat16}
    slots, keys = torch.empty(2, 8, 384, 128, **narrow), torch.empty(2, t, 8, 128, **narrow)
    past = Past(slots[0], slots[1], torch.empty(384, dtype=torch.bool))
    given = Own(keys[0], keys[1], 256) if own else None
    return lambda: attend(torch.empty(t, 32, 128, **narrow), None, past, given)


BLACKWELL = {"two tokens": tokens(2, own=True), "the signal alone": signal(1, own=False)}
CASES = {
    "decode": tokens(1, own=False),
    "a block": tokens(512, own=True),
    "a block, the signal alone": signal(256, own=True),
}
MORE = BLACKWELL
