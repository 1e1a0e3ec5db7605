"""Make the demo checkpoint: train it from a seed, measure it as deployed, write it in DeepSeek's format.

`python -m scripts.train_demo` takes about half an hour of one core with its measurements. The documents and the initial
weights follow from the seed alone; the last bits of the result also depend on the machine's matrix product.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from scripts.cli import run_alone
from scripts.demo.curve import curve
from scripts.demo.export import deployed_copy, write_checkpoint
from scripts.demo.initial import initialise
from scripts.demo.measure import Line, measurements
from scripts.demo.network import Network
from scripts.demo.shape import demo_shape
from scripts.demo.training import train

STEPS = 900
COLUMNS = ("language", "indexer", "needles", "facts", "marks")  # of the training curve
LENGTHS = (256, 512, 1024, 2048)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m scripts.train_demo", description="Train the demo checkpoint.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the checkpoint to")
    parser.add_argument("--seed", type=int, default=0, help="of documents and initial weights")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of 2048 tokens each (default: {STEPS})")
    arguments = parser.parse_args(argv)
    if arguments.steps < 1:
        parser.error(f"--steps is {arguments.steps}, want at least 1")
    return arguments


def trained(console: Console, steps: int, seed: int) -> Network:
    """The network after training, its curve on the console."""
    network = Network(demo_shape())
    initialise(network, seed)
    with curve(console, COLUMNS, steps) as each:
        train(network, steps, seed, each)
    return network


def table(lines: list[Line]) -> Table:
    """Measurements as a table."""
    grid = Table("kind", "tokens", "answers", "right", title="as deployed", title_justify="left")
    for line in lines:
        shares = "  ".join(f"{name} {100 * value:.1f} %" for name, value in line.shares.items())
        grid.add_row(line.kind, str(line.length) if line.length else "", str(line.answers), shares)
    return grid


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    arguments = parse(argv)
    console = Console()
    torch.set_num_threads(1)  # the order of additions, and with it the curve, must not depend on the cores
    arguments.out.mkdir(parents=True, exist_ok=True)  # a folder that cannot be made is found out before, not after
    network = trained(console, arguments.steps, arguments.seed)
    size = write_checkpoint(network, arguments.out)
    console.print(f"{arguments.out}: {size:,} bytes")
    deployed_copy(network)
    network.simulate(on=True)
    console.print(table(list(measurements(network, LENGTHS, documents=4, seed=1))))
    return 0


if __name__ == "__main__":
    sys.exit(run_alone(main))
