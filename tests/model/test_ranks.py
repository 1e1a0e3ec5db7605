"""The collectives on real processes, held against plain tensors in one."""

import functools
import re

import pytest
import torch

from fathom.model.choices import ALL, AUTO, OWN
from fathom.model.errors import RankDisagreement, Tripwire
from fathom.model.ranks import ranks as between
from fathom.model.ranks.dispatch import owners
from fathom.model.ranks.mailbox import Table
from fathom.model.ranks.multicast import LARGEST
from fathom.model.ranks.ranks import ALONE, AxisShard, Partial, Ranks, Route, Shards, evenly, undivided
from tests import gloo
from tests.nvlink import nvlink


def ranks_of(group, tokens=AUTO):
    return Ranks(group, Shards(*(undivided(4),) * len(Shards._fields)), tokens)


# --- arithmetic of shares, no process needed


@pytest.mark.parametrize(("total", "size"), [(7, 3), (8, 4), (2, 4), (0, 2), (1, 8)])
def test_shares_are_consecutive_and_differ_by_at_most_one(total, size):
    parts = [evenly(total, rank, size) for rank in range(size)]
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(total))
    sizes = [part.size for part in parts]
    assert sorted(sizes, reverse=True) == sizes
    assert sizes[0] - sizes[-1] <= 1
    x = torch.arange(total)
    assert torch.cat([part.of(x) for part in parts]).equal(x)


def test_one_rank_alone_exchanges_nothing():
    ranks = ranks_of(ALONE)
    x = torch.randn(3, 4)
    assert ranks.whole(x, 0, evenly(3, 0, 1)) is x
    assert ranks.filled("here", None, Partial(x, torch.ones(3, dtype=torch.bool))) is x
    ranks.record("here", 0, x)
    ranks.verify()
    assert ranks.tokens(5) == (0, 5, 5, False)
    assert ranks.collectives == 0


def test_a_share_of_an_axis_that_is_not_split_is_all_of_it():
    x = torch.randn(3, 4)
    assert undivided(3).of(x) is x


# --- between two and three processes


def everything(group):
    """What the tests below ask of a rank: a process takes longer to start than all of it."""
    found = {"collectives": collectives(group), "faulty": faulty(group) if group.size == 2 else None}
    ranks = ranks_of(group)
    return found | {"moved": (moves(group, ranks), lost(group, ranks)), "mailbox": by_mailbox(group)}


@pytest.fixture(scope="module")
def on_ranks():
    return functools.cache(lambda size: gloo.run(size, everything))


def collectives(group):
    ranks, found = ranks_of(group), {}
    for dtype in (torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.bool):
        for total in (7, group.size, 1):
            whole = (torch.arange(total * 6).view(total, 2, 3) * 37 % 101).to(dtype)
            part = evenly(total, group.rank, group.size)
            assert ranks.whole(part.of(whole).clone(), 0, part).equal(whole), (dtype, total)
            turned = whole.movedim(0, 2)
            assert ranks.whole(part.of(turned, 2).clone(), 2, part).equal(turned), (dtype, total)
    special = torch.tensor([[-0.0, float("nan")], [float("inf"), 1e-45]])
    mine = torch.arange(2) % group.size == group.rank
    filled = ranks.filled("special", None, Partial(special.masked_fill(~mine[:, None], 0), mine))
    assert filled.view(torch.int32).equal(special.view(torch.int32))
    assert ranks.of_first(torch.tensor([group.rank])).item() == 0
    for dtype in (torch.bfloat16, torch.float32):
        for total in (7, 1):  # of one row only the first rank gets any
            every = (torch.arange(total * 12) * 37 % 101).view(total, 12).to(dtype)
            rows, columns = (evenly(n, group.rank, group.size) for n in (total, 12))
            assert ranks.turned(columns.of(every, 1), columns, rows).equal(rows.of(every)), (dtype, total)
    found["multicast"] = by_multicast(group)
    found["calls"] = [ranks.tokens(n).split for n in (1, 64 * group.size - 1, 64 * group.size)]
    found["ran"] = ranks.calls
    for tokens, split in ((ALL, False), (OWN, True)):
        assert {ranks_of(group, tokens).tokens(n).split for n in (1, 64 * group.size)} == {split}
    return found


def by_multicast(group):
    """What arrives by it and what does not, beside plain tensors."""
    with nvlink(group) as link, pytest.MonkeyPatch.context() as monkeypatch:
        ranks = ranks_of(group)
        monkeypatch.setattr(between, "has_multicast", lambda _: group.rank > 0)
        ranks.connect(torch.device("cpu"))
        assert not link.handles, "a rank has none"
        monkeypatch.setattr(between, "has_multicast", lambda _: True)
        ranks.connect(torch.device("cpu"))
        ranks.gathers.update(dict.fromkeys(ranks.gathers, 0))
        for dtype, width in ((torch.bfloat16, 6), (torch.int32, 5), (torch.float32, 1)):
            whole = (torch.arange(group.size * width) * 37 % 101).view(group.size, width).to(dtype)
            part = evenly(group.size, group.rank, group.size)
            first = ranks.whole(part.of(whole), 0, part)
            assert ranks.whole(part.of(-whole), 0, part).equal(-whole), dtype
            assert first.equal(whole), "the next gather writes to the same memory"
        assert ranks.gathers == {"multicast": 6, "collective": 0}
        for shape in ((group.size, 3), (group.size, LARGEST // group.size + 4)):  # no whole word, and too many bytes
            large = torch.ones(shape, dtype=torch.uint8)
            assert ranks.whole(part.of(large), 0, part).equal(large)
        return link.gathered, ranks.gathers


@pytest.mark.parametrize("size", [2, 3])
def test_axes_rows_and_bits_arrive_whole(on_ranks, size):
    for found in on_ranks(size):
        assert found["collectives"].pop("multicast") == (6, {"multicast": 6, "collective": 2})
        assert found["collectives"] == {"calls": [False, False, True], "ran": {ALL: 2, OWN: 1}}


# --- rows of a table


def a_route(group, draw, rows=23, into=31):
    """A table of rows, of which each is sent by one rank to any of them, and to places that nothing else gets."""
    source = torch.randint(0, group.size, (rows,), generator=draw)
    places = torch.stack([torch.randperm(into, generator=draw)[:rows] for _ in range(group.size)], dim=1)
    wanted = torch.rand(rows, group.size, generator=draw) < 0.4
    return Route(AxisShard(0, rows, rows, split=True), source, torch.where(wanted, places, -1), into)


def moves(group, ranks):
    """Move tables of several forms, and look at every row that is wanted: how many of them were moved, by what."""
    draw, moved = torch.Generator().manual_seed(3), 0
    for dtype, width in ((torch.uint8, 24), (torch.bfloat16, 6), (torch.float32, 5)):
        whole = (torch.arange(23 * width) * 37 % 101).view(23, width).to(dtype)
        held = evenly(23, group.rank, group.size)
        of_owners = a_route(group, draw)._replace(held=held, source=owners(held, group.size, whole.device))
        routes = (a_route(group, draw), of_owners)
        coming = [  # both on their way at once
            ranks.moved("here", 1, table, route.held.of(whole), route) for table, route in enumerate(routes)
        ]
        for arriving, route in zip(coming, routes, strict=True):
            found, wanted = arriving(), route.wanted(group.rank)
            assert found.shape == (31, width)
            assert found[wanted >= 0].equal(whole[wanted[wanted >= 0].long()]), dtype
            moved += int((wanted >= 0).sum())
    return moved, ranks.moves


def by_mailbox(group):
    """The same by rows that Triton's kernel writes into the memory of other processes."""
    with nvlink(group):
        ranks = ranks_of(group)
        ranks.connect(torch.device("cpu"), [Table(31, 24)] * 2)
        return moves(group, ranks), lost(group, ranks)


def lost(group, ranks):
    """What a rank says when each sends one row less than the rank behind it wants."""
    route, going, behind = a_route(group, torch.Generator().manual_seed(4)), Route.going, (group.rank + 1) % group.size

    def without(self, rank):
        found = going(self, rank)
        found[(found[:, behind] >= 0).nonzero()[0], behind] = -1
        return found

    rows = torch.ones(23, 24, dtype=torch.uint8)
    ranks.moved("experts.dispatch", 2, 0, rows, route)()  # what it leaves behind is not taken for the next
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Route, "going", without)
        try:
            ranks.moved("experts.dispatch", 3, 0, rows, route)()
        except Tripwire as tripwire:
            return str(tripwire)
    return None


@pytest.mark.parametrize("size", [2, 3])
def test_rows_of_a_table_arrive_where_they_are_wanted(on_ranks, size):
    for rank, found in enumerate(on_ranks(size)):
        (moved, by), told = found["moved"]
        (rows, of_memory), missed = found["mailbox"]
        assert moved == rows > 23
        assert (by, of_memory) == ({"memory": 0, "collective": 8}, {"memory": 8, "collective": 0})
        before = (rank - 1) % size
        assert re.fullmatch(rf"experts.dispatch of layer 3: \d+ rows from rank {before}, expected \d+", told)
        assert re.fullmatch(r"experts.dispatch of layer 3: row \d+ filled by 0 ranks, expected exactly one", missed)


def faulty(group):
    """What each way to be wrong raises on this rank, as (type, message)."""
    ranks, said = ranks_of(group), []
    x = torch.arange(12, dtype=torch.float32).view(3, 4)

    def note(what):
        try:
            what()
        except (Tripwire, RankDisagreement) as error:
            said.append(f"{type(error).__name__}: {error}")

    everybody = torch.ones(3, dtype=torch.bool)
    note(lambda: ranks.filled("experts.routed", 2, Partial(x, everybody)))  # a replicated tensor, summed as partial
    nobody = torch.tensor([True, False, True]) & (group.rank == 0)
    note(lambda: ranks.filled("experts.routed", 2, Partial(x, nobody)))
    selected = torch.tensor([[0, 1, 5, -1], [2, 3, 4, 7]], dtype=torch.int32)
    ranks.record("attention.kv", 1, x)
    ranks.record("indexer.selected", 1, selected)
    ranks.verify()
    if group.rank == 1:
        selected[1, 2] = 6
    ranks.record("attention.kv", 1, x)
    ranks.record("indexer.selected", 1, selected)
    note(ranks.verify)
    swapped = x.flip(0) if group.rank == 1 else x  # the same values in another order
    ranks.record("streams", None, swapped)
    note(ranks.verify)
    ranks.record("indexer.selected", 3, selected[:, : 4 - group.rank])
    note(ranks.verify)
    zero = torch.tensor([[1.0, 0.0]])
    ranks.record("attention.kv", 0, -zero if group.rank == 1 else zero)
    note(ranks.verify)
    ranks.record("attention.kv", 0, torch.tensor([0.0, -0.0][group.rank]).view(1, 1))  # equal, of other bits
    note(ranks.verify)
    return said


def test_what_ranks_do_not_agree_on_is_named_with_both_values(on_ranks):
    expected = [
        "Tripwire: experts.routed of layer 2: row 0 filled by 2 ranks, expected exactly one",
        "Tripwire: experts.routed of layer 2: row 1 filled by 0 ranks, expected exactly one",
        "RankDisagreement: indexer.selected of layer 1, at [1, 2]: 4 on rank 0, 6 on rank 1",
        "RankDisagreement: streams, at [0, 0]: 0.0 on rank 0, 8.0 on rank 1",
        "RankDisagreement: indexer.selected of layer 3, shape: [2, 4] on rank 0, [2, 3] on rank 1",
        "RankDisagreement: attention.kv of layer 0, at [0, 0]: 1.0 on rank 0, -1.0 on rank 1",
        "RankDisagreement: attention.kv of layer 0, at [0, 0]: 0.0 on rank 0, -0.0 on rank 1",
    ]
    assert [found["faulty"] for found in on_ranks(2)] == [expected, expected]
