"""What the trained network can do, measured on the numbers that the checkpoint decodes to."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from probes.demo_language.prompts import (
    Prompt,
    common_prompts,
    common_replies,
    fact_prompts,
    needle_prompts,
    needle_replies,
)
from scripts.demo.network import Network, Run

SELECTED, RANDOM, WINDOW, NO_HCA = Run(), Run(csa="random"), Run(csa="none"), Run(hca=False)
QUESTIONS = 16
TOKENS = 2048


@dataclass(frozen=True)
class Line:
    """One measurement: shares of right answers by how the layers attend, over `answers` answers a column."""

    kind: str
    length: int
    answers: int
    shares: dict[str, float]


def right_answers(network: Network, prompts: list[Prompt], run: Run) -> list[bool]:
    """For each answer of prompts of one length, whether the likeliest token is the right one."""
    with torch.no_grad():
        ids = torch.tensor([prompt.ids for prompt in prompts])
        padded = torch.nn.functional.pad(ids, (0, -ids.shape[1] % network.shape.window))
        hidden = network.hidden(padded, run, [])
        places = [(row, a.position) for row, prompt in enumerate(prompts) for a in prompt.answers]
        rows, positions = zip(*places, strict=True)
        chosen = network.head(hidden[list(rows), list(positions)]).argmax(-1).tolist()
    return [c == a.token for c, a in zip(chosen, (a for p in prompts for a in p.answers), strict=True)]


def share(network: Network, prompts: list[Prompt], run: Run) -> float:
    """Share of right answers over all prompts; those of one length are run together, some thousand tokens at a time."""
    right: list[bool] = []
    for length in sorted({len(prompt.ids) for prompt in prompts}):
        alike = [prompt for prompt in prompts if len(prompt.ids) == length]
        rows = max(1, TOKENS // length)
        for i in range(0, len(alike), rows):
            right += right_answers(network, alike[i : i + rows], run)
    return sum(right) / len(right)


def whole_replies(network: Network, prompts: list[Prompt], run: Run) -> float:
    """Share of prompts of which every answer is right: of replies that greedy decoding gives word for word."""
    return sum(all(right_answers(network, [prompt], run)) for prompt in prompts) / len(prompts)


def measure(network: Network, prompts: list[Prompt], kind: str, length: int, runs: dict[str, Run]) -> Line:
    """One line: the same prompts under every run."""
    asked = sum(len(prompt.answers) for prompt in prompts)
    return Line(kind, length, asked, {name: share(network, prompts, run) for name, run in runs.items()})


def measure_replies(network: Network, prompts: list[Prompt], kind: str, length: int, runs: dict[str, Run]) -> Line:
    """One line of whole replies."""
    return Line(kind, length, len(prompts), {name: whole_replies(network, prompts, run) for name, run in runs.items()})


def measurements(network: Network, lengths: tuple[int, ...], documents: int, seed: int) -> Iterator[Line]:
    """Facts, then codes and marks at each length. Set `network.simulate(on=True)` first for the deployed numbers."""
    selected, hca = {"selected": SELECTED}, {"selected": SELECTED, "without HCA": NO_HCA}
    for chat in (False, True):
        yield measure(network, fact_prompts(chat=chat), "facts, chat" if chat else "facts", 0, selected)
    for length in lengths:
        needles = needle_prompts(length, documents, seed, min(QUESTIONS, max(4, length // 32)))
        runs = selected | {"16 random": RANDOM, "window alone": WINDOW}
        yield measure(network, needles, "codes", length, runs)
        yield measure(network, common_prompts(length, documents, seed), "most common", length, hca)
        yield measure_replies(
            network, needle_replies(length, documents, seed), "codes, whole replies", length, selected
        )
        yield measure_replies(network, common_replies(length, documents, seed), "most common, replies", length, hca)
