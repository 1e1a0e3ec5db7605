"""Probe: whether the model computes with what the checkpoint's files hold, all of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from model.config import ModelConfig
from model.errors import Tripwire
from model.observe import sites
from model.observe.sites import Site
from probes.finding import Report
from probes.load import page as load_page
from probes.load.effects import without_effect
from probes.load.run import Ran, reached, watch
from probes.load.values import WHOLE, Compared, compare, sample
from probes.probe import Probe, Progress, one_rank
from probes.shared.file_bytes import FileBytes
from probes.subject import Subject, selects_all


@dataclass(frozen=True)
class Load(Probe):
    """Follow every number from the file to the op that multiplies with it."""

    name: ClassVar[str] = "load"
    question: ClassVar[str] = "Does the model compute with what the files hold: all of it, and nothing else?"
    reads: ClassVar[tuple[Site, ...]] = (sites.EMBEDDED, sites.STREAMS, sites.EXPERTS_INPUT, sites.EXPERT_IDS)
    background: ClassVar[str] = """\
A checkpoint is a list of named tensors, and a loader that does not find a name is usually told not to mind. The model
then runs with zeros, with noise, or with what the memory held, at full speed and often fluently: a V4 runtime lost its
indexer for months that way. The other half is decoding. Matrices are stored as 8-bit or 4-bit numbers with a scale for
each block, two of the 4-bit ones in a byte. Take these in the wrong order, or the scale of the block beside, and every
number still has the right size.

So this page follows each number all the way. The **census** says what each stored tensor is. **Values**: numpy reads
the files again, with none of the runtime's code, and builds every number from its bits; the model's own linear op
multiplies each matrix by the identity, and the two must be the same number. **Reads**: in a forward pass every call of
torch is watched, and every byte of every parameter must have been an operand; an expert that no token went to is given
one. **Effects**: each parameter is changed in
turn, and its layer's output must change with it, because what is read may still be thrown away."""
    noticed: ClassVar[str] = """\
Statistics of the weights would not have shown the two classic faults of decoding. Swap the nibbles, and nearly all FP4
numbers are others, yet every block still holds the numbers that it held, in another order: same histogram, same norm,
same largest. Shift the scales by one block, and most numbers stay right, because neighbours often share a scale; a
matrix of a single block cannot tell at all. Only number by number against the file did both show at once.

Watching reads found more than it was built for. With every rank on the first rank's sinks all values held are right and
every parameter is an operand, but a part of each sink vector is never read. That is why a parameter must be read whole.

A table of expert ids that is all zeros is right wherever the file's is zero (its row in the table of what parameters
are stored as has the share): a spot check may well be content."""

    tokens: int = 256  # of the prompt, at least
    effects: bool = True  # whether each parameter is also changed: 210 runs of one layer in the demo

    def needs(self, subject: Subject) -> str | None:
        """All weights in one process."""
        return one_rank(subject, "it takes weights out of the model, and a rank holds only its part of them")

    def vacuous(self, subject: Subject) -> str | None:
        """A compressor's norm is not read before a window closes; an indexer that selects all has no effect."""
        config, count = subject.config, self._count(subject.config)
        if count < (ratio := max(config.compress_ratios)):
            return f"in {count} tokens no window of {ratio} closes"
        if self.effects and count // 2 < selects_all(config):
            return f"in {count} tokens the indexer has no choice, or hardly one: it selects {config.index_topk} entries"
        return None

    def _count(self, config: ModelConfig) -> int:
        """Tokens of the prompt: twice as many entries as are selected, where effects are asked for."""
        wanted = max(self.tokens, *config.compress_ratios, 2 * selects_all(config) * self.effects)
        return min(wanted, config.max_position_embeddings)

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """Census, values, reads, effects: what needs no run comes first."""
        loaded, config = subject.load(), subject.config
        census, names, files = loaded.census, list(loaded.census.mappings), FileBytes(subject.directory)
        chosen = sample(names, files, config.n_routed_experts, subject.seed)
        compared: list[Compared] = []
        for one in compare(loaded.model, census, files, chosen, subject.seed):
            compared.append(one)
            progress(0.2 * len(compared) / len(chosen), f"values of {one.name}")
        ran = self._run(subject, names, files, progress)
        progress(1.0, "done")
        findings = (
            *load_page.census_findings(census, files, config),
            *load_page.value_findings(compared, config),
            *load_page.run_findings(loaded.model, names, ran),
        )
        parts = (
            load_page.forms(census, compared),
            load_page.stored(census),
            load_page.layers(config, names, compared, ran),
            *load_page.not_reached(ran),
        )
        return Report(load_page.summary(census, compared, ran), findings, parts, load_page.NOT_CLAIMED)

    def _run(self, subject: Subject, names: Sequence[str], files: FileBytes, progress: Progress) -> Ran:
        """Reads and effects. A tripwire ends them and not the probe: what was compared before says more than it."""
        ran, model, chunk = Ran(), subject.model, subject.options.prefill_chunk
        tokens = subject.tokens(self._count(subject.config))
        progress(0.2, f"a prompt of {len(tokens)} tokens, watched")
        try:
            watch(model, names, tokens, chunk, ran)
            if self.effects and files.data_bytes <= WHOLE:
                asked = [name for name in names if reached(name, ran.experts)]
                ran.ineffective = []
                for done, (name, same) in enumerate(without_effect(model, asked, tokens, chunk, subject.seed)):
                    ran.ineffective += [name] if same else []
                    progress(0.3 + 0.7 * done / len(asked), f"{name} changed")
        except Tripwire as trip:
            ran.tripped = trip
        return ran


FULL = Load()
QUICK = Load(effects=False)
