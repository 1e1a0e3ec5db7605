"""Faults themselves: each changes what the model computes (or trips), and none leaks into a model loaded afterwards."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from fathom.model.config import ModelConfig
from fathom.model.errors import Tripwire
from fathom.model.observe import sites
from fathom.model.observe.observer import listening
from fathom.probes.faults import FAULTS
from fathom.probes.subject import Subject, run_tokens
from fathom.runtime.options import DEMO
from tests.make_checkpoint import tiny_config

# Two calls, as what a call costs hardly grows with its tokens: two windows of HCA, of which the first call closes one
# and leaves the next one open, and a ring that goes round.
TOKENS, CHUNK = 280, 140
BEYOND = "pairs-beyond-capacity-lost"
# What their tripwire says, by fault.
TRIPS = {
    "indexer-returns-none": "no selection",
    "keys-four-times-too-wide": "rows 512 wide, expected 128",
    "top-k-halved": "min(top-k 16, ",
    "unfinished-entries-selected": "later blocks are not finished",
    "stale-selections": "min(top-k 16, ",
    "comb-made-transposed": "a column sum",
    "weights-not-normed": "weights that sum to",
    "route-scale-dropped": "weights that sum to",
    "row-first-sinkhorn": "a column sum",
    "one-sinkhorn-iteration": "a column sum",
    "ring-written-off-by-one": "attention.ring",
    "hash-table-zeroed": "experts [0, 0]",
}
# These need more than one run of a common prompt to show: activations beyond the clamp, a second sequence, decode,
# scores that are equal, more entries than the prompt has, calls that are longer, caches in another form, logits.
QUIET = {
    "shared-clamp-dropped",
    "stale-frontier",
    "one-token-post-off",
    "leak-of-one-entry-in-decode",
    "ties-to-the-higher-entry",
    "entries-wrapped",
    "first-tile-again",
    "selected-wrapped",
    "entries-of-the-first-tile-alone",
    "late-rows-of-a-long-call",
    "late-keys-of-a-long-call",
    "late-selections-of-a-long-call",
    "late-entries-of-a-long-call",
    "gathered-entries-scaled-as-the-one-before",
    "narrow-keys-scaled-as-the-one-before",
    "experts-of-few-tokens-unrounded",
    "first-logits-of-a-long-call",
    "third-entry-of-a-call-again",
}


@pytest.fixture(scope="module")
def healthy():
    subject = Subject()
    return run_tokens(subject.model, subject.tokens(TOKENS), CHUNK)[0]


@cache
def faulty(name):
    return Subject(fault=FAULTS[name])


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_changes_the_run_or_trips(name, healthy):
    subject = faulty(name)
    assert FAULTS[name].inapplicable(subject.config) is None
    if name in TRIPS:
        with pytest.raises(Tripwire) as trip:
            run_tokens(subject.model, subject.tokens(TOKENS), CHUNK)
        assert TRIPS[name] in str(trip.value)
    else:
        hidden, _ = run_tokens(subject.model, subject.tokens(TOKENS), CHUNK)
        fault = FAULTS[name]
        elsewhere = fault.between_ranks or fault.in_variants or fault.in_runtime or fault.in_drafts
        assert torch.equal(hidden, healthy) == (name in QUIET or elsewhere)


def test_no_fault_leaks_into_the_next_model(healthy):
    for name in FAULTS:
        assert faulty(name).model is not None
    subject = Subject()
    assert torch.equal(run_tokens(subject.model, subject.tokens(TOKENS), CHUNK)[0], healthy)


def test_a_sequence_that_starts_stale_differs_from_the_first():
    subject = Subject(fault=FAULTS["stale-frontier"])
    first, again = (run_tokens(subject.model, subject.tokens(TOKENS), CHUNK)[0] for _ in range(2))
    assert not torch.equal(first, again)


def test_a_fault_in_an_op_stays_out_of_an_oracles_op_set():
    subject = Subject(fault=FAULTS["relu-dropped"])
    assert subject.model.arithmetic.ops.select != subject.ops.select
    oracle = subject.ops._replace(name="oracle")
    assert subject.load(ops=oracle).model.arithmetic.ops.select == subject.ops.select


def test_models_are_loaded_once_for_each_setting():
    subject = Subject()
    assert subject.load() is subject.load()
    assert subject.load(subject.with_options(numerics="plain")) is not subject.load()


@pytest.mark.parametrize(
    ("changes", "without"),
    [
        ({"compress_ratios": [4, 4]}, {"window-theta", "yarn-on-window-layers", "future-block-visible"}),
        ({"compress_ratios": [0, 128]}, {"relu-dropped", "indexer-returns-none", "stale-frontier", "per-head-keys"}),
        ({"num_hash_layers": 0}, {"hash-table-zeroed"}),
        ({"rope_scaling": None}, {"yarn-dropped", "yarn-on-window-layers"}),
    ],
)
def test_what_a_config_cannot_express_is_said(changes, without):
    raw = tiny_config() | changes
    if "compress_ratios" in changes:
        raw |= {"num_hidden_layers": 2, "num_hash_layers": 1}
    config = ModelConfig.from_json(raw, "config")
    reasons = {name: fault.inapplicable(config) for name, fault in FAULTS.items()}
    assert without <= {name for name, reason in reasons.items() if reason}
    assert all(reasons[name].startswith("the model has no") for name in without)


def test_experts_that_cannot_be_shared_out_or_have_room_for_all_tokens_lose_none():
    config = ModelConfig.from_json(tiny_config(), "config")
    reason = FAULTS["experts-of-the-next-rank"].inapplicable
    assert reason(replace(config, n_routed_experts=11)) == "11 experts cannot be shared out to 2 to 8 ranks"
    assert reason(replace(config, n_routed_experts=9)) is None
    reason = FAULTS[BEYOND].inapplicable
    few = replace(config, n_routed_experts=5, num_experts_per_tok=4)
    assert reason(few) == "every expert has room for all tokens"
    assert reason(replace(few, n_routed_experts=6)) is None


def test_in_calls_of_one_token_every_expert_has_room():
    runs = (run_tokens(subject.model, subject.tokens(20), 1)[0] for subject in (Subject(), faulty(BEYOND)))
    assert torch.equal(*runs)


@pytest.mark.parametrize(
    ("name", "rows"),
    [("experts-of-the-next-rank", {8, 72}), ("pair-lost", {24, 88}), ("pair-counted-twice", {48, 112})],
)
def test_what_goes_wrong_on_the_way_to_an_expert_does_so_for_one_token_in_64_wherever_calls_end(name, rows):
    def outputs(model, lengths):
        seen, tokens, first = [], torch.tensor(Subject().tokens(sum(lengths))), 0
        state = model.new_state(len(tokens), max(lengths))
        with listening(model, {sites.EXPERTS_OUTPUT: lambda layer, x: seen.append((layer, x.clone()))}):
            for length in lengths:
                model.run(tokens[first : first + length], model.call(tokens[first : first + length], first), state)
                first += length
        return torch.cat([x for layer, x in seen if layer == 0])

    for lengths in ([120], [50, 22, 40, *[1] * 8]):
        with torch.inference_mode():
            right, wrong = outputs(Subject().model, lengths), outputs(faulty(name).model, lengths)
        assert set((right != wrong).any(1).nonzero()[:, 0].tolist()) == rows


def test_there_are_enough_and_every_one_says_what_it_is():
    assert len(FAULTS) >= 25
    for name, fault in FAULTS.items():
        assert name == fault.name
        assert fault.what.endswith(".")
        assert fault.seen


def test_models_of_one_fault_are_not_handed_out_for_another():
    faulty = Subject(fault=FAULTS["relu-dropped"])
    assert replace(faulty, fault=None).model is not faulty.model


def test_subject_gives_the_same_tokens_every_time():
    for count in (1, 17, 300, 2000):
        ids = Subject().tokens(count)
        assert len(ids) == count
        assert ids == Subject().tokens(count)
    assert Subject(seed=1).tokens(300) != Subject().tokens(300)
    assert ModelConfig.from_file(DEMO / "config.json").bos_token_id == Subject().tokens(5)[0]
