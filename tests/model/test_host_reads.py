"""How often the host waits for a device that is not its own: as often for many layers as for few.

On the stand-in for a device, in Triton's interpreter: `tests.other_device`.
"""

import math
from collections import Counter

import pytest
import torch
from torch.overrides import TorchFunctionMode

from fathom.model.errors import Tripwire
from fathom.model.observe import sites
from fathom.model.observe.observer import listening, observed
from fathom.runtime.load import load
from fathom.runtime.options import RunOptions
from tests.make_checkpoint import tiny_config, write_checkpoint

TRITON = pytest.importorskip("fathom.kernels.triton_ops", reason="Triton is not on every platform").TRITON
from tests.other_device import DEVICE, There, moved, other_device  # noqa: E402  # imports Triton, which may be absent

WIDTHS = {"n_routed_experts": 4, "num_hash_layers": 1, "head_dim": 128, "qk_rope_head_dim": 64, "index_head_dim": 64}
# What waits for the device until a value is on the host, by torch's name
READS = {
    "item",
    "tolist",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__contains__",
    "cpu",
    "numpy",
    "is_nonzero",
}
READS |= {"nonzero", "argwhere", "masked_select", "unique", "bincount", "equal", "allclose", "repeat_interleave"}
CONTEXT = 80
TOKENS = torch.randint(0, 320, (CONTEXT,), generator=torch.Generator().manual_seed(0))


class Reads(TorchFunctionMode):
    """Counts them."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        there = any(isinstance(x, There) for x in (*args, *kwargs.values()))
        masks = args[1] if func.__name__ in {"__getitem__", "__setitem__"} else ()
        masks = masks if isinstance(masks, tuple) else (masks,)
        by_mask = any(isinstance(x, There) and x.dtype == torch.bool for x in masks)
        brought = func.__name__ in {"to", "copy_"} and isinstance(out, torch.Tensor) and not isinstance(out, There)
        if there and (func.__name__ in READS or brought or by_mask):
            self.names[func.__name__] += 1
        return out


def made(directory, ratios, **options):
    layers = {"compress_ratios": ratios, "num_hidden_layers": len(ratios)}
    write_checkpoint(directory, tiny_config(**layers, **WIDTHS), seed=1)
    return load(directory, RunOptions(prefill_chunk=64, **options), TRITON).model


def reads(model, *counts):
    """How often the host reads in calls of so many tokens, each with the logits after it."""
    counted, state, position = [], model.new_state(CONTEXT, 64), 0
    for count in counts:
        with Reads() as found:
            model.logits(model(TOKENS[position : position + count].to(DEVICE), state)[-1:])
        position += count
        counted.append(found.names)
    return counted


@pytest.mark.parametrize(
    ("ratios", "options"),
    [((4,), {}), ((0, 4, 128), {}), ((4, 128), {"kv": ("all=shard",)})],
    ids=["one layer", "three layers", "shard"],
)
def test_a_call_and_its_logits_are_looked_at_once_each(tmp_path, ratios, options):
    """Tripwires of all layers by one read, those of the logits by one, of a chunk and of a token that ends windows."""
    model = made(tmp_path, list(ratios), **options)
    with other_device():
        assert reads(moved(model), 18, 1, 1) == [{"tolist": 1, "item": 1}] * 3


def test_an_entry_that_leaves_a_window_is_one_read(tmp_path):
    """Where it goes is decided on the host: beside the two reads of a call, one for each of the layer's evictions."""
    model = made(tmp_path, [4], kv=("all=coda:window=8,exact=4,summary=4",))
    with other_device():
        state = (there := moved(model)).new_state(CONTEXT, 64)
        there(TOKENS[:39].to(DEVICE), state)
        for position, more in ((39, 1), (40, 0)):  # the tenth entry ends at position 39
            with Reads() as found:
                there.logits(there(TOKENS[position : position + 1].to(DEVICE), state))
            assert found.names == {"tolist": 1 + more, "item": 1}


def row(number, value):
    """A listener that writes into one row of what passes."""

    def write(_, x):
        x[number] = value(x[number]) if callable(value) else value

    return write


# Of the last row of a call at position 3: its site, what it is spoilt by, and the site that is told
FAULTS = {
    "index query": (sites.INDEX_QUERY_USED, math.nan, sites.INDEX_QUERY_USED),
    "index weights": (sites.INDEX_WEIGHTS, math.inf, sites.INDEX_WEIGHTS),
    "attention streams": (sites.ATTENTION_STREAMS, math.nan, sites.ATTENTION_STREAMS),
    "streams": (sites.STREAMS, -math.inf, sites.STREAMS),
    "hidden": (sites.HIDDEN, math.nan, sites.HIDDEN),
    "comb": (sites.ATTENTION_COMB, lambda x: x * 1.001, sites.ATTENTION_COMB),
    "comb of experts": (sites.EXPERTS_COMB, lambda x: x * math.nan, sites.EXPERTS_COMB),
    "ids": (sites.EXPERT_IDS, 0, sites.EXPERT_IDS),
    "weights": (sites.EXPERT_WEIGHTS, lambda x: x * 2, sites.EXPERT_WEIGHTS),
    "selection": (sites.SELECTED, -1, sites.SELECTED),
}


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    """One layer, which has every check."""
    model = made(tmp_path_factory.mktemp("csa"), [4])
    with other_device():
        return moved(model)


@pytest.mark.parametrize(("fault", "tokens"), [*((fault, 3) for fault in FAULTS), ("comb", 1), ("selection", 9)])
def test_what_is_deferred_ends_the_call_at_its_site_layer_and_position(there, fault, tokens):
    site, value, told = FAULTS[fault]
    bad = tokens - 1
    with other_device():
        state = there.new_state(CONTEXT, 64)
        there(TOKENS[:3].to(DEVICE), state)
        with pytest.raises(Tripwire) as trip, listening(there, {site: row(bad, value)}):
            there(TOKENS[3 : 3 + tokens].to(DEVICE), state)
    assert (trip.value.site, trip.value.position) == (told.name, 3 + bad)
    assert trip.value.layer == (None if site is sites.HIDDEN else 0)
    assert state.position == 3, "nothing follows from a call that trips"


def test_nothing_is_deferred_that_nobody_looks_at(there):
    with other_device(), observed(there).unchecked(), listening(there, {sites.STREAMS: row(0, math.nan)}):
        assert reads(there, 1) == [{}]


@pytest.mark.parametrize(("site", "first", "number"), [(sites.ENTRY, 3, 0), (sites.INDEX_KEY_USED, 3, 1)])
def test_a_row_that_is_not_finite_is_told_by_the_last_token_of_its_window(there, site, first, number):
    """Entries of a call of 6 tokens: the open window's comes in a piece of its own."""
    with other_device():
        state = there.new_state(CONTEXT, 64)
        there(TOKENS[:first].to(DEVICE), state)
        seen = []

        def spoil(_, x):
            if sum(seen) <= number < sum(seen) + len(x):
                x[number - sum(seen)] = math.nan
            seen.append(len(x))

        with pytest.raises(Tripwire) as trip, listening(there, {site: spoil}):
            there(TOKENS[first : first + 6].to(DEVICE), state)
        assert (trip.value.site, trip.value.layer) == (site.name, 0)
        assert trip.value.position == (first // 4 + number + 1) * 4 - 1
        assert seen == [1, 1]
