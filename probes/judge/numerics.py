"""Which rounding a recorded run has: the one under which most of it agrees, looked for where that is cheap.

Each recorded tensor that shows a choice has a say, of layers through the whole depth. What is kept in a narrow format
says so itself: its numbers are on the format's grid. Of everything else a few rows are held against the oracle under
each choice: it may be theirs where they are as near as rounding to the run's dtype leaves them, and where they are near
to none they have no say. So one faulty tensor, or layer, does not set the numerics by which all others are judged.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch
from torch import Tensor

from fathom.model.choices import DEPLOYED, PLAIN
from fathom.model.config import ModelConfig, check_widths
from fathom.model.errors import ConfigError
from fathom.model.observe import sites
from fathom.model.rounding import (
    ALL_FP8,
    F16,
    FORMS,
    FP4,
    FP8,
    GGML,
    RECORD,
    ROUNDINGS,
    TWICE,
    Rounding,
)
from fathom.probes.judge.checks import Checks
from fathom.probes.judge.oracle import ASKED, E2M1_INDEX, E4M3_KV, E4M3_ROW, HALF, REPLICAS, Narrow, Setting
from fathom.probes.judge.oracle_v41 import kept_form
from fathom.probes.judge.recording import CHOICES, Recording, stored_name

ROWS: Final = 16  # of a site that are judged under each rounding
LAYERS: Final = 5  # of those that have a site, from the first to the last, that are looked at
LIKELY: Final = 0.9  # times the spread of the oracle's replicas: runs that round once where these do are at 0.6 or so
CLEARLY: Final = 0.5  # of the squared distance between two choices, by which a tensor is nearer to one of them
ROUNDS: Final = 3
ULP: Final = 2.0**-7  # a number and its scale are of the run's dtype
ON_GRID: Final = 0.9  # of the rows, from which on a format is theirs: some may be wrong

ASSUMED: Final = "assumed: "  # how what is said begins of a choice that nothing shows, or on which tensors disagree

# Sites that show a choice, in groups: the next one is asked where nothing of those before has a say.
SHOWN_BY: Final = {
    "kv": (
        (sites.KV, sites.ENTRY), (sites.MIXED,), (sites.UNROTATED,), (sites.ATTENTION_OUTPUT,),
        (sites.ATTENTION_STREAMS,), (sites.STREAMS,),
    ),
    "index": ((sites.INDEX_KEY_USED, sites.INDEX_QUERY_USED), (sites.SELECTED,)),
    "linears": (
        (sites.LATENT, sites.SHARED_GATE, sites.SHARED_UP, sites.QUERY), (sites.ATTENTION_OUTPUT, sites.EXPERTS_OUTPUT),
        (sites.STREAMS,),
    ),
}  # fmt: skip


class Found(NamedTuple):
    """The rounding of a run, and for each choice what it rests on."""

    rounding: Rounding
    rests: dict[str, str]


@dataclass(frozen=True)
class Say:
    """What one recorded tensor says of a choice."""

    name: str
    site: str
    forms: tuple[str, ...]  # that it may be by this tensor; none: it is near to none
    told: str  # why
    narrow: bool = False  # its numbers are on a format's grid


def find(setting: Setting, recording: Recording, progress: Callable[[str, float], None]) -> Found:
    """Find how a recorded run rounds; what nothing shows is as in `deployed`, or where that cannot be as in `plain`.

    `progress` is called with what is being looked at and the share that is done.
    """
    rounding, rests = ROUNDINGS[DEPLOYED], dict[str, str]()
    glances = Glances(setting, recording)
    possible = {place: [form for form in forms if _can_be(setting, place, form)] for place, forms in FORMS.items()}
    rounding = replace(rounding, **{place: forms[0] for place, forms in possible.items()})
    for number in range(ROUNDS):  # sites that show one choice may follow from another
        before = rounding
        for place, forms in possible.items():
            progress(f"how a run rounds: {place}", number / ROUNDS)
            form, rests[place] = _counted(
                _says(glances, rounding, place, forms),
                forms,
                f16=F16 in (rounding.kv if place == "index" else "", rounding.index if place == "kv" else ""),
            )
            rounding = replace(rounding, **{place: form})
        if rounding == before:
            break
    setting.parameters.forget()
    return Found(_named(rounding, [place for place, why in rests.items() if not why.startswith(ASSUMED)]), rests)


def other_numerics(
    setting: Setting, recording: Recording, progress: Callable[[str, float], None]
) -> dict[str, Rounding]:
    """The candidate that is no fault, by what it is called: the run rounds otherwise than is said."""
    found = find(setting, recording, progress).rounding
    return {} if found == setting.rounding else {f"{found.numerics} numerics": found}


def _named(rounding: Rounding, shown: Sequence[str]) -> Rounding:
    """The rounding that has a name and is the same in what was shown; itself where none is."""
    alike = (known for known in ROUNDINGS.values() if all(getattr(known, p) == getattr(rounding, p) for p in shown))
    return next(alike, rounding) if shown else rounding


def _counted(says: Sequence[Say], possible: Sequence[str], *, f16: bool) -> tuple[str, str]:
    """The form that most sites say, each by most of its layers; and what that rests on, in words.

    `f16`: whether the other cache is of F16, as this one is then, where sites leave that open.
    """
    if len(possible) == 1:
        return possible[0], "the weights and widths of this model allow no other"
    if not says:
        return possible[0], f"{ASSUMED}nothing that is recorded shows it"
    by_site: dict[str, list[tuple[str, ...]]] = {}
    for say in says:
        if say.forms:
            by_site.setdefault(say.site, []).append(say.forms)
    names = ", ".join(say.name for say in says[:2])
    if not by_site:
        return possible[0], f"{ASSUMED}{names} {'are' if len(says) > 1 else 'is'} near to no choice"
    forms = _most([_most(votes, possible) for votes in by_site.values()], possible)
    if len(forms) > 1:  # what F16 changes is seldom seen in what follows from it
        forms = tuple(form for form in forms if (form == F16) == f16)
    alike = forms if all({*forms} <= {*say.forms} for say in says) else forms[:1] if len(forms) == 1 else ()
    if not alike:
        return possible[0], f"{ASSUMED}{names} do not agree"
    agree = sorted((say for say in says if forms[0] in say.forms), key=lambda say: (not say.narrow, len(say.forms)))
    others = [say.name for say in says if forms[0] not in say.forms]
    more = f" and {len(agree) - 1} more" if len(agree) > 1 else ""
    few = f" and {len(others) - 2} more" if len(others) > 2 else ""
    unlike = f"; not so {', '.join(others[:2])}{few}" if others else ""
    either = f"; or {' or '.join(alike[1:])}, which nothing that is recorded tells from it" if alike[1:] else ""
    return forms[0], f"{agree[0].name}{more}: {agree[0].told}{unlike}{either}"


def _most(votes: Sequence[Sequence[str]], possible: Sequence[str]) -> tuple[str, ...]:
    """The forms that most may be, of more than half; none where there is none such."""
    counts = {form: sum(form in vote for vote in votes) for form in possible}
    most = max(counts.values())
    return tuple(form for form, count in counts.items() if count == most and 2 * most > len(votes))


class Rows(NamedTuple):
    """Some rows of a site."""

    theirs: Tensor  # [n, ...], recorded
    ours: Tensor  # the same by the oracle, under one rounding
    usual: float  # how far from these a run of this rounding may be


class Glances:
    """Rows of sites under roundings, each found out once: sites are asked for one choice after the other."""

    def __init__(self, setting: Setting, recording: Recording) -> None:
        self.setting, self.recording = setting, recording
        self._found: dict[tuple[Rounding, int, str, bool], Rows | None] = {}

    def look(self, rounding: Rounding, layer: int, names: Sequence[str], *, freely: bool) -> None:
        """Find these sites out together, which share what they follow from; see `Checks.glances`."""
        new = [site for site in names if (rounding, layer, site, freely) not in self._found]
        checks = Checks(replace(self.setting, rounding=rounding), self.recording, ROWS)
        for site, pair in checks.glances(layer, new, freely=freely).items():
            rows = None
            if pair is not None:
                theirs, (ours, *moved) = pair
                usual = LIKELY * sum(_off(other, ours, site) for other in moved) / REPLICAS
                rows = Rows(theirs, ours.clone(), usual)
            self._found[rounding, layer, site, freely] = rows

    def at(self, rounding: Rounding, layer: int, site: str, *, freely: bool) -> Rows | None:
        """One of those that were looked at; None where nothing is known of it."""
        return self._found[rounding, layer, site, freely]


def _says(glances: Glances, rounding: Rounding, place: str, possible: Sequence[str]) -> list[Say]:
    """What the recorded tensors say, cheap ones first: of the first group of sites in which one has a say.

    Layers whose input must be computed from the embeddings on are asked where no other says anything.
    """
    ways = {form: replace(rounding, **{place: form}) for form in possible}
    unclear: list[Say] = []
    for freely in (False, True):
        for number, group in enumerate(SHOWN_BY[place]):
            more = SHOWN_BY[place][1] if number == 0 and place == "kv" and F16 in possible else ()  # shows F16 alone
            names = [site.name for site in (*group, *more)]
            says = list(_of_group(glances, ways, place, names, freely=freely))
            if any(say.forms for say in says):
                return says
            unclear = unclear or says
        if unclear:
            return unclear
    return []


def _of_group(
    glances: Glances, ways: Mapping[str, Rounding], place: str, group: Sequence[str], *, freely: bool
) -> Iterator[Say]:
    setting, recording = glances.setting, glances.recording
    grids = [grid for grid in _grids(setting, place) if not ways.keys().isdisjoint(grid.forms)]
    on_grid: dict[tuple[str, int], Say | None] = {}
    for site in group:
        names = [stored_name(site, layer) for layer in range(setting.config.num_hidden_layers)]
        layers = [layer for layer, name in enumerate(names) if name in recording.tensors]
        few = 1 if freely else LAYERS
        for layer in dict.fromkeys(layers[n * (len(layers) - 1) // max(1, few - 1)] for n in range(few) if layers):
            on_grid[site, layer] = _on_grid(recording, names[layer], site, grids, ways)
    for looked_at in sorted({layer for _, layer in on_grid}):
        open_ones = [site for (site, layer), say in on_grid.items() if layer == looked_at and say is None]
        for rounding in ways.values():
            glances.look(rounding, looked_at, open_ones, freely=freely)
    for (site, layer), known in on_grid.items():
        say = known
        if say is None:
            rows = [glances.at(rounding, layer, site, freely=freely) for rounding in ways.values()]
            say = _nearest(rows, site, tuple(ways), stored_name(site, layer))
        if say is not None:
            yield say


def _can_be(setting: Setting, place: str, form: str) -> bool:
    """Whether the weights have inputs that are rounded so, and the model widths that a format's blocks divide.

    A run of fp16 has all in it, and one of bf16 nothing that it would round.
    """
    parameters = setting.parameters
    rounds = {
        FP8: lambda: any(map(parameters.rounds, parameters.mappings)),
        GGML: lambda: not ASKED.keys().isdisjoint(parameters.types.values()),
    }
    if place == "linears" and form in rounds and not rounds[form]():
        return False
    if form == F16 and setting.noise.dtype != torch.float32:
        return False
    try:
        check_widths(setting.config, replace(ROUNDINGS[PLAIN], **{place: form}))
    except ConfigError:
        return False
    return True


class Grid(NamedTuple):
    """A format, and the recorded tensors that are in it where a run rounds so."""

    forms: tuple[str, ...]  # choices of which it is
    told: str
    narrow: Narrow
    columns: int | None  # that are rounded; None: all
    sites: tuple[str, ...]


def _grids(setting: Setting, place: str) -> list[Grid]:
    if place == "kv" and setting.config.v41 is not None:
        return list(_grids_of_v41(setting.config))
    if place == "kv":
        nope = setting.config.head_dim - setting.config.qk_rope_head_dim
        return [Grid((FP8,), "E4M3 by 64 columns", E4M3_KV, nope, (sites.KV.name, sites.ENTRY.name))]
    names = (sites.INDEX_KEY_USED.name, sites.INDEX_QUERY_USED.name)
    forms = ((FP4, "E2M1 by 32 columns", E2M1_INDEX), (FP8, "E4M3 by row", E4M3_ROW))
    grids = [Grid((form,), told, narrow, None, names) for form, told, narrow in forms]
    return [*grids, Grid((F16,), "F16", HALF, None, names[:1])]


def _grids_of_v41(config: ModelConfig) -> Iterator[Grid]:
    """Formats of V4.1's caches, those of more columns first: an entry in V4's record may have been rounded before."""
    of_kv, of_entries = ((FP8, ALL_FP8), (RECORD, TWICE)), ((FP8,), (ALL_FP8,))
    for site, alike in ((sites.KV.name, of_kv), (sites.ENTRY.name, of_entries)):
        for kinds in alike:
            form = kept_form(config, kinds[0], site)
            assert form is not None, "of these choices"
            told = f"{form.narrow.name} by {form.narrow.block} columns"
            yield Grid(kinds, told, form.narrow, form.columns, (site,))


def _on_grid(
    recording: Recording, name: str, site: str, grids: Sequence[Grid], possible: Collection[str]
) -> Say | None:
    """The first format whose numbers nearly all of some rows are; None where they are no format's."""
    for grid in grids:
        if site not in grid.sites:
            continue
        rows = recording.known(name, recording.at(name)[:ROWS])
        rows = rows.flatten(0, -2)[..., : grid.columns]
        rows = rows[rows.isfinite().all(-1) & rows.any(-1)]
        if not len(rows):
            continue
        on = int((grid.narrow.rounded(rows) == rows).all(-1).sum())
        forms, told = tuple(form for form in grid.forms if form in possible), f"rows are numbers of {grid.told}"
        if on >= ON_GRID * len(rows):
            return Say(name, site, forms, f"{on} of {len(rows)} {told}", narrow=True)
        if grid.narrow is not HALF and _of_another_scale(rows, grid.narrow):
            return Say(name, site, forms, f"{len(rows)} {told}, under wrong scales", narrow=True)
    return None


def _of_another_scale(rows: Tensor, form: Narrow) -> bool:
    """Whether rows [n, d] are codes of a format but for the scale, which is no power of two: the largest is the top."""
    blocks, _ = form.scales(rows)
    largest = blocks.abs().amax(-1, keepdim=True)
    y = torch.where(largest > 0, blocks / largest, 0.0) * form.largest
    step = form.step(y.clamp(-form.largest, form.largest))
    return bool(((torch.round(y / step) * step - y).abs() <= ULP * y.abs() + step * ULP).all())


def _nearest(found: Sequence[Rows | None], site: str, possible: Sequence[str], name: str) -> Say | None:
    """The choice that rows of a site are near to; None where the choices do not differ there, or nothing is known."""
    known = [rows for rows in found if rows is not None]
    if len(known) < len(found) or len(found) < 2:
        return None
    ours, usual = [rows.ours for rows in known], [rows.usual for rows in known]
    off = [_off(known[0].theirs, one, site) for one in ours]
    apart = [[_off(one, other, site) for other in ours] for one in ours]
    if not any(map(any, apart)):
        return None
    fit = [n for n in range(len(off)) if off[n] <= usual[n]]
    best = min(fit, key=lambda n: off[n], default=0)
    forms = [possible[n] for n in fit if off[n] ** 2 - off[best] ** 2 <= CLEARLY * apart[n][best] ** 2]
    told = ", ".join(f"{form} {value:.2g}" for form, value in zip(possible, off, strict=True))
    what = "a share of other choices than under" if site in CHOICES else "off by a share of its length from"
    return None if len(forms) == len(off) else Say(name, site, tuple(forms), f"{what} {told}")


def _off(one: Tensor, other: Tensor, site: str) -> float:
    """How far rows are from others, over their length, the median; of choices, the share that are others."""
    if site in CHOICES:
        chosen = zip(one.tolist(), other.tolist(), strict=True)
        return sum(len({*a} - {*b}) / max(1, len(a)) for a, b in chosen) / max(1, len(one))
    found = (one - other).flatten(1).norm(dim=1) / other.flatten(1).norm(dim=1)
    found = found[found.isfinite()]
    return float(found.median()) if len(found) else 0.0
