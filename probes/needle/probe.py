"""Probe `needle`: codes told once in a document are found again, at every depth and length, and by selection alone."""

from dataclasses import dataclass
from typing import ClassVar

from model.config import LayerKind
from model.observe.sites import Site
from probes.ablations import random_selection, without_entries
from probes.demo_language.prompts import Prompt, common_prompts, needle_prompts
from probes.finding import Report
from probes.needle.answers import Answer, answers
from probes.needle.report import RANDOM, RUN, WINDOW, WORDS, WORDS_WINDOW, report
from probes.probe import Probe, Progress, room
from probes.subject import Subject

Documents = list[tuple[int, Prompt]]  # with the length that each was asked for


@dataclass(frozen=True)
class Needle(Probe):
    """Ask documents of the demo language for codes told once in them; the fields are knobs."""

    name: ClassVar[str] = "needle"
    question: ClassVar[str] = "Is a code told once found again at every depth and length, and only by selecting it?"
    reads: ClassVar[tuple[Site, ...]] = ()
    background: ClassVar[str] = """\
A CSA layer remembers a long text as one entry per four tokens and attends, for each token, to the few that its indexer
selects. A runtime whose indexer is off, or ranks by the wrong numbers, still writes fluent text and answers short
prompts, because the sliding window holds those. What it loses is a detail told once, long ago.

So documents of filler tell people's codes, each once, and end with questions for them ("The code of Alice is"). An
answer counts when the right code has the highest logit, the words before it being given. In the run itself each
question is a call of its own, so that its answer is read where generation reads it, off the last row of a call, at
prompt lengths of every residue: one public fault gave a wrong last digit at one prompt length in four.

The same documents are run with a *random selection* (as many entries, drawn at random) and with the *window only*. If
those found the codes too, the task would not need the selection, and the run would show nothing. HCA layers have a task
of their own: the most common word of four in the whole text, which no small selection holds."""
    noticed: ClassVar[str] = """\
- Most injected faults that no tripwire stops pass here (see faults.md): a wrong RoPE base, a dropped YaRN, entries
  without rotation, a ring read one row off, a transposed mHC matrix, a dropped ReLU, a few lost keys, FP4 nibbles
  swapped. A needle test that passes says little about a runtime. This one is for the indexer; the other pages are for
  the rest.
- Where a most common word is wrong, it is the checkpoint's error: transformers says the same from the same weights.
  demo-checkpoint.md asks the same of other documents, drawn from other seeds, and of other lengths, and all are right
  there.
- A random selection finds some of the codes in short documents, where it is a large part of all entries, and none in
  long ones."""

    # (length of documents in tokens, how many, codes asked for in each)
    codes: tuple[tuple[int, int, int], ...] = ((256, 8, 8), (1024, 4, 24), (4096, 2, 24), (8192, 2, 24))
    # (length of documents in tokens, how many); three words are asked for in each
    words: tuple[tuple[int, int], ...] = ((512, 4), (2048, 3))

    def needs(self, subject: Subject) -> str | None:
        """Say why this checkpoint cannot be asked."""
        if not subject.speaks_demo_language:
            return "the checkpoint does not speak the demo language: no document has answers that it could know"
        if LayerKind.CSA not in subject.config.layer_kinds:
            return "the model has no CSA layer, so there is no selection to find anything by"
        if subject.prompt is not None:
            return "it makes its own documents, and would not read the given text"
        return room(subject, max(length for length, *_ in (*self.codes, *self.words)))

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """Ask for codes with the run's selection, a random one and none; for words with HCA layers and without."""
        ops, seed = subject.ops, subject.seed
        codes = [
            (length, prompt)
            for length, count, questions in self.codes
            for prompt in needle_prompts(length, count, seed, questions)
        ]
        words = [(length, prompt) for length, count in self.words for prompt in common_prompts(length, count, seed)]
        plan = [
            (RUN, codes, ops),
            (RANDOM, codes, random_selection(ops, seed)),
            (WINDOW, codes, without_entries(ops, csa=True, hca=False)),
        ]
        if LayerKind.HCA in subject.config.layer_kinds:
            plan += [(WORDS, words, ops), (WORDS_WINDOW, words, without_entries(ops, csa=False, hca=True))]
        whole = sum(len(prompt.ids) for _, documents, _ in plan for _, prompt in documents)
        done, found = 0, dict[str, list[Answer]]()
        for way, documents, changed in plan:
            model, found[way] = subject.load(ops=changed).model, []
            for length, prompt in documents:
                progress(done / whole, f"{way}, {length} tokens")
                found[way] += answers(model, prompt, length, subject.options.prefill_chunk, apart=way == RUN)
                done += len(prompt.ids)
        return report(found)


FULL = Needle()
QUICK = Needle(codes=((512, 1, 8),), words=((256, 2),))
