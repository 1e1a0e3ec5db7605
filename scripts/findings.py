"""`python -m scripts.findings`: write audits/FINDINGS.md, published claims beside what this project computed of them.

Nothing is measured: numbers follow from config.json files, from the classes of the caches, from closed formulas and
from draws that take a second, or are read out of the other pages of audits and their JSON. A page that lacks a number
which is asked of it ends the run.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Final

from fathom.scripts.cli import arguments, run_alone
from fathom.scripts.paths import AUDITS, Writes

PAGE: Final = AUDITS / "FINDINGS.md"


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.findings", description=__doc__)
    p.add_argument("--out", action=Writes, default=PAGE, help="file to write (default audits/FINDINGS.md)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = arguments(parser(), argv)
    from fathom.scripts.tasks.findings import run

    return run(args)


if __name__ == "__main__":
    sys.exit(run_alone(main))
