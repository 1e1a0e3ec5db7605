"""Each tripwire: silent on what a correct run produces, and naming the place on everything else."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.kernels.formats.stored import Dense
from fathom.kernels.hyper.reference import sinkhorn
from fathom.kernels.indexer.reference import select
from fathom.kernels.ops import CPU
from fathom.model.compressor import EntryCompressor, KeyCompressor
from fathom.model.errors import Tripwire
from fathom.model.observe import invariants, sites
from fathom.model.observe.observer import listening
from fathom.runtime.load import load
from fathom.runtime.options import DEMO, RunOptions

INF, NAN = float("inf"), float("nan")


def tripped(call, *args):
    with pytest.raises(Tripwire) as trip:
        call(*args)
    return trip.value


@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finite_names_the_first_position(value, dtype):
    x = torch.randn(5, 2, 3).to(dtype)
    invariants.finite("streams", 4, 100, x)
    x[3, 1, 2] = x[4, 0, 0] = value
    trip = tripped(invariants.finite, "streams", 4, 100, x)
    assert (trip.site, trip.layer, trip.position) == ("streams", 4, 103)
    assert trip.measured == "2 of 30 values not finite"
    assert str(trip) == "streams of layer 4 at position 103: 2 of 30 values not finite, expected finite"


def test_infinities_that_cancel_are_not_finite():
    assert tripped(invariants.finite, "x", None, 0, torch.tensor([[INF, -INF, 1.0]])).position == 0


def test_large_finite_values_are_finite():
    invariants.finite("x", None, 0, torch.full((4, 100), 1e30))
    assert "overflows" in str(tripped(invariants.finite, "x", None, 0, torch.full((4, 100), 3e38)))


@settings(deadline=None, max_examples=80)
@given(
    first=st.integers(0, 40), tokens=st.integers(1, 9), ratio=st.integers(1, 5), k=st.integers(1, 12), data=st.data()
)
def test_selection_passes_what_the_reference_selects_and_nothing_else(first, tokens, ratio, k, data):
    torch.manual_seed(data.draw(st.integers(0, 99)))
    n = (first + tokens) // ratio
    good = select(torch.randn(tokens, 2, 4), torch.randn(tokens, 2), torch.randn(n, 4), first, ratio, k)
    assert invariants.selection(1, first, ratio, k, n, good) is good
    if not good.numel():
        return
    row, column = data.draw(st.integers(0, tokens - 1)), data.draw(st.integers(0, good.shape[1] - 1))
    wrong = good.clone()
    wrong[row, column] = data.draw(st.integers(-3, n + 3))
    seen = (first + row + 1) // ratio
    chosen = [entry for entry in wrong[row].tolist() if entry != -1]
    rising = chosen == sorted(set(chosen)) and wrong[row].tolist() == chosen + [-1] * (good.shape[1] - len(chosen))
    legal = rising and len(chosen) == min(k, seen) and all(0 <= entry < seen for entry in chosen)
    if legal:
        invariants.selection(1, first, ratio, k, n, wrong)
    else:
        assert tripped(invariants.selection, 1, first, ratio, k, n, wrong).position == first + row


@pytest.mark.parametrize("tokens", [1, 2])  # decode has a path of its own
@pytest.mark.parametrize(
    ("row", "measured", "expected"),
    [
        ([0, 1, 9, -1], "entry 9", "an entry of 0 .. 8"),
        ([0, -2, 3, -1], "entry -2", "an entry of 0 .. 8"),
        ([0, 1, 3, -1], "entry 3", "an entry below 3: later blocks are not finished"),
        ([0, 1, 1, -1], "1 entries repeated", "distinct entries"),
        ([0, 2, -1, -1], "2 entries selected", "3: min(top-k 4, 3 visible)"),
        ([-1, -1, -1, -1], "0 entries selected", "3: min(top-k 4, 3 visible)"),
        ([0, 2, 1, -1], "entries out of order", "ascending, then -1"),
        ([0, -1, 1, 2], "entries out of order", "ascending, then -1"),
    ],
)
def test_selection_says_what_is_wrong(tokens, row, measured, expected):
    first, ratio, top_k, entries = 12, 4, 4, 9  # position 12 sees 3 entries
    good = [0, 1, 2, -1]
    trip = tripped(invariants.selection, 6, first, ratio, top_k, entries, torch.tensor([row] * tokens).int())
    assert (trip.measured, trip.expected) == (measured, expected)
    assert (trip.site, trip.layer, trip.position) == ("indexer.selected", 6, 12)
    if tokens == 2:
        trip = tripped(invariants.selection, 6, first, ratio, top_k, entries, torch.tensor([good, row]).int())
        assert trip.position == 13


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize(
    ("row", "measured", "expected"),
    [
        ([0, 1, 9, -1], "entry 109", "an entry of 100 .. 108"),
        ([0, -2, 3, -1], "entry -2", "an entry of 100 .. 108"),
        ([0, 1, 3, -1], "entry 103", "an entry below 103: later blocks are not finished"),
        ([0, 2, -1, -1], "2 entries selected", "3: min(top-k 4, 3 visible)"),
    ],
)
def test_a_selection_among_what_was_not_evicted_names_the_sequences_position_and_entry(tokens, row, measured, expected):
    first, ratio, evicted = 412, 4, 100  # position 412 sees 103 entries, of which the first 100 are gone
    trip = tripped(invariants.selection, 6, first, ratio, 4, 9, torch.tensor([row] * tokens).int(), evicted)
    assert (trip.measured, trip.expected, trip.position) == (measured, expected, first)


@pytest.mark.parametrize("chunk", [1, 40])
def test_a_run_that_evicts_reports_a_bad_selection_where_it_is(chunk):
    bad = 500

    def select(q, weights, keys, first, ratio, k):
        selected = CPU.select(q, weights, keys, first, ratio, k)
        if keys.shape[0] and state.position <= bad < state.position + q.shape[0]:
            selected[bad - state.position, 0] = selected[bad - state.position, 1]
        return selected

    model = load(DEMO, RunOptions(kv=("csa=coda:window=8,exact=4,summary=4",)), CPU._replace(select=select)).model
    state = model.new_state(520, 40)
    ids = torch.arange(520) % model.config.vocab_size
    model(ids[:40], state)  # the rest in calls of `chunk`
    trip = tripped(lambda: [model(part, state) for part in ids[40:].split(chunk)])
    assert str(trip).startswith("indexer.selected of layer 1 at position 500: 1 entries repeated")


def test_selection_of_another_width_type_or_none():
    none = tripped(invariants.selection, 1, 0, 4, 16, 5, None)
    assert (none.measured, none.expected) == ("no selection", "one for every token of a CSA layer")
    for wrong in (torch.zeros(2, 6).int(), torch.zeros(2, 4).int(), torch.zeros(2, 5), torch.zeros(5).int()):
        assert "int32 [t, 5]" in tripped(invariants.selection, 1, 0, 4, 16, 5, wrong).expected


@pytest.mark.parametrize("tokens", [1, 3])
def test_columns(tokens):
    comb = sinkhorn(torch.randn(tokens, 4, 4) * 3, 20, 1e-6)
    invariants.columns("attention.comb", 0, 7, comb, 1e-6)
    for wrong in (1e-4, -1e-4, NAN):
        bad = comb.clone()
        bad[-1, 1, 2] += wrong
        trip = tripped(invariants.columns, "attention.comb", 0, 7, bad, 1e-6)
        assert (trip.site, trip.position) == ("attention.comb", 7 + tokens - 1)


@pytest.mark.parametrize("tokens", [1, 3])
def test_routing(tokens):
    ids = torch.tensor([[0, 3, 5]] * tokens)
    weights = torch.tensor([[0.5, 1.0, 1.0]] * tokens)
    invariants.routing(2, 10, ids, weights, 2.5, 6)
    last = 10 + tokens - 1

    def wrong(which, column, value):
        changed = (ids if which == "ids" else weights).clone()
        changed[-1, column] = value
        given_ids, given_weights = (changed, weights) if which == "ids" else (ids, changed)
        return tripped(invariants.routing, 2, 10, given_ids, given_weights, 2.5, 6)

    assert wrong("ids", 0, 3).measured == "experts [3, 3, 5]"
    assert wrong("ids", 0, 3).position == last
    assert wrong("ids", 0, 6).measured == "expert 6"
    assert wrong("ids", 0, -1).measured == "expert -1"
    assert wrong("weights", 0, 0.501).position == last
    assert wrong("weights", 0, NAN).site == "experts.weights"


@pytest.fixture(scope="module")
def model():
    return load(DEMO, RunOptions()).model


def advanced(model, position):
    state = model.new_state(600, 256)
    for ids in (torch.arange(position) % 1024).split(256):
        model(ids, state)
    return state


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize(
    ("damage", "site"),
    [
        (lambda s: s.layers[0].ring._held.__setitem__(slice(None), range(271)), "attention.ring"),
        (lambda s: setattr(s.layers[1].entries, "count", 74), "attention.entry, rows"),
        (lambda s: setattr(s.layers[2].frontier, "position", 0), "attention.entry, tokens"),
        (lambda s: setattr(s.layers[3].key_frontier, "position", 1), "indexer.key_used, tokens"),
        (lambda s: setattr(s.layers[3].keys, "count", 76), "indexer.key_used, rows"),
        (lambda s: s.layers[0].ring.data.fill_(NAN), "attention.streams"),
        (lambda s: setattr(s.layers[1].keys, "data", torch.zeros(150, 512)), "indexer.key"),
    ],
    ids=["ring", "entries", "frontier", "key frontier", "keys", "nan in the ring", "wide keys"],
)
def test_a_damaged_state_trips_in_the_next_calls(model, damage, site, tokens):
    state = advanced(model, 300)
    damage(state)

    def go_on():
        for _ in range(4):  # a window of 4 tokens closes on the way
            model(torch.arange(tokens), state)

    assert tripped(go_on).site.startswith(site)


def test_more_rows_than_allocated_trip_before_they_are_written(model):
    state = advanced(model, 300)
    state.layers[1].entries.data = state.layers[1].entries.data[:75]
    with pytest.raises(Tripwire, match="of layer 1 at position 300: 76 rows, expected at most 75"):
        model(torch.arange(4), state)


def test_a_restored_ring_stands_where_the_position_says(model):
    state, other = advanced(model, 300), model.new_state(600, 256)
    for cache, copy in zip(state.layers, other.layers, strict=True):
        copy.restore(300, cache.tensors(300))
    other.position = 300
    assert torch.equal(model(torch.arange(5), state), model(torch.arange(5), other))


def test_columns_allow_what_the_config_adds_to_them():
    comb = sinkhorn(torch.randn(64, 4, 4, generator=torch.Generator().manual_seed(0)), 20, 1e-4)
    invariants.columns("attention.comb", 0, 0, comb, 1e-4)
    assert tripped(invariants.columns, "attention.comb", 0, 0, comb, 1e-6).layer == 0


def test_a_nan_in_the_head_trips(monkeypatch):
    model = load(DEMO, RunOptions()).model
    head = model.head.weight.data.clone()
    head[3, 5] = NAN
    monkeypatch.setattr(model.head, "weight", Dense(head))
    hidden = model(torch.arange(4), model.new_state(8, 8))
    trip = tripped(model.logits, hidden)
    assert (trip.site, trip.position, trip.measured) == ("logits", None, "4 of 4096 values not finite")


class Narrow(EntryCompressor):
    def stored(self, rows):
        return super().stored(rows)[:, :1]


class NarrowKeys(KeyCompressor):
    def stored(self, rows):
        return super().stored(rows)[:, :1]


@pytest.mark.parametrize(("part", "faulty", "site"), [
    (lambda m: m.blocks[1].attention.compressor, Narrow, "attention.entry"),
    (lambda m: m.blocks[1].attention.indexer.compressor, NarrowKeys, "indexer.key_used"),
])  # fmt: skip
def test_rows_narrower_than_their_cache_trip_before_they_are_spread_over_it(part, faulty, site):
    model = load(DEMO, RunOptions()).model
    part(model).__class__ = faulty
    with pytest.raises(Tripwire, match=f"{site} of layer 1: rows 128 wide, expected 1"):
        model(torch.arange(8), model.new_state(8, 8))


@pytest.mark.parametrize("site", [sites.INDEX_WEIGHTS, sites.INDEX_QUERY_USED, sites.STREAMS], ids=lambda s: s.name)
def test_what_a_listener_writes_is_looked_at_too(model, site):
    with listening(model, {site: lambda _, x: x.fill_(NAN)}), pytest.raises(Tripwire, match=site.name):
        model(torch.arange(8), model.new_state(8, 8))


def test_a_part_that_runs_alone_trips_without_a_position(model):
    moe = model.blocks[0].experts
    with pytest.raises(Tripwire) as trip:
        moe.route(torch.full((2, 128), NAN, dtype=torch.bfloat16), SimpleNamespace(tokens=torch.arange(2)))
    assert (trip.value.site, trip.value.position) == ("experts.weights", None)


def test_a_model_that_nobody_holds_is_gone_at_once():
    model = load(DEMO, RunOptions()).model
    model(torch.arange(3), model.new_state(8, 8))
    held = weakref.ref(model.blocks[1].attention)
    gc.disable()
    try:
        del model
        assert held() is None
    finally:
        gc.enable()
