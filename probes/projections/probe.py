"""Probe `projections`: whether each layer makes of its input what the weights of the files say."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from model.config import LayerKind, ModelConfig
from model.observe.sites import Site
from probes.attention.rows import looked_at
from probes.finding import Report
from probes.probe import Probe, Progress
from probes.projections import page
from probes.projections.oracle import Projections
from probes.projections.page import Ran
from probes.projections.rows import READS, Compared, compare, compare_ends, heard
from probes.subject import Subject
from runtime.options import RunOptions


@dataclass(frozen=True)
class ProjectionsProbe(Probe):
    """Recompute what layers project, norm, rotate and pool, from the run's inputs and the files' weights."""

    name: ClassVar[str] = "projections"
    question: ClassVar[str] = "Does each layer project, norm and pool its input as the files' weights say?"
    reads: ClassVar[tuple[Site, ...]] = READS
    background: ClassVar[str] = """\
Between a layer's input and its attention lie about a dozen small steps: a low-rank query that is normed, then each head
normed again without weights; one KV head; two compressors, each with a value and a gate projection, a bias by position
in the window, a softmax over its tokens, and in CSA layers two series of which an entry takes one from the window
before; index queries without a norm, a signed weight for each index head; and an output that goes through its groups'
own rows at low rank.

Each of these can be wired wrongly and the model still runs: a norm left out, a gate scaled, the bias of the next
position, the two series exchanged, weights of heads or groups in another order. Attention itself is then right, on
wrong numbers, and probes that take queries, keys and entries from the run pass. A second implementation shows it where
there is one that loads the checkpoint.

Here each step is computed again in float64, by code that shares no arithmetic with the runtime, from what went into it
in the run and from the bytes of the files. The prompt runs twice: in fp32 without rounding of activations, where a row
must lie as near as fp32 sums allow, and in the run's own numerics, with its roundings in their places. Calls cut
windows in two, and the last tokens come one by one. Beside it stands how far each of the likeliest mistakes would have
moved the rows: what would not show is no evidence."""
    noticed: ClassVar[str] = """\
- In deployed bf16 most rows of each projection of a layer are float64's bit for bit, and in the output of the attention
  all are. What differs has mostly been rotated: an angle in fp32 is off by more than a sum is, and now and then a
  number falls on the other side of a rounding.
- Queries of the CSA layers hardly need their second norm: left out, it moves them far less than those of the window
  layer, and over all heads at once instead of each by itself, less still.
- The likeliest off-by-one is the smallest mistake of all: the position bias of the token before, in the HCA layer.
- Index heads vote for and against: without the sign, the weights of a token are off by all of their length, as if half
  of it were negative. A head can then only raise scores."""

    tokens: int = 1028  # of the prompt, at least: the last token closes a window of 4, and the fifth last one of 128
    rows: int = 64  # of them whose queries, KV and outputs are computed again; entries are all
    layers: int = 8  # of each kind that are looked at, its first and last among them

    def vacuous(self, subject: Subject) -> str | None:
        """Two windows of every ratio: an entry of the first has nothing before it."""
        config, length = subject.config, self._length(subject.config)
        ratio = max(config.compress_ratios)
        return f"{length} tokens close fewer than two windows of {ratio}" if length < 2 * ratio else None

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """Run in fp32, then as the run itself; each against its oracle."""
        config = subject.config
        length, layers = self._length(config), self._layers(config)
        positions = looked_at(length, self.rows, (1, length - 2))
        tokens, calls = subject.tokens(length), _calls(length, subject.options.prefill_chunk, config)
        ran = []
        settings = _settings(subject)
        for done, (name, options) in enumerate(settings.items()):
            progress(done / len(settings), f"{length} tokens, {name}")
            run = heard(subject.load(options).model, tokens, calls, positions, layers)
            oracle = Projections(config, subject.file_weights, options)
            found: list[Compared] = []
            for at, layer in enumerate(layers):
                progress((done + at / len(layers)) / len(settings), f"layer {layer} in float64, {name}")
                found += compare(run, oracle, layer)
            logits, embeddings = compare_ends(run, oracle)
            ran.append(Ran(name, (*found, logits), embeddings))
        return page.report(ran, config, layers, length, len(calls))

    def _length(self, config: ModelConfig) -> int:
        wanted = max(self.tokens, *(2 * ratio + 4 for ratio in config.compress_ratios))
        return min(wanted, config.max_position_embeddings)

    def _layers(self, config: ModelConfig) -> list[int]:
        """Layers of each kind, evenly over its own."""
        chosen: set[int] = set()
        for kind in LayerKind:
            having = [layer for layer, of in enumerate(config.layer_kinds) if of is kind]
            some = min(self.layers, len(having))
            chosen |= {having[round(i * (len(having) - 1) / max(1, some - 1))] for i in range(some)}
        return sorted(chosen)


def _settings(subject: Subject) -> dict[str, RunOptions]:
    """Without rounding, and the run itself where that is another."""
    plain = subject.with_options(numerics="plain", dtype="fp32")
    own = subject.options
    known = {"plain fp32": plain}
    if (own.numerics, own.dtype) != ("plain", "fp32"):
        known[f"{own.numerics} {own.dtype}"] = own
    return known


def _calls(length: int, chunk: int, config: ModelConfig) -> list[int]:
    """Lengths of calls: a third of the prompt each, cutting windows, then single tokens that close one."""
    single = min(length, min((ratio for ratio in config.compress_ratios if ratio), default=0) + 2)
    return [*_parts(length - single, min(chunk, length // 3 | 1)), *[1] * single]


def _parts(total: int, each: int) -> Iterator[int]:
    while total > 0:
        yield min(each, total)
        total -= each


FULL = ProjectionsProbe()
QUICK = ProjectionsProbe(tokens=260, rows=24, layers=2)
