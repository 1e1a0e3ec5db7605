"""Write random weights in DeepSeek's on-disk format, at the dimensions of a config.json: a checkpoint of true size.

`python -m scripts.make_checkpoint --config FILE --layers N --out DIR` writes config.json, index and shards of the first
N layers; `--layers 2,3` takes exactly these, renumbered from 0. A V4-Flash layer is 3.6 GB and takes a quarter of a
minute. No tokenizer is written: `scripts.generate` runs such a checkpoint with `--tokens`, and answers in token ids.
"""

import argparse
import sys
from collections.abc import Sequence

from fathom.model.checkpoint.config_json import read_json
from fathom.model.config import ModelConfig
from fathom.scripts.cli import arguments, run_alone
from fathom.scripts.paths import Makes, Reads


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.make_checkpoint", description=__doc__)
    p.add_argument("--config", action=Reads, required=True, help="a published config.json, in DeepSeek's dialect")
    p.add_argument("--layers", required=True, help="the first N layers, or a list: 2,3 (one layer: 3,)")
    p.add_argument("--out", action=Makes, required=True, help="folder to write; must not exist, or be empty")
    p.add_argument("--seed", type=int, default=0, help="another seed, other weights (default 0)")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = arguments(parser(), argv)
    obj = read_json(args.config)
    config = ModelConfig.from_json(obj, str(args.config))
    from fathom.scripts.tasks.make_checkpoint import run

    return run(args, obj, config)


if __name__ == "__main__":
    sys.exit(run_alone(main))
