"""Experiment `demo-checkpoint`: what the demo checkpoint knows, and which parts of the model it needs for it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from fathom.kernels.ops import Ops
from fathom.model.observe.sites import Site
from fathom.probes.ablations import random_selection, without_entries
from fathom.probes.demo_language.language import NEEDLE_TOKENS
from fathom.probes.demo_language.prompts import SHORTEST, Prompt, common_prompts, fact_prompts, needle_prompts
from fathom.probes.demo_language.words import FACTS, NAMES, RELATIONS
from fathom.probes.evaluation import Run, Share, right_answers
from fathom.probes.finding import Finding, Report, Table, at_least, at_most, judged, measured, vacuous
from fathom.probes.probe import Probe, Progress, room
from fathom.probes.subject import Subject

SHIPPED, RANDOM, NO_CSA, NO_HCA, WINDOW = WAYS = (
    "as shipped",
    "random selection",
    "CSA window only",
    "HCA window only",
    "window alone",
)
TABLE: Final = "What it knows"
FRAME: Final = 2  # tokens around what is told and asked
# The card in model/demo says that it finds what it was trained to find, at every length up to 16,384.
KNOWN = at_least(0.95)
# Half of that is much more than a guess (one code in 90, one word in four) and shows that the part is not needed.
NEEDED: Final = 0.5


def ways(ops: Ops) -> dict[str, Ops]:
    """What is cut out, by the name of its column."""
    return {
        SHIPPED: ops,
        RANDOM: random_selection(ops, seed=0),
        NO_CSA: without_entries(ops, csa=True, hca=False),
        NO_HCA: without_entries(ops, csa=False, hca=True),
        WINDOW: without_entries(ops, csa=True, hca=True),
    }


Shares = Mapping[str, Mapping[str, Share]]  # row (task and length) -> column (way) -> right answers


@dataclass(frozen=True)
class DemoCheckpoint(Probe):
    """Ask for facts, needles and most common words; the fields are knobs."""

    name: ClassVar[str] = "demo-checkpoint"
    question: ClassVar[str] = "What does the demo checkpoint know, and what does it need to know it?"
    reads: ClassVar[tuple[Site, ...]] = ()
    by_name: ClassVar[bool] = True
    background: ClassVar[str] = f"""\
Right answers, greedy, the words before each answer forced. The tasks:

- *facts*: {len(FACTS)} countries, {len(RELATIONS)} relations each, right before the value.
- *needle*: sentences that bind a name to a number, afresh in every document; the question repeats the sentence. Those
  asked for end at least 128 tokens before the first question (a quarter of the document below 512 tokens).
- *most common*: which of a few marker words occurs most often in the whole document. The `needle` probe asks this too,
  of other documents, drawn from other seeds, and counts for itself: a wrong answer there is not in this table.

The columns: *as shipped*, the model as it is, from the stored FP8 and FP4 weights; *random selection*, CSA layers
attend to as many visible entries as ever, but drawn at random; *CSA window only* and *HCA window only*, the layers of
that kind attend to no entry, the others are intact; *window alone*, neither attends to any entry, and what is left is
the sliding window of every layer."""
    noticed: ClassVar[str] = ""

    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096, 8192, 16384)  # of documents
    documents: int = 8  # of up to 1024 tokens; fewer of longer ones
    questions: int = 16  # needles asked for in each document
    apart: int = 1  # one fact in so many is asked for

    def needs(self, subject: Subject) -> str | None:
        """Say why this checkpoint cannot be asked."""
        if not subject.speaks_demo_language:
            return "the checkpoint does not speak the demo language: no document has answers that it could know"
        if self.questions > len(NAMES):
            return f"{self.questions} questions, the language has {len(NAMES)} names to ask for"
        least = max(SHORTEST["common"], 2 * NEEDLE_TOKENS * self.questions + FRAME)
        if (length := min(self.lengths)) < least:
            return f"documents of {length} tokens, for {self.questions} questions one has at least {least}"
        return room(subject, max(self.lengths))

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """Run every prompt in every way."""
        tasks = dict(self.tasks())
        whole = len(WAYS) * sum(len(prompt.ids) for prompts in tasks.values() for prompt in prompts)
        found: dict[str, dict[str, Share]] = {task: {} for task in tasks}
        done = 0
        for way, ops in ways(subject.ops).items():
            run = Run(way, subject.load(ops=ops).model, subject.options.prefill_chunk)
            for task, prompts in tasks.items():
                progress(done / whole, f"{way}, {task}")
                found[task][way] = Share.of(right for prompt in prompts for right in right_answers(run, prompt))
                done += sum(len(prompt.ids) for prompt in prompts)
        return self._report(found)

    def tasks(self) -> Iterator[tuple[str, Sequence[Prompt]]]:
        """Prompts by the name of their row."""
        yield "facts, as text", fact_prompts()[:: self.apart]
        yield "facts, as chat", fact_prompts(chat=True)[:: self.apart]
        for length in self.lengths:
            count = max(2, self.documents * 1024 // max(length, 1024))
            yield f"needle, {length} tokens", needle_prompts(length, count, length, self.questions)
        for length in self.lengths:
            count = max(3, self.documents * 1024 // max(length, 1024))
            yield f"most common, {length} tokens", common_prompts(length, count, length)

    def _report(self, found: Shares) -> Report:
        rows = [
            [f"{task} ({by[SHIPPED].total})", *(f"{100 * by[way].share:.1f}" for way in WAYS)]
            for task, by in found.items()
        ]
        table = Table(TABLE, ("task (questions)", *WAYS), rows, "Right answers in %.")
        worst = {kind: 100 * min(_shares(found, kind, SHIPPED)) for kind in ("needle", "facts", "most common")}
        cut = {way: 100 * max(_shares(found, kind, way)) for kind, way in (("needle", WINDOW), ("most common", NO_HCA))}
        summary = (
            f"In documents of {min(self.lengths)} to {max(self.lengths)} tokens, of numbers told once"
            f" {worst['needle']:.1f} % are found at the worst length; with the window alone {cut[WINDOW]:.1f} % at the"
            f" best. Facts from training: at worst {worst['facts']:.1f} %. The most common word of a document: at worst"
            f" {worst['most common']:.1f} %; with HCA layers cut to their window {cut[NO_HCA]:.1f} % at the best."
        )
        return Report(summary, tuple(_findings(found)), (table,), NOT_CLAIMED)


def _shares(found: Shares, kind: str, way: str) -> list[float]:
    return [by[way].share for task, by in found.items() if task.startswith(kind)]


def _findings(found: Shares) -> Iterator[Finding]:
    """What the model knows, and what it must not know without the part that remembers it."""
    for task, by in found.items():
        yield judged(task, by[SHIPPED].share, KNOWN, questions=by[SHIPPED].total)
    for kind, way in (("needle", NO_CSA), ("needle", WINDOW), ("most common", NO_HCA), ("most common", WINDOW)):
        best, what = max(_shares(found, kind, way)), f"{kind} with {way}, at the best length"
        if best > NEEDED:
            yield vacuous(what, f"{best:.0%} are right all the same, more than {NEEDED:.0%}: the part is not needed")
        else:
            yield judged(what, best, at_most(NEEDED))
    yield measured("needle with random selection, at the best length", max(_shares(found, "needle", RANDOM)))


NOT_CLAIMED: Final = """\
Documents come from the generator that made the training data, with other seeds. The numbers say that each path of the
architecture is needed and works, not that a model of this size understands text. Beyond the lengths it was trained on
(see the card in `model/demo`) the model extrapolates, and a loss there is the model's unless another runtime
disagrees."""

FULL = DemoCheckpoint()
QUICK = DemoCheckpoint(lengths=(256,), documents=1, apart=16)
