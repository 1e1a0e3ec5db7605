"""What a training step sees: documents of the demo language by length and kind, or sequences of any text."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Self

import torch
from torch import Tensor

from fathom.probes.demo_language.language import Document, fact_document, mark_document, needle_document

TOKENS_PER_STEP = 2048
JUMP = 128  # positions jump between HCA blocks only, so every entry still pools neighbours
FARTHEST = 32768


@dataclass(frozen=True)
class Cell:
    """One length: how many needles and queries a document has, how often the length is drawn, the mix of kinds."""

    length: int
    needles: tuple[int, int]
    queries: tuple[int, int]
    share: float
    facts: float
    marks: float


V4_CELLS = (
    Cell(64, (2, 3), (2, 3), 2.0, 0.75, 0.0),
    Cell(128, (3, 6), (3, 6), 1.5, 0.4, 0.0),
    Cell(256, (4, 12), (4, 12), 2.0, 0.0, 0.5),
    Cell(512, (6, 20), (6, 16), 3.5, 0.0, 0.65),
    Cell(1024, (8, 24), (10, 24), 1.5, 0.0, 0.65),
    Cell(2048, (12, 24), (12, 24), 0.5, 0.0, 0.65),
)
# As for V4, without the documents that only its HCA layer can answer for.
LLAMA_CELLS = (
    *V4_CELLS[:2],
    Cell(256, (4, 12), (4, 12), 2.5, 0.0, 0.0),
    Cell(512, (6, 20), (6, 16), 3.0, 0.0, 0.0),
    Cell(1024, (8, 24), (10, 24), 1.5, 0.0, 0.0),
    Cell(2048, (12, 24), (12, 24), 0.5, 0.0, 0.0),
)
# Codes are told in documents several times the window; facts in short ones, so that they are not unlearned.
CODA_CELLS = (
    Cell(64, (2, 3), (2, 3), 0.5, 0.75, 0.0),
    Cell(256, (4, 8), (4, 8), 0.5, 0.0, 0.0),
    Cell(512, (4, 10), (4, 10), 2.0, 0.0, 0.0),
    Cell(1024, (4, 12), (4, 12), 2.0, 0.0, 0.0),
)


def _none() -> Tensor:
    return torch.zeros(0, dtype=torch.int64)


@dataclass
class Batch:
    """Tensors of one step; a query is a position whose answer is known, [q]. Of a text none is.

    Attributes
    ----------
    ids, weights, positions
        [b, t]; weights are the loss weight of predicting that token, positions are for RoPE.
    blind
        [b] bool: rows of marks, whose CSA layers see nothing in the first part of training.
    rows, queries, answers, sources
        [q]: row, position, answer token, and position of the value's first mention (-1: none).
    marks
        [q] bool: answers about the whole document.
    """

    ids: Tensor
    weights: Tensor
    positions: Tensor
    blind: Tensor = field(default_factory=_none)
    rows: Tensor = field(default_factory=_none)
    queries: Tensor = field(default_factory=_none)
    answers: Tensor = field(default_factory=_none)
    sources: Tensor = field(default_factory=_none)
    marks: Tensor = field(default_factory=_none)

    def to(self, device: torch.device) -> Self:
        """The same on a device."""
        return type(self)(*(getattr(self, part.name).to(device) for part in fields(self)))


def draw_document(rng: random.Random, cell: Cell) -> Document:
    """One document of the cell's length and mix. Two fifths of the long ones stand in a conversation of a few turns."""
    kind = rng.random()
    if kind < cell.facts:
        return fact_document(rng, cell.length)
    chat = cell.length >= 128 and rng.random() < 0.4
    if kind < cell.facts + cell.marks:
        return mark_document(rng, cell.length, chat=chat)
    needles = rng.randint(*cell.needles)
    queries = min(needles, rng.randint(1, 1 + cell.length // 256) if chat else rng.randint(*cell.queries))
    return needle_document(rng, cell.length, needles, queries, chat=chat)


def jumping_positions(rng: random.Random, length: int) -> list[int]:
    """0, 1, 2, ... with one or two jumps of up to 32768 at block borders in half of the rows.

    So RoPE distances far beyond the trained lengths are seen in training.
    """
    positions = list(range(length))
    for _ in range(rng.randint(1, 2) if length > JUMP and rng.random() < 0.5 else 0):
        at, by = rng.randrange(JUMP, length, JUMP), round(FARTHEST * rng.random() ** 2)
        positions = [p + by if i >= at else p for i, p in enumerate(positions)]
    return positions


def draw_batch(rng: random.Random, *, cells: tuple[Cell, ...], tokens: int = TOKENS_PER_STEP) -> Batch:
    """Rows of one length, about `tokens` tokens together."""
    cell = rng.choices(cells, [c.share for c in cells])[0]
    documents = [draw_document(rng, cell) for _ in range(tokens // cell.length)]
    known = [(row, a, d.kind == "marks") for row, d in enumerate(documents) for a in d.answers]
    return Batch(
        ids=torch.tensor([d.ids for d in documents]),
        weights=torch.tensor([d.weights for d in documents]),
        positions=torch.tensor([jumping_positions(rng, cell.length) for _ in documents]),
        blind=torch.tensor([d.kind == "marks" for d in documents]),
        rows=torch.tensor([row for row, _, _ in known]),
        queries=torch.tensor([a.position for _, a, _ in known]),
        answers=torch.tensor([a.token for _, a, _ in known]),
        sources=torch.tensor([a.source for _, a, _ in known]),
        marks=torch.tensor([is_mark for _, _, is_mark in known]),
    )


def sequences(first: list[int], ids: list[int], length: int) -> Tensor:
    """Cut a text's token ids into rows [n, length] that each begin with `first`, what the model puts before a text.

    What is left at the end is dropped: n is 0 of a text that is too short.
    """
    step = length - len(first)
    rows = [[*first, *ids[start : start + step]] for start in range(0, len(ids) - step + 1, step)]
    return torch.tensor(rows, dtype=torch.int64).view(-1, length)


def shuffled(rows: Tensor, batch: int) -> Callable[[random.Random], Batch]:
    """What draws `batch` of the rows [n, length] at a time, all of them before any a second time."""
    order: list[int] = []

    def draw(rng: random.Random) -> Batch:
        while len(order) < batch:
            order.extend(rng.sample(range(len(rows)), len(rows)))
        ids = rows[[order.pop(0) for _ in range(batch)]]
        return Batch(ids, torch.ones(ids.shape), torch.arange(ids.shape[1]).expand_as(ids))

    return draw
