"""What a call holds at once, counted where torch allocates: whatever the allocator keeps of it afterwards."""

import itertools

import torch
from torch import Tensor
from torch.autograd.profiler import profile

from model.state import State
from model.transformer import Transformer


def live_bytes(model: Transformer, state: State, part: Tensor) -> int:
    """The largest sum of tensors alive at one moment of a call, beyond those from before."""
    if model.device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(part, state)
        return torch.cuda.max_memory_allocated() - before
    with profile(profile_memory=True) as profiler:
        model(part, state)
    assert profiler.kineto_results is not None
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    sizes: list[int] = [event.nbytes() for event in events]
    return max(itertools.accumulate(sizes))
