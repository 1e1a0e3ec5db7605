"""What is alive while a model runs on torch's meta device, where tensors have shapes and no bytes."""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fathom.runtime.plan.shapes import outline

SLACK: Final = 1 << 16  # bytes of scratch that no op counts: a row of scales, a list of positions
_MODEL: Final = "fathom.model."
# Of the model's code what is no part of a layer: what it makes is named after who asked for it.
_PASSED: Final = tuple(f"{_MODEL}{name}" for name in ("observe", "linear", "arithmetic", "ranks.ranks", "call"))

_WIDENED: Final = {torch.ops.aten.mean.dim, torch.ops.aten.sum.dim_IntList}


class Moment(NamedTuple):
    """What is alive while something runs."""

    name: str  # of what runs
    parts: dict[str, int]  # bytes of what is alive, by the part of the model that made it, and of what runs itself

    @property
    def nbytes(self) -> int:
        """All of it."""
        return sum(self.parts.values())


class Alive(TorchDispatchMode):
    """Inside the ``with``, bytes of tensors are counted from where they are made to where the last view of them ends.

    What the values of tensors decide has no answer on this device: `answers` gives one, by the operation of torch.
    """

    def __init__(self, answers: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.answers = answers
        self._begin()

    def _begin(self) -> None:
        self.total = self.peak = 0
        self.largest = Moment("nothing", {})
        self._known: dict[int, tuple[str, int, Any]] = {}  # maker, bytes and end of each storage

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count anew inside the ``with``."""
        self._begin()
        with self:
            yield

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing here is compiled, and to say so torch would import its compiler, for 3 s

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        known = self.answers.get(func) or outline(func)
        out = (known or func)(*args, **(kwargs or {}))
        given = {_storage(x) for x in args if isinstance(x, Tensor)}
        for x in out if isinstance(out, list | tuple) else (out,):
            if isinstance(x, Tensor) and x.is_meta and _storage(x) not in given:
                self._made(x)
        if func in _WIDENED and args[0].dtype == torch.bfloat16:  # by way of a copy, and a result, in fp32
            self.take((args[0].numel() + out.numel()) * 4)
        return out

    def _made(self, x: Tensor) -> None:
        """Count a tensor that was not there before."""
        storage, key = x.untyped_storage(), _storage(x)
        if key not in self._known and (size := storage.nbytes()):
            self._known[key] = maker(), size, weakref.ref(storage, lambda _: self._gone(key))
            self.total += size
            if self.total > self.peak:
                self.take(0)

    def take(self, scratch: int) -> None:
        """What runs takes so many bytes beside what is alive."""
        if self.total + scratch > self.peak:
            parts = Counter[str]()
            for name, size, _ in self._known.values():
                parts[name] += size
            self.peak, parts["scratch"] = self.total + scratch, scratch + SLACK
            self.largest = Moment(maker(), {name: size for name, size in parts.items() if size})

    def hold(self, name: str, nbytes: int) -> None:
        """So many bytes are alive to the end."""
        self._known[-len(self._known)] = name, nbytes, None
        self.total += nbytes

    def _gone(self, key: int) -> None:
        self.total -= self._known.pop(key, ("", 0, None))[1]


def _storage(x: Tensor) -> int:
    """What is one for all views of a tensor, while there are some: on this device memory has no address."""
    place: int = x.untyped_storage()._cdata  # noqa: SLF001
    return place


def maker() -> str:
    """The innermost method of a layer that runs."""
    frame: Any = sys._getframe(1)  # noqa: SLF001 (a walk up the stack is what it is for)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_MODEL) and not name.startswith(_PASSED):
            return str(frame.f_code.co_qualname)
        frame = frame.f_back
    return "call"
