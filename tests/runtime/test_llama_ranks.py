"""A Llama-family model on N ranks is the model on one: heads, KV heads and their caches are cut, with every variant."""

import os
from itertools import chain

import pytest
import torch
from safetensors.torch import load_file, save_file

from fathom.kernels.ops import CPU
from fathom.model.errors import RankDisagreement
from fathom.model.llama.adapters import shapes
from fathom.model.llama.block import Block
from fathom.model.ranks.ranks import SPLIT_FROM
from fathom.runtime.load import load_any
from fathom.runtime.options import RunOptions
from fathom.runtime.plan.planner import Planner
from fathom.runtime.sharding import sharding_plan
from fathom.runtime.statefile import load_state, save_state
from tests import gloo
from tests.exact_ops import EXACT
from tests.peak_memory import peak_bytes

# fp32, three layers, logits of unit scale, as between ranks of V4 (tests/runtime/test_many_ranks.py)
BOUND = 2e-5
TOKENS = torch.randint(0, 96, (70,), generator=torch.Generator().manual_seed(3))
PROMPT, CALLS = 48, (40, 8, *(1,) * 22)  # the windows of all variants are left, in blocks and in steps
FULL, CODA, PUBLISHED = (), ("all=coda:window=12,exact=6,summary=6",), ("all=coda:window=12,exact=6,published=1",)
SHARD = ("all=shard:rank=16,window=8",)
SKETCHED = ("all=shard:rank=16,window=8,dp=1,group=4,bits=3,qjl=1",)


def exact(q, keys, values, seen):
    """Attention in float64, rounded once: no order of sums is left. `seen` is [t, n]."""
    t, _, d = q.shape
    rows = q.double().view(t, keys.shape[0], -1, d)
    logits = torch.einsum("tkgd,knd->tkgn", rows, keys.double()) * d**-0.5
    mass = logits.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
    return torch.einsum("tkgn,knd->tkgd", mass, values.double()).reshape(q.shape)


def exact_grouped(q, keys, values, first, window):
    assert window is None
    stop = first + len(q)
    seen = torch.arange(stop) <= torch.arange(first, stop)[:, None]
    return exact(q, keys[:, :stop], values[:, :stop], seen).to(q.dtype)


def exact_banks(q, noise, past, own):
    assert noise is None, "noise queries come as heads"
    keys, values, seen = past
    seen = torch.ones(len(q), keys.shape[1], dtype=torch.bool) if seen is None else seen.expand(len(q), -1)
    if own is not None:
        assert own.window is None
        keys = torch.cat((keys, own.keys.transpose(0, 1)), 1)
        values = torch.cat((values, own.values.transpose(0, 1)), 1)
        seen = torch.cat((seen, torch.ones(len(q), len(q), dtype=torch.bool).tril()), 1)
    return exact(q, keys, values, seen).float()


# what is summed, and what torch computes otherwise at the end of a row than within, has correctly rounded results
WITHOUT_ORDER = CPU._replace(
    linear=EXACT.linear,
    rms_norm=EXACT.rms_norm,
    swiglu=EXACT.swiglu,
    attend_grouped=exact_grouped,
    attend_banks=exact_banks,
)


def written(path, dtype=torch.float32, **widths):
    """A random model in a folder. Imported here: each rank imports this file, and would transformers, for 4 s."""
    from tests.llama_model import oracle  # noqa: PLC0415

    oracle(**widths).to(dtype).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Every axis splits over two and over four ranks."""
    widths = {"hidden_size": 64, "intermediate_size": 112, "num_attention_heads": 8, "num_key_value_heads": 4}
    return written(tmp_path_factory.mktemp("llama"), **widths, head_dim=16)


def random_adapters(directory, folder):
    """A file of adapters of every layer, all parameters random."""
    config, draw = load_any(directory, RunOptions("plain")).model.config, torch.Generator().manual_seed(4)
    drawn = {}
    for layer in range(config.num_hidden_layers):
        for name, shape in shapes(config).items():
            noise = torch.randn(shape, generator=draw)
            drawn[f"layer_{layer}.coda.{name}"] = noise / shape[-1] ** 0.5 if "weight" in name else noise
    save_file(drawn, folder / "coda_adapters.safetensors")
    return str(folder / "coda_adapters.safetensors")


@pytest.fixture(scope="module")
def adapters(directory, tmp_path_factory):
    return random_adapters(directory, tmp_path_factory.mktemp("adapters"))


def loaded_on(group, directory, kv, adapters=None, ops=CPU, dtype="fp32"):
    torch.set_num_threads(1)
    return load_any(directory, RunOptions("plain", dtype, kv=kv, coda_adapters=adapters), ops, group)


def run(model, state, calls, tokens=TOKENS):
    return torch.cat([model.logits(model(part, state)) for part in tokens.split(calls)])


def run_all(group, directory, cases, without_order):
    """Logits, all of the state that is saved, and bytes of weights and caches that are here."""
    found = []
    for kv, adapters in cases:
        loaded = loaded_on(group, directory, kv, adapters, WITHOUT_ORDER if without_order else CPU)
        state = loaded.model.new_state(len(TOKENS), max(CALLS), PROMPT)
        logits = run(loaded.model, state, list(CALLS))
        saved = [cache.tensors(state.position) for cache in state.layers]
        found.append((logits, saved, sum(loaded.held.values()), sum(state.nbytes().values())))
    return found


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_logits_and_states_are_those_of_one_rank_to_the_bit(directory, size):
    cases = [(FULL, None), (CODA, None), (PUBLISHED, None)]
    (alone,) = gloo.run(1, run_all, directory, cases, True)
    for rank, found in enumerate(gloo.run(size, run_all, directory, cases, True)):
        for case, (logits, saved, held, cached), (wanted, wanted_saved, all_held, all_cached) in zip(
            cases, found, alone, strict=True
        ):
            assert logits.equal(wanted), (case, rank)
            for layer, (parts, expected) in enumerate(zip(saved, wanted_saved, strict=True)):
                assert parts.keys() == expected.keys()
                assert [name for name in parts if not parts[name].equal(expected[name])] == [], (case, rank, layer)
            assert held < 1.02 * all_held / size, "but for norms, every weight is cut"
            assert cached < (1.05 if case[0] else 1.0001) * all_cached / size, "but for times and gates, all slots are"


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_on_the_runs_own_ops_ranks_differ_by_the_order_of_sums(directory, adapters, size):
    cases = [(kv, None) for kv in (FULL, CODA, SHARD, SKETCHED)] + [(kv, adapters) for kv in (FULL, CODA, SHARD)]
    (alone,) = gloo.run(1, run_all, directory, cases, False)
    ranks = gloo.run(size, run_all, directory, cases, False)
    for case, found in zip(cases, zip(*ranks, strict=True), strict=True):
        wanted, expected, _, all_cached = alone[cases.index(case)]
        for logits, saved, _, cached in found:
            assert (logits - wanted).abs().max() < BOUND * wanted.abs().max(), case
            assert logits.equal(found[0][0]), "ranks agree to the bit"
            for parts, others in zip(saved, found[0][1], strict=True):
                assert all(parts[name].equal(others[name]) for name in others), "on what they save too"
            assert [{name: (x.shape, x.dtype) for name, x in parts.items()} for parts in saved] == [
                {name: (x.shape, x.dtype) for name, x in parts.items()} for parts in expected
            ]
            assert cached < 0.8 * all_cached, "the basis of keys and their codes are on every rank"


def test_heads_that_do_not_divide_are_on_every_rank(tmp_path):
    widths = {"hidden_size": 60, "intermediate_size": 112, "num_attention_heads": 6, "num_key_value_heads": 3}
    written(tmp_path, **widths, head_dim=8, vocab_size=97)
    config = load_any(tmp_path, RunOptions("plain")).model.config
    said = (
        "KV heads with their caches, and the heads that read them: 3, which 2 does not divide",
        "vocabulary: 97, which 2 does not divide",
    )
    assert sharding_plan(config, 2).replicated == said
    cases = [(CODA, None)]
    (alone,), both = gloo.run(1, run_all, tmp_path, cases, True), gloo.run(2, run_all, tmp_path, cases, True)
    for ((logits, _, _, cached),) in both:
        assert logits.equal(alone[0][0])
        assert cached == alone[0][3]


def saved_and_read(group, directory, cases, folder, read):
    """Logits of the last tokens, after the first were read or found in a file."""
    found = []
    for i, (kv, position) in enumerate(cases):
        loaded, path = loaded_on(group, directory, kv), folder / f"state {i}"
        state = loaded.model.new_state(len(TOKENS), PROMPT, PROMPT)
        if read:
            assert load_state(path, state, loaded) == 7
            assert state.position == position
        else:
            if position:
                run(loaded.model, state, min(position, 40), TOKENS[:position])
            save_state(path, state, loaded, 7)
        more = (PROMPT - position,) if position < PROMPT else ()
        rest = TOKENS[position:]
        found.append(run(loaded.model, state, [*more, *(1,) * (len(rest) - sum(more))], rest)[-4:])
    return found


EVERY_STATE = [(kv, position) for kv in (FULL, CODA, SKETCHED) for position in (0, 20, 58)]


@pytest.mark.parametrize(
    "cases", [EVERY_STATE[::4], pytest.param(EVERY_STATE, marks=pytest.mark.slow)], ids=["some", "every"]
)
def test_a_state_saved_on_two_ranks_goes_on_alone_and_the_other_way(cases, directory, tmp_path):
    """Before anything was read, within the prompt, and after it."""
    for first, second in ((2, 1), (1, 2)):
        saved = gloo.run(first, saved_and_read, directory, cases, tmp_path, False)[0]
        read = gloo.run(second, saved_and_read, directory, cases, tmp_path, True)[0]
        for case, wanted, found in zip(cases, saved, read, strict=True):
            assert (found - wanted).abs().max() < BOUND * wanted.abs().max(), case


def compressed(group, directory, variants):
    """What is saved of a prompt that was compressed, where no order of sums is left."""
    found = []
    for kv in variants:
        model = loaded_on(group, directory, kv, ops=WITHOUT_ORDER).model
        state = model.new_state(len(TOKENS), PROMPT, PROMPT)
        model(TOKENS[:PROMPT], state)
        found.append([cache.tensors(state.position) for cache in state.layers])
    return found


def test_what_shard_makes_of_a_prompt_is_that_of_one_rank_to_the_bit(directory):
    (alone,) = gloo.run(1, compressed, directory, (SHARD, SKETCHED))
    for found in gloo.run(2, compressed, directory, (SHARD, SKETCHED)):
        for parts, wanted in zip(chain(*found), chain(*alone), strict=True):
            assert any(name.startswith("shard.middle") for name in wanted)
            assert [name for name in wanted if not parts[name].equal(wanted[name])] == []


def read_in_pieces(group, directory):
    """Logits of the end of a prompt that is read in one call, in pieces of so many tokens that V4 would split them."""
    model, tokens = loaded_on(group, directory, SHARD).model, TOKENS.repeat(3)
    state = model.new_state(len(tokens), 2 * SPLIT_FROM, len(tokens))
    return model.logits(model(tokens, state)[-1:])


def test_every_rank_has_all_tokens_of_a_long_prompt(directory):
    (alone,) = gloo.run(1, read_in_pieces, directory)
    for found in gloo.run(2, read_in_pieces, directory):
        assert (found - alone).abs().max() < BOUND * alone.abs().max()


def with_other_adapters(group, directory, folder):
    """What a rank says where each has adapters of its own under one name."""
    os.chdir(folder / str(group.rank))
    try:
        loaded_on(group, directory, FULL, "coda_adapters.safetensors")
    except RankDisagreement as error:
        return error.site
    return None


def test_adapters_that_differ_between_ranks_are_told_apart(directory, adapters, tmp_path):
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        held = load_file(adapters)
        held["layer_1.coda.theta"] += rank
        save_file(held, tmp_path / str(rank) / "coda_adapters.safetensors")
    assert gloo.run(2, with_other_adapters, directory, tmp_path) == ["adapters"] * 2


class AddedTwice(Block):
    def fed_forward(self, x, pieces):
        return super().fed_forward(x, pieces) + x


def disagreeing(group, directory):
    """What a rank says when the second layer of rank 1 adds its stream twice."""
    model = loaded_on(group, directory, FULL).model
    if group.rank == 1:
        model.blocks[1].__class__ = AddedTwice
    try:
        model(TOKENS[:20], model.new_state(40, 20))
    except RankDisagreement as error:
        return error.site, error.layer
    return None


def test_a_stream_that_differs_between_ranks_ends_the_run(directory):
    """What sublayers give is the same on all ranks, right or wrong: it was put together. The stream is each one's."""
    assert gloo.run(2, disagreeing, directory) == [("stream", 1)] * 2


def planned(group, directory, kv, adapters):
    """What a call of a prompt and of a token takes beside weights and caches, and what the plan says of it."""
    loaded = loaded_on(group, directory, kv, adapters, dtype="bf16")
    options = RunOptions("plain", "bf16", kv=kv, coda_adapters=adapters)
    plan = Planner(loaded.model.config, loaded.census, loaded.sharding, options, group.rank, "cpu").plan(400, 300)
    tokens, taken = torch.arange(300) % 96, []
    for _ in range(3):  # the least of three: gloo's threads may free what was exchanged while the next thing runs
        state = loaded.model.new_state(400, 300, 300)
        peaks = [
            peak_bytes(lambda part=part, state=state: loaded.model.logits(loaded.model(part, state)[-1:]))
            for part in (tokens, tokens[:1])
        ]
        taken.append(max(peaks))
    cached = sum(state.nbytes().values())
    return cached, plan.cache_bytes, min(taken), plan.call.nbytes, sum(loaded.held.values()), plan.mapped_weights


WIDE_CODA = ("all=coda:window=64,exact=16,summary=16",)


@pytest.mark.parametrize(
    ("kv", "adapted"), [(FULL, False), (WIDE_CODA, False), (WIDE_CODA, True), (("all=shard:rank=32",), False)]
)
def test_a_rank_takes_what_is_planned_and_little_less(tmp_path_factory, kv, adapted):
    widths = {"hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 8, "num_key_value_heads": 4}
    more = {"num_hidden_layers": 2, "vocab_size": 1000, "max_position_embeddings": 4096}
    directory = written(tmp_path_factory.mktemp("wide"), torch.bfloat16, **widths, **more)
    path = random_adapters(directory, tmp_path_factory.mktemp("adapters")) if adapted else None
    for cached, room, taken, planned_call, held, mapped in gloo.run(2, planned, directory, kv, path):
        assert cached <= room
        assert taken <= planned_call < (2.2 if "shard" in str(kv) else 1.5) * taken
        assert 0 < held - mapped < 5 * 256 * 2 + 1, "norms are converted, all else is mapped"
