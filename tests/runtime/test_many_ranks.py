"""A model on N ranks is the model on one: with all tokens or its own, uneven experts, short prompts, decode."""

from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from fathom.kernels.experts.reference import FEW
from fathom.kernels.ops import CPU
from fathom.model.choices import ALL, AUTO, OWN, ROWS, WHOLE
from fathom.model.config import ModelConfig
from fathom.model.errors import ConfigError, Tripwire
from fathom.model.observe import sites
from fathom.model.observe.observer import listening
from fathom.model.ranks import dispatch
from fathom.model.ranks.dispatch import EACH
from fathom.model.ranks.ranks import ALONE, Group
from fathom.probes.demo_language.prompts import needle_prompts
from fathom.runtime.load import load
from fathom.runtime.options import DEMO, RunOptions
from fathom.runtime.sharding import sharding_plan
from tests import gloo
from tests.exact_ops import EXACT
from tests.make_checkpoint import make_tensors, tiny_config, write_checkpoint, write_tensors
from tests.nvlink import nvlink

# fp32, four layers, logits of unit scale: a rank's share of the tokens changes the order of sums, as a split into calls
# does (tests/model/test_chunks.py, the same bound)
BOUND = 2e-5
# every axis splits over eight ranks, in whole blocks of 128 rows
CONFIG = {
    "head_dim": 80,
    "hc_mult": 2,
    "hidden_size": 1024,
    "index_head_dim": 32,
    "index_n_heads": 32,
    "num_attention_heads": 64,
    "o_groups": 8,
    "o_lora_rank": 128,
    "swiglu_limit": 1.0,
}
IN_HALVES = 0  # tokens of an expert from which on they travel in halves
LAYERS = (4, 4)  # of the random model and of the demo
CALLS = (133, 3, 1)  # beyond the window and an HCA window; calls shorter than the ranks are many


class Run(NamedTuple):
    directory: Path
    numerics: str
    dtype: str
    exact: bool  # sums in float64, correctly rounded: no order of sums is left
    tokens: list[int]
    lengths: tuple[int, ...]
    kv: tuple[str, ...] = ()


def uneven(name, values):
    """Expert 5 gets no token (its selection bias is -100), experts 1 and 2 most; the hash table leaves expert 5 out."""
    if name.endswith("gate.bias"):
        return values + torch.tensor([0.0, 1.0, 1.0, 0, 0, -100.0, 0, 0])
    if name.endswith("tid2eid"):
        return torch.where(values == 5, 8 - values.sum(1, keepdim=True).clamp(5, 8), values)
    return values


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    path = tmp_path_factory.mktemp("random")
    write_checkpoint(path / "uneven", tiny_config(**CONFIG), seed=11, adjust=distinct)
    draw = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 512, (sum(CALLS),), generator=draw).tolist()
    demo = list(needle_prompts(260, 1, 3)[0].ids)
    read = (len(demo) - 2, 1, 1)
    bounded = ("csa=coda:window=32,exact=8,summary=8", "hca=coda:window=1,exact=0,summary=1")
    return {
        "random, plain": Run(path / "uneven", "plain", "fp32", False, tokens, CALLS),
        "random, deployed, exact sums": Run(path / "uneven", "deployed", "bf16", True, tokens, CALLS),
        "shorter than the ranks": Run(path / "uneven", "plain", "fp32", False, tokens[:1], (1,)),
        "demo, deployed, exact sums": Run(DEMO, "deployed", "bf16", True, demo, read),
        "demo, deployed": Run(DEMO, "deployed", "bf16", False, demo, read),
        "demo, plain": Run(DEMO, "plain", "fp32", False, demo, read),
        "demo, plain, coda": Run(DEMO, "plain", "fp32", False, demo, read, bounded),
        "demo, plain, shard": Run(DEMO, "plain", "fp32", False, demo, read, ("all=shard:bits=8",)),
    }


def distinct(name, values):
    """As `uneven`, with rows of the table that stay distinct."""
    if not name.endswith("tid2eid"):
        return uneven(name, values)
    draw = torch.Generator().manual_seed(1)
    allowed = torch.tensor([0, 1, 2, 3, 4, 6, 7])
    return torch.stack([allowed[torch.randperm(7, generator=draw)[: values.shape[1]]] for _ in range(len(values))])


def run_all(group, runs, ways):
    """Of each run by each way in which tokens and experts are spread: logits, calls, tables moved, fingerprint."""
    torch.set_num_threads(1)
    found = {}
    for (name, run), way in product(runs.items(), ways):
        options = RunOptions(run.numerics, run.dtype, rank_tokens=way[0], kv=run.kv, experts=way[1])
        dispatch.EACH = way[2]
        loaded = load(run.directory, options, EXACT if run.exact else CPU, group)
        model = loaded.model
        state = model.new_state(len(run.tokens), max(run.lengths))
        parts = torch.tensor(run.tokens).split(run.lengths)
        logits = torch.cat([model.logits(model(part, state)) for part in parts])
        found[name, way] = (
            logits,
            model.arithmetic.ranks.calls,
            model.arithmetic.ranks.moves["collective"],
            loaded.weights_fingerprint,
        )
    return found


@pytest.fixture(scope="module")
def alone(runs):
    return {name: found for (name, _), found in run_all(ALONE, runs, [(AUTO, AUTO, EACH)]).items()}


# each rank imports and loads everything anew: eight of them run, but for the slow tests, what only they show
OF_EIGHT = ("random, deployed, exact sums", "shorter than the ranks")


@pytest.mark.parametrize(
    ("size", "only"),
    [
        (2, ()),
        pytest.param(4, (), marks=pytest.mark.slow),
        (8, OF_EIGHT),
        pytest.param(8, (), marks=pytest.mark.slow),
    ],
    ids=["2", "4", "8, few", "8"],
)
def test_logits_do_not_depend_on_the_number_of_ranks(runs, alone, size, only):
    ways = (*((tokens, experts, EACH) for tokens in (ALL, OWN) for experts in (ROWS, WHOLE)), (OWN, WHOLE, IN_HALVES))
    runs = {name: run for name, run in runs.items() if size == 2 or not run.kv}  # caches are whole on every rank
    runs = {name: run for name, run in runs.items() if not only or name in only}
    for rank, found in enumerate(gloo.run(size, run_all, runs, ways, timeout=400)):
        for (name, run), way in product(runs.items(), ways):
            logits, calls, moves, fingerprint = found[name, way]
            expected = alone[name][0]
            assert calls[way[0]] == sum(calls.values()) == len(run.lengths)
            tables = 2 * (1 + (way[2] == IN_HALVES)) * sum(count > FEW for count in run.lengths)
            assert moves == (tables * LAYERS[run.directory == DEMO] if way[:2] == (OWN, WHOLE) else 0)
            assert fingerprint == alone[name][3]
            if run.exact:
                assert logits.equal(expected), (name, way, rank)
            elif run.numerics == "plain":
                assert (logits - expected).abs().max() < BOUND * expected.abs().max().clamp_min(1), (name, way, rank)
            assert logits.argmax(1).equal(expected.argmax(1)), (name, way, rank)


def test_every_axis_of_the_random_model_is_split():
    config = ModelConfig.from_json(tiny_config(**CONFIG), "random")
    assert [sharding_plan(config, size).replicated for size in (2, 4, 8)] == [()] * 3


def test_the_random_model_is_what_the_cases_need(runs, alone):
    run = runs["random, plain"]
    model = load(run.directory, RunOptions("plain", "fp32")).model
    state = model.new_state(len(run.tokens), len(run.tokens))
    seen = {}
    with listening(model, {sites.EXPERT_IDS: lambda layer, ids: seen.update({layer: ids.clone()})}):
        model(torch.tensor(run.tokens), state)
    for layer, ids in seen.items():
        counts = ids.flatten().bincount(minlength=8)
        assert counts[5] == 0, layer
        assert layer == 0 or counts.max() > 3 * counts[counts > 0].min(), layer
    assert alone["random, plain"][0].std() > 0.3


def test_ranks_that_do_not_divide_the_experts_columns_are_refused_in_one_line():
    said = r"^3 ranks: moe_intermediate_size, columns of SwiGLU: 128, which 3 does not divide$"
    with pytest.raises(ConfigError, match=said):
        load(DEMO, RunOptions(), CPU, Group(0, 3, None))


def position_of_a_nan(group, site):
    """At which position a rank says that a site is not finite, when its row 39 of 40 is not."""
    model = load(DEMO, RunOptions(rank_tokens=OWN), group=group).model

    def spoil(_, x):
        x[39] = torch.nan

    try:
        with listening(model, {site: spoil}):
            model(torch.arange(40), model.new_state(40, 40))
    except Tripwire as trip:
        return trip.site, trip.position
    return None


def test_a_tripwire_in_a_split_call_names_the_position_of_the_sequence():
    """The normed output is whole on each rank, whichever tokens were its own."""
    assert gloo.run(2, position_of_a_nan, sites.HIDDEN) == [("hidden", 39)] * 2


def in_memory(group, directory, tokens, each):
    """Logits of a call, and how many tables were moved by what: where ranks write into each other's memory or not."""
    torch.set_num_threads(1)
    dispatch.EACH = each
    found = []
    for link in (nullcontext, nvlink):
        with link(*[group] * (link is nvlink)):
            options = RunOptions("deployed", "bf16", rank_tokens=OWN, experts=WHOLE)
            model = load(directory, options, CPU, group).model
            logits = model.logits(model(torch.tensor(tokens), model.new_state(len(tokens), len(tokens))))
            found.append((logits, model.arithmetic.ranks.moves))
    return found


@pytest.mark.parametrize(
    ("name", "size", "each", "tables"),
    [
        ("random, deployed", 2, IN_HALVES, 4),
        ("random, deployed", 4, IN_HALVES, 4),
        ("demo, deployed", 2, EACH, 2),  # whose packed rows of 129 bytes are no whole words
    ],
)
def test_rows_that_ranks_write_into_memory_are_those_of_a_collective(runs, name, size, each, tables):
    run = runs[f"{name}, exact sums"]
    tables *= LAYERS[0]
    for (logits, by), (wanted, moved) in gloo.run(size, in_memory, run.directory, run.tokens[:100], each):
        assert logits.equal(wanted)
        assert by == {"memory": 0, "collective": tables}
        assert moved == {"memory": tables, "collective": 0}


def mixed(group, directory, tokens):
    """Logits where some experts are of another form than the rest, and what ranks may say of all of them."""
    torch.set_num_threads(1)
    options = RunOptions("deployed", "bf16", rank_tokens=OWN, experts=WHOLE if group.size > 1 else AUTO)
    model = load(directory, options, EXACT, group).model
    logits = model.logits(model(torch.tensor(tokens), model.new_state(len(tokens), len(tokens))))
    told = [block.experts for block in model.blocks]
    return logits, {(type(of.matrices[0]).__name__, of.alike, of.coded) for of in told}


def test_experts_of_several_forms_are_no_matter_of_which_a_rank_has(runs, tmp_path):
    """Of each layer one expert is BF16: it lies on the first rank alone, and all rows travel as numbers."""
    run, config = runs["random, deployed, exact sums"], tiny_config(**CONFIG)
    write_checkpoint(tmp_path, config, seed=11)
    tensors = make_tensors(config, seed=11)
    kept = {name: tensor for name, tensor in tensors.items() if ".ffn.experts.1." not in name}
    wide = {name: tensor for name, tensor in make_tensors(config, seed=11, formats="bf16").items() if name not in kept}
    write_tensors(tmp_path, kept | wide, shards=2)
    ((wanted, said),) = gloo.run(1, mixed, tmp_path, run.tokens[:100])
    assert said == {("Apart", False, False)}
    for logits, of_rank in gloo.run(2, mixed, tmp_path, run.tokens[:100]):
        assert of_rank == said
        assert logits.equal(wanted)
