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
from rich.progress import Progress
from rich.table import Table

from scripts.cli import run_alone
from scripts.demo.export import deployed_copy, write_checkpoint
from scripts.demo.initial import initialise
from scripts.demo.measure import Line, measurements
from scripts.demo.network import Network
from scripts.demo.shape import demo_shape
from scripts.demo.training import Report, train

STEPS = 900
SHOWN_EVERY = 20
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


def mean(values: list[float]) -> str:
    """Mean of the values that are numbers; a step that asked nothing of a kind reports nan."""
    numbers = [v for v in values if v == v]  # noqa: PLR0124 -- nan is the one value that differs from itself
    return f"{sum(numbers) / len(numbers):6.3f}" if numbers else "     -"


def summary(reports: list[Report]) -> str:
    """One line of the training curve."""
    columns = ("language", "indexer", "needles", "facts", "marks")
    shown = "  ".join(f"{name} {mean([getattr(r, name) for r in reports])}" for name in columns)
    return f"{reports[-1].step + 1:5d}  {shown}"


def trained(console: Console, steps: int, seed: int) -> Network:
    """The network after training, its curve on the console."""
    network = Network(demo_shape())
    initialise(network, seed)
    reports: list[Report] = []
    with Progress(console=console) as progress:
        task = progress.add_task("training", total=steps)

        def each(report: Report) -> None:
            reports.append(report)
            progress.advance(task)
            if (report.step + 1) % SHOWN_EVERY == 0 or report.step + 1 == steps:
                console.print(summary(reports), highlight=False)
                reports.clear()

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
