"""Triton's interpreter without what it does again and again, and with the arithmetic of a GPU where that differs."""

import contextlib
from collections.abc import Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numba
import numpy as np
import triton.language as tl
from triton.language.core import constexpr
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from fathom.kernels.norm.triton import _rms_norm


@numba.njit
def _add_products(a, b, total):
    for row in range(a.shape[0]):
        for k in range(a.shape[1]):
            for column in range(b.shape[1]):
                total[row, column] += a[row, k] * b[k, column]


def matmul(a: np.ndarray, b: np.ndarray, dtype: np.dtype | None = None) -> np.ndarray:
    """``a @ b`` of [..., m, k] and [..., k, n], products added in the order of k, each rounded.

    In which order a BLAS adds follows from the processor and the shape, and so may the bits of a row from which other
    rows stand beside it.
    """
    dtype = np.result_type(a, b) if dtype is None else np.dtype(dtype)
    if not np.issubdtype(dtype, np.floating):
        return np.matmul(a, b, dtype=dtype)
    *several, m, k = a.shape
    a = np.ascontiguousarray(a, dtype).reshape(-1, m, k)
    b = np.ascontiguousarray(b, dtype).reshape(len(a), k, -1)
    total = np.zeros((len(a), m, b.shape[2]), dtype)
    for own in zip(a, b, total, strict=True):
        _add_products(*own)
    return total.reshape(*several, m, -1)


@numba.njit
def _add_truncated(a, b, total, width):
    for row in range(a.shape[0]):
        for column in range(b.shape[1]):
            for first in range(0, a.shape[1], width):
                exact = np.float64(total[row, column])
                for k in range(first, min(first + width, a.shape[1])):
                    exact += np.float64(a[row, k]) * np.float64(b[k, column])
                near = np.float32(exact)
                total[row, column] = np.nextafter(near, np.float32(0)) if abs(near) > abs(exact) else near


def truncated_dot(builder, a, b, total, *_):
    """As Hopper's tensor cores have it for bf16: 16 columns at once are added to fp32 sums, which are cut off."""
    del builder
    out = np.array(total.data, np.float32, order="C")
    _add_truncated(*(np.ascontiguousarray(x.data, np.float32) for x in (a, b)), out, 16)
    return interpreter.TensorHandle(out, total.dtype.scalar)


LOG2E = np.float32(np.log2(np.e))


def exp(builder: interpreter.InterpreterBuilder, arg: interpreter.TensorHandle) -> interpreter.TensorHandle:
    """As a GPU has it: ``2^(x log2(e))`` of a product that is rounded, not the number nearest to e^x."""
    with np.errstate(all="ignore"):
        return builder.unary_op(arg, lambda x: np.exp2(x * LOG2E))


# What Triton makes anew for each operation, by what it is made from.
_blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
_shapes: dict[tuple[int, ...], Any] = {}
_dtypes: dict[str, np.dtype] = {}
_init_block, _init_tensor, _np_dtype = tl.block_type.__init__, tl.tensor.__init__, interpreter._get_np_dtype
_broadcast = TritonSemantic.broadcast_impl_value


def init_block(self: tl.block_type, element_ty: tl.dtype, shape: Sequence[Any]) -> None:
    """`block_type.__init__`: those of one type and shape share their attributes, which nothing changes."""
    key = (element_ty.name, *(size.value if isinstance(size, constexpr) else size for size in shape))
    if key not in _blocks:
        _init_block(self, element_ty, shape)
        self.shape = _shapes.setdefault(key[1:], self.shape)
        _blocks[key] = vars(self)
    self.__dict__ = _blocks[key]


def init_tensor(self: tl.tensor, handle: interpreter.TensorHandle, type: tl.dtype) -> None:  # noqa: A002 (theirs)
    """`tensor.__init__`: those of one type share their shape."""
    if "of_tensors" not in vars(type):
        _init_tensor(self, handle, type)
        vars(type)["of_tensors"] = vars(self) | {"handle": None}
    self.__dict__ = vars(type)["of_tensors"] | {"handle": handle}


def broadcast(self: TritonSemantic, left: tl.tensor, right: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """`broadcast_impl_value`, which compares shapes number by number: equal ones are one object here."""
    shapes = (getattr(left.type, "shape", None), getattr(right.type, "shape", None))
    return (left, right) if shapes[0] is shapes[1] else _broadcast(self, left, right)


def left_as_it_is(function: object) -> SimpleNamespace:
    """`_patch_lang` of what was replaced already."""
    del function
    return SimpleNamespace(restore=lambda: None)


def np_dtype(dtype: tl.dtype) -> np.dtype:
    """`_get_np_dtype`, which makes a table for each call."""
    name = dtype.scalar.name
    if name not in _dtypes:
        _dtypes[name] = _np_dtype(dtype)
    return _dtypes[name]


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """Let it multiply by `matmul`, add, raise e by `exp`, and do once what is the same each time.

    `triton.language` is replaced in every launch and every call of a kernel's function, which is half of a small
    kernel's time. Types and shapes of operands are half of the rest. For each sum of integers it computes whether it
    overflows, and says so in debug mode alone. `numpy.sum` would warn of sums that are not finite from a module of its
    own, and not from the interpreter, as all other arithmetic does.
    """
    numpy = ModuleType("numpy")
    vars(numpy).update(vars(interpreter.np), matmul=matmul, sum=np.add.reduce)
    assert not interpreter.InterpreterOptions.debug
    with contextlib.ExitStack() as undone:
        for owner, name, new in (
            (interpreter, "np", numpy),
            (interpreter.InterpreterBuilder, "create_exp", exp),
            (interpreter, "_get_np_dtype", np_dtype),
            (tl.block_type, "__init__", init_block),
            (tl.tensor, "__init__", init_tensor),
            (TritonSemantic, "broadcast_impl_value", broadcast),
            (TritonSemantic, "binary_op_sanitize_overflow_impl", lambda *_: None),
        ):
            undone.enter_context(mock.patch.object(owner, name, new))
        for kernel in (_rms_norm, tl.zeros):  # as kernels see it, and its own functions
            undone.callback(interpreter._patch_lang(kernel.fn).restore)
        undone.enter_context(mock.patch.object(interpreter, "_patch_lang", left_as_it_is))
        yield
