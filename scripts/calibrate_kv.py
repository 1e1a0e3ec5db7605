"""`python -m scripts.calibrate_kv`: fit a basis to the entries of each layer, for ``--kv LAYERS=shard:basis=FILE``.

A text is run through the full cache, in fp32 and without rounding. Where a layer's entries are better remembered in a
basis than rotated, at the same bytes, as predicted, on entries that the fit has not seen, and by what attention gives,
the file has the basis; for the other layers it says what either loses.
"""

import argparse
import sys
from collections.abc import Sequence

from fathom.model.choices import SHARD_BITS
from fathom.scripts.cli import arguments, run_alone
from fathom.scripts.flags import positions, positive
from fathom.scripts.paths import Models, Texts, Writes

TOKENS = 32768
CONTEXT = 131072


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.calibrate_kv", description=__doc__)
    p.add_argument("model", action=Models, help="checkpoint directory")
    p.add_argument("--out", action=Writes, required=True, help="safetensors file to write")
    p.add_argument("--text", action=Texts, help="file to run (default: documents of the demo, if the model reads them)")
    p.add_argument("--tokens", type=positive, help=f"of the text, at most (default {TOKENS}, or the model's positions)")
    p.add_argument("--bits", type=int, choices=SHARD_BITS, default=6, help="of a rotated row's values (default 6)")
    p.add_argument(
        "--context",
        type=positions,
        default=CONTEXT,
        help=f"positions over whose entries the bytes of a basis are spread (default {CONTEXT})",
    )
    p.add_argument("--prefill-chunk", type=positive, default=512, help="tokens per call (default 512)")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the model runs (default cpu)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = arguments(parser(), argv)
    from fathom.scripts.tasks.calibrate_kv import run

    return run(args)


if __name__ == "__main__":
    sys.exit(run_alone(main))
