"""What the caches of grouped-query layers take: bytes held, against published figures, and scratch while attending."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from kernels.shard import cpu as blocked
from model.cache.gqa import all_heads
from model.variants.coda_settings import CodaSettings
from model.variants.shard import KvShape, ShardCache, ShardSettings
from probes.finding import Finding, at_most, exactly, judged
from probes.shared.alive import peak_bytes
from probes.shared.parts import Parts
from probes.variants.drawn import GROUPS, HEADS, WIDTH, draw
from probes.variants.grouped import CODA, CPU, calls, coda_cache, shard_cache, steps
from probes.variants.held import snapshot, written

MIB = 2**20
LLAMA = (32, 8, 128)  # layers, KV heads, head_dim of Llama-3.1-8B
ARTICLE = {4096: 57.98, 8192: 101.98, 16384: 189.98, 32768: 365.98}  # MiB of all layers; "58, 102, 190, 366 MB"
PACKAGE = 1_771_392  # bytes of a layer of 8 heads of 128 at 256 + 64 + 64 slots in bf16, by coda-gqa-l's cache_bytes
# What attention holds at once, in tiles of keys. Over the middle: keys 1, values 1, coefficients 1/2 (64 for 128
# columns), cosines, sines and the complex numbers of them 1 (an angle serves both heads), codes of values as indices
# 1/4. Over the stream: keys 1, values 1, values of the tile before 1, codes as integers 1. A quarter is left to what is
# small: nibbles 1/16, logits 1/16, the basis 1/32, queries and sums.
TILES = 4.25


class Llama(NamedTuple):
    """A cache of Llama-3.1-8B."""

    tokens: int
    held: float  # MiB, all layers
    full: float  # of the full cache in bf16


def llama(parts: Parts) -> list[Llama]:
    """Bytes of shard after a prompt, from tensors on the meta device: nothing is allocated."""
    layers, heads, d = LLAMA
    shape = KvShape(all_heads(heads), d, torch.zeros(d // 2, device="meta"), interleaved=False)
    found = []
    for tokens in ARTICLE:
        cache = parts.shard(shape, ShardSettings(), tokens, tokens, torch.bfloat16, torch.device("meta"))
        cache.prompt_keys = cache.prompt_values = None  # compressing the prompt lets its rows go
        found.append(Llama(tokens, layers * cache.nbytes() / MIB, layers * 2 * tokens * heads * d * 2 / MIB))
    return found


def published(parts: Parts, found: Sequence[Llama]) -> Iterator[Finding]:
    """The published figures, from tensors."""
    for tokens, held, _ in found:
        what = f"GQA, shard, Llama-3.1-8B, {tokens} tokens: held, off the article's {ARTICLE[tokens]}"
        yield judged(what, abs(held - ARTICLE[tokens]), at_most(0.005), "MiB", held=held)  # two decimals
    _, heads, d = LLAMA
    settings = CodaSettings.published(window=256, exact=64, summary=64, rope="half")
    formula = 2 * heads * 384 * d * 2 + 4 * heads * 128 + 4 * 256 + 384 + 8 * 64
    for name, one, wanted in (
        ("as published, off the package's", settings, PACKAGE),
        ("with inverse norms, off the formula's", replace(settings, inverse_norms=True, lf_layout="pairs"), formula),
    ):
        cache = parts.coda(one, all_heads(heads), d, torch.zeros(heads), torch.bfloat16, CPU)
        what = f"GQA, coda, 256 + 64 + 64 slots of 8 heads of 128 {name} {wanted}"
        yield judged(what, cache.nbytes() - wanted, exactly(0), "B")


def counted(parts: Parts, seed: int) -> Iterator[Finding]:
    """`nbytes` is what was written to, once enough has come to fill every buffer."""
    window, exact, summary = CODA
    drawn = draw(2 * (window + exact + summary), seed)
    coda = coda_cache(parts, window, exact, summary)
    before = snapshot(coda)
    steps(coda, drawn)
    yield _counted("coda", coda.nbytes(), written(before, snapshot(coda)))
    prompt, context = 100, 108
    shard = shard_cache(parts, prompt, context)
    before = snapshot(shard)
    calls(shard, drawn, 64, context)
    yield _counted("shard", shard.nbytes(), written(before, snapshot(shard)))


def _counted(name: str, told: int, held: int) -> Finding:
    what = f"GQA, {name}: bytes told, off those of the tensors that a run has written to"
    return judged(what, told - held, exactly(0), "B", held=held)


class Scratch(NamedTuple):
    """What attending from one token holds beside the cache."""

    segment: str
    tokens: tuple[int, int]
    peaks: tuple[int, int]  # bytes


def scratch(parts: Parts, contexts: tuple[int, int], seed: int) -> list[Scratch]:
    """Attend from one token to noise in shard's form."""
    found = []
    for segment in ("middle", "stream"):
        peaks = []
        for n in contexts:
            cache = shard_cache(parts, n if segment == "middle" else 0, n + 4)
            _fill(cache, n, seed)
            one = draw(1, seed)
            cache.attend(*one)  # tables that stay
            peaks.append(peak_bytes(partial(cache.attend, *one)))
        found.append(Scratch(segment, contexts, (peaks[0], peaks[1])))
    return found


def _fill(cache: ShardCache, position: int, seed: int) -> None:
    """Put the cache at `position` with noise for content: scratch depends on how much there is, not on what."""
    g = torch.Generator().manual_seed(seed)
    shapes = cache.shapes(position)
    cache.restore(position, {name: 9 * torch.rand(shape, generator=g) for name, shape in shapes.items()})


def scratch_findings(found: Sequence[Scratch]) -> Iterator[Finding]:
    """One tile, whatever the context."""
    tile = 4 * blocked.KEYS
    assert tile == 4 * GROUPS * WIDTH * (blocked.KEYS // (GROUPS * WIDTH)), "a tile of whole tokens"
    for segment, (few, many), (small, large) in found:
        what = f"GQA, shard, scratch of a decoded token over the {segment}, {many} tokens against {few}: growth"
        yield judged(what, large - small, exactly(0), "B", at_first=small, heads=HEADS)
        what = f"GQA, shard, scratch of a decoded token over the {segment}, tiles of keys of {blocked.KEYS} numbers"
        yield judged(what, large / tile, at_most(TILES), "", tile_bytes=tile, everything=8 * many * GROUPS * WIDTH)
