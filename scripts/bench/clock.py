"""Where the time of a call goes: every op of a set with a clock around it, no profiler, wall time.

An op calls no other op of its set, so what a clock shows is the op's own time; what no op took is `OTHER`: embedding,
dispatch of tokens to experts, caches, checks, the interpreter. On a CPU the clock costs less than a microsecond a call.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from kernels.ops import Ops

OTHER = "other"


def component(op: str, given: tuple[Any, ...]) -> str:
    """What a call counts as: its op, and of attention the kind of layer."""
    if op != "attend":
        return op
    entries, selected = given[4], given[6]
    return f"attend, {'SWA' if entries is None else 'HCA' if selected is None else 'CSA'}"


class Clock:
    """Seconds by component since `start`."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.spent: dict[str, float] = {}
        self.began = 0.0

    def start(self) -> None:
        """Begin anew."""
        self.spent, self.began = {}, self._now()

    def stop(self) -> dict[str, float]:
        """Return seconds by component, the largest first, and OTHER."""
        whole = self._now() - self.began
        ordered = dict(sorted(self.spent.items(), key=lambda item: -item[1]))
        return ordered | {OTHER: whole - sum(ordered.values())}

    def watch(self, ops: Ops) -> Ops:
        """Return the op set with this clock around every op."""
        timed: dict[str, Any] = {name: self._timed(name, op) for name, op in ops._asdict().items() if callable(op)}
        return ops._replace(**timed)

    def _now(self) -> float:
        if self.device == "cuda":  # what was asked of it is done: ops no longer overlap, so the whole takes longer
            torch.cuda.synchronize()
        return time.perf_counter()

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call that is no op, and calls none, with this clock around it as component `name`."""
        return self._timed(name, call)

    def _timed(self, name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any) -> Any:
            began = self._now()
            out = op(*given)
            key = component(name, given)
            self.spent[key] = self.spent.get(key, 0.0) + self._now() - began
            return out

        return timed
