"""The collectives and both dispatches on real processes, held against plain loops over all ranks in one."""

import functools

import pytest
import torch

from kernels.experts.reference import by_expert, summed
from model.choices import ALL_REDUCE, ALL_TO_ALL, AUTO
from model.errors import RankDisagreement, Tripwire
from model.ranks import dispatch
from model.ranks.ranks import ALONE, Partial, Ranks, Shards, evenly, undivided
from tests import gloo

EXPERTS, HIDDEN, K = 6, 8, 3


def shares(rank, size):
    whole = undivided(4)
    return Shards(*(whole,) * len(Shards._fields))._replace(experts=evenly(EXPERTS, rank, size))


def ranks_of(group, chosen=AUTO):
    return Ranks(group, shares(group.rank, group.size), chosen)


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

DISPATCHED = {2: [33], 3: [2, 20]}  # numbers of tokens, by that of ranks


def everything(group):
    """What the tests below ask of a rank: a process takes longer to start than all of it."""
    found = {tokens: dispatched(group, tokens) for tokens in DISPATCHED[group.size]}
    found["collectives"] = collectives(group)
    if group.size == 2:
        found["faulty"] = faulty(group)
    return found


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
    # rank r sends r + 1 rows to each of the others, none to itself
    sent = [0 if to == group.rank else group.rank + 1 for to in range(group.size)]
    rows = torch.tensor([[group.rank, to, i] for to, n in enumerate(sent) for i in range(n)])
    told, received = ranks.counted(torch.tensor(sent))
    assert told == sent
    assert received == [0 if source == group.rank else source + 1 for source in range(group.size)]
    got = ranks.exchange(rows.view(-1, 3), sent, received)
    assert got.tolist() == [[source, group.rank, i] for source, n in enumerate(received) for i in range(n)]
    assert ranks.exchange(got, received, sent).equal(rows.view(-1, 3))
    found["calls"] = [ranks.tokens(n).split for n in (1, 64 * group.size - 1, 64 * group.size)]
    found["ran"] = ranks.calls
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_axes_rows_and_bits_arrive_whole(on_ranks, size):
    for found in on_ranks(size):
        assert found["collectives"] == {"calls": [False, False, True], "ran": {ALL_REDUCE: 2, ALL_TO_ALL: 1}}


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


# --- dispatch


def routed(tokens, seed):
    """x, ids and weights; expert 4 gets no token, expert 0 most."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, HIDDEN, generator=draw)
    ids = torch.stack([torch.tensor([0, 1, 2, 3, 5])[torch.randperm(5, generator=draw)[:K]] for _ in range(tokens)])
    ids[: tokens * 3 // 4, 1] = torch.where((ids[: tokens * 3 // 4] == 0).any(1), ids[: tokens * 3 // 4, 1], 0)
    return x, ids.long(), torch.rand(tokens, K, generator=draw)


class Calls:
    """A stand-in for a rank's experts, each of another slope; notes which rows each was given, and how often it ran."""

    def __init__(self, own):
        self.own, self.rows = own, []

    def __call__(self, x, ids, weights):
        out = x.new_zeros(*ids.shape, x.shape[1])
        for held, rows, slots in by_expert(ids, self.own.start, self.own.size):
            expert = self.own.start + held
            self.rows.append((expert, x[rows, 0].tolist()))
            out[rows, slots] = (x[rows] * (expert + 1) + expert) * weights[rows, slots][:, None]
        return out


def by_hand(x, ids, weights):
    """Token by token, experts ascending, in fp32."""
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for expert, slot in sorted((int(e), s) for s, e in enumerate(ids[token])):
            out[token] += (x[token] * (expert + 1) + expert) * weights[token, slot]
    return out


def dispatched(group, tokens):
    x, ids, weights = routed(tokens, seed=tokens)
    found = {}
    for way in (ALL_REDUCE, ALL_TO_ALL):
        ranks = ranks_of(group, way)
        calls = Calls(ranks.shards.experts)
        part = ranks.tokens(tokens)
        mine = (part.of(x), part.of(ids), part.of(weights))
        if way == ALL_REDUCE:
            out = dispatch.all_reduce(*mine, ranks, 1, calls)
        else:
            out = ranks.whole(dispatch.all_to_all(*mine, ranks, calls), 0, part)
        found[way] = (out, calls.rows)
    return found


@pytest.mark.parametrize(("size", "tokens"), [(size, tokens) for size, each in DISPATCHED.items() for tokens in each])
def test_both_ways_give_an_expert_all_its_tokens_once_and_a_token_its_sum(on_ranks, size, tokens):
    x, ids, weights = routed(tokens, seed=tokens)
    wanted, calls = by_hand(x, ids, weights), Calls(undivided(EXPERTS))
    assert summed(calls(x, ids, weights), ids).equal(wanted)
    assert not (ids == 4).any()
    per_expert = dict(calls.rows)
    assert sorted(per_expert) == sorted(set(ids.flatten().tolist()))
    found = [answer[tokens] for answer in on_ranks(size)]
    for way in (ALL_REDUCE, ALL_TO_ALL):
        ran = {}
        for rank, answer in enumerate(found):
            out, rows = answer[way]
            assert out.equal(wanted), (way, rank)
            here = evenly(EXPERTS, rank, size)
            assert all(here.start <= expert < here.stop for expert, _ in rows), (way, rank)
            assert not ran.keys() & dict(rows).keys()
            ran |= dict(rows)
        assert ran == per_expert, way  # the same tokens in the same order, in one call
