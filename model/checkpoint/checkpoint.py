"""A checkpoint directory: its shards, their tensors, and the bytes of a tensor on demand.

Which folders are read says `model.checkpoint.folder`. Data is memory-mapped, so opening costs the headers only, and a
checkpoint may be larger than memory.
"""

import mmap
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import torch
from torch import Tensor

from fathom.model.checkpoint.folder import read_headers
from fathom.model.checkpoint.header import ITEM_BYTES, Shard, StoredTensor
from fathom.model.errors import CheckpointError, quoted
from fathom.model.files import regular_file_size

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}

# Without MAP_NORESERVE, Linux refuses a private mapping of a shard larger than memory and swap together.
_MAP_NORESERVE: Final = 0x4000 if sys.platform == "linux" else 0  # python names it from 3.13 on


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint; `Checkpoint.open` makes it."""

    directory: Path
    shards: tuple[Shard, ...]  # in the order of their names
    tensors: Mapping[str, StoredTensor]  # by stored name
    unlisted: tuple[str, ...]  # *.safetensors files in the folder that the index does not name; never read
    absent: Mapping[str, str] = field(default_factory=dict)  # stored name -> file of the index that is not there
    _maps: dict[Path, mmap.mmap] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def open(cls, directory: Path, *, partial: bool = False) -> Self:
        """Read and check the index and every shard's header.

        Parameters
        ----------
        directory : Path
            A checkpoint folder or a hub snapshot folder.
        partial : bool
            Whether shards may be missing; what the index says of them is then `absent`.

        Raises
        ------
        CheckpointError
            With one line naming the file, and the tensor where one is at fault.
        """
        shards, absent = read_headers(directory, partial=partial)
        tensors = {name: tensor for shard in shards for name, tensor in shard.tensors.items()}
        read = {shard.path.name for shard in shards}
        unlisted = sorted(path.name for path in directory.glob("*.safetensors") if path.name not in read)
        return cls(directory, shards, tensors, tuple(unlisted), absent)

    def shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Stored name -> (dtype, shape): what `census` takes."""
        return {name: (tensor.dtype, tensor.shape) for name, tensor in self.tensors.items()}

    def read(self, name: str) -> Tensor:
        """One tensor as stored, on the CPU.

        Parameters
        ----------
        name : str
            A stored name.

        Returns
        -------
        Tensor
            A view of the mapped file, not a copy, unless its first byte is misaligned for its dtype. Its pages are
            read when they are first used. Writing to it changes this process's view, never the file.

        Raises
        ------
        CheckpointError
            For an unknown name, or when the shard changed its size since it was opened.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.directory}: no tensor {quoted(name)}")
        tensor = self.tensors[name]
        dtype = TORCH_DTYPES[tensor.dtype]
        if tensor.nbytes == 0:  # torch.frombuffer wants at least one element
            return torch.empty(tensor.shape, dtype=dtype)
        data = torch.frombuffer(self._map(tensor.shard), dtype=torch.uint8, count=tensor.nbytes, offset=tensor.start)
        if data.data_ptr() % ITEM_BYTES[tensor.dtype] != 0:
            data = data.clone()
        return data.view(dtype).view(tensor.shape)

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """Rows [n, ...] of one tensor as stored, by their numbers [n] int64; a copy. CheckpointError as `read`."""
        rows: Tensor = self.read(name)[ids]
        return rows

    def outline(self, name: str) -> Tensor:
        """Dtype and shape of a tensor, on torch's meta device: no byte of it is read, nor its file mapped.

        A view's `storage_offset` says where in the tensor it begins. CheckpointError for an unknown name.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.directory}: no tensor {quoted(name)}")
        tensor = self.tensors[name]
        return torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype], device="meta")

    def _map(self, path: Path) -> mmap.mmap:
        """The whole shard, mapped on first use: private and writable, as torch wants a buffer that it may write."""
        if path not in self._maps:
            size = next(shard.nbytes for shard in self.shards if shard.path == path)
            with path.open("rb") as file:
                if regular_file_size(path) != size:
                    raise CheckpointError(f"{path}: its size changed after it was opened")
                made = mmap.mmap(
                    file.fileno(),
                    size,
                    flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
                    prot=mmap.PROT_READ | mmap.PROT_WRITE,
                )
            self._maps.setdefault(path, made)  # another thread may have come first
        return self._maps[path]
