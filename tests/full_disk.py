"""A disk that is full, for this process."""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def small_files(limit: int) -> Iterator[None]:
    """Files of at most so many bytes. No bytecode is written: Python 3.11 would leave it cut, and read it again."""
    usual, sys.dont_write_bytecode = (resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode), True
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, usual[0][1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual[0])
        sys.dont_write_bytecode = usual[1]
