"""Two recordings of one prompt against each other: where they part first, and whether rounding explains it.

Numbers come first: of each tensor that both have, every row is compared. Rows that are not the same may still be right.
Two runs of one model that sum in another order part by a little in the first layer and by more in the last, and each
is as right as the other. So what is judged at a site is what each run makes of its own recorded input: with O for the
oracle's value at the site from a run's own input, the second run's tensor B should be

    B = O_B + (A - O_A)

as the first run's A is off from what follows from the first run's input, and no further off than two independent
roundings are. A fault that both runs have cancels: it is no step from one to the other. A choice that is not the same
must be one that the second run's own scores leave open.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fathom.model.errors import ConfigError
from fathom.model.observe import sites
from fathom.probes.judge.causes import Gap
from fathom.probes.judge.checks import (
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
from fathom.probes.judge.oracle import LOGPROB_IDS, LOGPROBS, PRECISION, Ends, Layer, Noise, Setting
from fathom.probes.judge.recording import CHOICES, OF_ENTRIES, Recording, stored_name

FURTHEST: Final = 16  # rows of a site that are furthest apart and are judged besides the sample
HELD: Final = 1 << 24  # numbers of a tensor that are read at a time
NOT_FROM_SCORES: Final = "the first run's own choice is none that its scores make"


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
    distance: Tensor  # [n] float64: Euclidean over the longer of two rows; of choices, the share in one of them alone

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
    if name != LOGPROBS or not len(at):
        return at
    first, second = (side.rows(LOGPROB_IDS, at) for side in (one, other))
    if first is None or second is None or first.shape != second.shape:
        return at[:0]
    return at[(first == second).all(1)]


def apart(one: Recording, other: Recording, layer: int | None, site: str) -> Apart:
    """Compare all rows of a site that both recordings have."""
    name = stored_name(site, layer)
    at = both(one, other, name)
    known = max(1, HELD // max(1, *(_width(side, name) for side in (one, other)))) if len(at) else 1
    distances = [_distance(*(_canonical(side, layer, site, rows) for side in (one, other))) for rows in at.split(known)]
    return Apart(layer, site, at, torch.cat(distances) if distances else torch.empty(0, dtype=torch.float64))


def _width(side: Recording, name: str) -> int:
    count, *rest = side.tensors[name].shape
    del count
    return int(torch.Size(rest).numel())


def _canonical(side: Recording, layer: int | None, site: str, at: Tensor) -> Tensor:
    """Rows [n, w], of choices and their weights in an order that does not depend on who chose."""
    rows = side.rows(stored_name(site, layer), at)
    assert rows is not None, f"rows of {site} that it has"
    rows = rows.flatten(1)
    if site == sites.EXPERT_WEIGHTS.name:
        ids = side.rows(stored_name(sites.EXPERT_IDS.name, layer), at)
        return rows.sort(1).values if ids is None else rows.gather(1, ids.argsort(1))
    return rows.sort(1, descending=True).values if site in CHOICES else rows


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
        self.unlike: dict[tuple[int | None, str], Apart] = {}
        self.beside: WeakKeyDictionary[Layer | Ends, Layer | Ends] = WeakKeyDictionary()
        most = rows or max(1, affordable(other.setting.config, len(other.recording.tokens)) // 2)
        super().__init__(other.setting, other.recording, most)
        self.most, self.exact = most, 1  # what is furthest is judged too, see `_rest`

    # --- which rows

    def compare(self, layer: int | None, only: Collection[str] | None = None) -> list[Apart]:
        """Compare the numbers of all sites of a layer (None: of the whole model) that both recordings have."""
        found = [apart(self.one.recording, self.recording, layer, site) for site in only or self.recorded(layer)]
        self.unlike |= {(one.layer, one.site): one for one in found}
        return found

    def recorded(self, layer: int | None) -> list[str]:
        """Sites of which both recordings have a row."""
        return [
            site
            for site in super().recorded(layer)
            if len(both(self.one.recording, self.recording, stored_name(site, layer)))
        ]

    def at(self, name: str) -> Tensor:
        """Rows that both recordings have."""
        return both(self.one.recording, self.recording, name)

    def layer(self, number: int, progress: Progress = silent, only: Collection[str] | None = None) -> list[Judged]:
        """Judge the rows of a layer that are not the same; a layer of which all are agrees, and is not computed."""
        del only
        unlike = self.compare(number)
        of_tokens = [one.other for one in unlike if one.site not in OF_ENTRIES]
        at = torch.cat(of_tokens).unique() if any(map(len, of_tokens)) else None
        if at is None and not any(len(one.other) for one in unlike):
            return [_the_same(one) for one in unlike]
        self.sample = sampled(self.config, self._positions() if at is None else at, self.most)
        return self._counted(super().layer(number, progress))

    def ends(self, progress: Progress = silent, only: Collection[str] | None = None) -> list[Judged]:
        """Judge what is of no layer, as `layer`."""
        found: list[Judged] = []
        for one in self.compare(None, only):
            found += [_the_same(one)] if not len(one.other) else self._counted(super().ends(progress, [one.site]))
        return found

    def _counted(self, results: list[Judged]) -> list[Judged]:
        """A site of which all rows are the same agrees, whatever its layer is."""
        return [
            judged if len((unlike := self.unlike[judged.layer, judged.site]).other) else _the_same(unlike)
            for judged in results
        ]

    def _entries(self, layer: Layer) -> Tensor:
        """Entries that are not the same."""
        of_entries = [
            one for (number, site), one in self.unlike.items() if number == layer.layer and site in OF_ENTRIES
        ]
        unlike = [one.other for one in of_entries]
        return sampled(self.config, torch.cat(unlike).unique(), self.most) if unlike else layer.entries[:0]

    def _rest(
        self, checks: Sequence[Check], part: Layer | Ends, parts: Sequence[Tensor], progress: Progress, where: str
    ) -> None:
        """Judge the rows that are furthest apart too."""
        seen = torch.cat(tuple(parts))
        for n, check in enumerate(checks):
            progress(f"{where} {check.judged.site}, what is furthest apart", n / len(checks))
            unlike = self.unlike[check.judged.layer, check.judged.site]
            rest = unlike.distance.masked_fill(torch.isin(unlike.at, seen), 0)
            at = unlike.at[rest.topk(min(FURTHEST, int((rest > 0).sum()))).indices].sort().values
            if len(at):
                if isinstance(part, Layer):
                    part.look(at)
                check.judged.rows += len(at)
                check.add(at, self.theirs(check.judged, at), part, outlying=True)

    # --- what they are held against

    def part(self, layer: int | None, at: Tensor, noise: Noise) -> Layer | Ends:
        """The second run's layer at these rows; the first run's stands beside it."""
        part = super().part(layer, at, noise)
        setting = replace(self.one.setting, noise=noise.beside(self.one.setting.noise.dtype))
        self.beside[part] = Ends(setting) if layer is None else Layer(setting, layer, at)
        return part

    def before(self, part: Layer | Ends, site: str, at: Tensor) -> tuple[Tensor, Tensor]:
        """What the first run has at a site, [n, ...], and what follows from its input by the oracle, [r, n, ...]."""
        beside = self.beside[part]
        theirs = self.one.recording.rows(stored_name(site, part.layer if isinstance(part, Layer) else None), at)
        assert theirs is not None, f"rows of {site} that both have"
        if isinstance(beside, Layer) and isinstance(part, Layer) and beside.at is not part.at:
            beside.look(part.at)
        beside.rests = set()
        ours = beside.computed(site, at)
        part.rests |= beside.rests
        return theirs, ours

    def theirs(self, judged: Judged, at: Tensor) -> Tensor:
        """Rows of the second run."""
        rows = self.recording.rows(judged.name, at)
        assert rows is not None, f"rows of {judged.name} that it has"
        return rows

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

    def turned(self) -> "Pairs":
        """The first run against the second."""
        return Pairs(self.other, self.one, self.most)

    def off(self, judged: Judged) -> tuple[float, float]:
        """How far the first row that differs is from each run's own oracle, over what rounding explains there."""
        assert judged.first is not None, f"{judged.name} differs"
        first, second = (_alone(side, judged, judged.first.position) for side in (self.one, self.other))
        return first, second


def _the_same(one: Apart) -> Judged:
    return Judged(one.layer, one.site, len(one.at), rows=len(one.at), status=Status.AGREES, bound=0.0)


def _alone(side: Side, judged: Judged, position: int) -> float:
    checks, at = Checks(side.setting, side.recording, 1), torch.tensor([position])
    check = checks.check(judged.layer, judged.site)
    theirs = side.recording.rows(judged.name, at)
    assert theirs is not None, f"rows of {judged.name} that it has"
    if not bool(theirs.isfinite().all()):
        return torch.inf
    if isinstance(check, TableOfIds):
        part = checks.part(judged.layer, at, side.setting.noise)
        return 0.0 if torch.equal(theirs.sort(-1).values, check.values(part, at)[0].sort(-1).values) else torch.inf
    return checks.look(check, position).excess


class _PairOfRows(Rows):
    """Judges rows of numbers of the second run by what the first makes of its own input."""

    def __init__(self, check: Rows, pairs: Pairs) -> None:
        # each run has an order of experts of its own: weights are judged sorted
        least = max(check.least, 2.0 ** -PRECISION[pairs.one.setting.noise.dtype])
        super().__init__(check.judged, in_order=False, least=least, view=check.view, more=check.more)
        self.pairs = pairs

    def values(self, part: Layer | Ends, at: Tensor) -> Tensor:
        """``O_B + (A - O_A)``, [r, n, ...]."""
        theirs, ours = self.pairs.before(part, self.judged.site, at)
        found = part.computed(self.judged.site, at)
        if self.judged.site == sites.EXPERT_WEIGHTS.name:
            theirs, ours, found = (x.sort(-1).values for x in (theirs, ours, found))
        same = theirs.isinf() & (theirs == ours)  # of a row that both have, -inf less -inf
        return found + torch.where(same, 0.0, theirs - ours)

    def rounded(self, at: Tensor, theirs: Tensor, part: Layer | Ends) -> Tensor | None:
        """As `Rows.rounded`, where the first run's rows are numbers of the format."""
        before, _ = self.pairs.before(part, self.judged.site, at)
        grid = on_grid(before, self.judged.site, self.pairs.beside[part])
        return on_grid(theirs, self.judged.site, part) if grid is not None and torch.equal(grid, before) else None


class _PairOfChoices(Choice):
    """Judges choices of the second run that are not the first's, by the second's own scores."""

    def __init__(self, judged: Judged, pairs: Pairs) -> None:
        super().__init__(judged, pairs.config)
        self.pairs = pairs

    def add(self, at: Tensor, theirs: Tensor, part: Layer | Ends, *, outlying: bool = False) -> None:
        """As `Choice.add`; where the first run's choice is none that its own scores make, nothing is known."""
        one = self.pairs.one.recording.rows(self.judged.name, at)
        assert one is not None, f"rows of {self.judged.name} that both have"
        other = _distance(*(x.sort(-1, descending=True).values for x in (one, theirs))) > 0
        at, one, theirs = at[other], one[other], theirs[other]
        if not len(at):
            return
        super().add(at, theirs, part, outlying=outlying)
        wrong = [position for position in at.tolist() if position in self.suspects or position in self.sure]
        for position in wrong:
            row = torch.tensor([position])
            if _excess(self, self.pairs.one, self.judged, position, one[at == row]) > 1:
                self.suspects.pop(position, None)
                self.sure.pop(position, None)
                self.judged.leave(1)
                self.judged.why = NOT_FROM_SCORES


def _excess(check: Choice, side: Side, judged: Judged, position: int, ids: Tensor) -> float:
    at = torch.tensor([position])
    assert judged.layer is not None, "choices are made in layers"
    scores = Choice(Judged(judged.layer, judged.site, 1), side.setting.config).values(
        Layer(side.setting, judged.layer, at), at
    )
    return check.excess(position, ids, scores[:1, 0], scores[1:])


class _PairOfIds(TableOfIds):
    """Judges experts that a table says: they are the first run's."""

    def __init__(self, judged: Judged, pairs: Pairs) -> None:
        super().__init__(judged)
        self.pairs = pairs

    def values(self, part: Layer | Ends, at: Tensor) -> Tensor:
        """The first run's ids, [1, n, k]."""
        del part
        ids = self.pairs.one.recording.rows(self.judged.name, at)
        assert ids is not None, f"rows of {self.judged.name} that both have"
        return ids[None]


class _Step(Gap):
    """What the second run has and should not, if it were as the first is."""

    def __init__(self, pairs: Pairs, judged: Judged) -> None:
        super().__init__(pairs.setting, pairs.recording, judged)
        before = Gap(pairs.one.setting, pairs.one.recording, judged)
        if judged.site in CHOICES:
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
