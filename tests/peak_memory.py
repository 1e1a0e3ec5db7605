"""How much memory torch allocates at once while a function runs."""

import itertools

from torch.autograd.profiler import profile  # torch.profiler imports torch's compiler first, which takes 3 s


def peak_bytes(run) -> int:
    """The largest sum of allocations alive at one moment, beyond those from before, on the CPU."""
    with profile(profile_memory=True) as profiler:
        run()
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))
