"""Drafts change nothing but the number of calls: tokens, caches and draws of a run are those of one without them."""

from array import array
from dataclasses import replace

import pytest
import torch

from fathom.kernels.ops import CPU, REFERENCE
from fathom.model.architectures import config_from_file
from fathom.model.checkpoint.mtp import Head
from fathom.model.choices import AUTO, ROWS, WHOLE
from fathom.model.errors import ConfigError
from fathom.runtime.drafting import Drafting, check_draft, drafting, likely, lookup
from fathom.runtime.generate import Generation, generate
from fathom.runtime.load import load
from fathom.runtime.memory import new_state
from fathom.runtime.options import DEMO, RunOptions
from fathom.runtime.sampling import Sampling
from fathom.runtime.statefile import snapshot
from fathom.runtime.text.tokenizer import Tokenizer
from tests import gloo
from tests.make_checkpoint import DSPARK, tiny_config, write_checkpoint

MOST = 5
PROMPT = torch.randint(2, 300, (117,), generator=torch.Generator().manual_seed(3)).tolist()
LIMIT = 40  # of new tokens: past the ends of windows of 4 and of the one that ends at 128
NONE = 511  # a token that greedy and sampled runs below never choose
SAMPLED = Sampling(0.8, 0.95, 7)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(path, tiny_config(), seed=11)
    return load(path, RunOptions("deployed", "bf16", "cpu", 64, "fp8", "fp4"), CPU).model


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(model, drafter, sampling=SAMPLED, *, eos=(), limit=LIMIT, taken=None, prompt=PROMPT):
    """The record, the state, and the tokens that were taken, of which there may be a largest number."""
    by = Drafting("test", drafter, MOST) if callable(drafter) else drafter
    state, record = new_state(model, len(prompt) + limit - 1, 64, None, MOST if by else 0), Generation()
    how = {"eos": eos, "limit": limit, "sampling": sampling, "progress": lambda _: None, "record": record}
    stream, tokens = generate(model, state, prompt, drafting=by, alternatives=1, **how), []
    for token in stream:
        tokens.append(token)
        if len(tokens) == taken:
            break
    stream.close()
    return record, state, tokens


def assert_same(found, wanted, length=117):
    (ours, state, tokens), (theirs, other, expected) = found, wanted
    assert tokens == expected
    assert (ours.tokens, ours.ended, ours.pending) == (theirs.tokens, theirs.ended, theirs.pending)
    assert ours.likelihoods == theirs.likelihoods
    a, b = snapshot(state), snapshot(other)
    assert a.position == b.position == length + len(ours.tokens) - 1
    for name, part in b.tensors.items():
        assert torch.equal(a.tensors[name].contiguous().view(torch.uint8), part.contiguous().view(torch.uint8)), name


def forced(tokens, right):
    """A drafter that knows the sequence, and of each draft makes all but the first tokens wrong; how many, in turn."""
    turns = []

    def drafter(known, most):
        assert list(known[: len(PROMPT)]) == PROMPT
        at, stays = len(known) - len(PROMPT), right[len(turns) % len(right)]
        turns.append(stays)
        after = [*tokens[at : at + most], *[NONE] * most][:most]
        return [token if place < stays else NONE for place, token in enumerate(after)]

    return drafter


RIGHT = {"none": [0], "all": [MOST], "to one": [1], "to three": [3], "mixed": [0, 5, 2, 0, 1, 4, 3, 5, 5, 1]}


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("right", RIGHT)
def test_tokens_and_caches_are_those_of_a_plain_run(model, right, sampling):
    wanted = run(model, None, sampling)
    tokens = wanted[0].tokens
    assert NONE not in tokens
    found = run(model, forced(tokens, RIGHT[right]), sampling)
    assert_same(found, wanted)
    record = found[0]
    assert record.calls + sum(record.accepted) + 1 == len(tokens) == LIMIT, "a call chooses one token more"
    assert all(few <= many for few, many in zip(record.accepted, record.drafted, strict=True))
    if right == "none":
        assert sum(record.accepted) == 0
    if right == "all":
        assert record.calls == -(-(LIMIT - 1) // (MOST + 1))
        assert record.accepted == record.drafted


@pytest.mark.parametrize("at", range(8))
@pytest.mark.parametrize("right", ["all", "mixed"])
def test_eos_anywhere_in_a_draft_ends_the_run(model, at, right):
    """And what was drafted behind it is taken back, with the row of EOS itself."""
    tokens = run(model, None)[0].tokens
    eos = tokens[at + 1 :]
    eos = [next(token for token in eos if token not in tokens[: at + 1])]
    wanted = run(model, None, eos=eos)
    assert wanted[0].ended == "eos"
    assert_same(run(model, forced(tokens, RIGHT[right]), eos=eos), wanted)


@pytest.mark.parametrize("limit", range(1, 9))
def test_a_limit_anywhere_in_a_draft(model, limit):
    """The context holds no token more than a plain run needs."""
    tokens = run(model, None)[0].tokens
    assert_same(run(model, forced(tokens, [MOST]), limit=limit), run(model, None, limit=limit))


@pytest.mark.parametrize("taken", range(1, 9))
def test_whoever_stops_in_a_draft_finds_the_state_there(model, taken):
    tokens = run(model, None)[0].tokens
    found = run(model, forced(tokens, [MOST, 2]), taken=taken)
    assert found[2] == tokens[:taken]
    assert_same(found, run(model, None, taken=taken))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.5, 1.0, 3)], ids=["greedy", "sampled"])
def test_a_text_that_repeats_itself_is_looked_up(sampling):
    """The demo's, which goes on and on where no EOS ends it: fewer calls, the same tokens and caches."""
    demo = load(DEMO, RunOptions(), CPU).model
    plain, drafted = (run(demo, drafter, sampling, limit=120) for drafter in (None, lookup))
    assert_same(drafted, plain)
    record = drafted[0]
    assert 0 < sum(record.accepted) < sum(record.drafted)
    assert record.calls < 119


# --- heads


@pytest.fixture(scope="module", params=list(Head))
def headed(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("head")
    write_checkpoint(path, tiny_config(**(DSPARK if request.param is Head.DSPARK else {})), seed=11, head=request.param)
    return request.param, path


HEADED = RunOptions("deployed", "bf16", "cpu", 64, "fp8", "fp4", draft="auto", draft_tokens=MOST)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 117, 127, 128])
def test_tokens_and_caches_with_a_head(headed, length, sampling):
    """Its drafts are random here, and hardly any is right: what is rejected leaves no trace."""
    kind, path = headed
    loaded = load(path, HEADED, CPU)
    by = drafting(HEADED, loaded.head)
    assert by.name == {Head.MTP: "mtp", Head.DSPARK: "dspark"}[kind]
    prompt = (PROMPT * 2)[:length]
    plain, drafted = (run(loaded.model, one, sampling, prompt=prompt, limit=12) for one in (None, by))
    assert_same(drafted, plain, length)
    record = drafted[0]
    assert record.calls + sum(record.accepted) + 1 == 12
    assert record.drafted[0] in {record.calls, record.calls - 1}, "behind the eleventh there is no room"


@pytest.mark.parametrize("name", ["mtp", "dspark"])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, 1.0, 3)], ids=["greedy", "sampled"])
def test_the_demo_with_a_trained_head(name, sampling):
    """The demo's own files, and a head that is right more often than not: fewer calls, the same tokens and caches."""
    folder, shards = DEMO.with_name(f"{DEMO.name}-{name}"), [shard.name for shard in DEMO.glob("*.safetensors")]
    assert [(folder / shard).read_bytes() == (DEMO / shard).read_bytes() for shard in shards] == 6 * [True]
    options = RunOptions(draft=name, draft_tokens=5, draft_confidence=0.3)
    loaded = load(folder, options, CPU)
    for text in ("The capital of", "The old farmer carried a"):
        prompt = Tokenizer(folder, 1024).encode_text(text)
        plain, drafted = (
            run(loaded.model, by, sampling, prompt=prompt, limit=80) for by in (None, drafting(options, loaded.head))
        )
        assert_same(drafted, plain, len(prompt))
        record = drafted[0]
        assert record.calls + sum(record.accepted) + 1 == 80
        assert 0 < sum(record.accepted) < sum(record.drafted), "some are accepted, some rejected"


def test_confidence_chooses_how_many_are_run(headed):
    kind, path = headed
    loaded = load(path, HEADED, CPU)
    counts = {}
    for least in (0.0, 0.2, 0.6, 1.0):
        by = drafting(replace(HEADED, draft_confidence=least), loaded.head)
        counts[least] = sum(run(loaded.model, by, limit=20)[0].drafted)
    if kind is Head.MTP:
        assert len(set(counts.values())) == 1, "it has none"
    else:
        assert counts[0.0] > counts[0.2] > counts[0.6] > counts[1.0] == 0


def test_a_head_that_is_not_there_is_refused(headed):
    kind, path = headed
    own, other = ("mtp", "dspark") if kind is Head.MTP else ("dspark", "mtp")
    with pytest.raises(ConfigError, match=f"--draft {other}: .* has {kind}, see --draft {own}$"):
        load(path, replace(HEADED, draft=other), CPU)
    with pytest.raises(ConfigError, match=f"--draft {other}: .* has no draft head, see --draft lookup$"):
        load(DEMO, replace(HEADED, draft=other), CPU)
    assert load(DEMO, HEADED, CPU).head is None
    assert load(path, RunOptions(), CPU).head is None, "nothing of it is read"


def on_ranks(group, path, drafted, experts=AUTO):
    options = RunOptions("plain", "fp32", draft="auto", draft_tokens=MOST, draft_confidence=0.3, experts=experts)
    loaded = load(path, options, CPU, group)
    by = drafting(options, loaded.head) if drafted else None
    record, _, tokens = run(loaded.model, by, Sampling(0.7, 1.0, 3), limit=30)
    return tokens, record.drafted, record.accepted, sum(loaded.held.values())


@pytest.mark.parametrize("experts", [ROWS, WHOLE])
@pytest.mark.parametrize("name", ["mtp", "dspark"])
def test_a_trained_head_on_two_ranks(name, experts):
    folder = DEMO.with_name(f"{DEMO.name}-{name}")
    ((wanted, _, _, whole),) = gloo.run(1, on_ranks, folder, False)
    first, second = gloo.run(2, on_ranks, folder, True, experts)
    assert first[:3] == second[:3]
    assert first[0] == wanted
    assert 0 < sum(first[2]) < sum(first[1]), "some are accepted, some rejected"
    assert first[3] < whole, "a stage's experts, heads and rows of outputs are cut as the model's are"


def test_a_run_after_another_of_the_same_drafter(headed):
    """Over one state, without being told what it holds."""
    _, path = headed
    loaded = load(path, HEADED, CPU)
    told = []
    for by in (None, drafting(HEADED, loaded.head)):
        state, found = new_state(loaded.model, 200, 64, None, MOST), []
        for prompt in (PROMPT[:40], PROMPT[40:45]):
            how = {"eos": (), "limit": 9, "sampling": Sampling(), "progress": lambda _: None, "record": Generation()}
            found.append(list(generate(loaded.model, state, prompt, drafting=by, **how)))
        told.append(found)
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("chances", "least", "count"),
    [
        ((0.9, 0.2, 0.9), 0.5, 1),
        ((0.7, 0.7), 0.5, 1),
        ((0.9, 0.9, 0.9), 0.7, 3),
        ((0.4, 0.9), 0.5, 0),
        ((0.1,), 0.0, 1),
    ],
)
def test_drafts_are_run_as_long_as_all_of_them_are_likely(chances, least, count):
    assert likely(torch.tensor(chances).logit(), least) == count


# --- looking up


@pytest.mark.parametrize(
    ("tokens", "most", "drafted"),
    [
        ([], 3, []),
        ([5], 3, []),
        ([5, 5], 3, []),
        ([5, 5, 5], 3, [5, 5, 5]),
        ([1, 2, 3, 9, 1, 2], 5, [3, 9, 1, 2, 3]),  # goes on as it repeats itself
        ([1, 2, 3, 9, 1, 2], 1, [3]),
        ([9, 2, 3, 1, 2], 3, []),  # a single token that recurs
        ([1, 2, 7, 1, 2, 8, 1, 2], 2, [8, 1]),  # the latest of equal ones
        ([0, 1, 2, 7, 5, 1, 2, 8, 0, 1, 2], 2, [7, 5]),  # a longer one before a later one
        ([4, 0, 1, 2, 3, 7, 6, 0, 1, 2, 3, 8, 4, 0, 1, 2, 3], 1, [8]),  # more than four do not count
    ],
)
def test_what_is_looked_up(tokens, most, drafted):
    assert lookup(array("q", tokens), most) == drafted


def test_drafts_that_could_change_the_text_are_refused():
    options, config = RunOptions(draft="lookup", draft_tokens=5), config_from_file(DEMO / "config.json")
    check_draft(config, options, CPU)
    check_draft(config, RunOptions(), REFERENCE)
    assert drafting(RunOptions()) is None
    for changed, ops, why in (
        (options, REFERENCE, "--draft: ops reference: rows of one call"),
        (options, CPU._replace(name="other"), "--draft: ops other: .*; those of --ops cpu and triton have"),
        (replace(options, draft_tokens=8), CPU, "--draft-tokens 8: want at most 7"),
        (replace(options, prefill_chunk=5), CPU, "--draft-tokens 5: .* --prefill-chunk is 5"),
        (replace(options, kv=("2=shard",)), CPU, "--draft: layer 2: shard:bits=6,keys=8: rows of one call"),
    ):
        with pytest.raises(ConfigError, match=why):
            check_draft(config, changed, ops)
    check_draft(config, options, CPU, graph=True)
    for draft in ("mtp", "dspark", "auto"):
        with pytest.raises(ConfigError, match=f"--draft {draft}: a draft head hears nothing of a captured call"):
            check_draft(config, replace(options, draft=draft), CPU, graph=True)
