"""`python -m scripts.train_draft {mtp,dspark}`: train a draft head over the demo, and write both as one checkpoint.

The main model is run as deployed and stays as it is, byte for byte: only the head learns, to draft what the main model
would say. Its tensors are written in DeepSeek's names and formats, in a shard of their own. At the end it is told how
many drafts are right, at each place behind a token, on documents that were not trained on.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from math import isnan
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table

from fathom.model.choices import DSPARK, MTP
from fathom.model.config import Dspark, ModelConfig
from fathom.model.errors import ConfigError
from fathom.probes.demo_language.vocabulary import vocabulary_size
from fathom.runtime.options import RunOptions
from fathom.runtime.output import making
from fathom.scripts.cli import arguments, run_alone
from fathom.scripts.console import Console
from fathom.scripts.flags import add_model, positive
from fathom.scripts.paths import Makes

if TYPE_CHECKING:
    from fathom.model.checkpoint.checkpoint import Checkpoint
    from fathom.scripts.train.draft_learning import Line
    from fathom.scripts.train.draft_network import Head

MTP_PLACES: Final = 3  # drafts that it is trained for; more of them are drafted alike
BLOCK_SIZE, MARKOV_RANK, TARGETS = 5, 64, 3
NOISE: Final = vocabulary_size() - 1  # a place holder of the tokenizer, which stands in no text

STEPS = {MTP: 450, DSPARK: 400}


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.train_draft", description=__doc__)
    p.add_argument("head", choices=STEPS, help="preview MTP, of one stage, or DSpark, of three")
    add_model(p)
    p.add_argument("--out", action=Makes, required=True, help="folder to write; must not exist, or be empty")
    p.add_argument("--seed", type=int, default=0, help="of documents and initial weights (default 0)")
    steps = ", ".join(f"{count} for {head}" for head, count in STEPS.items())
    p.add_argument("--steps", type=positive, help=f"of 1024 tokens each (default {steps})")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = arguments(parser(), argv)
    args.steps = args.steps or STEPS[args.head]
    return run(args)


def run(args: argparse.Namespace) -> int:
    """Run the command line; returns the exit status."""
    import torch

    from fathom.model.checkpoint.checkpoint import Checkpoint
    from fathom.runtime.load import load
    from fathom.scripts.train.draft_learning import held_out, measure, train_draft
    from fathom.scripts.train.files import write_draft
    from fathom.scripts.train.initial import initialise_draft
    from fathom.scripts.train.learning import curve

    console, start = Console(), time.process_time()
    torch.set_num_threads(1)  # the order of additions, and with it the curve, must not depend on the cores
    out = args.out.resolve()  # the folder that "." is may be replaced
    config = ModelConfig.from_file(args.model / "config.json")
    _check(args, config)
    model = load(args.model, RunOptions()).model
    head = new_head(args.head, config, Checkpoint.open(args.model))
    initialise_draft(head, args.seed)
    with curve(console, args.steps) as tell:
        train_draft(head, model, args.steps, args.seed, tell)
    with making(out) as folder:
        size = write_draft(head, args.model, fields(head), folder)
    console.say(f"{args.out}: {size:,} bytes of draft head after {time.process_time() - start:.0f} s of one core")
    console.print(table(measure(head, model, held_out(args.seed + 1))))
    return 0


def _check(args: argparse.Namespace, config: ModelConfig) -> None:
    """Refuse a checkpoint that such a head cannot be trained for here: ConfigError."""
    if config.v41 is not None:
        raise ConfigError(f"{args.model}: a draft head of DeepSeek-V4.1 is not trained here")
    if config.vocab_size != (size := vocabulary_size()):
        raise ConfigError(f"{args.model}: vocab_size is {config.vocab_size}, the demo language has {size}")
    if config.num_mtp_layers:
        raise ConfigError(f"{args.model}: has a draft head; want a checkpoint without one")
    if config.num_hidden_layers < TARGETS:
        raise ConfigError(f"{args.model}: num_hidden_layers is {config.num_hidden_layers}, want at least {TARGETS}")
    if "compress_ratios" not in json.loads((args.model / "config.json").read_text(encoding="utf-8")):
        raise ConfigError(f"{args.model}: config.json has no compress_ratios; want DeepSeek's names")


def new_head(name: str, config: ModelConfig, checkpoint: "Checkpoint") -> "Head":
    """The head without its weights."""
    from fathom.scripts.train.draft_network import DSpark, Frozen, Mtp

    frozen = Frozen(checkpoint.read("embed.weight").float(), checkpoint.read("head.weight").float())
    if name == MTP:
        return Mtp(config, frozen, MTP_PLACES)
    layers = config.num_hidden_layers
    return DSpark(config, frozen, Dspark(BLOCK_SIZE, NOISE, tuple(range(layers - TARGETS, layers)), MARKOV_RANK))


def fields(head: "Head") -> dict[str, Any]:
    """What config.json says of a head. Its stages are layers without a compressor; every release announces one."""
    from fathom.scripts.train.draft_network import DSpark

    ratios = [*head.config.compress_ratios, *(0 for _ in head.blocks())]
    shape = (
        {f"dspark_{name}": value for name, value in asdict(head.settings).items()} if isinstance(head, DSpark) else {}
    )
    return {"num_nextn_predict_layers": 1, "compress_ratios": ratios} | shape


def table(lines: "Sequence[Line]") -> Table:
    """How often drafts are right."""
    told = Table(
        "behind", "tokens", *lines[0].by_place, "tokens per step", "confidence", "right",
        title="drafts equal to the main model's greedy choice, those before them being right", title_justify="left",
    )  # fmt: skip
    for line in lines:
        places = [_percent(share) for share in line.by_place.values()]
        told.add_row(
            line.kind, str(line.tokens), *places, f"{line.emitted:.2f}", _percent(line.sure), _percent(line.right)
        )
    return told


def _percent(share: float) -> str:
    return "-" if isnan(share) else f"{100 * share:.1f} %"


if __name__ == "__main__":
    sys.exit(run_alone(main))
