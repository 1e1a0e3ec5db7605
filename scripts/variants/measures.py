"""What is measured of each variant: how near its logits are, what it still knows, what it writes, how fast it is."""

import copy
import time
from collections.abc import Iterator, Sequence
from statistics import median, quantiles
from typing import NamedTuple

import torch
from torch import Tensor

from model.state import State
from probes.demo_language.prompts import Prompt, fact_prompts, needle_prompts
from scripts.variants.runs import Run, calls, read

DECODED = 64  # tokens decoded behind each document
QUESTION = 7  # tokens of "The code of X is", and more: where the last call before a question ends
FACTS = 57  # asked for after a document
WRITTEN, PROMPTS = 150, 8  # greedy tokens, and documents they continue


class Ratio(NamedTuple):
    """Of a variant's speed to the full cache's in the same round: median and quartiles over rounds."""

    median: float
    low: float
    high: float


class Fidelity(NamedTuple):
    """Of the tokens decoded behind one document, against the full cache's on the same tokens."""

    kl: float  # of the variant from the full cache, mean over tokens, nats
    worst: float  # largest
    same: float  # share of tokens with the same likeliest token
    prefill: float  # speed as a multiple of the full cache's, all calls and the compression of the prompt together
    decode: Ratio


def fidelity(runs: Sequence[Run], length: int, chunk: int, seed: int) -> list[Fidelity]:
    """Read one document of `length` tokens in all variants call by call, then decode what follows, given.

    The variants take turns, call for call, so that what else the machine does falls on all of them alike.
    """
    ids = torch.tensor(needle_prompts(length + DECODED + 100, 1, seed)[0].ids[: length + DECODED])
    states = [run.state(length + DECODED, chunk, length) for run in runs]
    prefill, decode = list[list[float]](), list[list[float]]()
    logits: list[list[Tensor]] = [[] for _ in runs]
    for part in ids.split([*calls(length, chunk), *[1] * DECODED]):
        reading = states[0].position < length
        called = [_timed(run, state, part) for run, state in zip(runs, states, strict=True)]
        (prefill if reading else decode).append([seconds for seconds, _ in called])
        for i, (_, hidden) in enumerate(() if reading else called):
            logits[i].append(runs[i].model.logits(hidden)[0])
    full = torch.stack(logits[0])
    out = []
    for i, rows in enumerate(logits):
        own = torch.stack(rows)
        kl = divergence(full, own)
        same = (full.argmax(-1) == own.argmax(-1)).float().mean().item()
        out.append(Fidelity(kl.mean().item(), kl.max().item(), same, whole(prefill, i), ratio(decode, i)))
    return out


def _timed(run: Run, state: State, part: Tensor) -> tuple[float, Tensor]:
    started = time.perf_counter()
    hidden = run.model(part, state)
    return time.perf_counter() - started, hidden


def ratio(times: Sequence[Sequence[float]], i: int) -> Ratio:
    """Speed of variant `i` as a multiple of the first's, over rounds; the first quarter of them warms up."""
    found = [row[0] / row[i] for row in times[len(times) // 4 :]]
    low, _, high = quantiles(found, n=4, method="inclusive") if len(found) > 1 else found * 3
    return Ratio(median(found), low, high)


def whole(times: Sequence[Sequence[float]], i: int) -> float:
    """Speed of variant `i` as a multiple of the first's, over all rounds together: one of them may compress."""
    return sum(row[0] for row in times) / sum(row[i] for row in times)


def divergence(wanted: Tensor, found: Tensor) -> Tensor:
    """KL of `found` from `wanted`, logits [t, vocab]: [t] nats, ``sum_v p (log p - log q)`` with p of `wanted`."""
    p, q = wanted.log_softmax(-1), found.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).clamp(min=0)


class Recall(NamedTuple):
    """Codes asked for behind documents of one length."""

    right: list[bool]
    depth: list[float]  # how far into the document each was told, 0 to 1


def recall(run: Run, length: int, documents: int, questions: int, chunk: int, seed: int) -> Recall:
    """Read documents, and decode their questions token by token, the words before each answer given."""
    right, depth = [], []
    for prompt in needle_prompts(length, documents, seed, questions):
        for answered, where in _answers(run, prompt, chunk):
            right.append(answered)
            depth.append(where)
    return Recall(right, depth)


def _answers(run: Run, prompt: Prompt, chunk: int) -> Iterator[tuple[bool, float]]:
    start = prompt.answers[0].position - QUESTION
    state = run.state(len(prompt.ids), chunk, start)
    read(run, state, prompt.ids[:start], chunk)
    wanted = {answer.position: answer for answer in prompt.answers}
    for position in range(start, len(prompt.ids)):
        hidden = run.model(torch.tensor(prompt.ids[position : position + 1]), state)
        if position in wanted:
            answer = wanted[position]
            yield int(run.model.logits(hidden)[0].argmax()) == answer.token, max(answer.source, 0) / start


def facts(run: Run, length: int, chunk: int, seed: int) -> float:
    """Share of taught facts that are right behind a document of `length` tokens, which holds none of them."""
    document = needle_prompts(length, 1, seed)[0].ids[:length]
    asked = fact_prompts()[:: len(fact_prompts()) // FACTS][:FACTS]
    longest = max(len(prompt.ids) for prompt in asked)
    state = run.state(length + longest, chunk, length)
    read(run, state, document, chunk)
    right = 0
    for prompt in asked:
        here = copy.deepcopy(state)  # each is asked behind the document alone
        hidden = torch.empty(0)
        for token in prompt.ids[1:]:
            hidden = run.model(torch.tensor([token]), here)
        right += int(run.model.logits(hidden)[0].argmax()) == prompt.answer
    return right / len(asked)


def written(run: Run, length: int, chunk: int, seed: int) -> list[list[int]]:
    """Greedy continuations of `PROMPTS` documents of about `length` tokens, `WRITTEN` tokens each, past any EOS."""
    out = []
    for prompt in needle_prompts(length, PROMPTS, seed):
        state = run.state(len(prompt.ids) + WRITTEN, chunk, len(prompt.ids))
        hidden, tokens = read(run, state, prompt.ids, chunk), list[int]()
        for _ in range(WRITTEN):
            tokens.append(int(run.model.logits(hidden)[0].argmax()))
            hidden = run.model(torch.tensor(tokens[-1:]), state)
        out.append(tokens)
    return out


def agreed(wanted: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> list[int]:
    """How many tokens of each continuation are the same, up to the first that differs."""
    return [
        next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
        for one, other in zip(wanted, found, strict=True)
    ]
