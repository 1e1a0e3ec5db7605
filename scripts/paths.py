"""What a command line may write: nothing that it reads, nothing twice, and nothing in the model's directory.

Flags of files say by their action whether they are read or written; `check` looks at all of them before any work.
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from model.errors import ConfigError
from runtime.options import DEMO


class Named(NamedTuple):
    """A file or folder that the command line names."""

    flag: str
    path: Path


class _Noted(argparse.Action):
    """Store a path, or several, and note it under what the command does with it."""

    kind = ""

    def __init__(self, option_strings: Sequence[str], dest: str, **named: Any) -> None:
        super().__init__(option_strings, dest, **{"type": Path} | named)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Store, as without an action."""
        del parser, option_string
        setattr(namespace, self.dest, values)
        flag = self.option_strings[0] if self.option_strings else str(self.metavar or self.dest)
        given = [values] if isinstance(values, str | Path) else list(values or ())
        noted = [*getattr(namespace, self.kind, ()), *(Named(flag, Path(path)) for path in given)]
        setattr(namespace, self.kind, noted)


class Reads(_Noted):
    """The action of a flag whose file is read."""

    kind = "files_read"


class Writes(_Noted):
    """The action of a flag whose file is written."""

    kind = "files_written"


class Reports(_Noted):
    """The action of a flag whose file is written with a report, which may go to a pipe."""

    kind = "reports_written"


class Fills(_Noted):
    """The action of a flag whose folder is written into."""

    kind = "folders_written"


def check(args: argparse.Namespace) -> None:
    """Refuse a parsed command line that would write over what it reads, or where nothing can be written.

    Raises
    ------
    ConfigError
        With one line naming the flag and the path.
    """
    read, written, reported, filled = (getattr(args, each.kind, []) for each in (Reads, Writes, Reports, Fills))
    model = (args.model or DEMO) if "model" in args else None
    read = [*read, *_bases(getattr(args, "kv", None) or ())]
    outputs = [*written, *reported, *filled]
    for at, (flag, path) in enumerate(outputs):
        for other in read:
            if same(path, other.path):
                raise ConfigError(f"{flag} {path}: is what {other.flag} reads, and stays as it is")
        for other in outputs[:at]:
            if same(path, other.path):
                raise ConfigError(f"{flag} {path}: {other.flag} writes it too")
        if model is not None and _inside(path, model):
            raise ConfigError(f"{flag} {path}: lies in the model's directory {model}, which stays as it is")
    for _, path in written:
        writable(path)
    for _, path in reported:
        writable(path, pipe=True)


def writable(path: Path | None, *, pipe: bool = False) -> None:
    """Refuse a file that cannot be written, before the work is done: ConfigError naming it."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder")
    if path.exists() and not path.is_file():
        if pipe:
            return
        raise ConfigError(f"{path}: not a regular file")
    try:
        with tempfile.TemporaryFile(dir=Path(os.path.realpath(path)).parent):  # beside it: a file keeps its content
            pass
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written there ({error.strerror})") from error


def same(one: Path, other: Path) -> bool:
    """Whether two paths are of one file, which need not be there."""
    if one.exists() and other.exists():
        return one.samefile(other)
    return os.path.realpath(one) == os.path.realpath(other)


def _inside(path: Path, model: Path) -> bool:
    """Whether a path is the model's directory, lies in it, or is what a link in it leads to."""
    if model.is_dir() and path.exists() and any(file.exists() and path.samefile(file) for file in model.iterdir()):
        return True
    where = Path(os.path.realpath(path))
    return any(same(folder, model) for folder in (where, *where.parents))


def _bases(rules: Sequence[str]) -> list[Named]:
    """Files that rules of --kv name, as in all=shard:bits=6,basis=FILE."""
    settings = [setting for rule in rules for setting in rule.partition(":")[2].split(",")]
    return [Named("--kv", Path(part.removeprefix("basis="))) for part in settings if part.startswith("basis=")]
