"""Stored tensors -> weights in their stored form, values checked; nothing is converted.

`open_weights` reads every scale and expert table once and refuses what cannot be meant: these few values each govern
many weights, and a NaN among them would surface layers later. The weights themselves are not read, they are mapped.
"""

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch
from torch import Tensor

from fathom.kernels.formats.stored import Dense, Fp4, Fp8, Fp8Rows, NvFp4, Weight, layout, member, nbytes, rows
from fathom.model.checkpoint.census import Census
from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.checkpoint.filling import THREADS, Filler, Source
from fathom.model.checkpoint.names import Kind
from fathom.model.checkpoint.tensor_mapping import ROUNDED, Form, TensorMapping
from fathom.model.errors import CheckpointError, quoted
from fathom.model.ranks.ranks import AxisShard, undivided

CPU: Final = torch.device("cpu")
HASHED_WHOLE: Final = 256 << 20  # bytes of data up to which `fingerprint` reads all of it
HASHED_END: Final = 4096  # bytes read of each end of each tensor beyond that


# Official name and number of rows of a parameter to the part of them that is held here.
Held = Callable[[str, int], AxisShard]


def everything(name: str, rows: int) -> AxisShard:
    """All of every parameter: what one rank alone holds."""
    del name
    return undivided(rows)


class Weights:
    """The parameters of a checkpoint by official name; `open_weights` makes it.

    It hands out views of the mapped files, or copies on the device that `open_weights` was given, and records which.
    Where it was given a rank's part, these are the rows of that part: no byte of the others is read.
    """

    def __init__(
        self, checkpoint: Checkpoint, census: Census, device: torch.device, held: Held, *, copied: bool = False
    ) -> None:
        self._checkpoint, self._census, self._device, self._held = checkpoint, census, device, held
        self._copied = copied or device.type != "cpu"
        self._filler: Filler | None = None
        self._handed: dict[str, int] = {}  # bytes by name

    @contextlib.contextmanager
    def filling(self) -> Iterator[Filler]:
        """Copies that are handed out inside the ``with`` are filled by threads: they hold their values after it.

        Those of `matrix`, `matrices` and `operand`, which outside of one wait for their values. Inside another one
        this does nothing.

        Raises
        ------
        CheckpointError
            At its end: with one line naming the file that changed its size, or cannot be read.
        """
        if self._filler is not None:
            yield self._filler
            return
        filler = Filler(self._device, {shard.path: shard.nbytes for shard in self._checkpoint.shards})
        with contextlib.closing(filler):
            self._filler = filler
            try:
                yield filler
                filler.finish()
            finally:
                self._filler = None

    def matrix(self, name: str) -> Weight:
        """One quantisable linear [out, in], or the rows of it that are held here, in its stored form.

        Raises
        ------
        CheckpointError
            When the architecture has no such matrix.
        """
        if self._copied:
            return self._copies([name])[0]
        stored = self._held_rows(name)
        self._handed[name] = nbytes(stored)
        return stored

    def matrices(self, names: Sequence[str], *, together: bool) -> list[Weight]:
        """Quantisable linears [out, in] of one shape, as `matrix`; `together`: copies one behind another in memory.

        Those of several forms lie each for itself in any case. Memory for all is allocated first and filled then: no
        matrix is held twice.
        """
        if not together or len({layout(self._outline(name)) for name in names}) > 1:
            return [self.matrix(name) for name in names]
        return self._copies(names)

    def operand(self, name: str) -> Tensor:
        """One parameter as `vector`, that is read as stored and not converted while the model is built.

        As `matrix`, a copy of it may be filled later: embedding, head, gate, compressors.
        """
        if not self._copied:
            return self.vector(name)
        shard = self._shard(name, ("bf16", "f32"))
        stored = self._census.mappings[name].weight
        outline = shard.of(self._checkpoint.outline(stored))
        copy = torch.empty(outline.shape, dtype=outline.dtype, device=self._device)
        with self.filling() as filler:
            filler.fill(copy, [self._source(stored, outline)])
        self._handed[name] = copy.nbytes
        return copy

    def sources(self, name: str) -> list[Source]:
        """Where in the files each plane of what is held of a matrix is; CheckpointError as `matrix`."""
        outline, mapping = self._outline(name), self._census.mappings[name]
        stored = [part for part in (mapping.weight, mapping.scale, mapping.global_scale) if part is not None]
        return [self._source(part, plane) for part, plane in zip(stored, outline, strict=True)]

    def vector(self, name: str) -> Tensor:
        """One parameter that is never quantised (norm, bias, embedding, mHC, ...), bfloat16 or float32 as stored.

        Raises
        ------
        CheckpointError
            When the architecture has no such parameter.
        """
        return self._rows(name, ("bf16", "f32")).to(self._device)

    def table(self, name: str) -> Tensor:
        """One table of expert ids, int64.

        Raises
        ------
        CheckpointError
            When the architecture has no such table.
        """
        return self._rows(name, ("i64",)).to(self._device, torch.int64)

    def rows(self, name: str) -> Fp8Rows:
        """One table whose rows are looked up by number, mapped: of its rows only those that are looked up are read.

        Raises
        ------
        CheckpointError
            When the architecture has no such table.
        """
        self._shard(name, ("rows",))
        mapping = self._census.mappings[name]
        assert mapping.scale is not None, f"{name}: the census wants scales"
        table = Fp8Rows(self._checkpoint.read(mapping.weight), self._checkpoint.read(mapping.scale))
        self._handed[name] = table.data.nbytes + table.scale.nbytes
        return table

    def forms(self, names: Iterable[str]) -> set[Form]:
        """The forms of these matrices, on whichever rank."""
        return {self._census.mappings[name].form for name in names}

    def coded(self, names: Iterable[str]) -> bool:
        """Whether all of these matrices, on whichever rank, are of a form whose inputs may be rounded to FP8."""
        return self.forms(names) <= set(ROUNDED)

    def here(self, names: Iterable[str]) -> list[str]:
        """Those of these parameters of which anything is held here."""
        return [name for name in names if self._held(name, self._census.demanded[name].shape[0]).size]

    def unread(self) -> list[str]:
        """Parameters held here that were never asked for, in the order of the architecture."""
        return self.here(name for name in self._census.mappings if name not in self._handed)

    def handed(self) -> dict[str, int]:
        """Bytes handed out, as stored, by parameter: a rank's receipt."""
        return dict(self._handed)

    def _shard(self, name: str, kinds: tuple[Kind, ...]) -> AxisShard:
        """What is here of a parameter that the architecture must have, as one of these kinds."""
        if name not in self._census.demanded:
            raise CheckpointError(f"{self._checkpoint.directory}: the architecture has no parameter {quoted(name)}")
        if (kind := self._census.demanded[name].kind) not in kinds:
            raise CheckpointError(f"{self._checkpoint.directory}: {name} is {kind}, asked for as {' or '.join(kinds)}")
        return self._held(name, self._census.demanded[name].shape[0])

    def _copies(self, names: Sequence[str]) -> list[Weight]:
        """Copies of matrices of one layout, one behind another in memory, which the threads of `filling` fill."""
        outlines = [self._outline(name) for name in names]
        form, first = type(outlines[0]), outlines[0]
        planes = [torch.empty(len(names), *plane.shape, dtype=plane.dtype, device=self._device) for plane in first]
        with self.filling() as filler:
            for plane, sources in zip(planes, zip(*map(self.sources, names), strict=True), strict=True):
                filler.fill(plane, sources)
        self._handed |= {name: nbytes(outline) for name, outline in zip(names, outlines, strict=True)}
        stacked: Weight = form(*planes)
        return [member(stacked, index) for index in range(len(names))]

    def _held_rows(self, name: str) -> Weight:
        """What is held here of a matrix, as views of the mapped file."""
        return self._part_of(name, self._checkpoint.read)

    def _outline(self, name: str) -> Weight:
        """The same without data, see `Checkpoint.outline`."""
        return self._part_of(name, self._checkpoint.outline)

    def _part_of(self, name: str, read: Callable[[str], Tensor]) -> Weight:
        shard = self._shard(name, ("matrix",))
        stored = _stored(self._census.mappings[name], read)
        return rows(stored, shard.start, shard.stop) if shard.split else stored

    def _source(self, stored: str, outline: Tensor) -> Source:
        assert outline.is_contiguous(), f"what is held of {stored} lies apart"
        tensor = self._checkpoint.tensors[stored]
        start = tensor.start + int(outline.storage_offset()) * outline.element_size()
        return Source(tensor.shard, start, outline.nbytes)

    def _rows(self, name: str, kinds: tuple[Kind, ...]) -> Tensor:
        data = self._shard(name, kinds).of(self._checkpoint.read(self._census.mappings[name].weight))
        self._handed[name] = data.nbytes
        return data


def _stored(mapping: TensorMapping, read: Callable[[str], Tensor]) -> Weight:
    """The whole matrix, as views of what `read` gives for the stored tensors' names."""
    data = read(mapping.weight)
    if mapping.part is not None:
        data = data[mapping.part.expert, mapping.part.start : mapping.part.stop]
    if mapping.scale is None:
        return Dense(data)
    scale = read(mapping.scale)
    if mapping.global_scale is not None:
        return NvFp4(data, scale, read(mapping.global_scale).reshape(()))
    return Fp4(data, scale) if mapping.form is Form.FP4 else Fp8(data, scale)


def open_weights(
    checkpoint: Checkpoint,
    census: Census,
    device: torch.device = CPU,
    only: Collection[str] | None = None,
    held: Held = everything,
    *,
    copied: bool = False,
) -> Weights:
    """Check the values of scales and expert tables, and give access to the parameters.

    Parameters
    ----------
    checkpoint : Checkpoint
        The opened files.
    census : Census
        Of the same checkpoint.
    device : torch.device
        Where `Weights` hands tensors out. On the CPU they stay mapped, but for matrices that are to lie together.
    only : Collection[str] | None
        Official names whose values are checked. None: all.
    held : Held
        Official name and number of rows to the part of them that is held here.
    copied : bool
        Whether matrices are copied on the CPU too.

    Raises
    ------
    CheckpointError
        With one line naming the stored tensor and the first place at fault: a scale that is NaN, infinite, negative,
        zero (but for the block scales of NVFP4), or (FP8 with F32 scales; `scale_fmt` is ue8m0) not a power of two; an
        expert id outside the experts, or twice in a row.
    """
    names = census.mappings if only is None else only

    def check(name: str) -> None:
        if name not in census.mappings:
            raise CheckpointError(f"{checkpoint.directory}: the architecture has no parameter {quoted(name)}")
        if census.demanded[name].kind == "rows":
            return  # a hundred gigabytes: a scale that is NaN makes streams NaN, which a tripwire sees
        mapping, shard = census.mappings[name], held(name, census.demanded[name].shape[0])
        if mapping.scale is not None and mapping.global_scale is not None:
            _check_scale(checkpoint, mapping.scale, shard, is_not_negative, "a finite number, not negative")
            _check_scale(checkpoint, mapping.global_scale, undivided(1), is_positive, "a finite positive number")
        elif mapping.scale is not None:
            _check_scale(checkpoint, mapping.scale, shard, is_power_of_two, "a power of two")
        if census.demanded[name].kind == "i64":
            experts = census.demanded[f"{name.rpartition('.')[0]}.weight"].shape[0]  # rows of the gate beside it
            _check_table(checkpoint, mapping.weight, experts)

    # Scales are a seventeenth of FP4: one thread would take half as long to check them as a load onto a GPU takes.
    with ThreadPoolExecutor(THREADS if device.type != "cpu" else 1, "check") as threads:
        for _ in threads.map(check, names):  # in the order of the names, and so with the first fault
            pass
    return Weights(checkpoint, census, device, held, copied=copied)


def is_power_of_two(scale: Tensor) -> Tensor:
    """Which scales are a power of two that E8M0 has, 2^-127 to 2^127.

    Parameters
    ----------
    scale : Tensor
        [...] float8_e8m0fnu or float32.

    Returns
    -------
    Tensor
        [...] bool. Of E8M0's bytes only 255, its NaN, is none.
    """
    if scale.dtype == torch.float8_e8m0fnu:
        return scale.view(torch.uint8) != 255
    assert scale.dtype == torch.float32, f"scale: {scale.dtype}, want float8_e8m0fnu or float32"
    bits = scale.view(torch.int32)
    normal = (bits & 0x7FFFFF == 0) & (bits > 0) & (bits < 0x7F800000)
    return normal | (bits == 1 << 22)  # 2^-127 is a subnormal


def is_positive(scale: Tensor) -> Tensor:
    """Which scales [...], float8_e4m3fn or float32, are finite and above zero; [...] bool."""
    values = scale.float()
    return torch.isfinite(values) & (values > 0)


def is_not_negative(scale: Tensor) -> Tensor:
    """Which scales [...] float8_e4m3fn are finite and not below zero; [...] bool.

    Zero is allowed: a block of 16 weights far below the matrix's largest underflows E4M3, and decodes to zeros.
    """
    values = scale.float()
    return torch.isfinite(values) & (values >= 0)


def _check_scale(
    checkpoint: Checkpoint, stored: str, shard: AxisShard, fits: Callable[[Tensor], Tensor], want: str
) -> None:
    """Check the scales of a shard of a matrix's rows: FP8 has a row of scales for a block of them."""
    scale, first = checkpoint.read(stored), 0
    if shard.split:
        rows_per_scale = -(-shard.total // scale.shape[0])  # rows of the matrix for a row of scales
        first = shard.start // rows_per_scale
        scale = scale[first : -(-shard.stop // rows_per_scale)]
    bad = ~fits(scale)
    if bad.any():
        place = bad.nonzero()[0].tolist()
        value = scale[tuple(place)].float().item()
        if place:
            place[0] += first
        raise CheckpointError(f"{_where(checkpoint, stored)}: scale {place} is {value}, want {want}")


def _check_table(checkpoint: Checkpoint, stored: str, experts: int) -> None:
    table = checkpoint.read(stored)  # [vocab, k]
    outside = (table < 0) | (table >= experts)
    if outside.any():
        row, column = outside.nonzero()[0].tolist()
        found = table[row, column].item()
        raise CheckpointError(f"{_where(checkpoint, stored)}: row {row} names expert {found} of {experts}")
    ordered = table.sort(dim=1).values
    twice = (ordered[:, 1:] == ordered[:, :-1]).any(1)
    if twice.any():
        row = int(twice.nonzero()[0])
        raise CheckpointError(f"{_where(checkpoint, stored)}: row {row} names an expert twice: {table[row].tolist()}")


def _where(checkpoint: Checkpoint, stored: str) -> str:
    return f"{checkpoint.tensors[stored].shard}: tensor {quoted(stored)}"


def headers_digest(checkpoint: Checkpoint) -> str:
    """SHA-256 over every tensor's name, dtype, shape and place in its shard, as 64 hex digits; no data is read."""
    digest = hashlib.sha256()
    for name, tensor in sorted(checkpoint.tensors.items()):
        place = (name, tensor.dtype, tensor.shape, tensor.shard.name, tensor.start)
        digest.update(repr(place).encode(errors="surrogatepass"))
    return digest.hexdigest()


def fingerprint(checkpoint: Checkpoint) -> str:
    """A hash that binds saved states and reports to a checkpoint's weights.

    SHA-256 over every tensor's name, dtype and shape and its shard's size, in the order of the names, and over content:
    all of it where the data is at most 256 MiB, else the first and last 4 KiB of each tensor. So for a large
    checkpoint it tells releases, quantisations and fine-tunes apart, but not an edit in the middle of one tensor. How
    tensors are split into shards enters it: the same weights sharded anew have another fingerprint.

    Parameters
    ----------
    checkpoint : Checkpoint
        The opened files.

    Returns
    -------
    str
        64 hex digits.
    """
    digest = hashlib.sha256()
    whole = sum(tensor.nbytes for tensor in checkpoint.tensors.values()) <= HASHED_WHOLE
    sizes = {shard.path: shard.nbytes for shard in checkpoint.shards}
    for name, tensor in sorted(checkpoint.tensors.items()):
        # repr keeps name, dtype and shape apart: no two lists of tensors give the same text
        digest.update(repr((name, tensor.dtype, tensor.shape, sizes[tensor.shard])).encode(errors="surrogatepass"))
        data = checkpoint.read(name).reshape(-1).view(torch.uint8)
        for part in (data,) if whole else (data[:HASHED_END], data[-HASHED_END:]):
            digest.update(part.numpy().data)
    return digest.hexdigest()
