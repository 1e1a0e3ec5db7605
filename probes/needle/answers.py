"""Questions of the demo language put to a model, and its answers: by how much they are right, and from how far back."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from model.transformer import Transformer
from probes.demo_language.prompts import Prompt


class Answer(NamedTuple):
    """One question, answered."""

    length: int  # of the document, as it was asked for
    read: int  # tokens read before the answer: the length of a prompt that ends there
    depth: float  # how far back the value was told: 0 at the start of those tokens, 1 at their end
    margin: float  # logit of the right token above the best of the others

    @property
    def right(self) -> bool:
        """Whether greedy decoding says it."""
        return self.margin > 0


def calls(prompt: Prompt, chunk: int, *, apart: bool) -> list[int]:
    """Lengths of the calls in which a prompt is run; `apart` ends one behind every question."""
    ends = {*range(chunk, len(prompt.ids), chunk), len(prompt.ids)}
    if apart:
        ends |= {answer.position + 1 for answer in prompt.answers}
    ordered = sorted(ends)
    return [end - start for start, end in zip([0, *ordered], ordered, strict=False)]


def answers(model: Transformer, prompt: Prompt, length: int, chunk: int, *, apart: bool) -> Iterator[Answer]:
    """Run a prompt and yield what the model makes of each of its questions, the words before each answer given."""
    ids = torch.tensor(prompt.ids, device=model.device)
    state = model.new_state(len(ids), chunk)
    due = list(prompt.answers)
    for part in ids.split(calls(prompt, chunk, apart=apart)):
        first = state.position
        hidden = model(part, state)
        while due and due[0].position < state.position:
            answer = due.pop(0)
            logits = model.logits(hidden[answer.position - first][None])[0]
            best = logits.topk(2)
            wrong = best.values[int(best.indices[0] == answer.token)]
            depth = max(answer.source, 0) / answer.position
            yield Answer(length, answer.position + 1, depth, (logits[answer.token] - wrong).item())
    assert not due, f"{len(due)} questions stand behind the prompt's end"
