"""Triton's interpreter without what it does again and again, and with the arithmetic of a GPU where that differs."""

import contextlib
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import numba
import numpy as np
import triton.language as tl
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


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """Let it multiply by `matmul`, add, raise e by `exp`, and replace `triton.language` once.

    That is not in every launch and every call of a kernel's function, which is half of a small kernel's time; what is
    replaced, and by what, is the same each time. `numpy.sum` would warn of sums that are not finite from a module of
    its own, and not from the interpreter, as all other arithmetic does.
    """
    numpy, patch_lang, builder = interpreter.np, interpreter._patch_lang, interpreter.InterpreterBuilder
    create_exp, builder.create_exp = builder.create_exp, exp
    interpreter.np = ModuleType("numpy")
    vars(interpreter.np).update(vars(numpy), matmul=matmul, sum=np.add.reduce)
    scopes = [patch_lang(kernel.fn) for kernel in (_rms_norm, tl.zeros)]  # as kernels see it, and its own functions
    interpreter._patch_lang = lambda _: SimpleNamespace(restore=lambda: None)
    try:
        yield
    finally:
        interpreter.np, interpreter._patch_lang, builder.create_exp = numpy, patch_lang, create_exp
        for scope in reversed(scopes):
            scope.restore()
