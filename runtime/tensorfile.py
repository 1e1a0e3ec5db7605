"""Files of tensors, written as `runtime.output` writes any: beside it, because that one is imported before torch."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fathom.runtime.output import replacing


def write_safetensors(path: Path, tensors: dict[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file.

    Raises
    ------
    OSError
        Naming `path`, when it cannot be written; it is as it was before then.
    """
    with replacing(path) as partial, system_errors(path):
        save_file(tensors, partial, None if metadata is None else dict(metadata))


@contextmanager
def system_errors(path: Path) -> Iterator[None]:
    """Raise what safetensors tells of the system's errors, "I/O error: File too large (os error 27)", as OSError."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
