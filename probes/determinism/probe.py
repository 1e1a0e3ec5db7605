"""Determinism: whether the same prompt gives the same bits, whatever ran before it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from model.config import ModelConfig
from model.errors import Tripwire
from model.observe import sites
from model.observe.sites import Site
from model.state import State
from model.transformer import Transformer
from probes.finding import JSON, Finding, Report, Table, broken, exactly, judged, measured, vacuous
from probes.probe import Probe, Progress, room
from probes.shared.trace import Passed, cache_digests, named, traced
from probes.subject import Subject


class Seen(NamedTuple):
    """One run, as digests."""

    passed: list[Passed]  # every tensor at every site, in order
    caches: dict[tuple[int, str], Tensor]  # what it left, by layer and part


class Verdict(NamedTuple):
    """One run against the first one."""

    name: str
    tensors: int  # compared
    differing: int
    first: str  # place of the first that differs, or why there was nothing to compare
    parts: tuple[str, ...]  # of the caches that differ


@dataclass(frozen=True)
class Determinism(Probe):
    """The same prompt again and again, with other things in between."""

    name: ClassVar[str] = "determinism"
    question: ClassVar[str] = "Does the same prompt give the same bits again, and again after another prompt?"
    reads: ClassVar[tuple[Site, ...]] = sites.SITES
    background: ClassVar[str] = """\
A run that is not repeatable cannot be debugged, and greedy output that depends on what else was running is a fault that
users see first. Two causes are common. A kernel may race, or read memory that nobody wrote; the result is then right
most of the time. Or something survives from one sequence to the next: a compressor's open window that is not cleared, a
ring that still holds another prompt's KV, a workspace that is shared. The reference code itself has one of the second
kind, as far as we can tell from reading it: the compressor's state is not cleared when a new sequence begins.

The probe runs prompt A several times and takes a digest of every tensor at every site and of every cache. Then it puts
something in A's way: another prompt before it, another prompt in turns with it (a call of one, a call of the other), a
save and a restore in the middle, and memory that the last sequence left full of NaN. Every time A has to give the same
bits at the same places. The other prompt repeats the token with the largest embedding, so that what leaks from it is
not small."""
    noticed: ClassVar[str] = """\
Nothing differed. And yet the NaN that a finished sequence leaves behind does come back: most of the numbers in newly
allocated buffers of a state's sizes were NaN. A cache that was made without being cleared, or a read beyond what was
written, would meet them.

The run that is saved and restored has caught something that we did not build it for. With every read of the ring off
by one row (one of the injected faults) all plain repetitions agree, and only the restored run departs: the row before
the oldest that a token may see is not saved, because nobody should read it."""

    tokens: int = 300  # of A, at least: two blocks of 128, and a ring that wraps
    decoded: int = 4  # of these, run one by one at the end
    chunk: int = 64
    repeats: int = 3

    def needs(self, subject: Subject) -> str | None:
        """A prompt that leaves the window, and in which a block of each kind is finished and passed."""
        return room(subject, self._length(subject.config))

    def vacuous(self, subject: Subject) -> str | None:
        """A run is compared with another."""
        del subject
        return "one run has nothing to be compared with" if self.repeats < 2 else None

    def _length(self, config: ModelConfig) -> int:
        return max(self.tokens, max(config.sliding_window, *config.compress_ratios) + 4)

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """Run A in all its circumstances."""
        model = subject.model
        length = self._length(subject.config)
        a = self._calls(torch.tensor(subject.tokens(length), device=model.device))
        ranks = model.arithmetic.ranks
        norms = ranks.whole(model.embedding.weight.float().norm(dim=1), 0, ranks.shards.vocabulary)
        loudest = norms.argmax()
        b = self._calls(loudest.repeat(length))
        progress(0.0, "prompt A")
        first = run(model, a)
        verdicts = []
        for again in range(2, self.repeats + 1):
            progress(0.5 * (again - 1) / self.repeats, f"prompt A, run {again}")
            verdicts.append(against(first, f"run {again}", run(model, a)))
        progress(0.5, "prompt B, then A")
        other = run(model, b)
        verdicts.append(against(first, "after prompt B", run(model, a)))
        progress(0.65, "A and B in turns")
        verdicts.append(against(first, "in turns with B", in_turns(model, a, b)))
        progress(0.8, "A, saved and restored")
        verdicts.append(against(first, "saved and restored half way", restored(model, a, b)))
        progress(0.9, "A in memory that held NaN")
        stale = poison(model, b)
        try:
            verdicts.append(against(first, "in memory that held NaN", run(model, a)))
        except Tripwire as trip:  # what the earlier verdicts found should not be lost
            verdicts.append(Verdict("in memory that held NaN", 0, 1, str(trip), ()))
        findings = [finding for verdict in verdicts for finding in _judge(verdict)]
        findings.append(measured("share of NaN in new memory that nobody has written yet", stale))
        if all(torch.equal(one.rows, two.rows) for one, two in zip(first.passed, other.passed, strict=False)):
            findings.append(vacuous("prompt B differs from A", "B gave the same tensors: it could leave nothing else"))
        wrong = [verdict for verdict in verdicts if verdict.differing or verdict.parts]
        summary = (
            f"{len(verdicts)} more runs of one prompt of {length} tokens, in {len(verdicts) - self.repeats + 1} of"
            f" them with something in its way: {len(wrong)} differ from the first run in any of"
            f" {len(first.passed)} tensors at {len({one.site for one in first.passed})} sites or in any cache."
        )
        return Report(summary, tuple(findings), (_table(verdicts, first),), NOT_CLAIMED)

    def _calls(self, ids: Tensor) -> list[Tensor]:
        """Prefill in chunks, then one token at a time."""
        prompt = len(ids) - self.decoded
        return [*ids[:prompt].split(self.chunk), *ids[prompt:].split(1)]


def _state(model: Transformer, calls: Sequence[Tensor]) -> State:
    return model.new_state(sum(len(call) for call in calls), max(len(call) for call in calls))


def _step(model: Transformer, call: Tensor, state: State, passed: list[Passed]) -> None:
    """One call, and the logits of its last token; what passes is appended to `passed`."""
    with traced(model, sites.SITES, state.position) as seen:
        model.logits(model(call, state)[-1:])
    passed += seen


def run(model: Transformer, calls: Sequence[Tensor]) -> Seen:
    """Run a sequence in a new state."""
    state, passed = _state(model, calls), list[Passed]()
    for call in calls:
        _step(model, call, state, passed)
    return Seen(passed, cache_digests(state))


def in_turns(model: Transformer, calls: Sequence[Tensor], others: Sequence[Tensor]) -> Seen:
    """Run a call of another sequence after each call of this one, both states alive."""
    state, other, passed = _state(model, calls), _state(model, others), list[Passed]()
    for call, interruption in zip(calls, others, strict=True):
        _step(model, call, state, passed)
        model(interruption, other)
    return Seen(passed, cache_digests(state))


def restored(model: Transformer, calls: Sequence[Tensor], others: Sequence[Tensor]) -> Seen:
    """Half of a sequence, its state kept as a file would keep it, another sequence, and the rest in a new state."""
    state, passed = _state(model, calls), list[Passed]()
    half = len(calls) // 2
    for call in calls[:half]:
        _step(model, call, state, passed)
    position = state.position
    saved = [{name: part.clone() for name, part in cache.tensors(position).items()} for cache in state.layers]
    model(others[0], _state(model, others))
    state = _state(model, calls)
    for cache, parts in zip(state.layers, saved, strict=True):
        cache.restore(position, parts)
    state.position = position
    for call in calls[half:]:
        _step(model, call, state, passed)
    return Seen(passed, cache_digests(state))


def poison(model: Transformer, calls: Sequence[Tensor]) -> float:
    """Leave memory of the size of a state's buffers behind, full of NaN, for the allocator to hand out again.

    Returns the share of NaN in buffers that are allocated next, without being written: how much of it comes back.
    """
    state = _state(model, calls)
    buffers = [
        buffer
        for cache in state.layers
        for component in cache.components.values()
        for buffer in vars(component).values()
        if isinstance(buffer, Tensor)
    ]
    kinds = [(buffer.shape, buffer.dtype, buffer.device) for buffer in buffers]
    for buffer in buffers:
        buffer.fill_(float("nan"))
    del state, buffers, buffer
    fresh = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in kinds]
    return sum(int(one.isnan().sum()) for one in fresh) / sum(one.numel() for one in fresh)


def against(first: Seen, name: str, again: Seen) -> Verdict:
    """Compare a run with the first one, tensor by tensor in order."""
    places = list(_differing(first.passed, again.passed))
    return Verdict(
        name, len(first.passed), len(places), places[0] if places else "", _parts(first.caches, again.caches)
    )


def _differing(one: Sequence[Passed], other: Sequence[Passed]) -> Iterator[str]:
    """Places of all tensors that differ, in order; a run that takes another way differs from there on."""
    for mine, yours in zip(one, other, strict=False):
        where = f"{named(mine.site.name, mine.layer)} in the call at position {mine.first}"
        if (mine.site, mine.layer, mine.rows.shape) != (yours.site, yours.layer, yours.rows.shape):
            yield f"{where}: there {named(yours.site.name, yours.layer)} of {len(yours.rows)} rows"
        elif (off := (mine.rows != yours.rows).nonzero()).numel():
            yield f"{where}, from row {int(off[0])}, {len(off)} of {len(mine.rows)} rows"
    if len(one) != len(other):
        yield f"{len(other)} tensors in all, {len(one)} in the first run"


def _parts(one: Mapping[tuple[int, str], Tensor], other: Mapping[tuple[int, str], Tensor]) -> tuple[str, ...]:
    return tuple(named(part, layer) for (layer, part), rows in one.items() if not torch.equal(rows, other[layer, part]))


def _judge(verdict: Verdict) -> Iterator[Finding]:
    if not verdict.tensors:
        yield broken(f"tensors that differ, {verdict.name}", f"a tripwire ended the run: {verdict.first}")
        return
    evidence: dict[str, JSON] = {"first": verdict.first} if verdict.first else {}
    what = f"tensors that differ, of {verdict.tensors}, {verdict.name}"
    yield judged(what, verdict.differing, exactly(0), **evidence)
    evidence = {"first": verdict.parts[0]} if verdict.parts else {}
    yield judged(f"cache parts that differ, {verdict.name}", len(verdict.parts), exactly(0), **evidence)


def _table(verdicts: Sequence[Verdict], first: Seen) -> Table:
    rows = [
        (verdict.name, verdict.tensors, verdict.differing, len(verdict.parts), verdict.first or None)
        for verdict in verdicts
    ]
    return Table(
        "Runs of prompt A, against its first",
        ("run", "tensors compared", "that differ", "cache parts that differ", "first place"),
        rows,
        f"{len(first.caches)} parts of caches are compared after each run.",
    )


NOT_CLAIMED = """\
That another number of threads, another machine, op set or torch gives the same bits: it need not, sums change their
order. That two processes agree. Races that a CPU run of this size cannot have.
Memory is filled with NaN before it is freed, but the allocator decides whether the next sequence gets it."""

FULL = Determinism()
QUICK = Determinism(tokens=132, decoded=2, chunk=130, repeats=2)  # restored where prefill ends
