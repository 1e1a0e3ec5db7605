"""`python -m scripts.logits`: the logits of every position of a token sequence, as one float32 tensor."""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fathom.runtime.options import checked_config
from fathom.scripts.cli import arguments, run_on_ranks
from fathom.scripts.flags import (
    add_model,
    add_op_set,
    add_rank_timeout,
    add_run_options,
    add_threads,
    add_variants,
    chunk_lengths,
    positive,
    run_options,
)
from fathom.scripts.paths import Reads, Writes
from fathom.scripts.prompts import read_tokens

if TYPE_CHECKING:
    from fathom.runtime.group.watchdog import Watch


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.logits", description=__doc__)
    add_model(p)
    p.add_argument("--tokens", action=Reads, required=True, help="JSON list of token ids")
    p.add_argument("--out", action=Writes, required=True, help="safetensors file: logits [tokens, vocab] float32")
    p.add_argument("--decode-from", type=positive, help="prefill this number of tokens, feed the rest one at a time")
    add_run_options(p)
    add_op_set(p)
    add_variants(p)
    add_threads(p)
    add_rank_timeout(p)
    return p


def main(argv: Sequence[str] | None = None, watch: "Watch | None" = None) -> int:
    """Run the command line, as one of several ranks where there is a watch; returns the exit status."""
    args = arguments(parser(), argv, watch)
    options = run_options(args)
    ids = read_tokens(args.tokens, checked_config(args.model, options).vocab_size)
    lengths = chunk_lengths(len(ids), options.prefill_chunk, args.decode_from)
    from fathom.scripts.tasks.logits import run

    return run(args, ids, lengths, watch)


if __name__ == "__main__":
    sys.exit(run_on_ranks(main))
