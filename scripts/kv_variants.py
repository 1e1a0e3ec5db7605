"""`python -m scripts.kv_variants`: what each way to remember keeps and costs, on the demo and on a small Llama model.

For every variant of the caches and several settings: bytes, divergence from the full cache, codes and facts that are
still known, greedy text, speed in the same run. Progress goes to stderr; the page, its plots and its JSON to --out.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from model.architectures import Config, config_from_file
from model.config import ModelConfig
from model.errors import CapacityError, ConfigError
from model.llama.config import LlamaConfig
from probes.demo_language.vocabulary import vocabulary_size
from runtime.options import DEMO, RunOptions
from runtime.report import commit
from scripts.cli import run_alone
from scripts.flags import lengths, positive
from scripts.paths import writable
from scripts.variants import measures, page
from scripts.variants.runs import V4, Run, grouped, held_bytes, runs

LENGTHS = (2048, 8192)
SHORTEST = 96  # tokens of a document with codes and questions for them, at least
SPARE = 400  # tokens of questions behind a document, and more
COUNTED = 32768  # tokens for which bytes are counted as well
RECALLED = (512, 1024, 2048, 4096)
TOLD = 1024  # tokens of the documents that facts and greedy text follow
PAGES = Path(__file__).resolve().parents[1] / "audits"


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.kv_variants", description=__doc__)
    p.add_argument("--model", type=Path, default=DEMO, help="a V4 checkpoint that speaks the demo language")
    p.add_argument("--llama", type=Path, required=True, help="what `python -m scripts.train_llama` wrote")
    p.add_argument("--adapters", type=Path, help="what `python -m scripts.train_coda` wrote for it")
    p.add_argument(
        "--lengths",
        type=lengths,
        default=LENGTHS,
        metavar="N,N,..",
        help="tokens of the documents read (default 2048,8192)",
    )
    p.add_argument(
        "--recalled",
        type=lengths,
        default=RECALLED,
        metavar="N,N,..",
        help="of documents with codes (default 512,..,4096)",
    )
    p.add_argument("--documents", type=positive, default=4, help="with codes, of each length (default 4)")
    p.add_argument("--questions", type=positive, default=8, help="for codes, behind each of them (default 8)")
    p.add_argument("--chunk", type=positive, default=512, help="tokens of a call (default 512)")
    p.add_argument("--threads", type=positive, default=1, help="that torch may use (default 1)")
    p.add_argument("--seed", type=int, default=0, help="another seed, other documents (default 0)")
    p.add_argument("--json", type=Path, help="write what is measured there, model by model, as it comes")
    p.add_argument("--out", type=Path, default=PAGES, help="folder of the page (default audits)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = parser().parse_args(argv)
    given = list(sys.argv[1:] if argv is None else argv)
    args.out.mkdir(parents=True, exist_ok=True)
    for path in (args.json, args.out / "kv-variants.md"):
        writable(path)
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
            args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    data = {
        "command": page.command(given),
        "commit": str(commit()),
        "chunk": args.chunk,
        "models": found,
        "seconds": time.perf_counter() - started,
    }
    for name, text in page.files(data).items():
        (args.out / name).write_text(text, encoding="utf-8")
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


if __name__ == "__main__":
    sys.exit(run_alone(main))
