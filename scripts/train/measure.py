"""Right answers of a checkpoint that was just written, as the product computes them."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from rich.table import Table

from fathom.model.architectures import Model
from fathom.probes.demo_language.prompts import Prompt


class Asked(NamedTuple):
    """What is asked, and of which of the models."""

    name: str
    prompts: list[Prompt]
    of: tuple[str, ...]
    whole: bool = False  # a prompt counts once, when all of its answers are right: as a reply decoded greedily


def right_answers(model: Model, prompt: Prompt, chunk: int = 512) -> list[bool]:
    """For each answer of the prompt, whether the likeliest token after it is the right one; words before are forced."""
    ids = torch.tensor(prompt.ids)
    state = model.new_state(len(ids), min(chunk, len(ids)))
    hidden = torch.cat([model(part, state) for part in ids.split(chunk)])  # one call after the other, in order
    chosen = model.logits(hidden[[answer.position for answer in prompt.answers]]).argmax(-1).tolist()
    return [token == answer.token for token, answer in zip(chosen, prompt.answers, strict=True)]


def share(model: Model, prompts: Iterable[Prompt], *, whole: bool = False) -> tuple[float, int]:
    """Share of right answers over all prompts, or of prompts without a wrong one; and how many that is of."""
    right = [right_answers(model, prompt) for prompt in prompts]
    counted = [all(answers) for answers in right] if whole else [answer for answers in right for answer in answers]
    return sum(counted) / len(counted), len(counted)


def table(models: Mapping[str, Model], asked: Iterable[Asked], title: str) -> Table:
    """Ask everything, and tell it in a table."""
    told = Table("asked", "answers", "right", title=title, title_justify="left")
    for line in asked:
        shares = {name: share(models[name], line.prompts, whole=line.whole) for name in line.of}
        answers = next(iter(shares.values()))[1]
        told.add_row(
            line.name, str(answers), "  ".join(f"{name} {100 * got:.1f} %" for name, (got, _) in shares.items())
        )
    return told
