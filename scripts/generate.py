"""`python -m scripts.generate`: one prompt through a checkpoint. Text to stdout as it comes, the rest to stderr."""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from model.errors import ConfigError
from runtime.text.encoding import EFFORTS
from scripts.cli import arguments, run_on_ranks
from scripts.flags import (
    add_graph,
    add_json,
    add_model,
    add_op_set,
    add_rank_timeout,
    add_run_options,
    add_threads,
    add_variants,
    positive,
    run_options,
    seed,
)
from scripts.paths import Reads, Writes
from scripts.prompts import read_prompt

if TYPE_CHECKING:
    from runtime.group.watchdog import Watch


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.generate", description=__doc__)
    add_model(p)
    # Prompt
    prompt = p.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", help="a question, or with --raw any text")
    prompt.add_argument("--prompt-file", action=Reads, help="the same from a UTF-8 file")
    prompt.add_argument(
        "--messages",
        action=Reads,
        help="a conversation as JSON: a list of messages, or messages and tools (see the README)",
    )
    p.add_argument("--raw", action="store_true", help="no chat format: BOS, then the prompt as it is")
    p.add_argument("--think", action="store_true", help="let the model reason before it answers")
    p.add_argument(
        "--effort",
        metavar="REVISION:LEVEL",
        help="reasoning effort with --think; " + ", ".join(f"{r}:{'|'.join(levels)}" for r, levels in EFFORTS.items()),
    )
    # Sampling
    p.add_argument("--max-new-tokens", type=positive, default=128, help="stop after so many (default 128)")
    p.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    p.add_argument("--top-p", type=float, default=1.0, help="nucleus mass in (0, 1] (default 1)")
    p.add_argument("--seed", type=int, default=0, help="of the sampling generator (default 0)")
    # Runtime
    p.add_argument("--max-context", type=positive, help="positions to hold (default: what this run needs)")
    add_run_options(p)
    add_op_set(p)
    add_graph(p)
    add_variants(p)
    add_threads(p)
    add_rank_timeout(p)
    # Output
    add_json(p, "text, tokens and report")
    p.add_argument("--save-state", action=Writes, help="write the caches there afterwards")
    p.add_argument("--load-state", action=Reads, help="continue from such a file: its last answer, or a --prompt")
    return p


def main(argv: Sequence[str] | None = None, watch: "Watch | None" = None) -> int:
    """Run the command line, as one of several ranks where there is a watch; returns the exit status."""
    args = arguments(parser(), argv, watch)
    _check_sampling(args)
    prompt = read_prompt(args, run_options(args))  # before torch and the weights: a bad one should not wait for them
    from scripts.tasks.generate import run

    return run(args, prompt, watch)


def _check_sampling(args: argparse.Namespace) -> None:
    if not 0 <= args.temperature < float("inf"):
        raise ConfigError(f"--temperature {args.temperature}: want a number >= 0")
    if not 0 < args.top_p <= 1:
        raise ConfigError(f"--top-p {args.top_p}: want a number in (0, 1]")
    seed(args)


if __name__ == "__main__":
    sys.exit(run_on_ranks(main))
