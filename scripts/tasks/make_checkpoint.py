"""What `scripts.make_checkpoint` does once its command line is known to be good."""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from model.binding import Stored
from model.config import ModelConfig
from model.config_json import read_json
from model.errors import CapacityError, ConfigError
from model.published import published_tensors
from scripts.console import Console
from scripts.make.selection import chosen_layers, shortened, stored_forms
from scripts.make.shards import total_bytes, write_shards
from scripts.make.values import blocks


def run(args: argparse.Namespace) -> int:
    """Run the command line; returns the exit status."""
    obj = read_json(args.config)
    whole = ModelConfig.from_json(obj, str(args.config))
    layers = chosen_layers(args.layers, whole)
    try:
        obj, forms = shortened(obj, whole, layers), stored_forms(obj)
        tensors = published_tensors(config := ModelConfig.from_json(obj, "shortened"), *forms)
    except ConfigError as error:
        raise ConfigError(f"{args.config}: {error}") from None
    nbytes = total_bytes(tensors)
    unfinished = prepared(args.out, nbytes)
    start = time.perf_counter()
    try:
        unfinished.mkdir()
        write(unfinished, tensors, args.seed, nbytes)
        (unfinished / "config.json").write_text(json.dumps(obj, indent=2) + "\n", encoding="utf-8")
        unfinished.replace(args.out.resolve())
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    seconds = time.perf_counter() - start
    kinds = ", ".join(f"{layer} ({config.layer_kind(i).upper()})" for i, layer in enumerate(layers))
    print(f"{args.out}: layers {kinds}: {len(tensors):,} tensors, {nbytes:,} bytes, {seconds:.0f} s", file=sys.stderr)
    print("no tokenizer is among them: scripts.generate needs one, scripts.logits does not", file=sys.stderr)
    return 0


def prepared(out: Path, nbytes: int) -> Path:
    """The folder to write into before it gets its name; checks first that both names are free and the disk has room.

    Raises
    ------
    ConfigError
        Naming the path that exists, or does not and should.
    CapacityError
        When the disk has less room than it takes.
    """
    target = out.resolve()
    unfinished = target.with_name(f"{target.name}.partial")
    if not target.parent.is_dir():
        raise ConfigError(f"{target.parent}: no such folder")
    if target.exists() and any(target.iterdir()):
        raise ConfigError(f"{out}: exists and is not empty")
    if unfinished.exists():
        raise ConfigError(f"{unfinished}: exists; if a run that was killed left it, remove it")
    free = shutil.disk_usage(target.parent).free
    if free < nbytes:
        raise CapacityError(f"{out}: takes {nbytes / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB free")
    return unfinished


def write(directory: Path, tensors: Mapping[str, Stored], seed: int, nbytes: int) -> None:
    """Write index and shards, with a bar on stderr."""
    console = Console(stderr=True)
    columns = (TextColumn("writing"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("writing", total=nbytes)
        values = partial(blocks, tensors=tensors, seed=seed)
        write_shards(directory, tensors, values, lambda count: progress.advance(task, count))
