"""What a run computes with, from its options: dtypes, the forms of its caches, op set and numerics."""

import torch

from kernels.ops import Ops, noted
from model.architectures import Config
from model.arithmetic import Arithmetic
from model.cache.formats import CacheFormats
from model.choices import FP8_SCORES
from model.ranks.ranks import Ranks
from runtime.kv import variants
from runtime.options import RunOptions

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def cache_formats(options: RunOptions, config: Config) -> CacheFormats:
    """How caches are stored; ConfigError for a rule of `kv` that does not fit the model."""
    forms = options.entry_format, options.key_format
    return CacheFormats(DTYPES[options.dtype], *forms, variants(options.kv, config))


def arithmetic(options: RunOptions, ops: Ops, ranks: Ranks, config: Config) -> Arithmetic:
    """What a model of this run computes with; ConfigError as `cache_formats`."""
    formats, ran = cache_formats(options, config), dict[str, str]()
    deployed = options.numerics == "deployed"
    return Arithmetic(noted(ops, ran), deployed, formats.dtype, formats, ranks, ran, options.index_scores == FP8_SCORES)
