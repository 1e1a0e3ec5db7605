"""The scan of evicted tokens on the device against the cache that decides on the host: slots, counts and numbers.

Decisions are compared exactly, on tokens whose cosines are nowhere within rounding of a threshold. Numbers: a move of a
slot is rounded twice here and once with a fused multiply-add there, and inverse norms are sums in another order, 2^-20
of themselves; what a hundred moves add up is less than 1e-5. A BF16 average may round the other way, and then differ by
a step.
"""

import copy

import pytest
import torch

from fathom.kernels.differential.banks import COUNTS, Bank, Banks, Rules, evict, growth
from tests.coda_cases import CPU, cache_of, corrected, random_tokens

VARIANTS = {
    "default": {},
    "refresh": {"refresh_on_hit": True},
    "touch": {"lru_touch_between": True, "novelty": 0.3},
    "growth": {"exact_at_start": 2, "summary_at_start": 2, "growth_horizon": 100},
    "values": {"route": "value"},
    "tail": {"lf_layout": "tail"},
    "zeros": {"memory_init": "zeros", "overwrite_on_insert": False},
    "published counts": {"published_counts": True},
}


def rules_of(cache):
    settings = cache.settings
    same = set(Rules._fields) - {"by_value", "blend", "eta"}
    own = {"by_value": cache.summary.by_value, "blend": cache.summary.blend, "eta": cache.summary.eta}
    return Rules(**{name: getattr(settings, name) for name in same}, **own)


def banks_of(cache):
    """The cache's own tensors, and its integers as tensors."""
    both = [Bank(bank.rows, bank.used, bank.targets.data, bank.start) for bank in (cache.exact, cache.summary)]
    saved = cache.tensors(cache.position)
    return Banks(*both, cache.exact.last_used, saved["active"], saved["counts"])


def ring_of(cache):
    return cache._slots[:, :, : cache.settings.window], cache.gates


def check_same(banks, cache, *, dtype=torch.float32):
    """That the banks are those of `cache`, which decided on the host."""
    want = banks_of(cache)
    assert dict(zip(COUNTS, banks.counts.tolist(), strict=True)) == dict(zip(COUNTS, want.counts.tolist(), strict=True))
    assert banks.active.tolist() == want.active.tolist()
    assert torch.equal(banks.last_used, want.last_used)
    for bank, same in zip(banks[:2], want[:2], strict=True):
        assert torch.equal(bank.used, same.used)
        bound = 1e-5 if dtype == torch.float32 else 2.0**-5  # a step of 4
        if not bank.used.numel():
            continue
        assert (bank.rows.float() - same.rows.float()).abs().max() <= bound
        relative = (bank.inverse / same.inverse - 1).abs().max()
        assert relative <= (1e-5 if dtype == torch.float32 else 2.0**-6)
    # what enters the exact bank, enters it as it is
    assert torch.equal(banks.exact.rows, want.exact.rows)


def filled(settings, dtype=torch.float32, seed=0, n=4):
    """A cache whose ring is full of tokens, and tokens to follow."""
    cache, tokens = cache_of(settings, dtype=dtype), random_tokens(120, seed)
    tokens = tokens._replace(k=tokens.k.to(dtype), v=tokens.v.to(dtype))
    for i in range(n):
        cache.write(tokens.k[i : i + 1], tokens.v[i : i + 1], tokens.gates[i : i + 1])
    return cache, tokens


def scanned(cache, first, n):
    """What `evict` makes of a copy's banks; and the cache, which evicts one by one as steps do."""
    other = copy.deepcopy(cache)
    banks = banks_of(other)
    now = cache.position
    evict(banks, rules_of(other), *ring_of(other), first, torch.tensor(now), n)
    for i in range(n):
        cache._evict_one(first + i)
        cache.position += 1
    return banks


@pytest.mark.parametrize(
    ("variant", "dtype"), [*((name, torch.float32) for name in VARIANTS), ("default", torch.bfloat16)]
)
def test_a_scan_is_so_many_steps(variant, dtype):
    cache, _ = filled(corrected(10, 6, 5, **VARIANTS[variant]), dtype, n=10 if variant in {"growth", "touch"} else 20)
    counts = banks_of(cache).counts
    banks = scanned(cache, cache.position - 10, 10)
    check_same(banks, cache, dtype=dtype)
    more = dict(zip(COUNTS, (banks.counts - counts).tolist(), strict=True))
    assert min(more["exact_inserts"], more["summary_updates"]) > 0, more
    assert variant != "growth" or more["exact_expansions"] > 0 < more["summary_expansions"], more


@pytest.mark.parametrize(("exact", "summary"), [(0, 3), (3, 0), (0, 0)])
def test_a_bank_of_no_slots_is_left_out(exact, summary):
    cache, _ = filled(corrected(4, exact, summary))
    check_same(scanned(cache, 0, 4), cache)


def test_steps_one_by_one_and_positions_on_the_device():
    cache, tokens = filled(corrected(4, 3, 3))
    other = copy.deepcopy(cache)
    banks, rules, (ring, gates) = banks_of(other), rules_of(other), ring_of(other)
    for i in range(4, 12):
        now = torch.tensor(i) if i % 2 else i
        evict(banks, rules, ring, gates, now - 4, now, 1)
        cache.write(tokens.k[i : i + 1], tokens.v[i : i + 1], tokens.gates[i : i + 1])
        ring[:, :, i % 4], gates[i % 4] = torch.stack((tokens.k[i], tokens.v[i])), tokens.gates[i]
    check_same(banks, cache)
    before = copy.deepcopy(banks)
    evict(banks, rules, ring, gates, 8, 12, 0)
    assert all(torch.equal(a, b) for a, b in zip(banks.exact[:3], before.exact[:3], strict=True))
    assert torch.equal(banks.counts, before.counts)


def test_ties_go_to_the_first_slot():
    """Equal tokens, equal slots and equal times."""
    cache, _ = filled(corrected(4, 4, 4, memory_init="zeros", novelty=0.9, gate_exact=0.0))
    cache._slots[:, :, :4] = torch.tensor([1.0, -1, 1, -1])[:, None]
    check_same(scanned(cache, 0, 4), cache)


@pytest.mark.parametrize("place", ["token", "exact slot", "summary slot", "gate"])
def test_what_is_no_number_decides_as_it_does_on_the_host(place):
    cache, _ = filled(corrected(8, 5, 4), n=26)
    {
        "token": cache._slots[:, 1, 5, 3],
        "exact slot": cache.exact.targets.data[1, 0],
        "summary slot": cache.summary.targets.data[1, 2],
        "gate": cache.gates[5],
    }[place].fill_(torch.nan)
    banks, want = scanned(cache, 20, 4), banks_of(cache)
    assert torch.equal(banks.counts, want.counts)
    for bank, same in zip(banks[:2], want[:2], strict=True):
        torch.testing.assert_close(bank.rows, same.rows, rtol=1e-5, atol=1e-5, equal_nan=True)
        torch.testing.assert_close(bank.inverse, same.inverse, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("horizon", [0, 1, 100, 1_000_000])
@pytest.mark.parametrize(("start", "size"), [(1, 64), (5, 5), (3, 4)])
def test_growth_is_the_banks_own(start, size, horizon):
    cache = cache_of(corrected(4, size, 4, exact_at_start=start, growth_horizon=horizon))
    bank = cache.exact
    table = growth(start, size, horizon, CPU)
    for now in {0, 1, 2, 7, 99, 100, 101, 31_000, 999_999, 1_000_000, 2_000_000} | {
        int(edge) + by for edge in table for by in (-1, 0) if int(edge) + by >= 0
    }:
        bank.active = start
        bank._grow(size, now)
        reached = int((table <= now).sum()) if size > start else 0
        assert bank.active == start + reached, now


def test_copies_are_refused_by_name():
    cache, _ = filled(corrected(4, 4, 4, inverse_norms=False))
    with pytest.raises(NotImplementedError, match="normalised copies"):
        evict(banks_of(cache), rules_of(cache), *ring_of(cache), 0, 4, 1)
