"""Tables, curves and the summary of the probe `recall`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from probes.finding import Part, Plot, Table, number
from probes.recall.drawn import HEADS, Drawn
from probes.recall.findings import mean_b
from probes.recall.rows import Group, Layer, Sides

NOT_CLAIMED = """\
That a selection is the best one for the answer: oracle B says what rounding changed in the model's own ranking, and a
model may well be indifferent to that; the probe `needle` says what becomes of answers. Draws have the mean and
covariance of the model's queries and keys and nothing else of theirs: no entry stands out as the one that a question
asks for. They test arithmetic and size, not the model."""


COMPARED = ("A", "A, worst row", "ties", "A, scores in BF16", "B", "B, worst row", "B, score kept")
COLUMNS_NOTE = (
    "A: recall against exact scores of the queries and keys that were scored; a tie is an entry within one fp32 ulp of"
    " the k-th best, and counts as recalled. In BF16: what A would be, had the scores been rounded to BF16 before the"
    " selection, as DeepSeek's code rounds them. B: recall against exact scores of the queries and keys before"
    " rounding. Score kept: 1 for the k best entries, 0 for entries of average score."
)


def _compared(parts: Sequence[Group] | Sequence[Drawn]) -> list[float | str | None]:
    """The cells of `COMPARED`, over all rows of some groups."""
    a, a_narrow, b, kept, ties = (
        torch.cat(list(values))
        for values in (
            (part.a.recall for part in parts),
            (part.narrow.recall for part in parts),
            (part.b.recall for part in parts),
            (part.b.kept for part in parts),
            (part.a.ties for part in parts),
        )
    )
    means = [a.mean(), a.min(), ties.sum(), a_narrow.mean(), b.mean(), b.min(), kept.mean()]
    return [mean.item() for mean in means]


def model_parts(groups: Sequence[Group], k: int) -> list[Part]:
    """Tables of the run itself."""
    if not groups:
        return []
    lengths = [
        [number(group.layer), group.length, int(group.visible.max()), len(group.positions), *_compared([group])]
        for group in groups
    ]
    return [
        Table(
            f"Selections of the run, top-k {k}",
            ("layer", "tokens", "entries", "rows", *COMPARED),
            lengths,
            note=f"Each row: the last tokens before that many. {COLUMNS_NOTE}",
        ),
        Table(
            "The same by residue",
            ("context modulo ratio", "rows", "A", "A, worst row", "B", "B, worst row"),
            _by_residue(groups),
            note="All layers and lengths together; residue 0 is a token that completes an entry and may select it.",
        ),
    ]


def _by_residue(groups: Sequence[Group]) -> list[list[float | str | None]]:
    a: dict[int, list[Tensor]] = {}
    b: dict[int, list[Tensor]] = {}
    for group in groups:
        for residue in group.residues.unique().tolist():
            a.setdefault(residue, []).append(group.a.recall[group.residues == residue])
            b.setdefault(residue, []).append(group.b.recall[group.residues == residue])
    rows: list[list[float | str | None]] = []
    for residue in sorted(a):
        of_a, of_b = torch.cat(a[residue]), torch.cat(b[residue])
        ends = (of_a.mean(), of_a.min(), of_b.mean(), of_b.min())
        rows.append([number(residue), len(of_a), *(end.item() for end in ends)])
    return rows


def sides_part(sides: Sequence[Sides]) -> list[Part]:
    """Table of what rounding the queries and rounding the keys cost alone."""
    if not sides:
        return []
    columns = (
        "layer",
        "tokens",
        "B, queries alone rounded",
        "B, keys alone rounded",
        "B, both",
        "B, keys rounded about their mean",
        "rounding moves queries by",
        "rounding moves keys by",
        "common part of queries",
        "common part of keys",
    )
    return [
        Table(
            "Where the loss against oracle B comes from",
            columns,
            [[number(of.layer), of.length, *of.recall, *of.off, *of.common] for of in sides],
            note="Moves: distance from the Hadamard rotation of the unrounded rows, relative to their norm. Common"
            " part: the share of the squared norm that is that of the mean (of queries, each head's own): what all rows"
            " share cannot rank them, but the steps of E2M1 grow with it. Keys rounded about their mean: what B would"
            " be, had the mean been taken off before rounding and put back after it.",
        )
    ]


def drawn_table(draws: Sequence[Drawn], like: Layer, negative: float) -> Table:
    """Table of the draws."""
    return Table(
        "At real dimensions, on queries and keys drawn like the model's",
        ("top-k", "entries", "rows", *COMPARED),
        [[number(draw.k), draw.entries, len(draw.a.recall), *_compared([draw])] for draw in draws],
        note=f"{HEADS} heads of width {like.keys.shape[1]}, normal with the mean and covariance of layer {like.layer}'s"
        f" unrounded queries (each head's own, in turn) and keys, rounded as the run rounds them, selected by the run's"
        f" op; {100 * negative:.0f} % of the head weights, drawn from the layer's own, are negative. Sizes up to top-k"
        " are left out: there everything is selected.",
    )


def curves(groups: Sequence[Group], k: int, draws: Sequence[Drawn]) -> Plot:
    """Recall against entries, for both oracles."""
    series: dict[str, list[tuple[float, float]]] = {}
    for top_k in sorted({draw.k for draw in draws}):
        shown = [draw for draw in draws if draw.k == top_k]
        for oracle, of in (
            ("A", [draw.a for draw in shown]),
            ("A, scores in BF16", [draw.narrow for draw in shown]),
            ("B", [draw.b for draw in shown]),
        ):
            points = [(float(draw.entries), one.recall.mean().item()) for draw, one in zip(shown, of, strict=True)]
            series[f"{oracle}, top-k {top_k}"] = points
    for name in ("A", "B"):
        at: dict[int, list[Tensor]] = {}
        for group in groups:
            at.setdefault(int(group.visible.max()), []).append((group.a if name == "A" else group.b).recall)
        if at:
            series[f"{name}, the model's own top-k {k}"] = [
                (float(entries), torch.cat(recalls).mean().item()) for entries, recalls in sorted(at.items())
            ]
    return Plot(
        "Recall against the number of entries",
        "entries",
        "mean recall",
        dict(series),
        log_x=True,
        note="A is the arithmetic, B what rounding costs: the more entries, the closer they crowd about the k-th best.",
    )


def summary(groups: Sequence[Group], k: int, draws: Sequence[Drawn]) -> str:
    """The numbers that matter, whatever they are."""
    said = []
    if groups:
        longest = max(group.length for group in groups)
        a = min(group.a.recall.mean().item() for group in groups)
        b, kept = (min(of) for of in zip(*((mean_b(of), of.b.kept.mean().item()) for of in groups), strict=True))
        said.append(
            f"Of the {k} entries that score best with the run's own rounded queries and keys (oracle A),"
            f" {_percent(a)} were selected in the worst layer and at the worst length up to {longest} tokens; of the"
            f" {k} that score best with unrounded ones (oracle B), {_percent(b)}, {_percent(kept)} of the score kept"
        )
    if draws:
        a, b = (min(of) for of in zip(*_drawn_means(draws), strict=True))
        most = max(draw.entries for draw in draws)
        said.append(f"On draws of {HEADS} heads and up to {most} entries: A {_percent(a)}, B {_percent(b)}")
    return ". ".join(said) + "." if said else "No token saw more entries than it selects: nothing was shown."


def _drawn_means(draws: Sequence[Drawn]) -> list[tuple[float, float]]:
    return [(draw.a.recall.mean().item(), draw.b.recall.mean().item()) for draw in draws]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
