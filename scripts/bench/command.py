"""The command lines of all benches, as a table; what a bench measures is imported when its own is known to be good."""

import argparse
import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import fathom.scripts.bench
from fathom.model.choices import DTYPES, NUMERICS
from fathom.model.errors import ConfigError
from fathom.scripts.cli import arguments
from fathom.scripts.flags import add_json, add_model, add_rank_timeout, add_run_options, positive
from fathom.scripts.paths import AUDITS, Fills, Keeps, Reads

if TYPE_CHECKING:
    from fathom.runtime.group.watchdog import Watch

RANK_TOKENS: Final = "rank-tokens"  # the one that runs on several ranks
KERNEL_PARTS: Final = (
    "attend", "select", "linear", "gemm", "activations", "tripwires", "sites", "threads",
)  # fmt: skip
GPU_PARTS: Final = (
    "norm", "quantise", "swiglu", "gate", "tripwires", "hyper", "streams", "compress", "linear", "codes", "experts",
    "expert_codes", "indexer", "topk", "attention", "shard", "differential", "banks", "layers", "whole",
)  # fmt: skip
GPU_MODELS: Final = ("V4-Flash", "V4-Pro")


def _seconds(text: str) -> float:
    """Argparse type: a number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return value


Adds = Callable[[argparse.ArgumentParser], object]  # of flags to a command line
COUNTS: Final = {  # flags of whole numbers, by what they count
    "context": "tokens of prompts, or held",
    "ours-only": "contexts for our side alone, once each",
    "tokens": "lengths of calls",
    "steps": "tokens of a repetition",
    "decode": "tokens after each prompt",
    "chunk": "tokens of a call; of transformers, where it is beside",
    "our-chunk": "tokens of a call of ours",
    "repetitions": "of each row",
    "pairs": "runs of each side",
    "rounds": "of each length",
    "replays": "timed, of each case",
    "threads": "that torch may use",
}


def _count(name: str, default: int | Sequence[int]) -> Adds:
    """A flag of `COUNTS`, of one number or of several as its default."""
    told = str(default) if isinstance(default, int) else " ".join(map(str, default)) or "none"
    given = {"default": default} if isinstance(default, int) else {"default": list(default), "nargs": "+"}
    return lambda p: p.add_argument(f"--{name}", type=positive, help=f"{COUNTS[name]} (default {told})", **given)


def _flag(name: str, what: str, **given: Any) -> Adds:
    told = f"{what} (default {given['default']})" if "default" in given else what
    return lambda p: p.add_argument(name, help=told, **given)


def _only(parts: Sequence[str]) -> Adds:
    return _flag("--only", f"of {', '.join(parts)} (default all)", nargs="+", choices=parts, metavar="PART")


class Bench(NamedTuple):
    """One bench; its cases are those of a function of that module of this package, whose docstring its page shows."""

    source: str  # "module.function"
    flags: tuple[Adds, ...]
    page: str  # the name of its page, without its ending
    title: str  # of the page, with settings in braces
    varies: str = ""  # a setting that makes a page of its own where it is not the default
    folder: Path | None = None  # where its page goes without being asked for


SEED: Final = _flag("--seed", "of weights and tokens", type=int, default=0)
SECONDS: Final = _flag("--seconds", "for a row, within 5 to 30 rounds", type=_seconds, default=4.0)
CHECKPOINT: Final = _flag(
    "--checkpoint", "where it is, or is made and kept; any that transformers can read (default: made anew)",
    action=Keeps, metavar="DIR",
)  # fmt: skip
BESIDE: Final = (
    _count("context", (8192, 16384)), _count("pairs", 5), _count("chunk", 512), _count("our-chunk", 2048),
    _count("decode", 16), _count("threads", 1), SEED, CHECKPOINT,
    _flag("--theirs-dtype", "in which transformers computes", choices=DTYPES, default="bf16"),
    _flag("--ours-thp", "huge pages for our side too", action="store_true"),
)  # fmt: skip
READ: Final = (
    add_model, add_run_options, SEED, _count("context", (1024, 4096, 16384)), _count("repetitions", 5),
    _count("threads", 1),
)  # fmt: skip
OF: Final = _flag(
    "--of", "models of whole layers", nargs="+", choices=GPU_MODELS, default=list(GPU_MODELS), metavar="MODEL"
)
WHOLE: Final = _flag("--whole", "layers of the whole model (default: as many as fit)", type=positive, metavar="LAYERS")
PERFORMANCE: Final = (
    _flag(
        "--layers", "two layers of V4-Flash, as `make_checkpoint --layers 2,3` writes them",
        action=Reads, metavar="DIR",
    ),
    _flag("--before", "the commit to compare this folder with", metavar="COMMIT"), CHECKPOINT, SEED,
    _count("threads", (1, 2)), _count("tokens", (64, 512, 4096)), _count("decode", 16), _count("pairs", 5),
    _count("context", (1024, 8192)), _count("our-chunk", 2048),
    _flag("--theirs-dtype", "in which transformers computes", choices=DTYPES, default="fp32"),
)  # fmt: skip
LOAD: Final = (
    add_model,
    _count("repetitions", 5),
    _flag("--numerics", "of ours", choices=NUMERICS, default="deployed"),
    _flag(
        "--copies", "of a V4 checkpoint larger than caches, to time copies of its matrices", action=Reads, metavar="DIR"
    ),
)
RANKS: Final = (
    add_model, add_run_options, add_rank_timeout, _count("tokens", [1 << k for k in range(10)]), _count("rounds", 15),
)  # fmt: skip
TITLE: Final = "How fast, how large, beside transformers in {theirs_dtype}"
BENCHES: Final = {
    "performance": Bench(
        "performance.performance", PERFORMANCE, "performance", "What a CPU takes, and what it could take", "", AUDITS
    ),
    "compare-transformers": Bench(
        "beside.beside", (*BESIDE, _count("ours-only", ())), "beside-transformers", TITLE, "theirs_dtype"
    ),
    "prefill": Bench("alone.prefill", READ, "prefill", "Where the time of a prompt goes"),
    "decode": Bench("alone.decode", (*READ, _count("steps", 16)), "decode", "Where the time of a token goes"),
    "load": Bench("alone.load", LOAD, "loading", "How long a checkpoint takes to load", "", AUDITS),
    "kernels": Bench("ops.kernels", (_only(KERNEL_PARTS),), "kernels", "What the CPU's kernels choose between"),
    "gpu": Bench(
        "gpu.gpu", (_only(GPU_PARTS), _count("replays", 20), OF, WHOLE), "gpu-kernels", "The kernels on a GPU"
    ),
    "variants": Bench(
        "caches.variants", (_count("context", (8192, 16384, 32768)), SECONDS), "kv-speed",
        "What a cache variant costs in time",
    ),
    "compare-coda": Bench(
        "caches.compare_coda", (_count("context", (2048, 8192)), SECONDS), "coda-speed",
        "A layer of CoDA-GQA-L beside its package",
    ),
    RANK_TOKENS: Bench("alone.rank_tokens", RANKS, "rank-tokens", "All tokens on every rank, or only its own?"),
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.bench", description=fathom.scripts.bench.__doc__)
    p.add_argument("--list", action="store_true", help="say what each measures, and end")
    names = p.add_subparsers(dest="name", metavar="NAME")
    for name, bench in BENCHES.items():
        one = names.add_parser(name, description=_doc(bench), help=_doc(bench).splitlines()[0])
        for add in bench.flags:
            add(one)
        add_json(one, "header, settings and every round")
        told = f"folder for its page {bench.page}.md, pictures and JSON (default {bench.folder and bench.folder.name})"
        one.add_argument("--out", action=Fills, default=bench.folder, help=told)
        one.add_argument("--saved", action=Reads, metavar="FILE", help="measure nothing: the page of this JSON")
    return p


def _doc(bench: Bench) -> str:
    """What a bench says of itself, read without importing it."""
    module, name = bench.source.split(".")
    source = Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return str(ast.get_docstring(next(function for function in functions if function.name == name)))


def main(argv: Sequence[str] | None = None, watch: "Watch | None" = None) -> int:
    """Run the command line, as one of several ranks where there is a watch; returns the exit status."""
    args = arguments(parser(), argv, watch)
    if args.list:
        print(*(f"{name:22}{_doc(bench).splitlines()[0]}" for name, bench in BENCHES.items()), sep="\n")
        return 0
    if args.name is None:
        raise ConfigError("want the NAME of a bench, or --list")
    if args.name == RANK_TOKENS and watch is None and args.saved is None:
        raise ConfigError("one rank alone has all tokens: start several, with torchrun")
    if args.name == "gpu" and importlib.util.find_spec("triton") is None:
        raise ConfigError("triton is not installed, and these kernels are written in it: it has builds for Linux alone")
    from fathom.scripts.bench import record

    bench, kept = BENCHES[args.name], record.Record(args)
    if args.saved is not None:
        return _finish(args, bench, record.saved(args.saved, args.name))
    module, function = bench.source.split(".")
    source = importlib.import_module(f"fathom.scripts.bench.{module}")
    cases, tables = getattr(source, function), getattr(source, f"{function}_tables", None)
    if watch is None or args.name != RANK_TOKENS:
        return _finish(
            args, bench, _measured(kept, cases(args), partial(tables, args) if tables is not None else _none)
        )
    from fathom.runtime.group.processes import connected

    with connected(watch, args.device, args.rank_timeout) as group:
        document = _measured(kept, cases(args, watch, group), _none)
        return _finish(args, bench, document) if group.rank == 0 else 0


def _none(rows: Sequence[Any]) -> list[Any]:
    """No tables but those of the rows."""
    del rows
    return []


def _measured(record: Any, cases: Iterable[Any], tables: Callable[[list[Any]], list[Any]]) -> dict[str, Any]:
    from fathom.scripts.bench import turns

    rows: list[Any] = []
    for case in cases:
        rows.append(turns.run(case))
        record.write(record.document(rows, [], complete=False))
    document: dict[str, Any] = record.document(rows, tables(rows))
    record.write(document)
    return document


def _finish(args: argparse.Namespace, bench: Bench, document: dict[str, Any]) -> int:
    """Show and write what was found; returns the exit status: 1 where sides did not compute the same."""
    from fathom.scripts.bench import page, turns

    page.show(document)
    if args.out is not None:
        settings = document["settings"]
        made = page.page(page_name(bench, settings), bench.title.format(**settings), _doc(bench), document)
        args.out.mkdir(parents=True, exist_ok=True)
        page.write(made, args.out)
        print(f"wrote {args.out / made.name}.md", file=sys.stderr)
    return int(any(turns.differs(row) for row in document["rows"]))


def page_name(bench: Bench, settings: dict[str, Any]) -> str:
    """The name of the page's files, without their endings."""
    value = settings.get(bench.varies)
    usual = {"theirs_dtype": "bf16", "numerics": "plain"}.get(bench.varies)
    return bench.page if value == usual else f"{bench.page}-{value}"
