"""Run a case on a GPU: is it right, and how long does it take from memory rather than from the L2 cache.

A CUDA graph holds so many calls, each with inputs of its own; before each replay a buffer larger than L2 is written,
so that every call finds its inputs in memory. Where a call cannot be captured, its kernels are timed as they are
launched, by events around them.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from scripts.bench.device.case import Call, Case
from scripts.bench.device.draw import Draw

WARM = 3  # calls before any is timed, which compile and allocate
COPIES = 8  # calls in a graph, at most
AT_ONCE = 120e6  # bytes beyond which one call of its own fills the caches
FLUSHED = 1 << 28  # bytes written before each repetition, at least; twice L2 where that is more


class Measured(NamedTuple):
    """What was found of a case."""

    us: list[float]  # of a call, by repetition
    how: str  # "graph" or "events"
    why: str | None  # what torch said where a graph could not be made
    calls: int  # timed together
    error: float  # in units of the tolerance


class Device(Protocol):
    """What the harness needs of a GPU, so that its flow can be tested without one."""

    def draw(self, seed: int) -> Draw:
        """Where inputs come from."""
        ...

    def repeat(self, calls: list[Callable[[], Any]], replays: int) -> tuple[list[float], str, str | None]:
        """Us of all calls together by repetition, how they were timed, and why not by a graph."""
        ...


class Gpu:
    """The CUDA device of this process."""

    def __init__(self) -> None:
        self.device = torch.device("cuda")
        size = max(FLUSHED, 2 * torch.cuda.get_device_properties(self.device).L2_cache_size)
        self.buffer = torch.empty(size, dtype=torch.uint8, device=self.device)

    def draw(self, seed: int) -> Draw:
        """Draw inputs on the device."""
        return Draw(self.device, seed, values=True)

    def repeat(self, calls: list[Callable[[], Any]], replays: int) -> tuple[list[float], str, str | None]:
        """Time replays of a graph of the calls, or the calls themselves."""
        for call in calls:  # what Triton compiles and torch allocates is not captured
            for _ in range(WARM):
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        how, why = "graph", None
        try:
            with torch.cuda.graph(graph):
                for call in calls:
                    call()
            replay = graph.replay
        except RuntimeError as error:  # what cannot be captured is timed as it is, and the page says so
            how, why = "events", str(error).splitlines()[0]
            torch.cuda.synchronize()

            def replay() -> None:
                for call in calls:
                    call()

        replay()
        return [self.timed(replay) for _ in range(replays)], how, why

    def wall(self, work: Callable[[], Any]) -> float:
        """Us on the wall clock until all that `work` launches is done, with nothing of its inputs in L2."""
        self.buffer.zero_()
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        return 1e6 * (time.perf_counter() - began)

    def timed(self, work: Callable[[], Any]) -> float:
        """Us between two events around `work`, with nothing of its inputs in L2."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.buffer.zero_()
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        return 1e3 * float(start.elapsed_time(stop))


def measured(case: Case, device: Device, replays: int) -> Measured:
    """Check one call of a case, then time as many as make a time that is not the clock's own."""
    first = case.build(device.draw(0))
    error = first.error(first.run())
    copies = min(COPIES, max(1, int(AT_ONCE // max(1, case.cost.bytes))))
    calls: list[Call] = [first, *(case.build(device.draw(seed)) for seed in range(1, copies))]
    us, how, why = device.repeat([call.run for call in calls], replays)
    return Measured([time / copies for time in us], how, why, copies, error)
