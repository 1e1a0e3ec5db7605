"""Whether a state fits this machine, asked before it is allocated."""

import os

import torch

from model.errors import CapacityError
from model.state import State
from model.transformer import Transformer


def machine_memory(device: torch.device) -> int:
    """Bytes of memory that the device has in all."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def new_state(model: Transformer, max_context: int, chunk: int) -> State:
    """Return an empty state, or raise CapacityError naming its size when the machine has less memory than that.

    The size is that of the same state on torch's meta device, which allocates nothing.
    """
    dtype, meta = model.arithmetic.dtype, torch.device("meta")
    size = sum(State(model.config, max_context, chunk, dtype, meta).nbytes().values())
    if size > (memory := machine_memory(model.device)):
        raise CapacityError(
            f"caches for {max_context} positions in calls of {chunk} tokens take {size / 2**30:.1f} GiB,"
            f" {model.device} has {memory / 2**30:.1f} GiB"
        )
    return model.new_state(max_context, chunk)
