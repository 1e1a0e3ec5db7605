"""Which kernels a run computes with, by name: the choice of `--ops`, refused where the run cannot have it."""

import importlib.util

from kernels.ops import CPU, REFERENCE, Ops
from model.architectures import Config
from model.choices import OP_SETS
from model.errors import ConfigError
from model.variants.choice import Full, GroupedCoda, GroupedShard
from runtime.arithmetic import cache_formats
from runtime.options import RunOptions, usual

Grouped = GroupedCoda | GroupedShard  # one implementation each, of the backend cpu


def op_set(name: str, options: RunOptions, config: Config) -> Ops:
    """The op set of this name; ConfigError, naming the flag, where these options cannot run on it."""
    match name:
        case "reference":
            _check_reference(options, config)
            return REFERENCE
        case "cpu":
            if options.device != "cpu":
                raise ConfigError(f"--ops cpu: its loops are compiled for a CPU; --device {options.device} has triton")
            return CPU
        case "triton":
            if options.device != "cuda":
                raise ConfigError(f"--ops triton: Triton's kernels need --device cuda, not {options.device}")
            return of_triton(options, config)
    raise AssertionError(f"op set {name!r}, want one of {OP_SETS}")


def of_triton(options: RunOptions, config: Config) -> Ops:
    """Triton's kernels, with attention in tiles where they cannot read a cache."""
    from kernels.triton_ops import TILES, TRITON  # noqa: PLC0415 (Triton is not on every platform)

    full = all(isinstance(variant, Full) for variant in cache_formats(options, config).variants)
    return TRITON if full else TILES


def planned(options: RunOptions) -> str:
    """The name of the op set that a plan is of, the device's usual one.

    ConfigError where a plan needs Triton, beside whose kernels it is said what they take, and there is none.
    """
    name = usual(options.device)
    if name == "triton" and importlib.util.find_spec("triton") is None:
        raise ConfigError(f"--device {options.device}: its plan is of Triton's kernels, and there is no Triton")
    return name


def _check_reference(options: RunOptions, config: Config) -> None:
    grouped = {str(variant) for variant in cache_formats(options, config).variants if isinstance(variant, Grouped)}
    if grouped:
        raise ConfigError(f"--ops reference: has no attention of its own for --kv {min(grouped)}; --ops cpu has")
