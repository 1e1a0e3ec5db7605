"""Files and folders that a run writes: whole under their name, or not there at all.

What is written goes to a file beside it first, of a name that nobody can foresee, and takes the name when it is
complete. A run that fails, is interrupted or terminated leaves what was there before, and nothing else.
"""

import contextlib
import errno
import json
import math
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fathom.model.checkpoint.header import ITEM_BYTES

_unfinished: set[Path] = set()  # of this process, see `discard_unfinished`

NO_ROOM: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}  # their exceptions name no file


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of an empty file to be written; at the end of the ``with`` it is the file `path`.

    Raises
    ------
    OSError
        Naming `path`, when it cannot be written or is no regular file; it is as it was before then.
    """
    target = Path(os.path.realpath(path))  # a link stays one
    if target.exists() and not target.is_file():
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    partial = target.with_name(f".fathom-{secrets.token_hex(8)}.partial")
    _unfinished.add(partial)
    try:
        with _named(path, partial):
            os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            mode = (target if target.exists() else partial).stat().st_mode & 0o777
            yield partial
            partial.chmod(mode)  # also where a library put another file in its place, as safetensors does
            partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
        _unfinished.discard(partial)


@contextlib.contextmanager
def reserved(
    path: Path, planned: Mapping[str, tuple[str, Sequence[int]]]
) -> Iterator[Callable[[str, memoryview], None]]:
    """Yield what takes the next bytes of a tensor by name; the safetensors file is there after the ``with``.

    Its bytes are reserved before the first ones come: OSError, naming the file, on a disk that has no room for them.

    Parameters
    ----------
    path
        The file.
    planned
        Name -> dtype as safetensors writes it, and shape; every byte of each tensor must be written.

    """
    header, at, end = {}, {}, 0
    for name, (dtype, shape) in planned.items():
        at[name], start, end = end, end, end + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    with replacing(path) as partial, partial.open("r+b") as file:
        if sys.platform == "linux":  # elsewhere a full disk is found when it is full
            os.posix_fallocate(file.fileno(), 0, 8 + len(text) + end)
        file.write(len(text).to_bytes(8, "little") + text)

        def write(name: str, data: memoryview) -> None:
            file.seek(8 + len(text) + at[name])
            file.write(data)
            at[name] += data.nbytes

        yield write
        for name, info in header.items():
            assert [at[name]] == info["data_offsets"][1:], f"{name}: all of its bytes"


@contextlib.contextmanager
def adding_lines(path: Path | None, keep: int) -> Iterator[Callable[[str], None]]:
    """Yield what adds a line to a file, which has it from then on however the run ends; to nothing where there is none.

    Of what the file held, the first `keep` bytes stay.

    Raises
    ------
    OSError
        Naming `path`, when it cannot be written.
    """
    if path is None:
        yield lambda _: None
        return
    with _named(path, path), path.open("ab") as file:
        file.truncate(keep)

        def add(line: str) -> None:
            file.write(line.encode() + b"\n")
            file.flush()

        yield add


def write_text(path: Path, text: str) -> None:
    """Write a file of text, UTF-8; what is no regular file (/dev/stdout, a pipe) is written to as it is.

    Raises
    ------
    OSError
        Naming `path`, when it cannot be written.
    """
    data = text.encode(errors="backslashreplace")
    if path.exists() and not path.is_file():
        with _named(path, path):
            path.write_bytes(data)
        return
    with replacing(path) as partial:
        partial.write_bytes(data)


def write_json(path: Path, value: Any, indent: int = 1) -> None:
    """Write a JSON file, as `write_text`."""
    write_text(path, json.dumps(value, indent=indent, ensure_ascii=False) + "\n")


def unfinished(folder: Path) -> Path:
    """The folder beside `folder` that `making` fills."""
    target = Path(os.path.realpath(folder))
    return target.with_name(f"{target.name}.partial")


@contextlib.contextmanager
def making(folder: Path) -> Iterator[Path]:
    """Yield the path of an empty folder to be filled; at the end of the ``with`` it is `folder`.

    Raises
    ------
    OSError
        When it cannot be written, or is there and not empty; it is as it was before then.
    """
    target, partial = Path(os.path.realpath(folder)), unfinished(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial.mkdir()
    try:
        with _named(folder, partial):
            yield partial
            partial.replace(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def discard_unfinished() -> None:
    """Remove what this process has begun to write: for a process that ends without an exception."""
    for path in tuple(_unfinished):
        with contextlib.suppress(OSError):
            path.unlink()


@contextlib.contextmanager
def _named(path: Path, partial: Path) -> Iterator[None]:
    """Raise errors of a file under the name that the user gave."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM or error.filename in (str(partial), partial):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
