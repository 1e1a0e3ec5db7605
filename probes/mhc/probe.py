"""mHC: residual streams that are read, mixed and written as the equations say."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from kernels.ops import Ops
from model.errors import Tripwire
from model.observe.observer import listening
from model.observe.sites import Site
from probes.finding import (
    Finding,
    Part,
    Plot,
    Report,
    Table,
    at_least,
    at_most,
    broken,
    exactly,
    judged,
    measured,
    vacuous,
)
from probes.mhc import oracle
from probes.mhc import watch as mhc_watch
from probes.mhc.watch import SUBLAYERS, Watch
from probes.probe import Probe, Progress
from probes.shared.narrow import f64
from probes.subject import Subject, run_tokens
from runtime.arithmetic import DTYPES

# What was compared, and how the page calls it. Values are shares of what rounding may make of them.
COMPARED = {
    "pre": "pre against the formula on the file's parameters",
    "post": "post against the formula on the file's parameters",
    "comb": "comb against Sinkhorn of the file's parameters",
    "read": "input of a sublayer against sum pre[s] stream[s], normed",
    "written": "streams against post[k] y + sum_j comb[j, k] stream[j]",
    "head": "output against the head's reading of the streams, normed",
}
SUM_TOLERANCE = 1e-5  # columns: eps over the sum, 1e-6, and roundings of s terms; rows: what float64 gives and this
SEEN = 10.0  # a transposed comb shows when it would move the streams by this many roundings


@dataclass(frozen=True)
class Mhc(Probe):
    """Compare every mHC of a run with float64, and the ops with golden values."""

    name: ClassVar[str] = "mhc"
    question: ClassVar[str] = "Are the residual streams read, mixed and written as mHC's equations say?"
    reads: ClassVar[tuple[Site, ...]] = mhc_watch.READS
    background: ClassVar[str] = """\
V4 has several residual streams instead of one. Each sublayer reads one input from them (`pre`, a weight per stream),
writes its output back into all of them (`post`), and mixes them (`comb`, a matrix that Sinkhorn's iterations push
towards doubly stochastic, so that mixing neither creates nor destroys what the streams hold). All three are computed
from the streams themselves, at every token.

What goes wrong here in silence: `comb` used transposed, rows normalised before columns, another number of iterations,
or `post` without its factor 2. A doubly stochastic matrix stays one when it is transposed, and one that has converged
does not show how it got there, so a check of row and column sums cannot see the likeliest faults. This probe recomputes
everything in float64 from the checkpoint's bytes, checks the streams' arithmetic in place, and feeds the ops golden
values that no variant reproduces.

Errors are given as a share of what rounding allows. A share just below 1 is what to expect: among many thousand values
one is always rounded by nearly half a unit in the last place. A fault gives tens and more."""
    noticed: ClassVar[str] = """\
- "Doubly stochastic" holds for columns only, because the last step normalises them; after all iterations rows are
  still off by far more. A check of rows with the tolerance of columns would call a correct run broken.
- The rows are off because the model learned to route rather than to blend: in many sublayers, `comb` sends some stream
  mostly to another one at a large share of the tokens (*moving*). It is then close to a permutation, where Sinkhorn is
  slowest.
- The mixing of the model's very first sublayer was never learned. The streams are copies of one embedding there, mixing
  equal streams multiplies them by a column sum, and that is one whatever `comb` is: there is no gradient. A transposed
  `comb` shows there only through the rows that are off, and far less than in other sublayers (last column).
- The streams grow through the layers, most of all in the last experts."""

    tokens: int = 1024  # of the prompt: every token has its own weights

    def needs(self, subject: Subject) -> str | None:
        """One stream has nothing to mix."""
        return "the model has one residual stream, and nothing is mixed" if subject.config.hc_mult == 1 else None

    def vacuous(self, subject: Subject) -> str | None:
        """Whether a transposed `comb` could be told is known only from the run, and judged there."""
        del subject
        return None

    def measure(self, subject: Subject, progress: Progress) -> Report:
        """Run a prompt and compare at every sublayer of every token."""
        progress(0.0, "golden values")
        golden = tuple(_golden(subject.model.arithmetic.ops, subject.model.device))
        watch, trip = _watched(subject, min(self.tokens, subject.config.max_position_embeddings), progress)
        found = (*golden, *_compared(watch), *_sums(watch))
        if trip is None:
            found = (*found, *_directions(watch), *_growth(watch))
        else:
            why = f"mHC's tripwire ended the run: {trip}"
            found = (*found, broken("weights that no correct run has", why, layer=trip.layer, position=trip.position))
        return Report(
            _summary(watch),
            found,
            tuple(_parts(watch)),
            "Not that the mixing is any good. The golden values are DeepSeek's published equations worked out with 50"
            " digits, not a dump of DeepSeek's own run. With two streams the direction of comb is judged by its golden"
            " value alone: a doubly stochastic 2 x 2 is its own transpose.",
        )


FULL = Mhc()
QUICK = Mhc(tokens=64)


def _watched(subject: Subject, count: int, progress: Progress) -> tuple[Watch, Tripwire | None]:
    """Run `count` tokens, watched, to the end or to mHC's tripwire: what was compared until then names the cause."""
    model, tokens = subject.model, subject.tokens(count)
    watch = Watch(subject.config, subject.file_weights, torch.finfo(DTYPES[subject.options.dtype]).eps / 2)
    chunk = min(subject.options.prefill_chunk, len(tokens))
    state = model.new_state(len(tokens), chunk)
    with listening(model, watch.listeners()):
        for first in range(0, len(tokens), chunk):
            progress(first / len(tokens), "mHC of every sublayer")
            watch.first = first
            try:
                run_tokens(model, tokens[first : first + chunk], chunk, state)
            except Tripwire as trip:
                if trip.site not in {part.comb.name for part in SUBLAYERS}:
                    raise
                return watch, trip
    watch.first = len(tokens)
    return watch, None


def _summary(watch: Watch) -> str:
    if not watch.sums:
        return "The golden values were compared; the run ended before its first sublayer was through."
    column, row = (max(getattr(sums, of) for sums in watch.sums.values()) for of in ("column", "row"))
    what, worst = max(watch.worst.items(), key=lambda item: math.inf if math.isnan(item[1].share) else item[1].share)
    tokens = max(sums.tokens for sums in watch.sums.values())
    return (
        f"{tokens} tokens, {len(watch.sums)} sublayers: columns of comb sum to 1 within {column:.1e}, rows within"
        f" {row:.1e}; against float64 the largest error is {worst.share:.3g} of what rounding allows"
        f" ({COMPARED[what]})."
    )


def _golden(ops: Ops, device: torch.device) -> Iterator[Finding]:
    """Feed the run's ops inputs whose outputs are known."""
    s, tokens = 4, 3
    flat = torch.ones(tokens, s, 8, device=device)
    fn = torch.zeros((2 + s) * s, s * 8, device=device)  # weights that depend on `base` alone
    base = torch.cat((torch.zeros(2 * s), torch.tensor(oracle.GOLDEN_LOGITS).flatten())).to(device)
    scale = torch.ones(3, device=device)
    for iterations, literal in oracle.GOLDEN_COMB.items():
        pre, post, comb = ops.hyper_weights(flat, fn, scale, base, iterations, oracle.GOLDEN_EPS, 1e-6)
        want = np.array(literal).reshape(s, s)
        off = np.abs(f64(comb) / want - 1)
        yield judged(
            f"golden comb, {iterations} iteration{'s' if iterations > 1 else ''}, relative error",
            float(off.max()),
            at_most(oracle.sinkhorn_error(iterations)),
            worst_at=[int(i) for i in np.unravel_index(int(off.argmax()), off.shape)[1:]],
        )
    yield judged("golden pre, logit 0: off 1/2 + eps", _off(pre, 0.5 + oracle.GOLDEN_EPS), at_most(4 * oracle.U))
    yield judged("golden post, logit 0: off 1", _off(post, 1.0), at_most(8 * oracle.U))
    # comb sends stream j to j + 1 and y is 0: powers of two, so that exact equality is due in every dtype
    streams = torch.tensor([1.0, 2.0, 4.0, 8.0], device=device)[None, :, None].repeat(tokens, 1, 8)
    comb = torch.eye(s, device=device).roll(1, 1)[None].repeat(tokens, 1, 1)
    moved = ops.expand(streams[:, 0] * 16, streams, torch.ones(tokens, s, device=device), comb)
    expected = np.array([8.0, 1.0, 2.0, 4.0])[None, :, None] + 16
    yield judged(
        "golden direction: streams 1, 2, 4, 8 sent one on by comb[j, j + 1], plus 16",
        float(np.abs(f64(moved) - expected).max()),
        exactly(0),
        first_token=f64(moved)[0, :, 0].tolist(),
        expected=expected[0, :, 0].tolist(),
    )


def _off(x: torch.Tensor, want: float) -> float:
    return float(np.abs(f64(x) - want).max())


def _compared(watch: Watch) -> Iterator[Finding]:
    for thing, words in COMPARED.items():
        if thing not in watch.worst:  # the run ended before it came to this
            continue
        worst = watch.worst[thing]
        # 1: the errors allowed are derived beside the oracle, number by number
        what = f"{words}: error over what rounding allows, worst"
        yield judged(what, worst.share, at_most(1), layer=worst.layer, **worst.evidence)


def _sums(watch: Watch) -> Iterator[Finding]:
    sums, eps = watch.sums, watch.config.hc_eps
    if not sums:
        return
    place, worst = max(sums.items(), key=lambda item: item[1].column)
    yield judged(
        "columns of comb off 1, worst", worst.column, at_most(SUM_TOLERANCE), layer=place[0], sublayer=place[1]
    )
    place, worst = max(sums.items(), key=lambda item: item[1].row_beyond)
    yield judged(
        f"rows of comb off 1, beyond what {watch.config.hc_sinkhorn_iters} iterations leave in float64, worst",
        worst.row_beyond,
        at_most(SUM_TOLERANCE),
        layer=place[0],
        sublayer=place[1],
        run=worst.row,
        float64=worst.row_by_formula,
    )
    low, high = min(item.pre[0] for item in sums.values()), max(item.pre[1] for item in sums.values())
    slack = 2 * oracle.U  # eps itself is added in fp32
    yield judged("pre, least", low, at_least(eps * (1 - slack)))
    yield judged("pre, largest", high, at_most(1 + eps + slack))
    yield judged("post, least", min(item.post[0] for item in sums.values()), at_least(0))
    yield judged("post, largest", max(item.post[1] for item in sums.values()), at_most(2))


def _directions(watch: Watch) -> Iterator[Finding]:
    """A layer in which comb could be transposed unseen shows nothing about its direction.

    Two streams are an exception: a doubly stochastic 2 x 2 is its own transpose, and there is no direction to show.
    """
    if watch.config.hc_mult == 2:
        return
    for layer in range(watch.config.num_hidden_layers):
        seen = max(sums.transposed for (of, _), sums in watch.sums.items() if of == layer)
        if seen < SEEN:
            yield vacuous(
                "direction of comb in the run",
                f"a transposed comb would move the streams by {seen:.2g} of the rounding allowed, less than {SEEN:g}",
                layer=layer,
            )


def _rms(watch: Watch, place: tuple[int, str]) -> list[float]:
    """Root mean square of each stream over all tokens."""
    rms: list[float] = np.sqrt(np.concatenate(watch.square[place]).mean(0)).tolist()
    return rms


def _growth(watch: Watch) -> Iterator[Finding]:
    places = list(watch.square)
    first, last = (max(_rms(watch, place)) for place in (places[0], places[-1]))
    yield measured("RMS of the largest stream after the last layer, over that of the embeddings", last / first)
    largest = float(np.sqrt(max(float(part.max()) for parts in watch.square.values() for part in parts)))
    yield measured("largest RMS of one stream at one token", largest)


def _parts(watch: Watch) -> Iterator[Part]:
    yield Table(
        "Weights by sublayer",
        ("layer", "sublayer", "pre", "post", "column off 1", "row off 1", "row, float64", "moving", "if transposed"),
        [
            (
                layer,
                word,
                _span(s.pre),
                _span(s.post),
                s.column,
                s.row,
                s.row_by_formula,
                s.moving / s.tokens,
                s.transposed,
            )
            for (layer, word), s in watch.sums.items()
        ],
        "Ranges and worst cases over all tokens; `moving` is the share of tokens at which comb sends some stream mostly"
        " to another one. The last column is how far the streams would be off if comb were used transposed, in units of"
        " the rounding that is allowed: below 10, the sublayer cannot show the direction. In the model's first sublayer"
        " all streams are still copies of one embedding, and only rows that do not sum to 1 show it at all.",
    )
    streams = tuple(f"stream {i}" for i in range(watch.config.hc_mult))
    rows = {place: _rms(watch, place) for place in watch.square}
    yield Table(
        "RMS of each stream after each sublayer",
        ("after layer", "sublayer", *streams),
        [(None if layer < 0 else layer, word, *values) for (layer, word), values in rows.items()],
    )
    yield Plot(
        "RMS of the streams through depth",
        "sublayers passed",
        "RMS",
        {name: [(float(x), values[i]) for x, values in enumerate(rows.values())] for i, name in enumerate(streams)},
        log_y=True,
    )


def _span(of: tuple[float, float]) -> str:
    return f"{of[0]:.3g} .. {of[1]:.3g}"
