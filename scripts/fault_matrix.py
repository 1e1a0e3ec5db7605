"""`python -m scripts.fault_matrix`: run every probe on every fault, and write audits/faults.md.

Exit status 1 when a fault is caught by nothing, or a probe fires on a healthy run.
"""

import argparse
import sys
from collections.abc import Sequence

from fathom.scripts.cli import arguments, run_alone
from fathom.scripts.flags import add_model, add_run_options, positive
from fathom.scripts.paths import AUDITS, Pages

PAGE = AUDITS / "faults.md"


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.fault_matrix", description=__doc__)
    add_model(p)
    p.add_argument("--out", action=Pages, default=PAGE, help="page to write, F.md; its picture and JSON go beside it")
    p.add_argument(
        "--again",
        nargs="+",
        metavar="FAULT",
        help="run these faults and the healthy run alone, and probes that the page has no column of; it keeps the other"
        " cells, and says so",
    )
    p.add_argument("--jobs", type=positive, default=1, help="processes that run probes at a time (default 1)")
    add_run_options(p)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = arguments(parser(), argv)
    from fathom.scripts.tasks.fault_matrix import run

    return run(args)


if __name__ == "__main__":
    sys.exit(run_alone(main))
