"""The four forms in which a checkpoint stores a matrix, and the five of a cache's rows, as tuples of tensors.

A weight stays in its stored form for the whole run; the op that uses it decodes a part at a time. Which form a
tensor has is read off the stored tensors themselves (dtype and the scales beside it), never off a global key of
config.json: checkpoints mix forms.

Entries and index keys stay in their form too: the ops that read them decode the rows of one tile
(`kernels.formats.rows`). Their planes are separate tensors, so that values, scales and rope dims are each aligned and
can be gathered by row.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fathom.kernels.formats.groups import FP8_BLOCK, SMALL_FP8_BLOCK


class Dense(NamedTuple):
    """A matrix stored in BF16, F16 or F32."""

    data: Tensor  # [out, in] bfloat16, float16 or float32

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in], in weights."""
        return self.data.shape[-2], self.data.shape[-1]


class Fp8(NamedTuple):
    """E4M3 values with one scale per square block; blocks at the right and lower edge may be partial."""

    data: Tensor  # [out, in] float8_e4m3fn
    scale: Tensor  # [ceil(out / block), ceil(in / block)] float8_e8m0fnu or float32

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in], in weights."""
        return self.data.shape[-2], self.data.shape[-1]

    @property
    def block(self) -> int:
        """Rows, and columns, of a block: 128, or 32 where there are as many scales; of one scale either is right."""
        small = [-(-size // SMALL_FP8_BLOCK) for size in self.shape]
        return SMALL_FP8_BLOCK if [*self.scale.shape[-2:]] == small else FP8_BLOCK


class Fp8Rows(NamedTuple):
    """A table of rows that are looked up by number, no matrix: E4M3 values, one E8M0 scale per 32 columns of a row."""

    data: Tensor  # [rows, d] float8_e4m3fn
    scale: Tensor  # [rows, d / 32] float8_e8m0fnu


class Fp4(NamedTuple):
    """E2M1 values, two per byte with the even column in the low nibble, one E8M0 scale per 32 columns."""

    data: Tensor  # [out, in / 2] int8
    scale: Tensor  # [out, in / 32] float8_e8m0fnu

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in], in weights (twice the bytes of a row)."""
        return self.data.shape[-2], 2 * self.data.shape[-1]


class NvFp4(NamedTuple):
    """E2M1 values as in `Fp4`, one E4M3 scale per 16 columns and one float32 scale for the matrix."""

    data: Tensor  # [out, in / 2] uint8
    scale: Tensor  # [out, in / 16] float8_e4m3fn
    global_scale: Tensor  # [] float32

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in], in weights (twice the bytes of a row)."""
        return self.data.shape[-2], 2 * self.data.shape[-1]


Weight = Dense | Fp8 | Fp4 | NvFp4


def nbytes(weight: Weight) -> int:
    """Bytes that the stored form occupies, scales included."""
    return sum(part.nbytes for part in weight)


def rows(weight: Weight, start: int, stop: int) -> Weight:
    """Rows `start` to `stop` of a weight as views; of `Fp8` whole blocks, up to the end, or a part of one."""
    match weight:
        case Dense(data):
            return Dense(data[start:stop])
        case Fp8(data, scale):
            block = weight.block
            whole = start % block == 0 and (stop % block == 0 or stop == data.shape[0])
            within = start // block == (stop - 1) // block
            assert whole or within, f"rows {start} to {stop} cut blocks of {block}"
            return Fp8(data[start:stop], scale[start // block : -(-stop // block)])
        case Fp4(data, scale):
            return Fp4(data[start:stop], scale[start:stop])
        case NvFp4(data, scale, global_scale):
            return NvFp4(data[start:stop], scale[start:stop], global_scale)


def stack(weights: Sequence[Weight]) -> Weight:
    """Matrices of one form and shape as one: every plane has a leading axis of matrices, `shape` stays [out, in]."""
    form = type(weights[0])
    assert all(type(weight) is form for weight in weights), f"forms: {[type(weight).__name__ for weight in weights]}"
    return form(*(torch.stack(plane) for plane in zip(*weights, strict=True)))


class Apart:
    """Matrices of one shape, each where it lies: those of a mapped checkpoint, which nobody copies."""

    def __init__(self, matrices: Sequence[Weight]) -> None:
        self.matrices = tuple(matrices)

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in] of each, in weights."""
        return self.matrices[0].shape

    @cached_property
    def alike(self) -> bool:
        """Whether all of them are stored in one form."""
        return len(set(map(layout, self.matrices))) == 1

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """Addresses of values and scales [E, 2] int64, and the factor of each whole matrix [E] float32."""
        return places(self.matrices)


Stack = Weight | Apart


def layout(weight: Weight) -> tuple[object, ...]:
    """Form, dtypes and shapes of a matrix: of matrices in which these agree a stack can be made."""
    return type(weight), *((plane.dtype, plane.shape) for plane in weight)


def as_stack(matrices: Sequence[Weight]) -> Stack:
    """Matrices that lie at equal distances of one tensor as the stack that this tensor is; others apart.

    Nothing is copied: a stack is made where matrices are loaded (`model.checkpoint.weights.Weights.matrices`).
    """
    if len(set(map(layout, matrices))) > 1:
        return Apart(matrices)
    stacked = []
    for planes in zip(*matrices, strict=True):
        first, at = planes[0], [plane.data_ptr() for plane in planes]
        step = at[1] - at[0] if len(at) > 1 else first.nbytes
        evenly = step > 0 and step % first.element_size() == 0 and at == [at[0] + i * step for i in range(len(at))]
        held_in = {(plane.untyped_storage().data_ptr(), plane.stride()) for plane in planes}
        if not evenly or len(held_in) > 1:
            return Apart(matrices)
        stacked.append(first.as_strided((len(at), *first.shape), (step // first.element_size(), *first.stride())))
    made: Weight = type(matrices[0])(*stacked)
    return made


def places(matrices: Sequence[Weight]) -> tuple[Tensor, Tensor]:
    """Where matrices lie, see `Apart.places`. These must live on while the addresses are used."""
    assert all(plane.is_contiguous() for weight in matrices for plane in weight), "rows of a matrix lie apart"
    addresses = torch.tensor([[plane.data_ptr() for plane in (weight * 2)[:2]] for weight in matrices])
    factors = [float(weight.global_scale) if isinstance(weight, NvFp4) else 1.0 for weight in matrices]
    return addresses, torch.tensor(factors)


def members(stacked: Stack) -> int:
    """How many matrices there are."""
    return len(stacked.matrices) if isinstance(stacked, Apart) else stacked.data.shape[0]


def member(stacked: Stack, index: int) -> Weight:
    """One matrix of a `stack`, as views."""
    if isinstance(stacked, Apart):
        return stacked.matrices[index]
    return type(stacked)(*(plane[index] for plane in stacked))


class Fp8Entries(NamedTuple):
    """Compressed entries: E4M3 values with one scale per 64 columns, then the rope dims in BF16.

    V4's row has the bytes of the layout that vLLM, FlashInfer and FlashMLA use: 448 + 2 * 64 + 7 + 1 of padding = 584.
    """

    values: Tensor  # [n, d - rope] float8_e4m3fn
    rope: Tensor  # [n, rope] bfloat16
    scale: Tensor  # [n, (d - rope) / 64 + padding] float8_e8m0fnu; padding, never read, makes the row 8-byte aligned

    @property
    def shape(self) -> tuple[int, int]:
        """[n, d], in values."""
        return self.values.shape[0], self.values.shape[1] + self.rope.shape[1]


class Fp8Keys(NamedTuple):
    """Index keys: E4M3 values and one scale per row, a power of two; 132 bytes for V4's 128 columns."""

    values: Tensor  # [n, d] float8_e4m3fn
    scale: Tensor  # [n] float32

    @property
    def shape(self) -> tuple[int, int]:
        """[n, d], in values."""
        return self.values.shape[0], self.values.shape[1]


class Fp4Keys(NamedTuple):
    """Index keys: E2M1 values, packed as in `Fp4`, one E8M0 scale per 32 columns; 68 bytes for V4's 128 columns."""

    packed: Tensor  # [n, d / 2] uint8, the even column in the low nibble
    scale: Tensor  # [n, d / 32] float8_e8m0fnu

    @property
    def shape(self) -> tuple[int, int]:
        """[n, d], in values (twice the bytes of a row)."""
        return self.packed.shape[0], 2 * self.packed.shape[1]


class CodedRows(NamedTuple):
    """Rows after a Hadamard rotation, as a norm and Lloyd-Max codes: 64 b + 2 bytes for V4's 512 columns at b bits."""

    norm: Tensor  # [n] float16, the length of each row
    codes: Tensor  # [n, d * bits / 8] uint8, packed as in `kernels.formats.lloyd_max`
    bits: int  # of a code: 1 to 8
    signs: Tensor | None  # [d] float32, +1 or -1, applied before the rotation; shared by all rows, so not a plane

    @property
    def shape(self) -> tuple[int, int]:
        """[n, d], in values."""
        return self.codes.shape[0], self.codes.shape[1] * 8 // self.bits


class SketchedRows(NamedTuple):
    """Rotated rows and the sketch of what they leave out, see `kernels.formats.qjl`."""

    rows: CodedRows
    residual: Tensor  # [n] float16, length of what is left out
    sketch: Tensor  # [n, d / 8] uint8, bit i of byte j: is component 8 j + i of S r positive


StreamKeys = CodedRows | SketchedRows


class EigenKeys(NamedTuple):
    """Rows as quantised coefficients of an eigenbasis: keys of one sequence, rotary embedding undone, or `BasisRows`.

    Component j of a row is ``grid(code) * scale[j] * basis_scale[j]`` times column j of `basis`, beside the mean. Keys
    of all heads of a token make one row of ``D = heads * d`` columns.
    """

    codes: Tensor  # [n, bytes] uint8, the runs side by side, each packed as in `kernels.formats.lloyd_max`
    basis: Tensor  # [D, r] int8
    basis_scale: Tensor  # [r] float16
    scale: Tensor  # [r] float16, of the coefficients
    mean: Tensor  # [D] float16
    bits: Tensor  # [groups] int8 on the CPU: bits of each group of components, 0 for one that is not stored; else [0]


class BasisRows(NamedTuple):
    """Entries in a basis fitted once for their layer: coefficients of the nope dims, and the rope dims rotated.

    Of `nope` all but the codes is shared by all rows, and counted once.
    """

    nope: EigenKeys  # of square basis; components in groups, each with bits of its own
    gain: Tensor  # [n] float16, by which a row's coefficients are multiplied
    rope: CodedRows

    @property
    def shape(self) -> tuple[int, int]:
        """[n, d], in values."""
        return self.nope.codes.shape[0], self.nope.basis.shape[0] + self.rope.shape[1]


# Rows of a cache, [n, d]: a tensor in the run's dtype, or the planes of a narrow form. All but the last two hold what
# `deployed` numerics rounds to, to the bit.
Rows = Tensor | Fp8Entries | Fp8Keys | Fp4Keys | CodedRows | BasisRows


class Slots(NamedTuple):
    """Rows that attention may see, some of which stand for many entries, and some for none."""

    rows: Rows
    bias: Tensor | None  # [n] float32, added to a row's logits; -inf: the row is empty. None: 0
    hidden: int  # a token that has seen n entries sees the first ``n - hidden`` rows

    @property
    def shape(self) -> tuple[int, int]:
        """[n, d], in values."""
        return self.rows.shape[0], self.rows.shape[1]


class CodebookValues(NamedTuple):
    """Values of one sequence after a Hadamard rotation per head, divided by each channel's largest, four to a code."""

    codes: Tensor  # [n, D / 4] uint8
    codebook: Tensor  # [256, 4] float16
    largest: Tensor  # [heads, d] float16


class TokenRing(NamedTuple):
    """What a compressor keeps of the last tokens: the token at position p lies in row ``p % rows``.

    A row is written by its token alone, so that going back to an earlier position needs nothing but that position.
    There are at least as many rows as an entry reads, and as many more as tokens can be taken back.
    """

    kv: Tensor  # [rows, series * width] float32; two series, [next | own], where windows overlap, else one
    gate: Tensor  # [rows, series * width] float32, the position bias included


Rounding = Literal["none", "kv", "index", "row"]  # of what enters a cache: `kernels.compress.reference`
