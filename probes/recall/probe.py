"""Probe `recall`: whether the lightning indexer selects the entries that its own equation ranks first."""

from dataclasses import dataclass
from typing import ClassVar

from model.checkpoint.config_json import CSA_RATIO
from model.config import LayerKind, ModelConfig
from model.observe.observer import listening
from model.observe.sites import Site
from probes.finding import Part, Report
from probes.probe import Probe, Progress, room
from probes.recall import drawn, page
from probes.recall import findings as judge
from probes.recall.rows import SITES, Layer, csa_layers, groups, recorded, sides
from probes.shared.recorder import Recorder
from probes.subject import Subject, run_tokens, selects_all


@dataclass(frozen=True)
class Recall(Probe):
    """Compare each selection with two oracles, at several context lengths and at real dimensions."""

    name: ClassVar[str] = "recall"
    question: ClassVar[str] = "Does the lightning indexer select the entries that score best?"
    reads: ClassVar[tuple[Site, ...]] = SITES
    background: ClassVar[str] = """\
A CSA layer reads its distant past through compressed entries, one for every few tokens, and a token attends only to
the `index_topk` entries that the layer's lightning indexer ranks first. The indexer has many query heads, one key per
entry that all heads share, and a weight per head; an entry scores `sum_h w_h relu(q_h . k)`. Deployed, queries and keys
are turned by a Hadamard matrix and rounded to FP4.

What goes wrong here is silent: any set of entries has the right shape, and the model answers fluently from the wrong
ones. Runtimes have scored zeros because the key compressor was never loaded, cut the shared key into one slice per
head, dropped the ReLU, turned queries but not keys, and read keys in another layout than they were written in. And up
to top-k entries (2048 tokens on V4-Flash, 4096 on V4-Pro) all are selected, and no test shows anything.

So selections are compared with two rankings, for tokens that see more entries than they select. **Oracle A** scores the
same rounded queries and keys in float64: what is lost against it is an error. **Oracle B** scores them as they were
before rounding: what is lost against it is the price of FP4, or nearly everything where only one side was turned.
Where a model is small, the run's own op is also given queries and keys drawn like the model's, at the dimensions of
published models."""
    noticed: ClassVar[str] = """\
**FP4 costs more of the selection than we expected, and more the more entries there are.** Against oracle A not one
entry was missed. Against oracle B recall falls with the number of entries, in the run and on draws at real dimensions,
while the scores stay highly correlated: entries crowd around the k-th best, and a constant error swaps ever more of
them. What is taken instead is nearly as good by the score that is kept, and the needle is found.

**It is the keys.** Rounding moves queries and keys by about the same share of their norm, but keys rounded alone cost
far more recall than queries do. Most of the keys' squared norm is that of their mean: it ranks nothing, all entries
share it, but the steps of FP4 are as coarse as it is large. Rounded about their mean, the keys would give a part of
that back.

**By the bound for oracle A, DeepSeek's own code would fail at long context.** It rounds scores to BF16 before the
top-k, and on the same queries and keys that alone is enough (*A, scores in BF16*). This runtime scores in fp32."""

    lengths: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)  # contexts, in tokens, within one run
    rows: int = 64  # tokens before each length whose selections are compared: each residue of a ratio of 4, 16 times
    drawn_entries: tuple[int, ...] = (1024, 4096, 16384, 65536, 262144)  # the last is a million tokens at ratio 4
    drawn_top_ks: tuple[int, ...] = (512, 1024)  # V4-Flash, V4-Pro
    drawn_tokens: int = 8  # of 64 heads each: 4 million scores of 64 heads at the largest size

    def needs(self, subject: Subject) -> str | None:
        """No CSA layer, or no context at which a token sees more entries than it selects."""
        if LayerKind.CSA not in subject.config.layer_kinds:
            return "the model has no CSA layer, and so no indexer"
        # up to top-k entries, all are selected, whatever they score
        return room(subject, selects_all(subject.config) + CSA_RATIO)

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """Compare the selections of one run, then those of draws that look like it."""
        config, k = subject.config, subject.config.index_topk
        lengths = self._lengths(config)
        layers = self._run(subject, lengths, progress)
        progress(0.4, "comparing with the oracles")
        by_layer = {at.layer: list(groups(at, lengths, self.rows, k)) for at in layers}
        deployed = subject.options.numerics == "deployed"
        findings = [found for at in layers for found in judge.layer_findings(at, by_layer[at.layer], deployed=deployed)]
        every = [group for of in by_layer.values() for group in of]
        parts: list[Part] = page.model_parts(every, k)
        if deployed:
            parts += page.sides_part([sides(at, by_layer[at.layer][-1], k) for at in layers if by_layer[at.layer]])
        like = min(layers, key=lambda at: judge.lowest_b(by_layer[at.layer]))
        draws: list[drawn.Drawn] = []
        if self.drawn_entries:
            draws, negative = self._draw(subject, like, progress)
            findings += judge.drawn_findings(draws, self.drawn_top_ks)
            parts += [page.drawn_table(draws, like, negative), page.curves(every, k, draws)]
        return Report(page.summary(every, k, draws), tuple(findings), tuple(parts), page.NOT_CLAIMED)

    def _lengths(self, config: ModelConfig) -> tuple[int, ...]:
        """Lengths that fit and at which a token sees more than top-k entries, twice as many where there is none."""
        few, most = selects_all(config), config.max_position_embeddings
        telling = (length for length in sorted(self.lengths) if few + CSA_RATIO <= length <= most)
        return tuple(telling) or (min(2 * few, most),)

    def _run(self, subject: Subject, lengths: tuple[int, ...], progress: Progress) -> list[Layer]:
        progress(0, f"running {lengths[-1]} tokens")
        positions = sorted({p for length in lengths for p in range(max(0, length - self.rows), length)})
        recorder = Recorder(self.reads, positions)
        with listening(subject.model, recorder.listeners()):
            _, state = run_tokens(subject.model, subject.tokens(lengths[-1]), subject.options.prefill_chunk)
        config = subject.config
        return [recorded(layer, config, positions, recorder, state) for layer in csa_layers(config)]

    def _draw(self, subject: Subject, like: Layer, progress: Progress) -> tuple[list[drawn.Drawn], float]:
        return drawn.measure(
            subject.model,
            drawn.spectrum(like.q, like.keys, like.head_weights),
            self.drawn_entries,
            self.drawn_top_ks,
            self.drawn_tokens,
            subject.seed,
            lambda share, what: progress(0.5 + 0.5 * share, what),
        )


FULL = Recall()
# 75 entries at ratio 4, of which the demo selects 16
QUICK = Recall(lengths=(300,), drawn_entries=())
