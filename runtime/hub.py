"""``owner/name`` on the Hugging Face hub -> a folder: what the cache has, and what is missing downloaded.

Where the cache is, tokens, mirrors and being offline are huggingface_hub's matter, with all that it reads of them. Here
are the choice of files, one commit for all of them, and one line for whatever goes wrong. The cache comes first: a
branch that was downloaded once is not asked for again; ``--revision`` names another one.
"""

import contextlib
import logging
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from fathom.model.checkpoint.folder import INDEX, SINGLE, TOKENIZER, weight_map
from fathom.model.checkpoint.names import translate
from fathom.model.checkpoint.tensor_mapping import Stored
from fathom.model.errors import CheckpointError, ConfigError
from fathom.runtime.output import NO_ROOM

CONFIG: Final = "config.json"
SNAPSHOT: Final = re.compile(r"models--(.+?)--(.+)")  # a model's folder in the cache
# Of what is raised by huggingface_hub and by what it asks with, which is another library in each of its versions.
ITS_LIBRARIES: Final = ("huggingface_hub", "httpx", "httpx2", "requests", "urllib3")
GIB: Final = 1 << 30


class Snapshot(NamedTuple):
    """One commit of a model on the hub, of which some files are in the cache."""

    name: str  # owner/name
    commit: str
    folder: Path


def told(folder: Path) -> str:
    """What a checkpoint's folder is called: owner/name and the commit where it is of the hub's cache, or its name."""
    folder = folder.resolve()
    cached = SNAPSHOT.fullmatch(folder.parent.parent.name) if folder.parent.name == "snapshots" else None
    return f"{cached[1]}/{cached[2]}@{folder.name}" if cached else folder.name


def locate(name: str, revision: str | None = None) -> Snapshot:
    """Find a model, and get the small files that say what it is: config.json, the index and the tokenizer.

    Parameters
    ----------
    name
        ``owner/name``.
    revision
        A branch, tag or commit; None: the main branch.

    Raises
    ------
    ConfigError
        With one line: there is no such model, revision or file, it is gated, or the hub cannot be asked.
    """
    with _errors(name, revision):
        folder = Path(_file(name, revision, CONFIG)).parent
        at = Snapshot(name, folder.name, folder)
        if not _is_cached(at, SINGLE):
            _optional(at, INDEX)
        _optional(at, TOKENIZER)
    return at


def fetch(at: Snapshot, layers: Collection[int] | None = None, *, ends: bool = True) -> None:
    """Get the shards that a model needs, or some of its layers; those that the cache has are not asked for.

    Parameters
    ----------
    at
        The model.
    layers
        None: all of it.
    ends
        With `layers`, whether what is of no layer is needed too: embedding, head and norm.

    Raises
    ------
    ConfigError
        As `locate`, or where the disk has no room.
    CheckpointError
        For an index that is damaged.
    """
    missing = [file for file in shards(at, layers, ends=ends) if not _is_cached(at, file)]
    if not missing:
        return
    import huggingface_hub  # noqa: PLC0415 (a second; most runs need none of it)

    count = f"{len(missing)} of its files, {missing[0]} first, are not in the hub's cache"
    with _errors(at.name, at.commit, count):
        _check_room(at, missing)
        huggingface_hub.snapshot_download(at.name, revision=at.commit, allow_patterns=missing)
    left = [file for file in missing if not _is_cached(at, file)]
    if left:
        raise ConfigError(f"{at.name}: {left[0]} is in its index, and not on the hub at {at.commit}")


def shards(at: Snapshot, layers: Collection[int] | None = None, *, ends: bool = True) -> list[str]:
    """Names of the files that hold a model's tensors, or those of some layers; see `fetch`."""
    if not (at.folder / INDEX).exists():
        return [SINGLE]
    files = weight_map(at.folder / INDEX)
    if layers is None:
        return sorted(set(files.values()))
    return sorted({file for stored, file in files.items() if _needed(stored, layers, ends=ends)})


def headers(at: Snapshot) -> Mapping[str, Stored]:
    """What the shards on the hub hold, name -> (dtype, shape), of which their first bytes are read and no weight.

    Raises
    ------
    ConfigError
        As `locate`.
    CheckpointError
        Where index and shards do not agree.
    """
    import huggingface_hub  # noqa: PLC0415

    with _errors(at.name, at.commit, "its shards are not in the hub's cache"):
        found = huggingface_hub.get_safetensors_metadata(at.name, revision=at.commit)
    stored = {
        name: (file, (info.dtype, tuple(info.shape)))
        for file, metadata in found.files_metadata.items()
        for name, info in metadata.tensors.items()
    }
    for name in sorted(found.weight_map.keys() ^ stored.keys()):
        where = "the index names it, no shard holds it" if name not in stored else "the index does not name it"
        raise CheckpointError(f"{at.name}: tensor {name!a:.120}: {where}")
    return {name: form for name, (_, form) in stored.items()}


def is_whole(at: Snapshot) -> bool:
    """Whether the cache has all shards."""
    return all(_is_cached(at, file) for file in shards(at))


def _needed(stored: str, layers: Collection[int], *, ends: bool) -> bool:
    """Whether a stored tensor is of these layers; what the model does not run, as draft heads, never is."""
    meaning = translate(stored)
    if meaning is None:
        return False
    first, _, rest = meaning.parameter.partition(".")
    return int(rest.partition(".")[0]) in layers if first == "layers" else ends


def _file(name: str, revision: str | None, file: str) -> str:
    """Path of a file in the cache, downloaded where it is not there."""
    import huggingface_hub  # noqa: PLC0415

    cached = huggingface_hub.try_to_load_from_cache(name, file, revision=revision)
    return cached if isinstance(cached, str) else huggingface_hub.hf_hub_download(name, file, revision=revision)


def _optional(at: Snapshot, file: str) -> None:
    """Get a file that there need not be."""
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError  # noqa: PLC0415

    try:
        _file(at.name, at.commit, file)
    except LocalEntryNotFoundError:
        if file == INDEX:  # without it nothing is known of the shards
            raise
    except EntryNotFoundError:
        return


def _is_cached(at: Snapshot, file: str) -> bool:
    return (at.folder / file).is_file()


def _check_room(at: Snapshot, files: Sequence[str]) -> None:
    """Refuse a download that the disk has no room for: ConfigError. What an earlier one left unfinished is counted."""
    import huggingface_hub  # noqa: PLC0415

    paths = huggingface_hub.HfApi().get_paths_info(at.name, list(files), revision=at.commit)
    size = sum(getattr(path, "size", 0) for path in paths)
    blobs = at.folder.parents[1] / "blobs"
    begun = sum(path.stat().st_size for path in blobs.glob("*.incomplete"))
    free = shutil.disk_usage(at.folder).free
    if size > free + begun:
        raise ConfigError(
            f"{at.name}: {len(files)} files of {size / GIB:.1f} GiB are to be downloaded, {at.folder.parents[2]} has"
            f" room for {free / GIB:.1f} GiB"
        )


@contextlib.contextmanager
def _errors(
    name: str, revision: str | None, missing: str = "no such folder here, and not in the hub's cache"
) -> Iterator[None]:
    """Make one line of what huggingface_hub and the network raise; `missing` says why the hub is asked."""
    from huggingface_hub import errors  # noqa: PLC0415
    from huggingface_hub.utils import logging as hub_logging  # noqa: PLC0415

    told = {  # the first that fits: some are kinds of others
        errors.GatedRepoError: f"gated: accept its terms at https://huggingface.co/{name} and log in (hf auth login)",
        errors.RevisionNotFoundError: f"the hub has no revision {revision} of it",
        errors.RepositoryNotFoundError: "no such folder here, and no such model on the hub, or none that is shown"
        " without a login",
        errors.LocalEntryNotFoundError: f"{missing}, and the hub cannot be asked (offline, or no connection)",
        errors.OfflineModeIsEnabled: f"{missing}, and the hub cannot be asked (offline, or no connection)",
        errors.EntryNotFoundError: f"has no {CONFIG} on the hub",
        errors.HFValidationError: "no name of a model on the hub, and no such folder here",
    }
    level = hub_logging.get_verbosity()
    if level == logging.WARNING:  # its own, unless it is told otherwise: a line for each time that it tries
        hub_logging.set_verbosity(logging.ERROR)
    try:
        yield
    except Exception as error:
        for kind, line in told.items():
            if isinstance(error, kind):
                raise ConfigError(f"{name}: {line}") from error
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            raise ConfigError(f"{name}: the hub's cache: {error.strerror}") from error
        if type(error).__module__.partition(".")[0] in ITS_LIBRARIES:
            first = next(iter(str(error).strip().splitlines()), "")
            raise ConfigError(f"{name}: the hub: {type(error).__name__}: {first}") from error
        raise
    finally:
        hub_logging.set_verbosity(level)
