"""Make the demo checkpoint: train it from a seed, measure it as deployed, write it in DeepSeek's format.

`python -m scripts.train_demo` takes about half an hour of one core with its measurements. The documents and the initial
weights follow from the seed alone; the last bits of the result also depend on the machine's matrix product.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from fathom.model.config import ModelConfig
from fathom.probes.demo_language.prompts import (
    common_prompts,
    common_replies,
    fact_prompts,
    needle_prompts,
    needle_replies,
)
from fathom.runtime.options import DEMO, RunOptions
from fathom.runtime.output import making
from fathom.scripts.cli import arguments, run_alone
from fathom.scripts.console import Console
from fathom.scripts.flags import positive
from fathom.scripts.paths import Makes

if TYPE_CHECKING:
    from fathom.scripts.train.measure import Asked
    from fathom.scripts.train.v4_network import Network

LENGTHS, DOCUMENTS = (256, 512, 1024, 2048), 4
SELECTED, RANDOM, NO_CSA, NO_HCA = "selected", "16 random", "window alone", "without HCA"

STEPS = 900


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.train_demo", description=__doc__)
    p.add_argument("--out", action=Makes, required=True, help="folder to write; must not exist, or be empty")
    p.add_argument("--seed", type=int, default=0, help="of documents and initial weights (default 0)")
    p.add_argument("--steps", type=positive, default=STEPS, help=f"of 2048 tokens each (default {STEPS})")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = arguments(parser(), argv)
    return run(args)


def trained(console: Console, steps: int, seed: int) -> "Network":
    """The network after training, its curve on the console."""
    from fathom.scripts.train.documents import V4_CELLS, draw_batch
    from fathom.scripts.train.initial import initialise_v4
    from fathom.scripts.train.learning import curve, train_v4
    from fathom.scripts.train.v4_network import Network

    network = Network(ModelConfig.from_file(DEMO / "config.json"))
    initialise_v4(network, seed)
    with curve(console, steps) as tell:
        train_v4(network, steps, seed, partial(draw_batch, cells=V4_CELLS), tell)
    return network


def asked() -> "Iterator[Asked]":
    """Facts, then codes and marks at each length; what a memory carries is asked without it too."""
    from fathom.scripts.train.measure import Asked

    yield Asked("facts", fact_prompts(), (SELECTED,))
    yield Asked("facts, chat", fact_prompts(chat=True), (SELECTED,))
    csa, hca = (SELECTED, RANDOM, NO_CSA), (SELECTED, NO_HCA)
    for length in LENGTHS:
        of = partial(needle_prompts, length, DOCUMENTS, seed=1)
        yield Asked(f"codes, {length} tokens", of(questions=min(16, max(4, length // 32))), csa)
        yield Asked(f"most common, {length} tokens", common_prompts(length, DOCUMENTS, seed=1), hca)
        yield Asked(
            f"codes, replies, {length} tokens", needle_replies(length, DOCUMENTS, seed=1), (SELECTED,), whole=True
        )
        yield Asked(
            f"most common, replies, {length} tokens", common_replies(length, DOCUMENTS, seed=1), hca, whole=True
        )


def run(args: argparse.Namespace) -> int:
    """Run the command line; returns the exit status."""
    import torch

    from fathom.kernels.ops import CPU
    from fathom.probes.ablations import random_selection, without_entries
    from fathom.runtime.load import load
    from fathom.scripts.train.files import write_v4
    from fathom.scripts.train.measure import table

    console = Console()
    torch.set_num_threads(1)  # the order of additions, and with it the curve, must not depend on the cores
    out = args.out.resolve()  # the folder that "." is may be replaced
    network = trained(console, args.steps, args.seed)
    with making(out) as folder:
        size = write_v4(network, folder)
    console.say(f"{args.out}: {size:,} bytes")
    op_sets = {
        SELECTED: CPU,
        RANDOM: random_selection(CPU, seed=0),
        NO_CSA: without_entries(CPU, csa=True, hca=False),
        NO_HCA: without_entries(CPU, csa=False, hca=True),
    }
    models = {name: load(out, RunOptions(), ops).model for name, ops in op_sets.items()}
    console.print(table(models, asked(), "as loaded, deployed numerics, bf16"))
    return 0


if __name__ == "__main__":
    sys.exit(run_alone(main))
