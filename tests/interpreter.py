"""Triton's interpreter without what it does again and again."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import triton.language as tl
from triton.runtime import interpreter

from fathom.kernels.norm.triton import _rms_norm


@contextlib.contextmanager
def patched_once() -> Iterator[None]:
    """Let it replace `triton.language` once, not in every launch and every call of a kernel's function.

    That is half of a small kernel's time. What is replaced, and by what, is the same each time.
    """
    original = interpreter._patch_lang
    scopes = [original(kernel.fn) for kernel in (_rms_norm, tl.zeros)]  # as kernels see it, and as its own functions do
    interpreter._patch_lang = lambda _: SimpleNamespace(restore=lambda: None)
    try:
        yield
    finally:
        interpreter._patch_lang = original
        for scope in reversed(scopes):
            scope.restore()
