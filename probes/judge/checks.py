"""The checks: every recorded tensor held against the oracle, and the bound that rounding sets.

A tensor is judged row by row, a row being the numbers of one token or one entry. Its distance from the oracle may be
`FACTOR` times the spread of the oracle's replicas; that of all rows together `TOGETHER` times; that of one column over
many rows `FACTOR` times. A row that stands out is looked at again alone, see `probes.judge.again`, before it is said to
differ. A choice may be another where the scores say that it was a near tie. What is kept or scored in a narrow format
must be numbers of that format, and no number may be NaN or infinite.

How a site comes out follows from the recorded tensors of its layer, the tokens and the settings alone.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from fathom.model.config import ModelConfig
from fathom.model.observe import sites
from fathom.model.rounding import F16, FP4, FP8, NONE
from fathom.probes.judge.again import Again, look
from fathom.probes.judge.oracle import (
    E2M1_INDEX,
    E4M3_KV,
    E4M3_ROW,
    F64,
    FACTOR,
    FREELY,
    HALF,
    LOGPROBS,
    PRECISION,
    REPLICAS,
    TOGETHER,
    Ends,
    Layer,
    Noise,
    Setting,
    Unknown,
    layer_of,
    sites_of,
)
from fathom.probes.judge.oracle_v41 import Layer41, held_form
from fathom.probes.judge.recording import CHOICES, OF_ENTRIES, WHOLE_MODEL, Recording, stored_name

OFF_GRID: Final = "numbers that the narrow format does not have"
NOT_FINITE: Final = "numbers that are not finite"
FOLLOWS: Final = "what it follows from is not finite"
ONLY_NOISE: Final = "rounding explains differences as large as the rows themselves"
LEAST_SCALE: Final = 2.0**-22
TINY: Final = 1e-300  # the length of a row of zeros
MANY_ROWS: Final = 64  # from so many on the spread of a single column is known well enough to judge it
FEW_ROWS: Final = 4  # that differ most in a column and do not count for it: a flip of one code is the row's matter
LOOKED: Final = 64  # rows of a site that are looked at again at most
LOOK: Final = 1 << 19  # rows of sites, those of each replica, computed for a row that is looked at again: 15 s or so
LOOKS: Final = 4  # times as many for all rows of a site that are
TOLD: Final = 256  # rows that stand out whose numbers are kept
MORE: Final = 4  # times as many replicas when all rows seem to be scaled
HELD: Final = 1 << 25  # numbers of the widest tensor at a time, replicas included: 256 MiB of float64, and several such
WORK: Final = 1 << 41  # multiplications spent on a layer, replicas included: two minutes or so of one core
EXACT_ROWS: Final = 512  # rows without replicas at a time
ENDS_SEEN: Final = 8  # rows at either end of a prompt that every sample has

# Called with what is being done and the share of the work that is done.
Progress = Callable[[str, float], None]


def silent(what: str, share: float) -> None:
    """Progress that nobody is told."""
    del what, share


class Status(StrEnum):
    """How a site came out."""

    AGREES = "agrees"
    DIFFERS = "differs"
    NOT_JUDGED = "not judged"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first row of a site that differs, and in it the number that is furthest off."""

    layer: int | None
    site: str
    position: int  # of the token; of an entry, its number
    index: tuple[int, ...]  # in the row
    theirs: float
    ours: float
    difference: float  # of the whole row; of a choice, between the scores of theirs and ours
    bound: float

    def to_json(self) -> dict[str, Any]:
        """JSON values; what is not finite is a string."""
        return {name: _finite(value) for name, value in (asdict(self) | {"index": list(self.index)}).items()}


@dataclass(slots=True)
class Judged:
    """How one site of a recording came out.

    `worst` and `bound` are distances relative to the length of a row: of the row that is furthest beyond its bound, or,
    where only all rows together are too far, of all of them. Of a choice, `worst` says how far ahead the score was
    that was passed over, as a multiple of what a near tie may be, and `bound` is 1.
    """

    layer: int | None
    site: str
    recorded: int  # rows
    rows: int = 0  # judged
    worst: float = 0.0
    bound: float = 0.0
    status: Status = Status.NOT_JUDGED
    why: str = ""  # it was not judged, or differs although no row does
    free: bool = False  # the layer's input was not recorded: held against a run of the oracle from the embeddings
    first: Difference | None = None
    wrong: list[int] = field(default_factory=list)  # positions of the rows that differ
    left: int = 0  # rows that nothing is known of, as what they follow from is not finite
    ties: int = 0  # rows that stood out and that rounding explains, looked at again
    open: int = 0  # rows that stand out and could not be looked at again as long as it takes
    assumed: tuple[str, ...] = ()  # choices that the oracle made itself on the way, as none was recorded
    of: str = ""  # the view that was judged, see `Checks`; empty: the site as it is

    @property
    def name(self) -> str:
        """As in the recording."""
        return stored_name(self.site, self.layer)

    @property
    def excess(self) -> float:
        """Distance over bound; above 1 the site differs."""
        return self.worst / self.bound if self.bound else math.inf if self.worst else 0.0

    def leave(self, rows: int) -> None:
        """Take so many rows for not judged, since what they follow from is not finite."""
        self.rows, self.left, self.why = self.rows - rows, self.left + rows, FOLLOWS

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        values = {name: getattr(self, name) for name in ("layer", "site", "rows", "recorded", "worst", "bound")}
        more = {"why": self.why} if self.why else {}
        return (
            {name: _finite(value) for name, value in values.items()}
            | {"status": self.status.value}
            | more
            | ({"free": True} if self.free else {})
            | ({"left": self.left} if self.left else {})
            | ({"ties": self.ties} if self.ties else {})
            | ({"open": self.open} if self.open else {})
            | ({"assumed": list(self.assumed)} if self.assumed else {})
        )


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# --- what all checks have in common


class Check(ABC):
    """Judges a site; rows come in parts.

    Parameters
    ----------
    judged
        What becomes of it.

    """

    def __init__(self, judged: Judged) -> None:
        self.judged = judged
        self.sure: dict[int, Difference] = {}  # by position (or entry): rows that differ
        self.suspects: dict[int, Difference | None] = {}  # those that stand out, and may be explained
        self.certain: int | None = None  # the suspect that was looked at again and is not explained
        self.spent = 0  # rows of sites that were computed to look again

    @abstractmethod
    def values(self, part: Layer | Ends, at: Tensor) -> Tensor:
        """What rows of theirs are held against, [r, n, ...]."""

    @abstractmethod
    def add(self, at: Tensor, theirs: Tensor, part: Layer | Ends, *, outlying: bool = False) -> None:
        """Take rows [n, ...] of theirs at these positions (or entries).

        `outlying` ones were chosen because they are far off: they say nothing about all rows together.
        """

    @abstractmethod
    def further(self, at: Tensor, theirs: Tensor, part: Layer | Ends) -> Tensor:
        """Of rows without replicas, those that must be judged with them."""

    @abstractmethod
    def excess(self, position: int, theirs: Tensor, exact: Tensor, moved: Tensor) -> float:
        """Distance over bound of a row [1, ...] from exact values [1, ...], replicas of which are [r, 1, ...]."""

    @abstractmethod
    def explained(self, position: int, theirs: Tensor, again: Again) -> None:
        """Take it that a row was looked at again, and what is nearest to it."""

    def settle(self, looked: "Looked") -> bool:
        """Look again at the rows that stand out, in order, until one is sure to differ; returns whether one is."""
        for position in sorted(self.suspects):
            if position == self.certain or any(sure <= position for sure in self.sure):
                break
            again = looked(self, position) if self.judged.ties < LOOKED else None
            if again is None or again.excess > 1:
                self.judged.open = 0 if again and again.whole else len(self.suspects)
                self.certain = position
                break
            self.judged.ties += 1
            del self.suspects[position]
        return bool(self.sure or self.suspects)

    def close(self, looked: "Looked") -> None:
        """Say how the site came out."""
        wrong = self.settle(looked)
        judged, found = self.judged, self.suspects | self.sure
        judged.wrong = sorted(found)
        judged.first = found[judged.wrong[0]] if wrong else None
        judged.status = Status.DIFFERS if wrong else Status.AGREES
        self.conclude(looked)
        if judged.status is Status.AGREES and judged.left > judged.rows:
            judged.status = Status.NOT_JUDGED

    @abstractmethod
    def conclude(self, looked: "Looked") -> None:
        """Worst and bound, and what no row by itself shows."""


# Looks again at a row of a check. `enough`: an excess at which nothing more is tried.
Looked = Callable[..., Again]


# --- rows of numbers


class Rows(Check):
    """Judges a site whose rows are numbers.

    Parameters
    ----------
    judged
        What becomes of it.
    in_order
        Whether weights of experts are those of ids that were recorded too.
    least
        A scale that is nobody's fault, see `conclude`.
    view
        What is judged of rows; None: all of them as they are.
    more
        By how much replicas of another kind are longer than the oracle, as `scale`.

    """

    def __init__(
        self, judged: Judged, *, in_order: bool, least: float, view: "View | None", more: Callable[[], Tensor]
    ) -> None:
        super().__init__(judged)
        self.view, self.more = view or _whole, more
        self.outlying: list[Tensor] = []  # as `found`, of rows that were chosen because they are far off
        self.least = least  # a scale that is nobody's fault: half a unit in the last place, or fp32's inside a norm
        self.in_order = in_order  # of ids that were recorded too, where it is experts' weights
        self.found: list[Tensor] = []  # of each row: position, length, spread and distance
        self.again: dict[int, Tensor] = {}  # the same of rows that were looked at again, by position
        self.columns: Tensor = torch.zeros(2, 1, dtype=F64)  # squared distance and spread, rows weighing alike
        self.peaks: Tensor = torch.zeros(0, 1, dtype=F64)  # the largest of the distances
        # Projection on the oracle of (theirs - oracle), and of (each replica - oracle): a common factor shows here.
        self.along: Tensor = torch.zeros(1, dtype=F64)
        self.size = 0.0
        self.worst_seen: tuple[float, Difference] | None = None

    def values(self, part: Layer | Ends, at: Tensor) -> Tensor:
        """The site."""
        return part.computed(self.judged.site, at)

    def add(self, at: Tensor, theirs: Tensor, part: Layer | Ends, *, outlying: bool = False) -> None:
        """Take rows [n, ...] of theirs at these positions (or entries)."""
        broken = ~theirs.flatten(1).isfinite().all(1)
        if bool(broken.any()):  # whatever they follow from
            self._add_broken(at[broken], theirs[broken])
            at, theirs = at[~broken], theirs[~broken]
        if not len(at):
            return
        oracle = self.values(part, at)
        if (rounded := self.rounded(theirs, part)) is not None:
            self._add_grid(at, theirs, rounded)
        shape = self._viewed(theirs[None]).shape[2:]
        theirs, oracle = self._viewed(theirs[None])[0].flatten(1), self._viewed(oracle).flatten(2)
        at = at.repeat_interleave(len(theirs) // len(at))
        known = oracle.isfinite().all(2).all(0)
        if not bool(known.all()):  # a recorded tensor before it is not finite there: that one differs
            self.judged.leave(len(at[~known].unique()))
        if not bool(known.any()):
            return
        at, theirs, exact, moved = at[known], theirs[known], oracle[0, known], oracle[1:, known]
        off = (theirs - exact).square()
        spread = (moved - exact).square().mean(0) if len(moved) else torch.zeros_like(exact)
        distance, allowed = off.sum(1), spread.sum(1)
        (self.outlying if outlying else self.found).append(
            torch.stack((at.to(F64), exact.norm(dim=1), allowed.sqrt(), distance.sqrt()))
        )
        ratio = _over(distance, allowed)
        worst = int(ratio.argmax())
        for row in {worst, *(ratio > FACTOR**2).nonzero()[:, 0].tolist()}:
            told = self._difference(at, row, shape, theirs, exact, off, spread) if len(self.suspects) < TOLD else None
            if row == worst and told and (self.worst_seen is None or float(ratio[worst]) > self.worst_seen[0]):
                self.worst_seen = float(ratio[worst]), told
            if ratio[row] > FACTOR**2:
                self.suspects.setdefault(int(at[row]), told)
        if not outlying:
            self._add_up(theirs - exact, moved - exact, exact, off, spread)

    def _add_up(self, theirs: Tensor, moves: Tensor, exact: Tensor, off: Tensor, spread: Tensor) -> None:
        """Add to what is known of all rows: how far theirs [n, w] and replicas [r, n, w] are from the oracle."""
        allowed = spread.sum(1)
        weight = torch.where(allowed > 0, 1 / allowed, 0)[:, None]
        self.along = self.along + (torch.cat((theirs[None], moves)) * exact * weight).sum((1, 2))
        self.size += float((exact.square() * weight).sum())
        self.columns = self.columns + torch.stack(((off * weight).sum(0), (spread * weight).sum(0)))
        self.peaks = torch.cat((self.peaks.expand(-1, off.shape[1]), off * weight))
        self.peaks = self.peaks.topk(min(FEW_ROWS, len(self.peaks)), 0).values

    def further(self, at: Tensor, theirs: Tensor, part: Layer | Ends) -> Tensor:
        """Of rows without replicas, those further from the oracle than any row that was judged may be, worst first.

        And those with a number that their narrow format does not have, or that is not finite. They are then judged as
        all others, by `add`; the rest are within the narrowest bound there is.
        """
        oracle = self._viewed(self.values(part, at))[0].flatten(1)
        rounded = self.rounded(theirs, part)
        wrong = ~theirs.flatten(1).isfinite().all(1)
        if rounded is not None:
            wrong |= (theirs != rounded).flatten(1).any(1)
        theirs = self._viewed(theirs[None])[0].flatten(1)
        _, length, spread, _ = torch.cat(self.found, 1) if self.found else torch.zeros(4, 1, dtype=F64)
        least = FACTOR * float((spread / length.clamp_min(TINY)).min())
        beyond = (theirs - oracle).norm(dim=1) - least * oracle.norm(dim=1)
        # A NaN is the oracle's: what it follows from is not finite.
        beyond = beyond.nan_to_num(0, 0, 0).view(len(at), -1).amax(1).masked_fill(wrong, math.inf)
        order = beyond.argsort(descending=True)
        return at[order[beyond[order] > 0]]

    def excess(self, position: int, theirs: Tensor, exact: Tensor, moved: Tensor) -> float:
        """Of the row, or of what is viewed of it, that is furthest beyond its bound."""
        del position
        _, _, spread, distance = self._measured(theirs, exact, moved)
        return float(_over(distance, FACTOR * spread).max())

    def explained(self, position: int, theirs: Tensor, again: Again) -> None:
        """Keep its distance from what is nearest."""
        self.again[position] = self._measured(theirs, again.exact, again.moved)
        self.again[position][0] = position

    def _measured(self, theirs: Tensor, exact: Tensor, moved: Tensor) -> Tensor:
        """As in `found`, of what is viewed of a row; positions are left open."""
        theirs, exact = (self._viewed(x[None])[0].flatten(1) for x in (theirs, exact))
        spread = (self._viewed(moved).flatten(2) - exact).square().mean(0).sum(1).sqrt()
        return torch.stack(
            (torch.zeros(len(exact), dtype=F64), exact.norm(dim=1), spread, (theirs - exact).norm(dim=1))
        )

    def _viewed(self, x: Tensor) -> Tensor:
        """What is judged of rows [r, n, ...]."""
        if self.judged.site == sites.EXPERT_WEIGHTS.name and not self.in_order:
            x = x.sort(-1).values
        return self.view(x)

    def rounded(self, theirs: Tensor, part: Layer | Ends) -> Tensor | None:
        """Theirs rounded to the format that they must be numbers of; None where there is none."""
        return on_grid(theirs, self.judged.site, part) if self.view is _whole else None

    def _add_grid(self, at: Tensor, theirs: Tensor, rounded: Tensor) -> None:
        """Take rows that should be numbers of a narrow format, and the same rounded to it."""
        theirs, rounded = theirs.flatten(1), rounded.flatten(1)
        for row in (theirs != rounded).any(1).nonzero()[:, 0].tolist():
            self.judged.why = OFF_GRID
            column = int((theirs[row] - rounded[row]).abs().argmax())
            one, other = float(theirs[row, column]), float(rounded[row, column])
            self.surely(int(at[row]), (column,), one, other, abs(one - other))

    def _add_broken(self, at: Tensor, theirs: Tensor) -> None:
        """Take rows with numbers that are not finite."""
        for position, row in zip(at.tolist(), theirs, strict=True):
            self.judged.why = NOT_FINITE
            column = int(row.flatten().isfinite().int().argmin())
            self.surely(position, _unraveled(column, row.shape), float(row.flatten()[column]), math.nan, math.inf)

    def surely(self, position: int, index: tuple[int, ...], theirs: float, ours: float, difference: float) -> None:
        """Note a row that differs whatever is rounded."""
        if position not in self.sure:
            judged = self.judged
            self.sure[position] = Difference(judged.layer, judged.site, position, index, theirs, ours, difference, 0.0)

    def _difference(
        self,
        at: Tensor,
        row: int,
        shape: Sequence[int],
        theirs: Tensor,
        exact: Tensor,
        off: Tensor,
        spread: Tensor,
    ) -> Difference:
        column = int(_over(off[row], spread[row]).argmax())
        one, other = float(theirs[row, column]), float(exact[row, column])
        difference, bound = float(off[row].sum().sqrt()), FACTOR * float(spread[row].sum().sqrt())
        index = _unraveled(column, shape)
        return Difference(self.judged.layer, self.judged.site, int(at[row]), index, one, other, difference, bound)

    @property
    def scale(self) -> Tensor:
        """By how much theirs, and each replica, is longer than the oracle, as a share."""
        return self.along / self.size if self.size else self.along * 0

    def _rows(self, *, outlying: bool) -> Tensor:
        """`found`, with what was found of rows that were looked at again in the place of what was before."""
        parts = self.found + (self.outlying if outlying else [])
        rows = torch.cat(parts, 1) if parts else torch.zeros(4, 0, dtype=F64)
        if not self.again:
            return rows
        kept = rows[:, ~torch.isin(rows[0], torch.tensor([float(p) for p in self.again], dtype=F64))]
        there = set(rows[0].tolist())
        return torch.cat((kept, *(again for position, again in self.again.items() if position in there)), 1)

    def conclude(self, looked: Looked) -> None:
        """Worst and bound; then what no row by itself shows: all rows, their scale, a column."""
        judged = self.judged
        rows = self._rows(outlying=True)
        if not rows.shape[1]:  # nothing is known but that numbers are not finite
            judged.worst = math.inf
            return
        _, length, spread, distance = rows
        worst = int(_over(distance, spread).argmax())
        scale = float(length[worst]) or 1.0
        judged.worst, judged.bound = float(distance[worst]) / scale, FACTOR * float(spread[worst]) / scale
        if judged.status is Status.DIFFERS:
            judged.worst = math.inf if judged.why == NOT_FINITE else judged.worst
            return
        _, length, spread, distance = self._rows(outlying=False)
        if not len(length):  # all rows were chosen because they are far off: what they share says nothing
            return
        if int((FACTOR * spread >= length).sum()) * 2 > len(length):  # nothing but noise: no check at all
            judged.status, judged.why = Status.NOT_JUDGED, ONLY_NOISE
            return
        why = self._together(looked) or self._scaled() or self._column()
        if why:
            judged.status, judged.why = Status.DIFFERS, why
            judged.first = None if self.worst_seen is None else self.worst_seen[1]
            judged.wrong = [] if judged.first is None else [judged.first.position]

    def _together(self, looked: Looked) -> str:
        """Say so where all rows together are too far off, though near ties of the furthest are taken both ways."""
        while True:
            positions, length, spread, distance = self._rows(outlying=False)
            ratio = _over(distance, spread)
            if float(ratio.square().mean().sqrt()) <= TOGETHER:
                return ""
            open_ = [n for n in ratio.argsort(descending=True).tolist() if int(positions[n]) not in self.again]
            if not open_ or float(ratio[open_[0]]) <= TOGETHER or len(self.again) >= LOOKED:
                break
            looked(self, int(positions[open_[0]]), enough=1 / FACTOR)
        together = float(distance.square().sum().sqrt()), float(spread.square().sum().sqrt())
        whole = float(length.square().sum().sqrt()) or 1.0
        self.judged.worst, self.judged.bound = together[0] / whole, TOGETHER * together[1] / whole
        return f"no row alone, but all rows together: {together[0] / (together[1] or TINY):.2g} times the spread"

    def _scaled(self) -> str:
        """Say so where all rows are longer, or shorter, than replicas are."""
        theirs, replicas = abs(float(self.scale[0])), self.scale[1:]
        if theirs <= self.least or theirs <= FACTOR * float(replicas.square().mean().sqrt()):
            return ""
        replicas = torch.cat((replicas, self.more()))
        if theirs <= FACTOR * float(replicas.square().mean().sqrt()):
            return ""
        return f"no row alone, but all are scaled by {1 + float(self.scale[0]):.5g}"

    def _column(self) -> str:
        """Say so where one number of many rows is too far off."""
        off, spread = self.columns
        column = _over((off - self.peaks.sum(0)).clamp_min(0), spread).sqrt()
        if sum(part.shape[1] for part in self.found) < MANY_ROWS or float(column.max()) <= FACTOR:
            return ""
        return f"no row alone, but number {int(column.argmax())} of all rows: {float(column.max()):.2g} times"


def _over(distance: Tensor, allowed: Tensor) -> Tensor:
    """One over the other: 0 where nothing differs, infinite where nothing may."""
    return torch.where(distance == 0, 0.0, torch.where(allowed > 0, distance / allowed, math.inf))


def _unraveled(column: int, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(column), tuple(shape)))


# --- choices


class Choice(Check):
    """Judges which entries, or experts, were chosen for each token."""

    def __init__(self, judged: Judged, config: ModelConfig) -> None:
        super().__init__(judged)
        self.most = config.num_experts_per_tok
        if judged.site == sites.SELECTED.name:
            self.most = config.index_topk
        elif judged.site == sites.CANDIDATES.name and config.v41 is not None:
            self.most = config.v41.candidate_blocks
        self.worst = 0.0  # of the rows that agree
        self.equal = 0  # rows in which the last that is chosen has an equal that is not

    def values(self, part: Layer | Ends, at: Tensor) -> Tensor:
        """The scores [r, n, e] that are chosen by."""
        assert isinstance(part, Layer), "choices are made in layers"
        if self.judged.site == sites.CANDIDATES.name:
            assert isinstance(part, Layer41), "of V4.1 alone"
            return part.block_scores(at)
        if self.judged.site != sites.SELECTED.name:
            return part.expert_ranks(at)
        scores = part.index_scores(at)
        if sites.CANDIDATES.name in part.rests:  # near ties between blocks: what may be chosen is not known
            raise Unknown(f"{sites.CANDIDATES.name} are not recorded, among which these are chosen")
        return scores

    def add(self, at: Tensor, theirs: Tensor, part: Layer | Ends, *, outlying: bool = False) -> None:
        """Take ids [n, k], -1 where there is none."""
        del outlying
        scores = self.values(part, at)
        for row, (position, ids) in enumerate(zip(at.tolist(), theirs, strict=True)):
            if bool(scores[:, row].isnan().any()):
                self.judged.leave(1)
                continue
            self.equal += self._tied(scores[0, row])
            found = self.row(position, ids, scores[:, row])
            if found is None:
                continue
            if found.difference <= found.bound:
                self.worst = max(self.worst, _ratio(found))
            elif found.bound:
                self.suspects[position] = found
            else:
                self.sure[position] = found

    def _tied(self, scores: Tensor) -> bool:
        best = scores.topk(min(self.most + 1, len(scores))).values
        return len(best) > self.most and bool(best[-1] == best[-2]) and not bool(best[-1].isneginf())

    def further(self, at: Tensor, theirs: Tensor, part: Layer | Ends) -> Tensor:
        """Of rows that no replica was made of, those whose choice is not the oracle's."""
        rows = zip(at.tolist(), theirs, self.values(part, at)[0][:, None], strict=True)
        return at[torch.tensor([self.row(*row) is not None for row in rows], dtype=torch.bool)]

    def excess(self, position: int, theirs: Tensor, exact: Tensor, moved: Tensor) -> float:
        """How far ahead of what was chosen something is that was not, over what a near tie may be."""
        found = self.row(position, theirs[0], torch.cat((exact, moved[:, 0])))
        return 0.0 if found is None else _ratio(found)

    def explained(self, position: int, theirs: Tensor, again: Again) -> None:
        """Keep how near a tie it was."""
        del position, theirs
        self.worst = max(self.worst, min(again.excess, 1.0))

    def row(self, position: int, ids: Tensor, scores: Tensor) -> Difference | None:
        """What was chosen otherwise and is furthest from a tie; None where nothing was."""
        exact, k = scores[0], min(self.most, int((~scores[0].isneginf()).sum()))
        best = exact.sort(descending=True, stable=True).indices[:k]

        def told(theirs: float, ours: float, gap: float, bound: float) -> Difference:
            return Difference(self.judged.layer, self.judged.site, position, (), theirs, ours, gap, bound)

        if not bool(ids.isfinite().all()):
            return told(float(ids[~ids.isfinite()][0]), math.nan, math.inf, 0.0)
        chosen = ids[ids >= 0].long()
        known = chosen[chosen < len(exact)]
        if bool((chosen != ids[ids >= 0]).any()) or len(known) < len(chosen):
            return told(float(ids.max()), math.nan, math.inf, 0.0)
        if bool(exact[chosen].isneginf().any()):  # an entry that is not finished
            return told(float(chosen[exact[chosen].isneginf()][0]), math.nan, math.inf, 0.0)
        if len(chosen) != k or len(chosen.unique()) != k:
            return told(float(len(chosen.unique())), float(k), math.inf, 0.0)
        more, less = chosen[~torch.isin(chosen, best)], best[~torch.isin(best, chosen)]
        if not len(more):
            return None
        gap = exact[less][:, None] - exact[more]  # whatever they chose, they ranked above whatever they did not
        moved = scores[1:, less][:, :, None] - scores[1:, more][:, None]
        spread = (moved - gap).square().mean(0).sqrt()
        seen = ~exact.isneginf()
        usual = (scores[1:, seen] - exact[seen]).square().mean(0).sqrt().median() * math.sqrt(2)
        bound = FACTOR * torch.maximum(spread, usual)
        worst = int(_over(gap, bound).argmax())
        one, other = divmod(worst, len(more))
        return told(float(more[other]), float(less[one]), float(gap.flatten()[worst]), float(bound.flatten()[worst]))

    def conclude(self, looked: Looked) -> None:
        """The row that is furthest from a tie."""
        del looked
        found = [difference for difference in (self.suspects | self.sure).values() if difference is not None]
        self.judged.worst, self.judged.bound = max([self.worst, *map(_ratio, found)]), 1.0


class TableOfIds(Check):
    """Judges the experts of a layer with hash routing, which a table of the files says."""

    def values(self, part: Layer | Ends, at: Tensor) -> Tensor:
        """The ids, [1, n, k]."""
        return part.computed(self.judged.site, at)

    def add(self, at: Tensor, theirs: Tensor, part: Layer | Ends, *, outlying: bool = False) -> None:
        """Take ids [n, k]; their order says nothing."""
        del outlying
        oracle = self.values(part, at)[0].sort(-1).values
        for position, row, ours in zip(at.tolist(), theirs.sort(-1).values, oracle, strict=True):
            if bool((row != ours).any()):
                column = int((row != ours).nonzero()[0])
                numbers = float(row[column]), float(ours[column]), math.inf, 0.0
                self.sure[position] = Difference(self.judged.layer, self.judged.site, position, (), *numbers)

    def further(self, at: Tensor, theirs: Tensor, part: Layer | Ends) -> Tensor:
        """Rows that are not the table's."""
        return at[(theirs.sort(-1).values != self.values(part, at)[0].sort(-1).values).any(-1)]

    def excess(self, position: int, theirs: Tensor, exact: Tensor, moved: Tensor) -> float:
        """Nothing is rounded."""
        raise NotImplementedError

    def explained(self, position: int, theirs: Tensor, again: Again) -> None:
        """Nothing is rounded."""
        raise NotImplementedError

    def conclude(self, looked: Looked) -> None:
        """All or nothing."""
        del looked
        self.judged.worst = math.inf if self.sure else 0.0


def _ratio(found: Difference) -> float:
    return found.difference / found.bound if found.bound else math.inf if found.difference else 0.0


# --- a recording


class Checks:
    """Holds a recording against the oracle, layer by layer.

    Parameters
    ----------
    setting
        Numerics, weights, and how far rounding goes.
    recording
        Whose rows `setting.theirs` gives.
    rows
        How many rows of a site are judged; None: as many as `WORK` allows, all of them in a short prompt.
    every
        Whether the other rows are computed too, without replicas. One that is further off than the least that a row
        of the sample is allowed is then given replicas of its own: a fault in one row of many is found.
    views
        What else is judged of a site: what it is called, and what of its rows.

    """

    def __init__(
        self,
        setting: Setting,
        recording: Recording,
        rows: int | None = None,
        *,
        every: bool = False,
        views: "Sequence[tuple[str, View]]" = (),
    ) -> None:
        self.setting, self.recording, self.config = setting, recording, setting.config
        most = affordable(self.config, len(setting.tokens))
        self.work = min(LOOK, most * (1 + REPLICAS) * len(sites_of(self.config, 0)))  # to look at a row again
        self.most = rows or most
        self.sample = sampled(self.config, self._positions(), self.most)
        self.exact = (1 + REPLICAS) * most if every else 0  # rows that are computed without replicas
        self.views = tuple(views)
        self.reached: dict[str, float] = {}  # the largest of what a clamp may cut, see `Part.activated`
        self.ties: dict[str, int] = {}  # rows of a choice in which the last that was taken had an equal

    def at(self, name: str) -> Tensor:
        """Positions (or entries) of the rows of a recorded tensor."""
        return self.recording.at(name)

    @property
    def where(self) -> str:
        """What is judged, as it is told."""
        return str(self.recording.path)

    @property
    def count(self) -> int:
        """How many rows of a site are judged, of as many as there are."""
        return len(self.sample)

    def _entries(self, layer: Layer) -> Tensor:
        """The entries of a layer that are judged."""
        return sampled(self.config, layer.entries, self.count)

    def _positions(self) -> Tensor:
        positions = self.recording.positions
        return torch.arange(len(self.setting.tokens)) if positions is None else positions

    def sample_of(self, layer: int) -> Tensor:
        """Positions of a layer whose rows are judged."""
        own = self.recording.of_layers.get(layer)
        if own is None and self.config.v41 is not None and self.recording.positions is not None:
            names = [stored_name(site, layer) for site in self.recorded(layer) if site not in OF_ENTRIES]
            counts = {len(self.at(name)) for name in names}
            own = torch.arange(len(self.setting.tokens)) if counts == {len(self.setting.tokens)} else None
        return self.sample if own is None else sampled(self.config, own, self.most)

    def recorded(self, layer: int | None) -> list[str]:
        """Sites of a layer (of none: of the whole model) that were recorded, in the order in which they follow."""
        names = WHOLE_MODEL if layer is None else sites_of(self.config, layer)
        return [site for site in names if stored_name(site, layer) in self.recording.tensors]

    def layer(self, number: int, progress: Progress = silent, only: Collection[str] | None = None) -> list[Judged]:
        """Judge the recorded sites of a layer, or of these `only` those that were recorded."""
        self.setting.parameters.forget()
        sample = self.sample_of(number)
        layer = self.part(number, sample, self.setting.noise)
        assert isinstance(layer, Layer), "of a number"
        wanted = [site for site in self.recorded(number) if only is None or site in only]
        checks = [check for site in wanted for check in self._checks(number, site)]
        of_entries = [check for check in checks if check.judged.site in OF_ENTRIES]
        of_tokens = [check for check in checks if check.judged.site not in OF_ENTRIES]
        parts = _parts(self._entries(layer), self.config.head_dim)
        self._judge(of_entries, layer, parts, progress, f"layer {number}")
        where, wide = f"layer {number}", _widest(self.config)
        if stored_name(WEIGHTS, number) in self.recording.tensors:
            wide = max(wide, self.config.num_attention_heads * (len(self.setting.tokens) + len(layer.entries)))
        of_attention = [check for check in of_tokens if _of_attention(check.judged.site)]
        self._judge(of_attention, layer, _parts(sample, wide), progress, where)
        rest = [check for check in of_tokens if not _of_attention(check.judged.site)]
        if all(stored_name(site.name, number) in self.recording.tensors for site in BETWEEN):
            # Every expert is decoded for each part of the rows: in parts as large as these sites alone allow.
            of_experts = [check for check in rest if check.judged.site in NARROW]
            self._judge(of_experts, layer, _parts(sample, self.config.hidden_size), progress, where)
            rest = [check for check in rest if check not in of_experts]
        self._judge(rest, layer, _parts(sample, wide), progress, where)
        for check in checks:
            if isinstance(check, Choice) and check.judged.rows:
                self.ties[check.judged.site] = self.ties.get(check.judged.site, 0) + check.equal
        return [check.judged for check in checks]

    def glances(self, layer: int, names: Iterable[str], *, freely: bool) -> dict[str, tuple[Tensor, Tensor] | None]:
        """By site: some recorded rows [n, ...], and the same by the oracle, [1 + r, n, ...]; None: nothing is known.

        `freely`: also where the layer's input must be computed from the embeddings on.
        """
        part, found = None, dict[str, tuple[Tensor, Tensor] | None]()
        for site in names:
            rows = sampled(self.config, self.recording.at(stored_name(site, layer)), self.count)
            if part is None or not part.at.equal(rows):
                part = layer_of(replace(self.setting, freely=freely), layer, rows)
            try:
                found[site] = self.recording.known(stored_name(site, layer), rows), part.computed(site, part.at)
            except Unknown:
                found[site] = None
        return found

    def ends(self, progress: Progress = silent, only: Collection[str] | None = None) -> list[Judged]:
        """Judge what is of no layer, as `layer`: embeddings, the normed output, logits."""
        self.setting.parameters.forget()
        wanted = [site for site in self.recorded(None) if only is None or site in only]
        checks = [check for site in wanted for check in self._checks(None, site)]
        for check in checks:
            rows = sampled(self.config, self.at(check.judged.site), self.count)
            of_head = check.judged.site in (sites.LOGITS.name, LOGPROBS)
            widest = self.config.vocab_size if of_head else self.config.hidden_size
            self._judge([check], self.part(None, rows, self.setting.noise), _parts(rows, widest), progress, "model")
        return [check.judged for check in checks]

    def _judge(
        self, checks: Sequence[Check], part: Layer | Ends, parts: Sequence[Tensor], progress: Progress, where: str
    ) -> None:
        given_up = set[str]()
        for check in checks:
            check.judged.why = "" if any(map(len, parts)) else "no row: the prompt is shorter than a window"
        for done, at in enumerate(part for part in parts if len(part)):
            if isinstance(part, Layer):
                part.look(at)
            for n, check in enumerate(checks):
                progress(f"{where} {check.judged.site}", (done + n / len(checks)) / len(parts))
                if check.judged.site not in given_up and not self._add(check, part, at):
                    given_up.add(check.judged.site)
        known = [check for check in checks if check.judged.rows and check.judged.site not in given_up]
        if self.exact and known:
            self._rest(known, part, parts, progress, where)
        for check in checks:
            judged = check.judged
            if judged.site in given_up and not check.sure:
                judged.rows = 0
            elif judged.rows or check.sure:
                judged.why = judged.why if judged.why in {OFF_GRID, NOT_FINITE, FOLLOWS} else ""
                check.close(self.look)

    def _add(self, check: Check, part: Layer | Ends, at: Tensor) -> bool:
        """Judge some rows of a site; returns whether the oracle knows what they should be."""
        judged, part.rests = check.judged, set()
        theirs = self.recording.rows(judged.name, at)
        if theirs is None:
            return True
        judged.rows += len(at)
        try:
            check.add(at, theirs, part)
        except Unknown as unknown:
            judged.why = unknown.what
            return False
        for what, most in part.largest.items():
            self.reached[what] = max(most, self.reached.get(what, 0.0))
        judged.free |= FREELY in part.rests
        judged.assumed = tuple(sorted({*judged.assumed, *part.rests} - {FREELY, judged.site}))
        return True

    def look(self, check: Check, position: int, enough: float = 1.0) -> Again:
        """Look again at a row."""
        judged, at = check.judged, torch.tensor([position])
        theirs = self.recording.known(judged.name, at)

        def values(noise: Noise) -> Tensor:
            return check.values(self.part(judged.layer, at, noise), at)

        work = min(self.work, LOOKS * self.work - check.spent)
        again = look(values, partial(check.excess, position, theirs), position, self.setting.noise.dtype, work, enough)
        check.spent += again.work
        check.explained(position, theirs, again)
        return again

    def part(self, layer: int | None, at: Tensor, noise: Noise) -> Layer | Ends:
        """A layer at these rows, or what is of none, by a noise."""
        setting = replace(self.setting, noise=noise)
        return Ends(setting) if layer is None else layer_of(setting, layer, at)

    def _scales(self, layer: int | None, site: str, view: "View | None") -> Tensor:
        """`Rows.scale` of `MORE` times as many replicas."""
        rows = self.at(stored_name(site, layer))
        rows, found = sampled(self.config, rows, self.count), []
        for number in range(1, 1 + MORE):
            part = self.part(layer, rows, Noise(self.setting.noise.dtype, first=REPLICAS * number))
            check = self.check(layer, site, view)
            assert isinstance(check, Rows), f"{site} has no scale"
            for at in _parts(rows, _widest(self.config)):
                if isinstance(part, Layer):
                    part.look(at)
                check.add(at, self.recording.known(check.judged.name, at), part)
            found.append(check.scale[1:])
        return torch.cat(found)

    def _rest(
        self, checks: Sequence[Check], part: Layer | Ends, parts: Sequence[Tensor], progress: Progress, where: str
    ) -> None:
        """Look at the rows that are not in the sample, and judge those that stand out, until one is wrong."""
        recorded, most = self.at(checks[0].judged.name), max(map(len, parts))
        rest = sampled(self.config, recorded[~torch.isin(recorded, torch.cat(tuple(parts)))], self.exact)
        if not len(rest):
            return
        exact = self.part(checks[0].judged.layer, rest, Noise(self.setting.noise.dtype, replicas=0))
        outlying: list[list[Tensor]] = [[] for _ in checks]
        for done, at in enumerate(chunks := rest.split(EXACT_ROWS)):
            if isinstance(exact, Layer):
                exact.look(at)
            for check, found in zip(checks, outlying, strict=True):
                progress(f"{where} {check.judged.site}, every row", done / len(chunks))
                if (theirs := self.recording.rows(check.judged.name, at)) is not None:
                    found.append(check.further(at, theirs, exact))
                    check.judged.rows += len(at)
        for check, found in zip(checks, outlying, strict=True):
            for at in torch.cat(found).split(most) if any(map(len, found)) else ():
                if isinstance(part, Layer):
                    part.look(at)
                check.add(at, self.recording.known(check.judged.name, at), part, outlying=True)
                if check.settle(self.look):
                    break

    def _checks(self, layer: int | None, site: str) -> Iterator[Check]:
        """A site as it is, and each view of it."""
        yield self.check(layer, site)
        for name, view in self.views:
            if name.partition(" ")[0] == site:
                check = self.check(layer, site, view)
                check.judged.of = name
                yield check

    def check(self, layer: int | None, site: str, view: "View | None" = None) -> Check:
        """How a site is judged."""
        judged = Judged(layer, site, len(self.at(stored_name(site, layer))))
        if site == sites.EXPERT_IDS.name and layer is not None and self.config.is_hash(layer):
            return TableOfIds(judged)
        if site in CHOICES:
            return Choice(judged, self.config)
        ordered = stored_name(sites.EXPERT_IDS.name, layer) in self.recording.tensors
        least = max(2.0 ** -PRECISION[self.setting.noise.dtype], LEAST_SCALE)
        more = partial(self._scales, layer, site, view)
        return Rows(judged, in_order=ordered, least=least, view=view, more=more)


BETWEEN: Final = (sites.EXPERTS_INPUT, sites.EXPERT_IDS, sites.EXPERT_WEIGHTS, sites.EXPERTS_OUTPUT)
WEIGHTS: Final = "attention.weights"
NARROW: Final = (
    *(site.name for site in BETWEEN),
    sites.SHARED_GATE.name,
    sites.SHARED_UP.name,
)


def _of_attention(site: str) -> bool:
    return site.startswith(("attention.", "indexer."))


View = Callable[[Tensor], Tensor]  # [r, n, ...] to what is judged of it: one row or several for each


def _whole(rows: Tensor) -> Tensor:
    return rows


def on_grid(theirs: Tensor, site: str, part: Layer | Ends) -> Tensor | None:
    """Theirs rounded to the narrow format that the run keeps a site in; None where it does not round it."""
    if site in (sites.INDEX_KEY_USED.name, sites.INDEX_QUERY_USED.name) and part.rounding.index != NONE:
        by = {FP4: E2M1_INDEX, FP8: E4M3_ROW, F16: HALF}[part.rounding.index]
        return None if by is HALF and site == sites.INDEX_QUERY_USED.name else by.rounded(theirs)
    if site in (sites.KV.name, sites.ENTRY.name) and part.rounding.kv not in (NONE, F16):
        if part.config.v41 is not None:
            return held_form(part.config, part.rounding.kv, site, theirs)
        nope = part.config.head_dim - part.config.qk_rope_head_dim
        return torch.cat((E4M3_KV.rounded(theirs[..., :nope]), theirs[..., nope:]), -1)
    return None


def _widest(config: ModelConfig) -> int:
    """Numbers of the widest row of a layer."""
    return max(config.num_attention_heads * config.head_dim, config.hc_mult * config.hidden_size)


def _parts(rows: Tensor, widest: int) -> Sequence[Tensor]:
    """Rows in parts that are held at a time; the same tensor where it is one part."""
    most = max(1, HELD // (widest * (1 + REPLICAS)))
    return [rows] if len(rows) <= most else rows.split(most)


def affordable(config: ModelConfig, tokens: int) -> int:
    """How many rows of a layer `WORK` allows."""
    attention = config.num_attention_heads * config.head_dim
    seen = config.sliding_window + config.index_topk + tokens // 128
    of_row = (
        config.hidden_size * (config.q_lora_rank + 2 * config.head_dim)
        + attention * (config.q_lora_rank + 2 * seen + config.o_lora_rank)
        + config.o_groups * config.o_lora_rank * config.hidden_size
        + 3 * (config.num_experts_per_tok + 1) * config.hidden_size * config.moe_intermediate_size
    )
    return max(4 * ENDS_SEEN, WORK // (of_row * (1 + REPLICAS)))


def sampled(config: ModelConfig, rows: Tensor, most: int) -> Tensor:
    """At most so many of these rows, ascending: both ends, the borders of windows, and rows drawn from equal parts."""
    if len(rows) <= most:
        return rows
    borders = torch.tensor([config.sliding_window, *(ratio for ratio in config.compress_ratios if ratio)])
    near = (borders[:, None] + torch.tensor([-1, 0])).flatten()
    near = near[near < len(rows)]
    few = min(ENDS_SEEN, max(1, most // 4))
    ends = torch.cat((torch.arange(few), torch.arange(len(rows) - few, len(rows))))
    fixed = torch.cat((ends, near)).unique()
    left = max(1, most - len(fixed))
    start = torch.arange(left) * len(rows) // left
    stop = torch.arange(1, left + 1) * len(rows) // left
    draw = torch.rand(left, generator=torch.Generator().manual_seed(0), dtype=F64)
    drawn = start + (draw * (stop - start)).long()
    return rows[torch.cat((fixed, drawn)).unique()]
