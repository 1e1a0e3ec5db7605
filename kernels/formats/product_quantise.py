"""Values as codes of a small codebook, four channels to a code: k-means of one sequence's own values.

Values are rotated per head by a Hadamard matrix, which makes their channels alike, and divided by the largest of their
channel; 256 centroids of four channels then serve all heads of a layer, at two bits a number.

Deterministic: k-means++ from a fixed seed, a fixed number of rounds, sums in a fixed order. A centroid that no point is
nearest to stays where it is. The fit looks at no more than `POINTS` vectors, spread evenly over the sequence, so that
its time does not grow with the context; every vector is then given its nearest centroid.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fathom.kernels.formats.stored import CodebookValues

Tiles = Callable[[], Iterator[Tensor]]  # yields [m, heads, d] float32, rotated, the same tokens each time
CHANNELS = 4  # to a code
ENTRIES = 256
ROUNDS = 30
POINTS = 1 << 16
SEED = 20_240_601
TILE = 1 << 12  # points per tile of distances: 4 MiB of fp32


def codebook_values(n: int, heads: int, d: int, device: torch.device) -> CodebookValues:
    """Allocate `n` values: d / 4 bytes for each head, and 2 KiB of codebook."""
    assert d % CHANNELS == 0, f"{d} channels are no multiple of {CHANNELS}"
    return CodebookValues(
        torch.zeros(n, heads * d // CHANNELS, dtype=torch.uint8, device=device),
        torch.zeros(ENTRIES, CHANNELS, dtype=torch.float16, device=device),
        torch.zeros(heads, d, dtype=torch.float16, device=device),
    )


def fit(values: CodebookValues, tiles: Tiles) -> None:
    """Fit codebook and largest values to the rows of `tiles`, and store the rows: `fit_codebook`, `store`."""
    fit_codebook(values, tiles, lambda tile: tile)
    store(values, tiles)


def fit_codebook(values: CodebookValues, tiles: Tiles, whole: Callable[[Tensor], Tensor]) -> None:
    """Fit codebook and largest values to the rows of `tiles`, of which none is stored.

    `values` and `tiles` may be of some of the heads that share the codebook: `whole` puts all heads of a tile together.
    The largest values are each head's own.
    """
    largest = torch.zeros(())
    for v in tiles():
        largest = torch.maximum(largest, v.abs().amax(0))
    values.largest.copy_(largest)

    sample, seen, step = [], 0, 0
    for tile in _scaled(values, tiles):
        points = _points(whole(tile))
        step = step or -(-values.codes.shape[0] * points.shape[0] // tile.shape[0] // POINTS)
        sample.append(points[-seen % step :: step].clone())  # a view would keep the tile
        seen += points.shape[0]
    values.codebook.copy_(k_means(torch.cat(sample), ENTRIES, ROUNDS, SEED))


def store(values: CodebookValues, tiles: Tiles) -> None:
    """Give each of the rows of `tiles` its nearest centroids."""
    low = 0
    for tile in _scaled(values, tiles):
        points = _points(tile)
        index = nearest(points, values.codebook.float()).to(torch.uint8).view(-1, values.codes.shape[1])
        values.codes[low : low + index.shape[0]] = index
        low += index.shape[0]
    assert low == values.codes.shape[0], f"{low} rows for {values.codes.shape[0]}"


def _scaled(values: CodebookValues, tiles: Tiles) -> Iterator[Tensor]:
    scale = torch.where(values.largest > 0, values.largest, 1.0).float()
    for v in tiles():
        yield v / scale


def _points(tile: Tensor) -> Tensor:
    """Groups of channels of [m, heads, d]: [m * heads * d / 4, 4]."""
    return tile.flatten(1).reshape(-1, CHANNELS)


def k_means(points: Tensor, entries: int, rounds: int, seed: int) -> Tensor:
    """Centroids [entries, c] of `points` [n, c] float32: k-means++ and Lloyd's iteration; sums in float64."""
    centroids = _spread(points, entries, seed)
    for _ in range(rounds):
        index = nearest(points, centroids)
        total = torch.zeros(centroids.shape, dtype=torch.float64, device=points.device)
        total.index_add_(0, index, points.double())
        count = torch.bincount(index, minlength=entries)[:, None]
        centroids = torch.where(count > 0, total / count.clamp_min(1), centroids.double()).float()
    return centroids


def nearest(points: Tensor, centroids: Tensor) -> Tensor:
    """Index of the centroid nearest to each point, [n] int64; a tie goes to the lower."""
    out = torch.empty(points.shape[0], dtype=torch.int64, device=points.device)
    half = centroids.square().sum(1) / 2
    for low in range(0, points.shape[0], TILE):
        part = points[low : low + TILE]
        out[low : low + TILE] = torch.addmm(half, part, centroids.mT, alpha=-1).argmin(1)
    return out


def _spread(points: Tensor, entries: int, seed: int) -> Tensor:
    """k-means++: each next centroid is a point drawn with a chance proportional to its squared distance.

    With fewer different points than `entries` the first point comes again, and such centroids stay empty.
    """
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(entries, generator=generator, dtype=torch.float64).tolist()
    chosen = [int(draws[0] * points.shape[0])]
    distance = (points - points[chosen[0]]).square().sum(1)
    for draw in draws[1:]:
        running = distance.double().cumsum(0)
        target = draw * running[-1:]
        # the first place where the running sum exceeds the target: never a point of distance 0
        place = int(torch.searchsorted(running, target, right=True))
        chosen.append(place if place < points.shape[0] else chosen[0])
        distance = torch.minimum(distance, (points - points[chosen[-1]]).square().sum(1))
    return points[chosen].clone()
