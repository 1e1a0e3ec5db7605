"""Keys with a sketch of their quantisation error: one bit less per code, one sign bit per dim more (QJL).

What is left of a rotated row, ``r = y - decoded``, is stored as the signs of S r, S a fixed Gaussian matrix [d, d],
and its length in float16. ``sqrt(pi / 2) / d * |r| * (S q) . sign(S r)`` is then an estimate of q . r without bias:
over S, not for any one S. Source: QJL (arXiv 2406.03482), TurboQuant (arXiv 2504.19874) section 3.2.
"""

from functools import cache

import torch
from torch import Tensor

from fathom.kernels.formats import coded_rows, lloyd_max
from fathom.kernels.formats.stored import SketchedRows, StreamKeys

SEED = 20_240_603
TILE = 1 << 20  # products per tile of S r


def sketched_rows(n: int, d: int, bits: int, device: torch.device, seed: int | None = None) -> SketchedRows:
    """Allocate `n` rows of zeros that take `bits` bits per dim in all, 2 to 8, and two lengths."""
    assert bits >= 2, f"{bits} bits leave no code beside the sketch"
    return SketchedRows(
        coded_rows.allocate(n, d, bits - 1, device, seed),
        torch.zeros(n, dtype=torch.float16, device=device),
        torch.zeros(n, d // 8, dtype=torch.uint8, device=device),
    )


def planes(held: StreamKeys) -> dict[str, Tensor]:
    """The tensors that hold the rows, [n, ...] each, by name."""
    match held:
        case SketchedRows(rows, residual, sketch):
            return {**coded_rows.planes(rows), "residual": residual, "sketch": sketch}
        case _:
            return coded_rows.planes(held)


def write(held: StreamKeys, start: int, x: Tensor) -> None:
    """Store `x` [m, d] as rows `start` .. ``start + m - 1``; of special rows see `kernels.formats.coded_rows`."""
    if not isinstance(held, SketchedRows):
        coded_rows.write(held, start, x)
        return
    stop = start + x.shape[0]
    coded_rows.write(held.rows, start, x)
    left = coded_rows.signed_hadamard(x, held.rows.signs) - coded_rows.read_hadamard(held.rows, start, stop)
    left = torch.where(left.isfinite(), left, 0.0)  # the row itself is NaN then
    held.residual[start:stop] = coded_rows.row_norm(left)
    held.sketch[start:stop] = lloyd_max.pack((projected(left) > 0).to(torch.uint8), 1)


def query(held: StreamKeys, q: Tensor) -> Tensor:
    """Queries [..., d] rotated as the rows are, to be dotted with `read_hadamard`; [..., 2 d] for sketched rows."""
    match held:
        case SketchedRows(rows, _, _):
            transformed = coded_rows.signed_hadamard(q, rows.signs)
            return torch.cat((transformed, transformed @ gaussian(q.shape[-1], q.device).mT), dim=-1)
        case _:
            return coded_rows.signed_hadamard(q, held.signs)


def read_hadamard(held: StreamKeys, low: int, high: int) -> Tensor:
    """Rows `low` to `high` - 1 as stored, [high - low, d] float32; [.., 2 d] with the signs of sketches, scaled."""
    match held:
        case SketchedRows(rows, residual, sketch):
            signs = lloyd_max.look_up(sketch[low:high], 1, _sign_words(sketch.device))
            scale = residual[low:high].float() * ((torch.pi / 2) ** 0.5 / rows.shape[1])
            return torch.cat((coded_rows.read_hadamard(rows, low, high), signs.mul_(scale[:, None])), dim=1)
        case _:
            return coded_rows.read_hadamard(held, low, high)


def projected(x: Tensor) -> Tensor:
    """``S x`` of each row [n, d], float32, products added in halves: no bit depends on the rows beside it."""
    n, d = x.shape
    out = torch.empty_like(x)
    matrix = gaussian(d, x.device)
    step = max(1, TILE // (d * d))
    for low in range(0, n, step):
        terms = x[low : low + step, None] * matrix  # [m, d, d]
        while terms.shape[-1] > 1:
            left, right = terms.unflatten(-1, (2, -1)).unbind(-2)
            terms = left + right
        out[low : low + step] = terms.squeeze(-1)
    return out


@cache
def gaussian(d: int, device: torch.device) -> Tensor:
    """The matrix S, [d, d] float32 of N(0, 1), the same for every cache; not to be written to."""
    return torch.randn(d, d, generator=torch.Generator().manual_seed(SEED)).to(device)


@cache
def _sign_words(device: torch.device) -> Tensor:
    return lloyd_max.word_table(torch.tensor([-1.0, 1.0], device=device))
