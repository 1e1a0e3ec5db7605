"""Which kernels a run computes with, by name: the choice of `--ops`, refused where the run cannot have it."""

import importlib.util

from fathom.kernels.ops import CPU, REFERENCE, Ops
from fathom.model.architectures import Config
from fathom.model.choices import OF_CODES, OP_SETS
from fathom.model.errors import ConfigError
from fathom.model.llama.config import LlamaConfig
from fathom.model.variants.choice import GroupedCoda, GroupedShard, Shard, Variant
from fathom.runtime.arithmetic import cache_formats, fp8_products
from fathom.runtime.options import RunOptions, usual

LEAST = 16  # of a dimension of a product on tensor cores
Grouped = GroupedCoda | GroupedShard  # one implementation each, of the backend cpu


def op_set(name: str, options: RunOptions, config: Config) -> Ops:
    """The op set of this name; ConfigError, naming the flag, where these options cannot run on it."""
    ops = _named(name, options, config)
    if options.fp8_products == OF_CODES and not any(fp8_products(options, ops)):
        raise ConfigError(
            f"--fp8-products {OF_CODES}: a GPU's of compute capability 9.0 or more, by --ops triton; exact is what"
            f" --ops {name} has here"
        )
    return ops


def _named(name: str, options: RunOptions, config: Config) -> Ops:
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
    """Triton's kernels; ConfigError, naming the variant and why, for a cache that they do not read."""
    from fathom.kernels.triton_ops import TRITON  # noqa: PLC0415 (Triton is not on every platform)

    variants = {str(variant): variant for variant in cache_formats(options, config).variants}
    for named, variant in sorted(variants.items()):
        if (why := unread(variant, config)) is not None:
            raise ConfigError(f"--ops triton: no kernel for --kv {named}: {why}")
    return TRITON


def unread(variant: Variant, config: Config) -> str | None:
    """What of a layer's cache Triton's kernels do not read; None where they read it.

    Products on tensor cores have 16 columns at least.
    """
    if isinstance(variant, Shard):
        assert not isinstance(config, LlamaConfig), "a variant of V4's layers"
        width = min(config.head_dim, config.index_head_dim)
        return None if width >= LEAST else f"rotated rows of {width} columns, want {LEAST} at least"
    if isinstance(variant, GroupedCoda):
        d = config.head_dim
        return None if d >= LEAST and d & (d - 1) == 0 else f"heads of {d}, want a power of two from {LEAST} on"
    return _unread_codes(variant, config.head_dim) if isinstance(variant, GroupedShard) else None


def _unread_codes(variant: GroupedShard, d: int) -> str | None:
    if variant.dp:
        return "components have bits by group, and those of equally many bits alone are read"
    if variant.qjl:
        return "the error of keys is sketched, and codes alone are read"
    for what, size in (("components", variant.rank), ("columns of a head", d)):
        if size < 2 * LEAST:
            return f"{size} {what}, of which each half makes a product: want {2 * LEAST} at least"
    return None


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
