"""A dump: tensors as some runtime wrote them, one file or a folder of files, under the runtime's own names.

Which form it is shows in the names of its files. A form says only where tensors lie, and of which call and rank they
are; what they are is said by a table of names, see `probes.judge.naming`. Nothing in a file is run: archives of torch
are read as tensors alone.
"""

import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fathom.model.checkpoint.archive import MALFORMED, line_of, read_archive
from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.checkpoint.header import read_header, zipped
from fathom.model.errors import ConfigError, quoted
from fathom.model.files import regular_file_size, status

MOST_FILES: Final = 1 << 20
SAFETENSORS: Final = (".safetensors",)
NO_TENSORS: Final = (".json", ".txt", ".md", ".toml", ".yaml", ".yml", ".log", ".html", ".gguf")
NUMPY: Final = (".npy", ".npz")
TORCH: Final = (".pt", ".pth")
OF_TENSORS: Final = (*SAFETENSORS, *TORCH, *NUMPY)
RAW: Final = {".bin": np.dtype("<f4"), ".i32": np.dtype("<i4")}
DIGITS: Final = 9  # of a number in a name


class Piece(NamedTuple):
    """One tensor of a dump: what one call, on one rank, wrote under one name."""

    name: str
    outline: Tensor  # its dtype and shape, on torch's meta device
    read: Callable[[], Tensor]
    call: tuple[int, ...] = ()  # calls are in the order of these numbers
    rank: int = 0
    first: int | None = None  # position of the call's first token, where the name says it


@dataclass(frozen=True)
class Dump:
    """An opened dump."""

    path: Path
    form: str  # as it is told; empty: one file of tensors, of no runtime in particular
    pieces: Sequence[Piece]
    tables: tuple[str, ...] = ()  # of names that its form may go with; none: any
    left: Mapping[str, str] = field(default_factory=dict)  # files, or tensors, that were not read, and why


def open_dump(path: Path) -> Dump:
    """Open a file, a folder, or all raw files whose names begin so.

    Raises
    ------
    ConfigError, CheckpointError
        With one line naming the path, and the file at fault where one is.

    """
    if path.is_dir():
        return _folder(path, sorted(_files(path)), "")
    if not path.exists() and path.parent.is_dir() and path.name:
        begun = (file for file in path.parent.iterdir() if file.name.startswith(f"{path.name}_"))
        files = sorted(file for file in begun if DS4.fullmatch(file.name) and file.is_file())
        if files:
            return _folder(path, files, path.name)
    status(path, ConfigError)
    regular_file_size(path, ConfigError)
    return Dump(path, "", tuple(_of_file(path)))


def in_memory(tensors: Mapping[str, Tensor]) -> Dump:
    """Tensors by name that are here already."""
    held = {name: x.detach().cpu() for name, x in tensors.items()}
    pieces = (
        Piece(name, torch.empty_like(x, device="meta"), partial(held.__getitem__, name)) for name, x in held.items()
    )
    return Dump(Path("(tensors)"), "", tuple(pieces))


def _files(folder: Path) -> Iterator[Path]:
    for number, path in enumerate(folder.rglob("*")):
        if number >= MOST_FILES:
            raise ConfigError(f"{folder}: more than {MOST_FILES} files")
        if path.is_file():
            yield path


# --- one file


def _of_file(path: Path) -> Iterator[Piece]:
    """The tensors of a safetensors file, an archive of torch or numpy, by their names in it."""
    if path.suffix in NUMPY:
        return _numpy(path)
    if path.suffix in TORCH or zipped(path):
        return _archive(path)
    if path.suffix in NO_TENSORS:
        raise ConfigError(f"{path}: no file of tensors: want {', '.join((*SAFETENSORS, *TORCH, *NUMPY))}, or a folder")
    return _safetensors(path)


def _safetensors(path: Path) -> Iterator[Piece]:
    shard = read_header(path)
    opened = Checkpoint(path.parent, (shard,), shard.tensors, ())
    for name in shard.tensors:
        yield Piece(name, opened.outline(name), partial(opened.read, name))


def _archive(path: Path) -> Iterator[Piece]:
    """An archive of one tensor is read again when it is asked for: a dump may have more of them than can be mapped."""
    regular_file_size(path, ConfigError)
    held = dict(_flat("", read_archive(path, ConfigError)))
    for name, tensor in held.items():
        outline = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        read = partial(held.__getitem__, name) if len(held) > 1 else partial(_alone, path)
        yield Piece(name, outline, read)


def _alone(path: Path) -> Tensor:
    """The only tensor of an archive."""
    found = dict(_flat("", read_archive(path, ConfigError)))
    if len(found) != 1:
        raise ConfigError(f"{path}: changed after it was opened")
    return found.popitem()[1]


def _flat(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Tensors in dicts, lists and tuples, each by its path; other values are left out."""
    if isinstance(value, Tensor):
        if value.layout == torch.strided and not value.is_quantized and not value.is_nested:
            yield name, value
        return
    if isinstance(value, Mapping):
        items = ((str(key), part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        items = ((str(number), part) for number, part in enumerate(value))
    else:
        return
    for key, part in items:
        yield from _flat(f"{name}.{key}" if name else key, part)


def _numpy(path: Path) -> Iterator[Piece]:
    opened = _arrays(path)
    for name in [""] if isinstance(opened, np.ndarray) else opened:
        try:
            outline = torch.empty_like(_array(path, name), device="meta")
        except TypeError:
            continue  # text, for one
        yield Piece(name, outline, partial(_array, path, name))


def _arrays(path: Path) -> Any:
    """An array, or a mapping of names that reads one when it is asked for."""
    try:
        return np.load(path, allow_pickle=False)
    except (*MALFORMED, OSError) as error:
        raise ConfigError(f"{path}: cannot be read as arrays ({line_of(error)})") from None


def _array(path: Path, name: str) -> Tensor:
    """One array of a file."""
    opened = _arrays(path)
    try:
        return torch.from_numpy(opened if isinstance(opened, np.ndarray) else opened[name])
    except (zlib.error, zipfile.BadZipFile, EOFError, ValueError) as error:
        raise ConfigError(f"{path}: {quoted(name)} cannot be read as an array ({line_of(error)})") from None


def _raw(path: Path) -> Piece:
    dtype = RAW[path.suffix]
    if (size := regular_file_size(path, ConfigError)) % dtype.itemsize:
        raise ConfigError(f"{path}: {size} bytes, want a multiple of {dtype.itemsize}")
    kind = torch.float32 if dtype.kind == "f" else torch.int32
    outline = torch.empty(size // dtype.itemsize, dtype=kind, device="meta")
    return Piece(path.name, outline, lambda: torch.from_numpy(np.fromfile(path, dtype)))


# --- a folder


class _Form(NamedTuple):
    """How a runtime names the files of a dump."""

    told: str
    tables: tuple[str, ...]
    file: re.Pattern[str]  # of a path below the folder; groups: name, and any of layer, rank, call, step, first, key
    pieces: "Callable[[Path, re.Match[str]], Iterator[Piece]]"


def _number(found: re.Match[str], group: str) -> int:
    text = found.groupdict().get(group)
    return int(text) if text else 0


def _placed(found: re.Match[str], name: str, piece: Piece) -> Piece:
    call = (_number(found, "step"), _number(found, "call"))
    first = int(found["first"]) if found.groupdict().get("first") else None
    return piece._replace(name=name, call=call if first is None else (first,), rank=_number(found, "rank"), first=first)


def _sglang(path: Path, found: re.Match[str]) -> Iterator[Piece]:
    """``{"value": ..., "meta": ...}``; what is dumped with the number of a layer has it in its name."""
    name, of_layer = found["name"], re.search(rf"___layer_id=({N})", found["tags"])
    if of_layer and "layers." not in name:
        name = f"layers.{int(of_layer[1])}.{name}"
    for piece in _archive(path):
        if piece.name == "value" or piece.name.startswith("value."):
            yield _placed(found, name + piece.name.removeprefix("value"), piece)


def _by_layer(path: Path, found: re.Match[str]) -> Iterator[Piece]:
    for piece in _archive(path):
        yield _placed(found, f"layers.{int(found['layer'])}.{found['name']}.{piece.name}".rstrip("."), piece)


def _one(path: Path, found: re.Match[str]) -> Iterator[Piece]:
    for piece in _of_file(path):
        yield _placed(found, f"{found['name']}.{found['way']}.{piece.name}".rstrip("."), piece)


def _debugged(path: Path, found: re.Match[str]) -> Iterator[Piece]:
    way = re.sub(r"inputs_(?:args|kwargs)_", "input.", found["way"]).replace("outputs", "output")
    way = re.sub(r"^output_", "output.", way)
    name = f"{found['name']}.{way}" if found["name"] else way.partition(".")[2]
    for piece in _of_file(path):
        yield _placed(found, name, piece)


def _bytes(path: Path, found: re.Match[str]) -> Iterator[Piece]:
    yield _placed(found, f"{found['name']}-{found['layer']}", _raw(path))


N: Final = rf"\d{{1,{DIGITS}}}"
DS4: Final = re.compile(rf"(?:.*/)?(?P<name>[^/]+)-(?P<layer>{N})_pos(?P<first>{N})\.(?:bin|i32)")
FORMS: Final = (
    _Form(
        "files of SGLang's dumper",
        ("sglang",),
        re.compile(
            rf"(?:.*/)?(?:step=(?P<step>{N})___)?rank=(?P<rank>{N})___dump_index={N}"
            r"___name=(?P<name>.+?)(?P<tags>(?:___[A-Za-z_]+=[^/]*?)*)\.pt"
        ),
        _sglang,
    ),
    _Form(
        "files of ATOM's forward dump",
        ("atom",),
        re.compile(rf"(?:.*/)?layer(?P<layer>{N})_(?P<name>\w+?)_rank(?P<rank>{N})(?:_call(?P<call>{N}))?\.pt"),
        _by_layer,
    ),
    _Form(
        "files of msprobe",
        ("vllm_ascend", "huggingface", "sglang"),
        re.compile(
            rf"(?:.*?/)??(?:step(?P<step>{N})/)?(?:(?:rank|proc)(?P<rank>{N})/)?dump_tensor_data/(?:Module\."
            rf"(?P<name>.+)\.\w+\.forward\.(?P<call>{N})\.(?P<way>(?:input|output|kwargs)(?:\.[\w.]+?)?)|(?P<other>.+))\.(?:pt|npy)"
        ),
        _one,
    ),
    _Form(
        "files of transformers' debugger",
        ("huggingface",),
        re.compile(
            r"(?:.*/)?DeepseekV4\w*?(?:\.(?P<name>.+?))?_(?P<way>inputs_args_\d+|inputs_kwargs_.+|outputs(?:_.+)?)\.safetensors"
        ),
        _debugged,
    ),
    _Form("raw files of ds4", ("ds4",), DS4, _bytes),
)


def _folder(path: Path, files: Sequence[Path], prefix: str) -> Dump:
    """The files of a folder, or of one in which all names begin alike, by the form of most of them."""
    root = path.parent if prefix else path
    names = {file: file.relative_to(root).as_posix() for file in files}
    fitting = Counter(form for form in FORMS for name in names.values() if form.file.fullmatch(name))
    if not fitting:
        return _plain(path, names)
    form = fitting.most_common(1)[0][0]
    pieces, left = list[Piece](), dict[str, str]()
    runs = set[Path]()
    for file, name in names.items():
        if (found := form.file.fullmatch(name)) is None:
            if file.suffix in OF_TENSORS:
                raise ConfigError(f"{path}: {form.told}, and {quoted(name)}, which is none of them: name one of both")
            left[name] = "its name is not of this form"
            continue
        if found.groupdict().get("other"):
            left[name] = "no input or output of a module"
            continue
        if form.pieces is not _one:  # whose folders are steps and ranks
            runs.add(file.parent)
        pieces += form.pieces(file, found)
    if len(runs) > 1:
        some = ", ".join(sorted(quoted(str(run)) for run in runs)[:4])
        raise ConfigError(f"{path}: {form.told} of {len(runs)} dumps, name one of them: {some}")
    return Dump(path, form.told, tuple(pieces), form.tables, left)


def _plain(path: Path, names: Mapping[Path, str]) -> Dump:
    """A folder of files of tensors: a file of one tensor is called as the file, others as in the file."""
    pieces, left = list[Piece](), dict[str, str]()
    for file, name in names.items():
        if file.suffix not in OF_TENSORS:
            left[name] = "no file of tensors"
            continue
        stem = name.removesuffix(file.suffix).replace("/", ".")
        held = list(_of_file(file))
        alone = len(held) == 1
        pieces += (piece._replace(name=stem if alone else piece.name) for piece in held)
    if not pieces:
        raise ConfigError(f"{path}: no file of tensors in it ({', '.join(OF_TENSORS)}), nor of a form that is known")
    return Dump(path, "a folder of files of tensors", tuple(pieces), (), left)
