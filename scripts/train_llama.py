"""`python -m scripts.train_llama`: make a small Llama-family checkpoint of the demo language, and measure it.

It is trained from a seed, written as published checkpoints of the family are, loaded again as every checkpoint is,
and asked for what it was taught: facts, and codes told once in a long document.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from model.llama.config import LlamaConfig
from runtime.llama import LoadedLlama
from runtime.load import load_any
from runtime.options import RunOptions
from scripts.cli import run_alone
from scripts.demo.curve import curve
from scripts.flags import positive
from scripts.llama.files import config_json, write_checkpoint
from scripts.llama.initial import initialise
from scripts.llama.measure import measurements
from scripts.llama.network import Network
from scripts.llama.training import train

STEPS = 500
COLUMNS = ("language", "needles", "facts")  # of the training curve
LENGTHS = (256, 512, 1024, 2048, 4096)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.train_llama", description=__doc__)
    p.add_argument("--out", type=Path, required=True, help="folder to write the checkpoint to")
    p.add_argument("--seed", type=int, default=0, help="of documents and initial weights (default 0)")
    p.add_argument("--steps", type=positive, default=STEPS, help=f"of 2048 tokens each (default {STEPS})")
    p.add_argument("--documents", type=positive, default=8, help="of each length to ask at the end (default 8)")
    return p


def trained(console: Console, config: LlamaConfig, steps: int, seed: int) -> Network:
    """The network after training, its curve on the console."""
    network = Network(config)
    initialise(network, seed)
    with curve(console, COLUMNS, steps) as each:
        train(network, steps, seed, each)
    return network


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = parser().parse_args(argv)
    console, start = Console(), time.process_time()
    torch.set_num_threads(1)  # the order of additions, and with it the curve, must not depend on the cores
    args.out.mkdir(parents=True, exist_ok=True)
    fields = config_json()
    network = trained(console, LlamaConfig.from_json(fields, "config.json"), args.steps, args.seed)
    size = write_checkpoint(network, fields, args.out)
    console.print(f"{args.out}: {size:,} bytes after {time.process_time() - start:.0f} s of one core")
    loaded = load_any(args.out, RunOptions("plain"))
    assert isinstance(loaded, LoadedLlama)
    table = Table("asked", "answers", "right", title="as loaded, plain numerics, bf16", title_justify="left")
    for asked, (share, answers) in measurements(loaded.model, LENGTHS, args.documents, seed=1).items():
        table.add_row(asked, str(answers), f"{100 * share:.1f} %")
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(run_alone(main))
