"""Variants of the caches in a whole Llama model: exact where they promise it, bounded or coded where they do not."""

import inspect
from dataclasses import fields, replace

import pytest
import torch
from coda_gqa_l import CoDAGQALandmarkPerf2

from fathom.kernels.ops import CPU
from fathom.model.cache.full import FullCache
from fathom.model.cache.gqa import Heads, KvShape, all_heads
from fathom.model.errors import CapacityError
from fathom.model.variants.choice import GroupedCoda, GroupedShard
from fathom.model.variants.coda import CodaCache
from fathom.model.variants.coda_attention import prefill
from fathom.model.variants.coda_settings import CodaSettings
from fathom.model.variants.grouped import CodaLayer, ShardLayer, shard_settings
from fathom.runtime.load import load_any
from fathom.runtime.options import RunOptions
from tests.coda_cases import random_tokens
from tests.llama_model import LLAMA3, oracle

LENGTH, PROMPT = 150, 100
TOKENS = torch.randint(96, (LENGTH,), generator=torch.Generator().manual_seed(1))
BOUND = 1e-5  # of logits of unit scale, in fp32: rounding
DECODE = [PROMPT, *[1] * (LENGTH - PROMPT)]
SMALL = "coda:window=32,exact=8,summary=8"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    oracle(head_dim=16, rope=LLAMA3).save_pretrained(directory)  # keys of a layer: 2 heads, 32 columns
    return directory


def model(directory, *kv, dtype="fp32"):
    return load_any(directory, RunOptions("plain", dtype, kv=kv)).model


def run(made, lengths=(LENGTH,), prompt=PROMPT):
    """Logits of all tokens, and the state after them."""
    state = made.new_state(LENGTH, LENGTH, prompt)
    return torch.cat([made.logits(made(part, state)) for part in TOKENS.split(list(lengths))]), state


@pytest.fixture(scope="module")
def full(saved):
    return run(model(saved))[0]


@pytest.mark.parametrize("lengths", [[LENGTH], [1] * LENGTH, [3] * 50, DECODE])
@pytest.mark.parametrize(
    "variant", ["coda:window=150", "coda:window=150,block=7", "coda:window=150,published=1", "shard:rank=32,window=146"]
)
def test_a_window_as_long_as_the_sequence_is_the_full_cache(saved, full, variant, lengths):
    assert (run(model(saved, f"all={variant}"), lengths)[0] - full).abs().max() < BOUND


def test_the_prompt_of_shard_is_read_exactly_and_what_follows_is_near(saved, full):
    """KL over decoded tokens, by rank of 32: the last of these keeps every component and errs by its codes alone."""
    found = {rank: run(model(saved, f"all=shard:rank={rank}"), DECODE)[0] for rank in (4, 16, 32)}
    for logits in found.values():
        assert (logits[:PROMPT] - full[:PROMPT]).abs().max() < BOUND
    divergence = {rank: kl(full, logits)[PROMPT:].mean().item() for rank, logits in found.items()}
    assert 1e-6 < divergence[32] < 1e-3
    assert divergence[32] < divergence[16] < divergence[4]


@pytest.mark.parametrize("kv", [("all=shard:rank=16",), ("all=shard:rank=16", "1=coda:window=32,exact=8,summary=8")])
def test_a_prompt_in_one_call_is_the_same_prompt_in_pieces(saved, kv):
    """To the bit, caches and all: layers one after the other, each in pieces of a chunk."""
    made, calls = model(saved, *kv), [*[16] * 6, 4, *[1] * 6]
    states = [made.new_state(LENGTH, 16, PROMPT) for _ in range(2)]
    assert [state.unread for state in states] == [PROMPT, PROMPT]
    parts = torch.cat([made(part, states[0]) for part in TOKENS[: sum(calls)].split(calls)])
    assert states[0].unread == 0
    whole = torch.cat(
        [made(TOKENS[:PROMPT], states[1]), *(made(one, states[1]) for one in TOKENS[PROMPT:106].split(1))]
    )
    assert torch.equal(whole, parts)
    for one, other in zip(*(state.layers for state in states), strict=True):
        kept = dict(other.saved(106))
        assert all(torch.equal(part, kept[name]) for name, part in one.saved(106))


def test_of_a_prompt_one_call_may_have_what_is_left(saved):
    made = model(saved, "all=shard:rank=16")
    state = made.new_state(LENGTH, 16, PROMPT)
    made(TOKENS[:16], state)
    with pytest.raises(CapacityError, match="a call of 85 tokens exceeds the chunk of 16"):
        made(TOKENS[16 : PROMPT + 1], state)
    made(TOKENS[16:PROMPT], state)
    for kept in (state, model(saved, f"all={SMALL}").new_state(LENGTH, 16, PROMPT)):
        with pytest.raises(CapacityError, match="a call of 17 tokens exceeds the chunk of 16"):
            made(TOKENS[:17], kept)


def kl(wanted, found):
    return (wanted.softmax(-1) * (wanted.log_softmax(-1) - found.log_softmax(-1))).sum(-1)


def test_a_bounded_cache_forgets_and_its_size_is_of_its_slots(saved, full):
    logits, state = run(model(saved, f"all={SMALL}"), DECODE)
    assert (logits[:32] - full[:32]).abs().max() < BOUND
    assert (logits - full)[64:].abs().max() > 0.1
    longer = model(saved, f"all={SMALL}").new_state(256, 8)
    assert longer.nbytes() == state.nbytes() == {"coda": 3 * bounded_bytes(2, 16, 32, 8, 8)}


def bounded_bytes(heads, d, window, exact, summary):
    """Keys and values, used slots, gates, times of the exact bank, an inverse norm for each slot and head."""
    slots = window + exact + summary
    return 2 * heads * slots * d * 4 + slots + window * 4 + exact * 8 + heads * (exact + summary) * 4


KNOBS = [  # each of which must change what a layer gives
    {"strict": 1},
    {"gated": 0},
    {"eta_logit": 1.0},
    {"values": 1},
    {"published": 1},
    {"exact_at_start": 2, "growth_horizon": 0},
    {"summary_at_start": 2, "growth_horizon": 100},
    {"gate_exact": 0.6},
    {"gate_summary": 0.6},
    {"hit": 0.2, "novelty": 0.2},
    {"novelty": 0.1},
    {"hit": 0.2, "novelty": 0.2, "refresh_on_hit": 1},
    {"exact_candidates": 1},
    {"summary_candidates": 1},
    {"overwrite_on_insert": 0},
    {"memory_init": "zeros"},
    {"mask_unused": 0},
]


@pytest.mark.parametrize("knobs", [{}, *KNOBS], ids=str)
def test_the_cache_of_a_layer_gives_what_the_bare_cache_gives(knobs):
    shape, cpu = KvShape(all_heads(2), 16, torch.ones(8), interleaved=False), torch.device("cpu")
    sizes = {"window": 8, "exact": 4, "summary": 4}
    layer = CodaLayer(shape, GroupedCoda(**sizes, block=5, **knobs), torch.float32, cpu)
    own = {"strict", "gated", "eta_logit", "values", "published"}
    rules = (CodaSettings.published if "published" in knobs else CodaSettings)(**sizes, rope="half")
    rules = replace(rules, **{name: value for name, value in knobs.items() if name not in own})
    rules = replace(rules, route="value" if "values" in knobs else "key")
    eta = torch.full((2,), knobs.get("eta_logit", -3.0))
    bare = CodaCache(rules, all_heads(2), 16, eta, torch.float32, cpu)
    tokens = random_tokens(40, heads=4, d=16)
    heads = Heads(tokens.q, tokens.k, tokens.v, tokens.gates)
    given = tokens._replace(lam=None, gates=tokens.gates if knobs.get("gated", 1) else None)
    found = layer.attend(heads, 0, CPU)
    assert torch.equal(found, prefill(bare, given, None, 5, strict="strict" in knobs))
    assert layer.position == 40
    plain = CodaLayer(shape, GroupedCoda(**sizes, block=5), torch.float32, cpu)
    assert torch.equal(found, plain.attend(heads, 0, CPU)) == (not knobs), "a setting must change what is seen"


def test_every_published_knob_of_the_cache_is_a_setting():
    """By the constructor of the package: what is not a size of the model, a start of training, or told otherwise."""
    ours = {
        "window": "window",
        "num_landmarks_exact": "exact",
        "num_landmarks_summary": "summary",
        "write_policy": "gated",
        "write_gate_threshold_exact": "gate_exact",
        "write_gate_threshold_summary": "gate_summary",
        "exact_match_threshold": "hit",
        "exact_novelty_threshold": "novelty",
        "exact_refresh_on_hit": "refresh_on_hit",
        "exact_candidates_per_block": "exact_candidates",
        "summary_eta_init_logit": "eta_logit",
        "summary_candidates_per_block": "summary_candidates",
        "summary_overwrite_on_insert": "overwrite_on_insert",
        "min_landmarks_exact": "exact_at_start",
        "max_landmarks_exact": "exact",
        "min_landmarks_summary": "summary_at_start",
        "max_landmarks_summary": "summary",
        "expansion_t_max": "growth_horizon",
        "mem_init": "memory_init",
        "mask_unused_memory": "mask_unused",
    }
    model = {"embed_dim", "num_heads", "num_kv_heads", "rope_base", "rope_interleaved", "head_norm_mode", "eps"}
    training = {"lambda_init_bias", "theta_init", "write_gate_init_bias", "detach_evicted"}
    theirs = set(inspect.signature(CoDAGQALandmarkPerf2.__init__).parameters) - {"self", "collect_metrics"}
    assert theirs == set(ours) | model | training
    assert set(ours.values()) <= {part.name for part in fields(GroupedCoda)}


@pytest.mark.parametrize("lengths", [[16] * 9 + [6], [64, 64, 22], [48, 96, 6]])
def test_calls_of_whole_blocks_are_alike(saved, lengths):
    """Beyond the window it matters where blocks begin: at multiples of `block`, whatever the calls that hold them."""
    made = model(saved, f"all={SMALL},block=16")
    wanted = run(made)[0]
    assert (run(made, lengths)[0] - wanted).abs().max() < BOUND


def test_a_call_that_ends_within_a_block_is_continued_at_its_end(saved):
    """75 + 75 tokens read the blocks 16, 16, 16, 16, 11, 5, 16, ..: another function of the same tokens."""
    made = model(saved, f"all={SMALL},block=16")
    wanted = run(made, [16, 16, 16, 16, 11, 5, *[16] * 4, 6])[0]
    assert (run(made, [75, 75])[0] - wanted).abs().max() < BOUND
    assert (run(made)[0] - wanted).abs().max() > 1e-3


def test_settings_of_shard_reach_its_cache():
    for dp, allocation in enumerate(("uniform", "measured", "published")):
        assert shard_settings(GroupedShard(rank=64, dp=dp, qjl=dp % 2)).allocation == allocation
        assert shard_settings(GroupedShard(rank=64, dp=dp, qjl=dp % 2)).sketch == (dp == 1)


def test_layers_of_one_model_may_differ(saved, full):
    made = model(saved, "all=shard:rank=16", f"1={SMALL}", "2=full")
    logits, state = run(made, DECODE)
    assert [type(cache) for cache in state.layers] == [ShardLayer, CodaLayer, FullCache]
    assert state.nbytes().keys() == {"shard", "coda", "keys", "values"}
    ran = made.arithmetic.ran
    assert {ran[op] for op in ("attend_grouped", "attend_banks", "attend_codes")} == {"cpu"}
    assert "attend" not in ran
    assert torch.isfinite(logits).all()
    assert 1e-3 < kl(full, logits)[PROMPT:].mean() < 1


@pytest.mark.parametrize(
    "variant", ["shard:rank=16", "shard:rank=16,dp=0,qjl=1,bits=3", SMALL, "coda:window=32,published=1"]
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("at", [40, 120])
def test_a_state_put_back_continues_bit_by_bit(saved, variant, dtype, at):
    made = model(saved, f"all={variant}", dtype=dtype)
    state, again = (made.new_state(LENGTH, LENGTH, PROMPT) for _ in range(2))
    made(TOKENS[:at], state)
    for cache, other in zip(state.layers, again.layers, strict=True):
        held = {name: part.clone() for name, part in cache.tensors(at).items()}
        assert {name: tuple(part.shape) for name, part in held.items()} == other.shapes(at)
        other.restore(at, held)
    again.position = at
    for part in TOKENS[at : at + 80].split([60, *[1] * 20] if at == 40 else [7, *[1] * 23]):
        assert torch.equal(made(part, state), made(part, again))
