"""Files from outside: regular ones, of bounded size, and one line that names the file when it is neither."""

import os
import stat
from pathlib import Path

from fathom.model.errors import CheckpointError


def status(path: Path, error: type[ValueError] = CheckpointError) -> os.stat_result:
    """What the system says of a file or folder, which is not opened.

    Raises
    ------
    error
        When there is none, or a folder on the way to it cannot be searched.
    """
    try:
        return path.stat()
    except (OSError, ValueError) as failed:
        raise error(_told(path, failed)) from None


def regular_file_size(path: Path, error: type[ValueError] = CheckpointError) -> int:
    """Bytes of a regular file; a pipe or device would block or never end, so it is refused before it is opened.

    Raises
    ------
    error
        When there is none, or it is a folder, a broken link, a pipe or a device.
    """
    found = status(path, error)
    if not stat.S_ISREG(found.st_mode):
        raise error(f"{path}: not a regular file")
    return found.st_size


def read_bounded(path: Path, most: int, error: type[ValueError]) -> bytes:
    """All bytes of a regular file of at most `most` bytes.

    Raises
    ------
    error
        As `regular_file_size`, or when the file is longer, or cannot be read.
    """
    if (size := regular_file_size(path, error)) > most:
        raise error(f"{path}: {size} bytes, more than the {most} that are read of such a file")
    return _read(path, most, error)


def read_text(path: Path, most: int, error: type[ValueError]) -> str:
    """The UTF-8 text of a file as it is, line ends included. A pipe will do too: text may come from another program.

    Raises
    ------
    error
        When there is no such file, it is no UTF-8, or it holds more than `most` bytes.
    """
    data = _read(path, most, error)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as failed:
        raise error(f"{path}: byte {failed.start} is no UTF-8") from None


def _read(path: Path, most: int, error: type[ValueError]) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except (OSError, ValueError) as failed:
        raise error(_told(path, failed)) from None
    if len(data) > most:
        raise error(f"{path}: more than the {most} bytes that are read of such a file")
    return data


def _told(path: Path, failed: OSError | ValueError) -> str:
    if isinstance(failed, FileNotFoundError):
        return f"{path}: {failed.strerror}"
    why = failed.strerror if isinstance(failed, OSError) else "not a file name"  # it holds a null byte
    return f"{path}: cannot be read: {why}"
