"""Flags that several scripts share, and their checks."""

import argparse
import tempfile
from pathlib import Path

from kernels.ops import Ops
from model.architectures import Config
from model.choices import DISPATCHES, ENTRY_FORMATS, KEY_FORMATS, NUMERICS, OP_SETS
from model.errors import ConfigError
from runtime.arithmetic import DTYPES
from runtime.op_sets import op_set
from runtime.options import TIMEOUT, RunOptions, usual

SHORTEST = 2  # seconds of --rank-timeout: a rank shows twice a second that it lives


def positive(text: str) -> int:
    """Argparse type: a whole number of at least 1."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def lengths(text: str) -> tuple[int, ...]:
    """Argparse type: whole numbers between commas, ascending."""
    return tuple(sorted({positive(part) for part in text.split(",")}))


def add_run_options(p: argparse.ArgumentParser, device: str = "cpu") -> None:
    """Add the flags of `RunOptions`; `device` is the default of its flag."""
    default = RunOptions()
    p.add_argument(
        "--prefill-chunk", type=positive, default=default.prefill_chunk, help="tokens per call (default 512)"
    )
    p.add_argument(
        "--numerics",
        choices=NUMERICS,
        default=default.numerics,
        help="deployed: activations rounded as DeepSeek serves V4 (default); plain: as transformers computes",
    )
    p.add_argument(
        "--dtype", choices=tuple(DTYPES), default=default.dtype, help="of activations and caches (default bf16)"
    )
    p.add_argument(
        "--device", choices=("cpu", "cuda"), default=device, help=f"where weights and caches are (default {device})"
    )
    p.add_argument(
        "--entry-format",
        choices=ENTRY_FORMATS,
        default=default.entry_format,
        help="how compressed entries are stored: in the run's dtype (default), or fp8: the same numbers in 584 bytes"
        " instead of 1024 (V4)",
    )
    p.add_argument(
        "--key-format",
        choices=KEY_FORMATS,
        default=default.key_format,
        help="how index keys are stored: in the run's dtype (default), fp8 or fp4: the same numbers in 132 or 68 bytes"
        " instead of 256 (V4)",
    )
    p.add_argument(
        "--dispatch",
        choices=DISPATCHES,
        default=default.dispatch,
        help="on several ranks, how tokens get to those that hold their experts: all-reduce (each has all tokens),"
        " all-to-all (each has its own), or auto, by the number of tokens (default)",
    )


def add_op_set(p: argparse.ArgumentParser) -> None:
    """Add the flag of scripts that run on any op set."""
    p.add_argument(
        "--ops",
        choices=OP_SETS,
        help="kernels: reference (the equations, whose memory no plan covers), blocked (PyTorch in tiles) or fused"
        " (Triton); default blocked, and"
        " fused with --device cuda",
    )


def chosen_ops(args: argparse.Namespace, options: RunOptions, config: Config) -> Ops:
    """Return the op set that `add_op_set` parsed; ConfigError where these options cannot run on it."""
    return op_set(args.ops or usual(options.device), options, config)


def add_graph(p: argparse.ArgumentParser) -> None:
    """Add the flag of scripts that decode."""
    p.add_argument(
        "--graph",
        action="store_true",
        help="decode by a CUDA graph of one step: on one rank, with --device cuda, --ops fused and all caches in full."
        " A token decoded so has all tripwires but four, which the report names",
    )


def add_variants(p: argparse.ArgumentParser) -> None:
    """Add the flag of scripts that run any variant of a layer's cache; probes hold the full one."""
    p.add_argument(
        "--kv",
        action="append",
        default=[],
        metavar="LAYERS=VARIANT",
        help="how layers remember what is older than their window, as in all=shard, hca=coda:window=128 or"
        " 3,5-9=shard:bits=8; may come several times, the later counts (default all=full)",
    )
    p.add_argument(
        "--coda-adapters",
        metavar="FILE",
        help="CoDA-GQA-L adapters over a Llama-family checkpoint: coda_adapters.safetensors, or .pt as published",
    )


def add_rank_timeout(p: argparse.ArgumentParser) -> None:
    """Add the flag of scripts that run on several ranks."""
    p.add_argument(
        "--rank-timeout",
        type=_timeout,
        default=TIMEOUT,
        metavar="SECONDS",
        help=f"end the run when a rank keeps the others waiting so long (default {TIMEOUT:g})",
    )


def _timeout(text: str) -> float:
    seconds = positive(text)
    if seconds < SHORTEST:
        raise argparse.ArgumentTypeError(f"{text}: want at least {SHORTEST} seconds")
    return float(seconds)


def run_options(args: argparse.Namespace) -> RunOptions:
    """Return what `add_run_options` parsed."""
    formats, held = (args.entry_format, args.key_format), (tuple(args.kv), args.coda_adapters) if "kv" in args else ()
    return RunOptions(args.numerics, args.dtype, args.device, args.prefill_chunk, *formats, args.dispatch, *held)


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
