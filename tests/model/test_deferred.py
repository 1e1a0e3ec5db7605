"""What a captured call leaves for the host to look at: numbers, of which one beyond its limit names a place."""

import math

import pytest
import torch

from fathom.kernels.formats import rows
from fathom.kernels.hyper.reference import sinkhorn
from fathom.model.errors import Tripwire
from fathom.model.observe import sites

Deferred = pytest.importorskip("fathom.model.observe.deferred", reason="Triton is not on every platform").Deferred
tripwires = pytest.importorskip("fathom.kernels.tripwires.triton")

CPU = torch.device("cpu")


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
        deferred = Deferred(1, CPU)
        deferred.stored(sites.ENTRY, 4, torch.tensor(7), new, kept, 4)
        deferred.end()
        for position in (4, 5, 6, 8):
            deferred.look(position)  # no window closes here: the row is none of this call's
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
    deferred = Deferred(1, CPU)
    deferred.stored(sites.ENTRY, 4, torch.tensor(7), new, kept, 4)
    assert looked(deferred, 7) == (
        "attention.entry of layer 4 at position 7: numbers that come back otherwise from"
        f" {type(kept).__name__}: 1, expected 0"
    )


@pytest.mark.parametrize("selected", [None, torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, 4)])
def test_a_selection_of_another_width_or_dtype_trips_when_it_is_captured(selected):
    with pytest.raises(Tripwire, match=r"indexer\.selected of layer 2"):
        Deferred(1, CPU).selection(sites.SELECTED, 2, torch.tensor(12), 4, 4, 9, selected)


def test_columns_routing_and_selection_trip_as_on_the_host():
    comb = sinkhorn(torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(0)), 20, 1e-6)
    ids, weights = torch.tensor([[0, 3, 5]]), torch.tensor([[0.5, 1.0, 1.0]])
    selected = torch.tensor([[0, 1, 2, -1]], dtype=torch.int32)

    def trips(comb=comb, ids=ids, weights=weights, selected=selected, position=12):
        deferred = Deferred(1, CPU)
        deferred.columns(sites.ATTENTION_COMB, 2, comb, 1e-6)
        deferred.routing(sites.EXPERT_IDS, 2, ids, weights, 2.5, 6)
        deferred.selection(sites.SELECTED, 2, torch.tensor(position), 4, 4, 9, selected)
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


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # of the interpreter
def test_measures_of_the_last_call_count_alone():
    deferred = Deferred(1, CPU)
    deferred.finite(sites.LOGITS, None, torch.tensor([math.inf]))
    deferred.begin()
    deferred.finite(sites.LOGITS, None, torch.ones(2, 2, dtype=torch.bfloat16))
    deferred.end()
    deferred.look(0)
    deferred.finite(sites.STREAMS, 1, torch.tensor([3.0e38, 3.0e38]))
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
    streams = torch.ones(2, tripwires.SPAN + 3, dtype=torch.bfloat16)

    def trips(streams=streams, comb=comb, weights=weights):
        deferred = Deferred(2, CPU)
        deferred.begin()
        for layer in (0, 1):
            deferred.columns(sites.ATTENTION_COMB, layer, comb if layer else torch.full((1, 4, 4), 0.25), 1e-6)
            deferred.stored(sites.ENTRY, layer, torch.tensor(7), new, kept, 4)
            deferred.routing(sites.EXPERT_IDS, layer, ids, weights if layer else weights * 0 + 2.5 / 3, 2.5, 6)
            deferred.finite(sites.STREAMS, layer, streams if layer else torch.ones(1))
        deferred.finite(sites.HIDDEN, None, torch.ones(5))
        deferred.finite(sites.LOGITS, None, torch.ones(5))
        return looked(deferred, 7)

    assert trips() is None
    assert launched == [4, 6, 2]
    streams[1, -1] = math.nan
    assert trips() == "streams of layer 1 at position 7: values whose sum is nan, expected finite"
    assert trips(streams=torch.ones(1), comb=comb * 1.01).startswith("attention.comb of layer 1")
    assert trips(streams=torch.ones(1), weights=weights * 2).startswith("experts.weights of layer 1")
