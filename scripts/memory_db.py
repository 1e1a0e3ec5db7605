"""`python -m scripts.memory_db`: documents read once and asked again and again, in any process: states as a database.

`ingest` reads a document and saves what is left of it, `ask` puts questions to such a state and never changes it,
`quantise` writes it in 8 or 4 bits, `merge` makes one state of two. Any way to remember will do for the first two; with
`--kv all=coda` a state has one size, however long the document. Answers go to stdout, the rest to stderr.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from fathom.model.choices import CODED_BITS
from fathom.runtime.options import RunOptions
from fathom.scripts.cli import arguments, run_alone
from fathom.scripts.flags import add_json, add_model, add_run_options, add_threads, add_variants, positive
from fathom.scripts.paths import Tensors, Texts, Writes


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.memory_db", description=__doc__)
    commands = p.add_subparsers(dest="command", required=True, metavar="COMMAND")
    one = _command(commands, "ingest", "read a document and save the state that it leaves")
    add_model(one)
    text = one.add_mutually_exclusive_group(required=True)
    text.add_argument("--document", action=Texts, dest="prompt_file", metavar="FILE", help="UTF-8 text, taken as it is")
    text.add_argument("--text", dest="prompt", help="the same on the command line")
    add_run_options(one)
    add_variants(one)
    one.set_defaults(
        raw=True, messages=None, tokens=None, load_state=None, think=False, effort=None
    )  # of `read_prompt`
    two = _command(commands, "ask", "continue a state with a question, as if the document had not ended")
    two.add_argument(
        "--state", action=Tensors, required=True, help="from ingest, quantise, merge or generate --save-state"
    )
    two.add_argument(
        "--question",
        action="append",
        required=True,
        metavar="TEXT",
        help="what comes after the document, as it is: a space or line end at its start is the user's matter; may come"
        " several times, each time after the document alone",
    )
    two.add_argument("--max-new-tokens", type=positive, default=32, help="stop after this number (default 32)")
    three = _command(commands, "quantise", "code the bounded caches of a state in 8 or 4 bits")
    three.add_argument("state", action=Tensors, metavar="STATE", help="with coda layers of a Llama-family model")
    three.add_argument("--bits", type=int, choices=CODED_BITS, required=True, help="of a number of a key or value")
    four = _command(commands, "merge", "put one bounded state behind another; what does not fit is lost")
    four.add_argument("states", action=Tensors, nargs=2, metavar="STATE", help="exact states of one model and settings")
    for each in (two, four):
        _add_saved_run(each)
    two.add_argument(
        "--basis", action=Tensors, metavar="FILE", help="that the state was made with, as in shard:basis=FILE"
    )
    for each in (one, two, four):
        add_threads(each)
    for each in (one, three, four):
        each.add_argument("--out", action=Writes, required=True, metavar="STATE", help="the state's file to write")
    for each in (one, two, three, four):
        add_json(each, "the report")
    return p


def _command(commands: Any, name: str, says: str) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = commands.add_parser(name, help=says, description=f"{says[0].upper()}{says[1:]}.")
    return made


def _add_saved_run(p: argparse.ArgumentParser) -> None:
    """Add what a run over a saved state must be told; the rest of its options are those of the state."""
    default = RunOptions()
    add_model(p)
    p.add_argument(
        "--coda-adapters", type=str, action=Tensors, metavar="FILE", help="those that the state was made with"
    )
    p.add_argument("--device", choices=("cpu", "cuda"), default=default.device, help="where to run (default cpu)")
    p.add_argument(
        "--prefill-chunk", type=positive, default=default.prefill_chunk, help="tokens per call (default 512)"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = arguments(parser(), argv)
    from fathom.scripts.tasks.memory_db import run

    return run(args)


if __name__ == "__main__":
    sys.exit(run_alone(main))
