"""The published rules against the package `coda-gqa-l` itself: outputs and states, on CPU in fp32.

Three things in the package have no defined order: the candidates that one unsorted top-k gives, equal gates, and equal
ages of slots. Most tests pin them by giving the package a top-k that sorts, lower index first. One runs the package as
it is: with the same unsorted top-k on our side, the slots of its exact bank are compared as a set.
"""

from dataclasses import replace

import pytest
import torch

from fathom.model.cache.gqa import all_heads
from fathom.model.variants.coda import CodaCache
from fathom.model.variants.coda_attention import attend
from fathom.model.variants.coda_settings import CodaSettings
from tests.coda_package import CPU, OUTPUTS, Both, close, configuration, run, stream

SEEDS = range(36)


def pinned_topk(x, k, dim=-1, largest=True, sorted=True):  # noqa: A002 - torch's own name
    """`torch.topk` with the order that it leaves open: sorted, lower index first."""
    del sorted
    values, indices = x.sort(dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, k), indices.narrow(dim, 0, k)


@pytest.fixture
def pinned(monkeypatch):
    monkeypatch.setattr(torch, "topk", pinned_topk)


@pytest.mark.usefixtures("pinned")
@pytest.mark.parametrize("seed", SEEDS)
def test_outputs_and_states_are_those_of_the_package(seed):
    run(Both(seed, **configuration(seed)), seed)


@pytest.mark.usefixtures("pinned")
def test_the_configurations_reach_every_rule():
    total = {}
    for seed in SEEDS[::7]:
        both = Both(seed, **configuration(seed))
        run(both, seed)
        for name, count in both.cache.metrics().items():
            total[name] = total.get(name, 0) + count
    assert all(total.values()), total


FLIPPED = {
    "lf_layout": "pairs",
    "gate_eta_in_blocks": True,
    "lru_touch_between": False,
    "refresh_sums": False,
    "published_growth": False,
    "published_counts": False,
    "route": "value",
}


@pytest.mark.usefixtures("pinned")
@pytest.mark.parametrize("rule", FLIPPED)
def test_each_published_rule_is_needed(rule):
    """With any one of them corrected, some configuration no longer matches: the comparison sees each."""

    def matches(seed):
        made = configuration(seed)
        made["settings"] = replace(made["settings"], **{rule: FLIPPED[rule]})
        try:
            run(Both(seed, **made), seed)
        except AssertionError:
            return False
        return True

    assert not all(matches(seed) for seed in SEEDS)


def unpinned(order):
    settings = CodaSettings.published(window=12, exact=9, summary=7, rope="half")
    return replace(settings, candidate_order=order, novelty=0.85)


@pytest.mark.parametrize("seed", range(3))
def test_the_package_as_it_is(seed):
    """Nothing pinned: the same unsorted top-k on both sides, slots of the exact bank compared as a set."""
    both = Both(seed, heads=4, groups=2, d=8, norm="full", settings=unpinned("unsorted"))
    run(both, seed, tokens=300, as_sets=True)
    assert both.cache.metrics()["exact_inserts"] > 9  # slots were reused


def test_the_package_as_it_is_has_another_order():
    both = Both(0, heads=4, groups=2, d=8, norm="full", settings=unpinned("gate"))
    with pytest.raises(AssertionError):
        run(both, 0, tokens=300, as_sets=True)


def test_the_package_loses_the_best_candidates_of_a_block():
    """Defect 1: of a block that drives out 200 tokens, the exact bank should get the 8 of the highest gates."""
    settings = replace(CodaSettings.published(window=4, exact=8, summary=8, rope="half"), novelty=0.7)
    both = Both(3, heads=4, groups=2, d=16, norm="full", settings=settings)
    x = torch.randn(204, 64, generator=torch.Generator().manual_seed(3))
    both.prefill(x, 204)
    with torch.no_grad():
        gates = both.oracle.write_proj(x).sigmoid()[:200, 0]
    best = set(gates.topk(8).indices.tolist())
    assert set(both.cache.exact.last_used.tolist()) == best
    assert len(set(both.state.mem_last_exact[0].tolist()) & best) < 8


def step_variant(both, x, **flags):
    with torch.no_grad():
        return both.oracle.step(x[None], both.state, **flags)[0][0]


@pytest.mark.usefixtures("pinned")
@torch.no_grad()
def test_the_other_orders_of_a_step_are_compositions():
    """The package's flags: attend without writing, write without attending, attend to the past and then write."""
    both = Both(5, **configuration(5, norm="full"))
    x = stream(5, 60, both.oracle.embed_dim)
    looked = both.tokens(x[:1])
    empty = attend(both.cache, looked.q, looked.lam, both.differential)
    assert (empty == 0).all()
    assert (step_variant(both, x[:1], write_cache=False) == 0).all()
    for token in x.split(1):
        given = both.tokens(token)
        past = both.projected(attend(both.cache, given.q, given.lam, both.differential))
        close(past, step_variant(both, token, write_cache=False), OUTPUTS)  # advances nothing
        both.cache.write(given.k, given.v, given.gates)
        if both.cache.position % 2:
            close(past, step_variant(both, token, include_current_in_attention=False), OUTPUTS)
        else:
            step_variant(both, token, attend=False)
        both.same_state()


@pytest.mark.parametrize("seed", SEEDS[:12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_the_package(seed, dtype):
    made = configuration(seed)
    both = Both(seed, **made)
    settings, zeros = both.cache.settings, torch.zeros(made["groups"])
    ours = CodaCache(settings, all_heads(made["groups"]), made["d"], zeros, dtype, CPU).nbytes()
    assert ours == both.oracle.cache_bytes(batch_size=1, dtype=dtype)


def as_saved(state, window, counts):
    """The package's state in the form that `CodaCache.restore` takes: the ring by position, integers as tensors."""
    held = state.recent_filled
    theirs = (state.recent_idx + torch.arange(held)) % window
    ours = torch.arange(state.pos - held, state.pos) % window
    saved = {"keys": state.k_buf[0].clone(), "values": state.v_buf[0].clone(), "gates": state.g_recent[0].clone()}
    for buffer, axis in (("keys", 1), ("values", 1), ("gates", 0)):
        saved[buffer] = saved[buffer].index_copy(axis, ours, saved[buffer].index_select(axis, theirs))
    saved |= {"used": state.allowed[0], "last_used": state.mem_last_exact[0]}
    saved |= {"exact_targets": state._exact_v_norm[0], "summary_targets": state._sum_lf_k_norm[0]}
    saved["active"] = torch.tensor([state.active_exact, state.active_summary])
    return saved | {"counts": torch.zeros(counts, dtype=torch.int64)}


@pytest.mark.usefixtures("pinned")
def test_a_state_that_the_package_wrote_goes_on_here():
    settings = replace(CodaSettings.published(window=12, exact=9, summary=7, rope="half"), novelty=0.5)
    both = Both(8, heads=4, groups=2, d=8, growth=(2, 3), norm="full", settings=settings)
    x = stream(8, 130, both.oracle.embed_dim)
    with torch.no_grad():
        both.oracle.prefill_chunked(x[None, :90], both.state, block_size=31)
        for token in x[90:95].split(1):
            both.oracle.step(token[None], both.state)
    (counts,) = both.cache.shapes(95)["counts"]
    both.cache.restore(95, as_saved(both.state, 12, counts))
    for token in x[95:].split(1):
        close(*both.step(token), OUTPUTS)
