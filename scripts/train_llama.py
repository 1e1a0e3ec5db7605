"""`python -m scripts.train_llama`: make a small Llama-family checkpoint of the demo language, and measure it.

It is trained from a seed, written as published checkpoints of the family are, loaded again as every checkpoint is,
and asked for what it was taught: facts, and codes told once in a long document.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from fathom.model.llama.config import LlamaConfig
from fathom.probes.demo_language.prompts import fact_prompts, needle_prompts
from fathom.runtime.options import RunOptions
from fathom.runtime.output import making
from fathom.scripts.cli import arguments, run_alone
from fathom.scripts.console import Console
from fathom.scripts.flags import positive
from fathom.scripts.paths import Makes

if TYPE_CHECKING:
    from fathom.scripts.train.llama_network import Network
    from fathom.scripts.train.measure import Asked

LENGTHS, QUESTIONS = (256, 512, 1024, 2048, 4096), 8
MODEL = "full cache"

STEPS = 500


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.train_llama", description=__doc__)
    p.add_argument("--out", action=Makes, required=True, help="folder to write; must not exist, or be empty")
    p.add_argument("--seed", type=int, default=0, help="of documents and initial weights (default 0)")
    p.add_argument("--steps", type=positive, default=STEPS, help=f"of 2048 tokens each (default {STEPS})")
    p.add_argument("--documents", type=positive, default=8, help="of each length to ask at the end (default 8)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = arguments(parser(), argv)
    return run(args)


def trained(console: Console, steps: int, seed: int) -> "Network":
    """The network after training, its curve on the console."""
    from fathom.scripts.train.documents import LLAMA_CELLS, draw_batch
    from fathom.scripts.train.files import LLAMA
    from fathom.scripts.train.initial import initialise_llama
    from fathom.scripts.train.learning import curve, train_llama
    from fathom.scripts.train.llama_network import Network

    network = Network(LlamaConfig.from_json(LLAMA, "config.json"))
    initialise_llama(network, seed)
    with curve(console, steps) as tell:
        train_llama(network, steps, seed, partial(draw_batch, cells=LLAMA_CELLS), tell)
    return network


def asked(documents: int) -> "Iterator[Asked]":
    """Facts as text and as chat, codes by the length of the document.

    Codes that are asked for stand at least 128 tokens before the first question (a quarter of a document below 512).
    """
    from fathom.scripts.train.measure import Asked

    yield Asked("facts, text", fact_prompts(), (MODEL,))
    yield Asked("facts, chat", fact_prompts(chat=True), (MODEL,))
    for length in LENGTHS:
        yield Asked(f"codes, {length} tokens", needle_prompts(length, documents, 1, QUESTIONS), (MODEL,))


def run(args: argparse.Namespace) -> int:
    """Run the command line; returns the exit status."""
    import torch

    from fathom.runtime.load import load_any
    from fathom.scripts.train.files import LLAMA, write_llama
    from fathom.scripts.train.measure import table

    console, start = Console(), time.process_time()
    torch.set_num_threads(1)  # the order of additions, and with it the curve, must not depend on the cores
    out = args.out.resolve()  # the folder that "." is may be replaced
    network = trained(console, args.steps, args.seed)
    with making(out) as folder:
        size = write_llama(network, LLAMA, folder)
    console.say(f"{args.out}: {size:,} bytes after {time.process_time() - start:.0f} s of one core")
    model = load_any(out, RunOptions("plain")).model
    console.print(table({MODEL: model}, asked(args.documents), "as loaded, plain numerics, bf16"))
    return 0


if __name__ == "__main__":
    sys.exit(run_alone(main))
