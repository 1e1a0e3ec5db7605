"""CoDA's banks on V4 layers: exact until something is evicted, then no entry lost and none counted twice."""

import functools
import math
import random

import pytest
import torch

from fathom.kernels.formats.stored import Slots
from fathom.kernels.ops import CPU, REFERENCE
from fathom.model.variants.banked_entries import HIT, NOVEL, BankedEntries, NewestKeys, newest_rows
from fathom.model.variants.choice import Coda
from fathom.probes.subject import Subject
from fathom.runtime.load import load
from fathom.runtime.options import DEMO, RunOptions

ON_CPU = torch.device("cpu")
WIDTH, ROPE = 24, 8


def banks(variant, ratio=4, chunk=64):
    return BankedEntries(
        ratio, variant, WIDTH, ROPE, newest_rows(ratio, variant, chunk, 1 << 30), torch.float32, ON_CPU
    )


def clustered(count, seed, centres=6, noise=0.4):
    """Entries around a few directions, so that some are alike and some are not."""
    g = torch.Generator().manual_seed(seed)
    around = torch.randn(centres, WIDTH, generator=g)
    which = torch.randint(centres, (count,), generator=g)
    return around[which] + noise * torch.randn(count, WIDTH, generator=g)


def told(rows, variant):
    """The banks' rule once more, on lists of entries: what each slot stands for, by the entries' indices."""

    def cosine(a, b):
        a, b = a[: WIDTH - ROPE].double(), b[: WIDTH - ROPE].double()
        return float(a @ b / (a.norm() * b.norm()))

    exact, times, summary = [None] * variant.exact, [None] * variant.exact, [[] for _ in range(variant.summary)]

    def merge(i):
        empty = [slot for slot, members in enumerate(summary) if not members]
        means = [rows[members].double().mean(0) if members else None for members in summary]
        slot = empty[0] if empty else max(range(variant.summary), key=lambda j: (cosine(means[j], rows[i]), -j))
        summary[slot].append(i)

    for i in range(len(rows) - variant.window):
        held = [slot for slot in range(variant.exact) if exact[slot] is not None]
        best = max(held, key=lambda slot: (cosine(rows[exact[slot]], rows[i]), -slot), default=None)
        alike = cosine(rows[exact[best]], rows[i]) if held else -2.0
        if variant.exact and alike < NOVEL:
            free = [slot for slot in range(variant.exact) if exact[slot] is None]
            slot = free[0] if free else min(range(variant.exact), key=times.__getitem__)
            if not free:
                merge(exact[slot])
            exact[slot], times[slot] = i, i
            continue
        if alike >= HIT:
            times[best] = i
        merge(i)
    return exact, times, summary


VARIANTS = [Coda(5, 3, 4), Coda(1, 0, 1), Coda(7, 1, 2), Coda(3, 8, 3), Coda(200, 4, 4)]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_slots_stand_for_the_entries_that_the_rule_says(variant, seed):
    rows = clustered(120, seed)
    cache = banks(variant)
    for row in rows.split(1):
        cache.append(row)
        cache.evict()
    exact, times, summary = told(rows, variant)
    assert cache.times == [-1 if time is None else time for time in times]
    assert cache.counts == [len(members) for members in summary]
    for slot, i in enumerate(exact):
        assert i is None or torch.equal(cache.data[slot], rows[i])
    for slot, members in enumerate(summary):
        if members:
            torch.testing.assert_close(cache.means[slot], rows[members].mean(0), rtol=1e-5, atol=1e-5)
    newest = min(variant.window, len(rows))
    slots = cache.banked if cache.evicted else 0
    assert torch.equal(cache.view().rows[slots:], rows[len(rows) - newest :])
    expected = [0.0 if i is not None else -math.inf for i in exact]
    expected += [math.log(len(members)) if members else -math.inf for members in summary]
    assert cache.view().bias.tolist() == pytest.approx(expected[:slots] + [0.0] * newest, rel=1e-6)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_mass_is_the_number_of_entries_seen(variant):
    cache, rng = banks(variant), random.Random(1)
    rows = clustered(300, 2)
    while cache.count < len(rows):
        cache.append(rows[cache.count :][: rng.randrange(1, 16)])
        assert cache.mass() == cache.count
        cache.evict()
        assert cache.mass() == cache.count
        told = cache.stats()
        assert told["ring_used"] + told["exact_used"] + told["summarised"] == cache.count
        assert (told["largest_mean"], told["summary_used"]) == (max(cache.counts), sum(map(bool, cache.counts)))


@pytest.mark.parametrize("sizes", [[1], [2, 3], [16], [7, 1, 13]])
def test_banks_do_not_depend_on_how_entries_come(sizes):
    variant, rows = Coda(5, 3, 4), clustered(150, 3)
    one, other = banks(variant), banks(variant)
    for row in rows.split(1):
        one.append(row)
        one.evict()
    at = 0
    while at < len(rows):
        for size in sizes:
            other.append(rows[at : at + size])
            other.evict()
            at += size
    for name, tensor in one.tensors(600).items():
        assert torch.equal(tensor, other.tensors(600)[name]), name


def attended(slots, ops, position, ratio, selected=None):
    g = torch.Generator().manual_seed(5)
    q, ring = torch.randn(3, 2, WIDTH, generator=g), torch.randn(10, WIDTH, generator=g)
    sink = torch.tensor([0.3, -math.inf])
    return ops.attend(q, ring, position - 2, 4, slots, ratio, selected, sink)


@pytest.mark.parametrize("ops", [REFERENCE, CPU], ids=lambda ops: ops.name)
def test_a_mean_of_equal_entries_weighs_as_they_did(ops):
    """Forty entries, of three kinds: with one slot for each, attention to the slots is attention to all of them."""
    kinds = torch.eye(3, WIDTH) * 3
    rows = kinds[torch.arange(40) % 3]
    cache = banks(Coda(4, 0, 3))
    for row in rows.split(1):
        cache.append(row)
        cache.evict()
    assert sorted(cache.counts) == [12, 12, 12]
    whole, slots = (attended(entries, ops, 159, 4) for entries in (rows, cache.view()))
    torch.testing.assert_close(slots, whole, rtol=2e-6, atol=2e-6)
    unweighed = attended(cache.view()._replace(bias=cache.view().bias.clamp(max=0)), ops, 159, 4)
    assert (unweighed - whole).abs().max() > 0.05


@pytest.mark.parametrize("ops", [REFERENCE, CPU], ids=lambda ops: ops.name)
@pytest.mark.parametrize("selection", [False, True])
def test_attention_to_slots_is_that_of_the_equation(ops, selection):
    """Softmax in fp64 over the rows that each token sees, whose mass is that of the entries behind them."""
    rows, ratio, position = clustered(40, 6), 4, 161
    cache = banks(Coda(6, 3, 4))
    for row in rows.split(1):
        cache.append(row)
        cache.evict()
    slots = cache.view()._replace(hidden=cache.view().hidden + 1)  # the newest is not finished for the first token
    selected = torch.tensor([[7, 9, -1, 0], [12, 3, 8, 1], [2, 5, 6, 11]], dtype=torch.int32) if selection else None
    out = attended(slots, ops, position, ratio, selected)
    g = torch.Generator().manual_seed(5)
    q, ring = torch.randn(3, 2, WIDTH, generator=g).double(), torch.randn(10, WIDTH, generator=g).double()
    for i in range(3):
        at = position - 2 + i
        seen = (at + 1) // ratio - slots.hidden
        chosen = list(range(seen)) if selected is None else [j for j in selected[i].tolist() if 0 <= j < seen]
        keys = torch.cat((ring[[p % 10 for p in range(at - 3, at + 1)]], slots.rows[chosen].double()))
        weight = torch.cat((torch.ones(4), slots.bias[chosen].exp())).double()
        mass = (q[i] @ keys.T * WIDTH**-0.5).exp() * weight
        sink = torch.tensor([math.exp(0.3), 0.0]).double()
        expected = mass @ keys / (mass.sum(1) + sink)[:, None]
        torch.testing.assert_close(out[i].double(), expected, rtol=2e-6, atol=2e-6)


def test_gathered_rows_get_their_bias_too():
    rows, bias = torch.randn(60, WIDTH), torch.randn(60)
    selected = torch.stack([torch.randperm(60)[:5].sort().values for _ in range(3)]).int()
    slots = Slots(rows, bias, -20)
    wanted, found = (attended(slots, ops, 165, 4, selected) for ops in (REFERENCE, CPU))
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=2e-6)


def test_keys_are_those_of_the_newest_entries():
    keys, all_keys = NewestKeys(4, Coda(5, 1, 1), 6, 64, torch.float32, ON_CPU), torch.randn(40, 6)
    for part in all_keys.split([1, 7, 16, 2, 14]):
        keys.append(part)
        keys.evict()
    assert (keys.count, keys.evicted, keys.used) == (40, 35, 5)
    assert torch.equal(keys.view(), all_keys[35:])


# --- in the model


def test_a_window_takes_no_more_rows_than_a_context_has_entries():
    model = load(DEMO, RunOptions(kv=("all=coda:window=1048576,exact=64,summary=64",))).model
    full = load(DEMO, RunOptions()).model.new_state(1000, 512).nbytes()
    banked = model.new_state(1000, 512).nbytes()
    assert banked["indexer_keys"] == full["indexer_keys"]
    assert full["entries"] < banked["entries"] < full["entries"] + 3 * 128 * 128 * 8  # slots, their means and biases


def test_empty_slots_are_not_attended_to():
    entries = banks(Coda(window=5, exact=1000, summary=1000))
    entries.append(torch.ones(5, WIDTH))
    assert entries.view().rows.shape == (5, WIDTH)
    selected = torch.tensor([[0, 3, -1]], dtype=torch.int32)
    assert entries.chosen(selected) is selected
    entries.append(torch.ones(1, WIDTH))
    entries.evict()
    assert entries.view().rows.shape == (2005, WIDTH)
    assert entries.chosen(selected).shape == (1, 2003)


LENGTH = 700
DECODED = 12  # closes three CSA windows
PLAIN = ("plain", "fp32")


@pytest.fixture(scope="module")
def ids():
    return torch.tensor(Subject(DEMO, RunOptions()).tokens(LENGTH))


def logits(ids, kv, chunk, options=PLAIN):
    model = load(DEMO, RunOptions(*options, kv=kv)).model
    state = model.new_state(LENGTH, chunk)
    out = [model.logits(model(part, state)) for part in (*ids[:-DECODED].split(chunk), *ids[-DECODED:].split(1))]
    return torch.cat(out), state


@pytest.fixture(scope="module")
def full(ids):
    """Logits with the full cache, and that cache, by chunk."""
    return functools.cache(lambda chunk: logits(ids, (), chunk))


@pytest.mark.parametrize("kv", [("all=coda:window=175",), ("hca=coda:window=5",), ("1=coda:window=175,exact=0",)])
@pytest.mark.parametrize("chunk", [64, 129])
def test_nothing_is_lost_before_an_eviction(ids, full, kv, chunk):
    """The window holds every entry, and CSA selects as ever: the full cache, but for the tiles of sums."""
    whole, _ = full(chunk)
    found, state = logits(ids, kv, chunk)
    assert (found - whole).abs().max() <= 5e-6 * whole.abs().max()
    for cache in state.layers[1:]:
        assert not isinstance(cache.entries, BankedEntries) or cache.entries.evicted == 0


def test_beyond_it_every_entry_is_in_some_slot(ids, full):
    whole, kept = full(64)
    found, state = logits(ids, ("all=coda:window=16,exact=8,summary=8",), 64)
    for cache in state.layers[1:]:
        assert cache.entries.mass() == LENGTH // cache.entries.ratio
    assert sum(state.nbytes().values()) < sum(kept.nbytes().values())
    kl = (whole.softmax(-1) * (whole.log_softmax(-1) - found.log_softmax(-1))).sum(-1)
    assert 1e-6 < kl.mean() < 0.02
    assert (found.argmax(-1) == whole.argmax(-1)).float().mean() > 0.95


@pytest.mark.parametrize("position", [640, 641, 675])
def test_a_state_is_put_back_bit_by_bit(ids, position):
    model = load(DEMO, RunOptions(kv=("all=coda:window=9,exact=4,summary=4",))).model
    state, other = model.new_state(LENGTH, 64), model.new_state(LENGTH, 64)
    for part in ids[:position].split(64):
        model(part, state)
    for here, there in zip(state.layers, other.layers, strict=True):
        saved = {name: tensor.clone() for name, tensor in here.tensors(position).items()}
        assert {name: tuple(tensor.shape) for name, tensor in saved.items()} == here.shapes(position)
        there.restore(position, saved)
    other.position = position
    for token in ids[position : position + 8].split(1):
        assert torch.equal(model(token, state), model(token, other))
