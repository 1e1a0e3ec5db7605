"""The CoDA cache by itself: what each order sees, exactness below the window, saved states, bytes, refused settings."""

import itertools
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import scaled_dot_product_attention

from fathom.model.cache.gqa import all_heads
from fathom.model.errors import ConfigError, StateError
from fathom.model.variants.coda import CodaCache
from fathom.model.variants.coda_attention import Tokens, attend, prefill
from fathom.model.variants.coda_settings import CodaSettings
from tests.coda_cases import (
    CPU,
    GROUPS,
    HEADS,
    cache_of,
    corrected,
    mechanism,
    published,
    random_tokens,
    rows,
    steps,
)


def full_attention(tokens, differential):
    """Causal attention over everything, in float64, by torch's own."""

    def causal(q):
        k, v = (part.double().transpose(0, 1).repeat_interleave(HEADS // GROUPS, 0) for part in (tokens.k, tokens.v))
        return scaled_dot_product_attention(q.transpose(0, 1), k, v, is_causal=True).transpose(0, 1)

    q = tokens.q.double()
    if differential is None:
        return causal(q)
    turn = torch.complex(differential.cos.double(), differential.sin.double())
    noise = torch.view_as_real(torch.view_as_complex(q.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)
    out = causal(q) - tokens.lam[..., None].double() * causal(noise)
    return out * torch.rsqrt(out.square().mean(-1, keepdim=True) + differential.eps) * differential.norm


@pytest.mark.parametrize("rules", [published, corrected])
@pytest.mark.parametrize("differential", [None, mechanism()], ids=["plain", "differential"])
@pytest.mark.parametrize("order", ["steps", 1, 3, 70, 90])
@pytest.mark.parametrize("strict", [False, True])
def test_a_window_that_holds_everything_is_full_attention(rules, differential, order, strict):
    tokens = random_tokens(70)
    tokens = tokens if differential else tokens._replace(lam=None)
    expected = full_attention(tokens, differential)
    for window in (70, 90):
        cache = cache_of(rules(window, 4, 4))
        ours = steps(cache, tokens, differential) if order == "steps" else None
        ours = prefill(cache, tokens, differential, order, strict=strict) if ours is None else ours
        assert (ours - expected).abs().max() <= 5e-6 * expected.abs().max()
        assert cache.metrics()["total_evictions"] == 0


def visible(cache, tokens, order, block=None):
    """Which positions each token sees: queries of 0 weigh all alike, and values are one-hot in the position."""
    t, d = len(tokens.q), tokens.v.shape[-1]
    tokens = tokens._replace(q=torch.zeros(t, 1, d), v=torch.eye(t, d)[:, None], gates=None, lam=None)
    out = (
        steps(cache, tokens, None)
        if order == "steps"
        else prefill(cache, tokens, None, block, strict=order == "strict")
    )
    return [set(row.nonzero()[:, 0].tolist()) for row in out[:, 0]]


@pytest.mark.parametrize("exact", [0, 64], ids=["ring", "ring and exact bank"])
@pytest.mark.parametrize("block", [1, 3, 5, 13])
def test_what_each_order_sees(exact, block):
    """One-hot values are all new, and every candidate has room: the exact bank holds all that has left the ring."""
    window, t = 5, 40
    tokens = random_tokens(t, heads=1, groups=1, d=64)
    settings = corrected(window, exact, 0, exact_candidates=64)
    by_step = visible(cache_of(settings, 1, 64), tokens, "steps")
    by_block = visible(cache_of(settings, 1, 64), tokens, "block", block)
    strictly = visible(cache_of(settings, 1, 64), tokens, "strict", block)
    for p in range(t):
        i = p % block
        recent, own = set(range(max(0, p - window + 1), p + 1)), set(range(max(0, p - window - i), p + 1))
        gone = set(range(p - window + 1)) if exact else set()
        gone_before = set(range(p - window - i)) if exact else set()
        assert by_step[p] == recent | gone
        assert by_block[p] == own | gone_before
        assert strictly[p] == recent | gone_before


@pytest.mark.parametrize("block", [1, 2, 7, 9, 60])
def test_a_strict_window_does_not_depend_on_the_block(block):
    tokens, window_only = random_tokens(60), corrected(9, 0, 0)
    expected = steps(cache_of(window_only), tokens, mechanism())
    ours = prefill(cache_of(window_only), tokens, mechanism(), block, strict=True)
    assert (ours - expected).abs().max() < 1e-5
    if block > 1:
        plain = prefill(cache_of(window_only), tokens, mechanism(), block)
        assert (plain - expected).abs().max() > 0.1  # as published it does, by a lot


def test_a_ring_alone_is_the_same_after_steps_and_blocks():
    tokens, window_only = random_tokens(60), corrected(9, 0, 0)
    one, other = cache_of(window_only), cache_of(window_only)
    steps(one, tokens, mechanism())
    prefill(other, tokens, mechanism(), 7)
    for name, part in one.tensors(60).items():
        assert torch.equal(part, other.tensors(60)[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rules", [published, corrected])
@pytest.mark.parametrize("at", [0, 5, 61])
def test_a_saved_state_continues_to_the_bit(rules, dtype, at, tmp_path):
    settings = rules(12, 5, 6, exact_at_start=2, summary_at_start=3, growth_horizon=200)
    tokens = random_tokens(at + 41, seed=at)
    tokens = Tokens(*(part.to(dtype) if part.ndim == 3 else part for part in tokens))
    one = cache_of(settings, dtype=dtype)
    prefill(one, rows(tokens, slice(at)), mechanism(), 17)
    save_file({name: part.clone() for name, part in one.tensors(at).items()}, tmp_path / "state")
    saved = load_file(tmp_path / "state")
    assert {name: tuple(part.shape) for name, part in saved.items()} == one.shapes(at)
    other = cache_of(settings, dtype=dtype, seed=9)
    prefill(other, random_tokens(30, seed=77), mechanism(), 9)  # what it held before does not matter
    other.restore(at, saved)
    assert other.metrics() == one.metrics()
    for cut in (slice(at, at + 20), slice(at + 20, at + 40)):  # twenty steps, then blocks
        part = rows(tokens, cut)
        run = steps if cut.start == at else lambda *args: prefill(*args, 6)
        assert torch.equal(run(one, part, mechanism()), run(other, part, mechanism()))
    for name, part in one.tensors(at + 40).items():
        assert torch.equal(part, other.tensors(at + 40)[name]), name
    assert other.metrics() == one.metrics()


def test_a_rollback_across_evictions_is_a_restore():
    """Tokens that were written in vain cannot be taken back one by one: what they drove out is in the banks."""
    tokens, cache = random_tokens(60), cache_of(corrected(8, 5, 6))
    prefill(cache, rows(tokens, slice(30)), mechanism(), 7)
    kept = {name: part.clone() for name, part in cache.tensors(30).items()}
    first = steps(cache, rows(tokens, slice(30, 50)), mechanism())
    cache.restore(30, kept)
    assert torch.equal(steps(cache, rows(tokens, slice(30, 50)), mechanism()), first)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("active", torch.tensor([1, 3]), "1 active exact slots in the state, want 2 to 5"),
        ("active", torch.tensor([2, 7]), "7 active summary slots in the state, want 3 to 6"),
        ("used", torch.zeros(19, dtype=torch.bool), "the ring of the state is not that of 9 tokens"),
    ],
)
def test_a_state_that_cannot_be_is_refused(name, value, message):
    cache = cache_of(corrected(8, 5, 6, exact_at_start=2, summary_at_start=3))
    prefill(cache, random_tokens(9), mechanism(), 4)
    saved = {part: tensor.clone() for part, tensor in cache.tensors(9).items()}
    before = {part: tensor.clone() for part, tensor in cache.tensors(9).items()}
    with pytest.raises(StateError, match=message):
        cache.restore(9, saved | {name: value})
    for part, tensor in cache.tensors(9).items():
        assert torch.equal(tensor, before[part]), part  # refused before anything was taken over


@pytest.mark.parametrize(
    ("sizes", "groups", "d", "expected"),
    [
        ((256, 64, 64), 8, 128, 1_771_392),  # "medium"; 141.7 MB in 80 layers, 56.7 MB in 32
        ((512, 128, 128), 8, 128, 3_542_784),  # "large", 3.38 MiB
        ((128, 32, 32), 8, 128, 885_696),  # "tiny", 864.9 KiB
        ((256, 0, 0), 8, 128, 1_049_856),  # the window alone, 1.001 MiB
        ((256, 64, 64), 2, 64, 223_104),  # the package's test model, 217.9 KiB
    ],
)
def test_bytes_as_published(sizes, groups, d, expected):
    cache = CodaCache(published(*sizes), all_heads(groups), d, torch.zeros(groups), torch.bfloat16, CPU)
    assert cache.nbytes() == expected
    assert cache.nbytes() == sum(
        part.nbytes for name, part in cache.tensors(0).items() if name not in ("active", "counts")
    )


def test_inverse_norms_save_eleven_percent():
    cache = CodaCache(corrected(256, 64, 64), all_heads(8), 128, torch.zeros(8), torch.bfloat16, CPU)
    assert cache.nbytes() == 1_578_880  # 1.506 MiB
    assert 1 - cache.nbytes() / 1_771_392 == pytest.approx(0.11, abs=0.002)


@pytest.mark.parametrize("route", ["key", "value"])
def test_inverse_norms_route_as_copies_do(route):
    tokens = random_tokens(120)
    out = [
        prefill(cache_of(corrected(8, 5, 6, inverse_norms=inverse, route=route)), tokens, mechanism(), 9)
        for inverse in (True, False)
    ]
    assert (out[0] - out[1]).abs().max() < 1e-5


def test_gates_of_one_are_no_gates():
    tokens = random_tokens(50)
    one, other = cache_of(corrected(4, 3, 3)), cache_of(corrected(4, 3, 3))
    ours = prefill(one, tokens._replace(gates=None), mechanism(), 7)
    theirs = prefill(other, tokens._replace(gates=torch.ones(50)), mechanism(), 7)
    assert torch.equal(ours, theirs)
    assert one.metrics()["tokens_gated_out"] == 0


def test_an_empty_cache_gives_zeros():
    cache, tokens = cache_of(corrected(4, 3, 3)), random_tokens(1)
    assert (attend(cache, tokens.q, tokens.lam, mechanism()) == 0).all()


def test_the_initial_content_is_seeded():
    contents = [cache_of(corrected(2, 3, 4), seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(contents[0].keys, contents[1].keys)
    assert not torch.equal(contents[0].keys, contents[2].keys)
    assert (contents[0].keys[:, :2] == 0).all()


def test_what_is_written_carries_no_gradient():
    tokens, cache = random_tokens(20), cache_of(corrected(4, 3, 3))
    cache.write_block(tokens.k.requires_grad_(), tokens.v.requires_grad_(), tokens.gates.requires_grad_())
    assert not any(part.requires_grad for part in cache.tensors(20).values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 0}, "coda: window 0, want at least 1"),
        ({"exact": -1}, "coda: exact -1, exact_candidates 8: < 0"),
        ({"summary_candidates": -1}, "coda: summary 4, summary_candidates -1: < 0"),
        ({"exact_at_start": 5}, "coda: exact_at_start 5, want 1 to 4"),
        ({"summary_at_start": 0}, "coda: summary_at_start 0, want 1 to 4"),
        ({"novelty": 0.95}, "coda: novelty 0.95, hit 0.9: want -1 <= novelty <= hit <= 1"),
    ],
)
def test_settings_that_contradict_themselves(changes, message):
    with pytest.raises(ConfigError, match=message):
        CodaSettings(**({"window": 4, "exact": 4, "summary": 4, "rope": "half"} | changes))


def test_a_width_without_low_pairs_is_refused():
    settings = CodaSettings(window=4, exact=4, summary=4, rope="half")
    for layout, d in itertools.product(("pairs", "tail"), (6, 7)):
        if layout == "tail" and d == 6:
            continue
        with pytest.raises(ConfigError, match=f"head_dim {d}"):
            replace(settings, lf_layout=layout).low_frequencies(d, CPU)


@pytest.mark.parametrize("inverse", [True, False])
def test_how_alike_slots_are_is_the_mean_of_the_nearest_others(inverse):
    """Three values in use, of which two point one way: 1, 1, and 0.6 from the third to either."""
    cache = cache_of(corrected(2, 4, 0, inverse_norms=inverse), 1, 4)
    assert cache.stats()["exact_nearest"] is None
    given = torch.tensor([[2.0, 0, 0, 0], [5.0, 0, 0, 0], [3.0, 4.0, 0, 0]])
    cache.exact.values[0, [0, 1, 3]], cache.exact.used[[0, 1, 3]] = given, True
    cache.exact.values[0, 2] = torch.tensor([0.0, 7.0, 0, 0])  # holds nothing
    cache.renew()
    told = cache.stats()
    assert told["exact_nearest"] == pytest.approx((1 + 1 + 0.6) / 3)
    assert (told["ring_used"], told["exact_used"], told["summary_used"], told["summary_nearest"]) == (0, 3, 0, None)
    assert cache.metrics().items() <= told.items()
