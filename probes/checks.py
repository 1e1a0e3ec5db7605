"""The checks: every recorded tensor held against the oracle, and the bound that rounding sets.

A tensor is judged row by row, a row being the numbers of one token or one entry. Its distance from the oracle may be
`FACTOR` times the spread of the oracle's replicas; that of all rows together `TOGETHER` times; that of one column over
many rows `FACTOR` times. A choice may be another where the scores say that it was a near tie. In `deployed` numerics,
what is remembered in FP8 or scored in FP4 must be numbers of that format.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

import torch
from torch import Tensor

from fathom.model.config import ModelConfig
from fathom.model.observe import sites
from fathom.probes.oracle import (
    F64,
    FACTOR,
    KV_BLOCK,
    PRECISION,
    REPLICAS,
    TOGETHER,
    Ends,
    Layer,
    Noise,
    Setting,
    Unknown,
    rounded_e2m1,
    rounded_e4m3,
    sites_of,
)
from fathom.probes.recording import CHOICES, OF_ENTRIES, WHOLE_MODEL, Recording, stored_name

OFF_GRID: Final = "numbers that the narrow format of deployed numerics does not have"
NOT_FINITE: Final = "what it follows from is not finite"
LEAST_SCALE: Final = 2.0**-22
TINY: Final = 1e-300  # the length of a row of zeros
MANY_ROWS: Final = 64  # from so many on the spread of a single column is known well enough to judge it
HELD: Final = 1 << 25  # numbers of the widest tensor at a time, replicas included: 256 MiB of float64, and several such
WORK: Final = 1 << 41  # multiplications spent on a layer, replicas included: two minutes or so of one core
EXACT_ROWS: Final = 512  # rows without replicas at a time
ENDS_SEEN: Final = 8  # rows at either end of a prompt that every sample has

# Called with what is being done and the share of the work that is done.
Progress = Callable[[str, float], None]


def _silent(what: str, share: float) -> None:
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
    of: str = ""  # the view that was judged, see `Checks`; empty: the site as it is

    @property
    def name(self) -> str:
        """As in the recording."""
        return stored_name(self.site, self.layer)

    @property
    def excess(self) -> float:
        """Distance over bound; above 1 the site differs."""
        return self.worst / self.bound if self.bound else math.inf if self.worst else 0.0

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        values = {name: getattr(self, name) for name in ("layer", "site", "rows", "recorded", "worst", "bound")}
        more = {"why": self.why} if self.why else {}
        return (
            {name: _finite(value) for name, value in values.items()}
            | {"status": self.status.value}
            | more
            | ({"free": True} if self.free else {})
        )


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# --- rows of numbers


class _Rows:
    """Judges a site whose rows are numbers; rows come in parts.

    Parameters
    ----------
    judged
        What becomes of it.
    in_order
        Whether weights of experts are those of ids that were recorded too.
    least
        A scale that is nobody's fault, see `close`.
    view
        What is judged of rows; None: all of them as they are.

    """

    def __init__(self, judged: Judged, *, in_order: bool, least: float, view: "View | None" = None) -> None:
        self.judged, self.view = judged, view or _whole
        self.outlying: list[Tensor] = []  # as `found`, of rows that were chosen because they are far off
        self.least = least  # a scale that is nobody's fault: half a unit in the last place, or fp32's inside a norm
        self.in_order = in_order  # of ids that were recorded too, where it is experts' weights
        self.found: list[Tensor] = []  # of each row: length, spread and distance
        self.columns: Tensor = torch.zeros(2, 1, dtype=F64)  # squared distance and spread, rows weighing alike
        # How much of the oracle theirs and the replicas have too much.
        self.along: Tensor = torch.zeros(1, dtype=F64)
        self.size = 0.0
        self.worst_seen: tuple[float, Difference] | None = None

    def add(self, at: Tensor, theirs: Tensor, part: Layer | Ends, *, outlying: bool = False) -> None:
        """Take rows [n, ...] of theirs at these positions (or entries).

        `outlying` ones were chosen because they are far off: they say nothing about all rows together.
        """
        oracle = part.computed(self.judged.site, at)
        if self.judged.site == sites.EXPERT_WEIGHTS.name and not self.in_order:
            theirs, oracle = theirs.sort(-1).values, oracle.sort(-1).values
        if self.view is _whole and (rounded := _on_grid(theirs, self.judged.site, part)) is not None:
            self._add_grid(at, theirs, rounded)
        theirs, oracle = self.view(theirs[None])[0], self.view(oracle)
        at = at.repeat_interleave(len(theirs) // len(at))
        shape, exact, moved = theirs.shape[1:], oracle[0].flatten(1), oracle.flatten(2)[1:]
        theirs = theirs.flatten(1)
        follows = exact.isfinite().all(1) & moved.isfinite().flatten(2).all(2).all(0)
        if not bool(follows.all()):  # a recorded tensor before it is not finite there: that one differs
            self.judged.rows -= int((~follows).sum())
            at, theirs, exact, moved = at[follows], theirs[follows], exact[follows], moved[:, follows]
        if not len(at):
            self.judged.why = NOT_FINITE
            return
        off = torch.where(theirs.isfinite(), theirs - exact, math.inf).square()
        spread = (moved - exact).square().mean(0) if len(moved) else torch.zeros_like(exact)
        distance, allowed = off.sum(1), spread.sum(1)
        (self.outlying if outlying else self.found).append(
            torch.stack((exact.norm(dim=1), allowed.sqrt(), distance.sqrt()))
        )
        ratio = _over(distance, allowed)
        self._note(at, ratio > FACTOR**2, lambda row: self._difference(at, row, shape, theirs, exact, off, spread))
        worst = int(ratio.argmax())
        if self.worst_seen is None or float(ratio[worst]) > self.worst_seen[0]:
            self.worst_seen = float(ratio[worst]), self._difference(at, worst, shape, theirs, exact, off, spread)
        if outlying:
            return
        weight = torch.where(allowed > 0, 1 / allowed, 0)[:, None]
        moves = torch.cat(((theirs - exact).nan_to_num(0, 0, 0)[None], moved - exact))
        self.along = self.along + (moves * exact * weight).sum((1, 2))
        self.size += float((exact.square() * weight).sum())
        self.columns = self.columns + torch.stack(((off * weight).nan_to_num(0).sum(0), (spread * weight).sum(0)))

    def further(self, at: Tensor, theirs: Tensor, part: Layer | Ends) -> Tensor:
        """Of rows without replicas, those further from the oracle than any row that was judged may be, worst first.

        And those with a number that their narrow format does not have. They are then judged as all others, by `add`;
        the rest are within the narrowest bound there is.
        """
        oracle = self.view(part.computed(self.judged.site, at))[0]
        rounded = _on_grid(theirs, self.judged.site, part) if self.view is _whole else None
        off_grid = torch.zeros(len(at), dtype=torch.bool) if rounded is None else (theirs != rounded).flatten(1).any(1)
        theirs = self.view(theirs[None])[0]
        if self.judged.site == sites.EXPERT_WEIGHTS.name and not self.in_order:
            theirs, oracle = theirs.sort(-1).values, oracle.sort(-1).values
        length, spread, _ = torch.cat(self.found, 1)
        least = FACTOR * float((spread / length.clamp_min(TINY)).min())
        off = torch.where(theirs.isfinite(), theirs - oracle, math.inf).flatten(1).norm(dim=1)
        beyond = off - least * oracle.flatten(1).norm(dim=1)
        beyond = (
            beyond.nan_to_num(0).view(len(at), -1).amax(1)
        )  # a NaN is the oracle's: what it follows from is not finite
        beyond = beyond.masked_fill(off_grid, math.inf)
        order = beyond.argsort(descending=True)
        return at[order[beyond[order] > 0]]

    def _add_grid(self, at: Tensor, theirs: Tensor, rounded: Tensor) -> None:
        """Take rows that should be numbers of a narrow format, and the same rounded to it."""
        theirs, rounded = theirs.flatten(1), rounded.flatten(1)
        wrong = (theirs != rounded).any(1)
        if bool(wrong.any()):
            self.judged.why = OFF_GRID
        layer, site = self.judged.layer, self.judged.site

        def difference(row: int) -> Difference:
            column = int((theirs[row] - rounded[row]).abs().argmax())
            one, other = float(theirs[row, column]), float(rounded[row, column])
            return Difference(layer, site, int(at[row]), (column,), one, other, abs(one - other), 0.0)

        self._note(at, wrong, difference)

    def _note(self, at: Tensor, wrong: Tensor, difference: Callable[[int], Difference]) -> None:
        rows = wrong.nonzero()[:, 0]
        if len(rows) and (self.judged.first is None or int(at[rows[0]]) < self.judged.first.position):
            self.judged.first = difference(int(rows[0]))
        self.judged.wrong += at[rows].tolist()

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
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(column), tuple(shape)))
        one, other = float(theirs[row, column]), float(exact[row, column])
        difference, bound = float(off[row].sum().sqrt()), FACTOR * float(spread[row].sum().sqrt())
        return Difference(self.judged.layer, self.judged.site, int(at[row]), index, one, other, difference, bound)

    @property
    def scale(self) -> Tensor:
        """By how much theirs, and each replica, is longer than the oracle, as a share."""
        return self.along / self.size if self.size else self.along * 0

    def close(self) -> None:
        """Say how the site came out."""
        judged = self.judged
        length, spread, distance = torch.cat(self.found + self.outlying, 1)
        worst = int(_over(distance, spread).argmax())
        scale = float(length[worst]) or 1.0
        judged.worst, judged.bound = float(distance[worst]) / scale, FACTOR * float(spread[worst]) / scale
        length, spread, distance = torch.cat(self.found, 1)
        ratio = _over(distance, spread)
        judged.status = Status.DIFFERS if judged.wrong else Status.AGREES
        if judged.wrong:
            return
        if int((FACTOR * spread >= length).sum()) * 2 > len(length):  # nothing but noise: no check at all
            judged.status, judged.why = (
                Status.NOT_JUDGED,
                "rounding explains differences as large as the rows themselves",
            )
            return
        together = float(distance.square().sum().sqrt()), float(spread.square().sum().sqrt())
        column = _over(*self.columns).sqrt()
        if float(ratio.square().mean().sqrt()) > TOGETHER:
            judged.why = f"no row alone, but all rows together: {together[0] / together[1]:.2g} times the spread"
            whole = float(length.square().sum().sqrt()) or 1.0
            judged.worst, judged.bound = together[0] / whole, TOGETHER * together[1] / whole
        elif abs(float(self.scale[0])) > max(FACTOR * float(self.scale[1:].square().mean().sqrt()), self.least):
            judged.why = f"no row alone, but all are scaled by {1 + float(self.scale[0]):.5g}"
        elif len(length) >= MANY_ROWS and float(column.max()) > FACTOR:
            judged.why = f"no row alone, but number {int(column.argmax())} of all rows: {float(column.max()):.2g} times"
        if judged.why:
            judged.status = Status.DIFFERS
            judged.first = None if self.worst_seen is None else self.worst_seen[1]
            judged.wrong = [] if judged.first is None else [judged.first.position]


def _over(distance: Tensor, allowed: Tensor) -> Tensor:
    """One over the other: 0 where nothing differs, infinite where nothing may."""
    return torch.where(distance == 0, 0.0, torch.where(allowed > 0, distance / allowed, math.inf))


# --- choices


class _Choice:
    """Judges which entries, or experts, were chosen for each token."""

    def __init__(self, judged: Judged, config: ModelConfig) -> None:
        self.judged = judged
        self.most = config.index_topk if judged.site == sites.SELECTED.name else config.num_experts_per_tok

    def add(self, at: Tensor, theirs: Tensor, part: Layer | Ends, *, outlying: bool = False) -> None:
        """Take ids [n, k], -1 where there is none."""
        del outlying
        assert isinstance(part, Layer), "choices are made in layers"
        judged = self.judged
        scores = part.index_scores(at) if judged.site == sites.SELECTED.name else part.expert_ranks(at)
        for row, (position, ids) in enumerate(zip(at.tolist(), theirs, strict=True)):
            if bool(scores[:, row].isnan().any()):
                judged.rows, judged.why = judged.rows - 1, NOT_FINITE
                continue
            found = self._row(position, ids, scores[:, row])
            if found is None:
                continue
            judged.worst = max(judged.worst, _ratio(found))
            if found.difference > found.bound:
                judged.wrong.append(position)
                judged.first = judged.first or found

    def further(self, at: Tensor, theirs: Tensor, part: Layer | Ends) -> Tensor:
        """Of rows that no replica was made of, those whose choice is not the oracle's."""
        assert isinstance(part, Layer), "choices are made in layers"
        scores = part.index_scores(at) if self.judged.site == sites.SELECTED.name else part.expert_ranks(at)
        rows = zip(at.tolist(), theirs, scores[0][:, None], strict=True)
        return at[torch.tensor([self._row(*row) is not None for row in rows], dtype=torch.bool)]

    def _row(self, position: int, ids: Tensor, scores: Tensor) -> Difference | None:
        """What was chosen otherwise and is furthest from a tie; None where nothing was."""
        exact, k = scores[0], min(self.most, int((~scores[0].isneginf()).sum()))
        best = exact.sort(descending=True, stable=True).indices[:k]
        chosen = ids[ids >= 0].long()

        def told(theirs: float, ours: float, gap: float, bound: float) -> Difference:
            return Difference(self.judged.layer, self.judged.site, position, (), theirs, ours, gap, bound)

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

    def close(self) -> None:
        """Say how the site came out."""
        self.judged.bound = 1.0
        self.judged.status = Status.DIFFERS if self.judged.wrong else Status.AGREES


class _Table:
    """Judges the experts of a layer with hash routing, which a table of the files says."""

    def __init__(self, judged: Judged) -> None:
        self.judged = judged

    def add(self, at: Tensor, theirs: Tensor, part: Layer | Ends, *, outlying: bool = False) -> None:
        """Take ids [n, k]; their order says nothing."""
        del outlying
        oracle = part.computed(self.judged.site, at)
        wrong = (theirs.sort(-1).values != oracle[0].sort(-1).values).any(-1)
        for row in wrong.nonzero()[:, 0].tolist():
            column = int((theirs[row].sort().values != oracle[0, row].sort().values).nonzero()[0])
            one, other = (float(part.sort().values[column]) for part in (theirs[row], oracle[0, row]))
            first = Difference(self.judged.layer, self.judged.site, int(at[row]), (), one, other, math.inf, 0.0)
            self.judged.first = self.judged.first or first
            self.judged.wrong.append(int(at[row]))

    def further(self, at: Tensor, theirs: Tensor, part: Layer | Ends) -> Tensor:
        """Rows that are not the table's."""
        oracle = part.computed(self.judged.site, at)[0]
        return at[(theirs.sort(-1).values != oracle.sort(-1).values).any(-1)]

    def close(self) -> None:
        """Say how the site came out."""
        self.judged.worst = math.inf if self.judged.wrong else 0.0
        self.judged.status = Status.DIFFERS if self.judged.wrong else Status.AGREES


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
        affordable = _affordable(self.config, len(setting.tokens))
        self.sample = _sample(self.config, self._positions(), rows or affordable)
        self.exact = (1 + REPLICAS) * affordable if every else 0  # rows that are computed without replicas
        self.views = tuple(views)

    def _positions(self) -> Tensor:
        positions = self.recording.positions
        return torch.arange(len(self.setting.tokens)) if positions is None else positions

    def recorded(self, layer: int | None) -> list[str]:
        """Sites of a layer (of none: of the whole model) that were recorded, in the order in which they follow."""
        names = WHOLE_MODEL if layer is None else sites_of(self.config, layer)
        return [site for site in names if stored_name(site, layer) in self.recording.tensors]

    def layer(self, number: int, progress: Progress = _silent) -> list[Judged]:
        """Judge the recorded sites of a layer."""
        self.setting.parameters.forget()
        layer = Layer(self.setting, number, self.sample)
        checks = [check for site in self.recorded(number) for check in self._checks(number, site)]
        of_entries = [check for check in checks if check.judged.site in OF_ENTRIES]
        of_tokens = [check for check in checks if check.judged.site not in OF_ENTRIES]
        parts = _parts(_sample(self.config, layer.entries, len(self.sample)), self.config.head_dim)
        self._judge(of_entries, layer, parts, progress, f"layer {number}")
        config, where = self.config, f"layer {number}"
        wide = max(config.num_attention_heads * config.head_dim, config.hc_mult * config.hidden_size)
        of_attention = [check for check in of_tokens if _of_attention(check.judged.site)]
        self._judge(of_attention, layer, _parts(self.sample, wide), progress, where)
        rest = [check for check in of_tokens if not _of_attention(check.judged.site)]
        if all(stored_name(site.name, number) in self.recording.tensors for site in BETWEEN):
            # Every expert is decoded for each part of the rows: in parts as large as these sites alone allow.
            of_experts = [check for check in rest if check.judged.site in NARROW]
            self._judge(of_experts, layer, _parts(self.sample, config.hidden_size), progress, where)
            rest = [check for check in rest if check not in of_experts]
        self._judge(rest, layer, _parts(self.sample, wide), progress, where)
        return [check.judged for check in checks]

    def ends(self, progress: Progress = _silent) -> list[Judged]:
        """Judge what is of no layer: embeddings, the normed output, logits."""
        self.setting.parameters.forget()
        checks = [check for site in self.recorded(None) for check in self._checks(None, site)]
        for check in checks:
            rows = _sample(self.config, self.recording.at(check.judged.site), len(self.sample))
            widest = self.config.vocab_size if check.judged.site == sites.LOGITS.name else self.config.hidden_size
            self._judge([check], Ends(self.setting), _parts(rows, widest), progress, "model")
        return [check.judged for check in checks]

    def _judge(
        self, checks: Sequence["Check"], part: Layer | Ends, parts: Sequence[Tensor], progress: Progress, where: str
    ) -> None:
        given_up = set[str]()
        for check in checks:
            check.judged.why = "" if any(map(len, parts)) else "no row: the prompt is shorter than a window"
        for done, at in enumerate(part for part in parts if len(part)):
            if isinstance(part, Layer):
                part.look(at)
            for n, check in enumerate(checks):
                judged = check.judged
                progress(f"{where} {judged.site}", (done + n / len(checks)) / len(parts))
                theirs = self.recording.rows(judged.name, at)
                if judged.site in given_up or theirs is None:
                    continue
                part.freely = False
                try:
                    check.add(at, theirs, part)
                except Unknown as unknown:
                    judged.why = unknown.what
                    given_up.add(judged.site)
                judged.rows += len(at)
                judged.free |= part.freely
        known = [check for check in checks if check.judged.rows and check.judged.site not in given_up]
        if self.exact and known:
            self._rest(known, part, parts, progress, where)
        for check in checks:
            self._close(check, given_up)

    @staticmethod
    def _close(check: "Check", given_up: Collection[str]) -> None:
        judged = check.judged
        if judged.rows:
            judged.why = "" if judged.why == NOT_FINITE else judged.why
        if judged.site in given_up or not judged.rows:
            judged.rows, judged.first, judged.wrong = 0, None, []
        else:
            check.close()

    def _rest(
        self, checks: "Sequence[Check]", part: Layer | Ends, parts: Sequence[Tensor], progress: Progress, where: str
    ) -> None:
        """Look at the rows that are not in the sample, and judge those that stand out, until one is wrong."""
        recorded, most = self.recording.at(checks[0].judged.name), max(map(len, parts))
        rest = _sample(self.config, recorded[~torch.isin(recorded, torch.cat(tuple(parts)))], self.exact)
        if not len(rest):
            return
        setting = replace(self.setting, noise=Noise(self.setting.noise.dtype, replicas=0))
        exact = Ends(setting) if isinstance(part, Ends) else Layer(setting, part.layer, rest)
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
                theirs = self.recording.rows(check.judged.name, at)
                assert theirs is not None, f"rows of {check.judged.name} that it has"
                check.add(at, theirs, part, outlying=True)
                if check.judged.wrong:
                    break

    def _checks(self, layer: int | None, site: str) -> "Iterator[Check]":
        """A site as it is, and each view of it."""
        yield self._check(layer, site)
        for name, view in self.views:
            if name.partition(" ")[0] == site:
                check = self._check(layer, site, view)
                check.judged.of = name
                yield check

    def _check(self, layer: int | None, site: str, view: "View | None" = None) -> "Check":
        judged = Judged(layer, site, len(self.recording.at(stored_name(site, layer))))
        if site == sites.EXPERT_IDS.name and layer is not None and self.config.is_hash(layer):
            return _Table(judged)
        if site in CHOICES:
            return _Choice(judged, self.config)
        ordered = stored_name(sites.EXPERT_IDS.name, layer) in self.recording.tensors
        least = max(2.0 ** -PRECISION[self.setting.noise.dtype], LEAST_SCALE)
        return _Rows(judged, in_order=ordered, least=least, view=view)


BETWEEN: Final = (sites.EXPERTS_INPUT, sites.EXPERT_IDS, sites.EXPERT_WEIGHTS, sites.EXPERTS_OUTPUT)
NARROW: Final = (
    *(site.name for site in BETWEEN),
    sites.SHARED_GATE.name,
    sites.SHARED_UP.name,
)


def _of_attention(site: str) -> bool:
    return site.startswith(("attention.", "indexer."))


Check = _Rows | _Choice | _Table
View = Callable[[Tensor], Tensor]  # [r, n, ...] to what is judged of it: one row or several for each


def _whole(rows: Tensor) -> Tensor:
    return rows


def _on_grid(theirs: Tensor, site: str, part: Layer | Ends) -> Tensor | None:
    """Theirs rounded to the narrow format that deployed numerics keep a site in; None where they do not round it."""
    if not part.deployed:
        return None
    if site in (sites.INDEX_KEY_USED.name, sites.INDEX_QUERY_USED.name):
        return rounded_e2m1(theirs)
    if site in (sites.KV.name, sites.ENTRY.name):
        nope = part.config.head_dim - part.config.qk_rope_head_dim
        return torch.cat((rounded_e4m3(theirs[..., :nope], KV_BLOCK), theirs[..., nope:]), -1)
    return None


def _parts(rows: Tensor, widest: int) -> Sequence[Tensor]:
    """Rows in parts that are held at a time; the same tensor where it is one part."""
    most = max(1, HELD // (widest * (1 + REPLICAS)))
    return [rows] if len(rows) <= most else rows.split(most)


def _affordable(config: ModelConfig, tokens: int) -> int:
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


def _sample(config: ModelConfig, rows: Tensor, most: int) -> Tensor:
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
