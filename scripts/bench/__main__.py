"""The entry point: `dispatch` runs on several ranks, every other bench alone."""

import sys

from scripts.bench import command, dispatch
from scripts.cli import run_alone, run_on_ranks

if __name__ == "__main__":
    if sys.argv[1:2] == [dispatch.NAME]:
        sys.exit(run_on_ranks(command.main))
    sys.exit(run_alone(command.main))
