"""The entry point: `rank-tokens` runs on several ranks, every other bench alone."""

import sys

from fathom.scripts.bench import command
from fathom.scripts.cli import run_alone, run_on_ranks

if __name__ == "__main__":
    if sys.argv[1:2] == [command.RANK_TOKENS]:
        sys.exit(run_on_ranks(command.main))
    sys.exit(run_alone(command.main))
