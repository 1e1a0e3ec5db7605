"""The Shard cache: exact where it says so, the article's bytes, one result however tokens come, saved and continued."""

import dataclasses
import random

import pytest
import torch

from fathom.kernels.formats import coded_rows, eigenbasis, qjl
from fathom.kernels.ops import CPU
from fathom.kernels.rope import reference as rope
from fathom.kernels.shard.cpu import middle_keys, middle_values
from fathom.model.cache.gqa import KvShape, all_heads
from fathom.model.errors import CapacityError, ConfigError, Tripwire
from fathom.model.variants.shard import ShardCache, ShardSettings, causal

ON_CPU, META = torch.device("cpu"), torch.device("meta")
HEADS, QUERY_HEADS, D = 2, 4, 16
SHAPE = KvShape(all_heads(HEADS), D, rope.frequencies(D, 10_000.0), interleaved=False)
SMALL = ShardSettings(window=12, rank=16, group=8, stream_bits=8)
EVERY_KIND = [
    SMALL,
    dataclasses.replace(SMALL, allocation="measured", stream_bits=4, sign_seed=3),
    dataclasses.replace(SMALL, allocation="published", stream_bits=3, sketch=True),
]
kinds = pytest.mark.parametrize("settings", EVERY_KIND, ids=["int4", "measured", "sketch"])


def drawn(n, seed=0):
    """Queries, keys and values of n tokens; keys have a mean and lie near six directions."""
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(6, HEADS * D, generator=g)
    keys = torch.randn(n, 6, generator=g) @ mix + 0.1 * torch.randn(n, HEADS * D, generator=g) + 1
    cos, sin = rope.angles(torch.arange(n), SHAPE.freqs)
    a, b = keys.view(n, HEADS, D).chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    keys = torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
    return torch.randn(n, QUERY_HEADS, D, generator=g), keys, torch.randn(n, HEADS, D, generator=g)


def made(settings=SMALL, prompt=40, context=100, *, dtype=torch.float32):
    return ShardCache(SHAPE, settings, prompt, context, dtype, ON_CPU)


def fed(cache, tokens, *cuts):
    """Outputs of tokens from where the cache stands, in calls that end at `cuts`."""
    return torch.cat([cache.attend(*(x[cache.count : stop] for x in tokens)) for stop in cuts])


def full(tokens, *cuts, dtype=torch.float32):
    """The same with a full cache."""
    q, keys, values = (x.to(dtype) for x in tokens)
    return torch.cat([causal(CPU, q[a:b], keys[:b], values[:b], a) for a, b in zip((0, *cuts), cuts, strict=False)])


def float64(q, keys, values):
    keys, values = (x.double().repeat_interleave(QUERY_HEADS // HEADS, dim=1) for x in (keys, values))
    logits = torch.einsum("hd,nhd->hn", q.double(), keys) * D**-0.5
    return torch.einsum("hn,nhd->hd", logits.softmax(-1), values)


# --- bytes


@pytest.mark.parametrize(
    ("tokens", "mib", "ratio"),
    [(2048, 35.98, 7.1), (4096, 57.98, 8.8), (8192, 101.98, 10.0), (16384, 189.98, 10.8), (32768, 365.98, 11.2)],
)
def test_the_articles_bytes_for_llama_3_1_8b(tokens, mib, ratio):
    """32 layers of 8 KV heads of 128, when the prompt has been compressed: counted from tensors, MB read as MiB."""
    shape = KvShape(all_heads(8), 128, torch.zeros(64, device=META), interleaved=False)
    cache = ShardCache(shape, ShardSettings(), tokens, tokens, torch.bfloat16, META)
    exact = 2 * tokens * 8 * 128 * 2
    assert cache.nbytes() == sum(tensor.nbytes for tensor in cache.buffers().values())
    held = cache.nbytes()  # without the prompt's own rows, which are there while it is read: see the next test
    assert held == (tokens - 68) * 352 + 68 * 4096 + 1024 * 192 + 2 * 1024 + 2 * 192 + 2 * 192 + 2048 + 2 * 1024
    assert round(32 * held / 2**20, 2) == mib
    assert round(exact / held, 1) == ratio


@kinds
def test_the_prompt_takes_room_while_it_is_read_and_nothing_else_is_allocated(settings):
    cache, tokens = made(settings), drawn(100)
    before, names = cache.nbytes(), dict(cache.buffers())
    fed(cache, tokens, 39)
    assert cache.nbytes() - before == 2 * 40 * HEADS * D * 4
    for stop in (40, 41, 100):
        fed(cache, tokens, stop)
        assert cache.nbytes() == before
    assert cache.nbytes() == sum(tensor.untyped_storage().nbytes() for tensor in cache.buffers().values())
    for name, tensor in cache.buffers().items():
        assert tensor.data_ptr() == names[name].data_ptr(), f"{name} was allocated anew"


@pytest.mark.parametrize(("bits", "sketch", "want"), [(8, False, 2080), (4, False, 1056), (4, True, 1056 + 16)])
def test_bytes_of_a_token_in_the_stream(bits, sketch, want):
    shape = KvShape(all_heads(8), 128, torch.zeros(64, device=META), interleaved=False)
    settings = ShardSettings(stream_bits=bits, sketch=sketch)
    sizes = [ShardCache(shape, settings, 1000, n, torch.bfloat16, META).nbytes() for n in (1000, 1001, 1101)]
    assert (sizes[1] - sizes[0], sizes[2] - sizes[1]) == (want, 100 * want)


# --- exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("prompt", "cuts"), [(16, (16,)), (16, (3, 9, 16)), (0, range(1, 17)), (5, (2, 5, *range(6, 17)))]
)
def test_sinks_and_window_alone_are_a_full_cache_to_the_bit(prompt, cuts, dtype):
    tokens = tuple(x.to(dtype) for x in drawn(16))
    assert torch.equal(fed(made(prompt=prompt, dtype=dtype), tokens, *cuts), full(tokens, *cuts, dtype=dtype))


@kinds
def test_the_prompt_is_read_exactly_whatever_its_length(settings):
    tokens = drawn(40)
    assert torch.equal(fed(made(settings), tokens, 17, 40), full(tokens, 17, 40))


@kinds
@pytest.mark.parametrize("prompt", [0, 9, 16, 17, 40])
def test_sinks_and_the_last_window_stay_exact(settings, prompt):
    tokens = drawn(90)
    cache = made(settings, prompt=prompt)
    fed(cache, tokens, *([prompt] if prompt else []), 73, 90)
    held = {tuple(row.flatten().tolist()) for row in cache.keys}
    assert held == {tuple(tokens[1][p].flatten().tolist()) for p in (*range(4), *range(90 - 12, 90))}
    order = [p if p < 4 else next(q for q in range(78, 90) if (q - 4) % 12 == p - 4) for p in range(16)]
    assert torch.equal(cache.values, tokens[2][order])


# --- against everything decoded


@kinds
def test_decode_is_attention_over_what_is_held(settings):
    """float64, from the cache's own buffers put in order by hand; tokens 4 to 27 in the middle, 28 and on streamed."""
    tokens, n = drawn(60), 60
    cache = made(settings)
    got = fed(cache, tokens, 40, 59, 60)[-1]
    middle = cache.middle
    streamed = n - 12 - 28
    keys = [cache.keys, middle_keys(middle, 0, 24)]
    values = [cache.values, coded_rows.undo_hadamard(middle_values(middle, 0, 24), cache.stream_values.signs)]
    rows = streamed * HEADS
    values.append(coded_rows.read(cache.stream_values, 0, rows).view(-1, HEADS, D))
    for head in range(QUERY_HEADS):  # sketched keys have no rows of their own: the score's two parts are dotted
        query = qjl.query(cache.stream_keys, tokens[0][59, head].double().float())
        scores = (qjl.read_hadamard(cache.stream_keys, 0, rows) @ query).view(-1, HEADS)[:, head // 2]
        exact = torch.cat(keys)[:, head // 2].double() @ tokens[0][59, head].double()
        mass = (torch.cat((exact, scores.double())) * D**-0.5).softmax(0)
        assert (mass @ torch.cat(values)[:, head // 2].double() - got[head]).abs().max() < 2e-5


@kinds
def test_the_middle_and_the_stream_hold_the_right_tokens(settings):
    """Keys as far from the truth as their codes allow, in the right place and at the right position."""
    tokens = drawn(60)
    cache = made(settings)
    fed(cache, tokens, 40, 60)
    ours, true = middle_keys(cache.middle, 0, 24), tokens[1][4:28]
    assert (ours - true).square().sum() < 0.02 * true.square().sum()
    values = coded_rows.undo_hadamard(middle_values(cache.middle, 0, 24), cache.stream_values.signs)
    assert (values - tokens[2][4:28]).square().sum() < 0.1 * values.square().sum()
    held = coded_rows.read(cache.stream_values, 0, 20 * HEADS).view(20, HEADS, D)
    assert (held - tokens[2][28:48]).square().sum() < 0.06 * held.square().sum()
    rows = getattr(cache.stream_keys, "rows", cache.stream_keys)
    held = coded_rows.read(rows, 0, 20 * HEADS).view(20, HEADS, D)
    assert (held - tokens[1][28:48]).square().sum() < 0.2 * held.square().sum()
    assert cache.stream_values.norm[20 * HEADS :].eq(0).all(), "nothing is written beyond the last token"


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_undone_in_the_layout_of_the_layer(interleaved):
    """What is fitted are the keys before rotation: their mean is what the basis holds, to float16."""
    g = torch.Generator().manual_seed(0)
    plain = torch.randn(40, HEADS, D, generator=g) + 2
    keys = rope.rotate(plain, *rope.angles(torch.arange(40), SHAPE.freqs))  # neighbours
    if not interleaved:
        plain, keys = (x.unflatten(-1, (-1, 2)).mT.flatten(-2) for x in (plain, keys))
    cache = ShardCache(SHAPE._replace(interleaved=interleaved), SMALL, 40, 40, torch.float32, ON_CPU)
    cache.attend(torch.zeros(40, QUERY_HEADS, D), keys, torch.ones(40, HEADS, D))
    wanted = plain[4:28].mean(0).flatten()
    assert (cache.middle.keys.mean - wanted).abs().max() < wanted.abs().max() * 2.0**-10
    assert (keys[4:28].mean(0).flatten() - wanted).abs().max() > 0.5


def test_the_stream_at_8_bits_is_close_to_a_full_cache_and_does_not_drift():
    """No prompt, so that all error is the stream's; 5e-5 of the squares per key and value."""
    tokens = drawn(300)
    got = fed(made(prompt=0, context=300), tokens, 300)
    wanted = torch.stack([float64(tokens[0][i], tokens[1][: i + 1], tokens[2][: i + 1]) for i in range(300)])
    error = (got - wanted).square().sum((1, 2)) / wanted.square().sum((1, 2))
    assert error[:16].max() < 1e-10
    early, late = error[150:200].mean(), error[250:].mean()  # sixteen exact ones weigh little by then
    assert 1e-7 < early < 1e-3
    assert late < 1.5 * early


def test_the_stream_is_never_fitted():
    tokens = drawn(90)
    cache = made()
    fed(cache, tokens, 40)
    names = [name for name in cache.buffers() if name.startswith("middle")]
    before = {name: cache.buffers()[name].clone() for name in names}
    fed(cache, tokens, 90)
    assert all(torch.equal(cache.buffers()[name], before[name]) for name in names)


# --- however tokens come


@kinds
def test_calls_of_any_size_leave_the_same_bits(settings):
    tokens = drawn(70)
    one_by_one, wanted = made(settings), None
    fed(one_by_one, tokens, 40)
    wanted = fed(one_by_one, tokens, *range(41, 71))
    for cuts in ((70,), (47, 54, 61, 70)):
        cache = made(settings)
        fed(cache, tokens, 40)
        assert torch.equal(fed(cache, tokens, *cuts), wanted)
        for name, tensor in cache.buffers().items():
            assert torch.equal(tensor, one_by_one.buffers()[name]), name
    cache = made(settings)  # a call that crosses the prompt's end
    assert torch.equal(fed(cache, tokens, 30, 70)[40:], wanted)


@kinds
@pytest.mark.parametrize("position", [0, 39, 40, 41, 53])
def test_a_saved_cache_continues_to_the_bit(settings, position):
    tokens = drawn(70)
    cache = made(settings)
    ends = [p for p in (40, position) if p <= position]
    if position:
        fed(cache, tokens, *ends)
    saved = {name: tensor.clone() for name, tensor in cache.tensors(position).items()}
    other = made(settings)
    assert {name: tuple(tensor.shape) for name, tensor in saved.items()} == other.shapes(position)
    assert cache.shapes(100) == other.shapes(100)
    assert cache.shapes(9) == other.shapes(9)
    other.restore(position, saved)
    cuts = [p for p in (40, 60, 70) if p > position]
    assert torch.equal(fed(other, tokens, *cuts), fed(cache, tokens, *cuts))
    assert other.nbytes() == cache.nbytes()
    again = other.tensors(70)
    assert all(torch.equal(tensor, again[name]) for name, tensor in cache.tensors(70).items())
    other.restore(position, saved)  # and once more, from what lies behind it
    cache = made(settings)
    cache.restore(position, saved)
    assert torch.equal(fed(other, tokens, *cuts), fed(cache, tokens, *cuts))


def test_random_calls_agree_with_one_token_at_a_time():
    tokens, chance = drawn(60), random.Random(1)
    for prompt in (0, 1, 17, 30):
        slow, fast = made(prompt=prompt), made(prompt=prompt)
        wanted = fed(slow, tokens, *range(1, 61))
        cuts = sorted({*chance.sample(range(1, 60), 6), 60})
        assert (fed(fast, tokens, *cuts) - wanted).abs().max() < 1e-5
        assert all(torch.equal(tensor, slow.buffers()[name]) for name, tensor in fast.buffers().items())


# --- refusals


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"window": 0}, "window=0"),
        ({"sinks": -1}, "sinks=-1"),
        ({"allocation": "best"}, "allocation='best'"),
        ({"stream_bits": 5}, "stream_bits=5"),
        ({"rank": 191}, "rank=191"),
        ({"rank": 100, "allocation": "measured"}, "group=64"),
    ],
)
def test_settings_that_cannot_be(fields, named):
    with pytest.raises(ConfigError, match=named):
        ShardSettings(**fields)


@pytest.mark.parametrize(
    ("heads", "d", "settings", "named"),
    [
        (2, 96, ShardSettings(rank=128), "head_dim 96"),
        (1, 128, ShardSettings(), "rank=192 exceeds the 1 x 128"),
        (3, 32, ShardSettings(rank=64, allocation="measured"), "group=64 does not divide the 3 x 32"),
    ],
)
def test_settings_that_do_not_fit_the_layer(heads, d, settings, named):
    with pytest.raises(ConfigError, match=named):
        ShardCache(
            KvShape(all_heads(heads), d, torch.zeros(d // 2), interleaved=False), settings, 9, 9, torch.float32, ON_CPU
        )


def test_a_full_cache_refuses_the_next_token():
    cache, tokens = made(context=50), drawn(60)
    fed(cache, tokens, 40, 50)
    with pytest.raises(CapacityError, match="50 tokens cannot take token 50"):
        fed(cache, tokens, 51)
    with pytest.raises(CapacityError, match="cannot take token 59"):
        fed(made(context=50), tokens, 60)


@pytest.mark.parametrize(("which", "name"), [(1, "keys"), (2, "values")])
def test_a_prompt_that_is_no_number_trips(which, name):
    tokens = drawn(40)
    tokens[which][20, 1, 3] = torch.nan
    with pytest.raises(Tripwire, match=f"{name} at position 20"):
        fed(made(), tokens, 40)


def test_bits_of_groups_are_saved():
    cache = made(EVERY_KIND[1])
    fed(cache, drawn(40), 40)
    bits = cache.tensors(40)["middle.keys.bits"]
    assert bits.shape == (4,), "all groups that two bits each could reach are candidates"
    assert bits.tolist() != [4, 4, 0, 0]
    assert sum(bits.tolist()) == 8
    assert next(iter(eigenbasis._runs(cache.middle.keys)))[2] == bits[0]
