"""Training the small Llama from its first step: curriculum, loss, and the supervision of attention at the beginning."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scripts.demo.curriculum import Batch, Cell, draw_batch
from scripts.demo.muon import Muon
from scripts.demo.training import accuracy, language_loss, learning_rate
from scripts.llama.network import Network, Seen

LEARNING_RATE = 2e-3
SUPERVISED_UNTIL, SUPERVISION = 0.3, 0.3
LOOKING_UP = slice(1, 3)  # layers whose attention is supervised

# As for the V4 demo (`scripts.demo.curriculum`), without the documents that only its HCA layer can answer for.
CELLS = (
    Cell(64, (2, 3), (2, 3), 2.0, 0.75, 0.0),
    Cell(128, (3, 6), (3, 6), 1.5, 0.4, 0.0),
    Cell(256, (4, 12), (4, 12), 2.5, 0.0, 0.0),
    Cell(512, (6, 20), (6, 16), 3.0, 0.0, 0.0),
    Cell(1024, (8, 24), (10, 24), 1.5, 0.0, 0.0),
    Cell(2048, (12, 24), (12, 24), 0.5, 0.0, 0.0),
)


@dataclass(frozen=True)
class Report:
    """What one step showed: loss, and the share of known answers that were right (nan: none asked)."""

    step: int
    length: int
    language: float
    needles: float
    facts: float


def draw_cells(rng: random.Random) -> Batch:
    """One step's documents."""
    return draw_batch(rng, CELLS)


def report(step: int, batch: Batch, language: Tensor, logits: Tensor) -> Report:
    """What a step showed."""
    right = logits.detach()[batch.rows, batch.queries].argmax(-1) == batch.answers
    told = batch.sources >= 0
    return Report(step, batch.ids.shape[1], language.item(), accuracy(right, told), accuracy(right, ~told))


def supervision_loss(batch: Batch, layers: list[Seen]) -> Tensor:
    """Minus the log of the attention mass that each question puts on the value it asks for, mean over heads and layers.

    It uses what the generator knows: where the values stand.
    """
    known = batch.sources >= 0
    rows, queries, sources = batch.rows[known], batch.queries[known], batch.sources[known]
    hidden = torch.arange(batch.ids.shape[1]) > queries[:, None]  # [n, t]
    losses = []
    for seen in layers:
        q, k = seen.q[rows, queries], seen.k[rows]  # [n, H, d], [n, t, K, d]
        grouped = q.unflatten(1, (k.shape[2], -1))  # [n, K, H / K, d]
        logits = torch.einsum("nkhd,ntkd->nkht", grouped, k) * q.shape[-1] ** -0.5
        mass = logits.masked_fill(hidden[:, None, None], -torch.inf).log_softmax(-1)
        losses.append(-mass.gather(3, sources[:, None, None, None].expand(*mass.shape[:3], 1)).mean())
    return torch.stack(losses).mean()


def optimisers(network: Network, lr: float) -> tuple[Muon, torch.optim.AdamW]:
    """Muon on projections; AdamW on embedding, head and norms."""
    inner: list[nn.Parameter] = [p for p in network.model.layers.parameters() if p.ndim == 2]
    owned = {id(p) for p in inner}
    others = [p for p in network.parameters() if id(p) not in owned]
    return Muon(inner, lr), torch.optim.AdamW(others, lr, betas=(0.9, 0.95), weight_decay=0.0)


def train(
    network: Network,
    steps: int,
    seed: int,
    each: Callable[[Report], None],
    draw: Callable[[random.Random], Batch] = draw_cells,
) -> None:
    """Train in place; `each` is called after every step. The same seed and steps give the same documents."""
    rng = random.Random(seed)  # noqa: S311 -- documents, not secrets
    pair = optimisers(network, LEARNING_RATE)
    for step in range(steps):
        for optimiser in pair:
            optimiser.zero_grad()
            for group in optimiser.param_groups:
                group["lr"] = learning_rate(step, steps, LEARNING_RATE)
        batch, record = draw(rng), [list[Seen]() for _ in network.blocks()]
        logits = network.lm_head(network.hidden(batch.ids, batch.positions, record))
        language = loss = language_loss(logits, batch)
        if step < SUPERVISED_UNTIL * steps and bool((batch.sources >= 0).any()):
            loss = loss + SUPERVISION * supervision_loss(
                batch, [seen for layer in record[LOOKING_UP] for seen in layer]
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        for optimiser in pair:
            optimiser.step()
        each(report(step, batch, language, logits))
