"""Write random weights in DeepSeek's on-disk format, at the dimensions of a config.json: a checkpoint of true size.

`python -m scripts.make_checkpoint --config FILE --layers N --out DIR` writes config.json, index and shards of the first
N layers; `--layers 2,3` takes exactly these, renumbered from 0. A V4-Flash layer is 3.6 GB and takes a quarter of a
minute. No tokenizer is written: `scripts.logits` and `scripts.inspect` need none, `scripts.generate` does.
"""

import argparse
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from model.binding import Stored
from model.config import ModelConfig
from model.config_json import read_json
from model.errors import CapacityError, ConfigError
from model.published import published_tensors
from scripts.cli import run_alone
from scripts.make.selection import chosen_layers, shortened, stored_forms
from scripts.make.shards import total_bytes, write_shards
from scripts.make.values import blocks


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.make_checkpoint", description=__doc__)
    p.add_argument("--config", type=Path, required=True, help="a published config.json, in DeepSeek's dialect")
    p.add_argument("--layers", required=True, help="the first N layers, or a list: 2,3 (one layer: 3,)")
    p.add_argument("--out", type=Path, required=True, help="folder to write; must not exist, or be empty")
    p.add_argument("--seed", type=int, default=0, help="another seed, other weights (default 0)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = parser().parse_args(argv)
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
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{out}: exists and is no folder")
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


if __name__ == "__main__":
    sys.exit(run_alone(main))
