"""What shard's codes rest on: the relative identity of scores, keys rebuilt from their codes, the codebooks."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.shard.cpu import middle_keys
from model.variants.shard import ShardCache, ShardSettings
from probes.finding import Finding, at_most, judged
from probes.shared.parts import Parts
from probes.variants.drawn import GROUPS, HEADS, WIDTH, draw, frequencies, turned
from probes.variants.grouped import calls, shard_cache

# Least squared error of so many bits on N(0, 1): Max (1960) to 5 bits, the same recursion beyond.
OPTIMUM = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009501, 5: 0.002505, 6: 6.44e-4, 8: 4.12e-5}
IDENTITY = at_most(1e-12)  # of the scores' RMS, in float64
SCORES = at_most(3e-6)  # the same in fp32: 1.8e-6 was seen where the identity was published
INT4 = at_most(0.02)  # best clip on a normal distribution 0.0129; the int8 basis adds less than 0.005
LAYOUTS = {"halves": False, "neighbours": True}
PIECES = 256  # of a cell, in an integral


def identity(parts: Parts, seed: int) -> Iterator[Finding]:
    """Scores through the distance of positions are those of rotated keys and queries, in float64."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    n, rank, at, first = 400, 48, 977, 9  # no key stands where the query does
    q, c, basis, mean = normal(HEADS, WIDTH), normal(n, rank), normal(GROUPS * WIDTH, rank), 3 * normal(GROUPS * WIDTH)
    freqs, positions = frequencies().double(), torch.arange(first, first + n, dtype=torch.float64)
    for layout, interleaved in LAYOUTS.items():
        keys = turned((c @ basis.mT + mean).unflatten(1, (GROUPS, WIDTH)), positions[:, None] * freqs,
                      interleaved=interleaved)  # fmt: skip
        query = turned(q[None], torch.tensor([[at]]) * freqs, interleaved=interleaved)[0]
        wanted = torch.einsum("hd,nhd->hn", query, keys.repeat_interleave(HEADS // GROUPS, 1))
        angle = (positions - at)[:, None] * freqs
        found = parts.relative_scores(q, c, basis, mean, angle.cos(), angle.sin(), interleaved=interleaved)
        error = float((found - wanted).abs().max() / wanted.square().mean().sqrt())
        what = f"GQA, shard, relative identity in float64, pairs of {layout}: largest error over the scores' RMS"
        yield judged(what, error, IDENTITY, rms=float(wanted.square().mean().sqrt()))


def rebuilt(parts: Parts, seed: int, prompt: int) -> Iterator[Finding]:
    """Keys that the cache rebuilds are those of its codes, and those that it was given, as far as int4 holds them."""
    settings = ShardSettings(rank=GROUPS * WIDTH)  # all components: what is lost is lost to the codes
    for layout, interleaved in LAYOUTS.items():
        drawn = draw(prompt, seed, interleaved=interleaved)
        cache = shard_cache(parts, prompt, prompt, settings, interleaved=interleaved)
        calls(cache, drawn, prompt)
        assert cache.middle is not None
        n = prompt - cache.exact
        found = middle_keys(cache.middle, 0, n).double()
        true, query = drawn.k[settings.sinks :][:n].double(), drawn.q[-1].double()
        from_codes = _decoded(cache, interleaved=interleaved)
        scores, wanted = (
            torch.einsum("hd,nhd->hn", query, keys.repeat_interleave(HEADS // GROUPS, 1))
            for keys in (found, from_codes)
        )
        error = float((scores - wanted).abs().max() / wanted.square().mean().sqrt())
        what = f"GQA, shard, scores of rebuilt keys, pairs of {layout}: largest error over their RMS"
        yield judged(what, error, SCORES, tokens=n)
        lost = float((found - true).square().sum() / (true - true.mean(0)).square().sum())
        what = f"GQA, shard, rebuilt keys, all components, pairs of {layout}: share of their variance that is lost"
        yield judged(what, lost, INT4, tokens=n)


def _decoded(cache: ShardCache, *, interleaved: bool) -> Tensor:
    """Keys of the middle as the stored codes say, rotated: [n, GROUPS, WIDTH] float64. The layer's layout, not its."""
    assert cache.middle is not None
    keys = cache.middle.keys
    low, high = (keys.codes & 15).double() - 8, (keys.codes >> 4).double() - 8
    c = torch.stack((low, high), -1).flatten(1) * keys.scale.double()
    plain = c @ (keys.basis.double() * keys.basis_scale.double()).mT + keys.mean.double()
    first = cache.settings.sinks
    positions = torch.arange(first, first + len(plain), dtype=torch.float32)
    return turned(plain.unflatten(1, (GROUPS, WIDTH)), positions[:, None] * frequencies(), interleaved=interleaved)


class Book(NamedTuple):
    """A codebook's error."""

    bits: int
    error: float
    optimum: float


def books(parts: Parts) -> list[Book]:
    """Mean squared error of each codebook on N(0, 1), integrated."""
    cpu = torch.device("cpu")
    return [Book(bits, _distortion(parts.codebook(bits, cpu).double()), best) for bits, best in OPTIMUM.items()]


def book_findings(found: Sequence[Book]) -> Iterator[Finding]:
    """Every codebook is the best there is, to 1 %."""
    for bits, error, optimum in found:
        what = f"codebook of {bits} bits: squared error on N(0, 1), off the optimum, relative"
        yield judged(what, abs(error / optimum - 1), at_most(0.01), error=error, optimum=optimum)


def _distortion(centroids: Tensor) -> float:
    """``sum_i int (x - c_i)^2 phi(x) dx`` over the cells between midpoints, in float64."""
    inner = (centroids[1:] + centroids[:-1]) / 2
    gone = inner.new_tensor([12.0])  # the density beyond is below 1e-31
    edges = torch.cat((-gone, inner, gone))
    place = torch.linspace(0, 1, 2 * PIECES + 1, dtype=torch.float64)
    weight = torch.full_like(place, 2.0)
    weight[1::2], weight[0], weight[-1] = 4.0, 1.0, 1.0  # Simpson's rule in each cell
    width = edges.diff()[:, None]
    x = edges[:-1, None] + width * place  # [cells, points]
    of_cells = ((x - centroids[:, None]).square() * (-x.square() / 2).exp()) @ weight * width[:, 0] / (6 * PIECES)
    return float(of_cells.sum()) / math.sqrt(2 * math.pi)
