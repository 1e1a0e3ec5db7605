"""What states hold, as Markdown: the loss of fewer bits, and what merging keeps."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Final, NamedTuple

from model.choices import CODED_BITS
from model.variants.coda_merge import Kept
from scripts.database.measure import (
    ABOUT,
    BOTH,
    BOUNDED,
    CODES,
    FACTS,
    IN_ONE_GO,
    KNOWN,
    MERGED,
    OLDER,
    RECENT,
    UNMOVED,
    Files,
    Score,
    Scores,
)

TEMPLATE: Final = """\
---
checkpoint: {checkpoint}
weights with adapters: {weights}
config: {config}
kv: {kv}
dtype: {dtype}
documents: {pairs} pairs of each length
seeds: {first_seed} to {last_seed}
commit: {commit}
command: {command}
---

# States as a database: loaded, quantised, merged

**{headline}**

The model is a small Llama that `scripts.train_llama` makes, with CoDA adapters that `scripts.train_coda` trains for
this bounded cache; documents are of the demo language, each telling {codes} codes once. A state is asked by continuing
it with " The code of NAME is", each question from the same state; right is the code as the likeliest next token (a
guess: 1 in 90). Facts ("The capital of France is") are what the model knows by heart: {facts} of them after each
document.

## One document

{equal} of {asked} questions put to a state that was saved and loaded had logits equal, bit by bit, to those of the
state that never left memory.

{states}

*In the window*: codes that the ring still holds when the document ends; *before it*: those that only the banks can
know. *KL*: of the next token after every token of every question, from the exact bounded state, in nats. *Bytes*: of
the file; a full cache grows with the document, a bounded one does not. The coded files hold each key and value of ring
and banks in so many bits and a float16 length per row; gates, times and counts are exact.

## Two documents in one state

{merged}

± is one standard error over the pairs. All rows but the first two are one state of the same size:

- *both read in one go*: the second document after the first, through the same bounded cache; merging stands in for it.
- *merged*: each document read alone, then `merge`: the second one's keys moved by the first one's length.
- *merged, keys where they were*: the same without moving any key: both documents begin at position 0. Measured here
  alone: `merge` moves keys, because otherwise the second document could not be the shorter one, nor follow the first.

What merging did, in slots of a layer, on average (*evicted*: ring tokens of the first document, offered to its banks):

{kept}

## What merging keeps

{verdict}

## What this does not claim

One model of one seed, one size of cache, documents of one small language made by the generator that made the training
data. A code is one token told in one sentence; what merging does to an argument that runs through a whole text is not
measured. Nothing has attended from one document to the other, so a question that needs both has to join them by itself.

Measured in {seconds:.0f} s.
"""


class Found(NamedTuple):
    """What was measured at one length."""

    length: int
    states: Scores
    files: Files
    full_bytes: int  # of the file of a full cache
    merged: Scores
    kept: Mapping[str, Sequence[Kept]]


def page(found: Sequence[Found], layers: int, facts: Mapping[str, Any]) -> str:
    """Return the page."""
    return TEMPLATE.format(
        **facts,
        headline=headline(found[-1]),
        codes=CODES,
        facts=FACTS,
        equal=sum(one.files.equal for one in found),
        asked=sum(one.files.asked for one in found),
        states="\n\n".join(_states(one) for one in found),
        merged="\n\n".join(_merged(one) for one in found),
        kept=_kept(found, layers),
        verdict="\n\n".join(verdict(one) for one in found),
    )


def headline(found: Found) -> str:
    """The longest documents in three sentences."""
    one = {row: _codes(by) for row, by in found.states.items()}
    both = {row: by[BOTH] for row, by in found.merged.items()}
    coded = " and ".join(
        f"{_percent(one[f'{BOUNDED}, {bits} bits'])} in {bits} bits ({_smaller(found, bits):.2f} times smaller)"
        for bits in CODED_BITS
    )
    alone = fmean(by[column].share for by, column in zip(list(found.merged.values())[:2], ABOUT, strict=True))
    return (
        f"Of the codes in a document of {found.length} tokens, the bounded state finds {_percent(one[BOUNDED])},"
        f" {coded}. Two such documents merged into one state of the same size: {_percent(both[MERGED])} of the codes of"
        f" both, where each alone finds {100 * alone:.1f} % of its own and reading both in one go"
        f" {_percent(both[IN_ONE_GO])}."
    )


def verdict(found: Found) -> str:
    """What merging kept at one length, in words that follow from the numbers."""
    merged, one_go, unmoved = (found.merged[row] for row in (MERGED, IN_ONE_GO, UNMOVED))
    alone = fmean(by[column].share for by, column in zip(list(found.merged.values())[:2], ABOUT, strict=True))
    gain, moves = (_apart(merged[BOTH], other[BOTH]) for other in (one_go, unmoved))
    lost = f"{100 * (1 - merged[BOTH].share / alone):.0f} %" if alone else "nothing, for there is nothing"
    all_, first, second = (
        f"{_percent(merged[column])} against {_percent(one_go[column])}" for column in (BOTH, *ABOUT)
    )
    return (
        f"**{found.length} tokens each.** Of what the two states answer alone, merging loses {lost}. Against reading"
        f" both in one go into the same cache it finds {('fewer', 'as many, within the error', 'more')[gain + 1]}:"
        f" {all_} in all, {first} about the first document, {second} about the second. Moving the second one's keys"
        f" {('costs', 'makes no difference beyond the error', 'gains')[moves + 1]} ({_percent(unmoved[BOTH])} unmoved)."
    )


def _apart(a: Score, b: Score) -> int:
    """1 or -1: a share is larger or smaller than another by more than both errors; 0: by less."""
    gain = a.share - b.share
    return 0 if abs(gain) <= a.error + b.error else 1 if gain > 0 else -1


def _states(found: Found) -> str:
    lines = [
        f"### {found.length} tokens",
        "",
        f"| state | {RECENT} | {OLDER} | {KNOWN} | KL, mean | KL, largest | bytes |",
        "|:--|--:|--:|--:|--:|--:|--:|",
    ]
    for row, by in found.states.items():
        nats = [nat for score in by.values() for nat in score.nats]
        exact = row == BOUNDED or not nats
        kl = ("-", "-") if exact else (f"{fmean(nats):.1e}", f"{max(nats):.1e}")
        size = f"{found.files.nbytes.get(row, found.full_bytes if 'full' in row else found.files.nbytes[BOUNDED]):,}"
        cells = [f"{by[column].right} of {by[column].total}" for column in (RECENT, OLDER, KNOWN)]
        lines.append(f"| {' | '.join((row, *cells, *kl, size))} |")
    return "\n".join(lines)


def _merged(found: Found) -> str:
    lines = [
        f"### {found.length} tokens each",
        "",
        f"| state | {' | '.join((*ABOUT, BOTH))} |",
        "|:--|--:|--:|--:|",
    ]
    for row, by in found.merged.items():
        cells = [f"{_percent(by[column])} ± {100 * by[column].error:.1f}" for column in (*ABOUT, BOTH)]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _kept(found: Sequence[Found], layers: int) -> str:
    heading = (
        "| tokens each | ring, first | ring, second | evicted | exact, first | exact, second | exact, lost"
        " | averages alone | averages of two |"
    )
    lines = [heading, "|--:" * 9 + "|"]
    for one in found:
        means = [fmean(column) / layers for column in zip(*one.kept[MERGED], strict=True)]
        lines.append(f"| {one.length} | {' | '.join(f'{mean:.1f}' for mean in means)} |")
    return "\n".join(lines)


def _codes(by: Mapping[str, Score]) -> Score:
    return Score(by[RECENT].right + by[OLDER].right, by[RECENT].total + by[OLDER].total)


def _smaller(found: Found, bits: int) -> float:
    return found.files.nbytes[BOUNDED] / found.files.nbytes[f"{BOUNDED}, {bits} bits"]


def _percent(score: Score) -> str:
    return f"{100 * score.share:.1f} %"
