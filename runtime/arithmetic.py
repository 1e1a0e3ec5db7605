"""What a run computes with, from its options: dtypes, the forms of its caches, op set and numerics."""

import torch

from fathom.kernels.ops import Ops, backend, noted, rounding_by
from fathom.model.architectures import Config
from fathom.model.arithmetic import Arithmetic
from fathom.model.cache.formats import CacheFormats
from fathom.model.choices import EXACT, FP8_SCORES
from fathom.model.config import ModelConfig
from fathom.model.errors import ConfigError
from fathom.model.ranks.ranks import Ranks
from fathom.model.rounding import FP8
from fathom.runtime.kv import variants
from fathom.runtime.options import RunOptions

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def cache_formats(options: RunOptions, config: Config) -> CacheFormats:
    """How caches are stored; ConfigError for a rule of `kv` that does not fit the model."""
    forms = options.entry_format, options.key_format
    return CacheFormats(DTYPES[options.dtype], *forms, variants(options.kv, config))


def fp8_products(options: RunOptions, ops: Ops) -> tuple[bool, bool]:
    """Whether linears, and FP4 experts, of many tokens multiply codes: where inputs are, on a GPU with such products.

    Blackwell multiplies FP4 as it is.
    """
    of_codes = options.rounding.linears == FP8 and options.dtype == "bf16"
    replaceable = ops.linears, ops.linears_fp8, ops.experts, ops.experts_fp8  # a probe's own op is run, not passed over
    if options.fp8_products == EXACT or not of_codes or any(backend(op) != "triton" for op in replaceable):
        return False, False
    from fathom.kernels.target import blackwell, multiplies_fp8  # noqa: PLC0415 (Triton is not on every platform)

    return multiplies_fp8(), multiplies_fp8() and not blackwell()


def arithmetic(options: RunOptions, ops: Ops, ranks: Ranks, config: Config) -> Arithmetic:
    """What a model of this run computes with; ConfigError as `cache_formats`, or for numerics of others."""
    if foreign := options.rounding.foreign:
        raise ConfigError(f"{options.told}: no run here rounds so ({foreign}), recordings of others are judged by it")
    if isinstance(config, ModelConfig):
        ops = rounding_by(ops, config.fp8_block)
    formats, ran = cache_formats(options, config), dict[str, str]()
    narrow = options.index_scores == FP8_SCORES, *fp8_products(options, ops)
    return Arithmetic(noted(ops, ran), options.rounding, formats.dtype, formats, ranks, ran, *narrow)
