"""How many threads of a process compute."""

import os
from typing import Final

import psutil
import torch

from fathom.kernels.compiled import cores
from fathom.model.config import ModelConfig
from fathom.runtime.allocator import keep_memory
from fathom.runtime.load import AnyLoaded

# Bytes of weights that a decoded token reads, from which on more threads than one pay.
SMALL: Final = 64 << 20
LOOK: Final = 0.1  # seconds for which it is looked at how busy the cores are


def set_process(asked: int | None, loaded: AnyLoaded) -> None:
    """Set torch's number of threads (None: by the size of the model), and let the allocator keep freed memory.

    torch and the compiled loops have the same threads. On an idle machine a second thread makes a token's linears
    faster whatever their size; where it shares its core with anything else, all wait for it, and they take longer than
    with one (`scripts.bench kernels --only threads` measures both). So a large model takes the cores that nothing else
    is using as it begins. A small one takes one: its tokens come fast with it, and most of their time is in ops too
    short to be shared.
    """
    keep_memory()
    if asked is not None:
        torch.set_num_threads(asked)
    elif token_bytes(loaded) < SMALL:
        torch.set_num_threads(1)
    else:
        torch.set_num_threads(min(torch.get_num_threads(), free_cores()))


def free_cores() -> int:
    """Cores that this process may use and that nothing is using now; at least 1."""
    busy = psutil.cpu_percent(interval=LOOK) / 100 * (os.cpu_count() or 1)
    return max(1, int(cores() - round(busy)))


def token_bytes(loaded: AnyLoaded) -> int:
    """Bytes of weights, as stored, that this rank reads for one token: of the routed experts those that are chosen."""
    config = loaded.model.config
    active_part = config.num_experts_per_tok / config.n_routed_experts if isinstance(config, ModelConfig) else 0.0
    sizes = {name: nbytes for name, nbytes in loaded.held.items() if "embed" not in name}
    routed = sum(nbytes for name, nbytes in sizes.items() if ".ffn.experts." in name)
    return sum(sizes.values()) - routed + int(routed * active_part)
