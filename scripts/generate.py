"""`python -m scripts.generate`: one prompt through a checkpoint. Text to stdout as it comes, the rest to stderr.

With --prompts-file it takes the prompts of a file one after the other, each in a state of its own, and adds a line of
JSON to --out for each, as soon as its answer is there.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fathom.runtime.options import NEW_TOKENS
from fathom.scripts.cli import arguments, run_on_ranks
from fathom.scripts.flags import (
    add_draft,
    add_graph,
    add_json,
    add_model,
    add_op_set,
    add_prompt_format,
    add_rank_timeout,
    add_run_options,
    add_sampling,
    add_threads,
    add_variants,
    check_sampling,
    count,
    positions,
    positive,
    run_options,
)
from fathom.scripts.paths import Reads, Tensors, Writes
from fathom.scripts.prompts import check_logprobs, check_prompts_file, read_prompt, read_prompts

if TYPE_CHECKING:
    from fathom.runtime.group.watchdog import Watch


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
        help="a conversation as JSON: a list of messages, or messages and tools (see scripts/README.md)",
    )
    prompt.add_argument(
        "--prompts-file",
        action=Reads,
        metavar="F.jsonl",
        help='prompts, a line of JSON each: {"prompt": TEXT} or {"messages": [...], "tools": [...]}, both with an "id"'
        " if you like; a string alone is a prompt, a list alone are messages",
    )
    prompt.add_argument(
        "--tokens",
        action=Reads,
        metavar="F.json",
        help="a JSON list of token ids, run as they are: no BOS is added. Of a model without tokenizer.json the answer"
        " is token ids too",
    )
    add_prompt_format(p)
    # Sampling
    p.add_argument(
        "--max-new-tokens", type=positive, default=NEW_TOKENS, help=f"stop after this number (default {NEW_TOKENS})"
    )
    add_sampling(p)
    # Runtime
    p.add_argument("--max-context", type=positions, help="positions to hold, as 128K (default: what this run needs)")
    add_run_options(p)
    add_op_set(p)
    add_graph(p)
    add_draft(p)
    add_variants(p)
    add_threads(p)
    add_rank_timeout(p)
    # Output
    p.add_argument(
        "--logprobs",
        type=count,
        metavar="N",
        help="tell how likely each token was, and the N likeliest: log_softmax of the logits as they are, before"
        " temperature and top-p",
    )
    add_json(p, "text, tokens and report")
    p.add_argument("--out", action=Writes, metavar="F.jsonl", help="with --prompts-file: an answer a line")
    p.add_argument("--resume", action="store_true", help="go on with such a file where a run was broken off")
    p.add_argument("--save-state", action=Writes, help="write the caches there afterwards")
    p.add_argument("--load-state", action=Tensors, help="continue from such a file: its last answer, or with a prompt")
    return p


def main(argv: Sequence[str] | None = None, watch: "Watch | None" = None) -> int:
    """Run the command line, as one of several ranks where there is a watch; returns the exit status."""
    args = arguments(parser(), argv, watch)
    check_sampling(args)
    check_prompts_file(args)
    if args.prompts_file is not None:
        prompts = read_prompts(args, run_options(args))
        from fathom.scripts.tasks.generate_many import run_many

        return run_many(args, prompts, watch)
    prompt = read_prompt(args, run_options(args))  # before torch and the weights: a bad one should not wait for them
    check_logprobs(args.logprobs, prompt.config)
    from fathom.scripts.tasks.generate import run

    return run(args, prompt, watch)


if __name__ == "__main__":
    sys.exit(run_on_ranks(main))
