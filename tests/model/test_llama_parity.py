"""Logits of Llama-family models equal transformers' on the same files, however the tokens are cut into calls."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from fathom.kernels.ops import CPU, REFERENCE
from fathom.model.cache.full import FullCache
from fathom.model.errors import Tripwire
from tests.llama_model import LLAMA3, load_ours, oracle, their_logits
from tests.transformers_model import our_logits

BOUND = 1e-5  # of logits of unit scale, in fp32; the project promises 1e-3
TOKENS = torch.randint(96, (53,), generator=torch.Generator().manual_seed(1))

CASES = {
    "heads 1 to 1": ("llama", {"num_key_value_heads": 4}),
    "heads 2 to 1": ("llama", {}),
    "heads 4 to 1, theta 500000": ("llama", {"num_key_value_heads": 1, "rope": {"rope_theta": 500000.0}}),
    "head_dim 12, where hidden / heads is 8": ("llama", {"head_dim": 12}),
    "llama3 scaling": ("llama", {"rope": LLAMA3, "head_dim": 16}),
    "llama3 scaling, factor 32, theta 500000": (
        "llama",
        {"rope": LLAMA3 | {"factor": 32.0, "rope_theta": 500000.0}, "head_dim": 32, "num_key_value_heads": 1},
    ),
    "linear scaling": ("llama", {"rope": {"rope_type": "linear", "factor": 4.0}}),
    "tied head": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"head_dim": 10}),
    "mistral, theta 1000000, tied": ("mistral", {"rope": {"rope_theta": 1e6}, "tie_word_embeddings": True}),
    "mistral, window 7": ("mistral", {"sliding_window": 7}),
    "mistral, window 60": ("mistral", {"sliding_window": 60}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case, tmp_path):
    kind, changes = CASES[case]
    theirs = oracle(kind, seed=len(case), **changes)
    theirs.save_pretrained(tmp_path)
    wanted = their_logits(theirs, TOKENS)
    assert 0.3 < wanted.std() < 3, "logits of unit scale"
    for ops in (CPU, REFERENCE):
        found = our_logits(load_ours(tmp_path, ops).model, TOKENS)
        assert (found - wanted).abs().max() < BOUND, ops.name


@pytest.mark.parametrize("seed", range(4))
def test_random_shapes(seed, tmp_path):
    def draw(*choices):
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    generator = torch.Generator().manual_seed(seed)
    kv_heads, ratio = draw(1, 2, 3), draw(1, 2, 4)
    changes = {
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * ratio,
        "hidden_size": kv_heads * ratio * draw(4, 6),
        "head_dim": draw(None, 8, 14),
        "intermediate_size": draw(17, 40),
        "num_hidden_layers": draw(1, 2, 4),
        "tie_word_embeddings": draw(False, True),
        "rope": draw({}, LLAMA3) | {"rope_theta": draw(100.0, 10000.0, 500000.0)},
        "rms_norm_eps": draw(1e-5, 1e-6),
    }
    theirs = oracle(draw("llama", "mistral"), seed=seed, **changes)
    theirs.save_pretrained(tmp_path)
    found = our_logits(load_ours(tmp_path).model, TOKENS)
    assert (found - their_logits(theirs, TOKENS)).abs().max() < BOUND


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    oracle("mistral", rope=LLAMA3, head_dim=16, sliding_window=20).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("chunk", [1, 3, 7, "19, then one at a time"])
def test_chunks_and_decode_change_rounding_only(saved, chunk):
    model, t = load_ours(saved).model, len(TOKENS)
    lengths = (
        [19] + [1] * (t - 19) if isinstance(chunk, str) else [chunk] * (t // chunk) + [t % chunk] * (t % chunk > 0)
    )
    assert (our_logits(model, TOKENS, lengths) - our_logits(model, TOKENS)).abs().max() < BOUND


def test_the_window_matters(saved, tmp_path):
    """Without it the same weights give other logits, from the token on that it cuts off from the first."""
    config = json.loads((saved / "config.json").read_text())
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).write_bytes((saved / name).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": None}))
    windowed, whole = (our_logits(load_ours(directory).model, TOKENS) for directory in (saved, tmp_path))
    apart = (windowed - whole).abs().amax(1)
    assert (apart[:20] == 0).all()
    assert (apart[20:] > 1e-3).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_16_bits_are_used_as_stored(dtype, tmp_path):
    oracle().to(dtype).save_pretrained(tmp_path)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {dtype}
    loaded = load_ours(tmp_path)
    assert loaded.model.blocks[0].attention.q_proj.weight.data.dtype == dtype
    theirs = LlamaForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32
    ).eval()  # `.to` had rounded its inv_freq too
    assert (our_logits(loaded.model, TOKENS) - their_logits(theirs, TOKENS)).abs().max() < BOUND


def test_bf16_stays_near_fp32(saved):
    """8 bits of mantissa, over 3 layers: a few hundredths of logits of unit scale."""
    narrow, wide = (our_logits(load_ours(saved, dtype=dtype).model, TOKENS) for dtype in ("bf16", "fp32"))
    assert 1e-4 < (narrow - wide).abs().max() < 0.25
    assert (narrow - wide).abs().mean() < 0.03


def test_the_published_spelling_gives_the_same_model(tmp_path):
    """`rope_theta` and `rope_scaling` as Llama 3.1's file writes them, and the buffers of Llama 2's files."""
    theirs = oracle(rope=LLAMA3 | {"rope_theta": 500000.0})
    theirs.save_pretrained(tmp_path)
    before = load_ours(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "torch_dtype": config.pop("dtype")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.full((4,), 7.0) for n in range(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    after = load_ours(tmp_path)
    assert after.model.config == before.model.config
    assert len(after.census.ignored) == 3
    assert set(after.census.ignored.values()) == {"rotary buffer: recomputed from the config"}
    assert torch.equal(our_logits(after.model, TOKENS), our_logits(before.model, TOKENS))


def test_the_full_cache_holds_what_its_config_says(saved):
    state = load_ours(saved).model.new_state(100, 8)
    assert all(isinstance(cache, FullCache) for cache in state.layers)
    one = 2 * 100 * 16 * 4  # KV heads, positions, head_dim, bytes of fp32
    assert state.nbytes() == {"keys": 3 * one, "values": 3 * one}


def test_buffers_stay_where_they_are(saved):
    model = load_ours(saved).model
    state = model.new_state(len(TOKENS), 8)
    before = [buffer.data.data_ptr() for cache in state.layers for buffer in (cache.keys, cache.values)]
    for part in TOKENS.split(8):
        model(part, state)
    assert before == [buffer.data.data_ptr() for cache in state.layers for buffer in (cache.keys, cache.values)]
    assert state.position == len(TOKENS)


@pytest.mark.parametrize(
    ("site", "layer", "poison"),
    [
        ("attention.stream", 1, lambda m: (m.blocks[1], "attention_norm")),
        ("stream", 0, lambda m: (m.blocks[0], "feed_forward_norm")),
        ("hidden", None, lambda m: (m, "norm")),
    ],
)
def test_a_nan_trips_where_it_is_first_seen(tmp_path, site, layer, poison):
    oracle().save_pretrained(tmp_path)
    model = load_ours(tmp_path).model
    owner, name = poison(model)
    setattr(owner, name, getattr(owner, name) * math.nan)
    with pytest.raises(Tripwire) as trip:
        model(torch.arange(3), model.new_state(8, 8))
    assert (trip.value.site, trip.value.layer, trip.value.position) == (site, layer, 0)


def test_a_cache_that_does_not_stand_where_the_position_says_trips(tmp_path):
    oracle().save_pretrained(tmp_path)
    model = load_ours(tmp_path).model
    state = model.new_state(8, 8)
    model(torch.arange(3), state)
    state.layers[1].position = 2
    with pytest.raises(Tripwire, match=r"attention\.kv of layer 1 at position 3: 2, expected 3"):
        model(torch.arange(1), state)
