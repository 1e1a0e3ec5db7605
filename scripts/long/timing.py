"""Where the time of a call goes: the callables of an op set, each with a clock around it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kernels.formats.stored import Fp4
from kernels.ops import Ops

REST = "the rest"  # what no op takes: embedding, dispatch, caches, the interpreter
STREAMS = frozenset({"hyper_weights", "head_weights", "collapse", "expand"})
ROUNDING = frozenset({"simulate_fp8", "simulate_fp4", "hadamard"})
COMPONENTS = (
    "select", "attend, CSA", "attend, HCA", "attend, SWA", "linears, FP4 experts", "linears, others", "mHC", "rounding",
    "other ops", REST,
)  # fmt: skip


def component(op: str, given: tuple[Any, ...]) -> str:
    """What a call of an op counts as."""
    if op == "attend":
        entries, selected = given[4], given[6]
        return f"attend, {'SWA' if entries is None else 'HCA' if selected is None else 'CSA'}"
    if op in {"linear", "grouped_linear"}:
        return f"linears, {'FP4 experts' if isinstance(given[1], Fp4) else 'others'}"
    return op if op == "select" else "mHC" if op in STREAMS else "rounding" if op in ROUNDING else "other ops"


@dataclass
class Clock:
    """Processor seconds of this process by component, and all in all, since `start`.

    Processor time, because other work may share the machine: what waits for its turn is not counted.
    """

    spent: dict[str, float] = field(default_factory=dict)
    began: float = 0.0

    def start(self) -> None:
        """Begin anew."""
        self.spent = dict.fromkeys(COMPONENTS, 0.0)
        self.began = time.process_time()

    def stop(self) -> dict[str, float]:
        """Return seconds by component; what no op took is the rest."""
        whole = time.process_time() - self.began
        return self.spent | {REST: whole - sum(self.spent.values())}

    def watch(self, ops: Ops) -> Ops:
        """Return the op set with this clock around every op."""
        timed: dict[str, Any] = {name: self._timed(name, op) for name, op in ops._asdict().items() if callable(op)}
        return ops._replace(**timed)

    def _timed(self, name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any) -> Any:
            began = time.process_time()
            out = op(*given)
            self.spent[component(name, given)] += time.process_time() - began
            return out

        return timed
