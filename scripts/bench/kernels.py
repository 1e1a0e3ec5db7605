"""`kernels`: op sets, tiles and checks in pairs, on one CPU core; --only picks some.

attend, select, linear, decoding, decode and activations are the measurements behind choices in `kernels`; tripwires and
sites are what being watched costs the demo; threads says from which size of a model on more than one pay.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import torch
from torch import Tensor

from kernels.attention import cpu as attention_cpu
from kernels.formats import cpu as decode_cpu
from kernels.formats import reference as formats_reference
from kernels.formats.stored import Dense, Fp4, Fp8, NvFp4, Weight, rows
from kernels.ops import CPU, REFERENCE
from scripts.bench.checks import idle_sites, tripwires
from scripts.bench.pairs import Pair, Timing, measure
from scripts.bench.record import Record, rendered
from scripts.console import Console

SECONDS = 1.0  # time for a pair, within 15 to 50 rounds

Run = Callable[[], Tensor | None]


def attend() -> Iterator[Pair]:
    """Selected entries: masked dense tiles against gathered rows, by visible entries over top-k."""
    for heads, width, k, lengths in ((16, 128, 256, (1, 16, 128, 512)), (64, 512, 512, (1, 16))):
        for t in lengths:
            for times in (1, 1.5, 2, 4, 10, 20, 40):
                n = int(k * times)
                q, ring = torch.randn(t, heads, width).bfloat16(), torch.randn(128 + t, width).bfloat16()
                entries, sink = torch.randn(n, width).bfloat16(), torch.zeros(heads)
                selected = torch.rand(t, n).argsort(1)[:, :k].sort(1).values.int()

                def call(
                    dense_up_to: float,
                    args: tuple[Tensor, Tensor, int, int, Tensor, int, Tensor, Tensor] = (
                        q, ring, 4 * n, 128, entries, 4, selected, sink,
                    ),
                ) -> Run:  # fmt: skip
                    return lambda: attention_cpu.attend(*args, dense_up_to=dense_up_to)

                label = f"{heads} x {width}, {t} tokens, {times:g} x {k}"
                yield Pair(label, "dense", call(float("inf")), "gather", call(0.0))


def weights(height: int, columns: int) -> dict[str, Weight]:
    """Random weights of each stored form."""
    packed = torch.randint(0, 256, (height, columns // 2), dtype=torch.uint8)
    e4m3 = torch.randn(height, columns).to(torch.float8_e4m3fn)
    return {
        "bf16": Dense(torch.randn(height, columns).bfloat16()),
        "fp8": Fp8(e4m3, torch.ones(height // 128, columns // 128).to(torch.float8_e8m0fnu)),
        "fp4": Fp4(packed.view(torch.int8), torch.ones(height, columns // 32).to(torch.float8_e8m0fnu)),
        "nvfp4": NvFp4(packed, e4m3[:, : columns // 16].contiguous(), torch.tensor(0.5)),
    }


def decode() -> Iterator[Pair]:
    """Decode one tile of weights."""
    for form, weight in weights(512, 1024).items():

        def call(function: Callable[[Weight], Tensor], weight: Weight = weight) -> Run:
            return lambda: function(weight)

        yield Pair(f"{form}, 512 x 1024", "cpu", call(decode_cpu.decode), "reference", call(formats_reference.decode))


def linear() -> Iterator[Pair]:
    """Linears in each stored form."""
    for form, weight in weights(2048, 1024).items():
        for t in (1, 4, 16, 64, 512):
            x = torch.randn(t, 1024).bfloat16()

            def call(function: Callable[[Tensor, Weight], Tensor], x: Tensor = x, weight: Weight = weight) -> Run:
                return lambda: function(x, weight)

            label = f"{form}, 2048 x 1024, {t} tokens"
            yield Pair(label, "cpu", call(CPU.linear), "reference", call(REFERENCE.linear))


def decoding() -> Iterator[Pair]:
    """How much of a linear in tiles is decoding: the ratio is the share."""
    for form, weight in weights(2048, 1024).items():
        for t in (1, 16, 64, 512):
            x = torch.randn(t, 1024).bfloat16()

            def whole(x: Tensor = x, weight: Weight = weight) -> Tensor:
                return CPU.linear(x, weight)

            def part(weight: Weight = weight) -> None:
                for start in range(0, 2048, 512):
                    decode_cpu.decode(rows(weight, start, start + 512))

            yield Pair(f"{form}, 2048 x 1024, {t} tokens", "linear", whole, "its decoding", part)


def select() -> Iterator[Pair]:
    """The indexer's selection."""
    for t, heads, width, n, k in ((1, 16, 64, 4096, 256), (128, 16, 64, 4096, 256), (1, 64, 128, 32768, 512)):
        q, keys, mixed = torch.randn(t, heads, width), torch.randn(n, width), torch.randn(t, heads)

        def call(ops_select: Callable[..., Tensor], args: tuple[object, ...] = (q, mixed, keys, 4 * n, 4, k)) -> Run:
            return lambda: ops_select(*args)

        label = f"{t} tokens, {heads} x {width}, top {k} of {n}"
        yield Pair(label, "cpu", call(CPU.select), "reference", call(REFERENCE.select))


def activations() -> Iterator[Pair]:
    """Ops that are bounded by the chunk in both op sets."""
    for t in (1, 512):
        streams, fn, x = torch.randn(t, 4, 1024).bfloat16(), torch.randn(24, 4096), torch.randn(t, 1024).bfloat16()
        pre, comb, q = torch.rand(t, 4), torch.rand(t, 4, 4), torch.randn(t, 16, 64).bfloat16()
        arguments: dict[str, tuple[object, ...]] = {
            "hyper_weights": (streams, fn, torch.ones(3), torch.zeros(24), 20, 1e-6, 1e-6),
            "collapse": (streams, pre),
            "expand": (x, streams, pre, comb),
            "simulate_fp8": (x, 128),
            "simulate_fp4": (q, 32),
        }
        for name, args in arguments.items():

            def call(ops: object, name: str = name, args: tuple[object, ...] = args) -> Run:
                return lambda: getattr(ops, name)(*args)

            yield Pair(f"{name}, {t} tokens", "cpu", call(CPU), "reference", call(REFERENCE))


def threads() -> Iterator[Pair]:
    """One thread against one for each core: a token's linears by the bytes of their weights, alone and beside a load.

    The matrices are of 4 MiB, and read one after the other, as in a model.
    """
    cores = len(os.sched_getaffinity(0))
    x = torch.randn(1, 1024).bfloat16()
    for beside in ("alone", "beside one busy process"):
        with ExitStack() as stack:
            if beside != "alone":
                busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
                stack.callback(busy.wait)
                stack.callback(busy.kill)
            for mib in (4, 16, 64, 256, 1024):
                matrices = [Dense(torch.randn(2048, 1024).bfloat16()) for _ in range(mib // 4)]

                def call(count: int, matrices: list[Dense] = matrices) -> Run:
                    def run() -> None:
                        torch.set_num_threads(count)
                        for weight in matrices:
                            CPU.linear(x, weight)

                    return run

                yield Pair(f"{mib} MiB, {beside}", "1 thread", call(1), f"{cores} threads", call(cores), wall=True)
    torch.set_num_threads(1)


BENCHES: dict[str, Callable[[], Iterator[Pair]]] = {
    "attend": attend,
    "select": select,
    "linear": linear,
    "decoding": decoding,
    "decode": decode,
    "activations": activations,
    "tripwires": tripwires,
    "sites": idle_sites,
    "threads": threads,
}


def run(args: argparse.Namespace, record: Record, console: Console) -> int:
    """Run the bench; returns the exit status."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    results: dict[str, list[object]] = {}
    for name in args.only or BENCHES:
        timings = [measure(pair, SECONDS, 15, 50) for pair in BENCHES[name]()]
        results[name] = [timing.to_json() for timing in timings]
        heads = ("case", f"{timings[0].pair.first} ms", f"{timings[0].pair.second} ms", "ratio", "from .. to", "rounds")
        console.print(rendered(name, heads, [cells(timing) for timing in timings]))
    record.write(results)
    return 0


def cells(timing: Timing) -> tuple[str, ...]:
    """One row of a table; times are the best of the rounds."""
    assert timing.ratio is not None, "every pair here has two sides"
    middle, low, high = timing.ratio
    first, second = (f"{min(timing.side(side)):.2f}" for side in (0, 1))
    return (timing.pair.label, first, second, f"{middle:.4g}", f"{low:.4g} .. {high:.4g}", str(len(timing.rounds)))
