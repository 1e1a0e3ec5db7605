"""Make the demo checkpoint: train it from a seed, measure it as deployed, write it in DeepSeek's format.

`python -m scripts.train_demo` takes about half an hour of one core with its measurements. The documents and the initial
weights follow from the seed alone; the last bits of the result also depend on the machine's matrix product.
"""

import argparse
import sys
from collections.abc import Sequence

from fathom.scripts.cli import arguments, run_alone
from fathom.scripts.flags import positive
from fathom.scripts.paths import Makes

STEPS = 900


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.train_demo", description=__doc__)
    p.add_argument("--out", action=Makes, required=True, help="folder to write; must not exist, or be empty")
    p.add_argument("--seed", type=int, default=0, help="of documents and initial weights (default 0)")
    p.add_argument("--steps", type=positive, default=STEPS, help=f"of 2048 tokens each (default {STEPS})")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = arguments(parser(), argv)
    from fathom.scripts.train.demo import run

    return run(args)


if __name__ == "__main__":
    sys.exit(run_alone(main))
