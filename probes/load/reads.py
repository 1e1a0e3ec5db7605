"""Which bytes of the model's tensors a run reads, watched from outside: every call of torch passes through here."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

# Calls that ask for the shape or the dtype of a tensor and not for what is in it.
_METADATA = {
    "__get__",
    "__len__",
    "dim",
    "numel",
    "size",
    "stride",
    "data_ptr",
    "element_size",
    "is_contiguous",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "new_empty",
    "new_zeros",
    "new_full",
}


class Reads(TorchFunctionMode):
    """Inside the ``with``, note the bytes of watched tensors that are operands of torch's functions.

    A call whose result lies in the operand's own memory is a view and reads nothing; what is done with the view does.
    An operand counts whole, from its first byte to its last: a row gathered from a table is a read of the table.

    Parameters
    ----------
    watched
        Tensors by a name; contiguous, and none of them may be freed while this lives.

    """

    def __init__(self, watched: Mapping[str, Tensor]) -> None:
        super().__init__()
        order = sorted(watched, key=lambda name: watched[name].data_ptr())
        self._names, self._starts = order, [watched[name].data_ptr() for name in order]
        self._nbytes = {name: watched[name].nbytes for name in order}
        self._ranges: dict[str, set[tuple[int, int]]] = {name: set() for name in order}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Make the call, and note what it read."""
        del types
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.__name__ not in _METADATA:
            mine = {tensor.untyped_storage().data_ptr() for tensor in _tensors(result)}
            for operand in _tensors((args, *kwargs.values())):
                if operand.untyped_storage().data_ptr() not in mine:
                    self._note(operand)
        return result

    def _note(self, operand: Tensor) -> None:
        if operand.numel() == 0:
            return
        start = operand.data_ptr()
        i = bisect_right(self._starts, start) - 1
        if i < 0:
            return
        name, low = self._names[i], start - self._starts[i]
        reach = sum((n - 1) * step for n, step in zip(operand.shape, operand.stride(), strict=True)) + 1
        if low < self._nbytes[name]:
            self._ranges[name].add((low, min(low + reach * operand.element_size(), self._nbytes[name])))

    def share(self, name: str) -> float:
        """How much of a watched tensor was read, 0 .. 1."""
        read, end = 0, 0
        for low, high in sorted(self._ranges[name]):
            read += max(0, high - max(low, end))
            end = max(end, high)
        return read / self._nbytes[name]


def _tensors(value: object) -> Iterator[Tensor]:
    """The tensors in arguments or results, however nested."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
