"""`python -m scripts.probe NAME ... | all`: measure what a V4 runtime gets wrong without an error; write a page.

Results go to stdout, progress to stderr. Exit status: 0 all passed; 1 a probe failed, was vacuous or broke down; 2 bad
arguments, or a checkpoint that cannot be loaded.
A plain run of the demo checkpoint writes the pages in audits/ again; any other writes pages where --out says.
"""

import argparse
import sys
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from fathom.model.errors import ConfigError, quoted
from fathom.scripts.cli import arguments, run_on_ranks
from fathom.scripts.flags import add_model, add_op_set, add_rank_timeout, add_run_options, positive, seed
from fathom.scripts.paths import Fills, Texts

if TYPE_CHECKING:
    from fathom.runtime.group.watchdog import Watch


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.probe", description=__doc__)
    p.add_argument("names", nargs="*", metavar="NAME", help="probes to run, or all")
    p.add_argument("--list", action="store_true", help="name the probes and the faults, and run nothing")
    add_model(p)
    p.add_argument("--out", action=Fills, help="folder for pages, made where it is not there")
    p.add_argument("--inject", metavar="FAULT", help="run with this fault in place")
    p.add_argument("--seed", type=int, default=0, help="of prompts and of what is drawn (default 0)")
    p.add_argument("--prompt-file", action=Texts, help="a UTF-8 text to run instead of made-up documents")
    p.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KNOB=VALUE",
        help="a knob of the one probe that is named, as in --set lengths=1024,4096; may come several times",
    )
    p.add_argument("--quick", action="store_true", help="each probe with its smallest settings, a second or so")
    p.add_argument(
        "--threads",
        type=positive,
        default=1,
        help="of torch (default 1: small tensors are slower with more, much slower on a busy machine)",
    )
    add_run_options(p)
    add_op_set(p)
    add_rank_timeout(p)
    return p


def main(argv: Sequence[str] | None = None, watch: "Watch | None" = None) -> int:
    """Run the command line, as one of several ranks where there is a watch; returns the exit status."""
    args = arguments(parser(), argv, watch)
    if args.list and args.names:
        raise ConfigError("--list: takes no names, it runs nothing")
    if not (args.list or args.names):
        raise ConfigError("which probe? Name some, or all; --list names them")
    if args.set and len(args.names) != 1:
        raise ConfigError(f"--set {args.set[0]}: name the one probe whose knob it is")
    seed(args)
    from fathom.scripts.tasks.probe import run

    return run(args, watch)


def check_name(what: str, name: str, known: Collection[str]) -> None:
    """Refuse a name that is not known: ConfigError with one that is nearly the same."""
    if name not in known:
        close = get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else "--list names them"
        raise ConfigError(f"no {what} {quoted(name)}; {hint}")


if __name__ == "__main__":
    sys.exit(run_on_ranks(main))
