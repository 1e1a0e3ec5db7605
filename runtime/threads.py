"""How many threads a CPU computes with, when nobody says: one for small models, torch's own number for others."""

from typing import Final

import torch

from model.config import ModelConfig
from runtime.load import AnyLoaded

# Bytes of weights that a decoded token reads, from which on more threads than one pay.
SMALL: Final = 64 << 20


def set_threads(asked: int | None, loaded: AnyLoaded) -> None:
    """Let torch compute with so many threads, or with as many as suit the model; the run's report says how many.

    An op of a small model ends before a second thread has begun, and where that thread shares its core with anything
    else, all wait for it: on a busy machine of two cores the demo decodes ten times slower with two threads than with
    one (`scripts.bench threads`).
    """
    if asked is not None:
        torch.set_num_threads(asked)
    elif token_bytes(loaded) < SMALL:
        torch.set_num_threads(1)


def token_bytes(loaded: AnyLoaded) -> int:
    """Bytes of weights, as stored, that this rank reads for one token: of the routed experts those that are chosen."""
    config = loaded.model.config
    share = config.num_experts_per_tok / config.n_routed_experts if isinstance(config, ModelConfig) else 0.0
    sizes = {name: nbytes for name, nbytes in loaded.held.items() if "embed" not in name}
    routed = sum(nbytes for name, nbytes in sizes.items() if ".ffn.experts." in name)
    return sum(sizes.values()) - routed + int(routed * share)
