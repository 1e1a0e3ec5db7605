"""Rows under a Hadamard transform, quantised to Lloyd-Max codes: written, read, and used without undoing it.

A row x of d columns becomes ``y = H(s x) / |x| * sqrt(d)``, whose columns are close to N(0, 1) whatever x was, and is
stored as the nearest centroids and |x| in float16. H is its own inverse, so ``q . x = H(s q) . H(s x)``: a query is
transformed once and meets centroids, and a weighted sum of rows is transformed once at its end. Sources: QuaRot (arXiv
2404.00456) for the transform, TurboQuant (arXiv 2504.19874) for the signs and the codebook of the normal distribution.

Nothing is fitted: what a row is stored as depends on that row alone, and to the bit. Therefore transform and norm are
sums in a fixed order, element by element, and not matrix products, whose order depends on how many rows there are.

Rows that have no direction or whose length float16 cannot hold:

* zeros, and lengths up to 2^-25, become zeros; below 2^-14 a length is held to 2^-25, above that to 2^-11 of itself;
* a row with NaN or an infinity, and one of length 65 520 or more, becomes NaN as a whole. Its codes are those of 0.
"""

from functools import cache

import torch
from torch import Tensor

from fathom.kernels.formats import lloyd_max
from fathom.kernels.formats.stored import CodedRows

__all__ = [
    "CodedRows", "allocate", "between", "expected_error", "hadamard", "planes", "random_signs", "read", "read_hadamard",
    "row_norm", "signed_hadamard", "take", "take_hadamard", "undo_hadamard", "write",
]  # fmt: skip

_MASK = (1 << 64) - 1


def hadamard(x: Tensor) -> Tensor:
    """Walsh-Hadamard transform of the last dim, `kernels.quantise.reference.hadamard`, in additions alone.

    Equation: ``y_j = d^-0.5 sum_i (-1)^popcount(i & j) x_i``. The bits of a row do not depend on the rows beside it.

    Parameters
    ----------
    x
        [..., d], d a power of two.

    Returns
    -------
    Tensor
        [..., d] float32.

    """
    d = x.shape[-1]
    assert d & (d - 1) == 0, f"{d} is no power of two"
    y = x.float()
    for _ in range(d.bit_length() - 1):  # each step works off the top bit of the index and puts it back at the bottom
        low, high = y.unflatten(-1, (2, -1)).unbind(-2)
        y = y.new_empty(*y.shape[:-1], d // 2, 2)
        torch.add(low, high, out=y[..., 0])  # five times as fast as to stack what comes out
        torch.sub(low, high, out=y[..., 1])
        y = y.flatten(-2)
    scale: float = d**-0.5
    return y * scale


@cache
def random_signs(d: int, seed: int, device: torch.device) -> Tensor:
    """Signs +1 and -1, [d] float32, the same for one seed on every platform: the top bits of SplitMix64's output."""
    signs = []
    for i in range(1, d + 1):
        z = (seed + i * 0x9E3779B97F4A7C15) & _MASK
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK
        signs.append(1.0 if (z ^ z >> 31) >> 63 else -1.0)
    return torch.tensor(signs, device=device)


def signed_hadamard(x: Tensor, signs: Tensor | None) -> Tensor:
    """``H(s x)`` of rows [..., d], float32: the space in which rows are stored."""
    return hadamard(x if signs is None else x.float() * signs)


def undo_hadamard(y: Tensor, signs: Tensor | None) -> Tensor:
    """Undo `signed_hadamard`: ``s H(y)``, float32."""
    return hadamard(y) if signs is None else hadamard(y) * signs


def row_norm(x: Tensor) -> Tensor:
    """Length of each row [..., d] in fp32, squares summed in halves: no bit depends on other rows."""
    squares = x.float().square()
    while squares.shape[-1] > 1:
        low, high = squares.unflatten(-1, (2, -1)).unbind(-2)
        squares = low + high
    return squares.squeeze(-1).sqrt()


def allocate(n: int, d: int, bits: int, device: torch.device, seed: int | None = None) -> CodedRows:
    """Allocate `n` rows of zeros; with a `seed`, signs are applied before the transform."""
    assert d & (d - 1) == 0, f"{d} is no power of two"
    return CodedRows(
        torch.zeros(n, dtype=torch.float16, device=device),
        torch.zeros(n, lloyd_max.packed_bytes(d, bits), dtype=torch.uint8, device=device),
        bits,
        None if seed is None else random_signs(d, seed, device),
    )


def planes(rows: CodedRows) -> dict[str, Tensor]:
    """The tensors that hold the rows, [n, ...] each, by name."""
    return {"norm": rows.norm, "codes": rows.codes}


def between(rows: CodedRows, low: int, high: int) -> CodedRows:
    """Rows `low` to `high` - 1 as views, in their stored form."""
    return rows._replace(norm=rows.norm[low:high], codes=rows.codes[low:high])


def write(rows: CodedRows, start: int, x: Tensor) -> None:
    """Store `x` [m, d] as rows `start` .. ``start + m - 1``; rows that are no numbers become NaN, see above."""
    part = between(rows, start, start + x.shape[0])
    norm = row_norm(x)
    stored = norm.half()
    part.norm.copy_(torch.where(stored.isfinite(), stored, float("nan")))
    y = _normal(x, norm, rows.signs)
    part.codes.copy_(lloyd_max.pack(lloyd_max.encode(y, rows.bits), rows.bits))


def expected_error(rows: CodedRows, x: Tensor) -> Tensor:
    """Squared error over squared length, [m] float32, of the codes that stand for `x` [m, d]: more in a long tail."""
    y = _normal(x, row_norm(x), rows.signs)
    return (lloyd_max.decode(lloyd_max.encode(y, rows.bits), rows.bits) - y).square().mean(1)


def _normal(x: Tensor, norm: Tensor, signs: Tensor | None) -> Tensor:
    """Rows [m, d] transformed, at a length of sqrt(d): columns are near N(0, 1), or 0 where there is no direction."""
    usable = ((norm > 0) & norm.isfinite())[:, None]
    y = signed_hadamard(x.float() / torch.where(usable, norm[:, None], 1.0), signs) * x.shape[1] ** 0.5
    return torch.where(usable, y, 0.0)


def read(rows: CodedRows, low: int, high: int) -> Tensor:
    """Rows `low` to `high` - 1, [high - low, d] float32."""
    return undo_hadamard(read_hadamard(rows, low, high), rows.signs)


def take(rows: CodedRows, index: Tensor) -> Tensor:
    """Rows `index` [c] int, [c, d] float32: bit for bit what `read` gives."""
    return undo_hadamard(take_hadamard(rows, index), rows.signs)


def read_hadamard(rows: CodedRows, low: int, high: int) -> Tensor:
    """``H(s x)`` of rows `low` to `high` - 1 as stored, [high - low, d] float32."""
    return _decoded(between(rows, low, high))


def take_hadamard(rows: CodedRows, index: Tensor) -> Tensor:
    """``H(s x)`` of rows `index` [c] int as stored, [c, d] float32."""
    norm, codes = (torch.index_select(plane, 0, index) for plane in (rows.norm, rows.codes))
    return _decoded(rows._replace(norm=norm, codes=codes))


def _decoded(rows: CodedRows) -> Tensor:
    """All of `rows`, transformed."""
    centroids = lloyd_max.decode_packed(rows.codes, rows.bits)
    return centroids.mul_(rows.norm.float()[:, None] * rows.shape[1] ** -0.5)
