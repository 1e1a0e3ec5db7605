"""A Llama-family checkpoint directory to a model that runs: on one rank, in plain numerics."""

import hashlib
from pathlib import Path
from typing import Final, NamedTuple

import torch

from kernels.ops import Ops
from model.checkpoint.census import Census
from model.checkpoint.checkpoint import Checkpoint
from model.checkpoint.weights import bind, fingerprint
from model.errors import CheckpointError, ConfigError
from model.llama.adapters import adapters_fingerprint, read_adapters
from model.llama.census import census, check_tied_head
from model.llama.config import LlamaConfig
from model.llama.transformer import LlamaTransformer
from model.observe.observer import LLAMA_PLACES, install
from model.ranks.ranks import Group, Ranks, Shards, undivided
from runtime.arithmetic import arithmetic
from runtime.memory import check_fits
from runtime.options import RunOptions
from runtime.plan.planner import Planner
from runtime.sharding import Placement

# One rank holds everything: a shard that is not split says no more than that.
WHOLE: Final = Placement(1, (Shards(*(undivided(1),) * len(Shards._fields)),), ())


class LoadedLlama(NamedTuple):
    """A model and where it came from; field by field as `runtime.load.Loaded`."""

    model: LlamaTransformer
    census: Census
    weights_fingerprint: str  # see `model.checkpoint.weights.fingerprint`; of the adapters too, where there are some
    directory: Path
    placement: Placement
    held: dict[str, int]  # bytes of each parameter, as stored


def load_llama(
    config: LlamaConfig, directory: Path, options: RunOptions, ops: Ops, group: Group, context: int | None
) -> LoadedLlama:
    """Read census and weights, strictly, and build the model; as `runtime.load.load`, which reads V4's.

    ConfigError, CheckpointError or CapacityError, with one line, for everything that is wrong with the directory, the
    options, the machine, or for more than one rank.
    """
    if group.size > 1:
        raise ConfigError(f"{directory}: a {config.model_type} model runs on one rank, this run has {group.size}")
    checkpoint = Checkpoint.open(directory)
    counted = census(checkpoint.shapes(), config, where=str(directory))
    check_fits(Planner(config, counted, WHOLE, options, 0, ops.name), context or 1, str(directory))
    check_tied_head(checkpoint, counted)
    weights, adapters, mark = bind(checkpoint, counted, torch.device(options.device)), None, fingerprint(checkpoint)
    if options.coda_adapters is not None:
        path = Path(options.coda_adapters)
        adapters = read_adapters(path, config, torch.device(options.device))
        mark = hashlib.sha256(f"{mark} {adapters_fingerprint(path)}".encode()).hexdigest()
    numerics = arithmetic(options, ops, Ranks(group, WHOLE.ranks[0]), config)
    model = LlamaTransformer(config, weights, numerics, adapters)
    install(model, LLAMA_PLACES)
    if unread := weights.unread():
        raise CheckpointError(f"{directory}: the model never asked for {len(unread)} parameters, first {unread[0]}")
    return LoadedLlama(model, counted, mark, directory, WHOLE, weights.handed())
