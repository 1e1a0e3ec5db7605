"""Tensors as DeepSeek lays them out: a shard for the embedding, one for each layer, one for the head, and the index."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fathom.model.checkpoint.folder import INDEX
from fathom.model.checkpoint.header import ITEM_BYTES, LENGTH_BYTES
from fathom.model.checkpoint.tensor_mapping import Stored

DTYPES: Final = ("I64", "F32", "BF16", "F8_E8M0", "F8_E4M3", "I8")  # their order within a published shard
ALIGNMENT: Final = 8  # of the first byte of data

Values = Callable[[str], Iterable[Any]]  # of one tensor: buffers, in order


def shards(tensors: Mapping[str, Stored]) -> dict[str, list[str]]:
    """File name -> the tensors in it, in the order of their bytes.

    Parameters
    ----------
    tensors : Mapping[str, tuple[str, Sequence[int]]]
        Official stored name -> dtype and shape. Layers are numbered from 0 without a gap.
    """
    parts: dict[int, list[str]] = {}
    layers = len({name.split(".")[1] for name in tensors if name.startswith("layers.")})
    for name in sorted(tensors, key=lambda name: (DTYPES.index(tensors[name][0]), name)):
        first, _, rest = name.partition(".")
        part = int(rest.partition(".")[0]) + 1 if first == "layers" else 0 if first == "embed" else layers + 1
        parts.setdefault(part, []).append(name)
    return {f"model-{part + 1:05}-of-{layers + 2:05}.safetensors": parts[part] for part in sorted(parts)}


def nbytes(stored: Stored) -> int:
    """Bytes of one tensor."""
    return math.prod(stored[1]) * ITEM_BYTES[stored[0]]


def header(tensors: Mapping[str, Stored], names: Sequence[str]) -> bytes:
    """What stands before the data of a shard: the header's length, and the header, padded with spaces."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in names:
        dtype, shape = tensors[name]
        stop = start + nbytes(tensors[name])
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def index(tensors: Mapping[str, Stored]) -> bytes:
    """The index file."""
    weight_map = {name: file_name for file_name, names in shards(tensors).items() for name in names}
    total = sum(map(nbytes, tensors.values()))
    obj = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(obj, indent=2) + "\n").encode()


def total_bytes(tensors: Mapping[str, Stored]) -> int:
    """Bytes of all shards, headers included, and of the index."""
    headers = sum(len(header(tensors, names)) for names in shards(tensors).values())
    return headers + sum(map(nbytes, tensors.values())) + len(index(tensors))


def write_shards(
    directory: Path, tensors: Mapping[str, Stored], values: Values, written: Callable[[int], None]
) -> None:
    """Write every shard, then the index.

    Parameters
    ----------
    directory : Path
        Exists.
    tensors : Mapping[str, tuple[str, Sequence[int]]]
        As in `shards`.
    values : Callable[[str], Iterable[buffer]]
        The data of one tensor in pieces, the only part of it that is in memory.
    written : Callable[[int], None]
        Called with the number of bytes after each write.
    """
    for file_name, names in shards(tensors).items():
        with (directory / file_name).open("wb") as file:
            written(file.write(header(tensors, names)))
            for name in names:
                start = file.tell()
                for piece in values(name):
                    written(file.write(piece))
                wrote, want = file.tell() - start, nbytes(tensors[name])
                assert wrote == want, f"{name}: {wrote} bytes, want {want}"
    written((directory / INDEX).write_bytes(index(tensors)))
