"""Show what a checkpoint is: its config, its layers, and a census of its tensors. No weight is read, or downloaded.

With --config and --tensors it works on a bare list of tensors (JSON, also gzipped: name -> [dtype, shape]), so a
published checkpoint can be checked against this project without downloading it.
"""

import argparse
import sys
from collections.abc import Sequence

from fathom.model.architectures import config_from_file
from fathom.model.errors import ConfigError
from fathom.runtime.options import DEMO
from fathom.scripts.cli import arguments, run_alone
from fathom.scripts.flags import add_json, add_model
from fathom.scripts.hub import HEADERS
from fathom.scripts.paths import Reads


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    p = argparse.ArgumentParser(prog="python -m scripts.inspect", description=__doc__)
    add_model(p, HEADERS, default=None)
    p.add_argument("--config", action=Reads, help="a config.json, together with --tensors")
    p.add_argument("--tensors", action=Reads, help="a list of tensors, .json or .json.gz: name -> [dtype, shape]")
    add_json(p, "the same")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    args = arguments(parser(), argv)
    if (args.config is None) != (args.tensors is None) or (args.config is not None and args.model is not None):
        raise ConfigError("--config and --tensors go together, and without --model")
    config = config_from_file(args.config or (args.model or DEMO) / "config.json")
    from fathom.scripts.tasks.inspect import run

    return run(args, config)


if __name__ == "__main__":
    sys.exit(run_alone(main))
