"""`python -m scripts.train_llama`: make a small Llama-family checkpoint of the demo language, and measure it.

It is trained from a seed, written as published checkpoints of the family are, loaded again as every checkpoint is,
and asked for what it was taught: facts, and codes told once in a long document.
"""

import argparse
import sys
from collections.abc import Sequence

from fathom.scripts.cli import arguments, run_alone
from fathom.scripts.flags import positive
from fathom.scripts.paths import Makes

STEPS = 500


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.train_llama", description=__doc__)
    p.add_argument("--out", action=Makes, required=True, help="folder to write; must not exist, or be empty")
    p.add_argument("--seed", type=int, default=0, help="of documents and initial weights (default 0)")
    p.add_argument("--steps", type=positive, default=STEPS, help=f"of 2048 tokens each (default {STEPS})")
    p.add_argument("--documents", type=positive, default=8, help="of each length to ask at the end (default 8)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = arguments(parser(), argv)
    from fathom.scripts.train.llama import run

    return run(args)


if __name__ == "__main__":
    sys.exit(run_alone(main))
