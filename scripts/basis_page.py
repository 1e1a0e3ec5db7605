"""`python -m scripts.basis_page`: where a basis beats the rotation at equal bytes, in the demo: audits/kv-basis.md."""

import argparse
import sys
from collections.abc import Sequence
from typing import Final

from scripts.cli import arguments, run_alone
from scripts.flags import positive
from scripts.paths import AUDITS, Writes

PAGE: Final = AUDITS / "kv-basis.md"


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.basis_page", description=__doc__)
    p.add_argument("--tokens", type=positive, default=32768, help="of the demo's documents (default 32768)")
    p.add_argument("--page", action=Writes, default=PAGE, help="file to write (default audits/kv-basis.md)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = arguments(parser(), argv)
    from scripts.tasks.basis_page import run

    return run(args)


if __name__ == "__main__":
    sys.exit(run_alone(main))
