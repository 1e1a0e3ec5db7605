"""A device that is not there: tensors of it lie in the host's memory, and meet the host's as a GPU's would.

Inside of `other_device` a tensor is made there where it is asked for there, or from others that are there. A function
of torch that is given tensors of both sides fails, as it would beside a GPU, and so does a launch of a kernel of
Triton's, which runs in its interpreter, that is given one of the host's.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.runtime import interpreter

DEVICE = torch.device("privateuseone", 0)
HOST = torch.device("cpu")
# what may be given tensors of both sides: a copy between them, and places in one of them
BETWEEN = {"copy_", "__getitem__", "__setitem__"}
HOST_ONLY = {"numpy", "__array__"}


class There(Tensor):
    """A tensor of the device."""

    device = property(lambda _: DEVICE)


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """The same with every tensor and device changed, however nested."""
    if isinstance(value, Tensor | torch.device):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(change, part) for part in value))
    if isinstance(value, list | tuple):
        return type(value)(mapped(change, part) for part in value)
    if isinstance(value, dict):
        return {key: mapped(change, part) for key, part in value.items()}
    if isinstance(value, slice):
        return slice(*(mapped(change, part) for part in (value.start, value.stop, value.step)))
    return value


class _Call:
    """A call of a function of torch: what it is given, as the host has it, and the devices that it names."""

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.name, self.given, self.owners, self.devices = func.__name__, [], {}, []
        if self.name == "to":
            args = tuple(torch.device(part) if isinstance(part, str) else part for part in args)
        if isinstance(kwargs.get("device"), str):
            kwargs = kwargs | {"device": torch.device(kwargs["device"])}
        self.func, self.args, self.kwargs = func, mapped(self.here, args), mapped(self.here, kwargs)
        self.there = any(isinstance(x, There) for x in self.given)  # whether anything of it is
        self.named = bool(self.devices) or self.name == "cpu"  # a device: what it returns is there or here by that
        self.returns_there = self.devices[-1] == DEVICE if self.devices else self.there and self.name != "cpu"

    def here(self, value: Tensor | torch.device) -> Tensor | torch.device:
        if isinstance(value, torch.device):
            self.devices.append(value)
            return HOST
        self.given.append(value)
        if not isinstance(value, There):
            return value
        plain = value.as_subclass(Tensor)
        self.owners[id(plain)] = value
        return plain

    def check(self) -> None:
        strange = [x for x in self.given if not isinstance(x, There) and x.ndim > 0]
        if self.there and strange and self.name not in BETWEEN and not self.devices:
            size = tuple(strange[0].shape)
            raise RuntimeError(f"{self.name} is given tensors of {DEVICE} and of the host, {size} of it")
        if self.there and self.name in HOST_ONLY:
            raise TypeError(f"{self.name} of a tensor of {DEVICE}")
        drawn = self.there and self.name.endswith("_")
        if (drawn or DEVICE in self.devices) and self.kwargs.get("generator") is not None:
            raise RuntimeError(f"{self.name} draws on {DEVICE} by a generator of the host")

    def returned(self, value: Tensor | torch.device) -> Tensor | torch.device:
        if isinstance(value, torch.device):
            return DEVICE if self.there else value
        if self.named and self.given and self.returns_there != self.there:  # from one side to the other all is copied
            value = value.clone()
        if not self.returns_there:
            return value
        return self.owners[id(value)] if id(value) in self.owners else value.as_subclass(There)


class _Device(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        del types
        call = _Call(func, args, kwargs or {})
        call.check()
        return mapped(call.returned, func(*call.args, **call.kwargs))


def launched(executor: Any, *given: Any, **named: Any) -> None:
    """A launch as a GPU's driver takes it: every pointer is of the device."""

    def plain(value: Any) -> Any:
        if isinstance(value, There):
            return value.as_subclass(Tensor)
        if isinstance(value, torch.device):
            return value
        raise ValueError(f"Pointer argument of {executor.fn.__name__} cannot be accessed from Triton (cpu tensor?)")

    with torch._C.DisableTorchFunction():
        _launch(executor, *mapped(plain, given), **mapped(plain, named))


_launch = interpreter.GridExecutor.__call__


@contextlib.contextmanager
def other_device() -> Iterator[None]:
    """Let there be the device."""
    interpreter.GridExecutor.__call__ = launched
    try:
        with _Device():
            yield
    finally:
        interpreter.GridExecutor.__call__ = _launch


def moved(value: Any, seen: dict[int, Any] | None = None) -> Any:
    """Objects of this project, with every tensor in them, moved there in place; tuples anew."""
    seen = {} if seen is None else seen
    if id(value) not in seen:
        match value:
            case Tensor() | torch.device():
                found = DEVICE if isinstance(value, torch.device) else value.as_subclass(There)
            case tuple():
                parts = [moved(part, seen) for part in value]
                found = type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
            case _:
                found = value
        seen[id(value)] = seen[id(found)] = found
        if isinstance(found, list):
            found[:] = [moved(part, seen) for part in found]
        elif isinstance(found, dict):
            found.update({key: moved(part, seen) for key, part in found.items()})
        elif type(found).__module__.startswith("fathom.") and hasattr(found, "__dict__"):
            for name, part in list(vars(found).items()):
                object.__setattr__(found, name, moved(part, seen))
    return seen[id(value)]
