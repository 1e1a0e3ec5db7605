"""Two recordings of one prompt against each other: where they part first, and whether rounding explains it.

Numbers come first: of each tensor that both have, every row is compared. Rows that are not the same may still be right.
Two runs of one model that sum in another order part by a little in the first layer and by more in the last, and each
is as right as the other. So what is judged at a site is what each run makes of its own recorded input: with O for the
oracle's value at the site from a run's own input, the second run's tensor B should be

    B = O_B + (A - O_A)

as the first run's A is off from what follows from the first run's input, and no further off than two independent
roundings are. A fault that both runs have cancels: it is no step from one to the other. A choice that is not the same
must be one that each run's own scores leave open.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fathom.model.errors import ConfigError
from fathom.model.observe import sites
from fathom.probes.judge.again import Again
from fathom.probes.judge.causes import Gap
from fathom.probes.judge.checks import (
    NOT_FINITE,
    OFF_GRID,
    Check,
    Checks,
    Choice,
    Judged,
    Progress,
    Rows,
    Status,
    TableOfIds,
    View,
    affordable,
    on_grid,
    sampled,
    silent,
)
from fathom.probes.judge.oracle import LOGPROB_IDS, LOGPROBS, PRECISION, Ends, Layer, Noise, Setting, Unknown, layer_of
from fathom.probes.judge.recording import CHOICES, OF_ENTRIES, Recording, stored_name

FURTHEST: Final = 16  # rows of a site that are furthest apart and are judged besides the sample
HELD: Final = 1 << 24  # numbers of a tensor that are read at a time


class Side(NamedTuple):
    """One of the two runs, and what it is judged as."""

    recording: Recording
    setting: Setting


@dataclass(frozen=True, slots=True)
class Apart:
    """How far two recordings of one tensor are apart, row by row."""

    layer: int | None
    site: str
    at: Tensor  # [n] int64, positions (or entries) of the rows that both have
    distance: Tensor  # [n] float64: Euclidean over the longer of two rows; of choices nothing but 0 has a meaning

    @property
    def other(self) -> Tensor:
        """Positions of the rows that are not the same numbers."""
        return self.at[self.distance > 0]

    @property
    def name(self) -> str:
        """As in the recordings."""
        return stored_name(self.site, self.layer)


def check_prompts(one: Recording, other: Recording) -> None:
    """Refuse recordings of two prompts: ConfigError. One may be longer than the other."""
    count = min(len(one.tokens), len(other.tokens))
    unlike = (one.tokens[:count] != other.tokens[:count]).nonzero()
    if len(unlike):
        at = int(unlike[0])
        raise ConfigError(
            f"{other.path}: another prompt than {one.path}: tokens[{at}] is {int(other.tokens[at])}, and"
            f" {int(one.tokens[at])} there"
        )


def both(one: Recording, other: Recording, name: str) -> Tensor:
    """Positions (or entries) of a tensor's rows that both recordings have; of log-probabilities, of the same ids."""
    if name not in one.tensors or name not in other.tensors:
        return torch.empty(0, dtype=torch.int64)
    at = other.at(name)
    at = at[torch.isin(at, one.at(name))]
    return at[_same_ids(one, other, LOGPROB_IDS, at)] if name == LOGPROBS else at


def _same_ids(one: Recording, other: Recording, name: str, at: Tensor) -> Tensor:
    """Which rows of ids [n, k] are the same ids in any order, [n] bool."""
    first, second = (side.rows(name, at) for side in (one, other))
    if first is None or second is None or first.shape != second.shape:
        return torch.zeros(len(at), dtype=torch.bool)
    same: Tensor = (first.sort(1).values == second.sort(1).values).all(1)
    return same


def _ordered(one: Recording, other: Recording, side: Recording, name: str, at: Tensor, x: Tensor) -> Tensor:
    """Rows [..., n, k] of one side in an order that does not depend on who chose.

    Weights of experts, and log-probabilities, by their ids where both sides have the same; by size else.
    """
    if name == LOGPROBS:
        ids = LOGPROB_IDS
    elif name.endswith(sites.EXPERT_WEIGHTS.name):
        ids = name.removesuffix(sites.EXPERT_WEIGHTS.name) + sites.EXPERT_IDS.name
    else:
        return x.sort(-1, descending=True).values if name.endswith(CHOICES) else x
    same, own = _same_ids(one, other, ids, at), side.rows(ids, at)
    if own is None or not bool(same.any()):
        return x.sort(-1).values
    by_id = x.gather(-1, own.argsort(1).expand(x.shape))
    return torch.where(same[:, None], by_id, x.sort(-1).values)


def apart(one: Recording, other: Recording, layer: int | None, site: str, at: Tensor) -> Apart:
    """Compare rows of a site that both recordings have."""
    name = stored_name(site, layer)
    widest = max(1, *(math.prod(side.tensors[name].shape[1:]) for side in (one, other)))
    parts = at.split(max(1, HELD // widest))
    return Apart(layer, site, at, torch.cat([_distance(*_rows_of_both(one, other, name, part)) for part in parts]))


def _rows_of_both(one: Recording, other: Recording, name: str, at: Tensor) -> Iterator[Tensor]:
    """Rows [n, w] of each, in one order."""
    for side in (one, other):
        yield _ordered(one, other, side, name, at, side.known(name, at).flatten(1))


def _distance(one: Tensor, other: Tensor) -> Tensor:
    """Of rows [n, w], [n]: 0 where they are the same numbers, infinite where one alone is not finite."""
    if one.shape[1] != other.shape[1]:  # selections, -1 where there is none
        width = max(one.shape[1], other.shape[1])
        one, other = (torch.nn.functional.pad(x, (0, width - x.shape[1]), value=-1) for x in (one, other))
    same = (one == other) | (one.isnan() & other.isnan())
    off = torch.where(same, 0.0, one - other).norm(dim=1)
    longer = torch.maximum(one.nan_to_num(0, 0, 0).norm(dim=1), other.nan_to_num(0, 0, 0).norm(dim=1))
    return torch.where(same.all(1), 0.0, (off / longer).nan_to_num(nan=torch.inf, posinf=torch.inf))


class Pairs(Checks):
    """Holds one recording against another; `layer` and `ends` judge the second one's rows that are not the first's.

    Parameters
    ----------
    one, other
        The two runs, of one prompt and one model.
    rows
        How many rows of a site are judged; None: half of what `Checks` judges, as each is computed for both.

    """

    def __init__(self, one: Side, other: Side, rows: int | None = None) -> None:
        self.one, self.other = one, other
        self.shared: dict[str, Tensor] = {}  # positions (or entries) of the rows that both have of a tensor
        self.unlike: dict[str, Apart] = {}  # by name, of those that were compared
        self.beside: WeakKeyDictionary[Layer | Ends, Layer | Ends] = WeakKeyDictionary()
        most = rows or max(1, affordable(other.setting.config, len(other.recording.tokens)) // 2)
        super().__init__(other.setting, other.recording, most)
        self.most, self.exact = most, 1  # what is furthest is judged too, see `_rest`

    # --- which rows

    def compare(self, layer: int | None, only: Collection[str] | None = None) -> list[Apart]:
        """Compare the numbers of all sites of a layer (None: of the whole model) that both recordings have."""
        wanted = [site for site in self.recorded(layer) if only is None or site in only]
        at = [self.at(stored_name(site, layer)) for site in wanted]
        found = [
            apart(self.one.recording, self.recording, layer, site, rows) for site, rows in zip(wanted, at, strict=True)
        ]
        self.unlike |= {one.name: one for one in found}
        return found

    def recorded(self, layer: int | None) -> list[str]:
        """Sites of which both recordings have a row."""
        return [site for site in super().recorded(layer) if len(self.at(stored_name(site, layer)))]

    def at(self, name: str) -> Tensor:
        """Rows that both recordings have."""
        if name not in self.shared:
            self.shared[name] = both(self.one.recording, self.recording, name)
        return self.shared[name]

    def layer(self, number: int, progress: Progress = silent, only: Collection[str] | None = None) -> list[Judged]:
        """Judge the rows of a layer that are not the same; a layer of which all are agrees, and is not computed."""
        unlike = self.compare(number, only)
        of_tokens = [one.other for one in unlike if one.site not in OF_ENTRIES]
        if not any(len(one.other) for one in unlike):
            return [_the_same(one) for one in unlike]
        at = torch.cat(of_tokens) if of_tokens else torch.empty(0, dtype=torch.int64)
        self.sample = sampled(self.config, at.unique(), self.most)
        return self._counted(super().layer(number, progress, only))

    def sample_of(self, layer: int) -> Tensor:
        """The rows of a layer that are unlike, see `layer`."""
        del layer
        return self.sample

    def ends(self, progress: Progress = silent, only: Collection[str] | None = None) -> list[Judged]:
        """Judge what is of no layer, as `layer`."""
        found: list[Judged] = []
        for one in self.compare(None, only):
            found += [_the_same(one)] if not len(one.other) else self._counted(super().ends(progress, [one.site]))
        return found

    @property
    def where(self) -> str:
        """Both files."""
        return f"both {self.one.recording.path} and {self.recording.path}"

    @property
    def count(self) -> int:
        """As `Checks.count`; the sample is of the rows of the layer at hand that are not the same."""
        return self.most

    def _add(self, check: Check, part: Layer | Ends, at: Tensor) -> bool:
        """As `Checks._add`, of the rows that both recordings have of this site."""
        there = torch.isin(at, self.at(check.judged.name))
        at = at if bool(there.all()) else at[there]
        return not len(at) or super()._add(check, part, at)

    def _counted(self, results: list[Judged]) -> list[Judged]:
        """A site of which all rows are the same agrees, whatever its layer is."""
        return [judged if len((unlike := self.unlike[judged.name]).other) else _the_same(unlike) for judged in results]

    def _entries(self, layer: Layer) -> Tensor:
        """Entries that are not the same."""
        names = [stored_name(site, layer.layer) for site in OF_ENTRIES]
        unlike = [self.unlike[name].other for name in names if name in self.unlike]
        return sampled(self.config, torch.cat(unlike).unique(), self.most) if unlike else layer.entries[:0]

    def _rest(
        self, checks: Sequence[Check], part: Layer | Ends, parts: Sequence[Tensor], progress: Progress, where: str
    ) -> None:
        """Judge the rows that are furthest apart too."""
        seen = torch.cat(tuple(parts))
        for n, check in enumerate(checks):
            progress(f"{where} {check.judged.site}, what is furthest apart", n / len(checks))
            unlike = self.unlike[check.judged.name]
            rest = unlike.distance.masked_fill(torch.isin(unlike.at, seen), 0)
            at = unlike.at[rest.topk(min(FURTHEST, int((rest > 0).sum()))).indices].sort().values
            if len(at):
                if isinstance(part, Layer):
                    part.look(at)
                check.judged.rows += len(at)
                check.add(at, self.recording.known(check.judged.name, at), part, outlying=True)

    # --- what they are held against

    def part(self, layer: int | None, at: Tensor, noise: Noise) -> Layer | Ends:
        """The second run's layer at these rows; the first run's stands beside it."""
        part = super().part(layer, at, noise)
        setting = replace(self.one.setting, noise=noise.beside(self.one.setting.noise.dtype))
        self.beside[part] = Ends(setting) if layer is None else layer_of(setting, layer, at)
        return part

    def before(self, judged: Judged, at: Tensor) -> Tensor:
        """What the first run has at a site, [n, ...]."""
        return self.one.recording.known(judged.name, at)

    def beside_at(self, part: Layer | Ends) -> Layer | Ends:
        """The first run's layer, at the rows of the second's."""
        beside = self.beside[part]
        if isinstance(beside, Layer) and isinstance(part, Layer) and beside.at is not part.at:
            beside.look(part.at)
        return beside

    def computed_before(self, part: Layer | Ends, site: str, at: Tensor) -> Tensor:
        """What follows from the first run's input by the oracle, [r, n, ...]."""
        beside = self.beside_at(part)
        beside.rests = set()
        ours = beside.computed(site, at)
        part.rests |= beside.rests
        return ours

    def check(self, layer: int | None, site: str, view: View | None = None) -> Check:
        """How a site is judged."""
        check = super().check(layer, site, view)
        if isinstance(check, TableOfIds):
            return _PairOfIds(check.judged, self)
        if isinstance(check, Choice):
            return _PairOfChoices(check.judged, self)
        assert isinstance(check, Rows), site
        return _PairOfRows(check, self)

    def gap(self, judged: Judged) -> Gap:
        """What is to be explained of a site that differs."""
        return _Step(self, judged)

    def swapped(self) -> "Pairs":
        """The first run against the second."""
        return Pairs(self.other, self.one, self.most)

    def off(self, judged: Judged) -> tuple[float, float] | None:
        """How far each run is from its own oracle where they first differ, over what rounding explains there.

        None where weights that this takes are not here.
        """
        try:
            first, second = (_alone(side, judged, self.most) for side in (self.one, self.other))
        except Unknown:
            return None
        return first, second


def _the_same(one: Apart) -> Judged:
    return Judged(one.layer, one.site, len(one.at), rows=len(one.at), status=Status.AGREES, bound=0.0)


def _alone(side: Side, judged: Judged, rows: int) -> float:
    assert judged.first is not None, f"{judged.name} differs"
    checks, at = Checks(side.setting, side.recording, rows), torch.tensor([judged.first.position])
    check = checks.check(judged.layer, judged.site)
    theirs = side.recording.known(judged.name, at)
    if not bool(theirs.isfinite().all()):
        return torch.inf
    if isinstance(check, TableOfIds):
        part = checks.part(judged.layer, at, side.setting.noise)
        return 0.0 if torch.equal(theirs.sort(-1).values, check.values(part, at)[0].sort(-1).values) else torch.inf
    if not judged.why:
        return checks.look(check, judged.first.position).excess
    only = [judged.site]  # it is no row by itself that differs
    (whole,) = checks.ends(only=only) if judged.layer is None else checks.layer(judged.layer, only=only)
    return whole.excess if whole.status is not Status.DIFFERS or whole.excess > 1 else torch.inf


class _PairOfRows(Rows):
    """Judges rows of numbers of the second run by what the first makes of its own input."""

    def __init__(self, check: Rows, pairs: Pairs) -> None:
        least = max(check.least, 2.0 ** -PRECISION[pairs.one.setting.noise.dtype])
        super().__init__(check.judged, in_order=True, least=least, view=check.view, more=check.more)
        self.pairs = pairs

    def add(self, at: Tensor, theirs: Tensor, part: Layer | Ends, *, outlying: bool = False) -> None:
        """As `Rows.add`, of rows that are not the same. What one run alone has of no number, or format, differs."""
        judged = self.judged
        unlike = torch.isin(at, self.pairs.unlike[judged.name].other)
        at, theirs = (at, theirs) if bool(unlike.all()) else (at[unlike], theirs[unlike])
        if not len(at):
            return
        before = self.pairs.before(judged, at)
        broken = ~(theirs.flatten(1).isfinite().all(1) & before.flatten(1).isfinite().all(1))
        finite = theirs[broken].isfinite() & before[broken].isfinite()
        self._add_alone(NOT_FINITE, at[broken], theirs[broken], before[broken], finite)
        at, theirs, before = at[~broken], theirs[~broken], before[~broken]
        if not len(at):
            return
        grid, grid_before = on_grid(theirs, judged.site, part), on_grid(before, judged.site, self.pairs.beside[part])
        if grid is not None and grid_before is not None:
            on, on_before = theirs.eq(grid), before.eq(grid_before)
            alone = on.flatten(1).all(1) != on_before.flatten(1).all(1)
            self._add_alone(OFF_GRID, at[alone], theirs[alone], before[alone], (on & on_before)[alone])
        super().add(at, self._ordered(self.pairs.recording, at, theirs), part, outlying=outlying)

    def _add_alone(self, why: str, at: Tensor, theirs: Tensor, before: Tensor, right: Tensor) -> None:
        """Take rows of which a number is wrong in one run; `right` says of which that is not so."""
        for n, position in enumerate(at.tolist()):
            column = int(right[n].flatten().int().argmin())
            one, other = (float(x[n].flatten()[column]) for x in (theirs, before))
            index = tuple(int(i) for i in torch.unravel_index(torch.tensor(column), theirs.shape[1:]))
            self.judged.why = why
            self.surely(position, index, one, other, abs(one - other))

    def values(self, part: Layer | Ends, at: Tensor) -> Tensor:
        """``O_B + (A - O_A)``, [r, n, ...]."""
        one, judged = self.pairs.one.recording, self.judged
        theirs, ours = self.pairs.before(judged, at), self.pairs.computed_before(part, judged.site, at)
        found = self._ordered(self.pairs.recording, at, part.computed(judged.site, at))
        return found + self._ordered(one, at, theirs) - self._ordered(one, at, ours)

    def excess(self, position: int, theirs: Tensor, exact: Tensor, moved: Tensor) -> float:
        """As `Rows.excess`."""
        theirs = self._ordered(self.pairs.recording, torch.tensor([position]), theirs)
        return super().excess(position, theirs, exact, moved)

    def explained(self, position: int, theirs: Tensor, again: Again) -> None:
        """As `Rows.explained`."""
        super().explained(position, self._ordered(self.pairs.recording, torch.tensor([position]), theirs), again)

    def rounded(self, theirs: Tensor, part: Layer | Ends) -> None:
        """Nothing: see `add`."""
        del theirs, part

    def _ordered(self, side: Recording, at: Tensor, x: Tensor) -> Tensor:
        return _ordered(self.pairs.one.recording, self.pairs.recording, side, self.judged.name, at, x)


class _PairOfChoices(Choice):
    """Judges choices that are not the same, each by its own run's scores."""

    def __init__(self, judged: Judged, pairs: Pairs) -> None:
        super().__init__(judged, pairs.config)
        self.pairs = pairs

    def add(self, at: Tensor, theirs: Tensor, part: Layer | Ends, *, outlying: bool = False) -> None:
        """As `Choice.add`, of rows that are not the same, and of the first run's."""
        judged = self.judged
        unlike = torch.isin(at, self.pairs.unlike[judged.name].other)
        at, theirs = at[unlike], theirs[unlike]
        if not len(at):
            return
        super().add(at, theirs, part, outlying=outlying)
        before, one = self.pairs.before(judged, at), Choice(judged, self.pairs.config)
        scores = one.values(self.pairs.beside_at(part), at)
        for row, position in enumerate(at.tolist()):
            if position in self.sure or position in self.suspects:
                continue
            wrong = one.row(position, before[row], scores[:, row])
            if wrong is None or wrong.difference <= wrong.bound:
                continue
            if not wrong.bound or _alone(self.pairs.one, replace(judged, first=wrong, why=""), self.pairs.most) > 1:
                self.sure[position] = replace(wrong, theirs=wrong.ours, ours=wrong.theirs)


class _PairOfIds(TableOfIds):
    """Judges experts that a table says: they are the first run's."""

    def __init__(self, judged: Judged, pairs: Pairs) -> None:
        super().__init__(judged)
        self.pairs = pairs

    def values(self, part: Layer | Ends, at: Tensor) -> Tensor:
        """The first run's ids, [1, n, k]."""
        del part
        return self.pairs.before(self.judged, at)[None]


class _Step(Gap):
    """What the second run has and should not, if it were as the first is."""

    def __init__(self, pairs: Pairs, judged: Judged) -> None:
        super().__init__(pairs.setting, pairs.recording, judged)
        self.follow(Gap(pairs.one.setting, pairs.one.recording, judged))

    def behind(self) -> Self:
        """As `Gap.behind`, of both."""
        other = super().behind()
        other.follow(self.before.behind())
        return other

    def follow(self, before: Gap) -> None:
        """Take what the first run has for what the second should."""
        self.before = before
        if self.judged.site in CHOICES:
            self.shift, self.oracle = torch.zeros(()), before.theirs
            return
        self.shift = before.theirs - before.oracle
        self.oracle = self.oracle + self.shift
        self.noise += before.noise
        self.reach = (self.reach.square() + before.reach.square()).sqrt()

    def share(self, other: Tensor, rows: Tensor | None = None) -> float:
        """As `Gap.share`, of rows that are as far from the oracle as the first run's are."""
        shift = self.shift if rows is None or not self.shift.ndim else self.shift[rows]
        return super().share(other + shift if other.shape[1:] == shift.shape[1:] or not shift.ndim else other, rows)
