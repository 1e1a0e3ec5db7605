"""What `scripts.measure_memory_db` does once its command line is known to be good."""

import argparse
import tempfile
import time
from pathlib import Path

import torch

from model.errors import ConfigError
from model.llama.transformer import LlamaTransformer
from probes.demo_language.vocabulary import vocabulary_size
from runtime.load import LoadedLlama, load_any
from runtime.merge import mergeable
from runtime.options import RunOptions
from runtime.output import write_json, write_text
from runtime.report import commit
from runtime.statefile import save_state
from scripts.console import Console
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
            console.say(f"{length} tokens: pair {seed - args.seed + 1} of {args.pairs}")
        whole = models["adapters, full cache"]
        save_state(Path(folder) / "full", read(whole, pair[0].ids, 1), whole, None)
        return found._replace(kept=kept, full_bytes=(Path(folder) / "full").stat().st_size)


def run(args: argparse.Namespace) -> int:
    """Run the command line; returns the exit status."""
    started = time.perf_counter()
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
        "command": args.command_line,
        "seconds": time.perf_counter() - started,
    }
    text = page(found, bounded.model.config.num_hidden_layers, facts)
    write_text(args.page, text)
    data = facts | {"lengths": [_json(one) for one in found]}
    write_json(args.page.with_suffix(".json"), data)
    console.say(f"{args.page}: {headline(found[-1])}")
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
        if not isinstance(loaded.model, LlamaTransformer) or loaded.model.config.vocab_size != vocabulary_size():
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
