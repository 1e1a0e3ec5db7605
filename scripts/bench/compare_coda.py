"""`compare-coda`: a layer of CoDA-GQA-L beside the package `coda-gqa-l`, projections included."""

import argparse
from collections.abc import Iterator, Sequence

from runtime.output import write_text
from scripts.bench import coda_pairs
from scripts.bench.coda_pairs import CodaLayer
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
from scripts.console import Console

TITLE = "CoDA"
BLOCK = 256  # tokens of a block of the prefill
LAYER = (16, 4, 64)  # query heads, KV heads and width of a head
SLOTS = (256, 64, 64)  # window, exact bank and summary bank
TIMED = """\
What is timed is no layer that `generate` runs. It is
`scripts/bench/coda_pairs.py`: one product for all projections, and attention of queries and noise in one op
(`differential_attend`), as `scripts.train_coda` measures it too. `generate --coda-adapters` runs
`model/llama/attention.py`, with a product for each projection and the noise as more heads of the cache's ordinary
attention; that has not been timed."""
MEANING = """\
Both sides have the same weights, in the same memory, and give the same outputs to 1e-4. A prompt is matrix products on
both sides: the last table says how long these alone take in fp32, and so how much could be gained there. A decoded
token is the weights, read once, and many small calls, in number of which the two differ."""


def run(args: argparse.Namespace, record: Record, console: Console) -> int:
    """Run the bench; returns the exit status."""
    settle()
    timings = timed(list(pairs(args.context)), args.seconds)
    absent = f"The package {coda_pairs.PACKAGE} is not installed: its column is empty."
    missing = any(timing.ratio is None for timing in timings)
    speed, limits = rate(), bounds(timings, args.context)
    console.print(rendered(TITLE, HEADS, [cells(timing) for timing in timings]))
    if missing:
        console.print(absent)
    console.print(rendered(ALLOWED, LIMIT_HEADS, [limit.row(speed) for limit in limits]))
    record.write({TITLE: [timing.to_json() for timing in timings]})
    if args.page is not None:
        meaning = f"{MEANING}\n\n{absent}" if missing else MEANING
        text = page(args.command_line, opening(timings), {TITLE: (timings, meaning)}, limits, speed)
        write_text(args.page, text)
    return 0


def pairs(contexts: Sequence[int]) -> Iterator[Pair]:
    """Prompts of each length, and decoding after the first."""
    layer = CodaLayer(*LAYER, coda_pairs.settings(*SLOTS))
    for n in contexts:
        yield coda_pairs.prompt(layer, n, BLOCK)
    yield coda_pairs.decoding(layer, contexts[0], BLOCK)


def bounds(timings: Sequence[Timing], contexts: Sequence[int]) -> list[Limit]:
    """What a prompt could reach at most, where the package was timed."""
    prompts = [t for t in timings if t.ratio is not None and t.pair.label.startswith("prompt")]
    return [limit(timing, n) for timing, n in zip(prompts, contexts, strict=False)]


def limit(timing: Timing, n: int) -> Limit:
    """A prompt's products: projections; two streams of scores for slots and half a block, and one sum of values."""
    heads, kv_heads, d = LAYER
    width, seen = heads * d, min(sum(SLOTS), n) + BLOCK / 2
    projections = width * (2 * width + 2 * kv_heads * d + heads + 1)
    return Limit(timing.pair.label, n * (projections + 3 * heads * d * seen) / 1e9, min(timing.side(1)))


def opening(timings: Sequence[Timing]) -> list[str]:
    """What was asked for, and what was found."""
    found = reached(timings, "package", 3.0, prompts=True)
    return [
        "# A layer of CoDA-GQA-L beside its package",
        "",
        f"**CoDA is three times as fast as its package {found}.** {TIMED}",
        "",
        "Speed over that of the package, medians. Asked for: at least 3.",
        "",
        f"* A prompt: {between(timings, 'package', 'prompt')}.",
        f"* Decode: {between(timings, 'package', 'after')}.",
    ]
