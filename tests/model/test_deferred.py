"""What a captured call leaves for the host to look at: numbers, of which one beyond its limit names a place."""

import math
import re

import pytest
import torch

from fathom.kernels.formats import coded_rows, rows
from fathom.kernels.hyper.reference import sinkhorn
from fathom.model.errors import Tripwire
from fathom.model.observe import sites

Deferred = pytest.importorskip("fathom.model.observe.deferred", reason="Triton is not on every platform").Deferred
tripwires = pytest.importorskip("fathom.kernels.tripwires.triton")

CPU = torch.device("cpu")


def begun(first, count=1, layers=1):
    """Those of a call of so many tokens from a position on."""
    deferred = Deferred(layers, CPU)
    deferred.begin(torch.tensor(first), count)
    return deferred


def looked(deferred, position):
    """What trips at a position: its message, or nothing."""
    deferred.end()
    try:
        deferred.look(position)
    except Tripwire as trip:
        return str(trip)
    return None


@pytest.mark.parametrize("make", [
    lambda: rows.fp8_entries(3, 80, 16, CPU),
    lambda: rows.fp8_keys(3, 64, CPU),
    lambda: rows.fp4_keys(3, 64, CPU),
    lambda: torch.zeros(3, 64),
])  # fmt: skip
def test_a_row_with_a_nan_trips_when_its_window_closes(make):
    kept = make()
    for value in (1.0, math.nan, math.inf):
        new = torch.ones(1, rows.width(kept))
        new[0, 5] = value
        rows.write(kept, 1, new)
        for position in (4, 5, 6, 8):  # no window closes here: the row is none of this call's
            deferred = begun(position)
            deferred.stored(sites.ENTRY, 4, new, kept, 4)
            assert looked(deferred, position) is None
        deferred = begun(7)
        deferred.stored(sites.ENTRY, 4, new, kept, 4)
        found = looked(deferred, 7)
        assert (found is not None) == (value != 1.0)
        assert found is None or found.startswith("attention.entry of layer 4 at position 7: values whose sum is")


@pytest.mark.parametrize("dense", [False, True])
def test_a_row_that_comes_back_otherwise_trips(dense):
    kept, new = torch.zeros(3, 80) if dense else rows.fp8_entries(3, 80, 16, CPU), torch.ones(1, 80)
    rows.write(kept, 1, new)
    if dense:
        kept[1, 3] = math.nan  # in the cache alone
    else:
        kept.values.view(torch.uint8)[1, 3] += 1
    deferred = begun(7)
    deferred.stored(sites.ENTRY, 4, new, kept, 4)
    assert looked(deferred, 7) == (
        "attention.entry of layer 4 at position 7: numbers that come back otherwise from"
        f" {type(kept).__name__}: 1, expected 0"
    )


def test_columns_routing_and_selection_trip_as_on_the_host():
    comb = sinkhorn(torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(0)), 20, 1e-6)
    ids, weights = torch.tensor([[0, 3, 5]]), torch.tensor([[0.5, 1.0, 1.0]])
    selected = torch.tensor([[0, 1, 2, -1]], dtype=torch.int32)

    def trips(comb=comb, ids=ids, weights=weights, selected=selected, position=12):
        deferred = begun(position)
        deferred.columns(sites.ATTENTION_COMB, 2, comb, 1e-6)
        deferred.routing(sites.EXPERT_IDS, 2, ids, weights, 2.5, 6)
        deferred.selection(sites.SELECTED, 2, 4, 4, 9, selected)
        return looked(deferred, position)

    assert trips() is None
    wrong = comb.clone()
    wrong[0, 1, 2] += 1e-4
    assert trips(comb=wrong).startswith("attention.comb of layer 2 at position 12: a column sum off 1 by ")
    assert "a column sum" in trips(comb=comb * math.nan)
    for other in ([0, 3, 3], [0, 3, 6], [-1, 3, 5]):
        assert trips(ids=torch.tensor([other])).startswith("experts.ids of layer 2")
    assert trips(weights=weights * 1.001).startswith("experts.weights of layer 2")
    for other in ([0, 1, 3, -1], [0, 1, 1, -1], [0, 2, 1, -1], [0, 1, -1, -1], [-1, 0, 1, 2]):
        found = trips(selected=torch.tensor([other], dtype=torch.int32))
        assert found.startswith("indexer.selected of layer 2 at position 12: selected entries that ")


def test_measures_of_the_last_call_count_alone():
    deferred = begun(0)
    deferred.finite(sites.LOGITS, None, torch.tensor([math.inf]))
    deferred.begin(torch.tensor(0), 1)
    deferred.finite(sites.LOGITS, None, torch.ones(2, 2, dtype=torch.bfloat16))
    deferred.end()
    deferred.look(0)
    deferred.finite(sites.STREAMS, 1, torch.tensor([[3.0e38, 3.0e38]]))
    deferred.end()
    with pytest.raises(Tripwire, match=r"streams of layer 1 at position 9: values whose sum is inf"):
        deferred.look(9)


def test_all_of_a_layer_is_measured_in_one_launch_and_of_each_span(monkeypatch):
    """Whatever stands elsewhere in it: each trips at its place alone, in the last number of a sum too."""
    launched, run = [], tripwires.measure
    monkeypatch.setattr(
        tripwires, "measure", lambda measures, *rest: (launched.append(len(measures)), run(measures, *rest))
    )
    kept, new = rows.fp8_entries(3, 80, 16, CPU), torch.ones(1, 80)
    rows.write(kept, 1, new)
    comb, ids, weights = torch.full((1, 4, 4), 0.25), torch.tensor([[0, 3, 5]]), torch.tensor([[0.5, 1.0, 1.0]])
    streams = torch.ones(1, tripwires.SPAN + 3, dtype=torch.bfloat16)

    def trips(streams=streams, comb=comb, weights=weights):
        deferred = begun(7, layers=2)
        for layer in (0, 1):
            deferred.columns(sites.ATTENTION_COMB, layer, comb if layer else torch.full((1, 4, 4), 0.25), 1e-6)
            deferred.stored(sites.ENTRY, layer, new, kept, 4)
            deferred.routing(sites.EXPERT_IDS, layer, ids, weights if layer else weights * 0 + 2.5 / 3, 2.5, 6)
            deferred.finite(sites.STREAMS, layer, streams if layer else torch.ones(1))
        deferred.finite(sites.HIDDEN, None, torch.ones(5))
        deferred.finite(sites.LOGITS, None, torch.ones(5))
        return looked(deferred, 7)

    assert trips() is None
    assert launched == [4, 4, 2]
    streams[0, -1] = math.nan
    assert trips() == "streams of layer 1 at position 7: values whose sum is nan, expected finite"
    assert trips(streams=torch.ones(1), comb=comb * 1.01).startswith("attention.comb of layer 1")
    assert trips(streams=torch.ones(1), weights=weights * 2).startswith("experts.weights of layer 1")


@pytest.mark.parametrize("position", [5, 8])
def test_rows_of_a_chunk_are_those_of_the_windows_that_it_completes(position):
    """From position 5 on nine tokens complete the windows of rows 1 and 2, of which the first came alone."""
    kept, new, skip = rows.fp8_entries(5, 80, 16, CPU), torch.ones(2, 80), int(position == 5)
    rows.write(kept, position // 4 + skip, new)
    kept.values.view(torch.uint8)[position // 4 + skip + 1, 3] += 1
    deferred = begun(position, 9)
    deferred.appended(sites.ENTRY, 0, position // 4 + skip, new, kept, 4, skip)
    found, last = looked(deferred, position), (position // 4 + skip + 2) * 4 - 1
    if last < position + 9:
        assert found.startswith(f"attention.entry of layer 0 at position {last}: numbers that come back otherwise")
    else:  # not a row of this call
        assert found is None


def test_a_coded_row_that_comes_back_too_far_off_trips():
    kept, new = coded_rows.allocate(4, 64, 6, CPU, 0), torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    rows.write(kept, 1, new)
    for spoil, place in ((False, None), (True, 11)):
        if spoil:
            kept.norm[2] *= 3
        deferred = begun(4, 8)
        deferred.appended(sites.ENTRY, 2, 1, new, kept, 4, 0)
        found = looked(deferred, 4)
        assert (found is None) == (place is None)
        assert found is None or re.match(
            r"attention\.entry of layer 2 at position 11: a row that comes back off, as a share of its squared"
            r" length, \S+, expected what a row may with 6 bits",
            found,
        )
