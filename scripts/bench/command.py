"""The command line of all benches."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from rich.console import Console

import scripts.bench
from runtime.watch import Watch
from scripts.bench import (
    compare_coda,
    compare_transformers,
    decode,
    dispatch,
    gains,
    gpu,
    kernels,
    load,
    performance,
    prefill,
    variants,
)
from scripts.bench.record import Record
from scripts.cli import arguments
from scripts.paths import writable

BENCHES: dict[str, ModuleType] = {
    bench.NAME: bench
    for bench in (
        performance, compare_transformers, prefill, decode, load, kernels, gains, gpu, variants, compare_coda, dispatch,
    )
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.bench", description=scripts.bench.__doc__)
    names = p.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, bench in BENCHES.items():
        told = str(bench.__doc__)
        one = names.add_parser(name, description=told, help=told.splitlines()[0].partition(": ")[2])
        bench.add_flags(one)
        one.add_argument("--json", type=Path, help="write header, settings and every repetition there")
        one.set_defaults(default={action.dest: action.default for action in one._actions})  # noqa: SLF001 -- to tell what was asked for
    return p


def main(argv: Sequence[str] | None = None, watch: Watch | None = None) -> int:
    """Run the command line, as one of several ranks where there is a watch; returns the exit status."""
    args = arguments(parser(), argv, watch)
    record, console = Record(args), Console()
    if args.name == dispatch.NAME:
        return dispatch.run(args, record, console, watch)
    writable(args.json)
    status: int = BENCHES[args.name].run(args, record, console)
    return status
