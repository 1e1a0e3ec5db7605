"""Caches: allocated once, read as views, saved and loaded bit-exactly, refused when they belong to something else."""

import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fathom.model.cache.window import WindowRing
from fathom.model.errors import StateError
from fathom.runtime.digest import digest
from fathom.runtime.load import load
from fathom.runtime.options import RunOptions
from fathom.runtime.statefile import load_state, read_saved, save_state
from tests.make_checkpoint import tiny_config, write_checkpoint

OPTIONS = RunOptions("deployed", "bf16", "cpu", 64)
CHUNK = 140  # of a run that is long: what a call costs hardly grows with its tokens
TOKENS = torch.randint(2, 300, (333,), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path, tiny_config(), seed=11)
    return path


@pytest.fixture(scope="module")
def loaded(directory):
    return load(directory, OPTIONS)


def run(model, state, tokens):
    return torch.cat([model.logits(model(part, state)) for part in tokens.split(state.chunk)])


def test_nbytes_is_what_the_config_says(loaded):
    config = loaded.model.config
    context, chunk = 1000, 64
    state = loaded.model.new_state(context, chunk)
    layers = {ratio: config.compress_ratios.count(ratio) for ratio in (0, 4, 128)}
    d, di = config.head_dim, config.index_head_dim
    assert state.nbytes() == {
        "window": sum(layers.values()) * (config.sliding_window + chunk - 1) * d * 2,
        "entries": (layers[4] * (context // 4) + layers[128] * (context // 128)) * d * 2,
        "indexer_keys": layers[4] * (context // 4) * di * 2,
        # fp32: values and gates of the open window's tokens; with overlap of two series, and of the window before
        "frontier": 4 * 2 * (layers[4] * 8 * 2 * d + layers[128] * 128 * d),
        "indexer_frontier": 4 * 2 * layers[4] * 8 * 2 * di,
    }


def test_buffers_stay_where_they_are(loaded):
    state = loaded.model.new_state(400, 64)
    csa = state.layers[1]
    buffers = [csa.ring.data, csa.entries.data, csa.keys.data, csa.frontier.kv, csa.key_frontier.gate]
    before = [buffer.data_ptr() for buffer in buffers]
    run(loaded.model, state, TOKENS)
    after = [csa.ring.data, csa.entries.data, csa.keys.data, csa.frontier.kv, csa.key_frontier.gate]
    assert [buffer.data_ptr() for buffer in after] == before
    assert csa.entries.view().data_ptr() == csa.entries.data.data_ptr(), "a read is a view"
    assert csa.keys.view().shape == (333 // 4, loaded.model.config.index_head_dim)


def test_the_ring_holds_each_position_in_its_row():
    ring = WindowRing(window=5, chunk=3, width=1, dtype=torch.float32, device=torch.device("cpu"))
    position = 0
    for length in (3, 1, 2, 3, 3, 1, 1, 3, 2):
        ring.write(position, torch.arange(position, position + length).float()[:, None])
        position += length
        held = range(max(0, position - 7), position)
        assert all(ring.data[p % 7, 0] == p for p in held)
        assert ring.tensors(position)["recent"].flatten().tolist() == list(range(max(0, position - 4), position))


@pytest.mark.parametrize("at", [1, 3, 4, 127, 128, 130, 255, 256, 300])
def test_a_loaded_state_continues_bit_exactly(loaded, tmp_path, at):
    straight = loaded.model.new_state(333, CHUNK)
    run(loaded.model, straight, TOKENS[:at])
    path = tmp_path / "state.safetensors"
    save_state(path, straight, loaded, pending=17)
    assert (read_saved(path, loaded).position, read_saved(path, loaded).pending) == (at, 17)
    resumed = loaded.model.new_state(700, CHUNK)  # a larger context takes it too
    assert load_state(path, resumed, loaded) == 17
    rest = TOKENS[at:]
    assert torch.equal(run(loaded.model, resumed, rest), run(loaded.model, straight, rest))


def test_another_chunk_size_may_continue(loaded, tmp_path):
    state = loaded.model.new_state(333, 64)
    run(loaded.model, state, TOKENS[:200])
    save_state(tmp_path / "s", state, loaded, pending=None)
    resumed = loaded.model.new_state(333, 7)
    assert load_state(tmp_path / "s", resumed, loaded) is None
    one, other = run(loaded.model, state, TOKENS[200:207]), run(loaded.model, resumed, TOKENS[200:207])
    assert torch.equal(one, other), "the same call over the same cache contents"


@pytest.fixture(scope="module")
def saved_once(loaded, tmp_path_factory):
    state = loaded.model.new_state(333, 64)
    run(loaded.model, state, TOKENS[:150])
    path = tmp_path_factory.mktemp("saved") / "state"
    save_state(path, state, loaded, pending=5)
    return path


@pytest.fixture
def saved(saved_once, tmp_path):
    return shutil.copy(saved_once, tmp_path / "state")


@pytest.mark.parametrize("where", [0.02, 0.3, 0.6, 0.99])
def test_a_flipped_bit_is_refused(loaded, saved, where):
    content = bytearray(saved.read_bytes())
    content[int(len(content) * where)] ^= 1
    saved.write_bytes(content)
    with pytest.raises(StateError, match=str(saved)):
        load_state(saved, loaded.model.new_state(333, 64), loaded)


@pytest.mark.parametrize("kept", [0, 4, 100, 5000])
def test_a_truncated_file_is_refused(loaded, saved, kept):
    saved.write_bytes(saved.read_bytes()[:kept])
    with pytest.raises(StateError, match=str(saved)):
        load_state(saved, loaded.model.new_state(333, 64), loaded)


@pytest.mark.parametrize(
    ("change", "culprit"),
    [
        ({"pending": "999999"}, "pending"),
        ({"position": "9" * 5000}, "position"),
        ({"position": "-1"}, "position"),
        ({"position": "3"}, "want"),
        ({"layers.0.window.recent": torch.zeros(15, 5, dtype=torch.bfloat16)}, "layers.0.window"),
        ({"layers.1.indexer_keys.rows": torch.zeros(37, 32)}, "layers.1.indexer_keys"),
        ({"layers.9.window": torch.zeros(1)}, "layers.9.window"),
    ],
)
def test_a_made_up_file_with_the_right_checksum_is_refused(loaded, saved, change, culprit):
    with safe_open(saved, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del metadata["sha256"]
    metadata |= {key: value for key, value in change.items() if isinstance(value, str)}
    tensors |= {key: value for key, value in change.items() if not isinstance(value, str)}
    save_file(tensors, saved, metadata | {"sha256": digest(tensors, metadata)})
    state = loaded.model.new_state(333, 64)
    with pytest.raises(StateError, match=culprit):
        load_state(saved, state, loaded)
    assert state.position == 0


def test_a_context_too_small_is_refused(loaded, saved):
    with pytest.raises(StateError, match="holds 150 tokens, --max-context is 149"):
        load_state(saved, loaded.model.new_state(149, 64), loaded)


def test_a_state_of_other_weights_config_or_numerics_is_refused(saved, directory, tmp_path):
    def refused(other, match):
        with pytest.raises(StateError, match=match):
            load_state(saved, other.model.new_state(333, 64), other)

    write_checkpoint(tmp_path / "reseeded", tiny_config(), seed=12)
    refused(load(tmp_path / "reseeded", OPTIONS), "weights")
    write_checkpoint(tmp_path / "reshaped", tiny_config(index_topk=9), seed=11)
    refused(load(tmp_path / "reshaped", OPTIONS), "config")
    refused(load(directory, RunOptions("plain", "bf16", "cpu", 64)), "numerics")
    refused(load(directory, RunOptions("linears=fp8,kv=fp8,index=fp8", "bf16", "cpu", 64)), "numerics")
    refused(load(directory, RunOptions("deployed", "fp32", "cpu", 64)), "dtype")
    copy = shutil.copytree(directory, tmp_path / "copy")  # the same model elsewhere is the same model
    other = load(copy, OPTIONS)
    assert load_state(saved, other.model.new_state(333, 64), other) == 5
