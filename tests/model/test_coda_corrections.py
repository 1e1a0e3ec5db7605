"""What each rule of a CoDA cache that departs from the published package changes, and what stays a property of it."""

from dataclasses import replace

import pytest
import torch

from fathom.kernels.rope import reference as rope
from fathom.model.variants.coda_attention import prefill
from fathom.model.variants.coda_settings import CodaSettings
from tests.coda_cases import (
    CPU,
    ETA,
    GROUPS,
    D,
    cache_of,
    corrected,
    mechanism,
    published,
    random_tokens,
    steps,
)


def test_candidates_of_a_block_are_its_highest_gates_older_first():
    tokens = random_tokens(40, groups=1, d=64)._replace(v=torch.eye(40, 64)[:, None], k=torch.randn(40, 1, 64))
    gates = torch.full((40,), 0.2)
    gates[[31, 7, 33, 20, 11]] = torch.tensor([0.9, 0.8, 0.8, 0.7, 0.6])
    cache = cache_of(corrected(4, 8, 0), 1, 64)
    cache.write_block(tokens.k, tokens.v, gates)
    assert cache.exact.last_used.tolist() == [31, 7, 33, 20, 11, 0, 1, 2]  # then the first three of the equal ones


def displacement(pairing, d):
    """How far position 1 moves each dim's unit vector: the faster its pair, the farther."""
    cos, sin = rope.angles(torch.ones(1), rope.frequencies(d, 10_000.0))
    if pairing == "interleaved":
        turned = rope.rotate(torch.eye(d)[None], cos, sin)[0]
    else:
        a, b = torch.eye(d).chunk(2, dim=-1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return (turned - torch.eye(d)).norm(dim=-1)


@pytest.mark.parametrize("pairing", ["interleaved", "half"])
@pytest.mark.parametrize("d", [8, 16, 128])
def test_low_frequencies_are_the_dims_that_rope_moves_least(pairing, d):
    moved = displacement(pairing, d)
    settings = CodaSettings(window=1, exact=0, summary=1, rope=pairing)
    low, tail = (replace(settings, lf_layout=layout).low_frequencies(d, CPU) for layout in ("pairs", "tail"))
    assert low.sum() == tail.sum() == d // 2
    assert moved[low].max() < moved[~low].min()
    assert torch.equal(tail, low) == (pairing == "interleaved")
    assert (moved[tail].max() == moved.max()) == (pairing == "half")  # the fastest pair is in it


@pytest.mark.parametrize("layout", ["pairs", "tail"])
def test_summary_keys_hold_the_low_frequencies_alone(layout):
    cache = cache_of(corrected(4, 0, 6, lf_layout=layout))
    low = cache.settings.low_frequencies(D, CPU)
    prefill(cache, random_tokens(50), mechanism(), 7)
    steps(cache, random_tokens(10, 1), mechanism())
    assert (cache.summary.keys[..., ~low] == 0).all()
    assert (cache.summary.keys[:, cache.summary.used][..., low] != 0).all()


def one_slot(rules, **changes):
    """A cache of window 1 whose summary bank is one slot that has taken in the first of two tokens."""
    cache = cache_of(rules(1, 0, 1, **changes))
    tokens = random_tokens(8)._replace(v=torch.eye(8)[:, None].expand(-1, GROUPS, -1))  # the value tells the token
    for i in range(2):
        cache.write(tokens.k[i : i + 1], tokens.v[i : i + 1], torch.tensor([0.5]))
    return cache, tokens


@pytest.mark.parametrize("rules", [corrected, published])
def test_the_rate_of_one_eviction(rules):
    """Token 1 is evicted with gate 0.5: a step moves the slot by eta / 2; a published block by eta."""
    eta = ETA.sigmoid()
    for in_block in (False, True):
        cache, tokens = one_slot(rules)
        write = cache.write_block if in_block else cache.write
        write(tokens.k[2:3], tokens.v[2:3], torch.tensor([0.5]))
        rate = eta if in_block and rules is published else eta / 2
        assert cache.summary.values[:, 0, 1].tolist() == pytest.approx(rate.tolist(), rel=1e-5)
        assert cache.summary.values[:, 0, 0].tolist() == pytest.approx((1 - rate).tolist(), rel=1e-5)


def test_a_block_leaves_as_much_of_the_old_content_as_steps_do():
    gates = torch.tensor([0.9, 0.3, 0.6, 0.2, 0.04, 0.7])  # the fifth is kept out
    by_step, tokens = one_slot(corrected)
    by_block, _ = one_slot(corrected)
    for i in range(6):
        by_step.write(tokens.k[2 + i : 3 + i], tokens.v[2 + i : 3 + i], gates[i : i + 1])
    by_block.write_block(tokens.k[2:], tokens.v[2:], gates)
    left = by_block.summary.values[:, 0, 0]
    assert left.tolist() == pytest.approx(by_step.summary.values[:, 0, 0].tolist(), rel=1e-5)
    evicted = torch.tensor([0.5, 0.9, 0.3, 0.6, 0.2])  # token 1 and those that came before the last two
    assert left.tolist() == pytest.approx((1 - ETA.sigmoid()[:, None] * evicted).prod(-1).tolist(), rel=1e-5)


def with_two_slots(settings):
    """Two tokens in the exact bank, along the first two axes; a window of 1 that holds a third."""
    cache = cache_of(settings, 1, 4)
    for axis in range(3):
        cache.write(torch.full((1, 1, 4), float(axis)), torch.eye(4)[None, axis : axis + 1])
    assert cache.exact.last_used[:2].tolist() == [0, 1]
    return cache


@pytest.mark.parametrize("touch", [False, True])
@pytest.mark.parametrize("in_block", [False, True])
def test_a_token_between_the_thresholds(touch, in_block):
    """Cosine 0.8 with the first slot: neither new nor a hit. Published, it makes that slot the younger one."""
    cache = with_two_slots(corrected(1, 2, 0, lru_touch_between=touch))
    cache.values[:, 0] = torch.tensor([0.8, 0, 0, 0.6])  # the token that will be evicted next, position 2
    before = cache.exact.keys.clone()
    (cache.write_block if in_block else cache.write)(torch.zeros(1, 1, 4), torch.zeros(1, 1, 4))
    assert cache.exact.last_used.tolist() == ([2, 1] if touch else [0, 1])
    assert torch.equal(cache.exact.keys, before)


@pytest.mark.parametrize("sums", [False, True])
def test_two_tokens_that_refresh_one_slot(sums):
    cache = with_two_slots(corrected(1, 2, 0, refresh_on_hit=True, refresh_sums=sums))
    cache.values[:, 0] = torch.tensor([1.0, 0, 0, 0])
    k = torch.tensor([5.0, 7.0]).view(2, 1, 1).expand(-1, -1, 4)
    v = torch.tensor([1.0, 0, 0, 0]).expand(2, 1, -1)
    cache.write_block(k, v, torch.tensor([0.9, 0.5]))  # evicts positions 2 (key 2) and 3 (key 5); gates 1 and 0.9
    assert cache.exact.keys[0, 0].tolist() == [2 + 5 - 0 if sums else 5.0] * 4
    assert cache.exact.last_used.tolist() == [3, 1]


@pytest.mark.parametrize("rules", [corrected, published])
def test_growth_in_blocks(rules):
    """Blocks of 5 new tokens, 3 slots at the start of 12: the published order fills slots that are not active."""
    cache = cache_of(rules(4, 12, 0, exact_at_start=3, growth_horizon=100), 1, 64)
    for i in range(5):
        part = slice(5 * i, 5 * i + 5)
        cache.write_block(torch.zeros(5, 1, 64), torch.eye(25, 64)[part, None])
    outside = cache.exact.used[cache.exact.active :]
    if rules is published:
        assert outside.any()
        assert cache.exact.active == 5  # never above a block's evictions
    else:
        assert not outside.any()
        assert cache.exact.active == 3 + int(9 * torch.log(torch.tensor(21.0)) / torch.log(torch.tensor(101.0))) == 8
        assert cache.metrics()["expansions_exact"] == 5
        assert cache.exact.used[:8].all()


def test_steps_and_blocks_of_one_do_the_same_to_the_banks():
    """With the corrections a block of one token is a step, as far as what is remembered goes."""
    settings = corrected(4, 6, 5, exact_at_start=2, summary_at_start=2, growth_horizon=100, refresh_on_hit=True)
    tokens = random_tokens(150)
    one, other = cache_of(settings), cache_of(settings)
    steps(one, tokens, mechanism())
    prefill(other, tokens, mechanism(), 1)
    assert one.metrics() == other.metrics()
    assert all(one.metrics().values()), one.metrics()
    for name, part in one.tensors(150).items():
        assert torch.equal(part, other.tensors(150)[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_average_in_bf16_stands_still(dtype):
    """A slot at 1 and tokens of 1.25, which arrive at the published rate of a step: 0.0057 a time."""
    cache = cache_of(corrected(1, 0, 1), dtype=dtype)
    gate = torch.tensor([-2.0]).sigmoid()
    for i in range(202):
        cache.write(torch.ones(1, GROUPS, D), torch.full((1, GROUPS, D), 1.0 if i == 0 else 1.25), gate)
    left = (1 - ETA.sigmoid()[0] * gate.item()).item() ** 200
    expected = 1.0 if dtype == torch.bfloat16 else 1.25 - 0.25 * left
    assert cache.summary.values[0, 0].tolist() == pytest.approx([expected] * D, rel=1e-5)


def test_value_routing_compares_values():
    """Two evicted tokens with equal keys and opposite values share a slot by key, and not by value."""
    for route, slots in (("key", 1), ("value", 2)):
        cache = cache_of(corrected(1, 0, 2, route=route, memory_init="zeros"), 1, 4)
        for sign in (1, -1, 1):
            cache.write(torch.ones(1, 1, 4), sign * torch.ones(1, 1, 4))
        assert int(cache.summary.used.sum()) == slots
