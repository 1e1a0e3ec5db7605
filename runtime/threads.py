"""How many threads a CPU computes with, when nobody says: one for small models, torch's own number for others."""

from typing import Final

import torch

from model.config import ModelConfig
from runtime.load import AnyLoaded

# Bytes of weights that a decoded token reads, from which on more threads than one pay.
SMALL: Final = 64 << 20


def set_threads(asked: int | None, loaded: AnyLoaded) -> None:
    """Let torch compute with so many threads, or with as many as suit the model; the run's report says how many.

    On an idle machine a second thread makes a token's linears faster whatever their size; where it shares its core with
    anything else, all wait for it, and they take longer than with one (`scripts.bench kernels --only threads` measures
    both). A large model is worth that risk. A small one is not: its tokens come fast with one thread, most of their
    time is in ops too short to be shared, and a wait at each of them makes it many times slower.
    """
    if asked is not None:
        torch.set_num_threads(asked)
    elif token_bytes(loaded) < SMALL:
        torch.set_num_threads(1)


def token_bytes(loaded: AnyLoaded) -> int:
    """Bytes of weights, as stored, that this rank reads for one token: of the routed experts those that are chosen."""
    config = loaded.model.config
    active_part = config.num_experts_per_tok / config.n_routed_experts if isinstance(config, ModelConfig) else 0.0
    sizes = {name: nbytes for name, nbytes in loaded.held.items() if "embed" not in name}
    routed = sum(nbytes for name, nbytes in sizes.items() if ".ffn.experts." in name)
    return sum(sizes.values()) - routed + int(routed * active_part)
