"""A step's own way through the banks against a block's: one token, the same slots, counts and numbers."""

import pytest
import torch

from tests.coda_cases import cache_of, corrected, random_tokens

VARIANTS = {
    "default": {},
    "refresh": {"refresh_on_hit": True},
    "touch": {"lru_touch_between": True, "novelty": 0.3},
    "growth": {"exact_at_start": 2, "summary_at_start": 2, "growth_horizon": 100},
    "copies": {"inverse_norms": False},
    "values": {"route": "value"},
    "tail": {"lf_layout": "tail", "inverse_norms": False},
    "zeros": {"memory_init": "zeros", "overwrite_on_insert": False},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_both_ways_decide_and_store_the_same(variant, dtype):
    settings = corrected(4, 6, 5, **VARIANTS[variant])
    one, other = cache_of(settings, dtype=dtype), cache_of(settings, dtype=dtype)
    tokens = random_tokens(150)
    for i, (k, v, gate) in enumerate(zip(tokens.k.to(dtype), tokens.v.to(dtype), tokens.gates, strict=True)):
        one.exact.insert_one(torch.stack((k, v)), i, float(gate), i + 4)
        one.summary.absorb_one(torch.stack((k, v)), float(gate), i + 4)
        other.position = i + 4
        other._offer((k[None], v[None]), torch.tensor([i]), gate[None])
        for bank, same in ((one.exact, other.exact), (one.summary, other.summary)):
            assert bank.counts == same.counts, i
            assert bank.active == same.active
            assert torch.equal(bank.used, same.used)
            # a BF16 average may round the other way, and then differ by a step
            bound = 1e-5 if dtype == torch.float32 else 2.0**-7 * same.rows.abs().max()
            assert (bank.rows.float() - same.rows.float()).abs().max() <= bound
            assert (bank.targets.data.float() - same.targets.data.float()).abs().max() <= 10 * bound
        assert torch.equal(one.exact.last_used, other.exact.last_used)
    assert min(one.exact.counts["inserts"], one.summary.counts["updates"], one.exact.counts["gated_out"]) > 5
