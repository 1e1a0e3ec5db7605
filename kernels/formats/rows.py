"""Rows of a cache in their stored form: how they are allocated, written, and read tile by tile.

A cache of entries or index keys is a tensor in the run's dtype, or planes of a narrow form (`kernels.formats.stored`).
No op decodes more than the tile it works on: `read` and `take` are all that an op may use.

A narrow form is decoded into float32, in which the ops compute, and in which each of its values is exact. The numbers
are those of `kernels.formats.rows_reference.decode`.

Writing rounds as DeepSeek's code rounds activations (`kernels.quantise.reference`). Rows that were rounded so already,
as all are in `deployed` numerics, keep every bit: their scale is found again, or half of it where the largest value of
a group was rounded down to half of what the scale allows, and then all values of the group fit that one too.
"""

import torch
from torch import Tensor

from fathom.kernels.formats import basis_rows, coded_rows, cpu_rows, rows_reference
from fathom.kernels.formats.groups import INDEX_GROUP, KV_GROUP
from fathom.kernels.formats.stored import BasisRows, CodedRows, Fp4Keys, Fp8Entries, Fp8Keys, Rows
from fathom.kernels.quantise.reference import E2M1_MAX, E4M3_MAX, power_of_two_scale, quantise_fp8, round_e2m1

__all__ = [
    "BasisRows", "CodedRows", "Fp4Keys", "Fp8Entries", "Fp8Keys", "Rows", "first", "fp4_keys", "fp8_entries",
    "fp8_keys", "length", "nbytes", "planes", "query_as_stored", "read", "read_as_stored", "sum_as_read", "take",
    "take_as_stored", "width", "write",
]  # fmt: skip

ALIGNMENT = 8  # bytes; a row of Fp8Entries is padded to a multiple
SMALLEST_SCALE = 2.0**-126  # of keys; entries follow DeepSeek's rule, which ends far above


def length(rows: Rows) -> int:
    """Rows there are; ``len`` of a narrow form would count its planes."""
    return rows.shape[0]


def width(rows: Rows) -> int:
    """Values in a row."""
    return rows.shape[1]


def planes(rows: Rows) -> dict[str, Tensor]:
    """The tensors that hold the rows, [n, ...] each, by name; a tensor in the run's dtype is one plane, "rows"."""
    match rows:
        case Tensor():
            return {"rows": rows}
        case CodedRows():
            return coded_rows.planes(rows)
        case BasisRows():
            return basis_rows.planes(rows)
        case _:
            return rows._asdict()


def nbytes(rows: Rows) -> int:
    """Bytes that the rows occupy, with the basis that they may be stored in."""
    if isinstance(rows, BasisRows):
        return basis_rows.nbytes(rows)
    return sum(plane.nbytes for plane in planes(rows).values())


def first(rows: Rows, n: int) -> Rows:
    """The first n rows, as views, in their stored form."""
    return _between(rows, 0, n)


def read(rows: Rows, low: int, high: int) -> Tensor:
    """Rows `low` to `high` - 1, [high - low, d]: of a tensor a view in its dtype, else decoded."""
    return _decoded(_between(rows, low, high))


def take(rows: Rows, index: Tensor) -> Tensor:
    """Rows `index` [c] int, [c, d], copied: of a tensor in its dtype, else decoded."""
    match rows:
        case Fp8Entries(values, rope, scale):
            return _decoded(Fp8Entries(_gather(values, index), _gather(rope, index), _gather(scale, index)))
        case Fp8Keys(values, scale):
            return _decoded(Fp8Keys(_gather(values, index), _gather(scale, index)))
        case Fp4Keys(packed, scale):
            return _decoded(Fp4Keys(_gather(packed, index), _gather(scale, index)))
        case CodedRows():
            return coded_rows.take(rows, index)
        case BasisRows():
            return basis_rows.take(rows, index)
        case _:
            return _gather(rows, index)


def query_as_stored(rows: Rows, x: Tensor) -> Tensor:
    """Queries `x` [..., d] in the space in which `read_as_stored` gives rows: that of what is stored, or as they are.

    Dot products are the same there, and a weighted sum of rows is brought back once, at its end. The space of
    `BasisRows` has a column more, and queries and rows go into it in different ways.
    """
    match rows:
        case CodedRows():
            return coded_rows.signed_hadamard(x, rows.signs)
        case BasisRows():
            return basis_rows.query_as_stored(rows, x)
        case _:
            return x


def sum_as_read(rows: Rows, y: Tensor) -> Tensor:
    """Sums of `read_as_stored` as sums of rows."""
    match rows:
        case CodedRows():
            return coded_rows.undo_hadamard(y, rows.signs)
        case BasisRows():
            return basis_rows.sum_as_read(rows, y)
        case _:
            return y


def read_as_stored(rows: Rows, low: int, high: int) -> Tensor:
    """`read`, in the space of `query_as_stored`: no row is brought back."""
    match rows:
        case CodedRows():
            return coded_rows.read_hadamard(rows, low, high)
        case BasisRows():
            return basis_rows.read_as_stored(rows, low, high)
        case _:
            return read(rows, low, high)


def take_as_stored(rows: Rows, index: Tensor) -> Tensor:
    """`take`, in the space of `query_as_stored`: no row is brought back."""
    match rows:
        case CodedRows():
            return coded_rows.take_hadamard(rows, index)
        case BasisRows():
            return basis_rows.take_as_stored(rows, index)
        case _:
            return take(rows, index)


def fp8_entries(n: int, d: int, rope: int, device: torch.device) -> Fp8Entries:
    """Allocate `n` entries of zeros, the last `rope` of their `d` columns in BF16."""
    nope = d - rope
    assert nope % KV_GROUP == 0, f"{nope} columns before the rope dims are no multiple of {KV_GROUP}"
    groups = nope // KV_GROUP
    padding = -(nope + 2 * rope + groups) % ALIGNMENT
    return Fp8Entries(
        _zeros(n, nope, torch.float8_e4m3fn, device),
        torch.zeros(n, rope, dtype=torch.bfloat16, device=device),
        _zeros(n, groups + padding, torch.float8_e8m0fnu, device),
    )


def fp8_keys(n: int, d: int, device: torch.device) -> Fp8Keys:
    """Allocate `n` keys of zeros."""
    return Fp8Keys(_zeros(n, d, torch.float8_e4m3fn, device), torch.zeros(n, dtype=torch.float32, device=device))


def fp4_keys(n: int, d: int, device: torch.device) -> Fp4Keys:
    """Allocate `n` keys of zeros."""
    assert d % INDEX_GROUP == 0, f"{d} columns are no multiple of {INDEX_GROUP}"
    return Fp4Keys(_zeros(n, d // 2, torch.uint8, device), _zeros(n, d // INDEX_GROUP, torch.float8_e8m0fnu, device))


def write(rows: Rows, start: int, x: Tensor) -> None:
    """Store `x` [m, d] as rows `start` .. ``start + m - 1``, rounded to their form; NaN makes its whole group NaN."""
    part = _between(rows, start, start + x.shape[0])
    match part:
        case Fp8Entries(values, rope, scale):
            nope = values.shape[1]
            rounded, scales = quantise_fp8(x[:, :nope], KV_GROUP)
            values.copy_(rounded)
            rope.copy_(x[:, nope:])
            scale[:, : nope // KV_GROUP] = scales.to(scale.dtype)
        case Fp8Keys(values, scale):
            amax = x.float().abs().amax(1).clamp_min(E4M3_MAX * SMALLEST_SCALE)
            scale.copy_(power_of_two_scale(amax, E4M3_MAX))
            values.copy_((x.float() / scale[:, None]).clamp(-E4M3_MAX, E4M3_MAX))
        case Fp4Keys(packed, scale):
            blocks = x.float().unflatten(1, (-1, INDEX_GROUP))
            scales = power_of_two_scale(blocks.abs().amax(-1).clamp_min(E2M1_MAX * SMALLEST_SCALE), E2M1_MAX)
            scale.copy_(scales)
            packed.copy_(_packed((blocks / scales[..., None]).flatten(1)))
        case CodedRows():
            coded_rows.write(part, 0, x)
        case BasisRows():
            basis_rows.write(part, 0, x)
        case _:
            part.copy_(x)


def write_scratch(vectors: int, width: int, form: str) -> int:
    """Bytes alive at most in `write` of so many rows, in a form named as `kernels.attention.cpu.attend_scratch` does.

    Of bfloat16 rows, of which each of a few steps makes numbers of four bytes.
    """
    if form == "based":
        return basis_rows.write_scratch(vectors, width)
    return vectors * width * {"dtype": 0, "fp8": 11, "fp4": 35, "coded": 31}[form]


def _packed(x: Tensor) -> Tensor:
    """Round [m, d] to E2M1 and pack: [m, d / 2] uint8."""
    value = round_e2m1(x.clamp(-E2M1_MAX, E2M1_MAX))
    size = value.abs()  # 0 to 6; half steps to 2, then 3, 4, 6
    code = torch.where(size <= 2, 2 * size, torch.where(size <= 4, size + 2, size + 1)).to(torch.uint8)
    code |= value.signbit().to(torch.uint8) << 3
    return code[:, ::2] | code[:, 1::2] << 4


def _between(rows: Rows, low: int, high: int) -> Rows:
    match rows:
        case Fp8Entries(values, rope, scale):
            return Fp8Entries(values[low:high], rope[low:high], scale[low:high])
        case Fp8Keys(values, scale):
            return Fp8Keys(values[low:high], scale[low:high])
        case Fp4Keys(packed, scale):
            return Fp4Keys(packed[low:high], scale[low:high])
        case CodedRows():
            return coded_rows.between(rows, low, high)
        case BasisRows():
            return basis_rows.between(rows, low, high)
        case _:
            return rows[low:high]


def _decoded(rows: Rows) -> Tensor:
    """All of `rows`; of a tensor itself."""
    match rows:
        case Fp8Entries() | Fp8Keys() | Fp4Keys():
            compiled = rows[0].device.type == "cpu"
            return cpu_rows.decoded(rows) if compiled else rows_reference.decode(rows)
        case CodedRows():
            return coded_rows.read(rows, 0, rows.shape[0])
        case BasisRows():
            return basis_rows.read(rows, 0, rows.shape[0])
        case _:
            return rows


def _gather(plane: Tensor, index: Tensor) -> Tensor:
    return torch.index_select(plane, 0, index)


def _zeros(n: int, d: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(n, d, dtype=torch.uint8, device=device).view(dtype)
