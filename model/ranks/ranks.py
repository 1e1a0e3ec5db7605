"""Who else computes this model: the ranks of a process group, what of each axis is here, and how parts become whole.

Weights are sharded by rows, so that every product is computed by one rank, whole: ranks never add up rounded parts of
a sum. What they exchange is gathered, or moved as bits, and a run on N ranks computes the numbers of a run on one (to
the last bit, where a matrix product does not depend on how many rows it has). Three kinds of tensor, and three types:

- a plain tensor is *replicated*: the same on every rank, or it never leaves this one;
- a *shard* of an axis goes with a `AxisShard`, which says what is here; `Ranks.whole` puts the axis together;
- a `Partial` holds rows of which each rank fills its own; `Ranks.filled` is the only thing it can be given to, and
  trips unless every row was filled exactly once: a replicated tensor that is summed as if it were partial ends the run.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fathom.kernels.tripwires.reference import bits, checksums
from fathom.model.choices import ALL, AUTO, OWN, RANK_TOKENS
from fathom.model.errors import RankDisagreement, Tripwire
from fathom.model.ranks.mailbox import Mailbox, Table
from fathom.model.ranks.multicast import Multicast, has_multicast

# Tokens per rank from which `auto` splits a call over the ranks. It is for memory: a rank then holds the streams of its
# own tokens only, and selects for them alone. It costs time on two CPU ranks, less for longer calls
# (audits/rank-tokens.md); nothing measured says that it should be this number.
SPLIT_FROM = 64
# Tokens up to which what a call records is kept until its end and compared in one exchange; of a longer call, a layer's
# is compared while the next one runs: of V4-Pro it has 57 KB of streams for each token.
KEPT = 8
# One tensor of all ranks' parts; under its name of torch 2.13, or the one that it had before.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class AxisShard(NamedTuple):
    """What of an axis this rank holds: ``start .. stop`` of `total`; not split: all of it, as every rank does."""

    start: int
    stop: int
    total: int
    split: bool

    @property
    def size(self) -> int:
        """How many are here."""
        return self.stop - self.start

    def times(self, width: int) -> "AxisShard":
        """The same of an axis in which each has `width` places."""
        return AxisShard(self.start * width, self.stop * width, self.total * width, self.split)

    def of(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return what of the whole axis `dim` of x is this rank's, as a view."""
        return x.narrow(dim, self.start, self.size) if self.split else x


def undivided(total: int) -> AxisShard:
    """An axis that every rank holds whole."""
    return AxisShard(0, total, total, split=False)


def evenly(total: int, rank: int, size: int) -> AxisShard:
    """Split an axis into consecutive parts; the first ``total % size`` ranks hold one more than the others."""
    if size == 1:
        return undivided(total)
    short, more = divmod(total, size)
    start = rank * short + min(rank, more)
    return AxisShard(start, start + short + (rank < more), total, split=True)


def splits(asked: str, tokens: int, ranks: int) -> bool:
    """Whether each of several ranks has its own part of a call's tokens between attentions; `asked` may be AUTO."""
    return asked == OWN or (asked == AUTO and tokens >= SPLIT_FROM * ranks)


class Shards(NamedTuple):
    """What this rank holds of each axis by which weights are sharded, see `runtime.sharding`."""

    heads: AxisShard  # attention heads: rows of wq_b, sinks
    groups: AxisShard  # output groups: rows of wo_a. Split only where heads are
    output: AxisShard  # rows of wo_b and of every w2: columns of both sublayers' outputs
    vocabulary: AxisShard  # rows of embedding and head
    kv_heads: AxisShard  # of the Llama family: rows of k_proj and v_proj. Split together with heads
    inner: AxisShard  # rows of every w1 and w3: SwiGLU's columns; undivided where experts are not
    experts: AxisShard  # routed experts that lie here whole; undivided where each rank has rows of all

    def along(self, axis: str | None, width: int = 1) -> AxisShard:
        """What is here of the axis of this name, `width` places for each of its own; None: of what nobody splits."""
        if axis is None:
            return undivided(0)
        found: AxisShard = getattr(self, axis)
        return found.times(width)


class Partial(NamedTuple):
    """Rows of which each rank filled its own."""

    rows: Tensor  # [n, d]; anything where not filled
    filled: Tensor  # [n] bool


class Route(NamedTuple):
    """Which rows of a table [n, ...] go from which rank to which; the same on every rank, but for what is held."""

    held: AxisShard  # rows of the table that are here; of them, those are sent of which this rank is the source
    source: Tensor  # [n] int64, the rank that each row is sent by
    places: Tensor  # [n, ranks] int64, the row of a rank's result at which each is wanted; -1: there it is not
    into: int  # rows of each rank's result

    def going(self, rank: int) -> Tensor:
        """The places of what a rank sends, -1 for all else."""
        return torch.where((self.source == rank)[:, None], self.places, -1)

    def wanted(self, rank: int) -> Tensor:
        """The row of the table that is wanted at each row of a rank's result, -1 for none: [into] int32."""
        place = self.places[:, rank]
        number = torch.arange(len(place), dtype=torch.int32, device=place.device)
        found = number.new_full((self.into + 1,), -1)
        return found.scatter_(0, torch.where(place >= 0, place, self.into), number)[:-1]


class Group(NamedTuple):
    """The processes that run one model together, and which of them this one is."""

    rank: int
    size: int
    processes: dist.ProcessGroup | None  # None: this process alone


ALONE = Group(0, 1, None)
Coming = Callable[[], Tensor]  # waits for rows that are on their way, and returns them


class _Recorded(NamedTuple):
    """A tensor that must be the same on every rank."""

    site: str
    layer: int | None
    tensor: Tensor


class _Filled(NamedTuple):
    """By how many ranks each row was filled: [n] int32, of a `Partial`, or of rows that were moved."""

    site: str
    layer: int | None
    ranks: Tensor


class _Compared(NamedTuple):
    """Checksums of what was recorded, of every rank."""

    recorded: list[_Recorded]
    every: Tensor  # [ranks, recorded] int64, on the host once `arrived`
    arrived: torch.cuda.Event | None = None  # None: it has


@dataclass
class Left:
    """What a captured call leaves for `Ranks.look`: its replays write these tensors anew."""

    checksums: Callable[[list[Tensor]], Tensor]  # as that of `kernels.tripwires.reference`
    filled: list[_Filled] = field(default_factory=list)
    compared: list[_Compared] = field(default_factory=list)
    counted: Counter[tuple[str, str]] = field(default_factory=Counter)  # what each replay adds to counts of `Ranks`


class Ranks:
    """One rank of a run. With one rank in all, nothing here does anything.

    All ranks must call the same methods in the same order: each is a collective.
    """

    def __init__(self, group: Group, shards: Shards, tokens: str = AUTO) -> None:
        assert tokens in RANK_TOKENS, f"tokens {tokens!r}"
        assert (group.processes is None) == (group.size == 1), f"{group}"
        self.rank, self.size, self.shards, self.asked = group.rank, group.size, shards, tokens
        self._group = group.processes
        self._multicast: Multicast | None = None
        self._mailbox: Mailbox | None = None
        self.gathers = {"multicast": 0, "collective": 0}  # by what carries them
        self.moves = {"memory": 0, "collective": 0}  # the same, of rows to and from experts
        self._recorded: list[_Recorded] = []
        self._filled: list[_Filled] = []  # on a device, and not looked at
        self._arriving: _Compared | None = None  # what was gathered and nobody has looked at
        self._left: Left | None = None  # where a captured call leaves what is not looked at while it runs
        self._apart = False
        self.collectives = 0  # entered so far, and which was last: what a watcher sees of this rank
        self.at = "start"
        self.calls = dict.fromkeys((ALL, OWN), 0)  # calls of the model by which tokens a rank had

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, nothing is exchanged, recorded or counted, and no rank waits for another: for a rehearsal.

        What other ranks would bring has its shape and dtype, and means nothing.
        """
        calls, self._apart = dict(self.calls), True
        try:
            yield
        finally:
            self._apart = False
            self.calls.update(calls)

    def connect(self, device: torch.device, tables: Sequence[Table] = ()) -> None:
        """Let gathers of few bytes go by multicast, where every rank has it: ranks of one machine.

        There rows to and from experts are written into `tables` on each rank, where there are any.
        """
        if self._group is None:
            return
        able = torch.tensor([int(has_multicast(device))], device=device)
        if bool(self._gathered(able).all()):
            self._multicast = Multicast(self._group, device)
            self._mailbox = Mailbox(self._group, device, tables) if tables else None

    @contextmanager
    def leaving(self, left: Left) -> Iterator[None]:
        """Inside, what ranks must agree on is computed and exchanged; `look` looks at it, after each replay.

        Calls and gathers are counted by `look` too: what is captured, or runs to warm up, is none.
        """
        counts = {name: dict(getattr(self, name)) for name in ("calls", "gathers", "moves")}
        self._left = left
        try:
            yield
        finally:
            self._left = None
            for name, before in counts.items():
                now = getattr(self, name)
                left.counted.update({(name, key): now[key] - count for key, count in before.items()})
                now.update(before)

    def look(self, left: Left) -> None:
        """Look at what a captured call left: Tripwire or RankDisagreement, as in a call that is not captured."""
        if self.size > 1:
            self._enter("captured call")
        for (name, key), count in left.counted.items():
            getattr(self, name)[key] += count
        _check_filled(left.filled)
        for compared in left.compared:
            self._compare(compared._replace(every=compared.every.cpu()))

    def tokens(self, count: int) -> AxisShard:
        """Which of a call's `count` tokens this rank has between attentions: all of them, or its own part."""
        if self.size == 1:
            return undivided(count)
        split = splits(self.asked, count, self.size)
        self.calls[OWN if split else ALL] += 1
        return evenly(count, self.rank, self.size) if split else undivided(count)

    def whole(self, x: Tensor, dim: int, shard: AxisShard) -> Tensor:
        """Put an axis together from the ranks' shards of it, in the order of ranks.

        Parameters
        ----------
        x
            [..., shard.size, ...] of any dtype; the shape of the others' differs in axis `dim` alone.
        dim
            The axis.
        shard
            What of it is here. Where it is not split, x is whole already.

        Returns
        -------
        Tensor
            [..., shard.total, ...], replicated.

        """
        if not shard.split:
            return x
        self._enter("gather")
        own = x.movedim(dim, 0)
        assert own.shape[0] == shard.size, f"{own.shape[0]} rows, the shard is {shard}"
        longest = -(-shard.total // self.size)
        if shard.total == self.size * longest:
            padded = own.contiguous()
        else:
            padded = own.new_zeros(longest, *own.shape[1:])
            padded[: shard.size] = own
        if padded.numel() == 0:  # a selection among no entries, say
            return own.new_empty(shard.total, *own.shape[1:]).movedim(0, dim)
        sent = padded.flatten().view(torch.uint8)
        parts = self._gathered(sent).view(x.dtype).view(self.size, *padded.shape)
        if shard.total == self.size * longest:
            rows = parts.flatten(0, 1)
        else:
            rows = torch.cat([part[: evenly(shard.total, r, self.size).size] for r, part in enumerate(parts)])
        return rows.movedim(0, dim).contiguous()

    def turned(self, x: Tensor, columns: AxisShard, rows: AxisShard) -> Tensor:
        """From this rank's columns of every row to every column of this rank's rows: what each lacks and no more.

        Parameters
        ----------
        x
            [rows.total, columns.size] of any dtype.
        columns, rows
            What of each axis is here; both are split, columns evenly.

        Returns
        -------
        Tensor
            [rows.size, columns.total].

        """
        assert x.shape == (rows.total, columns.size), f"{list(x.shape)}, want {rows.total} of {columns.size}"
        assert columns.total == columns.size * self.size, f"{columns} on {self.size} ranks"
        self._enter("exchange")
        data = x.contiguous().view(torch.uint8)  # [rows, bytes], sorted by the rank that they go to
        got = data.new_empty(self.size, rows.size, data.shape[1])
        if not self._apart:
            sent = [evenly(rows.total, rank, self.size).size for rank in range(self.size)]
            received = [rows.size] * self.size
            dist.all_to_all_single(got.flatten(0, 1), data, received, sent, group=self._group)
        return got.view(x.dtype).movedim(0, 1).reshape(rows.size, columns.total)

    def moved(self, site: str, layer: int, table: int, rows: Tensor, route: Route) -> Coming:
        """Bring rows of a table to the ranks that want them, each from the rank that has it.

        Parameters
        ----------
        site, layer
            What this is, for a tripwire, and for whoever watches this rank.
        table
            Where it arrives in a mailbox: until the same is asked for again.
        rows
            [route.held.size, w] of any dtype.
        route
            Where they go.

        Returns
        -------
        Coming
            Waits for [route.into, w]; rows at which nothing is wanted hold nothing that may be read. Tripwire, now or
            then, unless what is wanted is what comes.

        """
        self._enter(site)
        if self._apart:
            return lambda: rows.new_zeros(route.into, rows.shape[1])
        if self._mailbox is None:
            self.moves["collective"] += 1
            return self._exchanged(site, layer, rows, route)
        self.moves["memory"] += 1
        arriving = self._mailbox(table, rows, route.held.of(route.going(self.rank)), route.held.start, route.into)
        wanted = route.wanted(self.rank)

        def arrived() -> Tensor:
            found, numbers = arriving()
            self._look_at(_Filled(site, layer, ((wanted < 0) | (numbers == wanted)).int()))
            return found

        return arrived

    def _exchanged(self, site: str, layer: int, rows: Tensor, route: Route) -> Coming:
        """`moved` by a collective, which must know how many rows go where; each row brings its number."""
        to, row = (route.held.of(route.going(self.rank)) >= 0).T.nonzero(as_tuple=True)
        place = route.places[:, self.rank]
        coming = (place >= 0).nonzero()[:, 0]
        coming = coming[route.source[coming].argsort(stable=True)]  # as they arrive: by source, ascending
        sent, received = (ranks.bincount(minlength=self.size) for ranks in (to, route.source[coming]))
        told = torch.empty_like(sent)
        dist.all_to_all_single(told, sent, group=self._group)
        if not told.equal(received):
            rank = int((told != received).nonzero()[0])
            raise Tripwire(site, layer, None, f"{int(told[rank])} rows from rank {rank}", f"{int(received[rank])}")
        number = (row + route.held.start).int()[:, None]
        given = torch.cat((number.view(torch.uint8), rows.view(torch.uint8)[row]), dim=1)
        got, counts = given.new_empty(len(coming), given.shape[1]), (received.tolist(), sent.tolist())
        arriving, dtype = dist.all_to_all_single(got, given, *counts, group=self._group, async_op=True), rows.dtype

        def arrived(given: Tensor = given) -> Tensor:  # which lives until then
            arriving.wait()
            numbers, data = got.split([number.element_size(), given.shape[1] - number.element_size()], dim=1)
            self._look_at(_Filled(site, layer, (numbers.contiguous().view(torch.int32)[:, 0] == coming).int()))
            out = given.new_zeros(route.into, data.shape[1])
            out[place[coming]] = data
            return out.view(dtype)

        return arrived

    def filled(self, site: str, layer: int | None, partial: Partial) -> Tensor:
        """Give every rank all rows [n, d], each from the rank that filled it; Tripwire unless that is exactly one.

        The bits are added up as integers, so nothing is rounded, and NaN and -0.0 arrive as they were.
        """
        rows = partial.rows
        if self.size == 1:
            return rows
        self._enter(site)
        assert rows.shape[1] * rows.element_size() % 4 == 0, f"rows of {rows.shape[1]} {rows.dtype} are no whole words"
        filled = partial.filled[:, None].int()
        words = torch.cat((rows.view(torch.int32) * filled, filled), dim=1)
        if self._apart:
            return words[:, :-1].contiguous().view(rows.dtype)
        dist.all_reduce(words, group=self._group)
        self._look_at(_Filled(site, layer, words[:, -1]))
        return words[:, :-1].contiguous().view(rows.dtype)

    def _look_at(self, filled: _Filled) -> None:
        """Tripwire unless each row was filled by one rank: at once on the host, else when all is looked at."""
        if self._left is not None:
            self._left.filled.append(filled)
        elif filled.ranks.device.type == "cpu":
            _check_filled([filled])
        else:
            self._filled.append(filled)

    def of_first(self, x: Tensor) -> Tensor:
        """Return rank 0's x, whose shape and dtype every rank knows."""
        if self.size > 1 and not self._apart:
            self._enter("broadcast")
            dist.broadcast(x, group=self._group, group_src=0)
        return x

    def record(self, site: str, layer: int | None, tensor: Tensor) -> None:
        """Record a tensor that must be the same on every rank, until `verify` compares it."""
        if self.size > 1 and not self._apart:
            self._recorded.append(_Recorded(site, layer, tensor))

    def verify(self, *, wait: bool = True) -> None:
        """Compare all that was recorded across ranks, in one exchange; RankDisagreement for the first that differs.

        Without `wait` it is looked at in the next `verify`: a GPU has computed the checksums by then, and goes on.
        """
        if self._arriving is not None:
            compared, self._arriving = self._arriving, None
            if compared.arrived is not None:
                compared.arrived.synchronize()
            self._compare(compared)
        if wait:
            filled, self._filled = self._filled, []
            _check_filled(filled)
        if not self._recorded:
            return
        recorded, self._recorded = self._recorded, []
        self._enter("agreement")
        given = [one.tensor for one in recorded]
        if self._left is not None:
            self._left.compared.append(_Compared(recorded, self._gathered(self._left.checksums(given))))
            return
        every = self._gathered(checksums(given))
        if wait:
            self._compare(_Compared(recorded, every.cpu()))
            return
        if every.device.type != "cuda":
            self._arriving = _Compared(recorded, every)
            return
        host = torch.empty(every.shape, dtype=every.dtype, pin_memory=True).copy_(every, non_blocking=True)
        self._arriving = _Compared(recorded, host, arrived := torch.cuda.Event())
        arrived.record()

    def _compare(self, compared: _Compared) -> None:
        differs = compared.every != compared.every[0]  # [ranks, recorded]
        if not bool(differs.any()):
            return
        first = int(differs.any(0).nonzero()[0])
        self._name_the_value(compared.recorded[first], int(differs[:, first].nonzero()[0]))

    def _name_the_value(self, one: _Recorded, rank: int) -> None:
        """Fetch the tensor of ranks 0 and `rank` and raise for the first coordinate that differs."""
        held: list[tuple[torch.Size, Tensor]] = [(one.tensor.shape, one.tensor.cpu())] * self.size
        dist.all_gather_object(held, (one.tensor.shape, one.tensor.cpu()), group=self._group)
        (here_shape, here), (there_shape, there) = held[0], held[rank]
        if here_shape != there_shape:
            raise RankDisagreement(one.site, one.layer, rank, None, list(here_shape), list(there_shape))
        differs = (bits(here).view(here.numel(), -1) != bits(there).view(here.numel(), -1)).any(1)
        at = tuple(differs.view(here.shape).nonzero()[0].tolist())
        raise RankDisagreement(one.site, one.layer, rank, at, here[at].tolist(), there[at].tolist())

    def _gathered(self, own: Tensor) -> Tensor:
        """Every rank's [n], as [ranks, n]."""
        if self._apart:
            return own.repeat(self.size, 1)
        every = own.new_empty(self.size, len(own))
        if self._multicast is not None and self._multicast.takes(own):
            self.gathers["multicast"] += 1
            self._multicast(every.view(-1), own)
        else:
            self.gathers["collective"] += 1
            _gather(every.view(-1), own, group=self._group)
        return every

    def _enter(self, what: str) -> None:
        if self._apart:
            return
        self.collectives += 1
        self.at = what


def _check_filled(of_all: list[_Filled]) -> None:
    """Tripwire unless each row of each was filled by exactly one rank."""
    if not of_all or bool(torch.cat([filled.ranks for filled in of_all]).eq(1).all()):
        return
    filled = next(filled for filled in of_all if not bool(filled.ranks.eq(1).all()))
    row = int((filled.ranks != 1).nonzero()[0])
    found = f"row {row} filled by {int(filled.ranks[row])} ranks"
    raise Tripwire(filled.site, filled.layer, None, found, "exactly one")
