"""What the allocator of the C library keeps of freed memory."""

import ctypes
import sys
from collections.abc import Callable
from typing import Final

M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1  # malloc.h
LARGE: Final = 32 << 20  # bytes, glibc's most: larger blocks are given back when they are freed
KEPT: Final = 512 << 20  # bytes free at the end of the heap


def keep_memory() -> None:
    """Let glibc keep half a gigabyte of what is freed for what is allocated next.

    Else each large activation is memory that the system hands out anew and clears page by page, which may take longer
    than to fill it. Elsewhere than with glibc nothing is done.
    """
    mallopt = of_libc("mallopt")
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE)
        mallopt(M_TRIM_THRESHOLD, KEPT)


def of_libc(name: str) -> Callable[..., int] | None:
    """A function of the C library, None where it is not glibc, which alone has these."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
