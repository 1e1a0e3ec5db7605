"""What a run computes with, from its options: dtypes, the forms of its caches, op set and numerics."""

import torch

from fathom.kernels.ops import Ops, noted
from fathom.model.architectures import Config
from fathom.model.arithmetic import Arithmetic
from fathom.model.cache.formats import CacheFormats
from fathom.model.choices import FP8_SCORES
from fathom.model.ranks.ranks import Ranks
from fathom.runtime.kv import variants
from fathom.runtime.options import RunOptions

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def cache_formats(options: RunOptions, config: Config) -> CacheFormats:
    """How caches are stored; ConfigError for a rule of `kv` that does not fit the model."""
    forms = options.entry_format, options.key_format
    return CacheFormats(DTYPES[options.dtype], *forms, variants(options.kv, config))


def arithmetic(options: RunOptions, ops: Ops, ranks: Ranks, config: Config) -> Arithmetic:
    """What a model of this run computes with; ConfigError as `cache_formats`."""
    formats, ran = cache_formats(options, config), dict[str, str]()
    fp8_scores = options.index_scores == FP8_SCORES
    return Arithmetic(noted(ops, ran), options.rounding, formats.dtype, formats, ranks, ran, fp8_scores)
