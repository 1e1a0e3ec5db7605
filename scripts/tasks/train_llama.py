"""What `scripts.train_llama` does once its command line is known to be good."""

import argparse
import time

import torch
from rich.table import Table

from model.llama.config import LlamaConfig
from model.llama.transformer import LlamaTransformer
from runtime.load import load_any
from runtime.options import RunOptions
from runtime.output import making
from scripts.console import Console
from scripts.demo.curve import curve
from scripts.llama.files import config_json, write_checkpoint
from scripts.llama.initial import initialise
from scripts.llama.measure import measurements
from scripts.llama.network import Network
from scripts.llama.training import train

COLUMNS = ("language", "needles", "facts")  # of the training curve
LENGTHS = (256, 512, 1024, 2048, 4096)


def trained(console: Console, config: LlamaConfig, steps: int, seed: int) -> Network:
    """The network after training, its curve on the console."""
    network = Network(config)
    initialise(network, seed)
    with curve(console, COLUMNS, steps) as each:
        train(network, steps, seed, each)
    return network


def run(args: argparse.Namespace) -> int:
    """Run the command line; returns the exit status."""
    console, start = Console(), time.process_time()
    torch.set_num_threads(1)  # the order of additions, and with it the curve, must not depend on the cores
    out = args.out.resolve()  # the folder that "." is may be replaced
    fields = config_json()
    network = trained(console, LlamaConfig.from_json(fields, "config.json"), args.steps, args.seed)
    with making(out) as folder:
        size = write_checkpoint(network, fields, folder)
    console.say(f"{args.out}: {size:,} bytes after {time.process_time() - start:.0f} s of one core")
    loaded = load_any(out, RunOptions("plain"))
    assert isinstance(loaded.model, LlamaTransformer)
    table = Table("asked", "answers", "right", title="as loaded, plain numerics, bf16", title_justify="left")
    for asked, (share, answers) in measurements(loaded.model, LENGTHS, args.documents, seed=1).items():
        table.add_row(asked, str(answers), f"{100 * share:.1f} %")
    console.print(table)
    return 0
