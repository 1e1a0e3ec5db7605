"""One prompt cut into calls in different ways, and what of it comes out different."""

import copy
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.formats.stored import Rows
from kernels.ops import Ops
from model.state import State
from model.transformer import Transformer
from probes.shared.exact import exact
from probes.shared.trace import OF_TOKENS, cache_digests, first_difference, joined, row_digests, traced
from probes.subject import run_tokens


class Outcome(NamedTuple):
    """What a prompt left behind, as digests."""

    hidden: Tensor  # [t] of the model's output
    logits: Tensor  # [1] of the last row's
    caches: dict[tuple[int, str], Tensor]  # by layer and part: [rows]

    @property
    def hash(self) -> str:
        """All caches in one short string."""
        digest = hashlib.blake2b(digest_size=6)
        for (layer, part), rows in self.caches.items():
            digest.update(f"{layer} {part} {rows.tolist()}".encode())
        return digest.hexdigest()


class Cut(NamedTuple):
    """A prompt of `length` in calls of `chunk`, against the same prompt in one call."""

    length: int
    chunk: int
    token: int | None  # first whose output row differs
    logits: bool  # whether those of the last token differ
    parts: tuple[tuple[int, str], ...]  # of the caches that differ: layer, component.part

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return self.token is None and not self.logits and not self.parts


def outcome(model: Transformer, hidden: Tensor, state: State) -> Outcome:
    """Digest the output rows [t, hidden] and the state that they left."""
    return Outcome(row_digests(hidden), row_digests(model.logits(hidden[-1:])), cache_digests(state))


def compared(length: int, chunk: int, found: Outcome, expected: Outcome) -> Cut:
    """Compare a cut prompt with the whole one."""
    off = (found.hidden != expected.hidden).nonzero()
    parts = [key for key, rows in expected.caches.items() if not torch.equal(found.caches[key], rows)]
    logits = not torch.equal(found.logits, expected.logits)
    return Cut(length, chunk, int(off[0]) if len(off) else None, logits, tuple(parts))


@torch.inference_mode()
def prefixes(model: Transformer, tokens: Tensor, chunk: int, lengths: Sequence[int]) -> Iterator[Outcome]:
    """Run each of the prompts ``tokens[:length]``, `lengths` ascending, in calls of `chunk` and one for the rest.

    They share their full calls: at each length a copy of the state takes the rest.
    """
    state = model.new_state(lengths[-1], chunk)
    rows: list[Tensor] = []
    for length in lengths:
        while state.position + chunk <= length:
            rows.append(model(tokens[state.position : state.position + chunk], state))
        rest, last = tokens[state.position : length], state
        tail = []
        if len(rest):
            last = copy.deepcopy(state)
            tail.append(model(rest, last))
        yield outcome(model, torch.cat(rows + tail), last)


@torch.inference_mode()
def prefill_then_decode(model: Transformer, tokens: Tensor, length: int, more: int) -> tuple[Outcome, Tensor]:
    """Run ``tokens[:length]`` in one call, then `more` tokens one by one; their output rows as digests [more]."""
    state = model.new_state(length + more, length)
    before = outcome(model, model(tokens[:length], state), state)
    rows = [row_digests(model(tokens[at : at + 1], state)) for at in range(length, length + more)]
    return before, torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)


def first_place(model: Transformer, tokens: list[int], chunk: int) -> str:
    """Where a prompt in calls of `chunk` first departs from the prompt in one call, in the order of computation."""
    runs = []
    for size in (len(tokens), chunk):
        with traced(model, OF_TOKENS) as passed:
            run_tokens(model, tokens, size)
        runs.append(joined(passed))
    return str(first_difference(runs[0], runs[1]) or "nowhere, when the two are run again")


class Tally:
    """How the run's own attention and selection differed from the exact ones, given the same arguments."""

    def __init__(self) -> None:
        self.calls, self.rows, self.unequal = 0, 0, 0  # attend calls; rows selected for, and those chosen differently
        self.worst = 0.0  # of attend: |difference| over what is allowed

    def watched(self, ops: Ops) -> Ops:
        """Exact ops that also compute `ops`' own attention and selection, and note the difference."""
        exactly = exact(ops)

        def attend(*given: Any) -> Tensor:
            out, own = exactly.attend(*given), ops.attend(*given)
            # one rounding to bf16 (8 bits) may fall on the other side, and an fp32 sum of a few hundred terms may be
            # off by 2^-16 of the largest numbers that go into it
            allowed = out.abs().float() * 2**-7 + out.abs().amax(-1, keepdim=True).float() * 2**-16
            off = (own.float() - out.float()).abs()
            self.calls += 1
            shares = torch.where(off == 0, 0.0, off / allowed)
            self.worst = shares.max().clamp(min=self.worst).item()  # a NaN stays, as it would not in Python's max
            return out

        def select(q: Tensor, head_weights: Tensor, keys: Rows, first: int, ratio: int, k: int) -> Tensor:
            out = exactly.select(q, head_weights, keys, first, ratio, k)
            own = ops.select(q, head_weights, keys, first, ratio, k)
            self.rows += len(out)
            self.unequal += int((own != out).any(1).sum())
            return out

        return exactly._replace(attend=attend, select=select)
