"""What operations of torch make, by shape and dtype: those that the model asks for by itself, outside of its ops.

torch knows too, on its meta device, but for most of them in Python, behind an import of its compiler that takes
seconds. It is asked for what is not here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

META: Final = torch.device("meta")


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without bytes."""
    return torch.empty(shape, dtype=dtype, device=META)


@cache
def outline(func: Any) -> Callable[..., Any] | None:
    """What tells the result of an operation; None: torch does."""
    schema = func._schema  # noqa: SLF001 (torch has no other word for it)
    name = schema.name.removeprefix("aten::")
    if schema.is_mutable:
        return lambda x, *_, **__: x
    if torch.Tag.pointwise in func.tags or name in _POINTWISE:
        return _compared if name in _COMPARED else _pointwise
    return _OTHERS.get(name)


_COMPARED: Final = {"eq", "ne", "lt", "le", "gt", "ge"}
_POINTWISE: Final = {"floor_divide", "__and__", "where"}  # of which torch does not say so


def _broadcast(*args: Any) -> tuple[int, ...]:
    return np.broadcast_shapes(*(x.shape for x in args if isinstance(x, Tensor)))


def _compared(*args: Any) -> Tensor:
    return empty(*_broadcast(*args), dtype=torch.bool)


def _pointwise(*args: Any, **_: Any) -> Tensor:
    first, *others = args[1:] if len(args) == 3 and args[0].dtype == torch.bool else args  # `where`
    both = len(others) == 1 and isinstance(others[0], Tensor | int | float)
    dtype = torch.result_type(first, others[0]) if both else first.dtype
    return empty(*_broadcast(*args), dtype=dtype)


def _arange(*ends: float, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    start, stop, step = (0, *ends, 1) if len(ends) == 1 else (*ends, 1)[:3]
    return empty(math.ceil((stop - start) / step), dtype=dtype or torch.int64)


def _cat(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    assert len({part.dtype for part in parts}) == 1, "parts of several dtypes"
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return empty(*shape, dtype=parts[0].dtype)


def _indexed(x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Tensors of indices side by side, in front."""
    assert all(isinstance(one, Tensor) and one.dtype != torch.bool for one in indices), "an index that is no tensor"
    found = _broadcast(*indices)
    return empty(*found, *x.shape[len(indices) :], dtype=x.dtype)


def _reduced(
    x: Tensor,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,  # noqa: FBT001, FBT002 (as torch has it)
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    dims = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {at % x.ndim for at in dims}
    kept = (1 if at in gone else size for at, size in enumerate(x.shape) if keepdim or at not in gone)
    return empty(*kept, dtype=dtype or x.dtype)


def _allocated(shape: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return empty(*shape, dtype=dtype or torch.float32)


def _allocated_like(
    x: Tensor, shape: Sequence[int] | None = None, *, dtype: torch.dtype | None = None, **_: Any
) -> Tensor:
    return empty(*(x.shape if shape is None else shape), dtype=dtype or x.dtype)


_OTHERS: Final[Mapping[str, Callable[..., Any]]] = {
    "arange": _arange,
    "argsort": lambda x, *_, **__: empty(*x.shape, dtype=torch.int64),
    "cat": _cat,
    "index": _indexed,
    "repeat": lambda x, times: empty(*(n * size for n, size in zip(times, x.shape, strict=True)), dtype=x.dtype),
    "any": lambda x, dim: _reduced(x, dim).bool(),
    "mean": _reduced,
    "zeros": _allocated,
    **dict.fromkeys(("zeros_like", "new_zeros", "new_empty", "empty_like"), _allocated_like),
}
