"""Bounds, findings and tables of the probe `projections`."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from model.config import ModelConfig
from probes.finding import Finding, Report, Table, at_most, exactly, judged, number, vacuous
from probes.projections.rows import Compared

# Where roundings to bf16 or E4M3 are on the way, fp32 and float64 now and then fall on two sides of one. As in
# `probes.parity.pairs`, a quarter of the rows may hold such a number; the others are off by less than one last place of
# bf16 in every number would be.
CLOSE = 2.0**-8
MOST = 0.75
TELLING = 10.0  # a mistake shows where it moves the median row by so many times what rounding explains

NOT_CLAIMED = """\
That inputs are right: each step is given what went into it in this run. What lies between the steps is asked elsewhere:
the attention's sums by `attention`, selections by `recall`, residual streams with the layer's norm and the model's last
by `mhc`, experts by `routing`, angles beyond this prompt by `rope`. In bf16 or deployed numerics a row may be off by
what its roundings would make of it, were all to fall on the other side, and only three quarters must be close: what
moves few rows a little shows in the run in fp32 alone. Layers and tokens that were not looked at are not spoken for."""


class Ran(NamedTuple):
    """One numerics, compared."""

    name: str
    compared: tuple[Compared, ...]
    embeddings: int  # numbers of the embeddings that are not the file's


def report(ran: Sequence[Ran], config: ModelConfig, layers: Sequence[int], length: int, calls: int) -> Report:
    """Judge all that was compared."""
    findings = [finding for one in ran for finding in _findings(one)]
    findings += _untold(ran[0].compared)
    worst = max((one for each in ran[:1] for one in each.compared), key=_share)
    rows = sum(len(one.distance) for each in ran for one in each.compared)
    summary = (
        f"{length} tokens in {calls} calls, {len(layers)} layers, {rows} rows: in fp32 none is further from float64"
        f" than {number(_share(worst))} of what rounding explains ({worst.thing})"
    )
    for one in ran[1:]:
        near = [float((each.distance <= CLOSE).mean()) for each in one.compared if each.narrow]
        if near:
            summary += f"; in {one.name} {min(near):.1%} of the rows or more are within one last place of bf16"
    return Report(
        f"{summary}.", tuple(findings), (*_tables(ran, config), _mistakes(ran[0].compared, config)), NOT_CLAIMED
    )


def _share(one: Compared) -> float:
    return np.inf if np.isnan(one.share) else one.share


def _by_thing(compared: Sequence[Compared]) -> dict[str, list[Compared]]:
    things: dict[str, list[Compared]] = {}
    for one in compared:
        things.setdefault(one.thing, []).append(one)
    return things


def _findings(ran: Ran) -> Iterator[Finding]:
    """Of each thing, the layer that is furthest off."""
    for thing, every in _by_thing(ran.compared).items():
        worst = max(every, key=_share)
        what = f"{thing}, {ran.name}: worst row's distance from float64 over what rounding explains"
        # 1: what it explains is derived beside the oracle, number by number
        yield judged(what, worst.share, at_most(1), layer=worst.layer, rows=len(worst.distance), **worst.evidence)
        if worst.narrow:
            far = max(every, key=_quartile)
            what = f"{thing}, {ran.name}: distance from float64 that {MOST:.0%} of the rows keep within, worst layer"
            yield judged(what, _quartile(far), at_most(CLOSE), layer=far.layer, rows=len(far.distance))
    yield judged(f"embeddings, {ran.name}: numbers that are not the file's", ran.embeddings, exactly(0))


def _quartile(one: Compared) -> float:
    """Distance that `MOST` of the rows keep within."""
    return float(np.sort(np.nan_to_num(one.distance, nan=np.inf))[int(np.ceil(MOST * len(one.distance))) - 1])


def _untold(compared: Sequence[Compared]) -> Iterator[Finding]:
    """Mistakes that would show in no layer."""
    for thing, every in _by_thing(compared).items():
        for name in dict.fromkeys(name for one in every for name in one.mistakes):
            most = max(one.mistakes[name].telling for one in every if name in one.mistakes)
            if not most >= TELLING:
                why = f"it would move the median row by {number(most)} of what rounding explains, in no layer by more"
                yield vacuous(f"{thing}: {name}", why)


def _tables(ran: Sequence[Ran], config: ModelConfig) -> Iterator[Table]:
    columns = ("layer", "kind", "what", "rows", "equal", "median", "largest", "explained", "of it")
    note = (
        "Distance of a row from float64 as a share of the row's length; a row is a token, a head of it, or an entry."
        " Equal: rows without any difference. Explained: what rounding could have made of the row that has the largest"
        " share of it, which is the last column."
    )
    for one in ran:
        rows = [
            (
                one_layer(each),
                "" if each.layer is None else config.layer_kind(each.layer).name,
                each.thing,
                number(len(each.distance)),
                f"{(each.distance == 0).mean():.0%}",
                float(np.median(each.distance)),
                float(each.distance.max()),
                float(each.allowed[np.argmax(each.distance / each.allowed)]),
                each.share,
            )
            for each in one.compared
        ]
        yield Table(f"Distance from float64, {one.name}", columns, rows, note)


def one_layer(one: Compared) -> str | None:
    """A cell for its layer."""
    return None if one.layer is None else number(one.layer)


def _mistakes(compared: Sequence[Compared], config: ModelConfig) -> Table:
    rows = [
        (one_layer(one), config.layer_kind(one.layer).name, one.thing, name, moved.distance, moved.telling)
        for one in compared
        if one.layer is not None
        for name, moved in one.mistakes.items()
    ]
    note = (
        "How far the median row of this run would have been off, as a share of its length and by how many times what"
        f" rounding explains. Where no layer reaches {TELLING:g}, the run could not have shown the mistake, and fails."
    )
    return Table(
        "What each mistake would have done, plain fp32",
        ("layer", "kind", "what", "mistake", "distance", "of rounding"),
        rows,
        note,
    )
