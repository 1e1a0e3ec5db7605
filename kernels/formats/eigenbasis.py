"""Rows in their own eigenbasis: fitted once, stored as int8 columns and narrow coefficients.

The keys of one sequence of a GQA layer, and the entries of a V4 layer (`kernels.formats.basis_rows`).

Deterministic: the exact eigenvectors of the covariance, each with the sign that makes its largest component positive
(of equals, the first). No random projection and no starting point enters.

How many bits a group of components gets is either the same for all that are kept, int4 as published, or the optimum
over groups of the total distortion for the same bytes, with Lloyd-Max codes. Distortion per unit of variance is then
either that of Lloyd-Max codes on a normal distribution, or the published estimate ``1 / (3 * 4^b)``, which is 7 to 40
times below what any scalar quantiser reaches; a group without bits is charged four times its variance in both.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from fathom.kernels.formats import lloyd_max
from fathom.kernels.formats.stored import EigenKeys

Tiles = Callable[[], Iterator[Tensor]]  # yields [m, D] float32, the same tokens each time
DP_BITS = (0, 2, 4, 6, 8)
DROPPED = 4.0  # distortion charged to a group that is not stored, per unit of its variance
CLIPS = 64  # clips tried for int4, in equal steps up to the largest coefficient


def measured_distortion(bits: int) -> float:
    """Squared error per unit of variance of Lloyd-Max codes on a normal distribution; 4 for no bits."""
    return DROPPED if bits == 0 else lloyd_max.distortion(bits)


def published_distortion(bits: int) -> float:
    """The article's estimate: ``1 / (3 * 4^b)``; 4 for no bits."""
    return DROPPED if bits == 0 else 1 / (3 * 4**bits)


def moments(tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Mean [D] and covariance [D, D] of all rows, float64, in two passes."""
    count, total = 0, torch.zeros((), dtype=torch.float64)
    for x in tiles():
        count, total = count + x.shape[0], total + x.double().sum(0)
    mean = total / count
    covariance = torch.zeros((), dtype=torch.float64)
    for x in tiles():
        centred = x.double() - mean
        covariance = covariance + centred.mT @ centred
    return mean, covariance / count


def eigenbasis(covariance: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The `rank` eigenvectors of most variance, [D, rank], and their variances [rank], largest first; float64."""
    variance, vectors = torch.linalg.eigh(covariance.double())
    basis = vectors.flip(1)[:, :rank]
    peak = basis.gather(0, basis.abs().argmax(0, keepdim=True))  # argmax takes the first of equals
    return torch.where(peak < 0, -basis, basis), variance.flip(0)[:rank].clamp_min(0)


def quantise_basis(basis: Tensor) -> tuple[Tensor, Tensor]:
    """Columns [D, r] as int8 in [-127, 127] and a float16 scale per column: ``amax / 127``."""
    scale = (basis.abs().amax(0) / 127).half()
    steps = torch.where(scale > 0, scale, 1.0).to(basis.dtype)
    return (basis / steps).round().clamp(-127, 127).to(torch.int8), scale


def allocate(variance: Sequence[float], budget: int, distortion: Callable[[int], float]) -> list[int]:
    """Bits of each group, of `DP_BITS`, that minimise ``sum_g variance_g * distortion(bits_g)``: see `cheapest`.

    Parameters
    ----------
    variance
        Of each group.
    budget
        Bits that the groups may have together.
    distortion
        Squared error per unit of variance, by bits.

    """
    return cheapest([{bits: group * distortion(bits) for bits in DP_BITS} for group in variance], budget)


def cheapest(costs: Sequence[Mapping[int, float]], budget: int) -> list[int]:
    """Bits of each group, of `DP_BITS`, with the least sum of `costs` by group and bits, within a budget of bits.

    Exact dynamic programming. Of equal sums, the one that gives a group fewer bits, the last group first.
    """
    best = [0.0] * (budget + 1)  # least cost of the groups so far within so many bits
    choices: list[list[int]] = []
    for cost in costs:
        choice = [0] * (budget + 1)
        following = [best[spent] + cost[0] for spent in range(budget + 1)]
        for bits in DP_BITS[1:]:
            for spent in range(bits, budget + 1):
                total = best[spent - bits] + cost[bits]
                if total < following[spent]:
                    following[spent], choice[spent] = total, bits
        best = following
        choices.append(choice)
    chosen, left = [], budget
    for choice in reversed(choices):
        chosen.append(choice[left])
        left -= choice[left]
    return chosen[::-1]


def eigen_keys(n: int, width: int, rank: int, kept: int, groups: int, device: torch.device) -> EigenKeys:
    """Allocate `n` keys of `width` columns: `rank` / 2 bytes each, and a basis of `kept` columns.

    `groups` is 0 for int4 coefficients of `rank` components; then `kept` is `rank`.
    """
    half = torch.float16
    return EigenKeys(
        torch.zeros(n, lloyd_max.packed_bytes(rank, 4), dtype=torch.uint8, device=device),
        torch.zeros(width, kept, dtype=torch.int8, device=device),
        torch.zeros(kept, dtype=half, device=device),
        torch.zeros(kept, dtype=half, device=device),
        torch.zeros(width, dtype=half, device=device),
        torch.zeros(groups, dtype=torch.int8),
    )


def fit(keys: EigenKeys, tiles: Tiles, distortion: Callable[[int], float] | None) -> None:
    """Fit basis, mean, bits and scales of `keys` to the rows of `tiles`, and store the rows: `fit_basis`, `store`."""
    fit_basis(keys, tiles, distortion)
    low = 0
    for c in projected(keys, tiles)():
        store(keys, low, c)
        low += c.shape[0]
    assert low == keys.codes.shape[0], f"{low} rows for {keys.codes.shape[0]}"


def fit_basis(keys: EigenKeys, tiles: Tiles, distortion: Callable[[int], float] | None) -> None:
    """Fit basis, mean, bits and scales of `keys` to the rows of `tiles`, of which none is stored.

    `distortion` is None for int4; else it decides the bits of each group, for as many bytes as a row of codes has.
    """
    mean, covariance = moments(tiles)
    basis, variance = eigenbasis(covariance, keys.basis.shape[1])
    columns, basis_scale = quantise_basis(basis)
    keys.mean.copy_(mean)
    keys.basis.copy_(columns)
    keys.basis_scale.copy_(basis_scale)
    if distortion is not None:
        sums = variance.unflatten(0, (keys.bits.shape[0], -1)).sum(1)
        chosen = allocate(sums.tolist(), 8 * keys.codes.shape[1] // _group(keys), distortion)
        keys.bits.copy_(torch.tensor(chosen, dtype=torch.int8))

    found = projected(keys, tiles)
    keys.scale.copy_(_int4_scale(found) if distortion is None else deviation(found))


def projected(keys: EigenKeys, tiles: Tiles) -> Tiles:
    """Coefficients of the rows of `tiles` in the basis as it will be read: products, of rounded columns."""
    used = keys.basis.float() * keys.basis_scale.float()

    def coefficients() -> Iterator[Tensor]:
        for x in tiles():
            yield (x - keys.mean.float()) @ used

    return coefficients


def coefficients(keys: EigenKeys, low: int, high: int) -> Tensor:
    """Decode coefficients of keys `low` to `high` - 1, [high - low, r] float32; those not stored are 0."""
    out = torch.zeros(high - low, keys.basis.shape[1], device=keys.codes.device)
    for columns, places, bits in _runs(keys):
        packed = keys.codes[low:high, places]
        if keys.bits.shape[0] == 0:
            out[:, columns] = lloyd_max.look_up(packed, 4, _int4_words(packed.device))
        else:
            out[:, columns] = lloyd_max.decode_packed(packed, bits)
    return out.mul_(keys.scale)


def store(keys: EigenKeys, low: int, c: Tensor) -> None:
    """Quantise coefficients `c` [m, r] as keys from `low` on."""
    # a component that never varied has scale 0: whatever its code, it decodes to 0
    scaled = c / torch.where(keys.scale > 0, keys.scale, 1.0).float()
    for columns, places, bits in _runs(keys):
        if keys.bits.shape[0] == 0:
            codes = (scaled[:, columns].round().clamp(-7, 7) + 8).to(torch.uint8)
        else:
            codes = lloyd_max.encode(scaled[:, columns], bits)
        keys.codes[low : low + c.shape[0], places] = lloyd_max.pack(codes, bits)


def _runs(keys: EigenKeys) -> Iterator[tuple[slice, slice, int]]:
    """Columns, bytes and bits of neighbouring components that have equally many bits, those without bits left out."""
    if keys.bits.shape[0] == 0:
        yield slice(0, keys.basis.shape[1]), slice(0, keys.codes.shape[1]), 4
        return
    group, bits = _group(keys), keys.bits.tolist()
    start, place = 0, 0
    for stop in range(1, len(bits) + 1):
        if stop < len(bits) and bits[stop] == bits[start]:
            continue
        if bits[start]:
            size = lloyd_max.packed_bytes((stop - start) * group, bits[start])
            yield slice(start * group, stop * group), slice(place, place + size), bits[start]
            place += size
        start = stop


def _group(keys: EigenKeys) -> int:
    """Components per group."""
    return keys.basis.shape[1] // keys.bits.shape[0]


@cache
def _int4_words(device: torch.device) -> Tensor:
    """What each byte of int4 codes means: [256, 2], in units of the component's scale."""
    return lloyd_max.word_table(torch.arange(-8.0, 8.0, device=device))


def deviation(tiles: Tiles) -> Tensor:
    """Root mean square of each column, [r] float64."""
    count, total = 0, torch.zeros((), dtype=torch.float64)
    for c in tiles():
        count, total = count + c.shape[0], total + c.double().square().sum(0)
    return (total / count).sqrt()


def _int4_scale(tiles: Tiles) -> Tensor:
    """Scale of each column with the least squared error on codes -7 to 7, [r] float32; of equals, the smaller.

    ``amax / 7`` wastes codes on the tails: 0.0225 of the variance is lost to it where the best clip loses 0.0129.
    """
    largest = torch.zeros(())
    for c in tiles():
        largest = torch.maximum(largest, c.abs().amax(0))
    fractions = torch.arange(1, CLIPS + 1, dtype=torch.float32, device=largest.device) / CLIPS
    return searched_scale(tiles, largest / 7 * fractions[:, None], lambda units: units.round().clamp(-7, 7))[0]


def searched_scale(tiles: Tiles, candidates: Tensor, quantised: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Of the `candidates` [k, r] for each column the scale [r] of least squared error, as float16 holds it.

    And that error, [r] float64, as a mean over rows. Of equals, the first; `quantised` rounds in units of the scale.
    """
    # rounded to float16 first: what is compared is what will be stored
    scales = candidates.half().float()
    count, error = 0, torch.zeros(scales.shape, dtype=torch.float64, device=scales.device)
    for c in tiles():
        count += c.shape[0]
        for i, scale in enumerate(scales):
            steps = torch.where(scale > 0, scale, 1.0)
            error[i] += (c - quantised(c / steps) * scale).double().square().sum(0)
    least, at = error.min(0)
    return scales.gather(0, at[None]).squeeze(0), least / count
