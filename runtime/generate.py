"""The generation loop: prefill, decode one (with what is drafted behind it), choose, until EOS or the limit."""

import time
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fathom.model.architectures import Model
from fathom.model.state import State
from fathom.runtime.decoding import Step, eager
from fathom.runtime.drafting import Drafting
from fathom.runtime.sampling import Likelihood, Sampling, likelihood, sample


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
    calls: int = 0  # of the model, behind the prompt, where tokens are drafted
    drafted: list[int] = field(default_factory=list)  # drafted tokens, by position in the draft
    accepted: list[int] = field(default_factory=list)  # of them those accepted

    def choose(self, token: int, logits: Tensor, alternatives: int | None) -> None:
        """Note a token that was chosen from logits [vocab], and how likely it was where that is asked for."""
        self.tokens.append(token)
        self.pending = token
        if alternatives is not None:
            self.likelihoods.append(likelihood(logits, token, alternatives))

    def count(self, draft: Sequence[int]) -> None:
        """Count a call of the model and what it runs of a draft."""
        self.calls += 1
        more = [0] * (len(draft) - len(self.drafted))
        self.drafted, self.accepted = self.drafted + more, self.accepted + more
        for place in range(len(draft)):
            self.drafted[place] += 1


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
    drafting: Drafting | None = None,
    before: Sequence[int] = (),
    alternatives: int | None = None,
) -> Iterator[int]:
    """Yield chosen tokens until one of `eos` (not yielded) or `limit` of them, filling `record` on the way.

    The last chosen token is never run through the model: the state ends before it, and `record.pending` names it, so
    that a saved state continues exactly where the run stopped; also where whoever takes the tokens stops. `decode` runs
    each of the others, and advances `state`, see `runtime.decoding`; None: the model itself. With `drafting` they are
    run together with what is drafted behind them, by a state that can go back so far; the tokens are the same. `before`
    are tokens that the state holds, where they are known: drafters may look among them. With
    `alternatives` it is recorded how likely each token was, and so many others; None: nothing of that.
    """
    assert drafting is None or state.kept >= drafting.most, f"a state that goes back {state.kept} tokens"
    with nullcontext() if drafting is None else drafting.listening(model):
        generator, decode = sampling.generator(), decode or eager(model, state)
        started = time.perf_counter()
        rows = prefill(model, state, prompt, progress)[None]  # [n, vocab]: after the last token run, and drafted ones
        record.prompt += len(prompt)
        record.prefill_s += time.perf_counter() - started
        started = time.perf_counter()
        sequence, drafted = array("q", [*before, *prompt]), list[int]()
        while True:
            for row, logits in enumerate(rows):
                token = _agreed(model, sample(logits, sampling, generator))
                record.choose(token, logits, alternatives)
                record.decode_s = time.perf_counter() - started
                sequence.append(token)
                ended = token in eos or len(record.tokens) == limit
                accepted = not ended and drafted[row : row + 1] == [token]
                stands = state.position - len(drafted) + row  # of the token: how many were run before it
                if accepted:
                    record.accepted[row] += 1
                elif drafted:
                    state.rewind(stands)
                    drafted = []
                if token in eos:
                    record.ended = "eos"
                    return
                try:
                    yield token
                except BaseException:  # whoever takes the tokens wants no more
                    if drafted:
                        state.rewind(stands)
                    raise
                if ended:
                    return
                if not accepted:
                    break
            drafted = [] if drafting is None else _drafted(drafting, state, sequence, limit, record)
            rows = _verified(model, state, [token, *drafted]) if drafted else decode(token)[None]


def _drafted(drafting: Drafting, state: State, sequence: "array[int]", limit: int, record: Generation) -> list[int]:
    """What is drafted for the next call, which leaves room in the state and chooses one token more: often nothing."""
    room = min(drafting.most, limit - len(record.tokens) - 1, state.max_context - state.position - 1)
    drafted = drafting.drafter(sequence, room) if room > 0 else []
    record.count(drafted)
    return drafted


def _verified(model: Model, state: State, tokens: Sequence[int]) -> Tensor:
    """Logits after each of some tokens that are run in one call: [n, vocab] float32."""
    return model.logits(model(torch.tensor(tokens, dtype=torch.int64, device=model.device), state))
