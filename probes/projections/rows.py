"""What a run projected, row by row, beside what the weights of the files make of the same inputs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from model.config import LayerKind
from model.observe import sites
from model.observe.observer import listening
from model.observe.sites import Listener, Site
from model.transformer import Transformer
from probes.finding import JSON
from probes.projections.known import Known
from probes.projections.oracle import Mistakes, Projections
from probes.rope.oracle import I64
from probes.shared.narrow import F64, f64
from probes.shared.recorder import Recorder
from probes.subject import run_tokens

OF_ALL = (sites.ATTENTION_INPUT, sites.ENTRY, sites.INDEX_KEY)
OF_SOME = (
    sites.EMBEDDED,
    sites.LATENT,
    sites.QUERY,
    sites.KV,
    sites.INDEX_QUERY,
    sites.INDEX_WEIGHTS,
    sites.UNROTATED,
    sites.ATTENTION_OUTPUT,
    sites.HIDDEN,
)
READS = (*OF_ALL, *OF_SOME, sites.LOGITS)
LATENT, QUERIES, KV = "low-rank query", "queries", "window KV"
ENTRIES, INDEX_KEYS, INDEX_QUERIES = "entries", "index keys", "index queries"
INDEX_WEIGHTS, OUTPUT = "index head weights", "attention output"
LOGITS = 8  # tokens whose logits are computed
TINY = 1e-30  # allowed where everything is 0


class Moved(NamedTuple):
    """How far a mistake would have moved the median row."""

    distance: float  # as a share of the row's length
    telling: float  # in what rounding explains


@dataclass(frozen=True)
class Compared:
    """One thing that one layer computed, against float64."""

    thing: str
    layer: int | None
    distance: F64  # [rows] from float64, as a share of the row's length
    allowed: F64  # [rows] what rounding explains of it
    narrow: bool  # whether it explains more than arithmetic in fp32 does
    evidence: dict[str, JSON]  # of the worst row
    mistakes: dict[str, Moved]  # by name

    @property
    def share(self) -> float:
        """The worst row's distance, in what rounding explains of it; a NaN is the worst there is."""
        return float((self.distance / self.allowed).max())

    @classmethod
    def of(cls, thing: str, layer: int | None, found: F64, known: Known, wrong: Mistakes, positions: I64) -> "Compared":
        """Compare `found` with what is known, both [n, d] or, with a row for each head, [n, heads, d]."""
        size = np.maximum(np.linalg.norm(known.value, axis=-1), TINY)  # [n] or [n, heads]
        allowed = np.maximum(np.linalg.norm(known.error, axis=-1) / size + known.step, TINY)
        distance = np.linalg.norm(found - known.value, axis=-1) / size
        at = np.unravel_index(int(np.argmax(distance / allowed)), distance.shape)
        evidence: dict[str, JSON] = {"position": int(positions[at[0]]), "distance": float(distance[at])}
        if len(at) > 1:
            evidence["head"] = int(at[1])
        moved = {}
        for name, of in wrong.items():
            far = np.linalg.norm(of - known.value, axis=-1) / size
            moved[name] = Moved(float(np.median(far)), float(np.median(far / allowed)))
        return cls(thing, layer, distance.ravel(), allowed.ravel(), known.step > 0, evidence, moved)


@dataclass(frozen=True)
class Heard:
    """What passed in one run."""

    everywhere: Recorder  # `OF_ALL`, of every token
    some: Recorder  # `OF_SOME`, of the tokens at `positions`
    logits: F64  # [rows, vocab], of the first of them
    tokens: I64  # [t]
    positions: I64  # [rows]

    def all_rows(self, site: Site, layer: int) -> F64:
        """Of every token, or every entry."""
        return f64(self.everywhere.rows(site, layer))

    def rows(self, site: Site, layer: int | None) -> F64:
        """Of the tokens at `positions`."""
        return f64(self.some.rows(site, layer))


def heard(
    model: Transformer, tokens: Sequence[int], calls: Sequence[int], positions: Sequence[int], layers: Sequence[int]
) -> Heard:
    """Run `tokens` in calls of these lengths, listen to these layers, and to the head for a few tokens."""
    everywhere, some, head = Recorder(OF_ALL), Recorder(OF_SOME, positions), Recorder([sites.LOGITS])
    listeners = everywhere.listeners() | some.listeners() | head.listeners()
    state, first = model.new_state(len(tokens), max(calls)), 0
    with listening(model, {site: _only(layers, listener) for site, listener in listeners.items()}):
        for length in calls:
            run_tokens(model, list(tokens[first : first + length]), length, state)
            first += length
        hidden = some.rows(sites.HIDDEN, None)[:LOGITS]
        model.logits(hidden.to(model.device))
    return Heard(everywhere, some, f64(head.rows(sites.LOGITS, None)), np.array(tokens), np.array(positions))


def _only(layers: Sequence[int], listener: Listener) -> Listener:
    """`listener`, for these layers and for what is outside of all."""

    def listen(layer: int | None, tensor: Tensor) -> None:
        if layer is None or layer in layers:
            listener(layer, tensor)

    return listen


def compare(run: Heard, oracle: Projections, layer: int) -> Iterator[Compared]:
    """Compare what one layer projected, normed, pooled and rotated, each from what went into it in the run."""
    kind, at = oracle.config.layer_kind(layer), run.positions
    inputs = run.all_rows(sites.ATTENTION_INPUT, layer)
    x, latent = inputs[at], run.rows(sites.LATENT, layer)
    yield Compared.of(LATENT, layer, latent, oracle.latent(x, layer), {}, at)
    known, wrong = oracle.queries(latent, layer, at)
    yield Compared.of(QUERIES, layer, run.rows(sites.QUERY, layer), known, wrong, at)
    yield Compared.of(KV, layer, run.rows(sites.KV, layer), oracle.kv(x, layer, at), {}, at)
    if kind is not LayerKind.SWA:
        known, wrong = oracle.entries(inputs, layer)
        yield _of_windows(ENTRIES, layer, run.all_rows(sites.ENTRY, layer), known, wrong, oracle)
    if kind is LayerKind.CSA:
        known, wrong = oracle.index_keys(inputs, layer)
        yield _of_windows(INDEX_KEYS, layer, run.all_rows(sites.INDEX_KEY, layer), known, wrong, oracle)
        known = oracle.index_queries(latent, layer, at)
        yield Compared.of(INDEX_QUERIES, layer, run.rows(sites.INDEX_QUERY, layer), known, {}, at)
        known, wrong = oracle.index_weights(x, layer)
        yield Compared.of(INDEX_WEIGHTS, layer, run.rows(sites.INDEX_WEIGHTS, layer), known, wrong, at)
    known, wrong = oracle.output(run.rows(sites.UNROTATED, layer), layer)
    yield Compared.of(OUTPUT, layer, run.rows(sites.ATTENTION_OUTPUT, layer), known, wrong, at)


def compare_ends(run: Heard, oracle: Projections) -> tuple[Compared, int]:
    """Compare the logits, and count the numbers of the embeddings that are not the file's."""
    known, at = oracle.logits(run.rows(sites.HIDDEN, None)[: len(run.logits)]), run.positions
    rows = oracle.embedded(run.tokens[at])
    return (
        Compared.of("logits", None, run.logits, known, {}, at),
        int((run.rows(sites.EMBEDDED, None) != rows).sum()),
    )


def _of_windows(thing: str, layer: int, found: F64, known: Known, wrong: Mistakes, oracle: Projections) -> Compared:
    """Compare a row for each closed window, which stands at its first position."""
    starts = np.arange(len(found)) * oracle.config.ratio(layer)
    return Compared.of(thing, layer, found, known, wrong, starts)
