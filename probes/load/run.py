"""A watched forward pass: which parameters were read, which experts got tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from model.errors import Tripwire
from model.observe import sites
from model.observe.observer import listening
from model.transformer import Transformer
from probes.load.reads import Reads
from probes.shared.held import find
from probes.subject import run_tokens


@dataclass(slots=True)
class Ran:
    """What a forward pass did with the parameters."""

    experts: dict[int, Tensor] = field(default_factory=dict)  # layer -> tokens that each expert got
    unread: list[str] = field(default_factory=list)  # parameters, with the share that was read
    ineffective: list[str] | None = None  # None: not asked
    tripped: Tripwire | None = None  # what ended it

    def missed(self) -> list[str]:
        """Experts that got no token of the prompt."""
        return [
            f"layers.{layer}.ffn.experts.{expert}"
            for layer, counts in sorted(self.experts.items())
            for expert, tokens in enumerate(counts.tolist())
            if not tokens
        ]


@torch.inference_mode()
def watch(model: Transformer, names: Sequence[str], tokens: list[int], chunk: int, ran: Ran) -> None:
    """Run the prompt, and note in `ran` what is read and how many tokens each expert gets.

    Experts that get none are then run by themselves, on one that others got.
    """
    inputs: dict[int, Tensor] = {}

    def entering(layer: int | None, x: Tensor) -> None:
        assert layer is not None
        inputs[layer] = x[:1].clone()

    def ids(layer: int | None, chosen: Tensor) -> None:
        assert layer is not None
        counts = torch.bincount(chosen.flatten().cpu(), minlength=model.config.n_routed_experts)
        ran.experts[layer] = ran.experts.get(layer, 0) + counts

    places = {name: held for name in names if (held := find(model, name)) is not None}
    watched = {f"{name} {i}": part for name, held in places.items() for i, part in enumerate(held.tensors())}
    with listening(model, {sites.EXPERTS_INPUT: entering, sites.EXPERT_IDS: ids}), Reads(watched) as reads:
        hidden, _ = run_tokens(model, tokens, chunk)
        model.logits(hidden[-1:])
        for layer, counts in ran.experts.items():
            for expert in (counts == 0).nonzero()[:, 0].tolist():
                model.blocks[layer].experts.run(expert, inputs[layer], torch.ones(1, device=model.device))
    for name, held in places.items():
        share = min(reads.share(f"{name} {i}") for i in range(len(held.tensors())))
        if share < 1:
            ran.unread.append(f"{name} ({share:.0%} read)")


def reached(name: str, experts: Mapping[int, Tensor]) -> bool:
    """Whether a run of the prompt needs a parameter: anything but a routed expert that no token went to."""
    parts = name.split(".")  # layers, 3, ffn, experts, 17, w1, weight
    return ".experts." not in name or int(experts[int(parts[1])][int(parts[4])]) > 0
