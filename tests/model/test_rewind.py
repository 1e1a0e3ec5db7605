"""Tokens that were run and taken back leave nothing: what a later call may read is, to the bit, as without them.

In a block the first tokens are the sequence's own, the others are wrong, and are taken back once they have run. What a
save would hold is all that a later call reads.
"""

from itertools import accumulate
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fathom.kernels.ops import CPU, REFERENCE
from fathom.kernels.triton_ops import TRITON
from fathom.model.errors import CapacityError, ConfigError, Tripwire
from fathom.model.state import State
from fathom.runtime.graph import Step
from fathom.runtime.load import load, load_any
from fathom.runtime.memory import new_state
from fathom.runtime.options import RunOptions
from fathom.runtime.statefile import load_state, save_state, snapshot
from tests.llama_model import LLAMA3, oracle
from tests.make_checkpoint import tiny_config, write_checkpoint

TAKEN_BACK = 7  # at most
BLOCK = TAKEN_BACK + 1
CONTEXT, PROMPT = 160, 100
TOKENS = torch.randint(2, 90, (CONTEXT,), generator=torch.Generator().manual_seed(3))
WRONG = torch.randint(2, 90, (CONTEXT,), generator=torch.Generator().manual_seed(4))
# Blocks as (right, wrong) tokens. From the prompt's end they pass a window of 16 several times, windows of 4 at every
# place and that of 128 in four ways: closed by a token that is taken back, by the last that stays, and by one before.
SCHEDULES = {
    "all rejected": [(1, 7)] * 45,
    "all accepted": [(8, 0)] * 5 + [(5, 0)],
    "closed by a wrong one": [(3, 5)] * 9 + [(1, 3), (2, 6), (1, 1)] * 4,
    "one at a time": [(1, 1), (1, 0), (2, 1)] * 11,
    "mixed": [(8, 0), (1, 7), (4, 4), (3, 2), (2, 6), (7, 1), (2, 2), (1, 4), (6, 1), (4, 0), (3, 5), (4, 4)],
}
OPS = {"cpu": CPU, "reference": REFERENCE}
IN_BF16 = RunOptions("deployed", "bf16", "cpu", 50)
V4 = {
    "deployed": IN_BF16,
    "narrow": RunOptions("deployed", "bf16", "cpu", 50, "fp8", "fp4"),
    "keys in fp8": RunOptions("deployed", "bf16", "cpu", 50, "fp8", "fp8"),
    "plain": RunOptions("plain", "fp32", "cpu", 50),
    "shard": RunOptions("plain", "bf16", "cpu", 50, kv=("all=shard:bits=4,keys=6",)),
}
LLAMAS = {
    "full": ("llama", {}, ()),
    "sliding window": ("mistral", {"sliding_window": 20}, ()),
    "shard": ("llama", {}, ("all=shard:rank=16,window=12",)),
    "shard, sketched": ("llama", {}, ("all=shard:rank=16,window=5,sinks=2,qjl=1",)),
}


class Run(NamedTuple):
    """The logits of some tokens, by one row each, and the state after them."""

    logits: Tensor
    state: State


@pytest.fixture(scope="module")
def v4(tmp_path_factory):
    path = tmp_path_factory.mktemp("v4")
    write_checkpoint(path, tiny_config(head_dim=128, index_head_dim=64, qk_rope_head_dim=64), seed=11)
    return path


@pytest.fixture(scope="module")
def llamas(tmp_path_factory):
    made = {}
    for name, (family, changes, _) in LLAMAS.items():
        made[name] = tmp_path_factory.mktemp("llama")
        oracle(family, head_dim=16, rope=LLAMA3 if family == "llama" else None, **changes).save_pretrained(made[name])
    return made


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def started(model, rewind: int, chunk: int = 50, prompt: int = PROMPT) -> State:
    state = new_state(model, CONTEXT, chunk, prompt, rewind)
    for part in TOKENS[:prompt].split(chunk):
        model(part, state)
    return state


def plain(model, tokens: int, prompt: int = PROMPT, chunk: int = 50) -> Run:
    """One token in each call, from a state that keeps nothing more."""
    state = started(model, 0, chunk, prompt)
    rows = [model.logits(model(part, state)) for part in TOKENS[state.position : tokens].split(1)]
    return Run(torch.cat(rows), state)


def drafted(model, state: State, schedule, *, together: bool) -> Run:
    """Blocks of right and wrong tokens, each in one call or in calls of one token."""
    rows = []
    for right, wrong in schedule:
        at = state.position
        block = torch.cat((TOKENS[at : at + right], WRONG[at + right : at + right + wrong]))
        found = [model.logits(model(part, state)) for part in block.split(BLOCK if together else 1)]
        rows.append(torch.cat(found)[:right])
        state.rewind(at + right)
    return Run(torch.cat(rows), state)


def within(schedule, tokens: int = CONTEXT - PROMPT):
    """The blocks of a schedule that a context has room for, wrong tokens included."""
    ends = accumulate(right for right, _ in schedule)
    return [block for block, end in zip(schedule, ends, strict=True) if end + block[1] <= tokens]


def assert_same(found: State, wanted: State) -> None:
    ours, theirs = snapshot(found), snapshot(wanted)
    assert ours.position == theirs.position
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, part in theirs.tensors.items():
        own = ours.tensors[name]
        assert own.dtype == part.dtype
        assert torch.equal(own.contiguous().view(torch.uint8), part.contiguous().view(torch.uint8)), name


def check(model, schedule, *, together: bool, prompt: int = PROMPT) -> None:
    schedule = within(schedule, CONTEXT - prompt)
    found = drafted(model, started(model, TAKEN_BACK, prompt=prompt), schedule, together=together)
    wanted = plain(model, found.state.position, prompt)
    assert torch.equal(found.logits, wanted.logits)
    assert_same(found.state, wanted.state)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("options", V4)
def test_blocks_of_v4(v4, options, schedule):
    """In one call each, but for attention to codes, in which rows of one call differ by rounding from calls of one."""
    check(load(v4, V4[options], CPU).model, SCHEDULES[schedule], together=options != "shard")


@pytest.mark.parametrize("options", ["narrow", "plain"])
@pytest.mark.parametrize("ops", OPS)
def test_calls_of_one_token(v4, ops, options):
    """Where calls of several rows may differ in last bits from calls of one: nothing but the way back is compared."""
    check(load(v4, V4[options], OPS[ops]).model, [*SCHEDULES["mixed"][:7], (2, 5), (1, 6)], together=False)


@pytest.mark.parametrize("prompt", [1, 2, 3, 4, 5, 9])
def test_from_the_first_tokens_on(v4, prompt):
    """Windows with none before them are closed by tokens that are taken back; all is shorter than a window at first."""
    check(load(v4, V4["narrow"], CPU).model, SCHEDULES["mixed"], together=True, prompt=prompt)


def test_calls_shorter_than_what_is_kept(v4):
    """The ring of a window has rows for what is taken back, however short a call is."""
    model = load(v4, IN_BF16, CPU).model
    found = drafted(model, started(model, TAKEN_BACK, chunk=1), SCHEDULES["mixed"][:5], together=False)
    wanted = plain(model, found.state.position, chunk=1)
    assert torch.equal(found.logits, wanted.logits)
    assert_same(found.state, wanted.state)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", LLAMAS)
def test_blocks_of_grouped_heads(llamas, kind, schedule):
    model = load_any(llamas[kind], RunOptions("plain", "fp32", kv=LLAMAS[kind][2])).model
    check(model, SCHEDULES[schedule], together=True)


def test_any_number_of_random_ways_back(v4):
    model, g = load(v4, IN_BF16, CPU).model, torch.Generator().manual_seed(5)
    for _ in range(6):
        draws = torch.randint(0, TAKEN_BACK + 1, (60,), generator=g).tolist()
        check(model, [(max(1, BLOCK - wrong - wrong % 3), wrong) for wrong in draws], together=True)


def test_several_ways_back_add_up_to_no_more_than_is_kept(v4):
    """To an earlier token at each, so far as the furthest that was ever run allows."""
    model = load(v4, IN_BF16, CPU).model
    state = started(model, TAKEN_BACK)
    model(TOKENS[PROMPT : PROMPT + 8], state)
    for position in range(PROMPT + 7, PROMPT, -1):
        state.rewind(position)
        assert_same(state, plain(model, position).state)
    with pytest.raises(CapacityError, match=f"position {PROMPT} is out of reach from {PROMPT + 1}: .* to {PROMPT + 1}"):
        state.rewind(PROMPT)
    model(WRONG[:3], state)
    assert state.earliest == PROMPT + 1, "rows of the furthest token are still the ones that were overwritten"
    state.rewind(PROMPT + 1)
    model(TOKENS[PROMPT + 1 : PROMPT + 20], state)
    assert state.earliest == PROMPT + 13
    assert_same(state, plain(model, PROMPT + 20).state)


def test_a_state_that_keeps_nothing_stays_where_it_is(v4):
    model = load(v4, IN_BF16, CPU).model
    state = started(model, 0)
    state.rewind(PROMPT)
    with pytest.raises(CapacityError, match="position 99 is out of reach from 100: this state goes back to 100"):
        state.rewind(PROMPT - 1)


@pytest.mark.parametrize("at", [127, 128, 129, 131])
def test_a_saved_state_goes_on_alike(v4, tmp_path, at):
    """Saved after a way back, restored into states that keep tokens and that keep none."""
    loaded = load(v4, V4["narrow"], CPU)
    model = loaded.model
    state = drafted(
        model, started(model, TAKEN_BACK), [(at - PROMPT - 24, 0), (8, 0), (8, 0), (8, 5)], together=False
    ).state
    save_state(tmp_path / "saved", state, loaded, None)
    wanted = plain(model, at + 6)
    for rewind in (0, TAKEN_BACK):
        again = model.new_state(CONTEXT, 50, rewind=rewind)
        load_state(tmp_path / "saved", again, loaded)
        assert_same(again, state)
        with pytest.raises(CapacityError, match=f"goes back to {at}"):
            again.rewind(at - 1)
        if rewind:
            found = drafted(model, again, [(2, 6), (4, 1)], together=True)
            assert torch.equal(found.logits, wanted.logits[at - PROMPT :])
            assert_same(found.state, wanted.state)


def test_nothing_lost_is_taken_for_held(v4):
    """A ring of which a position was taken back trips where that position is wanted."""
    model = load(v4, IN_BF16, CPU).model
    state = started(model, TAKEN_BACK)
    model(TOKENS[PROMPT : PROMPT + 4], state)
    for cache in state.layers:
        cache.ring.rewind(PROMPT, PROMPT + 4)
    with pytest.raises(Tripwire, match=r"attention\.ring of layer 0"):
        model(TOKENS[PROMPT + 4 : PROMPT + 5], state)


def test_what_enters_banks_stays(v4, llamas):
    """Refused when the state is made, with the layer and its variant; not when the first token is rejected."""
    coda = load(v4, RunOptions("plain", "bf16", "cpu", 50, kv=("hca=coda:window=9",)), CPU).model
    coda.new_state(CONTEXT, 50)
    with pytest.raises(ConfigError, match=r"layer 2: coda:window=9,.* cannot take tokens back, .* its entries stays"):
        coda.new_state(CONTEXT, 50, rewind=1)
    grouped = load_any(llamas["full"], RunOptions("plain", "fp32", kv=("1=coda",))).model
    with pytest.raises(ConfigError, match=r"layer 1: coda:.* cannot take tokens back, .* its coda stays"):
        new_state(grouped, CONTEXT, 50, None, 3)


def test_a_prompt_that_was_compressed_is_not_taken_apart(llamas):
    model = load_any(llamas["shard"], RunOptions("plain", "fp32", kv=LLAMAS["shard"][2])).model
    state = new_state(model, CONTEXT, 50, PROMPT, TAKEN_BACK)
    model(TOKENS[:50], state)
    model(WRONG[:5], state)
    state.rewind(50)
    model(TOKENS[50:PROMPT], state)
    assert_same(state, started(model, 0))
    model(TOKENS[PROMPT : PROMPT + 3], state)
    with pytest.raises(CapacityError, match="goes back to 100"):
        state.rewind(PROMPT - 1)


def test_captured_steps_of_triton(tmp_path):
    """On a layer with every kind of cache: each step is one launch of the compressors, which write the ring."""
    config = tiny_config(compress_ratios=[4], num_hidden_layers=1, num_hash_layers=0, n_routed_experts=4)
    write_checkpoint(tmp_path, config, seed=1)
    model = load(tmp_path, RunOptions("deployed", "bf16", "cpu", 64, "fp8", "fp4"), TRITON).model
    states = [model.new_state(32, 32, rewind=rewind) for rewind in (3, 0)]
    for state in states:
        model(TOKENS[:9], state)
    step, straight = (Step(model, state) for state in states)
    for right, wrong in ((1, 3), (2, 1), (1, 2)):
        at = states[0].position
        rows = [step(int(token)).clone() for token in TOKENS[at : at + right]]
        for token in WRONG[:wrong]:
            step(int(token))
        states[0].rewind(at + right)
        assert torch.equal(torch.stack(rows), torch.stack([straight(int(t)).clone() for t in TOKENS[at : at + right]]))
        assert_same(*states)
