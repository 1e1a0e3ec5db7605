"""Saved states of bounded caches in 8 or 4 bits: a form of its own, made from a state file and loaded by a run.

Every row of keys and of values in a `coda` layer of grouped heads (ring and banks) is rotated by Hadamard and coded by
Lloyd-Max, with its length in float16: `kernels.formats.coded_rows`. Whatever says which token a slot holds, and for how
long, stays as it was: slots in use, gates, times, counts. What the banks compare with is not stored but taken from the
coded rows, so that a loaded state agrees with itself. Layers with another cache stay exact.

Lossy: a run that continues is another one than that of the exact state. Such a file has its own format tag, so that
nothing takes it for an exact state by mistake, and the exact one cannot be had back from it.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fathom.kernels.formats import coded_rows, lloyd_max
from fathom.kernels.formats.stored import CodedRows
from fathom.model.choices import CODED_BITS
from fathom.model.errors import StateError, shown
from fathom.model.state import State
from fathom.model.variants.coded_entries import SIGNS
from fathom.runtime.load import AnyLoaded
from fathom.runtime.statefile import (
    FORMAT,
    Forms,
    Saved,
    check_forms,
    check_room,
    checked_file,
    fill,
    forms,
    load_state,
    read_file,
    read_metadata,
    read_saved,
    write_file,
)

CODED: Final = "fathom-coded-state-1"
ROWS: Final = re.compile(r"layers\.\d+\.coda\.(?:keys|values)")
DERIVED: Final = re.compile(r"layers\.\d+\.coda\.(?:exact|summary)_targets")  # by `CodaCache.restore`, from the rows


class Sizes(NamedTuple):
    """Bytes of tensors in a state, before and after coding."""

    rows: int  # of keys and values, exact
    coded: int  # the same, coded
    before: int  # of all tensors
    after: int  # of all tensors


def quantise_state(path: Path, bits: int, out: Path) -> Sizes:
    """Code the bounded caches of the exact state in `path` and write the result to `out`.

    StateError, with one line naming the file, when it is damaged, coded already, or has no bounded cache of rows whose
    width is a power of two.
    """
    assert bits in CODED_BITS, f"{bits} bits"
    tensors, metadata = read_file(path)
    if (tag := metadata.get("format")) != FORMAT:
        raise StateError(f"{path}: has format {shown(tag)}, want an exact state, {FORMAT!r}")
    rows = {name: part for name, part in tensors.items() if ROWS.fullmatch(name)}
    if not rows:
        raise StateError(f"{path}: no layer has a bounded cache of keys and values (--kv all=coda) to be coded")
    coded = {name: part for title, row in rows.items() for name, part in _coded(path, title, row, bits).items()}
    kept = {name: part for name, part in tensors.items() if name not in rows and not DERIVED.fullmatch(name)}
    write_file(out, kept | coded, metadata | {"format": CODED, "bits": str(bits)})
    return Sizes(_nbytes(rows), _nbytes(coded), _nbytes(tensors), _nbytes(kept | coded))


def coded_bits(path: Path) -> int | None:
    """Bits of the rows of a state file, as it says; None for an exact one. StateError when it is no state file."""
    metadata = read_metadata(path)
    if metadata.get("format") != CODED:
        return None
    named = {str(bits): bits for bits in CODED_BITS}
    if (bits := named.get(metadata.get("bits", ""))) is None:
        raise StateError(f"{path}: bits is {shown(metadata.get('bits'))}, want {' or '.join(named)}")
    return bits


def read_any_saved(path: Path, loaded: AnyLoaded) -> Saved:
    """`read_saved` for an exact or a coded state."""
    return read_saved(path, loaded, FORMAT if coded_bits(path) is None else CODED)


def load_any_state(path: Path, state: State, loaded: AnyLoaded) -> int | None:
    """`load_state` for an exact or a coded state, which is decoded into the run's dtype; returns the pending token."""
    if (bits := coded_bits(path)) is None:
        return load_state(path, state, loaded)
    saved = read_saved(path, loaded, CODED)
    check_room(path, saved, state)
    with checked_file(path) as (tensors, _):
        exact = forms(state, saved.position)
        check_forms(path, tensors.forms, _coded_forms(path, exact, bits))
        fill(path, state, saved, _Decoded(tensors, exact, bits))
    return saved.pending


class _Decoded(Mapping[str, Tensor]):
    """The tensors of the exact state that a coded one stands for, but for derived ones; each made when asked for."""

    def __init__(self, coded: Mapping[str, Tensor], exact: Forms, bits: int) -> None:
        self.coded, self.bits = coded, bits
        self.exact = {name: form for name, form in exact.items() if not DERIVED.fullmatch(name)}

    def __getitem__(self, name: str) -> Tensor:
        """Read one, and decode it where it was coded."""
        shape, dtype = self.exact[name]
        return _decoded(self.coded, name, shape, self.bits).to(dtype) if ROWS.fullmatch(name) else self.coded[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self.exact)

    def __len__(self) -> int:
        """Return the number of tensors."""
        return len(self.exact)


def _coded(path: Path, name: str, part: Tensor, bits: int) -> dict[str, Tensor]:
    """Code one tensor of rows, [K, slots, D], as the planes of K * slots rows."""
    if part.ndim != 3 or not part.is_floating_point():
        raise StateError(f"{path}: {name} is {list(part.shape)} {part.dtype}, want rows of keys or values")
    width = part.shape[2]
    if width & (width - 1) or width < 2:
        raise StateError(f"{path}: {name} is {width} wide; only rows whose width is a power of two can be rotated")
    flat = part.flatten(0, 1)
    rows = coded_rows.allocate(flat.shape[0], width, bits, part.device, SIGNS)
    coded_rows.write(rows, 0, flat)
    if not bool(rows.norm.isfinite().all()):
        raise StateError(f"{path}: {name} has a row whose length float16 cannot hold")
    return {f"{name}.{plane}": stored for plane, stored in coded_rows.planes(rows).items()}


def _decoded(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], bits: int) -> Tensor:
    """Undo `_coded`: [K, slots, D] float32."""
    norm, codes = tensors[f"{name}.norm"], tensors[f"{name}.codes"]
    rows = CodedRows(norm, codes, bits, coded_rows.random_signs(shape[2], SIGNS, codes.device))
    return coded_rows.read(rows, 0, norm.shape[0]).view(shape)


def _coded_forms(path: Path, exact: Forms, bits: int) -> Forms:
    """Shape and dtype of each tensor in the coded form of a state with these; StateError where there is none."""
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, (shape, dtype) in exact.items():
        if ROWS.fullmatch(name):
            heads, slots, width = shape
            if width & (width - 1) or width < 2:
                raise StateError(f"{path}: {name} is {width} wide, and no power of two")
            wanted[f"{name}.norm"] = ((heads * slots,), torch.float16)
            wanted[f"{name}.codes"] = ((heads * slots, lloyd_max.packed_bytes(width, bits)), torch.uint8)
        elif not DERIVED.fullmatch(name):
            wanted[name] = (shape, dtype)
    return wanted


def _nbytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(part.nbytes for part in tensors.values())
