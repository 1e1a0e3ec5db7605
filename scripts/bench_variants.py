"""`python -m scripts.bench_variants`: what a cache variant costs in time, beside what it is measured against.

Both sides of a row run in turn, round after round, on one thread, so that whatever else the machine does falls on both;
times are processor time. What counts is the ratio of each round: its median, and the smallest and largest beside it.
Numbers too small for fp32's exponents are flushed to zero, which the package `coda-gqa-l` needs for its speed.

1. shard against the full cache of a layer with grouped heads, in BF16, and against torch's own attention;
2. shard against the full cache of V4's layers: what a variant changes of a step;
3. coda against `coda-gqa-l`, projections included, where that package is installed.
"""

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from model.cache.shard import ShardSettings
from scripts import coda_pairs, variant_pairs
from scripts.cli import run_alone
from scripts.coda_pairs import CodaLayer
from scripts.flags import positive, writable
from scripts.variant_pairs import FLASH, LLAMA, SMALL, Case

BLOCK = 256  # tokens of a block of CoDA's prefill
CODA = (16, 4, 64)  # query heads, KV heads and width of a head of the layer that is timed beside the package
SLOTS = (256, 64, 64)  # window, exact bank and summary bank
PROMPT = 1024  # tokens of the prompt that shard's prefill is timed with: compression takes longer than attention there
CONTEXTS = (8192, 16384, 32768)
CODA_CONTEXTS = (2048, 8192)
SECONDS = 4.0  # for a row, within 5 to 30 rounds
GROUPED, SHARED, PACKAGE = "Shard, grouped heads", "Shard, V4", "CoDA"
# What each table says beside its numbers.
MEANING = {
    GROUPED: """\
A full cache is asked for one thing a token: to widen its row to fp32, and to multiply. Shard's prefill form is asked
for the same products and, before them, for KV heads x d x rank multiplications that rebuild the key. A core that reads
faster than it multiplies cannot gain from the bytes that this saves, and the decode stream's look-ups, one for one or
two numbers, are no faster than widening BF16. What the forms are for is memory. `torch` is its own attention to the
same BF16 rows (`scaled_dot_product_attention` with grouped heads). A prompt is read by the same op on both sides; the
rest is the one compression at its end.""",
    SHARED: """\
The rows are what a variant changes of a layer's step: selection (CSA) and attention; projections and compressors do not
know of it. Coded rows cost a look-up for one or two numbers, and a rotation of the queries and of the result.""",
    PACKAGE: """\
Both sides have the same weights, in the same memory, and give the same outputs to 1e-4. A prompt is matrix products on
both sides: the last table says how long these alone take in fp32, and so how much could be gained there. A decoded
token is the weights, read once, and many small calls, in number of which the two differ.""",
}


class Timing(NamedTuple):
    """What a case took: the best and the median time of each side in ms, and other / variant over the rounds."""

    case: Case
    ms: tuple[float, float]  # of the variant: smallest, median
    other_ms: tuple[float, float] | None
    ratio: tuple[float, float, float] | None  # median, smallest, largest; above 1 the variant is the faster
    rounds: int


class Limit(NamedTuple):
    """How fast something could be at most, from its multiplications."""

    label: str
    products: float  # multiplications and additions, in 10^9
    other_ms: float

    def row(self, rate: float) -> tuple[str, ...]:
        """Cells: products, what they take at `rate` of them (in 10^9 a second), and the largest ratio that leaves."""
        least = 1e3 * self.products / rate
        return (
            self.label,
            f"{self.products:.2f}",
            f"{least:.1f}",
            f"{self.other_ms:.1f}",
            f"{self.other_ms / least:.2f}",
        )


def processor_ms(call: Callable[[], object]) -> float:
    """Milliseconds of processor time of one call."""
    start = time.thread_time()
    call()
    return 1e3 * (time.thread_time() - start)


def measure(case: Case, seconds: float) -> Timing:
    """Time a case, after one round that does not count."""
    calls = [case.run] if case.run_other is None else [case.run, case.run_other]
    warm = sum(processor_ms(call) for call in calls)
    rounds = int(min(30, max(5, 1e3 * seconds // max(warm, 1e-3))))
    times = [[processor_ms(call) for call in calls] for _ in range(rounds)]
    sides = [(min(column), median(column)) for column in zip(*times, strict=True)]
    if case.run_other is None:
        return Timing(case, sides[0], None, None, rounds)
    ratios = sorted(other / variant for variant, other in times)
    return Timing(case, sides[0], sides[1], (median(ratios), ratios[0], ratios[-1]), rounds)


def grouped(contexts: Sequence[int]) -> Iterator[Case]:
    """Shard on grouped heads: decode in both forms, and a prompt."""
    for n in contexts:
        for shape in (LLAMA, SMALL):
            settings = ShardSettings(rank=shape.rank)
            yield from variant_pairs.grouped_step(shape, n, settings, streamed=False)
            for bits in (8, 4):
                coded = ShardSettings(rank=shape.rank, stream_bits=bits)
                yield from variant_pairs.grouped_step(shape, n, coded, streamed=True)
    yield variant_pairs.grouped_prompt(SMALL, min(PROMPT, *contexts), ShardSettings(rank=SMALL.rank), 512)


def shared(contexts: Sequence[int]) -> Iterator[Case]:
    """Shard on V4's layers."""
    for n in contexts:
        for ratio in (4, 128):
            yield variant_pairs.shared_step(FLASH, n, ratio, bits=6, key_bits=8)


def package(contexts: Sequence[int]) -> Iterator[Case]:
    """CoDA beside the package."""
    layer = CodaLayer(*CODA, coda_pairs.settings(*SLOTS))
    for n in contexts:
        yield coda_pairs.prompt(layer, n, BLOCK)
    yield coda_pairs.decoding(layer, contexts[0], BLOCK)


def rate(seconds: float = 0.5) -> float:
    """Multiplications a second of a large fp32 product, in 10^9: the best of the calls within `seconds`."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    best, stop = float("inf"), time.thread_time() + seconds
    while time.thread_time() < stop:
        best = min(best, processor_ms(lambda: a @ b))
    return 1024**3 / best / 1e6


def coda_limit(timing: Timing, n: int) -> Limit:
    """A prompt's products: projections; two streams of scores for slots and half a block, and one sum of values."""
    heads, kv_heads, d = CODA
    width, seen = heads * d, min(sum(SLOTS), n) + BLOCK / 2
    projections = width * (2 * width + 2 * kv_heads * d + heads + 1)
    assert timing.other_ms is not None, "no limit without the package"
    return Limit(timing.case.label, n * (projections + 3 * heads * d * seen) / 1e9, timing.other_ms[0])


def shard_limit(timing: Timing, n: int) -> Limit:
    """A decoded token's products with the prefill form of Llama's layer: keys rebuilt, scores, sums."""
    each = LLAMA.kv_heads * LLAMA.d * LLAMA.rank + 2 * LLAMA.heads * LLAMA.d
    assert timing.other_ms is not None, "the full cache is always there"
    return Limit(timing.case.label, n * each / 1e9, timing.other_ms[0])


HEADS = ("case", "variant, ms", "other", "other, ms", "ratio, median", "from .. to", "rounds")
LIMIT_HEADS = ("case", "10^9 products", "at that rate, ms", "other side, ms", "largest ratio")


def cells(timing: Timing) -> tuple[str, ...]:
    """One row of a table; times are the best and the median of the rounds."""
    both = [f"{low:.2f} / {middle:.2f}" for low, middle in (timing.ms, *filter(None, [timing.other_ms]))]
    ratio = ("", "") if timing.ratio is None else (f"{timing.ratio[0]:.2f}", "{1:.2f} .. {2:.2f}".format(*timing.ratio))
    return (timing.case.label, both[0], timing.case.other, both[1] if len(both) > 1 else "", *ratio, str(timing.rounds))


def markdown(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A section with one table."""
    lines = [" | ".join(row) for row in rows]
    return [
        f"## {title}",
        "",
        f"| {' | '.join(heads)} |",
        f"|---|{'---:|' * (len(heads) - 1)}",
        *(f"| {x} |" for x in lines),
        "",
    ]


def verdict(tables: dict[str, list[Timing]]) -> str:
    """In how many cases that was reached which was asked for."""

    def reached(title: str, other: str, least: float, *, prompts: bool) -> str:
        timed = [t for t in tables.get(title, []) if t.case.other == other and t.ratio]
        ratios = [t.ratio[0] for t in timed if t.ratio and (prompts or "prompt" not in t.case.label)]
        return f"in {sum(ratio >= least for ratio in ratios)} of {len(ratios)} cases"

    shard, coda = reached(GROUPED, "full", 1.0, prompts=False), reached(PACKAGE, "package", 3.0, prompts=True)
    return f"**Shard's decode is as fast as the full cache {shard}; CoDA three times as fast as its package {coda}.**"


def found(tables: dict[str, list[Timing]]) -> list[str]:
    """What was asked for, and the medians that were found, smallest and largest of each kind."""

    def between(title: str, other: str, part: str = "") -> str:
        ratios = [t.ratio[0] for t in tables[title] if t.ratio and t.case.other == other and part in t.case.label]
        return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "not measured"

    return [
        "Speed of the variant over that of the other side, medians. Asked for: at least 1 for Shard's decode from 8K",
        "on, at least 3 for CoDA.",
        "",
        f"* Shard's prefill form, decode, over the full cache: {between(GROUPED, 'full', 'rank')};",
        f"  over torch's own attention: {between(GROUPED, 'torch', 'rank')}.",
        f"* Shard's stream, decode, over the full cache: {between(GROUPED, 'full', 'stream')};",
        f"  over torch's own attention: {between(GROUPED, 'torch', 'stream')}.",
        f"* Shard on V4's layers, decode, over the full cache: {between(SHARED, 'full')}.",
        f"* CoDA over the package, a prompt: {between(PACKAGE, 'package', 'prompt')};",
        f"  decode: {between(PACKAGE, 'package', 'after')}.",
    ]


def page(tables: dict[str, list[Timing]], limits: list[Limit], speed: float, command: str) -> str:
    """The whole run as Markdown."""
    head = [
        "---",
        f"command: {command}",
        "ops: blocked",
        "device: cpu, one thread of a machine that other work shared",
        f"torch: {torch.__version__.split('+', maxsplit=1)[0]}",
        "---",
        "",
        "# What a cache variant costs in time",
        "",
        verdict(tables),
        "",
        *found(tables),
        "",
        "Both sides of a row ran in turn; times are processor time, the best and the median of the rounds. The ratio",
        "is other over variant, round by round: above 1 the variant is the faster. Denormals were flushed.",
        "",
    ]
    for title, timings in tables.items():
        head += [*markdown(title, HEADS, [cells(timing) for timing in timings]), MEANING[title], ""]
    absent = [timing for timing in tables.get(PACKAGE, []) if timing.other_ms is None]
    head += [ABSENT, ""] if absent else []
    head += markdown("What the processor allows", LIMIT_HEADS, [limit.row(speed) for limit in limits])
    head += [
        f"A product of two matrices of 1024 x 1024 ran at {speed:.1f} x 10^9 multiplications a second, in fp32.",
        "",
    ]
    return "\n".join(head)


ABSENT = f"The package {coda_pairs.PACKAGE} is not installed: its column is empty."


@torch.no_grad()
def _seconds(text: str) -> float:
    """Argparse type: a number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    p = argparse.ArgumentParser(prog="python -m scripts.bench_variants", description=__doc__)
    p.add_argument(
        "--context", type=positive, nargs="+", help="tokens held; default: 8K to 32K, and 2K and 8K for CoDA"
    )
    p.add_argument("--seconds", type=_seconds, default=SECONDS, help="for a row, within 5 to 30 rounds")
    p.add_argument("--page", type=Path, help="write the tables there as Markdown")
    args = p.parse_args(argv)
    writable(args.page)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    console, tables = Console(), {}
    for title, cases, default in (
        (GROUPED, grouped, CONTEXTS),
        (SHARED, shared, CONTEXTS),
        (PACKAGE, package, CODA_CONTEXTS),
    ):
        tables[title] = [measure(case, args.seconds) for case in cases(args.context or default)]
        console.print(rendered(title, HEADS, [cells(timing) for timing in tables[title]]))
    if any(timing.other_ms is None for timing in tables[PACKAGE]):
        console.print(ABSENT)
    speed, limits = rate(), bounds(tables, args.context)
    console.print(rendered("What the processor allows", LIMIT_HEADS, [limit.row(speed) for limit in limits]))
    if args.page is not None:
        command = shlex.join(["python", "-m", "scripts.bench_variants", *_without_page(args)])
        args.page.write_text(page(tables, limits, speed, command), encoding="utf-8")
    return 0


def bounds(tables: dict[str, list[Timing]], contexts: Sequence[int] | None) -> list[Limit]:
    """What could be reached at most, where the other side was timed."""
    steps = [t for t in tables[GROUPED] if t.case.other == "full" and f"{LLAMA.name}, rank" in t.case.label]
    prompts = [t for t in tables[PACKAGE] if t.other_ms is not None and t.case.label.startswith("prompt")]
    return [
        *(shard_limit(timing, n) for timing, n in zip(steps, contexts or CONTEXTS, strict=True)),
        *(coda_limit(timing, n) for timing, n in zip(prompts, contexts or CODA_CONTEXTS, strict=False)),
    ]


def rendered(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table for the console."""
    out = Table(*heads, title=title)
    for row in rows:
        out.add_row(*row)
    return out


def _without_page(args: argparse.Namespace) -> list[str]:
    """The arguments that decide what was measured."""
    context = [] if args.context is None else ["--context", *map(str, args.context)]
    return context if args.seconds == SECONDS else [*context, "--seconds", f"{args.seconds:g}"]


if __name__ == "__main__":
    sys.exit(run_alone(main))
