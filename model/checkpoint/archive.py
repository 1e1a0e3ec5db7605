"""A .pt archive of torch, read as tensors alone: nothing in it is run."""

import pickle
import struct
import warnings
from pathlib import Path
from typing import Any, Final

import torch

from fathom.model.checkpoint.header import zipped
from fathom.model.errors import CheckpointError

LONGEST: Final = 200  # characters of what torch says
MALFORMED: Final = (  # what torch.load raises for a file that was damaged or made up
    pickle.UnpicklingError,
    struct.error,
    AssertionError,
    AttributeError,
    EOFError,
    IndexError,
    KeyError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
)


def read_archive(path: Path, error: type[ValueError] = CheckpointError) -> Any:
    """What was saved: tensors on the CPU, mapped where the archive is a zip file, in dicts, lists and tuples.

    Raises
    ------
    error
        With one line naming the file, when it holds anything else, or is damaged.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # of tensors that who reads it refuses, or leaves out
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped(path))
    except MALFORMED as failed:
        raise error(f"{path}: cannot be read as tensors alone ({line_of(failed)})") from failed


def line_of(failed: Exception) -> str:
    """The first line of an error's message, cut; the error's name where there is none."""
    return (str(failed).splitlines() or [type(failed).__name__])[0][:LONGEST]
