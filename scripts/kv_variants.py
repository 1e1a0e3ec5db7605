"""`python -m scripts.kv_variants`: what each way to remember keeps and costs, on the demo and on a small Llama model.

For every variant of the caches and several settings: bytes, divergence from the full cache, codes and facts that are
still known, greedy text, speed in the same run. Progress goes to stderr; the page, its plots and its JSON to --out.
"""

import argparse
import sys
from collections.abc import Sequence

from runtime.options import DEMO
from scripts.cli import arguments, run_alone
from scripts.flags import add_json, lengths, positive
from scripts.paths import AUDITS, Fills, Models, Reads

LENGTHS = (2048, 8192)
RECALLED = (512, 1024, 2048, 4096)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.kv_variants", description=__doc__)
    p.add_argument("--model", action=Models, default=DEMO, help="a V4 checkpoint that speaks the demo language")
    p.add_argument("--llama", action=Models, required=True, help="what `python -m scripts.train_llama` wrote")
    p.add_argument("--adapters", action=Reads, help="what `python -m scripts.train_coda` wrote for it")
    p.add_argument(
        "--lengths",
        type=lengths,
        default=LENGTHS,
        metavar="N,N,..",
        help="tokens of the documents read (default 2048,8192)",
    )
    p.add_argument(
        "--recalled",
        type=lengths,
        default=RECALLED,
        metavar="N,N,..",
        help="of documents with codes (default 512,..,4096)",
    )
    p.add_argument("--documents", type=positive, default=4, help="with codes, of each length (default 4)")
    p.add_argument("--questions", type=positive, default=8, help="for codes, behind each of them (default 8)")
    p.add_argument("--chunk", type=positive, default=512, help="tokens of a call (default 512)")
    p.add_argument("--threads", type=positive, default=1, help="that torch may use (default 1)")
    p.add_argument("--seed", type=int, default=0, help="another seed, other documents (default 0)")
    add_json(p, "what is measured, model by model, as it comes,")
    p.add_argument("--out", action=Fills, default=AUDITS, help="folder of the page (default audits)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = arguments(parser(), argv)
    from scripts.tasks.kv_variants import run

    return run(args)


if __name__ == "__main__":
    sys.exit(run_alone(main))
