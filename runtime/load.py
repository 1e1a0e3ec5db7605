"""A checkpoint directory to a model that runs."""

from pathlib import Path
from typing import NamedTuple

import torch

from kernels.ops import BLOCKED, Ops
from model.census import Census, census
from model.checkpoint import Checkpoint
from model.config import ModelConfig
from model.decode import bind, fingerprint
from model.errors import CapacityError, CheckpointError, ConfigError
from model.transformer import Transformer
from runtime.memory import machine_memory
from runtime.options import RunOptions, check_deployed

DEMO = Path(__file__).resolve().parents[1] / "model" / "demo"  # the checkpoint that ships with the project


class Loaded(NamedTuple):
    """A model and where it came from."""

    model: Transformer
    census: Census
    weights_fingerprint: str  # see `model.decode.fingerprint`
    directory: Path


def check_device(device: str) -> None:
    """Refuse a device that this machine does not have: ConfigError."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device on this machine")


def load(directory: Path, options: RunOptions, ops: Ops = BLOCKED) -> Loaded:
    """Read config, census and weights, strictly, and build the model.

    ConfigError or CheckpointError, with one line, for everything that is wrong with the directory. Nothing is
    converted: weights stay as stored, memory-mapped on the CPU.
    """
    check_device(options.device)
    config = ModelConfig.from_file(directory / "config.json")
    if options.numerics == "deployed":
        check_deployed(config)
    checkpoint = Checkpoint.open(directory)
    counted = census(checkpoint.shapes(), config, where=str(directory))
    device = torch.device(options.device)
    if device.type == "cuda" and counted.nbytes > (memory := machine_memory(device)):
        raise CapacityError(
            f"{directory}: {counted.nbytes / 2**30:.1f} GiB of tensors, the GPU has {memory / 2**30:.1f} GiB"
        )
    weights = bind(checkpoint, counted, device)
    model = Transformer(config, weights, options.arithmetic(ops))
    if unread := weights.unread():  # a parameter that no layer asked for is a layer that was not built
        raise CheckpointError(f"{directory}: the model never asked for {len(unread)} parameters, first {unread[0]}")
    return Loaded(model, counted, fingerprint(checkpoint), directory)
