"""Chunking never changes the result beyond rounding: any split of a sequence into calls gives the same logits."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.kernels.ops import CPU, REFERENCE
from fathom.model.errors import CapacityError
from tests.transformers_model import load_ours, oracle, our_logits

LENGTH = 600
# fp32, five layers, logits of unit scale: a split changes the order of sums, a few tens of ulps (6e-8 each) per layer
BOUND = 2e-5
TOKENS = torch.randint(0, 320, (LENGTH,), generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved")
    oracle((0, 4, 128, 4, 128), index_topk=8, seed=5).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(directory):
    return load_ours(directory, CPU)


@pytest.fixture(scope="module")
def whole(model):
    return our_logits(model, TOKENS)


@pytest.mark.parametrize("chunk", [1, 3, 4, 127, 128, 129, 512, LENGTH])
def test_every_chunk_size(model, whole, chunk):
    length = 300 if chunk < 100 else LENGTH  # many calls: two HCA blocks, and the ring has gone round twice
    lengths = [len(part) for part in TOKENS[:length].split(chunk)]
    assert (our_logits(model, TOKENS[:length], lengths) - whole[:length]).abs().max() < BOUND


@pytest.fixture(scope="module")
def two_calls(model, whole):
    """A state after two calls of 128, whose ring of 255 has wrapped."""
    state = model.new_state(256 + 127 + 5, 128)
    logits = torch.cat([model.logits(model(part, state)) for part in TOKENS[:256].split(128)])
    assert (logits - whole[:256]).abs().max() < BOUND
    return state


FEW = {0, 64, 120}  # both ends of an HCA block, and its middle


@pytest.mark.parametrize(
    "residue", [pytest.param(r, marks=[] if r in FEW else pytest.mark.slow) for r in range(0, 128, 8)]
)
def test_prefill_then_decode_at_every_residue_of_4_and_128(model, whole, two_calls, residue):
    for prefilled in range(256 + residue, 256 + residue + 8):
        state = copy.deepcopy(two_calls)
        lengths = [prefilled - 256, 1, 1, 1, 1, 1]
        parts = [part for part in TOKENS[256 : prefilled + 5].split(lengths) if len(part)]
        logits = torch.cat([model.logits(model(part, state)) for part in parts])
        assert (logits - whole[256 : prefilled + 5]).abs().max() < BOUND, f"prefill of {prefilled}, then decode"


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, LENGTH - 1), max_size=12, unique=True))
def test_any_split(model, whole, cuts):
    bounds = [0, *sorted(cuts), LENGTH]
    lengths = [b - a for a, b in itertools.pairwise(bounds)]
    assert (our_logits(model, TOKENS, lengths) - whole).abs().max() < BOUND


def test_a_split_leaves_the_same_caches(model):
    states = [model.new_state(LENGTH, LENGTH) for _ in range(2)]
    model(TOKENS, states[0])
    for part in TOKENS.split(37):
        model(part, states[1])
    for one, other in zip(states[0].layers, states[1].layers, strict=True):
        saved, expected = other.tensors(LENGTH), one.tensors(LENGTH)
        assert saved.keys() == expected.keys()
        for name, tensor in expected.items():
            assert saved[name].shape == tensor.shape, name
            torch.testing.assert_close(saved[name], tensor, rtol=0, atol=BOUND)


def test_the_context_may_be_filled_to_the_last_position_and_no_further(model):
    state = model.new_state(131, 64)
    for part in TOKENS[:131].split(64):
        model(part, state)
    before = [tensor.clone() for layer in state.layers for tensor in layer.tensors(131).values()]
    with pytest.raises(CapacityError, match="132 tokens exceed the context of 131"):
        model(TOKENS[:1], state)
    after = [tensor for layer in state.layers for tensor in layer.tensors(131).values()]
    assert state.position == 131
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "a refused call changed the state"
    with pytest.raises(CapacityError, match="exceeds the chunk of 64"):
        model(TOKENS[:65], model.new_state(131, 64))


def test_no_token_sees_a_later_one(model, whole):
    """Changing token t + 1 leaves every output up to t bit-equal, at both sides of block boundaries."""
    for t in (2, 3, 4, 126, 127, 128, 255, 256, 511):
        changed = TOKENS.clone()
        changed[t + 1] = (changed[t + 1] + 1) % 320
        logits = our_logits(model, changed)
        assert torch.equal(logits[: t + 1], whole[: t + 1]), f"an output up to {t} depends on token {t + 1}"
        assert not torch.equal(logits[t + 1 :], whole[t + 1 :]), "the change must show somewhere"


def test_a_sequence_leaves_nothing_behind_for_the_next(model):
    first = our_logits(model, TOKENS[:200])
    our_logits(model, TOKENS.flip(0)[:300])
    assert torch.equal(our_logits(model, TOKENS[:200]), first)


def test_reference_ops_give_the_same_logits(directory, whole):
    reference = load_ours(directory, REFERENCE)
    assert (our_logits(reference, TOKENS, [301, 299]) - whole).abs().max() < BOUND
