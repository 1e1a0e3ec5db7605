"""The two phases of CoDA training: differential attention over everything first, then over the bounded cache.

Trained are the adapters alone: each layer's projections at a low rate, CoDA's own parameters at a higher one.
Embedding, feed-forward, norms and head stay the checkpoint's.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from fathom.model.errors import ConfigError
from fathom.scripts.train.coda_network import Bounded, attentions, training_memory
from fathom.scripts.train.learning import Draw, Loss, Numbers, fit, language_loss, linear, right_answers
from fathom.scripts.train.llama_network import Network
from fathom.scripts.train.recipe import Recipe

PROJECTIONS: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
BANKS: Final = ("write_proj", "summary_eta_logit")


@dataclass(frozen=True)
class Phase:
    """One of the two phases.

    Attributes
    ----------
    number
        1 or 2.
    recipe
        Steps, rates and their schedule.
    bounded
        The cache; None: everything is remembered.
    """

    number: int
    recipe: Recipe
    bounded: Bounded | None

    @property
    def name(self) -> str:
        """For the curve."""
        return f"phase {self.number}"

    @property
    def steps(self) -> int:
        """Updates of this phase."""
        return self.recipe.phase1_steps if self.number == 1 else self.recipe.phase2_steps

    @property
    def scale(self) -> float:
        """Of all rates."""
        return 1.0 if self.number == 1 else self.recipe.bounded_scale

    def rate(self) -> Callable[[int, float], float]:
        """Step and peak rate to the rate of that step."""
        r = self.recipe
        warm_up, end = (r.phase1_warm_up, r.phase1_decay) if self.number == 1 else (r.phase2_warm_up, r.phase2_decay)
        return linear(self.steps, warm_up) if r.decay == "linear" else cosine(warm_up, end)


def cosine(warm_up: int, end: int) -> Callable[[int, float], float]:
    """Linear warm-up, then half a cosine down to 0 at step `end`, as the published training script has it."""

    def rate(step: int, peak: float) -> float:
        part = min(1.0, max(0, step - warm_up) / max(1, end - warm_up))
        return peak * min(1.0, (step + 1) / max(1, warm_up)) * 0.5 * (1 + math.cos(math.pi * part))

    return rate


def check_checkpointing(phase: int | None) -> None:
    """Refuse gradient checkpointing where the cache is bounded: ConfigError."""
    if phase == 2:
        raise ConfigError(
            "--checkpointing 2: refused; phase 2 writes the banks as it goes, and a layer computed a second time for"
            " its gradient would attend to banks that the first time has already changed"
        )


def optimiser(network: Network, phase: Phase) -> torch.optim.AdamW:
    """AdamW over the adapters, in three groups: projections, the query mechanism, and what writes the banks."""
    recipe, groups = phase.recipe, {name: list[torch.nn.Parameter]() for name in ("rate", "coda_rate", "bank_rate")}
    for layer in attentions(network):
        for name, parameter in layer.named_parameters():
            own = name.split(".")[0]
            groups["rate" if own in PROJECTIONS else "bank_rate" if own in BANKS else "coda_rate"].append(parameter)
    made = [
        {
            "params": parameters,
            "peak": phase.scale * getattr(recipe, name),
            "weight_decay": recipe.weight_decay if name == "rate" else 0.0,
        }
        for name, parameters in groups.items()
    ]
    return torch.optim.AdamW(made, lr=phase.scale * recipe.rate, betas=(recipe.beta1, recipe.beta2))


def train(
    network: Network,
    phase: Phase,
    seed: int,
    draw: Draw,
    tell: Callable[[Numbers], None],
    *,
    checkpointing: bool = False,
) -> None:
    """Train one phase in place; `tell` is called after every step. ConfigError where the loss is no number any more.

    With `checkpointing` a layer keeps its input only and is computed a second time for its gradient; unbounded only.
    """
    assert not (checkpointing and phase.bounded), "a bounded layer is not the same when it is called again"
    rng = random.Random(f"{phase.name} {seed}")  # noqa: S311 -- documents, not secrets

    def loss_of(step: int) -> Loss:
        batch = draw(rng)
        memory = None if phase.bounded is None else training_memory(network, phase.bounded, batch.ids.shape[0])
        logits = network(batch.ids, batch.positions, memory, checkpointing=checkpointing)
        loss = language_loss(logits, batch)
        if not bool(loss.isfinite()):
            raise ConfigError(
                f"{phase.name}: the loss of update {step + 1} is {loss.item()}; lower --rate, --coda-rate, --bank-rate"
            )
        asked = right_answers(logits, batch) if len(batch.answers) else {}
        return loss, {"language": loss.item()} | {name: asked[name] for name in ("needles", "facts") if name in asked}

    recipe, moving = phase.recipe, [optimiser(network, phase)]
    fit(network, moving, phase.steps, phase.rate(), loss_of, tell, accumulate=recipe.accumulate, clip=recipe.clip)
