"""Flags that several scripts share, and their checks."""

import argparse
import tempfile
from pathlib import Path

from model.errors import ConfigError
from runtime.options import DTYPES, NUMERICS, RunOptions


def positive(text: str) -> int:
    """Argparse type: a whole number of at least 1."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def add_run_options(p: argparse.ArgumentParser) -> None:
    """Add the flags of `RunOptions`."""
    default = RunOptions()
    p.add_argument(
        "--prefill-chunk", type=positive, default=default.prefill_chunk, help="tokens per call (default 512)"
    )
    p.add_argument(
        "--numerics",
        choices=NUMERICS,
        default=default.numerics,
        help="deployed: activations rounded as DeepSeek serves (default); plain: as transformers computes",
    )
    p.add_argument(
        "--dtype", choices=tuple(DTYPES), default=default.dtype, help="of activations and caches (default bf16)"
    )
    p.add_argument(
        "--device", choices=("cpu", "cuda"), default=default.device, help="where weights and caches are (default cpu)"
    )


def run_options(args: argparse.Namespace) -> RunOptions:
    """Return what `add_run_options` parsed."""
    return RunOptions(args.numerics, args.dtype, args.device, args.prefill_chunk)


def writable(path: Path | None) -> None:
    """Refuse an output path that cannot be written, before the work is done: ConfigError or OSError, naming it."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder")
    try:
        with tempfile.TemporaryFile(dir=path.parent):  # beside it: an existing file keeps its content
            pass
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written there ({error.strerror})") from error
