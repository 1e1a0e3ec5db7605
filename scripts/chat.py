"""`python -m scripts.chat`: a conversation over one loaded model. Answers to stdout as they come, the rest to stderr.

Each line of the input is a message, from a terminal or a pipe. A line that begins with / is a command, and /help lists
them; a message that begins with / is typed with one more. Ctrl-C ends an answer and, the second time, at the prompt,
the chat (on several ranks the first one does); so does the end of the input.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from fathom.runtime.errors import PromptError
from fathom.runtime.options import checked_config
from fathom.runtime.text.encoding import check_chat_format, encode_messages
from fathom.runtime.text.messages import user_message
from fathom.runtime.text.tokenizer import Tokenizer
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
    positions,
    positive,
    run_options,
)
from fathom.scripts.prompts import check_prompt_flags, effort

if TYPE_CHECKING:
    from fathom.runtime.group.watchdog import Watch

CONTEXT: Final = 8192  # positions, where the model has so many


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.chat", description=__doc__)
    add_model(p)
    p.add_argument("--system", default="", metavar="TEXT", help="what the conversation opens with")
    add_prompt_format(p)
    add_sampling(p)
    p.add_argument("--max-new-tokens", type=positive, help="of an answer (default: as many as the context holds)")
    p.add_argument(
        "--max-context", type=positions, help=f"positions to hold, as 128K (default {CONTEXT}, or the model's)"
    )
    add_run_options(p)
    add_op_set(p)
    add_graph(p)
    add_draft(p)
    add_variants(p)
    add_threads(p)
    add_rank_timeout(p)
    add_json(p, "turns, tokens and report")
    p.set_defaults(messages=None, tokens=None, load_state=None)  # flags of a prompt that there are none of
    return p


def main(argv: Sequence[str] | None = None, watch: "Watch | None" = None) -> int:
    """Run the command line, as one of several ranks where there is a watch; returns the exit status."""
    args = arguments(parser(), argv, watch)
    check_sampling(args)
    check_prompt_flags(args)
    if args.raw and args.system:
        raise PromptError("--raw: excludes --system, which is a part of the chat format")
    config = checked_config(args.model, run_options(args))
    tokenizer = Tokenizer(args.model, config.vocab_size)
    if not args.raw:  # before the weights: what the format needs should be there
        check_chat_format(config, args.model)
        tokenizer.encode(encode_messages(user_message("?"), thinking=args.think, effort=effort(args.effort)))
    from fathom.scripts.tasks.chat import run

    return run(args, config, tokenizer, watch)


if __name__ == "__main__":
    sys.exit(run_on_ranks(main))
