"""`python -m scripts.measure_demo`: what the demo checkpoint knows, and which parts of the model it needs for it.

Every number is taken with the runtime itself, from the shipped file, so after quantisation. Answers are teacher forced:
an answer counts when the token of highest logit at its position is the right one.
"""

import argparse
import sys
from collections.abc import Sequence

from model.errors import ConfigError
from probes.demo_language.language import NEEDLE_TOKENS
from probes.demo_language.words import NAMES
from scripts.cli import arguments, run_alone
from scripts.demo_document import SHORTEST
from scripts.flags import add_model, add_run_options, positive
from scripts.paths import AUDITS, Pages

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
PAGE = AUDITS / "demo-checkpoint.md"
FRAME = 2  # tokens around what is told and asked


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.measure_demo", description=__doc__)
    add_model(p)
    p.add_argument("--lengths", type=positive, nargs="+", default=list(LENGTHS), help="document lengths in tokens")
    p.add_argument("--documents", type=positive, default=8, help="documents of up to 1024 tokens; fewer of longer ones")
    p.add_argument("--questions", type=positive, default=16, help="needles asked for in each document")
    p.add_argument("--out", action=Pages, default=PAGE, help="Markdown page to write; the JSON goes beside it")
    add_run_options(p)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = arguments(parser(), argv)
    check_lengths(args.lengths, args.questions)
    from scripts.tasks.measure_demo import run

    return run(args)


def check_lengths(lengths: Sequence[int], questions: int) -> None:
    """Refuse documents that what is told and asked does not fit into: ConfigError."""
    if questions > len(NAMES):
        raise ConfigError(f"--questions {questions}: the language has {len(NAMES)} names to ask for")
    if (length := min(lengths)) < (least := max(SHORTEST["common"], 2 * NEEDLE_TOKENS * questions + FRAME)):
        raise ConfigError(f"--lengths {length}: for --questions {questions} a document has at least {least} tokens")


if __name__ == "__main__":
    sys.exit(run_alone(main))
