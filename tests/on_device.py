"""Triton's kernels on a GPU, in tests whose tensors lie on the host: ``pytest --device cuda tests/kernels``.

Each launch is given copies of what it names, and what it wrote comes back, as the interpreter does it. So every test of
an op is one of the device too. What an op computes in torch beside its launches stays on the host here; `scripts.bench
gpu` gives ops tensors of the device.
"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from tests.other_device import mapped

HOST = torch.device("cpu")


class Copies:
    """What one call is given, on a device: each storage once, so that views of one stay views of one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.made: dict[int, tuple[Tensor, Tensor]] = {}  # by address: all bytes of a storage, here and there

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.device != HOST:
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in self.made:
            here = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.made[storage.data_ptr()] = here, here.to(self.device, copy=True)
        there = self.made[storage.data_ptr()][1].untyped_storage()
        empty = torch.empty(0, dtype=value.dtype, device=self.device)
        return empty.set_(there, value.storage_offset(), value.size(), value.stride())

    def given(self, value: Any) -> Any:
        """The same, however nested: in tuples, and in what describes a tensor's tiles."""
        if dataclasses.is_dataclass(value) and hasattr(value, "base"):
            return dataclasses.replace(value, base=self(value.base))
        return mapped(self, value)

    def back(self) -> None:
        """Bring home what was written."""
        for here, there in self.made.values():
            here.copy_(there)


def on(device: torch.device, call: Callable[..., Any]) -> Callable[..., Any]:
    """A call on copies of what it is given."""

    def called(*given: Any, **named: Any) -> Any:
        copies = Copies(device)
        result = call(*map(copies.given, given), **{name: copies.given(value) for name, value in named.items()})
        copies.back()
        return result

    return called


@contextlib.contextmanager
def launches(device: torch.device) -> Iterator[Counter[str]]:
    """Let every launch run there, and count them by kernel."""
    launch, counted = JITFunction.run, Counter[str]()

    def run(self: Any, *given: Any, **named: Any) -> Any:
        counted[self.__name__] += 1
        return on(device, lambda *moved, **more: launch(self, *moved, **more))(*given, **named)

    JITFunction.run = run
    try:
        yield counted
    finally:
        JITFunction.run = launch
