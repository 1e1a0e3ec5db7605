"""`variants`: what remembering with Shard costs in time, beside the full cache and torch's own attention.

1. Shard against the full cache of a layer with grouped heads, in BF16, and against torch's own attention;
2. Shard against the full cache of V4's layers: what a variant changes of a step.
"""

import argparse
from collections.abc import Iterator, Sequence

from model.variants.shard import ShardSettings
from runtime.output import write_text
from scripts.bench import variant_pairs
from scripts.bench.pairs import Pair, Timing
from scripts.bench.record import Record, rendered
from scripts.bench.speed_page import (
    ALLOWED,
    HEADS,
    LIMIT_HEADS,
    Limit,
    between,
    cells,
    page,
    rate,
    reached,
    settle,
    timed,
)
from scripts.bench.variant_pairs import FLASH, LLAMA, SMALL
from scripts.console import Console

PROMPT = 1024  # tokens of the prompt that Shard's prefill is timed with: compression takes longer than attention there
GROUPED, SHARED = "Shard, grouped heads", "Shard, V4"
# What each table says beside its numbers.
MEANING = {
    GROUPED: """\
A full cache is asked for one thing a token: to widen its row to fp32, and to multiply. Shard's prefill form is asked
for the same products and, before them, for KV heads x d x rank multiplications that rebuild the key. A core that reads
faster than it multiplies cannot gain from the bytes that this saves, and the decode stream's look-ups, one for one or
two numbers, are no faster than widening BF16. What the forms are for is the memory of a prompt that has been read:
while it is read it is held in full beside them, so that a prompt which just fits with full caches does not fit with
Shard (`scripts.plan --kv` counts both). `torch` is its own attention to the same BF16 rows
(`scaled_dot_product_attention` with grouped heads). A prompt is read by the same op on both sides; the rest is the one
compression at its end.""",
    SHARED: """\
The rows are what a variant changes of a layer's step: selection (CSA) and attention; projections and compressors do not
know of it. Coded rows cost a look-up for one or two numbers, and a rotation of the queries and of the result.""",
}


def run(args: argparse.Namespace, record: Record, console: Console) -> int:
    """Run the bench; returns the exit status."""
    settle()
    tables = {}
    for title, pairs in ((GROUPED, grouped), (SHARED, shared)):
        tables[title] = timed(list(pairs(args.context)), args.seconds)
        console.print(rendered(title, HEADS, [cells(timing) for timing in tables[title]]))
    speed, limits = rate(), bounds(tables[GROUPED], args.context)
    console.print(rendered(ALLOWED, LIMIT_HEADS, [limit.row(speed) for limit in limits]))
    record.write({title: [timing.to_json() for timing in timings] for title, timings in tables.items()})
    if args.page is not None:
        told = {title: (timings, MEANING[title]) for title, timings in tables.items()}
        text = page(args.command_line, opening(tables), told, limits, speed)
        write_text(args.page, text)
    return 0


def grouped(contexts: Sequence[int]) -> Iterator[Pair]:
    """Shard on grouped heads: decode in both forms, and a prompt."""
    for n in contexts:
        for shape in (LLAMA, SMALL):
            settings = ShardSettings(rank=shape.rank)
            yield from variant_pairs.grouped_step(shape, n, settings, streamed=False)
            for bits in (8, 4):
                coded = ShardSettings(rank=shape.rank, stream_bits=bits)
                yield from variant_pairs.grouped_step(shape, n, coded, streamed=True)
    yield variant_pairs.grouped_prompt(SMALL, min(PROMPT, *contexts), ShardSettings(rank=SMALL.rank), 512)


def shared(contexts: Sequence[int]) -> Iterator[Pair]:
    """Shard on V4's layers."""
    for n in contexts:
        for ratio in (4, 128):
            yield variant_pairs.shared_step(FLASH, n, ratio, bits=6, key_bits=8)


def bounds(timings: Sequence[Timing], contexts: Sequence[int]) -> list[Limit]:
    """What a decoded token could reach at most with the prefill form of Llama's layer: keys rebuilt, scores, sums."""
    each = LLAMA.kv_heads * LLAMA.d * LLAMA.rank + 2 * LLAMA.heads * LLAMA.d
    steps = [t for t in timings if t.pair.second == "full" and f"{LLAMA.name}, rank" in t.pair.label]
    return [
        Limit(timing.pair.label, n * each / 1e9, min(timing.side(1))) for timing, n in zip(steps, contexts, strict=True)
    ]


def opening(tables: dict[str, list[Timing]]) -> list[str]:
    """What was asked for, and what was found."""
    timings = tables[GROUPED]
    return [
        "# What a cache variant costs in time",
        "",
        f"**Shard's decode is as fast as the full cache {reached(timings, 'full', 1.0, prompts=False)}.**",
        "",
        "Speed of the variant over that of the other side, medians. Asked for: at least 1 for decode from 8K on.",
        "",
        f"* Shard's prefill form, decode, over the full cache: {between(timings, 'full', 'rank')};",
        f"  over torch's own attention: {between(timings, 'torch', 'rank')}.",
        f"* Shard's stream, decode, over the full cache: {between(timings, 'full', 'stream')};",
        f"  over torch's own attention: {between(timings, 'torch', 'stream')}.",
        f"* Shard, a prompt with its compression, over the full cache: {between(timings, 'full', 'prompt')}.",
        f"* Shard on V4's layers, decode, over the full cache: {between(tables[SHARED], 'full')}.",
    ]
