"""What a checkpoint's files hold, read by numpy alone: an oracle for everything between the files and the model.

It shares no code with `model.checkpoint.checkpoint`, `model.checkpoint.weights` or the kernels: headers are parsed
again, numbers are built from their bits. It is not careful with hostile files; the census was, before this runs.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.checkpoint.tensor_mapping import TensorMapping

Numbers = NDArray[np.float64]
Raw = NDArray[Any]

# How many bytes an item takes, as numpy reads it; formats that numpy lacks as bare bits.
RAW: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype("<u2"),
    "F32": np.dtype("<f4"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "F8_E4M3": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
    "I8": np.dtype("u1"),
    "U8": np.dtype("u1"),
}


def _e4m3() -> Numbers:
    """Values of all E4M3 codes: sign, four exponent bits of bias 7, three of mantissa; S.1111.111 is NaN."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    return np.where(code & 127 == 127, np.nan, np.where(code >> 7 == 1, -size, size))


E4M3 = _e4m3()  # by byte
E8M0 = np.array([*(2.0 ** (byte - 127) for byte in range(255)), np.nan])  # by byte
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # by the four bits, sign first


def e2m1(byte: Raw) -> Numbers:
    """Values of bytes [rows, n] of two E2M1 codes, the even column in the low nibble: [rows, 2n]."""
    return np.stack((E2M1[byte & 15], E2M1[byte >> 4]), axis=-1).reshape(len(byte), -1)


class Place(NamedTuple):
    """Where a tensor lies."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # first byte, from the beginning of the file


class FileBytes:
    """The tensors of a checkpoint directory, by stored name; a read touches the bytes asked for and no others."""

    def __init__(self, directory: Path) -> None:
        index = directory / "model.safetensors.index.json"
        shards = ["model.safetensors"]
        if index.is_file():
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        self.places: dict[str, Place] = {}
        self.data_bytes = 0  # of all files, without their headers
        for path in (directory / shard for shard in shards):
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            self.data_bytes += path.stat().st_size - 8 - length
            for name, entry in header.items():
                start = 8 + length + entry["data_offsets"][0]
                self.places[name] = Place(path, entry["dtype"], tuple(entry["shape"]), start)

    def rows(self, name: str, start: int, stop: int, expert: int | None = None) -> Raw:
        """Rows `start` to `stop` of a tensor as stored, of one expert where it is a stack of them."""
        path, dtype, shape, offset = self.places[name]
        raw = RAW[dtype]
        if expert is not None:
            shape, offset = shape[1:], offset + expert * int(np.prod(shape[1:])) * raw.itemsize
        width = int(np.prod(shape[1:]))
        read: Raw = np.fromfile(path, raw, (stop - start) * width, offset=offset + start * width * raw.itemsize)
        return read.reshape(stop - start, *shape[1:])

    def decode(self, bound: TensorMapping, start: int, stop: int) -> Numbers:
        """Rows `start` to `stop` of a parameter, decoded; a parameter of one axis is one row for each value.

        Equations: FP8 ``W[i, j] s[i // 128, j // 128]``, FP4 ``W[i, j] s[i, j // 32]``, NVFP4
        ``W[i, j] s[i, j // 16] g``. In fp64 every product here is exact.
        """
        expert = None
        if bound.part is not None:
            expert, start, stop = bound.part.expert, bound.part.start + start, bound.part.start + stop
        data, dtype = self.rows(bound.weight, start, stop, expert), self.places[bound.weight].dtype
        match dtype:
            case "BF16":
                return (data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
            case "F8_E4M3":
                first = start // 128
                scale = self._scale(bound.scale, first, -(-stop // 128))
                block = np.arange(start, stop) // 128 - first
                return E4M3[data] * scale[block][:, np.arange(data.shape[1]) // 128]
            case "I8":
                return e2m1(data) * np.repeat(self._scale(bound.scale, start, stop), 32, axis=1)
            case "U8":
                overall = self._scale(bound.global_scale, 0, 1)  # one number, of shape [] or [1]
                return e2m1(data) * np.repeat(self._scale(bound.scale, start, stop), 16, axis=1) * overall
            case _:  # numbers that numpy knows
                return data.astype(np.float64)

    def _scale(self, name: str | None, start: int, stop: int) -> Numbers:
        assert name is not None
        data = self.rows(name, start, stop)
        match self.places[name].dtype:
            case "F8_E8M0":
                return E8M0[data]
            case "F8_E4M3":
                return E4M3[data]
            case _:
                return data.astype(np.float64)


def unaccounted(files: FileBytes, mappings: Sequence[TensorMapping], ignored: Sequence[str]) -> list[str]:
    """Stored names that no parameter is made of and that nothing says to ignore."""
    used = {name for bound in mappings for name in (bound.weight, bound.scale, bound.global_scale) if name}
    return sorted(files.places.keys() - used - set(ignored))
