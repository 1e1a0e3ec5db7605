"""Forged CoDA caches are refused by what they hold, whatever their checksum; honest ones are taken bit by bit."""

import pytest
import torch

from fathom.model.cache.gqa import all_heads
from fathom.model.errors import StateError
from fathom.model.variants.banked_entries import BankedEntries, NewestKeys
from fathom.model.variants.choice import Coda
from fathom.model.variants.coda import CodaCache
from fathom.model.variants.coda_settings import CodaSettings

CPU, W, EXACT, SUMMARY = torch.device("cpu"), 6, 5, 4
SIZES = {"window": W, "exact": EXACT, "summary": SUMMARY, "rope": "half"}


def empty(dtype=torch.float32, *, published=False, **more):
    settings = CodaSettings.published(**SIZES) if published else CodaSettings(**SIZES, **more)
    return CodaCache(settings, all_heads(2), 16, torch.full((2,), -1.0), dtype, CPU)


def written(cache, n, block, seed=0):
    """The cache after n tokens in blocks; of one token: steps."""
    g = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(n, 2, 16, generator=g).to(cache.keys.dtype) for _ in range(2))
    gates = torch.rand(n, generator=g) * 0.8 + 0.2
    for rows in torch.arange(n).split(block) if n else ():
        (cache.write if block == 1 else cache.write_block)(k[rows], v[rows], gates[rows])
    return cache


def saved(cache):
    return {name: part.clone() for name, part in cache.tensors(cache.position).items()}


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n", [0, 3, 80])
def test_an_honest_cache_is_taken_bit_by_bit(n, dtype, published, block):
    cache, other = (written(empty(dtype, published=published), n, block) for _ in range(2))
    other = empty(dtype, published=published)
    kept = saved(cache)
    other.restore(n, kept)
    assert all(torch.equal(part, kept[name]) for name, part in saved(other).items())


@pytest.mark.parametrize("block", [1, 4])
def test_without_targets_they_follow_from_the_rows(block):
    cache, other = written(empty(), 80, block), empty()
    kept = saved(cache)
    targets = {name: kept.pop(name) for name in ("exact_targets", "summary_targets")}
    other.restore(80, kept)
    for name, part in targets.items():
        torch.testing.assert_close(saved(other)[name], part, rtol=1e-6, atol=0)


def growing():
    return written(empty(exact_at_start=2, summary_at_start=2), 9, 1)


def test_slots_beyond_the_active_ones_are_free():
    cache = growing()
    assert (cache.exact.active, cache.summary.active) == (2, 2)
    for name, slot in (("exact", W + 2), ("summary", W + EXACT + 2)):
        kept = saved(cache)
        kept["used"][slot] = True
        with pytest.raises(StateError, match="coda: slots of the state are in use that are not active"):
            empty(exact_at_start=2, summary_at_start=2).restore(9, kept)
        assert name


@pytest.mark.parametrize(
    ("name", "at", "value", "says"),
    [
        ("gates", 2, 1.5, "gates of the state are not all between 0 and 1"),
        ("gates", 0, -0.1, "gates of the state are not all between 0 and 1"),
        ("gates", 5, torch.nan, "gates of the state are not all between 0 and 1"),
        ("gates", 5, torch.inf, "gates of the state are not all between 0 and 1"),
        ("last_used", 1, 80, "last_used of the state is not all between 0 and 79"),
        ("last_used", 0, -1, "last_used of the state is not all between 0 and 79"),
        ("last_used", 0, 1 << 62, "last_used of the state is not all between 0 and 79"),
        ("counts", 0, -1, "a count of the state is -1"),
        ("counts", 10, -7, "a count of the state is -7"),
        ("keys", (1, 3, 2), torch.nan, "keys of the state are not all finite"),
        ("values", (0, W + 1, 2), torch.inf, "values of the state are not all finite"),
        ("values", (0, W + 1, 2), 9.0, "exact_targets of the state are not those of its rows"),
        ("exact_targets", (0, 1), 3.0, "exact_targets of the state are not those of its rows"),
        ("exact_targets", (1, 0), torch.nan, "exact_targets of the state are not those of its rows"),
        ("summary_targets", (1, 3), 0.0, "summary_targets of the state are not those of its rows"),
    ],
)
def test_a_forged_cache_is_refused_before_anything_is_taken(name, at, value, says):
    cache = written(empty(), 80, 4)
    assert bool(cache.used.all())
    kept, before = saved(cache), saved(cache)
    kept[name][at] = value
    with pytest.raises(StateError, match=f"^coda: {says}"):
        cache.restore(80, kept)
    assert all(torch.equal(part, before[part_name]) for part_name, part in saved(cache).items())


def test_published_copies_are_held_against_the_rows_too():
    cache = written(empty(torch.bfloat16, published=True), 80, 4)
    kept = saved(cache)
    kept["exact_targets"][0, 1, 3] += 0.1
    with pytest.raises(StateError, match="exact_targets of the state are not those of its rows"):
        cache.restore(80, kept)


# --- entries of V4's layers


def banked(n=50):
    entries = BankedEntries(4, Coda(window=5, exact=3, summary=2), 8, 2, 64, torch.float32, CPU)
    for row in torch.randn(n, 8, generator=torch.Generator().manual_seed(3)).split(5):
        entries.append(row)
        entries.evict()
    return entries


@pytest.mark.parametrize(
    ("name", "at", "value", "says"),
    [
        ("counts", 0, 900, "counts of the state are not those of 45 evicted entries"),
        ("counts", 1, -1, "counts of the state are not those of 45 evicted entries"),
        ("times", 0, -1, "counts of the state are not those of 45 evicted entries"),
        ("times", 0, 45, "times of the state are not all those of 45 evicted entries"),
        ("exact", (0, 1), torch.nan, "exact of the state are not all finite"),
        ("means", (1, 7), torch.inf, "means of the state are not all finite"),
        ("newest", (4, 0), -torch.inf, "newest of the state are not all finite"),
    ],
)
def test_forged_entries_are_refused_before_anything_is_taken(name, at, value, says):
    entries = banked()
    kept = {part: tensor.clone() for part, tensor in entries.tensors(200).items()}
    other = banked(0)
    other.restore(200, kept)
    assert all(torch.equal(part, kept[held]) for held, part in other.tensors(200).items())
    assert other.mass() == 50
    kept[name][at] = value
    other = banked(0)
    with pytest.raises(StateError, match=f"^coda: {says}"):
        other.restore(200, kept)
    assert (other.count, other.mass()) == (0, 0)


def test_the_sum_alone_does_not_make_counts():
    """Two counts that are wrong by as much, one of them below 0."""
    kept = {part: tensor.clone() for part, tensor in banked().tensors(200).items()}
    total = int(kept["counts"].sum())
    kept["counts"][:] = torch.tensor([total + 3, -3])
    with pytest.raises(StateError, match="counts of the state"):
        banked(0).restore(200, kept)


def test_keys_that_are_not_finite_are_refused():
    keys = NewestKeys(4, Coda(5, 1, 1), 6, 64, torch.float32, CPU)
    with pytest.raises(StateError, match="index keys of the state are not all finite"):
        keys.restore(12, {"newest": torch.full((3, 6), torch.nan)})
    assert keys.used == 0
