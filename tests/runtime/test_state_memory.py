"""Loading a state takes no more than two layers' room beside the caches and the mapped file, however many layers."""

import pytest
import torch

from fathom.model.errors import StateError
from fathom.runtime.digest import digest
from fathom.runtime.generate import prefill
from fathom.runtime.load import load_any
from fathom.runtime.options import RunOptions
from fathom.runtime.quantised_state import load_any_state, quantise_state
from fathom.runtime.statefile import check_forms, checked_file, load_state, read_file, save_state
from tests.llama_model import oracle
from tests.peak_memory import peak_bytes

N = 240
TOKENS = torch.randint(2, 96, (N,), generator=torch.Generator().manual_seed(5)).tolist()
CODA = "all=coda:window=100,exact=60,summary=60"
LARGEST = 2 * N * 32 * 4  # bytes: keys of one layer's full cache, 2 heads of 32 in fp32
SMALL = 1 << 12  # bytes: metadata tensors, views


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    oracle(hidden_size=64, head_dim=32, num_hidden_layers=6).save_pretrained(path)
    return path


def saved(directory, path, kv):
    loaded = load_any(directory, RunOptions("plain", "fp32", kv=(kv,)))
    state = loaded.model.new_state(N, 64, N)
    prefill(loaded.model, state, TOKENS, lambda _: None)
    save_state(path, state, loaded, None)
    return loaded, state


def taken(path, run):
    """Peak of what is allocated, without the mapping of the file: the profiler counts that, opened or read."""
    return peak_bytes(run) - path.stat().st_size


def same(one, other):
    for ours, theirs in zip(one.layers, other.layers, strict=True):
        held = theirs.tensors(N)
        assert all(torch.equal(part, held[name]) for name, part in ours.tensors(N).items())


def test_a_full_state_is_loaded_tensor_by_tensor(directory, tmp_path):
    loaded, state = saved(directory, tmp_path / "s", "all=full")
    other = loaded.model.new_state(N, 64, N)
    assert taken(tmp_path / "s", lambda: load_state(tmp_path / "s", other, loaded)) <= LARGEST + SMALL
    same(state, other)
    assert sum(part.nbytes for part in read_file(tmp_path / "s")[0].values()) == 12 * LARGEST


@pytest.mark.parametrize("kv", [CODA, "all=shard:rank=16"])
def test_other_states_take_less_than_two_of_their_six_layers(directory, tmp_path, kv):
    """Checks of a bounded cache, and the codes of one that is decoded, are made layer by layer."""
    loaded, state = saved(directory, tmp_path / "s", kv)
    layer = sum(part.nbytes for part in state.layers[0].tensors(N).values())
    paths = [tmp_path / "s"]
    if kv == CODA:
        quantise_state(tmp_path / "s", 8, tmp_path / "q")
        paths.append(tmp_path / "q")
    for path in paths:
        other = loaded.model.new_state(N, 64, N)
        assert taken(path, lambda path=path, other=other: load_any_state(path, other, loaded)) <= 2 * layer, path
    other = loaded.model.new_state(N, 64, N)
    load_any_state(tmp_path / "s", other, loaded)
    same(state, other)


def test_the_checksum_is_the_same_tensor_by_tensor(directory, tmp_path):
    saved(directory, tmp_path / "s", CODA)
    tensors, metadata = read_file(tmp_path / "s")
    with checked_file(tmp_path / "s") as (lazy, told):
        assert told == metadata
        assert digest(lazy, told) == digest(tensors, metadata)
        assert lazy.forms == {name: (tuple(part.shape), part.dtype) for name, part in tensors.items()}
        assert "other" not in lazy


def test_a_form_that_is_not_wanted_is_told_with_the_wanted_one(tmp_path):
    path = tmp_path / "s"
    with pytest.raises(StateError, match=r"s: 'a' is \[2\] torch.int8, want \[2\] torch.uint8$"):
        check_forms(path, {"a": ((2,), torch.int8)}, {"a": ((2,), torch.uint8)})
