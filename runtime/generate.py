"""The generation loop: prefill, decode one, choose one, until EOS or the limit."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from model.architectures import Model
from model.state import State
from runtime.decoding import Step, eager
from runtime.sampling import Likelihood, Sampling, likelihood, sample


def prefill(model: Model, state: State, tokens: Sequence[int], progress: Callable[[int], None]) -> Tensor:
    """Run `tokens` (at least one) in calls of ``state.chunk``; returns the logits after the last, [vocab] float32.

    What is `unread` of a prompt that layers read one after the other is one call. `progress` is called after each with
    the number of tokens it held.
    """
    assert tokens, "prefill of no tokens"
    hidden: Tensor | None = None
    start = 0
    while start < len(tokens):
        stop = start + max(state.chunk, state.unread)
        part = torch.tensor(tokens[start:stop], dtype=torch.int64, device=model.device)
        hidden, start = model(part, state), stop
        progress(len(part))
    assert hidden is not None
    return model.logits(hidden[-1:])[0]


def _agreed(model: Model, token: int) -> int:
    """The token, which is the same on every rank: RankDisagreement otherwise."""
    ranks = model.arithmetic.ranks
    ranks.record("sampled token", None, torch.tensor([token], device=model.device))
    ranks.verify()
    return token


@dataclass
class Generation:
    """One run of `generate`, filled in as it goes: what was produced and how long it took."""

    prompt: int = 0  # tokens run before the first choice
    tokens: list[int] = field(default_factory=list)  # chosen tokens, the final EOS included
    ended: str = "limit"  # "eos" | "limit"
    prefill_s: float = 0.0
    decode_s: float = 0.0  # from the first chosen token to the last
    pending: int | None = None  # the last chosen token, not yet run through the model
    likelihoods: list[Likelihood] = field(default_factory=list)  # of each chosen token, where they are asked for


def generate(  # noqa: PLR0913 (all but the first three by name)
    model: Model,
    state: State,
    prompt: Sequence[int],
    *,
    eos: Collection[int],
    limit: int,
    sampling: Sampling,
    progress: Callable[[int], None],
    record: Generation,
    decode: Step | None = None,
    alternatives: int | None = None,
) -> Iterator[int]:
    """Yield chosen tokens until one of `eos` (not yielded) or `limit` of them, filling `record` on the way.

    The last chosen token is never run through the model: the state ends before it, and `record.pending` names it, so
    that a saved state continues exactly where the run stopped. `decode` runs each of the others, and advances `state`,
    see `runtime.decoding`; None: the model itself. With `alternatives` it is recorded how likely each token was, and so
    many others; None: nothing of that.
    """
    generator, decode = sampling.generator(), decode or eager(model, state)
    started = time.perf_counter()
    logits = prefill(model, state, prompt, progress)
    record.prompt += len(prompt)
    record.prefill_s += time.perf_counter() - started
    started = time.perf_counter()
    for count in range(1, limit + 1):
        token = _agreed(model, sample(logits, sampling, generator))
        record.tokens.append(token)
        if alternatives is not None:
            record.likelihoods.append(likelihood(logits, token, alternatives))
        record.pending, record.decode_s = token, time.perf_counter() - started
        if token in eos:
            record.ended = "eos"
            return
        yield token
        if count < limit:
            logits = decode(token)
