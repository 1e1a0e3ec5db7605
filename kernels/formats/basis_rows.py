"""Entries in a basis that was fitted to their layer beforehand: written, read, and used without leaving it.

The nope dims x of an entry, without the layer's mean mu, become coefficients ``c = B^-1 (x - mu)`` of int8 columns,
each with a scale and bits of its own; the rope dims are coded as `kernels.formats.coded_rows` codes any row.
A query meets them as they are stored (`query_as_stored`, `read_as_stored`): of ``[q B, q . mu, H q_rope]`` and
``[c, 1, H x_rope]`` dot products are those of the decoded rows, and the sum of rows with weights w comes back as
``B sum(w c) + mu sum(w)``: the mean is one more component, whose coefficient is 1. That the weights of attention, of
which the sink takes a part, do not sum to 1 is no special case.

Nothing is fitted to the sequence: what a row is stored as depends on that row alone, and to the bit. Therefore
coefficients are exact sums, which have no order: a row, as multiples of a small power of two, times columns of int8, in
float64. The columns are those of an orthonormal matrix rounded, so that ``B^T`` is ``B^-1`` to 1 %; one step of
refinement, ``B^T (2 - B B^T)``, makes it 1e-4 of what is stored, which no code is fine enough to tell.

A row that is larger or smaller than those of the fit has a gain, that of `GAINS` which loses least: entries have tails,
and the text of a run need not be that of the fit. A row with NaN or an infinity becomes NaN.
"""

import torch
from torch import Tensor

from fathom.kernels.formats import coded_rows, eigenbasis, lloyd_max
from fathom.kernels.formats.stored import BasisRows, EigenKeys

__all__ = [
    "BasisRows", "allocate", "between", "expected_error", "nbytes", "planes", "query_as_stored", "read",
    "read_as_stored", "sum_as_read", "take", "take_as_stored", "write",
]  # fmt: skip

MANTISSA = 53  # bits of an integer that float64 holds
GAINS = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0, 32.0, 64.0)
ROWS = 64  # for which all gains are tried at once
ROOM = 1.1  # of the squared error of what is stored over that of its coefficients: columns are nearly orthonormal


def allocate(n: int, fit: EigenKeys, rope: int, rope_bits: int, seed: int, device: torch.device) -> BasisRows:
    """Allocate `n` rows of zero codes in the basis of `fit`, which holds no rows, with `rope` more columns."""
    codes = torch.zeros(n, fit.codes.shape[1], dtype=torch.uint8, device=device)
    shared = (fit.basis, fit.basis_scale, fit.scale, fit.mean)
    basis, basis_scale, scale, mean = (part.to(device) for part in shared)
    nope = EigenKeys(codes, basis, basis_scale, scale, mean, fit.bits)
    gain = torch.zeros(n, dtype=torch.float16, device=device)
    return BasisRows(nope, gain, coded_rows.allocate(n, rope, rope_bits, device, seed))


def planes(rows: BasisRows) -> dict[str, Tensor]:
    """The tensors that hold the rows, [n, ...] each, by name."""
    rope = coded_rows.planes(rows.rope)
    return {"codes": rows.nope.codes, "gain": rows.gain} | {f"rope_{name}": plane for name, plane in rope.items()}


def nbytes(rows: BasisRows) -> int:
    """Bytes of the rows, and once those of what they share."""
    return sum(part.nbytes for part in (*rows.nope, rows.gain, *coded_rows.planes(rows.rope).values()))


def between(rows: BasisRows, low: int, high: int) -> BasisRows:
    """Rows `low` to `high` - 1 as views, in their stored form."""
    nope = rows.nope._replace(codes=rows.nope.codes[low:high])
    return BasisRows(nope, rows.gain[low:high], coded_rows.between(rows.rope, low, high))


def write(rows: BasisRows, start: int, x: Tensor) -> None:
    """Store `x` [m, d] as rows `start` .. ``start + m - 1``; rows that are no numbers become NaN."""
    part = between(rows, start, start + x.shape[0])
    nope, rope = _split(rows, x.float())
    usable = x.isfinite().all(1, keepdim=True)
    c = project(part.nope, torch.where(usable, nope, part.nope.mean.float()))
    gain = _gain(part.nope, c)
    eigenbasis.store(part.nope, 0, c / gain)
    part.gain.copy_(torch.where(usable, gain, float("nan"))[:, 0])
    coded_rows.write(part.rope, 0, torch.where(usable, rope, float("nan")))


def write_scratch(vectors: int, width: int) -> int:
    """Bytes alive at most in `write` of so many rows: exact products, and what a gain loses."""
    gains = len(GAINS) * min(vectors, ROWS) * width * 16
    return vectors * width * 8 + max(vectors * width * 40 + width**2 * 8, gains)


def project(keys: EigenKeys, x: Tensor) -> Tensor:
    """Coefficients of rows x [m, p] in a square basis, [m, p] float32; no bit depends on the rows beside a row."""
    centred = (x.float() - keys.mean.float()).double()
    columns, scale = keys.basis.double(), keys.basis_scale.double()
    c = _exact(centred, columns) * scale
    rest = centred - _exact(c * scale, columns.mT)
    return (c + _exact(rest, columns) * scale).float()


def read(rows: BasisRows, low: int, high: int) -> Tensor:
    """Rows `low` to `high` - 1, [high - low, d] float32."""
    return sum_as_read(rows, read_as_stored(rows, low, high))


def take(rows: BasisRows, index: Tensor) -> Tensor:
    """Rows `index` [c] int, [c, d] float32."""
    return sum_as_read(rows, take_as_stored(rows, index))


def read_as_stored(rows: BasisRows, low: int, high: int) -> Tensor:
    """``[c, 1, H x_rope]`` of rows `low` to `high` - 1 as stored, [high - low, d + 1] float32."""
    return _decoded(between(rows, low, high))


def take_as_stored(rows: BasisRows, index: Tensor) -> Tensor:
    """The same of rows `index` [c] int, [c, d + 1] float32: bit for bit what `read_as_stored` gives."""
    codes, gain, norm, rope = (torch.index_select(plane, 0, index) for plane in planes(rows).values())
    nope = rows.nope._replace(codes=codes)
    return _decoded(BasisRows(nope, gain, rows.rope._replace(norm=norm, codes=rope)))


def query_as_stored(rows: BasisRows, q: Tensor) -> Tensor:
    """``[q B, q . mu, H q_rope]`` of queries [..., d], [..., d + 1] float32: what `read_as_stored` meets."""
    nope, rope = _split(rows, q.float())
    keys = rows.nope
    c = (nope @ keys.basis.float()).mul_(keys.basis_scale)
    rope = coded_rows.signed_hadamard(rope, rows.rope.signs)
    return torch.cat((c, (nope @ keys.mean.float())[..., None], rope), dim=-1)


def sum_as_read(rows: BasisRows, y: Tensor) -> Tensor:
    """``[B y_c + mu y_1, H y_rope]``: weighted sums y [..., d + 1] of `read_as_stored` as those of rows, [..., d]."""
    keys, p = rows.nope, rows.nope.basis.shape[1]
    nope = (y[..., :p] * keys.basis_scale) @ keys.basis.float().mT + y[..., p : p + 1] * keys.mean
    return torch.cat((nope, coded_rows.undo_hadamard(y[..., p + 1 :], rows.rope.signs)), dim=-1)


def expected_error(rows: BasisRows, start: int, x: Tensor) -> Tensor:
    """Squared error, [m] float32, that `x` [m, d] may come back with, stored as the rows from `start` on."""
    nope, rope = _split(rows, x.float())
    gain = rows.gain[start : start + x.shape[0], None].float()
    lost = gain * _lost(rows.nope, project(rows.nope, nope) / gain)
    usual = 2 * lloyd_max.distortion(rows.rope.bits)
    return ROOM * lost.square().sum(1) + coded_rows.expected_error(rows.rope, rope).clamp_min(
        usual
    ) * rope.square().sum(1)


def _decoded(rows: BasisRows) -> Tensor:
    """All of `rows`, see `read_as_stored`."""
    n = rows.shape[0]
    c = eigenbasis.coefficients(rows.nope, 0, n).mul_(rows.gain[:, None])
    return torch.cat((c, c.new_ones(n, 1), coded_rows.read_hadamard(rows.rope, 0, n)), dim=1)


def _gain(keys: EigenKeys, c: Tensor) -> Tensor:
    """The gain of each row of coefficients [m, p] with which it loses least, [m, 1]; of equals, the smallest."""
    gains = torch.tensor(GAINS, device=c.device)[:, None]
    found = [c.new_ones(0, 1)]
    for part in c.split(ROWS):
        units = part / gains[..., None]  # [gains, m, p]
        lost = gains * coded_rows.row_norm(_padded(_lost(keys, units.flatten(0, 1)))).unflatten(0, units.shape[:2])
        found.append(gains[lost.argmin(0)])
    return torch.cat(found)


def _lost(keys: EigenKeys, c: Tensor) -> Tensor:
    """Coefficients [m, p] less what their codes say."""
    lost, low = c.clone(), 0
    group = c.shape[1] // keys.bits.shape[0]
    for bits in keys.bits.tolist():
        at = slice(low, low + group)
        low += group
        if bits:
            scale = keys.scale[at].float()
            units = c[:, at] / torch.where(scale > 0, scale, 1.0)
            lost[:, at] -= lloyd_max.decode(lloyd_max.encode(units, bits), bits) * scale
    return lost


def _padded(x: Tensor) -> Tensor:
    """Rows [m, p] with zeros up to a power of two: `row_norm` adds up in halves, whatever rows are beside."""
    return torch.nn.functional.pad(x, (0, (1 << (x.shape[1] - 1).bit_length()) - x.shape[1]))


def _split(rows: BasisRows, x: Tensor) -> tuple[Tensor, Tensor]:
    p = rows.nope.basis.shape[0]
    return x[..., :p], x[..., p:]


def _exact(x: Tensor, integers: Tensor) -> Tensor:
    """Rows x [m, k] times integers [k, r] of up to 7 bits, both float64, without rounding a sum.

    Each row is rounded first, to multiples of a power of two that leave room for any sum of k products.
    """
    bits = MANTISSA - 7 - (x.shape[1] - 1).bit_length()
    largest = x.abs().amax(1, keepdim=True).clamp_min(2.0**-200)
    power = (largest.view(torch.int64) & 0x7FF << 52).view(torch.float64)  # of two: the mantissa cut off
    step = power * 2.0 ** (1 - bits)
    return (x / step).round_() @ integers * step
