"""The training loop: what is minimised, and in which part of the run."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from scripts.demo.attention import Seen
from scripts.demo.curriculum import Batch, draw_batch
from scripts.demo.layers import Gate
from scripts.demo.muon import optimisers
from scripts.demo.network import Network, Run

LEARNING_RATE, WARM_UP, DECAY_FROM = 2e-3, 50, 0.5
SUPERVISED_UNTIL, SELECTING_FROM, SIMULATED_FROM = 0.3, 0.65, 0.75
SUPERVISION, INDEXER = 0.3, 1.0
BIAS_STEP = 0.002


@dataclass(frozen=True)
class Report:
    """What one step showed: losses, and the share of known answers that were right (nan: none asked)."""

    step: int
    length: int
    language: float
    indexer: float
    needles: float
    facts: float
    marks: float


def learning_rate(step: int, steps: int, peak: float = LEARNING_RATE) -> float:
    """Linear warm-up, constant, linear decay to 2 % over the second half."""
    decay = min(1.0, (steps - step) / (steps * (1 - DECAY_FROM)))
    return peak * min(1.0, (step + 1) / WARM_UP) * max(decay, 0.02)


def language_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy of every next token, weighted as the documents say; logits [b, t, vocab]."""
    weights = batch.weights[:, 1:].flatten()
    each = cross_entropy(logits[:, :-1].flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="none")
    return (each * weights).sum() / weights.sum()


def draw_run(rng: random.Random, batch: Batch, progress: float) -> Run:
    """How the step attends: to every entry at first, later mostly to a top-k of random size.

    While everything is visible, and in half the rows later, documents of marks hide their CSA entries: what is counted
    over the whole document is to be learnt by the HCA layer, the only one that holds all of it after a selection.
    """
    selecting = progress >= SELECTING_FROM and rng.random() < 0.7
    hidden = torch.tensor([rng.random() < 0.5 or not selecting for _ in batch.blind])
    return Run(
        csa="indexer" if selecting else "all",
        topk=rng.choice((8, 16, 16, 32)),
        blind=batch.blind & hidden,
        positions=batch.positions,
        record=True,
    )


def supervision_loss(batch: Batch, seen: list[Seen]) -> Tensor:
    """Minus the log of the attention mass on the two entries that hold the value asked for, mean over CSA layers."""
    known = batch.sources >= 0
    rows, queries, entry = batch.rows[known], batch.queries[known], batch.sources[known] // 4
    losses = []
    for layer in seen:
        probs, n = layer.probs[rows, queries], layer.probs.shape[3]  # [q, h, n]
        pair = torch.stack([entry, (entry + 1).clamp(max=n - 1)], 1)
        mass = probs.gather(2, pair.unsqueeze(1).expand(-1, probs.shape[1], -1)).sum(2)
        losses.append(-(mass + 1e-6).log().mean())
    return torch.stack(losses).mean() if bool(known.any()) else torch.zeros(())


def indexer_loss(batch: Batch, seen: list[Seen]) -> Tensor:
    """Cross-entropy from the layer's attention over entries to the indexer's scores, weighted by the mass on entries.

    Positions that ask count five times: they are few, and the selection must be right there.
    """
    asking = torch.ones(batch.ids.shape)
    asking[batch.rows, batch.queries] = 5.0
    losses = []
    for layer in seen:
        target = layer.probs.detach().mean(2)  # [b, t, n]
        chosen = layer.scores.masked_fill(~layer.visible, -1e9).log_softmax(-1)
        losses.append(-(target * chosen * asking.unsqueeze(2)).sum() / ((target.sum(2) * asking).sum() + 1e-6))
    return torch.stack(losses).mean()


def accuracy(right: Tensor, among: Tensor) -> float:
    """Share of `right` among the answers that `among` marks."""
    return float(right[among].float().mean()) if bool(among.any()) else float("nan")


def balance(network: Network) -> None:
    """Nudge each expert's bias towards the mean load."""
    for module in network.modules():
        if isinstance(module, Gate) and not module.hashed:
            module.bias.add_(BIAS_STEP * torch.sign(module.load.mean() - module.load))


def train(
    network: Network,
    steps: int,
    seed: int,
    each: Callable[[Report], None],
    draw: Callable[[random.Random], Batch] = draw_batch,
) -> None:
    """Train in place. `each` is called after every step. The same seed and steps give the same documents."""
    rng = random.Random(seed)  # noqa: S311 -- documents, not secrets
    torch.manual_seed(seed)
    pair = optimisers(network, LEARNING_RATE)
    for step in range(steps):
        progress = step / steps
        for optimiser in pair:
            optimiser.zero_grad()
            for group in optimiser.param_groups:
                group["lr"] = learning_rate(step, steps)
        network.simulate(on=progress >= SIMULATED_FROM)
        batch = draw(rng)
        run = draw_run(rng, batch, progress)
        report, loss = losses(network, batch, run, step, supervised=progress < SUPERVISED_UNTIL)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        for optimiser in pair:
            optimiser.step()
        balance(network)
        each(report)


def losses(network: Network, batch: Batch, run: Run, step: int, *, supervised: bool) -> tuple[Report, Tensor]:
    """The report and the total loss of one batch."""
    logits, seen = network(batch.ids, run)
    language = language_loss(logits, batch)
    index = indexer_loss(batch, seen)
    total = language + INDEXER * index
    if supervised:
        total = total + SUPERVISION * supervision_loss(batch, seen)
    right = logits.detach()[batch.rows, batch.queries].argmax(-1) == batch.answers
    asked_needle, asked_fact = batch.sources >= 0, (batch.sources < 0) & ~batch.marks
    return Report(
        step=step,
        length=batch.ids.shape[1],
        language=language.item(),
        indexer=index.item(),
        needles=accuracy(right, asked_needle),
        facts=accuracy(right, asked_fact),
        marks=accuracy(right, batch.marks),
    ), total
