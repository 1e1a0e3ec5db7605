"""`python -m scripts.long_context`: one prefill of up to a million tokens, measured and questioned on its way.

A document of the demo language is read once. At each mark the walk stops: how fast were the last calls, how long takes
a token, which op takes what, how much memory, and are codes told so far back still found. Progress goes to stderr; the
page and its pictures to --out.
"""

import argparse
import sys
from collections.abc import Sequence

from runtime.options import DEMO
from scripts.cli import arguments, run_alone
from scripts.flags import add_json, add_run_options, lengths, positive
from scripts.paths import Fills, Models, Reads

LENGTHS = tuple(1 << i for i in range(10, 21))


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.long_context", description=__doc__)
    p.add_argument("--model", action=Models, default=DEMO, help="a checkpoint that speaks the demo language")
    p.add_argument(
        "--lengths", type=lengths, default=LENGTHS, metavar="N,N,..", help="marks (default 1024,2048,..,1048576)"
    )
    p.add_argument("--questions", type=positive, default=66, help="at each mark, at most (default 66: all codes)")
    p.add_argument("--seed", type=int, default=0, help="another seed, another document (default 0)")
    p.add_argument("--threads", type=positive, default=1, help="that torch may use (default 1)")
    add_json(p, "what is measured, after every mark,")
    p.add_argument("--saved", action=Reads, help="make the page from what an earlier run wrote with --json")
    p.add_argument(
        "--out",
        action=Fills,
        help="folder of the page, made where there is none (default audits, for the run of all defaults alone)",
    )
    add_run_options(p)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = arguments(parser(), argv)
    from scripts.tasks.long_context import run

    return run(args)


if __name__ == "__main__":
    sys.exit(run_alone(main))
