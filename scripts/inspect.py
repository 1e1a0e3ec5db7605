"""Show what a checkpoint is: its config, its layers, and a census of its tensors. No weight is read, or downloaded.

With --config and --tensors it works on a bare list of tensors (JSON, also gzipped: name -> [dtype, shape]), so a
published checkpoint can be checked against this project without downloading it.
"""

import argparse
import gzip
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fathom.model.architectures import config_from_file
from fathom.model.checkpoint import strict_json
from fathom.model.checkpoint.tensor_mapping import Stored
from fathom.model.errors import CheckpointError, ConfigError, quoted
from fathom.model.files import regular_file_size
from fathom.runtime.options import DEMO
from fathom.scripts.cli import arguments, run_alone
from fathom.scripts.flags import add_json, add_model
from fathom.scripts.hub import HEADERS
from fathom.scripts.paths import Reads

MAX_LIST_BYTES = 1 << 25  # of a list of tensors, unpacked; V4-Pro's takes 11 MiB


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
    listed = None if args.tensors is None else read_list(args.tensors)
    from fathom.scripts.tasks.inspect import run

    return run(args, config, listed)


def read_list(path: Path) -> dict[str, Stored]:
    """Read a list of tensors, name -> [dtype, shape]; CheckpointError names the file and the tensor at fault."""
    regular_file_size(path)
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            data = file.read(MAX_LIST_BYTES + 1)
        if len(data) > MAX_LIST_BYTES:
            raise CheckpointError(f"{path}: more than {MAX_LIST_BYTES} bytes")
        obj = strict_json.parse(data)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise CheckpointError(f"{path}: damaged gzip file: {error}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None
    if not isinstance(obj, dict):
        raise CheckpointError(f"{path}: want a JSON object, name -> [dtype, shape]")
    for name, entry in obj.items():
        if not _is_stored(entry):
            raise CheckpointError(f"{path}: tensor {quoted(name)}: want [dtype, shape]")
    return {name: (dtype, tuple(shape)) for name, (dtype, shape) in obj.items()}


def _is_stored(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], str):
        return False
    return isinstance(entry[1], list) and all(type(size) is int and size >= 0 for size in entry[1])


if __name__ == "__main__":
    sys.exit(run_alone(main))
