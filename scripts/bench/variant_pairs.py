"""Cache variants beside what they are measured against, as pairs of calls: one decode step, or a prompt.

Speed depends on no value that a cache holds. So caches of a long context are filled with the rows of a short one, over
and over, and nothing is fitted to thousands of tokens only to be timed.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels.formats import coded_rows
from kernels.ops import CPU
from kernels.rope import reference as rope
from model.cache.entries import Entries
from model.cache.full import FullCache
from model.cache.gqa import Heads, all_heads
from model.variants.shard import KvShape, ShardCache, ShardSettings
from scripts.bench.pairs import Pair

ON_CPU = torch.device("cpu")
SAMPLE = 512  # tokens that are really drawn
ROOM = 128  # tokens that a cache can take beyond its context: one for each round


class GroupedShape(NamedTuple):
    """A layer with grouped heads, and the rank of its keys."""

    name: str
    heads: int  # query heads
    kv_heads: int
    d: int
    rank: int


LLAMA = GroupedShape("Llama-3.1-8B", 32, 8, 128, 192)
SMALL = GroupedShape("a small model", 8, 2, 64, 48)


class SharedShape(NamedTuple):
    """The layers of V4 as attention and indexer see them."""

    heads: int
    d: int
    index_heads: int
    index_d: int
    top_k: int
    window: int


FLASH = SharedShape(64, 512, 64, 128, 512, 128)


def drawn(n: int, shape: GroupedShape, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of n tokens in BF16; keys near a few directions, with their rotation."""
    g = torch.Generator().manual_seed(seed)
    directions = torch.randn(12, shape.kv_heads * shape.d, generator=g) / 12**0.5
    plain = torch.randn(n, 12, generator=g) @ directions + 0.1 * torch.randn(n, shape.kv_heads * shape.d, generator=g)
    keys = rope.rotate_halves(plain.unflatten(1, (-1, shape.d)), *rope.angles(torch.arange(n), _freqs(shape)))
    q, values = (torch.randn(n, heads, shape.d, generator=g) for heads in (shape.heads, shape.kv_heads))
    return q.bfloat16(), keys.bfloat16(), values.bfloat16()


def shard_cache(shape: GroupedShape, settings: ShardSettings, n: int, *, streamed: bool) -> ShardCache:
    """Return a cache that holds n tokens, all of them in the prompt, or none."""

    def made(tokens: int, room: int) -> ShardCache:
        layer = KvShape(all_heads(shape.kv_heads), shape.d, _freqs(shape), interleaved=False)
        return ShardCache(layer, settings, 0 if streamed else tokens, tokens + room, torch.bfloat16, ON_CPU)

    short = min(n, SAMPLE)
    few = made(short, 0 if short < n else ROOM)
    few.attend(*drawn(short, shape))
    if short == n:
        return few
    cache, held = made(n, ROOM), few.tensors(short)
    cache.restore(n, {name: _repeated(held[name], want) for name, want in cache.shapes(n).items()})
    return cache


def full_cache(shape: GroupedShape, n: int) -> FullCache:
    """Return the full cache in BF16 with the same n tokens."""
    cache = FullCache(all_heads(shape.kv_heads), shape.d, None, n + 1, torch.bfloat16, ON_CPU)
    _, keys, values = drawn(min(n, SAMPLE), shape)
    for held, rows in ((cache.keys, keys), (cache.values, values)):
        held.write(0, _repeated(rows, (n, *rows.shape[1:])))
    return cache


def grouped_step(shape: GroupedShape, n: int, settings: ShardSettings, *, streamed: bool) -> list[Pair]:
    """One decoded token after n: shard against the full cache, and against torch's own attention to the same rows."""
    form = f"stream of {settings.stream_bits} bits" if streamed else f"rank {settings.rank}"
    label = f"{shape.name}, {form}, {n} tokens"
    shard, full = shard_cache(shape, settings, n, streamed=streamed), full_cache(shape, n)
    token = tuple(part[:1] for part in drawn(1, shape, seed=1))

    def variant() -> Tensor:
        return shard.attend(*token)

    def by_full() -> Tensor:
        return full.attend(_heads(token), n, CPU)

    def by_torch() -> Tensor:
        for held, new in ((full.keys, token[1]), (full.values, token[2])):
            held.write(n, new)
        keys, values = (part.data[None, :, : n + 1] for part in (full.keys, full.values))
        q = token[0].transpose(0, 1)[None]
        return scaled_dot_product_attention(q, keys, values, enable_gqa=True)[0].transpose(0, 1)

    return [Pair(label, "shard", variant, "full", by_full), Pair(label, "shard", variant, "torch", by_torch)]


def grouped_prompt(shape: GroupedShape, n: int, settings: ShardSettings, chunk: int) -> Pair:
    """A prompt of n tokens, read in chunks; shard compresses it at its end."""
    tokens = drawn(n, shape)

    def variant() -> Tensor:
        layer = KvShape(all_heads(shape.kv_heads), shape.d, _freqs(shape), interleaved=False)
        cache = ShardCache(layer, settings, n, n, torch.bfloat16, ON_CPU)
        return torch.cat([cache.attend(*(part[a : a + chunk] for part in tokens)) for a in range(0, n, chunk)])

    def by_full() -> Tensor:
        cache = FullCache(all_heads(shape.kv_heads), shape.d, None, n, torch.bfloat16, ON_CPU)
        parts = ((a, _heads(tuple(part[a : a + chunk] for part in tokens))) for a in range(0, n, chunk))
        return torch.cat([cache.attend(heads, a, CPU) for a, heads in parts])

    return Pair(f"{shape.name}, prompt of {n} tokens", "shard", variant, "full", by_full)


def shared_step(shape: SharedShape, n: int, ratio: int, bits: int, key_bits: int) -> Pair:
    """What a variant changes of a V4 layer's step after n tokens: selection, where there is one, and attention."""
    g, count = torch.Generator().manual_seed(n), n // ratio
    sample = min(count, SAMPLE)
    entries, keys = (_repeated(torch.randn(sample, d, generator=g).bfloat16(), (count, d)) for d in shape[1:4:2])
    q, ring = torch.randn(1, shape.heads, shape.d, generator=g), torch.randn(shape.window + 1, shape.d, generator=g)
    index_q = torch.randn(1, shape.index_heads, shape.index_d, generator=g)
    head_weights, sink = torch.rand(1, shape.index_heads, generator=g), torch.zeros(shape.heads)
    q, ring = q.bfloat16(), ring.bfloat16()

    def step(rows: Entries, index: Entries) -> Callable[[], Tensor]:
        def run() -> Tensor:
            chosen = None
            if ratio == 4:
                chosen = CPU.select(index_q, head_weights, index.view(), n - 1, ratio, shape.top_k)
            return CPU.attend(q, ring, n - 1, shape.window, rows.view(), ratio, chosen, sink)

        return run

    coded = Entries(ratio, coded_rows.allocate(count, shape.d, bits, ON_CPU, 0))
    coded_keys = Entries(ratio, coded_rows.allocate(count, shape.index_d, key_bits, ON_CPU, 0))
    plain, plain_keys = (Entries(ratio, torch.empty_like(part)) for part in (entries, keys))
    for held, given in ((coded, entries), (coded_keys, keys), (plain, entries), (plain_keys, keys)):
        held.append(given)
    kind = "CSA" if ratio == 4 else "HCA"
    return Pair(f"{kind}, {n} tokens", "shard", step(coded, coded_keys), "full", step(plain, plain_keys))


def _heads(tokens: tuple[Tensor, ...]) -> Heads:
    """Heads of a layer without write gates."""
    q, k, v = tokens
    return Heads(q, k, v, None)


def _freqs(shape: GroupedShape) -> Tensor:
    return rope.frequencies(shape.d, 500_000.0)


def _repeated(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Rows over and over, until they are as many as `shape` has."""
    return rows if rows.shape == shape else rows[torch.arange(shape[0]) % len(rows)]
