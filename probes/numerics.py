"""Which rounding a recorded run has: the one under which most of it agrees, looked for where that is cheap.

What is kept in a narrow format says so itself: its numbers are on the format's grid, or they are not. Whether inputs of
linears are rounded, and what of the rest was not recorded, is found by judging a few rows of a few sites both ways.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from fathom.model.choices import DEPLOYED, PLAIN
from fathom.model.config import check_widths
from fathom.model.errors import ConfigError
from fathom.model.observe import sites
from fathom.model.rounding import FORMS, FP4, FP8, NONE, ROUNDINGS, Rounding
from fathom.probes.checks import Checks
from fathom.probes.oracle import E2M1_INDEX, E4M3_KV, E4M3_ROW, Narrow, Setting
from fathom.probes.recording import CHOICES, Recording, stored_name

ROWS: Final = 16  # of a site that are judged under each rounding
PLACES: Final = 3  # layers that are looked at for one choice
CLEARLY: Final = 0.8  # times as far as under any other choice: the nearest is theirs
ON_GRID: Final = 0.9  # of the rows, from which on a format is theirs: some may be wrong

# Sites that show a choice, in the order in which they are cheap to judge.
SHOWN_BY: Final = {
    "kv": (sites.MIXED, sites.UNROTATED, sites.ATTENTION_OUTPUT, sites.ATTENTION_STREAMS, sites.STREAMS),
    "index": (sites.SELECTED,),
    "linears": (
        sites.LATENT, sites.SHARED_GATE, sites.SHARED_UP, sites.QUERY, sites.ATTENTION_OUTPUT, sites.EXPERTS_OUTPUT,
        sites.STREAMS,
    ),
}  # fmt: skip


class Found(NamedTuple):
    """The rounding of a run, and for each choice what it rests on."""

    rounding: Rounding
    rests: dict[str, str]


def find(setting: Setting, recording: Recording) -> Found:
    """Find how a recorded run rounds; what nothing shows is as in `deployed`, and said to be assumed."""
    rounding, rests = ROUNDINGS[DEPLOYED], dict[str, str]()
    possible = {place: [form for form in forms if _can_be(setting, place, form)] for place, forms in FORMS.items()}
    for place in ("kv", "index"):
        found = _on_grid(setting, recording, place, possible[place])
        form, rests[place] = found or (possible[place][0], "")
        rounding = replace(rounding, **{place: form})
    for place in ("linears", "kv", "index"):
        if not rests.get(place):
            rounding, rests[place] = _judged(setting, recording, rounding, place, possible[place])
    setting.parameters.forget()
    return Found(rounding, {place: rests[place] for place in FORMS})


def _can_be(setting: Setting, place: str, form: str) -> bool:
    """Whether the model has widths that a format's blocks divide."""
    try:
        check_widths(setting.config, replace(ROUNDINGS[PLAIN], **{place: form}))
    except ConfigError:
        return False
    return True


class Grid(NamedTuple):
    """A format, and the recorded tensors that are in it where a run rounds so."""

    form: str
    told: str
    narrow: Narrow
    columns: int | None  # that are rounded; None: all
    sites: tuple[str, ...]


def _grids(setting: Setting, place: str) -> list[Grid]:
    if place == "kv":
        nope = setting.config.head_dim - setting.config.qk_rope_head_dim
        return [Grid(FP8, "E4M3 by 64 columns", E4M3_KV, nope, (sites.KV.name, sites.ENTRY.name))]
    names = (sites.INDEX_KEY_USED.name, sites.INDEX_QUERY_USED.name)
    forms = ((FP4, "E2M1 by 32 columns", E2M1_INDEX), (FP8, "E4M3 by row", E4M3_ROW))
    return [Grid(form, told, narrow, None, names) for form, told, narrow in forms]


def _on_grid(setting: Setting, recording: Recording, place: str, possible: Sequence[str]) -> tuple[str, str] | None:
    """The format whose numbers the recorded rows are, `none` where they are no format's; None where none are there."""
    seen = 0
    for grid in _grids(setting, place):
        if grid.form not in possible:
            continue
        names = [stored_name(site, layer) for layer in range(setting.config.num_hidden_layers) for site in grid.sites]
        names = [name for name in names if name in recording.tensors][:PLACES]
        on = seen = 0
        for name in names:
            rows = recording.rows(name, recording.at(name)[:ROWS])
            assert rows is not None, f"rows of {name} that it has"
            rows = rows.flatten(0, -2)[..., : grid.columns]
            rows = rows[rows.isfinite().all(-1) & rows.any(-1)]
            if len(rows):
                on, seen = on + int((grid.narrow.rounded(rows) == rows).all(-1).sum()), seen + len(rows)
        if seen and on >= ON_GRID * seen:
            return grid.form, f"{on} of {seen} rows of {' and '.join(names)} are numbers of {grid.told}"
    return (NONE, f"{seen} rows are numbers of no narrow format") if seen else None


def _judged(
    setting: Setting, recording: Recording, rounding: Rounding, place: str, possible: Sequence[str]
) -> tuple[Rounding, str]:
    """The choice under which the first sites that show it are nearest to the oracle."""
    ways = [replace(rounding, **{place: form}) for form in possible]
    checks = [Checks(replace(setting, rounding=way), recording, ROWS) for way in ways]
    for site in SHOWN_BY[place]:
        names = [stored_name(site.name, layer) for layer in range(setting.config.num_hidden_layers)]
        layers = [layer for layer, name in enumerate(names) if name in recording.tensors][:PLACES]
        seen = [[check.glance(layer, site.name) for check in checks] for layer in layers]
        known = [[off for off in offs if off is not None] for offs in seen]
        known = [offs for offs in known if len(offs) == len(ways)]
        total = [sum(offs[n] for offs in known) for n in range(len(ways))]
        best, *others = sorted(total)
        if others and best < CLEARLY * others[0]:
            told = ", ".join(f"{form} {off / len(known):.2g}" for form, off in zip(possible, total, strict=True))
            what = "has a share of other choices" if site.name in CHOICES else "is off by a share of its length"
            return ways[total.index(best)], f"{site.name} {what}: {told}"
    return ways[0], "assumed: nothing that is recorded shows it"
