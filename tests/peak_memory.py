"""How much memory torch allocates at once while a function runs."""

import itertools

from torch.profiler import ProfilerActivity, profile


def peak_bytes(run) -> int:
    """The largest sum of allocations alive at one moment, beyond those from before, on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))
