"""What `scripts.train_demo` does once its command line is known to be good."""

import argparse

import torch
from rich.table import Table

from runtime.output import making
from scripts.console import Console
from scripts.demo.curve import curve
from scripts.demo.export import deployed_copy, write_checkpoint
from scripts.demo.initial import initialise
from scripts.demo.measure import Line, measurements
from scripts.demo.network import Network
from scripts.demo.shape import demo_shape
from scripts.demo.training import train

COLUMNS = ("language", "indexer", "needles", "facts", "marks")  # of the training curve
LENGTHS = (256, 512, 1024, 2048)


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


def run(args: argparse.Namespace) -> int:
    """Run the command line; returns the exit status."""
    console = Console()
    torch.set_num_threads(1)  # the order of additions, and with it the curve, must not depend on the cores
    network = trained(console, args.steps, args.seed)
    with making(args.out) as folder:
        size = write_checkpoint(network, folder)
    console.say(f"{args.out}: {size:,} bytes")
    deployed_copy(network)
    network.simulate(on=True)
    console.print(table(list(measurements(network, LENGTHS, documents=4, seed=1))))
    return 0
