"""The loop of every training, its optimisers and its curve; and what the demo and the small Llama are taught by."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import isnan, nan
from typing import Final

import torch
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fathom.scripts.console import Console
from fathom.scripts.train import llama_network as llama
from fathom.scripts.train import v4_network as v4
from fathom.scripts.train.documents import Batch
from fathom.scripts.train.layers import Gate

PEAK_RATE, WARM_UP, DECAY_FROM, LEAST_RATE = 2e-3, 50, 0.5, 0.02
SUPERVISED_UNTIL, SELECTING_FROM, SIMULATED_FROM = 0.3, 0.65, 0.75  # parts of a run
SUPERVISION, INDEXER = 0.3, 1.0  # weights of losses beside the language's
BIAS_STEP = 0.002  # of a router's balance
LOOKING_UP = slice(1, 3)  # layers of the small Llama whose attention is supervised
SHOWN_EVERY: Final = 20  # steps

Numbers = dict[str, float]  # what one step showed, by name; nan where it asked nothing of a kind
Draw = Callable[[random.Random], Batch]
Loss = tuple[Tensor, Numbers]


def linear(steps: int, warm_up: int = WARM_UP) -> Callable[[int, float], float]:
    """Linear warm-up, constant, linear decay to 2 % over the second half of so many steps."""

    def rate(step: int, peak: float) -> float:
        decay = min(1.0, (steps - step) / (steps * (1 - DECAY_FROM)))
        return peak * min(1.0, (step + 1) / max(1, warm_up)) * max(decay, LEAST_RATE)

    return rate


def optimisers(named: Iterable[tuple[str, nn.Parameter]], matrix: Callable[[str], bool]) -> list[torch.optim.Optimizer]:
    """Muon for the matrices among the parameters whose name says that they are projections, AdamW for the rest.

    Muon's updates are scaled so that their entries move as far as Adam's would: one rate for both.
    """
    by_muon: list[nn.Parameter] = []
    by_adam: list[nn.Parameter] = []
    for name, parameter in named:
        (by_muon if parameter.ndim == 2 and matrix(name) else by_adam).append(parameter)
    return [
        torch.optim.Muon(
            [{"params": by_muon, "peak": PEAK_RATE}], PEAK_RATE, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW([{"params": by_adam, "peak": PEAK_RATE}], PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def fit(
    network: nn.Module,
    moving: Sequence[torch.optim.Optimizer],
    steps: int,
    rate: Callable[[int, float], float],
    loss_of: Callable[[int], Loss],
    tell: Callable[[Numbers], None],
    *,
    accumulate: int = 1,
    clip: float = 1.0,
) -> None:
    """Train in place.

    Parameters
    ----------
    network, moving
        What is trained, and by which optimisers; each of their groups has its "peak" rate.
    steps
        How many.
    rate
        Step and peak rate of a group to the rate of that step.
    loss_of
        Draws, runs and judges a batch of a step.
    tell
        Called after each step, with means over its batches.
    accumulate
        Batches of a step.
    clip
        The largest norm that the gradient may have.

    """
    moved = [parameter for parameter in network.parameters() if parameter.requires_grad]
    for step in range(steps):
        for optimiser in moving:
            optimiser.zero_grad()
            for group in optimiser.param_groups:
                group["lr"] = rate(step, group["peak"])
        seen: list[Numbers] = []
        for _ in range(accumulate):
            loss, numbers = loss_of(step)
            (loss / accumulate).backward()
            seen.append(numbers)
        torch.nn.utils.clip_grad_norm_(moved, clip)
        for optimiser in moving:
            optimiser.step()
        tell({name: mean([numbers[name] for numbers in seen]) for name in seen[0]})


@contextmanager
def curve(
    console: Console, steps: int, task: str = "training", prefix: str = ""
) -> Iterator[Callable[[Numbers], None]]:
    """Yield what to call after each of so many steps: a line of means over every `SHOWN_EVERY` of them."""
    shown: list[Numbers] = []
    with Progress(console=console) as progress:
        bar = progress.add_task(task, total=steps)

        def tell(numbers: Numbers) -> None:
            shown.append(numbers)
            progress.advance(bar)
            done = int(progress.tasks[0].completed)
            if done % SHOWN_EVERY == 0 or done == steps:
                means = {name: mean([step[name] for step in shown]) for name in numbers}
                columns = (f"{name} {'     -' if isnan(value) else f'{value:6.3f}'}" for name, value in means.items())
                console.say(f"{prefix}{done:5d}  {'  '.join(columns)}")
                shown.clear()

        yield tell


def mean(values: list[float]) -> float:
    """Mean of the values that are numbers; nan where none is: a step that asked nothing of a kind."""
    numbers = [value for value in values if not isnan(value)]
    return sum(numbers) / len(numbers) if numbers else nan


def language_loss(logits: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy of every next token, weighted as the documents say; logits [b, t, vocab]."""
    weights = batch.weights[:, 1:].flatten()
    by_token = cross_entropy(logits[:, :-1].flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="none")
    return (by_token * weights).sum() / weights.sum()


def right_answers(logits: Tensor, batch: Batch) -> Numbers:
    """Share of codes, facts and marks among the known answers that were the likeliest token; nan: none was asked."""
    right = logits.detach()[batch.rows, batch.queries].argmax(-1) == batch.answers
    told = batch.sources >= 0
    kinds = {"needles": told, "facts": ~told & ~batch.marks, "marks": batch.marks}
    return {
        name: float(right[kind].float().mean()) if bool(kind.any()) else float("nan") for name, kind in kinds.items()
    }


def projects(name: str) -> bool:
    """Whether a matrix of the V4 network is Muon's: neither embeddings, routers nor hyper-connections."""
    return not name.startswith(("embed", "head", "hc_head")) and not any(
        part in name for part in ("hc_", "gate.weight", "ape")
    )


def train_v4(
    network: v4.Network,
    steps: int,
    seed: int,
    draw: Draw,
    tell: Callable[[Numbers], None],
) -> None:
    """Train in place. The same seed and steps give the same documents."""
    rng = random.Random(seed)  # noqa: S311 -- documents, not secrets

    def loss_of(step: int) -> Loss:
        progress = step / steps
        network.simulate(on=progress >= SIMULATED_FROM)
        batch = draw(rng)
        run = draw_run(rng, batch, progress)
        logits = network(batch.ids, run)
        language, index = language_loss(logits, batch), indexer_loss(batch, run.seen)
        loss = language + INDEXER * index
        if progress < SUPERVISED_UNTIL:
            loss = loss + SUPERVISION * entry_loss(batch, run.seen)
        return loss, {"language": language.item(), "indexer": index.item()} | right_answers(logits, batch)

    def balanced(numbers: Numbers) -> None:
        balance(network)
        tell(numbers)

    fit(network, optimisers(network.named_parameters(), projects), steps, linear(steps), loss_of, balanced)


def draw_run(rng: random.Random, batch: Batch, progress: float) -> v4.Run:
    """How the step attends: to every entry at first, later mostly to a top-k of random size.

    While everything is visible, and in half the rows later, documents of marks hide their CSA entries: what is counted
    over the whole document is to be learnt by the HCA layer, the only one that holds all of it after a selection.
    """
    selecting = progress >= SELECTING_FROM and rng.random() < 0.7
    hidden = torch.tensor([rng.random() < 0.5 or not selecting for _ in batch.blind])
    topk = rng.choice((8, 16, 16, 32))
    return v4.Run(topk if selecting else None, batch.blind & hidden, batch.positions)


def entry_loss(batch: Batch, seen: list[v4.Seen]) -> Tensor:
    """Minus the log of the attention mass on the two entries that hold the value asked for, mean over CSA layers."""
    known = batch.sources >= 0
    if not bool(known.any()):
        return torch.zeros(())
    rows, queries, entry = batch.rows[known], batch.queries[known], batch.sources[known] // 4
    losses = []
    for layer in seen:
        probs, n = layer.probs[rows, queries], layer.probs.shape[3]  # [q, h, n]
        pair = torch.stack([entry, (entry + 1).clamp(max=n - 1)], 1)
        mass = probs.gather(2, pair.unsqueeze(1).expand(-1, probs.shape[1], -1)).sum(2)
        losses.append(-(mass + 1e-6).log().mean())
    return torch.stack(losses).mean()


def indexer_loss(batch: Batch, seen: list[v4.Seen]) -> Tensor:
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


def balance(network: nn.Module) -> None:
    """Nudge each expert's bias towards the mean load."""
    for module in network.modules():
        if isinstance(module, Gate) and not module.hashed:
            module.bias.add_(BIAS_STEP * torch.sign(module.load.mean() - module.load))


def train_llama(
    network: llama.Network,
    steps: int,
    seed: int,
    draw: Draw,
    tell: Callable[[Numbers], None],
) -> None:
    """Train in place. The same seed and steps give the same documents."""
    rng = random.Random(seed)  # noqa: S311 -- documents, not secrets

    def loss_of(step: int) -> Loss:
        batch, seen = draw(rng), [list[llama.Seen]() for _ in network.blocks()]
        logits = network(batch.ids, batch.positions, seen)
        language = loss = language_loss(logits, batch)
        if step < SUPERVISED_UNTIL * steps and bool((batch.sources >= 0).any()):
            loss = loss + SUPERVISION * source_loss(batch, [layer for parts in seen[LOOKING_UP] for layer in parts])
        numbers = right_answers(logits, batch)
        return loss, {"language": language.item(), "needles": numbers["needles"], "facts": numbers["facts"]}

    moving = optimisers(network.named_parameters(), lambda name: "layers" in name)
    fit(network, moving, steps, linear(steps), loss_of, tell)


def source_loss(batch: Batch, layers: list[llama.Seen]) -> Tensor:
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
