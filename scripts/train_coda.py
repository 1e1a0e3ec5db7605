"""`python -m scripts.train_coda MODEL --out DIR --text FILE`: train CoDA adapters over a Llama-family checkpoint.

Two phases, as in the CoDA-GQA-L article: differential attention over everything, then over the bounded cache, with
gradients through its banks. Defaults are the published recipe, and every constant is a flag. Without --text the
documents are those of the demo language, for a checkpoint that scripts.train_llama made, by a recipe of its own. The
adapters are written in the published layout, those of phase 1 as soon as it has ended, beside a page of what was
measured on documents that were held out: the base, the cold swap, and each phase, unbounded and bounded. The same flags
on the same CPU give the same numbers, bit for bit.
"""

import argparse
import sys
from collections.abc import Sequence

from fathom.scripts.cli import arguments, run_alone
from fathom.scripts.flags import positive
from fathom.scripts.hub import WEIGHTS
from fathom.scripts.paths import Makes, Models, Pages, Texts
from fathom.scripts.train.recipe import add_recipe


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.train_coda", description=__doc__)
    p.add_argument("model", action=Models, metavar="MODEL", help="checkpoint directory, or owner/name on the hub")
    p.add_argument("--revision", help="branch, tag or commit of a model on the hub (default: its main branch)")
    p.set_defaults(hub_needs=WEIGHTS, hub=None, headers=None)
    p.add_argument(
        "--out", action=Makes, required=True, help="folder for adapters and page; must not exist, or be empty"
    )
    p.add_argument(
        "--page", action=Pages, metavar="FILE", help="write the page there too, F.md, JSON and picture beside"
    )
    p.add_argument(
        "--text",
        action=Texts,
        nargs="+",
        metavar="FILE",
        help="UTF-8 text to train on; several files are one text, an empty line between them",
    )
    p.add_argument("--seed", type=int, default=0, help="of documents and new parameters (default 0)")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where to train (default cpu)")
    p.add_argument(
        "--threads", type=positive, help="of torch on a CPU (default 1: another number adds in another order)"
    )
    p.add_argument(
        "--checkpointing",
        type=int,
        choices=(1, 2),
        help="compute layers twice to save memory in this phase; 2: refused",
    )
    p.add_argument(
        "--detach-evicted",
        action="store_true",
        help="no gradient through what left the ring: then the write gate learns nothing",
    )
    add_recipe(p)
    p.add_argument(
        "--coda",
        default="",
        metavar="SETTINGS",
        help="more settings of the bounded cache, as in --kv all=coda:SETTINGS, such as novelty=0.6,strict=1",
    )
    measured = p.add_argument_group("what is measured on")
    measured.add_argument(
        "--held-out", action=Texts, nargs="+", metavar="FILE", help="UTF-8 text (default: the last tenth of --text)"
    )
    measured.add_argument("--held-out-tokens", type=positive, metavar="N", help="of that, at the most (default 20000)")
    measured.add_argument("--documents", type=positive, metavar="N", help="without --text: of each length (default 24)")
    measured.add_argument(
        "--lengths",
        type=positive,
        nargs="+",
        metavar="N",
        help="without --text: tokens of a document (default 512 1024)",
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = arguments(parser(), argv)
    from fathom.scripts.train.coda import run

    return run(args)


if __name__ == "__main__":
    sys.exit(run_alone(main))
