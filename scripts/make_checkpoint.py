"""Write random weights in DeepSeek's on-disk format, at the dimensions of a config.json: a checkpoint of true size.

`python -m scripts.make_checkpoint --config FILE --layers N --out DIR` writes config.json, index and shards of the first
N layers; `--layers 2,3` takes exactly these, renumbered from 0. A V4-Flash layer is 3.6 GB and takes a quarter of a
minute. No tokenizer is written: `scripts.generate` runs such a checkpoint with `--tokens`, and answers in token ids.

`--small-v41` in place of `--config` and `--layers` writes a DeepSeek-V4.1 of nine small layers with the demo's
tokenizer, 23 MB: whatever runs a V4.1 here can be tried on it.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from fathom.model.checkpoint.config_json import read_json
from fathom.model.checkpoint.mtp import Head
from fathom.model.checkpoint.published import published_tensors
from fathom.model.checkpoint.tensor_mapping import Stored
from fathom.model.config import ModelConfig
from fathom.model.errors import CapacityError, ConfigError
from fathom.runtime.options import DEMO
from fathom.runtime.output import making, write_json
from fathom.scripts.cli import arguments, run_alone
from fathom.scripts.console import Console
from fathom.scripts.paths import Makes, Reads


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.make_checkpoint", description=__doc__)
    p.add_argument("--config", action=Reads, help="a published config.json, in DeepSeek's dialect")
    p.add_argument("--layers", help="with --config, the first N layers, or a list: 2,3 (one layer: 3,)")
    p.add_argument("--small-v41", action="store_true", help="a small DeepSeek-V4.1, with the demo's tokenizer")
    p.add_argument("--out", action=Makes, required=True, help="folder to write; must not exist, or be empty")
    p.add_argument("--seed", type=int, default=0, help="another seed, other weights (default 0)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = arguments(parser(), argv)
    if args.small_v41:
        if args.config is not None or args.layers is not None:
            raise ConfigError("--small-v41: excludes --config and --layers")
        return run_small(args)
    if args.config is None or args.layers is None:
        raise ConfigError("want --config and --layers, or --small-v41")
    obj = read_json(args.config)
    config = ModelConfig.from_json(obj, str(args.config))
    if config.v41 is not None:
        raise ConfigError(f"{args.config}: layers of a DeepSeek-V4.1 need each other; --small-v41 writes a small model")
    return run(args, obj, config)


def run_small(args: argparse.Namespace) -> int:
    """Write a small V4.1; returns the exit status."""
    from fathom.scripts.make.shards import total_bytes
    from fathom.scripts.make.small_v41 import small_v41, tokenizer_of_v41

    with making(args.out) as folder:
        tokenizer_of_v41(DEMO, folder)
        obj = small_v41(folder)
        tensors = published_tensors(config := ModelConfig.from_json(obj, "--small-v41"), "fp4", head=Head.DSPARK)
        check_room(args.out, nbytes := total_bytes(tensors))
        write(folder, tensors, args.seed, nbytes)
        write_json(folder / "config.json", obj, indent=2)
    layers = config.num_hidden_layers
    print(
        f"{args.out}: a DeepSeek-V4.1 of {layers} layers: {len(tensors):,} tensors, {nbytes:,} bytes", file=sys.stderr
    )
    print("its weights are random: what it writes means nothing", file=sys.stderr)
    return 0


def run(args: argparse.Namespace, obj: Mapping[str, Any], whole: ModelConfig) -> int:
    """Run the command line, with the config.json that it names; returns the exit status."""
    from fathom.scripts.make.selection import chosen_layers, shortened, stored_forms
    from fathom.scripts.make.shards import total_bytes

    layers = chosen_layers(args.layers, whole)
    try:
        obj, forms = shortened(obj, whole, layers), stored_forms(obj)
        tensors = published_tensors(config := ModelConfig.from_json(obj, "shortened"), *forms)
    except ConfigError as error:
        raise ConfigError(f"{args.config}: {error}") from None
    nbytes = total_bytes(tensors)
    check_room(args.out, nbytes)
    start = time.perf_counter()
    with making(args.out) as folder:
        write(folder, tensors, args.seed, nbytes)
        write_json(folder / "config.json", obj, indent=2)
    seconds = time.perf_counter() - start
    kinds = ", ".join(f"{layer} ({config.layer_kind(i).upper()})" for i, layer in enumerate(layers))
    print(f"{args.out}: layers {kinds}: {len(tensors):,} tensors, {nbytes:,} bytes, {seconds:.0f} s", file=sys.stderr)
    print("no tokenizer is among them: scripts.generate runs --tokens alone", file=sys.stderr)
    return 0


def check_room(out: Path, nbytes: int) -> None:
    """Refuse a folder that is to be made where there is no folder, or less room than it takes.

    Raises
    ------
    ConfigError
        Naming the folder that is not there.
    CapacityError
        When the disk has less room than it takes.
    """
    parent = out.resolve().parent
    if not parent.is_dir():
        raise ConfigError(f"{parent}: no such folder")
    free = shutil.disk_usage(parent).free
    if free < nbytes:
        raise CapacityError(f"{out}: takes {nbytes / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB free")


def write(directory: Path, tensors: Mapping[str, Stored], seed: int, nbytes: int) -> None:
    """Write index and shards, with a bar on stderr."""
    from fathom.scripts.make.shards import write_shards
    from fathom.scripts.make.values import blocks

    console = Console(stderr=True)
    columns = (TextColumn("writing"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("writing", total=nbytes)
        values = partial(blocks, tensors=tensors, seed=seed)
        write_shards(directory, tensors, values, lambda count: progress.advance(task, count))


if __name__ == "__main__":
    sys.exit(run_alone(main))
