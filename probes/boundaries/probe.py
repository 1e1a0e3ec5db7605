"""Boundaries: whether it matters how a prompt was cut into calls."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from model.config import ModelConfig
from model.observe.sites import Site
from model.transformer import Transformer
from probes.boundaries.cuts import Cut, Outcome, Tally, compared, first_place, prefill_then_decode, prefixes
from probes.finding import JSON, Finding, Report, Table, at_most, exactly, judged, measured
from probes.probe import Probe, Progress, room
from probes.shared.trace import OF_TOKENS
from probes.subject import Subject, run_tokens

# fp32 and fp64 rank the same entries unless two scores are within an fp32 rounding of a sum, about one row in thousands
# where the last entry selected is as close to the first that is not.
UNEQUAL_SELECTIONS = 0.01
SLOW = 16  # calls of fewer tokens are run up to `small_upto` only


@dataclass(frozen=True)
class Boundaries(Probe):
    """The same prompts in calls of many sizes, bit by bit."""

    name: ClassVar[str] = "boundaries"
    question: ClassVar[str] = "Does it matter how a prompt is cut into calls, or where prefill ends and decode begins?"
    reads: ClassVar[tuple[Site, ...]] = OF_TOKENS
    background: ClassVar[str] = """\
A prompt is run in calls: prefill takes a chunk of tokens at a time, decode one. Between calls everything that later
tokens need must be carried: the ring with the KV of the last tokens, the compressed entries and index keys, and the
*frontier* of each compressor, the tokens of the block that is not finished yet. What is lost or misplaced there depends
on where the cut falls within a block of 4 or of 128 tokens. Short prompts in one call never show it, and of longer ones
only those that end at an unlucky length do, which is how such faults stay.

The probe runs prompts of chosen lengths in one call and again in calls of other sizes, and compares every output row,
the logits, and every part of every cache. Two correct runs in bf16 differ in last bits, because fp32 sums are taken in
another order, and within a few layers in percents, because a last bit crosses an FP8 boundary. A bound that allows for
this would hide a lost token. So all sums are taken in fp64 and rounded once, and the comparison is for equal bits:
rings, frontiers, positions and the order of calls are the run's own. The run's own attention and selection are then
given the same arguments in every one of these calls, and may differ from the exact ones by one rounding."""
    noticed: ClassVar[str] = """\
Not one bit differs over all cuts and all prefills that were decoded on: the hash in the last column is the same whether
a prompt came in one call or token by token. We had expected to need some excuse for bf16, and with sums in fp64 there
is none to make.

The run's own arithmetic is another matter, as the findings *as run* show: a matrix product with other rows may sum in
another order, and a number then falls on the other side of a bf16 rounding."""

    chunks: tuple[int, ...] = (1, 3, 4, 127, 128, 129, 512)
    # All residues of 4 with nothing before them, the middle of a block of 128, and around one, two and four of them.
    lengths: tuple[int, ...] = (
        *(1, 2, 3, 4, 5, 6, 7, 8, 63, 66, 97, 124, 125, 126, 127, 128, 129, 130, 131, 132, 133),
        *(253, 254, 255, 256, 257, 258, 259, 260, 512, 513, 515, 518),
    )
    # longest prompt in calls of fewer than 16 tokens, which take most of the time; more where the window is longer
    small_upto: int = 260
    decoded: int = 3  # tokens one by one after a prefill

    def needs(self, subject: Subject) -> str | None:
        """Positions for the longest prompt."""
        return room(subject, self._lengths(subject.config)[-1] + self.decoded)

    def vacuous(self, subject: Subject) -> str | None:
        """Without a ring that wraps, nothing is carried in it that could be lost."""
        window = subject.config.sliding_window
        if not any(window + cut.chunk - 1 < cut.length for cut in self._grid(subject.config)):
            return f"no ring wraps: the window has {window} tokens, and no prompt is longer than it and a call"
        return None

    def _lengths(self, config: ModelConfig) -> list[int]:
        """The lengths asked for, one that passes a block, and one whose ring wraps in short calls; ascending."""
        return sorted({*self.lengths, max(config.compress_ratios) + 3, config.sliding_window + 5})

    def _grid(self, config: ModelConfig) -> Iterator[Cut]:
        """Every cut, with nothing different yet."""
        for chunk in self.chunks:
            for length in self._lengths(config):
                if chunk < length and (chunk >= SLOW or length <= max(self.small_upto, config.sliding_window + 5)):
                    yield Cut(length, chunk, None, logits=False, parts=())

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """Run the grid."""
        tally = Tally()
        model = subject.load(subject.with_options(dtype="bf16"), tally.watched(subject.ops)).model
        config = subject.config
        lengths = self._lengths(config)
        longest = lengths[-1]
        tokens = subject.tokens(longest + self.decoded)
        ids = torch.tensor(tokens, device=model.device)
        whole: dict[int, Outcome] = {}
        decode = {}
        for done, length in enumerate(lengths):
            progress(0.25 * done / len(lengths), f"{length} tokens in one call")
            whole[length], decode[length] = prefill_then_decode(model, ids, length, self.decoded)
        everything, _ = prefill_then_decode(model, ids, len(ids), 0)
        late = [
            length
            for length, rows in decode.items()
            if not torch.equal(rows, everything.hidden[length : length + self.decoded])
        ]
        cuts = []
        for done, chunk in enumerate(self.chunks):
            progress(0.25 + 0.7 * done / len(self.chunks), f"calls of {chunk}")
            cut = [one.length for one in self._grid(config) if one.chunk == chunk]
            found = prefixes(model, ids, chunk, cut) if cut else ()
            cuts += [compared(length, chunk, one, whole[length]) for length, one in zip(cut, found, strict=True)]
        progress(0.95, "the run's own arithmetic")
        findings = [*self._judge(model, tokens, cuts, late, len(lengths)), *_own(tally), *self._drift(subject, tokens)]
        unequal = sum(not cut.equal for cut in cuts)
        summary = (
            f"{len(cuts)} ways to cut prompts of {lengths[0]} to {longest} tokens into calls of"
            f" {', '.join(str(chunk) for chunk in self.chunks)}: {unequal} leave another bit in an output row, the"
            f" logits or a cache than the prompt in one call; of {len(decode)} prompts that were decoded on,"
            f" {len(late)} went another way than prefill."
        )
        parts = (self._table(cuts, whole, late), _caches(cuts))
        return Report(summary, tuple(findings), parts, NOT_CLAIMED)

    def _judge(
        self, model: Transformer, tokens: list[int], cuts: Sequence[Cut], late: Sequence[int], prompts: int
    ) -> Iterator[Finding]:
        """Findings about bits."""
        wrong = [cut for cut in cuts if cut.token is not None]
        evidence: dict[str, JSON] = {}
        if wrong:
            worst = min(wrong, key=lambda cut: (cut.length, cut.chunk))
            place = first_place(model, tokens[: worst.length], worst.chunk)
            evidence = {"length": worst.length, "chunk": worst.chunk, "token": worst.token, "first place": place}
        yield judged(f"cuts, of {len(cuts)}, with an output row that differs", len(wrong), exactly(0), **evidence)
        logits = [cut for cut in cuts if cut.logits]
        evidence = {"length": logits[0].length, "chunk": logits[0].chunk} if logits else {}
        yield judged("cuts whose last logits differ", len(logits), exactly(0), **evidence)
        for component in _components(model):
            hit = [(cut, key) for cut in cuts for key in cut.parts if key[1].startswith(f"{component}.")]
            evidence = {}
            if hit:
                cut, (layer, part) = min(hit, key=lambda one: (one[0].length, one[0].chunk))
                evidence = {"length": cut.length, "chunk": cut.chunk, "layer": layer, "part": part}
            count = len({cut for cut, _ in hit})
            what = f"cuts that leave something else in the caches' {component.replace('_', ' ')}"
            yield judged(what, count, exactly(0), **evidence)
        evidence = {"length": late[0], "mod 4": late[0] % 4, "mod 128": late[0] % 128} if late else {}
        what = f"prompts, of {prompts}, whose decode of {self.decoded} more differs from prefill"
        yield judged(what, len(late), exactly(0), **evidence)

    def _drift(self, subject: Subject, tokens: list[int]) -> Iterator[Finding]:
        """How far apart the run itself ends up, in its own arithmetic: no bound, see the background."""
        model = subject.model
        whole = model.logits(run_tokens(model, tokens, len(tokens))[0])
        for chunk in self.chunks:
            if SLOW <= chunk < len(tokens):
                logits = model.logits(run_tokens(model, tokens, chunk)[0])
                distance = ((logits - whole).norm() / whole.norm()).item()
                same = (logits.argmax(1) == whole.argmax(1)).float().mean().item()
                what = f"as run, in calls of {chunk}: distance of all logits from those in one call"
                yield measured(what, distance, "of their norm", same_argmax=round(same, 4))

    def _table(self, cuts: Sequence[Cut], whole: dict[int, Outcome], late: Sequence[int]) -> Table:
        """Return the grid, by length."""
        by_place = {(cut.length, cut.chunk): cut for cut in cuts}
        rows: list[list[float | str | None]] = []
        for length in sorted(whole):
            cells = [by_place.get((length, chunk)) for chunk in self.chunks]
            marks = [None if cut is None else _mark(cut) for cut in cells]
            decode = "differs" if length in late else "equal"
            rows.append([length, length % 4, length % 128, *marks, decode, whole[length].hash])
        return Table(
            "Prompts in calls of so many tokens, against one call",
            ("tokens", "mod 4", "mod 128", *(str(chunk) for chunk in self.chunks), "then decode", "hash of all caches"),
            rows,
            "*equal*: every output row, the logits and every part of every cache, bit by bit; the hash is that of all"
            " these cuts then. Otherwise the first token whose output differs, or *caches* where only these do. Empty:"
            f" the prompt is one call, or not run to save time. *then decode*: {self.decoded} more tokens, one by one,"
            " against a prefill that includes them.",
        )


def _mark(cut: Cut) -> str:
    if cut.equal:
        return "equal"
    return "caches" if cut.token is None else f"token {cut.token}"


def _components(model: Transformer) -> list[str]:
    """Cache components that the model's layers have."""
    state = model.new_state(1, 1)
    return list(dict.fromkeys(name for cache in state.layers for name in cache.components))


def _own(tally: Tally) -> Iterator[Finding]:
    """Judge what the run's own ops made of the same arguments."""
    yield judged(
        f"the run's own attention in the same {tally.calls} calls, largest difference from fp64",
        tally.worst,
        at_most(1.0),
        "of a bf16 rounding",
    )
    if tally.rows:
        yield judged(
            f"the run's own selections for the same {tally.rows} rows, share that differ from fp64",
            tally.unequal / tally.rows,
            at_most(UNEQUAL_SELECTIONS),
        )


def _caches(cuts: Sequence[Cut]) -> Table:
    """Return how many cuts left something else in each part of the caches, by chunk."""
    chunks = sorted({cut.chunk for cut in cuts})
    parts = sorted({part for cut in cuts for _, part in cut.parts})

    def count(part: str, chunk: int) -> int:
        return sum(part in {name for _, name in cut.parts} for cut in cuts if cut.chunk == chunk)

    rows: list[tuple[float | str, ...]] = [(part, *(count(part, chunk) for chunk in chunks)) for part in parts]
    return Table(
        "Cuts that leave something else in a cache",
        ("part", *(f"calls of {chunk}" for chunk in chunks)),
        rows or [("all parts of all caches", *(0 for _ in chunks))],
    )


NOT_CLAIMED = """\
That the run's own bf16 arithmetic is the same for every cut: it is not, as the measured distances show, and cannot be
while fp32 sums change their order. That what all cuts agree on is right: a fault that is the same in every call is for
other probes. Lengths between the listed ones, and residues of 128 that do not occur among them, were not run."""

FULL = Boundaries()
QUICK = Boundaries(chunks=(3, 127), lengths=(), small_upto=0, decoded=1)
