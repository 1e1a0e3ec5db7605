"""What a command line may read and write: what is there; nothing that is read, or twice, or in a model's directory.

Flags of paths say by their action what is done with them, and what a file to read holds; `check` looks at all of them
before any work, and into files as far as torch is not needed for it: see `Texts` and `Tensors`.
"""

import argparse
import glob
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from fathom.model.checkpoint.header import read_header, zipped
from fathom.model.errors import ConfigError
from fathom.model.files import read_text, regular_file_size, status
from fathom.runtime.options import DEMO
from fathom.runtime.output import unfinished

HUB_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
ROOT: Final = Path(__file__).resolve().parents[1]  # of the repository
AUDITS: Final = ROOT / "audits"
CHECKOUT: Final = (ROOT / "pyproject.toml").is_file()  # else ROOT is where the package is installed
MAX_TEXT_BYTES: Final = 64 << 20  # of a file of text or of token ids: several times what a million tokens take


def _is_there(path: Path) -> None:
    """Refuse a path that is not there: ConfigError."""
    status(path, ConfigError)


class Named(NamedTuple):
    """A file or folder that the command line names."""

    flag: str
    path: Path
    look: Callable[[Path], object] = lambda _: None  # refuses a file for what it holds
    there: Callable[[Path], object] = _is_there  # refuses what is not there to be read


class _Noted(argparse.Action):
    """Store a path, or several, and note it under what the command does with it."""

    kind = ""
    look: Callable[[Path], object] = staticmethod(lambda _: None)
    there: Callable[[Path], object] = staticmethod(_is_there)

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
        noted = [
            *getattr(namespace, self.kind, ()),
            *(Named(flag, Path(path), self.look, self.there) for path in given),
        ]
        setattr(namespace, self.kind, noted)


class Reads(_Noted):
    """The action of a flag whose file is read."""

    kind = "files_read"


def _begun(path: Path) -> None:
    """Refuse a path that is neither there nor the beginning of names that are: ConfigError."""
    if not (path.parent.is_dir() and any(path.parent.glob(f"{glob.escape(path.name)}*"))):
        status(path, ConfigError)


def _look_into_text(path: Path) -> None:
    """Refuse a text that is no UTF-8, or empty: ConfigError. A pipe, or what is longer, is left to who reads it."""
    short = path.is_file() and path.stat().st_size <= MAX_TEXT_BYTES
    if short and not read_text(path, MAX_TEXT_BYTES, ConfigError):
        raise ConfigError(f"{path}: the text is empty")


def _look_into_tensors(path: Path) -> None:
    """Refuse a file of tensors with a damaged header: CheckpointError. A .pt archive is left to who reads it."""
    if not zipped(path):
        read_header(path)


class Dumps(Reads):
    """The action of a flag whose file, folder, or beginning of the names of files, is a recording."""

    there = staticmethod(_begun)


class Texts(Reads):
    """The action of a flag whose file is a text to read."""

    look = staticmethod(_look_into_text)


class Tensors(Reads):
    """The action of a flag whose file is safetensors to read, or a .pt archive."""

    look = staticmethod(_look_into_tensors)


class Models(_Noted):
    """The action of a flag whose folder is a checkpoint: it is read, and nothing is written into it."""

    kind = "models_read"


class Keeps(_Noted):
    """The action of a flag whose folder is a checkpoint as of `Models`, or is made one where there is none."""

    kind = "models_kept"


class Writes(_Noted):
    """The action of a flag whose file is written."""

    kind = "files_written"


class Reports(_Noted):
    """The action of a flag whose file is written with a report, which may go to a pipe."""

    kind = "reports_written"


class Pages(_Noted):
    """The action of a flag whose file is a page, F.md: it is written, and its JSON and pictures beside it."""

    kind = "pages_written"


class Fills(_Noted):
    """The action of a flag whose folder is written into."""

    kind = "folders_written"


class Makes(_Noted):
    """The action of a flag whose folder is made, as by `runtime.output.making`: it is not there before, or empty."""

    kind = "folders_made"


ACTIONS: Final = (Reads, Models, Keeps, Writes, Reports, Pages, Fills, Makes)
KINDS: Final = tuple(each.kind for each in ACTIONS)  # attributes beside those of the flags


def check(args: argparse.Namespace) -> None:
    """Refuse a command line that reads what is not there, would write over it, or where nothing can be written.

    Raises
    ------
    ConfigError, CheckpointError
        With one line naming the path, and the flag where the file itself is not at fault.
    """
    read, models, kept, written, reported, pages, filled, made = (getattr(args, kind, []) for kind in KINDS)
    read = [*read, *_bases(getattr(args, "kv", None) or ())]
    held = _models(args, read)
    written = [*written, *(each for page in pages for each in _with_json(page))]
    _check_apart([*written, *reported, *filled, *made], read, held)
    for one in read:
        one.there(one.path)
    for one in models:
        regular_file_size(one.path / "config.json", ConfigError)
    for flag, path, *_ in pages:
        if path.suffix != ".md":
            raise ConfigError(f"{flag} {path}: want a name that ends in .md")
    for one in (*written, *reported):
        writable(one.path, pipe=one in reported)
    for one in filled:
        fillable(one.path)
    for one in (*made, *(each for each in kept if not (each.path / "config.json").exists())):
        makable(one.path)
    for one in read:
        one.look(one.path)


def check_output(args: argparse.Namespace, what: str, path: Path) -> None:
    """Refuse one more file to write, named while the command runs, as `check` would: ConfigError."""
    read, written, reported = (getattr(args, kind.kind, []) for kind in (Reads, Writes, Reports))
    read = [*read, *_bases(getattr(args, "kv", None) or ())]
    _check_apart([*written, *reported, Named(what, path)], read, _models(args, read))
    writable(path)


def _models(args: argparse.Namespace, read: Sequence[Named]) -> list[Path]:
    """Folders of checkpoints that the command line names, in which nothing is written."""
    models, kept = (getattr(args, kind.kind, []) for kind in (Models, Keeps))
    held = [*(one.path for one in (*models, *kept)), *(one.path.parent for one in read if _in_checkpoint(one.path))]
    return [*held, args.model or DEMO] if "model" in args else held


def _check_apart(outputs: Sequence[Named], read: Sequence[Named], models: Sequence[Path]) -> None:
    """Refuse an output that is an input, another output, or in the directory of a model: ConfigError."""
    for at, (flag, path, *_) in enumerate(outputs):
        for other in read:
            if same(path, other.path):
                raise ConfigError(f"{flag} {path}: is what {other.flag} reads, and stays as it is")
            if other.path.is_dir() and _inside(path, other.path):
                raise ConfigError(f"{flag} {path}: lies in {other.path}, which {other.flag} reads, and stays as it is")
        for other in outputs[:at]:
            if same(path, other.path):
                raise ConfigError(f"{flag} {path}: {other.flag} writes it too")
        for model in models:
            if _inside(path, model):
                raise ConfigError(f"{flag} {path}: lies in the model's directory {model}, which stays as it is")


def makable(folder: Path) -> None:
    """Refuse a folder that cannot be made anew, see `runtime.output.making`: ConfigError naming what is in the way."""
    fillable(folder)
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{folder}: exists and is not empty")
    if (left := unfinished(folder)).exists():
        raise ConfigError(f"{left}: exists; if a run that was killed left it, remove it")


def fillable(folder: Path) -> None:
    """Refuse a folder that cannot be made or written into: ConfigError naming it."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: not a folder")
    _try(folder, next(place for place in (folder, *folder.absolute().parents) if place.is_dir()))


def _try(path: Path, folder: Path) -> None:
    """Write into a folder; ConfigError naming the path that it is for."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written there ({error.strerror})") from error


def writable(path: Path, *, pipe: bool = False) -> None:
    """Refuse a file that cannot be written, before the work is done: ConfigError naming it."""
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder")
    if path.exists() and not path.is_file():
        if pipe:
            return
        raise ConfigError(f"{path}: not a regular file")
    _try(path, Path(os.path.realpath(path)).parent)  # beside it: a file keeps its content


def told(path: Path) -> str:
    """A path as pages tell it: where it is in this repository, or as it is, or of an absolute one the last part."""
    if path.resolve().is_relative_to(ROOT):
        return str(path.resolve().relative_to(ROOT))
    return path.name if path.is_absolute() else str(path)


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


def _in_checkpoint(path: Path) -> bool:
    """Whether a file is the config.json of a folder that has weights or a tokenizer too."""
    beside = ("tokenizer.json", "*.safetensors", "*.safetensors.index.json")
    return path.name == "config.json" and any(any(path.parent.glob(name)) for name in beside)


def _with_json(page: Named) -> list[Named]:
    """A page and the JSON beside it; ConfigError where both would be one file."""
    flag, path, *_ = page
    if path.suffix == ".json":
        raise ConfigError(f"{flag} {path}: is the name of the JSON that goes beside the page; the page is Markdown")
    return [page, Named(f"the JSON of {flag}", path.with_suffix(".json"))] if path.name else [page]


def _bases(rules: Sequence[str]) -> list[Named]:
    """Files that rules of --kv name, as in all=shard:bits=6,basis=FILE."""
    settings = [setting for rule in rules for setting in rule.partition(":")[2].split(",")]
    files = [Path(part.removeprefix("basis=")) for part in settings if part.startswith("basis=")]
    return [Named("--kv", file, _look_into_tensors) for file in files]
