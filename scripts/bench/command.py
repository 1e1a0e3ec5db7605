"""The command lines of all benches; the one that is named is imported when its own is known to be good."""

import argparse
import ast
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import scripts.bench
from model.choices import DTYPES, NUMERICS
from scripts.cli import arguments
from scripts.flags import add_json, add_model, add_rank_timeout, add_run_options, positive
from scripts.paths import AUDITS, Fills, Keeps, Reads, Writes

if TYPE_CHECKING:
    from runtime.group.watchdog import Watch

DISPATCH: Final = "dispatch"  # the one that runs on several ranks
KERNEL_PARTS: Final = (
    "attend",
    "select",
    "linear",
    "decoding",
    "decode",
    "activations",
    "tripwires",
    "sites",
    "threads",
)
GPU_PARTS: Final = (
    "norm", "quantise", "swiglu", "hyper", "streams", "compress", "linear", "experts", "indexer", "topk",
    "attention", "shard", "differential", "banks", "layers",
)  # fmt: skip
READ: Final = (1024, 4096, 16384)  # contexts of our side alone
COMPARED: Final = (8192, 16384)
OURS_ONLY: Final = (32768, 131072)  # where transformers would take hours
HELD: Final = {"variants": (8192, 16384, 32768), "compare-coda": (2048, 8192)}
CALLS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def _seconds(text: str) -> float:
    """Argparse type: a number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return value


def _counts(p: argparse.ArgumentParser, flag: str, default: Sequence[int], what: str) -> None:
    """Add a flag of whole numbers, whose default its help says."""
    told = " ".join(map(str, default)) or "none"
    p.add_argument(flag, type=positive, nargs="+", default=list(default), help=f"{what} (default {told})")


def _count(p: argparse.ArgumentParser, flag: str, default: int, what: str) -> None:
    p.add_argument(flag, type=positive, default=default, help=f"{what} (default {default})")


def _read(p: argparse.ArgumentParser) -> None:
    add_model(p)
    _counts(p, "--context", READ, "tokens")
    _count(p, "--repetitions", 5, "of each context")
    _count(p, "--threads", 1, "that torch may use")
    p.add_argument("--seed", type=int, default=0, help="of the tokens (default 0)")
    add_run_options(p)


def _decode(p: argparse.ArgumentParser) -> None:
    _read(p)
    _count(p, "--steps", 16, "tokens of a repetition")


def _load(p: argparse.ArgumentParser) -> None:
    add_model(p)
    _count(p, "--repetitions", 5, "of each way")
    p.add_argument("--numerics", choices=NUMERICS, default="deployed", help="of ours (default deployed)")


def _kernels(p: argparse.ArgumentParser) -> None:
    told = f"of {', '.join(KERNEL_PARTS)} (default all)"
    p.add_argument("--only", nargs="+", choices=KERNEL_PARTS, metavar="PART", help=told)


def _gpu(p: argparse.ArgumentParser) -> None:
    told = f"of {', '.join(GPU_PARTS)} (default all)"
    p.add_argument("--only", nargs="+", choices=GPU_PARTS, metavar="PART", help=told)
    _count(p, "--replays", 20, "timed, of each case")
    p.add_argument("--out", action=Fills, default=AUDITS, help="folder of the page and its JSON (default audits)")


def _gains(p: argparse.ArgumentParser) -> None:
    p.add_argument("--before", required=True, metavar="COMMIT", help="the commit to compare this folder with")
    _count(p, "--context", 4096, "tokens of the prompt")
    _count(p, "--decode", 16, "tokens after it")
    _count(p, "--chunk", 512, "tokens of a call")
    _count(p, "--pairs", 5, "profiles of each")
    _count(p, "--threads", 1, "of each run")
    p.add_argument("--numerics", choices=NUMERICS, default="plain", help="(default plain)")
    p.add_argument("--seed", type=int, default=0, help="of weights and tokens (default 0)")
    p.add_argument(
        "--checkpoint", action=Keeps, metavar="DIR", help="as of compare-transformers (default: its own, made anew)"
    )
    p.add_argument("--page", action=Writes, help="write the tables there as Markdown")


def _compare_transformers(p: argparse.ArgumentParser, ours_only: Sequence[int] = ()) -> None:
    _counts(p, "--context", COMPARED, "tokens of the prompts")
    _count(p, "--pairs", 5, "runs of each side and context")
    _counts(p, "--ours-only", ours_only, "contexts for our side alone, once each")
    _count(p, "--chunk", 512, "tokens of a call of transformers")
    _count(p, "--our-chunk", 2048, "tokens of a call of ours")
    _count(p, "--decode", 16, "tokens after each prompt")
    _count(p, "--threads", 1, "of each run")
    p.add_argument("--theirs-dtype", choices=DTYPES, default="bf16", help="in which transformers computes")
    p.add_argument("--ours-thp", action="store_true", help="huge pages for our side too")
    p.add_argument("--seed", type=int, default=0, help="of the weights and the tokens (default 0)")
    told = "where the checkpoint is, or is made and kept; any that transformers can read (default: made anew)"
    p.add_argument("--checkpoint", action=Keeps, metavar="DIR", help=told)


def _performance(p: argparse.ArgumentParser) -> None:
    _compare_transformers(p, OURS_ONLY)
    p.add_argument("--out", action=Fills, default=AUDITS, help="folder of page, plots and JSON (default audits)")
    p.add_argument("--saved", action=Reads, nargs="+", metavar="FILE", help="measure nothing: the page of this JSON")


def _held(p: argparse.ArgumentParser) -> None:
    _counts(p, "--context", HELD[p.prog.split()[-1]], "tokens held")
    p.add_argument("--seconds", type=_seconds, default=4.0, help="for a row, within 5 to 30 rounds (default 4)")
    p.add_argument("--page", action=Writes, help="write the tables there as Markdown")


def _dispatch(p: argparse.ArgumentParser) -> None:
    add_model(p)
    _counts(p, "--tokens", CALLS, "lengths of calls")
    _count(p, "--rounds", 15, "of each length")
    add_run_options(p)
    add_rank_timeout(p)


BENCHES: Final[dict[str, Callable[[argparse.ArgumentParser], None]]] = {
    "performance": _performance,
    "compare-transformers": _compare_transformers,
    "prefill": _read,
    "decode": _decode,
    "load": _load,
    "kernels": _kernels,
    "gains": _gains,
    "gpu": _gpu,
    "variants": _held,
    "compare-coda": _held,
    DISPATCH: _dispatch,
}


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.bench", description=scripts.bench.__doc__)
    names = p.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, add_flags in BENCHES.items():
        told = _doc(name)
        one = names.add_parser(name, description=told, help=told.splitlines()[0].partition(": ")[2])
        add_flags(one)
        add_json(one, "header, settings and every repetition")
    return p


def _module(name: str) -> str:
    return name.replace("-", "_")


def _doc(name: str) -> str:
    """What a bench says of itself, read without importing it."""
    source = Path(__file__).with_name(f"{_module(name)}.py").read_text(encoding="utf-8")
    return str(ast.get_docstring(ast.parse(source)))


def main(argv: Sequence[str] | None = None, watch: "Watch | None" = None) -> int:
    """Run the command line, as one of several ranks where there is a watch; returns the exit status."""
    args = arguments(parser(), argv, watch)
    from scripts.bench.record import Record
    from scripts.console import Console

    bench, record, console = importlib.import_module(f"scripts.bench.{_module(args.name)}"), Record(args), Console()
    status: int = bench.run(args, record, console, watch) if args.name == DISPATCH else bench.run(args, record, console)
    return status
