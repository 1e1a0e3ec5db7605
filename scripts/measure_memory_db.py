"""`python -m scripts.measure_memory_db`: what states of documents hold, loaded, quantised and merged, as a page.

For a checkpoint that `scripts.train_llama` made and the adapters that `scripts.train_coda` trained over it.
"""

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from model.errors import ConfigError
from probes.demo_language.vocabulary import vocabulary_size
from runtime.arithmetic import DTYPES
from runtime.llama import LoadedLlama
from runtime.load import load_any
from runtime.merge import mergeable
from runtime.options import RunOptions
from runtime.report import commit
from runtime.statefile import save_state
from scripts.cli import run_alone
from scripts.database.measure import (
    BOUNDED,
    Files,
    Scores,
    documents,
    measure_coded,
    measure_full,
    measure_merged,
    read,
)
from scripts.database.page import Found, headline, page
from scripts.flags import positive
from scripts.paths import writable

KV = "all=coda:window=64,exact=16,summary=16,block=64"
LENGTHS = (128, 256, 512, 1024)
PAGE = Path(__file__).resolve().parents[1] / "audits" / "memory-db.md"


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.measure_memory_db", description=__doc__)
    p.add_argument("--model", type=Path, required=True, help="checkpoint directory, of scripts.train_llama")
    p.add_argument("--coda-adapters", type=Path, required=True, metavar="FILE", help="of scripts.train_coda")
    p.add_argument("--kv", default=KV, metavar="all=coda:SETTINGS", help=f"of the bounded cache (default {KV})")
    p.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="of activations and caches (default bf16)")
    p.add_argument(
        "--lengths", type=positive, nargs="+", default=list(LENGTHS), help="tokens of a document (128 256 512 1024)"
    )
    p.add_argument("--pairs", type=positive, default=12, help="of documents, of each length (default 12)")
    p.add_argument("--seed", type=int, default=0, help="of the first pair; the others follow (default 0)")
    p.add_argument("--page", type=Path, default=PAGE, help="Markdown to write; the JSON goes beside it")
    return p


def measure(length: int, args: argparse.Namespace, models: dict[str, LoadedLlama], console: Console) -> Found:
    """Measure all pairs of one length."""
    bounded = models[BOUNDED]
    window = int(getattr(bounded.model.arithmetic.formats.variant(0), "window", 0))
    found = Found(length, Scores(), Files(), 0, Scores(), {})
    kept = {row: list(counts) for row, counts in found.kept.items()}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seed, args.seed + args.pairs):
            pair = documents(length, seed, 2)
            for row, loaded in models.items():
                if row != BOUNDED:
                    measure_full(found.states, row, loaded, pair[0], window)
            measure_coded(found.states, found.files, bounded, pair[0], Path(folder))
            measure_merged(found.merged, kept, bounded, pair)
            console.print(f"{length} tokens: pair {seed - args.seed + 1} of {args.pairs}", highlight=False)
        whole = models["adapters, full cache"]
        save_state(Path(folder) / "full", read(whole, pair[0].ids, 1), whole, None)
        return found._replace(kept=kept, full_bytes=(Path(folder) / "full").stat().st_size)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args, started = parser().parse_args(argv), time.perf_counter()
    writable(args.page)
    torch.set_num_threads(1)
    console = Console(stderr=True)
    models = _models(args)
    found = [measure(length, args, models, console) for length in args.lengths]
    bounded = models[BOUNDED]
    facts = {
        "checkpoint": args.model.resolve().name,
        "weights": bounded.weights_fingerprint,
        "config": bounded.model.config.fingerprint,
        "kv": args.kv,
        "dtype": args.dtype,
        "pairs": args.pairs,
        "first_seed": args.seed,
        "last_seed": args.seed + args.pairs - 1,
        "commit": str(commit()),
        "command": _command(sys.argv[1:] if argv is None else argv),
        "seconds": time.perf_counter() - started,
    }
    text = page(found, bounded.model.config.num_hidden_layers, facts)
    args.page.write_text(text, encoding="utf-8")
    data = facts | {"lengths": [_json(one) for one in found]}
    args.page.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    console.print(f"{args.page}: {headline(found[-1])}", highlight=False, soft_wrap=True)
    return 0


def _models(args: argparse.Namespace) -> dict[str, LoadedLlama]:
    """The models whose states are asked, by row; the bounded one with adapters is also quantised and merged."""
    adapters, bounded = str(args.coda_adapters), (args.kv,)
    options = {
        "base, full cache": RunOptions("plain", args.dtype),
        "adapters, full cache": RunOptions("plain", args.dtype, coda_adapters=adapters),
        "base, bounded": RunOptions("plain", args.dtype, kv=bounded),
        BOUNDED: RunOptions("plain", args.dtype, kv=bounded, coda_adapters=adapters),
    }
    models: dict[str, LoadedLlama] = {}
    for row, each in options.items():
        loaded = load_any(args.model, each)
        if not isinstance(loaded, LoadedLlama) or loaded.model.config.vocab_size != vocabulary_size():
            raise ConfigError(f"{args.model}: no Llama-family model of the demo language")
        models[row] = loaded
    mergeable(models[BOUNDED], f"--kv {args.kv}")
    return models


def _json(found: Found) -> dict[str, object]:
    return {
        "length": found.length,
        "states": _scores(found.states),
        "bytes": found.files.nbytes | {"full": found.full_bytes},
        "merged": _scores(found.merged),
        "kept": {row: [counts._asdict() for counts in each] for row, each in found.kept.items()},
    }


def _scores(scores: Scores) -> dict[str, dict[str, dict[str, object]]]:
    return {row: {column: score.to_json() for column, score in by.items()} for row, by in scores.items()}


def _command(argv: Sequence[str]) -> str:
    """The command that makes the page again; of an absolute path only the last part is told."""
    told = [Path(word).name if Path(word).is_absolute() else word for word in argv]
    return shlex.join(["python", "-m", "scripts.measure_memory_db", *told])


if __name__ == "__main__":
    sys.exit(run_alone(main))
