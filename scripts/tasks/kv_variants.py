"""What `scripts.kv_variants` does once its command line is known to be good."""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from model.architectures import Config, config_from_file
from model.config import ModelConfig
from model.errors import CapacityError, ConfigError
from model.llama.config import LlamaConfig
from probes.demo_language.vocabulary import vocabulary_size
from runtime.options import RunOptions
from runtime.output import write_json, write_text
from runtime.report import commit
from scripts.variants import measures, page
from scripts.variants.runs import V4, Run, grouped, held_bytes, runs

SHORTEST = 96  # tokens of a document with codes and questions for them, at least
SPARE = 400  # tokens of questions behind a document, and more
COUNTED = 32768  # tokens for which bytes are counted as well
TOLD = 1024  # tokens of the documents that facts and greedy text follow


def run(args: argparse.Namespace) -> int:
    """Run the command line; returns the exit status."""
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    started = time.perf_counter()
    configs = [_config(path, args) for path in (args.model, args.llama)]
    for path, config, wanted in zip((args.model, args.llama), configs, (ModelConfig, LlamaConfig), strict=True):
        if not isinstance(config, wanted):
            raise ConfigError(f"{path}: not of the architecture that its flag asks for")
    found = []
    for model, config in zip((args.model, args.llama), configs, strict=True):
        found.append(measured(model, config, args))
        if args.json is not None:
            write_json(args.json, found)
    data = {
        "command": args.command_line,
        "commit": str(commit()),
        "chunk": args.chunk,
        "models": found,
        "seconds": time.perf_counter() - started,
    }
    for name, text in page.files(data).items():
        write_text(args.out / name, text)
    print(f"{args.out / 'kv-variants.md'}: written after {data['seconds']:.0f} s", file=sys.stderr)
    return 0


def _config(model: Path, args: argparse.Namespace) -> Config:
    """Read a model's config; ConfigError or CapacityError where it cannot read the documents."""
    config = config_from_file(model / "config.json")
    if config.vocab_size != vocabulary_size():
        raise ConfigError(f"{model}: has {config.vocab_size} tokens, the demo language has {vocabulary_size()}")
    longest = max(*args.lengths, *args.recalled) + SPARE
    if longest > config.max_position_embeddings:
        raise CapacityError(f"{model}: {longest} tokens, the model has {config.max_position_embeddings} positions")
    if (least := args.recalled[0]) < SHORTEST:
        raise ConfigError(f"--recalled {least}: documents with codes have {SHORTEST} tokens at least")
    return config


def measured(model: Path, config: Config, args: argparse.Namespace) -> dict[str, Any]:
    """Measure all variants of one model: JSON values."""
    if isinstance(config, LlamaConfig):
        told, options = "llama", RunOptions("plain", "fp32")
        variants = runs(model, options, grouped(config.num_key_value_heads * config.head_dim), args.adapters)
    else:
        told, options = "deepseek_v4", RunOptions("plain", "fp32")
        variants = runs(model, options, V4, None)
    counted = [n for n in (*args.lengths, COUNTED) if n <= config.max_position_embeddings]

    def say(what: str) -> None:
        print(f"{told}: {what}", file=sys.stderr, flush=True)

    return {
        "model": model.resolve().name,
        "kind": told,
        "layers": config.num_hidden_layers,
        "options": replace(options, kv=()).to_json(),
        "rules": {run.name: list(run.rules) for run in variants},
        "bytes": {run.name: {n: held_bytes(run, config, n, args.chunk) for n in counted} for run in variants},
        "fidelity": _fidelity(variants, args, say),
        "recall": {run.name: _recall(run, args, say) for run in variants},
        "facts": {
            run.name: _said(say, run, "facts", measures.facts(run, TOLD, args.chunk, args.seed)) for run in variants
        },
        "written": _written(variants, args, say),
    }


def _said(say: Any, run: Run, what: str, value: float) -> float:
    say(f"{run.name}: {what} {value:.3f}")
    return value


def _fidelity(variants: list[Run], args: argparse.Namespace, say: Any) -> dict[str, dict[int, Any]]:
    out: dict[str, dict[int, Any]] = {run.name: {} for run in variants}
    for length in args.lengths:
        for run, found in zip(variants, measures.fidelity(variants, length, args.chunk, args.seed), strict=True):
            out[run.name][length] = found._asdict()
            say(f"{length} tokens, {run.name}: KL {found.kl:.2e}, decode x{found.decode.median:.2f}")
    return out


def _recall(run: Run, args: argparse.Namespace, say: Any) -> dict[int, Any]:
    out = {}
    for length in args.recalled:
        found = measures.recall(run, length, args.documents, args.questions, args.chunk, args.seed)
        out[length] = found._asdict()
        say(f"{run.name}: codes at {length} tokens {sum(found.right)} of {len(found.right)}")
    return out


def _written(variants: list[Run], args: argparse.Namespace, say: Any) -> dict[str, list[int]]:
    wanted = measures.written(variants[0], TOLD, args.chunk, args.seed)
    out = {variants[0].name: [measures.WRITTEN] * len(wanted)}
    for run in variants[1:]:
        out[run.name] = measures.agreed(wanted, measures.written(run, TOLD, args.chunk, args.seed))
        say(f"{run.name}: greedy tokens before the first that differs {out[run.name]}")
    return out
