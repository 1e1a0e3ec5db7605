"""The page of the probe `variants`: what it says beside its findings."""

from collections.abc import Sequence
from typing import NamedTuple

from probes.finding import Finding, Part, Plot, Table, Text
from probes.variants.banks import Kept
from probes.variants.codes import Book
from probes.variants.drawn import LOGITS
from probes.variants.grouped import Drift
from probes.variants.sizes import Llama, Scratch


class Shown(NamedTuple):
    """What is shown beside findings; empty where it was not measured."""

    llama: list[Llama]
    books: list[Book]
    scratch: list[Scratch]
    kept: list[Kept]  # index keys by bits, those of the run first
    grouped: list[Drift]
    v4: list[Drift]
    left_out: list[str]  # sentences


def parts(shown: Shown) -> tuple[Part, ...]:
    """Tables and plots."""
    found: list[Part] = [
        Table(
            "Shard's bytes for Llama-3.1-8B",
            ("tokens", "held, MiB", "full cache in bf16, MiB", "ratio"),
            [(n, held, full, full / held) for n, held, full in shown.llama],
            "32 layers of 8 KV heads of 128, a prompt of so many tokens just read, counted from the tensors' shapes and"
            " dtypes. The article's MB are MiB.",
        ),
        Table(
            "Codebooks",
            ("bits", "squared error on N(0, 1)", "least there can be"),
            [tuple(book) for book in shown.books],
        ),
        Table(
            "What one decoded token holds beside the cache",
            ("over shard's", "tokens", "bytes", "tokens", "bytes"),
            [(s.segment, s.tokens[0], s.peaks[0], s.tokens[1], s.peaks[1]) for s in shown.scratch],
            f"A grouped-query layer, 8 heads on 2 of 64. All keys and values decoded would take 1 KiB a token. {TILE}",
        ),
    ]
    if shown.kept:
        found.append(
            Table(
                "Index keys on a V4 layer",
                ("bits", "keys", "recall, mean", "recall, worst row"),
                [tuple(kept) for kept in shown.kept],
                "Keys and queries drawn from N(0, 1), 64 heads, a quarter of the keys selected; against float64 scores"
                " of the keys as drawn. The first row is what the cache of the run holds.",
            )
        )
    for of, what, drifts in (
        ("drawn tokens", f"KL over {LOGITS} random projections", shown.grouped),
        ("this checkpoint", "KL of the logits", shown.v4),
    ):
        if drifts:
            found.append(_plot(of, what, drifts))
    if shown.left_out:
        found.append(Text("What was left out", " ".join(shown.left_out)))
    return tuple(found)


def _plot(of: str, what: str, drifts: Sequence[Drift]) -> Plot:
    return Plot(
        f"Divergence from the full cache, {of}",
        "tokens so far",
        f"{what}, mean since the last point",
        {one.name: [(x, y) for x, y in one.curve if y > 1e-12] for one in drifts},  # below: rounding of fp32
        log_y=True,
    )


def summary(findings: Sequence[Finding], shown: Shown) -> str:
    """The sentence at which a hurried reader stops."""
    same = [f.measured for f in findings if "distance" in f.what and f.measured is not None]
    scores = [f.measured for f in findings if "relative identity" in f.what and f.measured is not None]
    held = " / ".join(f"{one.held:.2f}" for one in shown.llama)
    drift, kept = shown.grouped[0], ""
    if shown.kept:
        kept = f" Index keys of {shown.kept[0].bits} bits keep {shown.kept[0].recall:.1%} of a selection."
    return (
        f"While nothing has been evicted or compressed, both variants are within {max(same):.1e} of the full cache."
        f" Shard's scores through relative positions are right to {max(scores):.0e} in float64, and its bytes for"
        f" Llama-3.1-8B are {held} MiB.{kept} Over {drift.curve[-1][0]:.0f} steps of drawn tokens the divergence of"
        f" shard's outputs went to {drift.growth:.2g} times what it had been."
    )


TILE = """\
A tile of keys is as many tokens as make 262 144 numbers in fp32, 1 MiB. Over the middle 4 tiles are held at most: keys
1, values 1, coefficients 1/2, angles (cosine, sine, both as a complex number) 1, codes of values as indices 1/4, and
1/4 for nibbles, logits, basis, queries and sums. Over the stream 4 and as little: keys 1, values 1, the values of the
tile before 1, codes as integers 1. On V4's layers a tile is 524 288 numbers, 2 MiB, of which one is keys and values at
once: centroids 1, bytes of codes as integers 3/4, pairs of codes 1/2, and 3/4 for one token's queries, sums and
logits."""

NOT_CLAIMED = """\
That a variant is good enough for a model or a task: this page holds the code to its equations. What a variant costs in
answers is a question of trained models. That CoDA is what its authors published: the tests compare it with their
package, call by call. Two thousand steps are not a million: what does not build up in these may still in those. Tokens
of the grouped-query layer are drawn, and so are the entries that come one by one: there is no vocabulary behind them.
What is called their divergence is the KL of a softmax over 64 random projections of all heads' output, at unit scale:
it tells whether an error grows, and its size says nothing about text. CoDA's is that of keys without any structure that
banks could use. V4's text is read in calls of 64 tokens and not one by one; that what is stored does not depend on the
calls is one of the findings. Scratch is what tensor operations allocate, not what they use inside."""
