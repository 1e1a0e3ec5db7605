"""Probe `attention`: what each layer attends to, whether that is what it should, and what the entries add."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from model.checkpoint.census import census
from model.checkpoint.checkpoint import Checkpoint
from model.checkpoint.weights import open_weights
from model.config import ModelConfig
from model.observe import sites
from model.observe.observer import listening
from model.observe.sites import Site
from probes.attention import page
from probes.attention.rows import compare, edges, looked_at
from probes.finding import Report
from probes.probe import Probe, Progress
from probes.shared.recorder import Recorder
from probes.subject import Subject, run_tokens

CACHED = (sites.KV, sites.ENTRY)
CHOSEN = (sites.QUERY, sites.SELECTED, sites.MIXED)


@dataclass(frozen=True)
class AttentionPath(Probe):
    """Recompute the attention of some tokens of every layer in float64, and count the rows that the run reads."""

    name: ClassVar[str] = "attention"
    question: ClassVar[str] = "What does each layer attend to, and what would be lost with the window alone?"
    reads: ClassVar[tuple[Site, ...]] = (*CACHED, *CHOSEN)
    background: ClassVar[str] = """\
Under one softmax, a token attends to a sink (a learned logit per head, which has no value), to its window (the last
`sliding_window` tokens) and to compressed entries of what lies further back: none in an SWA layer, all that are
complete in an HCA layer (dense), those that the indexer selects in a CSA layer.

A layer that loses its entries still runs, and short prompts are still answered well, because the window covers them.
One V4 runtime ran like that for months: the indexer's weights were looked for under a wrong name behind an `if`, it
returned None, and every CSA layer saw its window alone. Nothing measured where the mass fell.

Here the attention of tokens spread over a run is computed again in float64, from the run's queries, KV, entries and
selections and from the sinks in the checkpoint's file. Where the output agrees, the shares of the softmax found on the
way are those of what really ran. Beside it stand how many rows of each kind the run's op reads for each token, and what
the output would have been with the window alone."""
    noticed: ClassVar[str] = """\
**CSA layers hardly look at their window.** Most of their mass is on selected entries, and without these their output
would be further away than its own norm: not a worse output, an unrelated one. And yet that model answers all questions
about facts, and which word is most common (see demo-checkpoint.md, *CSA window only*); only needles are lost. A short
test would have passed.

**Mass understates the HCA layer.** Little of its mass is on dense entries, and its output would still be another one
without them. Its entries are longer than the rows of the window (those of CSA layers hardly are), so each counts more
than the softmax says. By token the mass runs from nearly nothing to most of it.

**The sinks are nearly idle.** They take little of the mass, and `needle` does not see it when the second half of the
heads are given the sinks of the first (`--inject rank-0-sinks`, see faults.md)."""

    length: int = 8192  # tokens of the one run
    rows: int = 400  # of them that are looked at, spread over the run

    def vacuous(self, subject: Subject) -> str | None:
        """No token leaves its window; that a layer's entries are seen is judged layer by layer."""
        window, length = subject.config.sliding_window, self._length(subject.config)
        return f"{length} tokens never leave the window of {window}" if length <= window else None

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """Run once, then compare layer by layer."""
        config, model = subject.config, subject.model
        length = self._length(config)
        positions = looked_at(length, self.rows, edges(config))
        progress(0, f"running {length} tokens")
        cached, chosen = Recorder(CACHED), Recorder(CHOSEN, positions)
        with listening(model, cached.listeners() | chosen.listeners()):
            run_tokens(model, subject.tokens(length), subject.options.prefill_chunk)
        sinks = stored_sinks(subject.directory, config)
        layers = []
        for layer, sink in enumerate(sinks):
            progress(0.4 + 0.6 * layer / len(sinks), f"layer {layer} of {len(sinks)}")
            layers.append(compare(layer, model, cached, chosen, positions, sink))
        return page.report(layers, config, subject.options.dtype, length)

    def _length(self, config: ModelConfig) -> int:
        beyond = 2 * max(config.sliding_window, *config.compress_ratios) + 4  # the window, with entries in sight
        return min(max(self.length, beyond), config.max_position_embeddings)


def stored_sinks(directory: Path, config: ModelConfig) -> list[Tensor]:
    """Sinks of every layer as the checkpoint holds them, [h] float32 each."""
    names = [f"layers.{layer}.attn.attn_sink" for layer in range(config.num_hidden_layers)]
    checkpoint = Checkpoint.open(directory)
    weights = open_weights(checkpoint, census(checkpoint.shapes(), config, where=str(directory)), only=names)
    return [weights.vector(name).float() for name in names]


FULL = AttentionPath()
# two blocks of 128 and more than twice the demo's 16 selected entries
QUICK = AttentionPath(length=300, rows=40)
