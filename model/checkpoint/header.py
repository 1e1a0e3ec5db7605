"""A safetensors file's header, checked against the file before anything is allocated for its data.

Layout: 8 bytes little-endian header length, the header (JSON: name -> dtype, shape, data_offsets), then the data.
The format demands that the ranges tile the data exactly, and here that is enforced: a range beyond the file, an overlap
or a hole means that a file is truncated, damaged or made to mislead. Memory used is bounded by the header's length,
which is bounded by the file's and by `MAX_HEADER_BYTES`, the format's own limit.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from fathom.model.checkpoint import strict_json
from fathom.model.errors import CheckpointError, quoted, shown
from fathom.model.files import regular_file_size

MAX_HEADER_BYTES: Final = 100_000_000
MAX_ELEMENTS: Final = 2**63 - 1
LENGTH_BYTES: Final = 8

# Every dtype of the format that fills whole bytes; which of them a parameter may have is the census's matter.
ITEM_BYTES: Final[dict[str, int]] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}


class StoredTensor(NamedTuple):
    """Where a tensor lies and what its bytes are."""

    name: str  # as the file writes it
    dtype: str  # a key of `ITEM_BYTES`
    shape: tuple[int, ...]
    shard: Path
    start: int  # first byte, counted from the beginning of the file
    stop: int  # one past the last byte

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.stop - self.start


class Shard(NamedTuple):
    """One safetensors file."""

    path: Path
    nbytes: int  # size of the file
    tensors: dict[str, StoredTensor]


def read_header(path: Path) -> Shard:
    """Parse and check the header of one safetensors file.

    Parameters
    ----------
    path : Path
        A regular file, or a symbolic link to one.

    Returns
    -------
    Shard
        Its tensors in the order of their bytes.

    Raises
    ------
    CheckpointError
        With one line naming the file, and the tensor where one is at fault.
    """
    size = regular_file_size(path)
    header, data_start = _header(path, size)
    tensors = [_tensor(path, name, entry, data_start) for name, entry in header.items() if name != "__metadata__"]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.stop))
    if tensors and (last := tensors[-1]).stop > size:
        raise _error(path, last.name, f"bytes {last.start} to {last.stop} are beyond the file's {size}")
    position = data_start
    for tensor in tensors:
        if tensor.start != position:
            fault = "overlaps the tensor before it" if tensor.start < position else "leaves a hole before it"
            raise _error(path, tensor.name, f"begins at byte {tensor.start}, want {position}: {fault}")
        position = tensor.stop
    if position != size:
        raise CheckpointError(f"{path}: {size - position} bytes after the last tensor belong to none")
    return Shard(path, size, {tensor.name: tensor for tensor in tensors})


def zipped(path: Path) -> bool:
    """Whether a file is a .pt archive of torch, which some publish in place of safetensors."""
    regular_file_size(path)
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _header(path: Path, size: int) -> tuple[Mapping[str, Any], int]:
    """The parsed header and the offset of the data."""
    try:
        data = _header_bytes(path, size)
    except OSError as error:  # that of a failed read does not know its file
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    if not data.startswith(b"{"):
        raise CheckpointError(f"{path}: the header does not begin with '{{': no safetensors file")
    try:
        header = strict_json.parse(data)
    except ValueError as error:
        raise CheckpointError(f"{path}: header: {error}") from None
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: __metadata__ is not a table of strings")
    return header, LENGTH_BYTES + len(data)


def _header_bytes(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if size < LENGTH_BYTES or length > size - LENGTH_BYTES:
            raise CheckpointError(f"{path}: header of {length} bytes in a file of {size}: truncated or no safetensors")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(f"{path}: header of {length} bytes, more than {MAX_HEADER_BYTES}")
        return file.read(length)


def _tensor(path: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _error(path, name, "want exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise _error(path, name, f"unknown dtype {shown(dtype)}")
    if not _are_sizes(shape):
        raise _error(path, name, f"shape {shown(shape)} is not a list of sizes")
    if math.prod(size for size in shape if size) > MAX_ELEMENTS:  # without zeros: a later size must not hide the rest
        raise _error(path, name, f"shape {shown(shape)} overflows 63 bits")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _error(path, name, f"data_offsets {shown(offsets)} are not two rising byte offsets")
    nbytes = math.prod(shape) * ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != nbytes:
        found = offsets[1] - offsets[0]
        raise _error(path, name, f"{found} bytes at {shown(offsets)}, but {dtype} {shown(shape)} takes {nbytes}")
    return StoredTensor(name, dtype, tuple(shape), path, data_start + offsets[0], data_start + offsets[1])


def _are_sizes(value: Any) -> bool:
    """Whether it is a list of integers from 0 to 2^63 - 1, at most 64 of them (torch's limit on dims)."""
    if not isinstance(value, list) or len(value) > 64:
        return False
    return all(type(size) is int and 0 <= size <= MAX_ELEMENTS for size in value)


def _error(path: Path, name: str, fault: str) -> CheckpointError:
    return CheckpointError(f"{path}: tensor {quoted(name)}: {fault}")
