"""Triton's interpreter without what it does again and again, and with products whose bits no processor decides."""

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


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """Let it multiply by `matmul`, and replace `triton.language` once, not in every launch and every function called.

    That is half of a small kernel's time. What is replaced, and by what, is the same each time.
    """
    numpy, patch_lang = interpreter.np, interpreter._patch_lang
    interpreter.np = ModuleType("numpy")
    vars(interpreter.np).update(vars(numpy), matmul=matmul)
    scopes = [patch_lang(kernel.fn) for kernel in (_rms_norm, tl.zeros)]  # as kernels see it, and its own functions
    interpreter._patch_lang = lambda _: SimpleNamespace(restore=lambda: None)
    try:
        yield
    finally:
        interpreter.np, interpreter._patch_lang = numpy, patch_lang
        for scope in reversed(scopes):
            scope.restore()
