"""`python -m scripts.record`: run a token sequence and keep what passes the model's sites, as one recording.

`python -m scripts.compare` judges a recording, of this runtime or of any other; README has the format.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fathom.model.errors import ConfigError, quoted
from fathom.runtime.options import checked_config
from fathom.scripts.cli import arguments, run_on_ranks
from fathom.scripts.flags import (
    add_model,
    add_op_set,
    add_rank_timeout,
    add_run_options,
    add_threads,
    check_layers,
    chunk_lengths,
    numbers,
    positive,
    run_options,
)
from fathom.scripts.paths import Reads, Writes
from fathom.scripts.prompts import read_tokens

if TYPE_CHECKING:
    from fathom.runtime.group.watchdog import Watch


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.record", description=__doc__)
    add_model(p)
    p.add_argument("--tokens", action=Reads, required=True, help="JSON list of token ids")
    p.add_argument("--out", action=Writes, required=True, help="recording to write, a safetensors file")
    p.add_argument("--layers", type=numbers, help="layers between commas, as 0,17 (default: all, and the head)")
    p.add_argument("--sites", help="sites between commas, as attention.output,streams (default: all)")
    p.add_argument(
        "--inject", metavar="FAULT", help="run with this fault in place, to see what it looks like to compare"
    )
    p.add_argument("--decode-from", type=positive, help="prefill this number of tokens, feed the rest one at a time")
    add_run_options(p)
    add_op_set(p)
    add_threads(p)
    add_rank_timeout(p)
    return p


def main(argv: Sequence[str] | None = None, watch: "Watch | None" = None) -> int:
    """Run the command line, as one of several ranks where there is a watch; returns the exit status."""
    args = arguments(parser(), argv, watch)
    options = run_options(args)
    config = checked_config(args.model, options)
    check_layers(args.layers, config.num_hidden_layers)
    ids = read_tokens(args.tokens, config.vocab_size)
    lengths = chunk_lengths(len(ids), options.prefill_chunk, args.decode_from)
    from fathom.scripts.tasks.record import run

    return run(args, ids, lengths, watch)


def check_sites(text: str | None, known: Sequence[str]) -> list[str] | None:
    """Return what --sites names; ConfigError for what is no site."""
    if text is None:
        return None
    for name in text.split(","):
        if name not in known:
            raise ConfigError(f"--sites {quoted(name)}: no site; there are {', '.join(known)}")
    return text.split(",")


if __name__ == "__main__":
    sys.exit(run_on_ranks(main))
