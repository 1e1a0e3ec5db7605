"""`python -m scripts.false_alarms`: judge healthy runs of random models, and write audits/false-alarms.md.

How often the checks call a healthy row wrong, in every numerics and dtype, and how small an error is that they still
see. Exit status 1 when a healthy row was called wrong.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Final

from fathom.scripts.cli import arguments, run_alone
from fathom.scripts.flags import positive
from fathom.scripts.paths import AUDITS, Pages

PAGE: Final = AUDITS / "false-alarms.md"
ROWS: Final = 10_000_000


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.false_alarms", description=__doc__)
    p.add_argument("--out", action=Pages, default=PAGE, help="page to write, F.md; its JSON goes beside it")
    p.add_argument("--count", type=positive, default=ROWS, help=f"healthy rows to judge, about (default {ROWS:,})")
    p.add_argument("--jobs", type=positive, default=1, help="processes at a time (default 1)")
    p.add_argument("--seed", type=int, default=0, help="of the first model (default 0)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = arguments(parser(), argv)
    from fathom.scripts.tasks.false_alarms import run

    return run(args)


if __name__ == "__main__":
    sys.exit(run_alone(main))
