"""`python -m scripts.measure_memory_db`: what states of documents hold, loaded, quantised and merged, as a page.

For a checkpoint that `scripts.train_llama` made and the adapters that `scripts.train_coda` trained over it.
"""

import argparse
import sys
from collections.abc import Sequence

from model.choices import DTYPES
from scripts.cli import arguments, run_alone
from scripts.flags import positive
from scripts.paths import AUDITS, Models, Pages, Reads

KV = "all=coda:window=64,exact=16,summary=16,block=64"
LENGTHS = (128, 256, 512, 1024)
PAGE = AUDITS / "memory-db.md"


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.measure_memory_db", description=__doc__)
    p.add_argument("--model", action=Models, required=True, help="checkpoint directory, of scripts.train_llama")
    p.add_argument("--coda-adapters", action=Reads, required=True, metavar="FILE", help="of scripts.train_coda")
    p.add_argument("--kv", default=KV, metavar="all=coda:SETTINGS", help=f"of the bounded cache (default {KV})")
    p.add_argument("--dtype", choices=DTYPES, default="bf16", help="of activations and caches (default bf16)")
    p.add_argument(
        "--lengths", type=positive, nargs="+", default=list(LENGTHS), help="tokens of a document (128 256 512 1024)"
    )
    p.add_argument("--pairs", type=positive, default=12, help="of documents, of each length (default 12)")
    p.add_argument("--seed", type=int, default=0, help="of the first pair; the others follow (default 0)")
    p.add_argument("--page", action=Pages, default=PAGE, help="Markdown to write; the JSON goes beside it")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = arguments(parser(), argv)
    from scripts.tasks.measure_memory_db import run

    return run(args)


if __name__ == "__main__":
    sys.exit(run_alone(main))
