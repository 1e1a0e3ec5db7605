"""Right answers of a checkpoint, as the product computes them."""

import torch

from model.llama.transformer import LlamaTransformer
from probes.demo_language.prompts import Prompt, fact_prompts, needle_prompts

QUESTIONS = 8


def right_answers(model: LlamaTransformer, prompt: Prompt, chunk: int) -> list[bool]:
    """For each answer of the prompt, whether the likeliest token after it is the right one; words before are forced."""
    ids = torch.tensor(prompt.ids)
    state = model.new_state(len(ids), min(chunk, len(ids)))
    hidden = torch.cat([model(part, state) for part in ids.split(chunk)])  # one call after the other, in order
    asked = torch.tensor([answer.position for answer in prompt.answers])
    chosen = model.logits(hidden[asked]).argmax(-1).tolist()
    return [token == answer.token for token, answer in zip(chosen, prompt.answers, strict=True)]


def share(model: LlamaTransformer, prompts: list[Prompt], chunk: int = 512) -> tuple[float, int]:
    """Share of right answers over all prompts, and how many answers that is of."""
    right = [answer for prompt in prompts for answer in right_answers(model, prompt, chunk)]
    return sum(right) / len(right), len(right)


def measurements(
    model: LlamaTransformer, lengths: tuple[int, ...], documents: int, seed: int
) -> dict[str, tuple[float, int]]:
    """Shares of right answers by what was asked: facts as text and as chat, codes by the length of the document.

    Codes that are asked for stand at least 128 tokens before the first question (a quarter of a document below 512).
    """
    found = {
        f"facts, {name}": share(model, fact_prompts(chat=chat)) for name, chat in (("text", False), ("chat", True))
    }
    for length in lengths:
        found[f"codes, {length} tokens"] = share(model, needle_prompts(length, documents, seed, QUESTIONS))
    return found
