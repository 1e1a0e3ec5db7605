"""`python -m scripts.train_draft {mtp,dspark}`: train a drafting head over the demo, and write both as one checkpoint.

The main model is run as deployed and stays as it is, byte for byte: only the head learns, to draft what the main model
would say. Its tensors are written in DeepSeek's names and formats, in a shard of their own. At the end it is told how
many drafts are right, at each place behind a token, on documents that were not trained on.
"""

import argparse
import sys
from collections.abc import Sequence

from fathom.model.choices import DSPARK, MTP
from fathom.scripts.cli import arguments, run_alone
from fathom.scripts.flags import add_model, positive
from fathom.scripts.paths import Makes

STEPS = {MTP: 450, DSPARK: 400}


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.train_draft", description=__doc__)
    p.add_argument("head", choices=STEPS, help="preview MTP, of one stage, or DSpark, of three")
    add_model(p)
    p.add_argument("--out", action=Makes, required=True, help="folder to write; must not exist, or be empty")
    p.add_argument("--seed", type=int, default=0, help="of documents and initial weights (default 0)")
    steps = ", ".join(f"{count} for {head}" for head, count in STEPS.items())
    p.add_argument("--steps", type=positive, help=f"of 1024 tokens each (default {steps})")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = arguments(parser(), argv)
    args.steps = args.steps or STEPS[args.head]
    from fathom.scripts.train.draft import run

    return run(args)


if __name__ == "__main__":
    sys.exit(run_alone(main))
