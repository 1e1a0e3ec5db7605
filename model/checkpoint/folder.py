"""The files of a checkpoint folder: which there are, and their headers, checked without torch.

Read are a folder with `model.safetensors.index.json` and the shards it names, and a folder with one
`model.safetensors`; a hub snapshot is such a folder of symbolic links. Index and shards must agree exactly.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from fathom.model.checkpoint import strict_json
from fathom.model.checkpoint.header import Shard, read_header
from fathom.model.errors import CheckpointError, quoted
from fathom.model.files import read_bounded

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
TOKENIZER: Final = "tokenizer.json"
MAX_INDEX_BYTES: Final = 100_000_000


def read_headers(directory: Path, *, partial: bool = False) -> tuple[tuple[Shard, ...], dict[str, str]]:
    """Read and check the index and every shard's header.

    Parameters
    ----------
    directory : Path
        A checkpoint folder or a hub snapshot folder.
    partial : bool
        Whether shards may be missing.

    Returns
    -------
    tuple[Shard, ...]
        In the order of their names.
    dict[str, str]
        Of shards that are missing, stored name -> file name, as the index says.

    Raises
    ------
    CheckpointError
        With one line naming the file, and the tensor where one is at fault.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such folder")
    index, single = directory / INDEX, directory / SINGLE
    if index.exists() and single.exists():
        raise CheckpointError(f"{directory}: holds both {INDEX} and {SINGLE}; want one of them")
    if index.exists():
        return _sharded(index, partial=partial)
    if single.exists():
        return (read_header(single),), {}
    raise CheckpointError(f"{directory}: holds neither {INDEX} nor {SINGLE}")


def _sharded(index: Path, *, partial: bool) -> tuple[tuple[Shard, ...], dict[str, str]]:
    """Every shard that the index names, each holding exactly the tensors that the index assigns to it.

    Where the folder may be partial, those that are there, and stored name -> file of the others.
    """
    files = weight_map(index)
    assigned: dict[str, set[str]] = {}
    for name, file_name in files.items():
        assigned.setdefault(file_name, set()).add(name)
    there = {name for name in assigned if not partial or (index.parent / name).exists()}
    shards = tuple(read_header(index.parent / file_name) for file_name in sorted(there))
    for shard in shards:
        held, wanted = shard.tensors.keys(), assigned[shard.path.name]
        for name in sorted(wanted - held):
            raise CheckpointError(
                f"{shard.path}: tensor {quoted(name)}: the index names it, the shard does not hold it"
            )
        for name in sorted(held - wanted):
            if name in files:
                raise CheckpointError(f"{shard.path}: tensor {quoted(name)}: duplicate, also in {files[name]}")
            raise CheckpointError(
                f"{shard.path}: tensor {quoted(name)}: the shard holds it, the index does not name it"
            )
    return shards, {name: file_name for name, file_name in files.items() if file_name not in there}


def weight_map(index: Path) -> Mapping[str, str]:
    """Stored name -> file name, as an index says; CheckpointError where it is damaged, or leads out of its folder."""
    data = read_bounded(index, MAX_INDEX_BYTES, CheckpointError)
    try:
        obj = strict_json.parse(data)
    except ValueError as error:
        raise CheckpointError(f"{index}: {error}") from None
    # metadata.total_size is not read: NVFP4 exports copy it from another checkpoint
    files = obj.get("weight_map") if isinstance(obj, dict) else None
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"{index}: weight_map is missing or empty")
    for name, shard in files.items():
        if not isinstance(shard, str):
            raise CheckpointError(f"{index}: tensor {quoted(name)}: its shard is not a file name")
    for shard in sorted(set(files.values())):
        _check_shard_name(index, shard)
    return files


def _check_shard_name(index: Path, shard: str) -> None:
    """A shard is a plain file name: the index must not make this process open files elsewhere."""
    if shard in ("", ".", "..") or "/" in shard or "\\" in shard or not shard.isprintable():
        raise CheckpointError(f"{index}: shard {quoted(shard)} is not a plain file name in the folder")
