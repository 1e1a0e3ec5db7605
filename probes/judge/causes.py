"""Plain causes: what a wrong tensor is before it is a fault of an equation.

Rows that are zeros, or all alike; rows of the token beside it; another layer's; a narrower dtype; another prompt, a
prompt with padding, or without BOS. Each is looked for by what it would make of the tensor, as a fault is.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Self

import torch
from torch import Tensor

from fathom.model.config import ModelConfig
from fathom.model.observe import sites
from fathom.probes.judge.checks import Judged, Status
from fathom.probes.judge.oracle import (
    F32,
    F64,
    FACTOR,
    LOGPROB_IDS,
    LOGPROBS,
    PRECISION,
    Ends,
    Layer,
    Noise,
    Setting,
    Theirs,
    Unknown,
    has,
    layer_of,
)
from fathom.probes.judge.recording import BEHIND, CHOICES, IN_FP32, OF_ENTRIES, Recording, stored_name

NAMED: Final = 0.9  # of the difference that a cause or a fault explains at least, to be named
NEAREST: Final = 0.5  # from which on it is told as the nearest that is known, and as no explanation
ROWS: Final = 64  # differing rows that are explained
SHIFTS: Final = (-1, 1, -2, 2, -3, 3, -4, 4)  # rows to the side of what they should be
LAYERS: Final = 4  # others of the same kind whose weights are tried, the nearest
PADDING: Final = 4  # equal tokens at an end of a prompt that are no text
TABLE_ROWS: Final = 1 << 13  # of the embedding at a time
ALIKE: Final = 2.0**-7  # of the length of a row: an embedding in any dtype
CASTS: Final = {
    torch.bfloat16: 8, torch.float16: 11, torch.float8_e4m3fn: 4, torch.float8_e5m2: 3,
}  # and bits of the significand  # fmt: skip


class Explained(NamedTuple):
    """A plain cause, a fault, or two at once, and the share of a difference that it explains."""

    names: tuple[str, ...]
    share: float
    what: str = ""  # in a sentence
    plain: bool = True  # a cause, and no fault of an equation

    @property
    def name(self) -> str:
        """As it is told."""
        return " and ".join(self.names)


@dataclass(frozen=True, slots=True)
class Place:
    """A site that differs, and what explains it."""

    judged: Judged
    faults: tuple[Explained, ...]  # best first
    why: str = ""  # nothing could be tried, or not all
    looked: bool = True  # for a fault
    tried: bool = True  # some fault, where one was looked for
    ended: bool = True  # the search, before its time was over

    @property
    def named(self) -> Explained | None:
        """What explains it, if anything does."""
        return self.faults[0] if self.faults and self.faults[0].share >= NAMED else None


def places(results: Sequence[Judged]) -> list[Judged]:
    """The differing sites, in order."""
    return [judged for judged in results if judged.status is Status.DIFFERS and judged.first is not None]


class Gap:
    """Rows of a site that differ: what was recorded, what the oracle has, and what rounding is of that.

    Parameters
    ----------
    setting
        As it was judged.
    recording
        What was judged.
    judged
        A site that differs.

    Raises
    ------
    Unknown
        There is nothing to compute the site from.

    """

    def __init__(self, setting: Setting, recording: Recording, judged: Judged) -> None:
        self.setting = replace(setting, noise=Noise(setting.noise.dtype))
        self.recording, self.judged = recording, judged
        self.at = torch.tensor(sorted(set(judged.wrong))[:ROWS])
        theirs = recording.known(judged.name, self.at)
        self.part = self._part(self.setting, judged.layer, self.at)
        self.measure(theirs, self.part.computed(judged.site, self.at))

    def measure(self, theirs: Tensor, oracle: Tensor) -> None:
        """Take these rows for theirs, and [1 + replicas, n, ...] for the oracle's."""
        self.theirs, self.oracle = self.comparable(theirs), self.comparable(oracle[0])
        off = (oracle[1:] - oracle[:1]).square()
        self.noise = float(off.sum()) / max(1, len(off))
        self.reach = FACTOR * off.mean(0).sqrt()  # of each number, where their order says nothing

    @staticmethod
    def _part(setting: Setting, layer: int | None, at: Tensor) -> Layer | Ends:
        return Ends(setting) if layer is None else layer_of(setting, layer, at)

    def behind(self) -> Self:
        """The same at the site after a step: what the rest of the layer makes of theirs, and of the oracle's."""
        other = copy.copy(self)
        other.judged = replace(self.judged, site=BEHIND[self.judged.site])
        steps = {stored_name(step, self.judged.layer) for step, site in BEHIND.items() if site == other.judged.site}
        alone = _Without(self.recording, steps - {self.judged.name})
        theirs, oracle = (
            self._part(replace(self.setting, theirs=given), self.judged.layer, self.at)
            for given in (alone, _Without(self.recording, steps))
        )
        other.part = oracle
        other.measure(theirs.computed(other.judged.site, self.at)[0], oracle.computed(other.judged.site, self.at))
        return other

    def comparable(self, x: Tensor) -> Tensor:
        """Choices and their weights in an order that does not depend on who chose."""
        if self.judged.site in {*CHOICES, sites.EXPERT_WEIGHTS.name}:
            return x.sort(-1, descending=True).values
        return x

    def share(self, other: Tensor, rows: Tensor | None = None) -> float:
        """How much nearer the recording is to other rows than to the oracle: 1 is as near as rounding lets it be.

        `rows` bool [n] says which of the rows that differ these are; None: all.
        """
        theirs, oracle = (x if rows is None else x[rows] for x in (self.theirs, self.oracle))
        if other.shape != theirs.shape:
            return 0.0
        if self.judged.site in CHOICES:
            left, whole = (_otherwise(theirs, x) for x in (other, oracle))
        elif not torch.equal(theirs.isfinite(), other.isfinite()):
            return 0.0  # what is not finite is the difference
        else:
            known = theirs.isfinite() & oracle.isfinite()
            distances = (float((theirs - x)[known].square().sum()) for x in (other, oracle))
            noise = self.noise * len(theirs) / len(self.theirs)
            left, whole = (max(0.0, distance - noise) for distance in distances)
        return max(0.0, 1 - left / whole) if whole else 0.0

    def instead(self, other: Tensor) -> float:
        """How much nearer other rows are to the oracle than those that were recorded, as `share`."""
        other = self.comparable(other)
        if not all(bool(rows.isfinite().all()) for rows in (other, self.theirs, self.oracle)):
            return 0.0
        left, whole = (float((rows - self.oracle).square().sum()) for rows in (other, self.theirs))
        return max(0.0, 1 - max(0.0, left - self.noise) / whole) if whole else 0.0

    def ours(self, at: Tensor, layer: int | None, theirs: Theirs | None = None) -> Tensor:
        """What the oracle of a layer gives at other rows, or from other tensors, without replicas."""
        given = theirs or self.setting.theirs
        still = replace(self.setting, noise=Noise(self.setting.noise.dtype, replicas=0), theirs=given)
        return self.comparable(self._part(still, layer, at).computed(self.judged.site, at)[0])


def _otherwise(one: Tensor, other: Tensor) -> float:
    """How many ids of two choices [n, k] are in one of them alone."""
    return float(sum(len(set(a) ^ set(b)) for a, b in zip(one.tolist(), other.tolist(), strict=True)))


def plain(gap: Gap, late: Callable[[], bool]) -> Explained | None:
    """The first plain cause that explains a gap, as far as the time goes."""
    for looked in (_empty, _alike, _another_prompt, _cast, _shifted, _swapped):
        for found in looked(gap):
            if found.share >= NAMED:
                return found
            if late():
                return None
    return None


def _empty(gap: Gap) -> Iterator[Explained]:
    if gap.judged.site not in CHOICES and not bool(gap.theirs.any()):
        yield Explained(("rows-of-zeros",), 1.0, "These rows are all zeros: they were not computed, or not kept.")
    if not bool(gap.theirs.isfinite().any()):
        yield Explained(("rows-not-finite",), 1.0, "None of these numbers is finite.")


def _alike(gap: Gap) -> Iterator[Explained]:
    """Rows that do not depend on the token, or repeat: of a batch, for one."""
    if gap.judged.site in {*CHOICES, *OF_ENTRIES}:
        return
    rows, tokens = gap.recording.rows(gap.judged.name, None), gap.setting.tokens
    assert rows is not None, f"{gap.judged.name} was judged"
    rows, half = rows.flatten(1), len(rows) // 2
    oracle = gap.oracle.flatten(1)
    if len(rows) > 1 and bool((rows == rows[:1]).all()) and bool((oracle != oracle[:1]).any()):
        yield Explained(("rows-all-alike",), 1.0, "All rows are the same, though the tokens are not.")
    elif rows.shape[1] > 1 and bool((rows == rows[:, :1]).all()) and bool((oracle != oracle[:, :1]).any()):
        yield Explained(("rows-of-one-value",), 1.0, "Every row is one number again and again.")
    elif len(rows) == len(tokens) == 2 * half and half and bool((rows[:half] == rows[half:]).all()):
        second = gap.at >= half
        if bool(second.any()) and not torch.equal(tokens[:half], tokens[half:]):
            what = f"Rows from {half} on are those from 0 on again: two sequences of a batch, where one is asked for."
            yield Explained(
                ("rows-of-a-batch",), gap.share(gap.ours(gap.at[second] - half, gap.judged.layer), second), what
            )


def _another_prompt(gap: Gap) -> Iterator[Explained]:
    """Embeddings of other tokens than those that were recorded."""
    if gap.judged.site != sites.EMBEDDED.name:
        return
    at, config = gap.recording.at(gap.judged.name)[:ROWS], gap.setting.config
    theirs = gap.recording.known(gap.judged.name, at)
    ids = _looked_up(gap, theirs)
    if bool((ids < 0).any()):
        return
    tokens, n = gap.setting.tokens, len(at)
    if torch.equal(at, torch.arange(n)) and n > 2:
        if torch.equal(ids[1:], tokens[: n - 1]):
            more = "BOS" if int(ids[0]) == config.bos_token_id else f"token {int(ids[0])}"
            what = f"The run began with {more}, which `tokens` lacks: all rows are one late."
            yield Explained(("bos-missing",), 1.0, what)
        if torch.equal(ids[:-1], tokens[1:n]):
            what = "The run was not given the first of `tokens`: all rows are one early."
            yield Explained(("bos-missing",), 1.0, what)
    few = ", ".join(map(str, ids[:8].tolist()))
    yield Explained(("another-prompt",), 1.0, f"These are embeddings of other tokens than `tokens`: {few}, ...")


def _looked_up(gap: Gap, rows: Tensor) -> Tensor:
    """The ids whose embeddings rows [n, hidden] are; -1 where they are none's."""
    best, ids = torch.full((len(rows),), torch.inf, dtype=F64), torch.full((len(rows),), -1)
    for low in range(0, gap.setting.config.vocab_size, TABLE_ROWS):
        high = min(low + TABLE_ROWS, gap.setting.config.vocab_size)
        table = gap.setting.parameters.rows("embed.weight", torch.arange(low, high)).to(F64)
        distance, which = torch.cdist(rows, table).min(1)
        nearer = distance < best
        best, ids = torch.where(nearer, distance, best), torch.where(nearer, low + which, ids)
    return ids.masked_fill(best > ALIKE * rows.norm(dim=1), -1)


def _cast(gap: Gap) -> Iterator[Explained]:
    """Numbers of a narrower dtype than the run's."""
    theirs = gap.recording.rows(gap.judged.name, None)
    if gap.judged.site in CHOICES or theirs is None:
        return
    own = PRECISION[F32 if gap.judged.site.endswith(IN_FP32) else gap.setting.noise.dtype]
    for dtype, bits in CASTS.items():
        if bits >= own or not torch.equal(theirs.to(dtype).to(F64), theirs):
            continue
        name = str(dtype).removeprefix("torch.")
        what = f"All numbers of it are of {name}: it was cast to that on the way, or by who recorded it."
        half = gap.theirs.abs() * 2.0**-bits  # a unit in the last place is at most twice that
        near = (gap.theirs - gap.oracle).abs() <= half + gap.reach
        yield Explained((f"cast-to-{name}",), float(near.double().mean()), what)


def _shifted(gap: Gap) -> Iterator[Explained]:
    """Rows of a token, or entry, to the side."""
    judged = gap.judged
    count = len(gap.recording.at(judged.name)) if judged.site in OF_ENTRIES else len(gap.setting.tokens)
    for by in SHIFTS:
        inside = (gap.at + by >= 0) & (gap.at + by < count)
        if int(inside.sum()) * 2 <= len(gap.at) or (judged.site == sites.LOGITS.name and len(gap.at) == 1):
            continue
        one = "entry" if judged.site in OF_ENTRIES else "token"
        which = f"{abs(by)} {one.replace('entry', 'entrie') if abs(by) > 1 else one}{'s' if abs(by) > 1 else ''}"
        what = f"Rows are those of {which} {'later' if by > 0 else 'earlier'}."
        theirs = _OfTheSameIds(gap.recording, by) if judged.site == LOGPROBS else None
        try:
            share = gap.share(gap.ours(gap.at[inside] + by, judged.layer, theirs), inside)
        except Unknown:  # nothing to compute those from
            continue
        yield Explained((f"rows-shifted-by-{by}",), share, what)


@dataclass(frozen=True)
class _Without:
    """A recording in which some tensors are not seen."""

    recording: Recording
    names: Collection[str]

    def rows(self, name: str, at: Tensor | None) -> Tensor | None:
        """As `Recording.rows`."""
        return None if name in self.names else self.recording.rows(name, at)


@dataclass(frozen=True)
class _OfTheSameIds:
    """A recording whose log-probabilities, of rows to the side, are asked for of the ids of the row itself."""

    recording: Recording
    by: int

    def rows(self, name: str, at: Tensor | None) -> Tensor | None:
        """As `Recording.rows`."""
        return self.recording.rows(name, at if at is None or name != LOGPROB_IDS else at - self.by)


@dataclass(frozen=True)
class _As:
    """A recording in which one layer stands for another."""

    recording: Recording
    names: Mapping[str, str]  # what a name begins with -> what it is read as

    def rows(self, name: str, at: Tensor | None) -> Tensor | None:
        """As `Recording.rows`."""
        for begins, other in self.names.items():
            if name.startswith(begins):
                return self.recording.rows(other + name.removeprefix(begins), at)
        return self.recording.rows(name, at)


def _swapped(gap: Gap) -> Iterator[Explained]:
    """Another layer's tensors under this one's name, or another layer's weights."""
    layer, config, site = gap.judged.layer, gap.setting.config, gap.judged.site
    if layer is None:
        return
    others = _of_the_same_kind(config, layer)
    for other in others:
        rows = gap.recording.rows(stored_name(site, other), gap.at)
        if rows is not None and site not in CHOICES and rows.shape == gap.oracle.shape:
            what = f"What is recorded of layer {other} is what layer {layer} should give: their names are exchanged."
            yield Explained(("layers-swapped",), gap.instead(rows), what)
    for other in others[:LAYERS]:
        before = {f"layers.{other - 1}.streams": "embedded" if layer == 0 else f"layers.{layer - 1}.streams"}
        if layer == 0 or other == 0:
            continue  # the first has embeddings where others have streams
        theirs = _As(gap.recording, {f"layers.{other}.": f"layers.{layer}.", **before})
        try:
            share = gap.share(gap.ours(gap.at, other, theirs))
        except Unknown:
            continue
        yield Explained(("layers-swapped",), share, f"Layer {layer} computes with the weights of layer {other}.")


def _of_the_same_kind(config: ModelConfig, layer: int) -> list[int]:
    def role(one: int) -> tuple[object, ...]:
        engram = has(config, one, sites.ENGRAM_ROWS.name)
        ratio = config.ratio(one)
        reads: tuple[object, ...] = (config.makes_entries(one), config.selects(one), ratio)
        if config.v41 is not None and ratio:
            reads = (*reads, config.selection_source(one))
        return (config.layer_kind(one), config.is_hash(one), engram, *reads)

    alike = [other for other in range(config.num_hidden_layers) if other != layer and role(other) == role(layer)]
    return sorted(alike, key=lambda other: abs(other - layer))


def of_tokens(tokens: Tensor, config: ModelConfig) -> Sequence[str]:
    """What is odd about the tokens of a recording, in sentences: no BOS, padding."""
    told = []
    if int(tokens[0]) != config.bos_token_id:
        told.append(f"`tokens` do not begin with BOS ({config.bos_token_id}): was the run given it?")
    for end, ids in (("begin", tokens), ("end", tokens.flip(0))):
        same = int((ids != ids[0]).nonzero()[0]) if len(ids.unique()) > 1 else 0
        if same >= PADDING:
            told.append(f"`tokens` {end} with {same} times {int(ids[0])}: padding? A recording has none.")
    return told
