"""An upper bound of index scores from products of 8-bit integers: which entries can be among a token's best at all.

A processor with VNNI multiplies int8 five times as fast as fp32, and integer sums have no rounding, so what such a
product leaves open can be said exactly.

The bound
---------
The score of an entry n for a token is ``s = sum_h w_h relu(q_h . k_n)``, computed in fp32. Let ``a_h = |w_h| q_h``.
With a step D for the token and a step d_n for each entry,

    a_h = D c_h (A_h + e_h),    k_n = d_n (K_n + f_n),    A, K: integers of at most 127 in size; c_h: one of 1 to 16

and by Cauchy-Schwarz, in units of D c_h d_n,

    |a_h . k_n - A_h . K_n| = |A_h . f_n + e_h . (K_n + f_n)| <= |A_h| |f_n| + |e_h| |K_n + f_n|

Let E_h be the largest right side of any entry in the tile, rounded up to an integer. As the ReLU never falls,

    w_h > 0:   |w_h| relu(q_h . k_n) <= relu(A_h . K_n + E_h) = max(A_h . K_n, -E_h) + E_h
    w_h < 0:  -|w_h| relu(q_h . k_n) <= -relu(A_h . K_n - E_h) = -max(A_h . K_n, E_h) + E_h

The sum over heads, each times c_h, is one of integers. A head that is surely shut adds 0, as it does to the score: rows
of scores that are all 0.0 are common, and no entry may look better than that.

fp32 rounds, u = 2^-24. A dot product of length d, summed in any order, is off by at most ``1.01 d u |q_h| |k_n|`` plus
d times the least subnormal number. Weighing and summing h heads, in any order, changes each term by at most
``2 (h + 1) u`` times itself, plus a least subnormal. All of this goes into E_h. Where q_h . k_n might overflow, or
anything is NaN or infinite, nothing is claimed: the entry, or the token, passes.

How tight it is: D c_h is little more than 1/127 of the largest |w_h q_h| of the head, and d_n a power of two, so that
keys in FP4 whose scales differ by up to 8 within a row have f_n = 0. On the demo's long documents, where 16 entries of
32,766 are to be found, some 30 pass a threshold that is already right, and five times as many if negative heads are
left out of the bound.
"""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = 127
FINEST = 16  # steps in which a head's scale follows its largest value
WEIGHED = 1 << 17  # weighted query values at once: 1 MiB
UNIT = 2.0**-24  # largest relative rounding of fp32
SUBNORMAL = 2.0**-149
OVERFLOW = 2.0**120  # products beyond this are not bounded here
LANES = 32  # columns that `amax` takes side by side; with half of them it takes ten times as long
LOOSE = 1 + 2.0**-16  # on sums that are computed in fp32 below


@cache
def native(device: torch.device) -> bool:
    """Whether the device multiplies int8 natively; elsewhere the product is slow, or saturates in between."""
    # Private, but the public `get_capabilities` is younger than the oldest torch supported.
    vnni = device.type == "cpu" and torch.cpu._is_vnni_supported()  # noqa: SLF001
    return vnni and torch.backends.mkldnn.is_available()


def finest(heads: int, width: int) -> int:
    """Largest c_h whose sums int32 holds, at most 16; 0 where there are too many heads for any.

    0 for a width of 1 too: there torch's product of int8 is wrong, it takes a row of ones for a column.
    """
    return 0 if width == 1 else min(FINEST, torch.iinfo(torch.int32).max // (2 * heads * width * LARGEST**2))


class Queries(NamedTuple):
    """Weighted queries of T tokens in integers."""

    ints: Tensor  # [h, T, d] int8: A_h
    scale: Tensor  # [h, T] int32: c_h, with the sign of w_h
    norm: Tensor  # [h, T] float64: |A_h|
    error: Tensor  # [h, T] float64: |e_h|, and what fp32 rounds in products with a key of norm 1
    tiny: Tensor  # [h, T] float64: what subnormal numbers round, in units of D c_h
    step: Tensor  # [T] float64: D
    size: Tensor  # [T] float64: largest |q_h| of any head times 1 + largest |w_h|; NaN or infinite where either is


class Keys(NamedTuple):
    """A tile of m keys in integers."""

    ints: Tensor  # [m, d] int8: K_n; zeros where the key is not finite
    inverse: Tensor  # [m] float32: 1 / d_n
    finite: Tensor  # [m] bool
    all_finite: bool
    error: float  # largest |f_n|
    norm: float  # largest |K_n + f_n|
    size: float  # largest |k_n|
    step: float  # least d_n


def round_queries(q: Tensor, head_weights: Tensor) -> Queries:
    """Weigh queries q [T, h, d] of any float dtype by [T, h] float32, and round them to 8 bits."""
    h, d = q.shape[1:]
    some = max(1, WEIGHED // (h * d))
    pairs = zip(q.split(some), head_weights.split(some), strict=True)
    parts = [_round_some(wide.double(), w.double(), finest(h, d)) for wide, w in pairs]
    ints, scale, norm, error, tiny = (torch.cat([part[i] for part in parts], dim=1) for i in range(5))
    step, size = (torch.cat([part[i] for part in parts]) for i in (5, 6))
    return Queries(ints, scale, norm, error, tiny, step, size)


def _round_some(q: Tensor, w: Tensor, finest: int) -> tuple[Tensor, ...]:
    """The fields of `Queries` for q [t, h, d] and w [t, h] in float64, where their products are exact."""
    h, d = q.shape[1:]
    size = torch.linalg.vector_norm(q, dim=2).amax(1) * (1 + w.abs().amax(1)) * LOOSE
    weighed = (q * w.abs()[..., None]).nan_to_num_(0.0, 0.0, 0.0)
    largest = weighed.abs().amax(2)  # [t, h]
    step = (largest.amax(1) / (LARGEST * finest)).clamp(min=1e-300)
    scale = (largest / (LARGEST * step[:, None])).ceil().clamp(1, finest)
    unit = step[:, None] * scale
    scaled = weighed.div_(unit[..., None])
    whole = scaled.round()
    rounded = (1.01 * (d + 1) + 2 * (h + 2)) * UNIT * torch.linalg.vector_norm(scaled, dim=2)
    error = torch.linalg.vector_norm(scaled.sub_(whole), dim=2) * LOOSE + rounded
    tiny = (((d + 2) * w.abs() + 1) * SUBNORMAL / unit).masked_fill_(largest == 0, 0)
    signed = torch.where(w < 0, -scale, scale).to(torch.int32)
    norm = torch.linalg.vector_norm(whole, dim=2)
    return whole.to(torch.int8).transpose(0, 1), signed.T, norm.T, error.T, tiny.T, step, size


def round_keys(keys: Tensor) -> Keys:
    """Round keys [m, d] of any float dtype to 8 bits, each in steps of the least power of two that its values fit."""
    keys = keys.float()
    largest = torch.maximum(keys.amax(1), -keys.amin(1))
    finite = largest.isfinite()
    exponent = torch.frexp(largest.where(finite, 1.0) / LARGEST).exponent.clamp(-100, 126)
    inverse = ((127 - exponent) << 23).view(torch.float32)  # the power of two by its bits: `exp2` need not be exact
    scaled = keys * inverse[:, None]
    all_finite = bool(finite.all())
    if not all_finite:
        scaled.masked_fill_(~finite[:, None], 0.0)
    norm = torch.linalg.vector_norm(scaled, dim=1)
    whole = scaled.round()
    error = torch.linalg.vector_norm(scaled.sub_(whole), dim=1).max().item() * LOOSE
    size = (norm.double() / inverse).max().item() * LOOSE
    step = 1 / inverse.max().item()
    return Keys(whole.to(torch.int8), inverse, finite, all_finite, error, norm.max().item() * LOOSE, size, step)


class Scratch(NamedTuple):
    """Buffers of a tile, allocated once; a tile has as many (token, entry) pairs as each of them has numbers."""

    product: Tensor  # int32
    total: Tensor  # int32
    excess: Tensor  # float32


def make_scratch(pairs: int) -> Scratch:
    """Buffers for tiles of `pairs` (token, entry) pairs."""
    return Scratch(
        torch.empty(pairs, dtype=torch.int32),
        torch.empty(pairs, dtype=torch.int32),
        torch.empty(pairs, dtype=torch.float32),
    )


def passing(queries: Queries, keys: Keys, threshold: Tensor, scratch: Scratch) -> Iterator[tuple[Tensor, Tensor]]:
    """Find the entries whose score may lie above a token's threshold.

    What is left out has a score, computed in fp32 in any order, of at most the threshold.

    Parameters
    ----------
    queries, keys
        Of T tokens and m entries.
    threshold
        [T] float32. NaN: every entry passes; +inf: none whose key is finite.
    scratch
        Buffers.

    Yields
    ------
    tuple of Tensor
        Tokens and entries, by their places in `queries` and `keys`: [c] int64 each.

    """
    levels, opened, bounded = _levels(queries, keys)
    limit = _in_steps(threshold, queries.step).where(bounded | (threshold == torch.inf), torch.nan)[:, None]
    tile = scratch.total.numel() // len(limit)
    tile = max(1, tile // LANES * LANES or tile)
    for low in range(0, len(keys.ints), tile):
        part = slice(low, low + tile)
        total = _total(queries, keys.ints[part], levels, opened, scratch)
        excess = scratch.excess[: total.numel()].view(total.shape).copy_(total)
        excess.addcmul_(limit, keys.inverse[part], value=-1)
        if not keys.all_finite:
            excess[:, ~keys.finite[part]] = torch.nan
        place, column = _not_below(excess)
        yield place, column + low


def largest(queries: Queries, keys: Keys, scratch: Scratch, k: int) -> Tensor:
    """Return the k entries of a tile of at most ``scratch / T`` with the largest bounds of each token: [T, k]."""
    levels, opened, _ = _levels(queries, keys)
    total = _total(queries, keys.ints, levels, opened, scratch)
    bound = scratch.excess[: total.numel()].view(total.shape).copy_(total).div_(keys.inverse)
    return bound.topk(k, dim=1, sorted=False).indices


def _levels(queries: Queries, keys: Keys) -> tuple[Tensor, Tensor, Tensor]:
    """``-+E_h`` [h, T] int32, the sum of ``c_h E_h`` [T, 1] int32, and which tokens can be bounded at all, [T] bool."""
    most = queries.ints.shape[2] * LARGEST**2  # of |A . K|
    spare = queries.norm * keys.error + queries.error * keys.norm + queries.tiny / keys.step  # [h, T]: E
    bounded = (spare.amax(0) < most) & (queries.size * keys.size < OVERFLOW)  # False where NaN
    spare = spare.clamp(max=most).ceil().to(torch.int32)
    opened = (queries.scale.abs() * spare).sum(0, dtype=torch.int32)
    return torch.where(queries.scale < 0, spare, -spare), opened[:, None], bounded


def _total(queries: Queries, ints: Tensor, levels: Tensor, opened: Tensor, scratch: Scratch) -> Tensor:
    """`opened` and, of each head, ``+-c_h max(A_h . K, -+E_h)``: the bound in units of D d_n, [T, m] int32."""
    t, m = opened.shape[0], ints.shape[0]
    product, total = (buffer[: t * m].view(t, m) for buffer in (scratch.product, scratch.total))
    total.copy_(opened.expand(t, m))
    columns = ints.T
    for head, level, scale in zip(queries.ints, levels[..., None], queries.scale[..., None], strict=True):
        torch._int_mm(head, columns, out=product)  # noqa: SLF001 (it has no public name)
        torch.maximum(product, level, out=product)
        total.addcmul_(product, scale)
    return total


def _in_steps(threshold: Tensor, step: Tensor) -> Tensor:
    """The threshold [T] in units of D, lowered by what the comparison may round: float32."""
    wide = threshold.double()
    largest = torch.finfo(torch.float32).max
    steps = ((wide - wide.abs() * 2.0**-20) / step).clamp(-largest, largest)
    steps = torch.where(wide < 0, steps.clamp(max=-(2.0**-20)), steps)  # so far below 0 that no key's step makes it 0
    return torch.where(threshold == torch.inf, torch.inf, steps.float())


def _not_below(excess: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of what is above zero, or NaN, in `excess` [t, m].

    These are few, and `nonzero` takes as long as the products. The maximum over columns that are a multiple of LANES
    apart is quick, and says where to look.
    """
    t, m = excess.shape
    if m % LANES:
        row, column = (excess <= 0).logical_not_().nonzero(as_tuple=True)
        return row, column
    apart = excess.view(t, m // LANES, LANES)
    row, lane = (apart.amax(1) <= 0).logical_not_().nonzero(as_tuple=True)
    item, step = (apart[row, :, lane] <= 0).logical_not_().nonzero(as_tuple=True)
    return row[item], step * LANES + lane[item]
