"""The two phases of CoDA training: differential attention over everything first, then over the bounded cache.

Trained are the adapters alone: each layer's projections at a low rate, CoDA's own parameters at a higher one.
Embedding, feed-forward, norms and head stay the checkpoint's.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from model.errors import ConfigError
from model.variants.coda_settings import CodaSettings
from scripts.coda.network import attentions, training_memory
from scripts.demo.curriculum import Batch, Cell, draw_batch
from scripts.demo.training import language_loss, learning_rate
from scripts.llama.network import Network
from scripts.llama.training import Report, report

BASE_RATE, CODA_RATE, BOUNDED_SCALE = 1e-3, 1e-2, 0.5
PROJECTIONS: Final = ("q_proj", "k_proj", "v_proj", "o_proj")

# Codes are told in documents several times the window; facts in short ones, so that they are not unlearned.
CELLS: Final = (
    Cell(64, (2, 3), (2, 3), 0.5, 0.75, 0.0),
    Cell(256, (4, 8), (4, 8), 0.5, 0.0, 0.0),
    Cell(512, (4, 10), (4, 10), 2.0, 0.0, 0.0),
    Cell(1024, (4, 12), (4, 12), 2.0, 0.0, 0.0),
)


@dataclass(frozen=True)
class Phase:
    """One of the two phases.

    Attributes
    ----------
    name
        For the curve.
    steps
        Of 2048 tokens each.
    scale
        Of both learning rates.
    settings
        Of the bounded cache; None: unbounded.
    block
        Tokens of a block of the bounded prefill.
    """

    name: str
    steps: int
    scale: float
    settings: CodaSettings | None
    block: int


def check_checkpointing(phase: int | None) -> None:
    """Refuse gradient checkpointing where the cache is bounded: ConfigError."""
    if phase == 2:
        raise ConfigError(
            "--checkpointing 2: refused; phase 2 writes the banks as it goes, and a layer computed a second time for"
            " its gradient would attend to banks that the first time has already changed"
        )


def draw_cells(rng: random.Random) -> Batch:
    """One step's documents."""
    return draw_batch(rng, CELLS)


def optimiser(network: Network, scale: float) -> torch.optim.AdamW:
    """AdamW over the adapters, in two groups: projections and CoDA's own."""
    groups: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for layer in attentions(network):
        for name, parameter in layer.named_parameters():
            groups[name.split(".")[0] in PROJECTIONS].append(parameter)
    rates = ((groups[True], BASE_RATE), (groups[False], CODA_RATE))
    made = [{"params": parameters, "peak": scale * rate} for parameters, rate in rates]
    return torch.optim.AdamW(made, lr=scale * BASE_RATE, betas=(0.9, 0.95), weight_decay=0.0)


def train(
    network: Network,
    phase: Phase,
    seed: int,
    each: Callable[[Report], None],
    draw: Callable[[random.Random], Batch] = draw_cells,
    *,
    checkpointing: bool = False,
) -> None:
    """Train one phase in place; `each` is called after every step.

    With `checkpointing` a layer keeps its input only and is computed a second time for its gradient; unbounded only.
    """
    assert not (checkpointing and phase.settings), "a bounded layer is not the same when it is called again"
    rng = random.Random(f"{phase.name} {seed}")  # noqa: S311 -- documents, not secrets
    moving = optimiser(network, phase.scale)
    adapters = [parameter for layer in attentions(network) for parameter in layer.parameters()]
    for step in range(phase.steps):
        moving.zero_grad()
        for group in moving.param_groups:
            group["lr"] = learning_rate(step, phase.steps, group["peak"])
        batch = draw(rng)
        rows = batch.ids.shape[0]
        memory = None if phase.settings is None else training_memory(network, phase.settings, rows, phase.block)
        logits = network.lm_head(network.hidden(batch.ids, batch.positions, memory, checkpointing=checkpointing))
        loss = language_loss(logits, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(adapters, 1.0)
        moving.step()
        each(report(step, batch, loss, logits))
