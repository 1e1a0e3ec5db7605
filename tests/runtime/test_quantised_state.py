"""States in 8 and 4 bits: how large, how far from the exact ones, and what is refused."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fathom.kernels.formats.lloyd_max import distortion
from fathom.model.errors import StateError
from fathom.runtime.digest import digest
from fathom.runtime.generate import prefill
from fathom.runtime.load import load, load_any
from fathom.runtime.options import RunOptions
from fathom.runtime.quantised_state import coded_bits, load_any_state, quantise_state, read_any_saved
from fathom.runtime.statefile import FORMAT, load_state, read_file, save_state, write_file
from tests.llama_model import oracle
from tests.make_checkpoint import tiny_config, write_checkpoint

KV = ("all=coda:window=6,exact=4,summary=4,block=8",)
TOKENS = torch.randint(2, 96, (70,), generator=torch.Generator().manual_seed(5)).tolist()
LAYERS, HEADS, SLOTS, D = 3, 2, 14, 8


def loaded_with(path, kv=KV, dtype="fp32"):
    return load_any(path, RunOptions("plain", dtype, kv=kv))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    oracle().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def loaded(directory):
    return loaded_with(directory)


def saved(loaded, path, tokens=TOKENS):
    state = loaded.model.new_state(len(tokens), 16, len(tokens))
    prefill(loaded.model, state, tokens, lambda _: None)
    save_state(path, state, loaded, None)
    return state


def loaded_state(loaded, path, context=100):
    state = loaded.model.new_state(context, 16, len(TOKENS))
    assert load_any_state(path, state, loaded) is None
    return state


@pytest.mark.parametrize(("bits", "dtype", "coded"), [(8, "fp32", 10), (4, "fp32", 6), (8, "bf16", 10), (4, "bf16", 6)])
def test_the_size_is_the_counted_one(directory, tmp_path, bits, dtype, coded):
    """A row of 8 numbers: 8 bits each and a length in 2 bytes are 10 bytes, of 32 in fp32 and of 16 in bf16."""
    loaded = loaded_with(directory, dtype=dtype)
    saved(loaded, tmp_path / "exact")
    sizes = quantise_state(tmp_path / "exact", bits, tmp_path / "coded")
    rows = LAYERS * 2 * HEADS * SLOTS
    assert (sizes.rows, sizes.coded) == (rows * D * (4 if dtype == "fp32" else 2), rows * coded)
    targets = LAYERS * HEADS * (4 + 4) * 4  # inverse norms, which follow from the rows
    assert sizes.before - sizes.after == sizes.rows - sizes.coded + targets
    tensors, metadata = read_file(tmp_path / "coded")
    assert sum(part.nbytes for part in tensors.values()) == sizes.after
    assert (metadata["format"], metadata["bits"]) == ("fathom-coded-state-1", str(bits))
    assert coded_bits(tmp_path / "coded") == bits
    assert coded_bits(tmp_path / "exact") is None
    assert (tmp_path / "coded").stat().st_size < (tmp_path / "exact").stat().st_size


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_are_as_near_as_the_codebook_and_all_else_is_equal(loaded, tmp_path, bits):
    """The codebook's error is that of normal numbers; a row of 8 is not quite normal, so up to four times as much."""
    exact = saved(loaded, tmp_path / "exact")
    quantise_state(tmp_path / "exact", bits, tmp_path / "coded")
    again = loaded_state(loaded, tmp_path / "coded")
    assert again.position == exact.position == 70
    for ours, theirs in zip(exact.layers, again.layers, strict=True):
        a, b = ours.tensors(70), theirs.tensors(70)
        for name in ("coda.used", "coda.gates", "coda.last_used", "coda.active", "coda.counts"):
            assert torch.equal(a[name], b[name]), name
        for name in ("coda.keys", "coda.values"):
            error = (a[name] - b[name]).square().sum(-1) / a[name].square().sum(-1)
            assert 0.2 * distortion(bits) < error.nanmean() < 4 * distortion(bits)
        bank = theirs.coda.summary
        assert bool((bank.keys[..., bank.blend == 0] == 0).all()), "rotated, half of it is minus the other half"
        assert bool((bank.keys[..., bank.blend > 0] != 0).any())
        norms = theirs.coda.values[:, 6:10].norm(dim=-1)
        assert torch.allclose(b["coda.exact_targets"], 1 / norms.clamp(min=1e-6), rtol=1e-6), "of the rows as decoded"


def test_the_loss_of_a_continuation_is_bounded_and_shrinks_with_bits(loaded, tmp_path):
    saved(loaded, tmp_path / "exact")
    states = [loaded_state(loaded, tmp_path / "exact")]
    for bits in (8, 4):
        quantise_state(tmp_path / "exact", bits, tmp_path / "coded")
        states.append(loaded_state(loaded, tmp_path / "coded"))
    more = torch.tensor(TOKENS[:9])
    wanted, *coded = [loaded.model.logits(loaded.model(more, state)).log_softmax(-1) for state in states]
    nats = [float((wanted.exp() * (wanted - found)).sum(-1).mean()) for found in coded]
    assert 0 < nats[0] < 1e-4
    assert 10 * nats[0] < nats[1] < 2e-2


def test_a_coded_state_continues_the_same_wherever_it_is_loaded(directory, loaded, tmp_path):
    saved(loaded, tmp_path / "exact")
    quantise_state(tmp_path / "exact", 4, tmp_path / "coded")
    first, second = (
        loaded_state(each, tmp_path / "coded", n) for each, n in ((loaded, 90), (loaded_with(directory), 79))
    )
    more = torch.tensor(TOKENS[:9])
    assert torch.equal(loaded.model(more, first), loaded.model(more, second))


def test_renewing_what_was_not_replaced_changes_no_bit(loaded, tmp_path):
    state = saved(loaded, tmp_path / "exact")
    for cache in state.layers:
        before = {name: part.clone() for name, part in cache.tensors(70).items()}
        cache.coda.renew()
        assert all(torch.equal(part, before[name]) for name, part in cache.tensors(70).items())


def test_layers_without_a_bounded_cache_stay_exact(directory, tmp_path):
    loaded = loaded_with(directory, ("1=coda:window=6,exact=4,summary=4",))
    exact = saved(loaded, tmp_path / "exact")
    quantise_state(tmp_path / "exact", 8, tmp_path / "coded")
    again = loaded_state(loaded, tmp_path / "coded")
    for layer, same in ((0, True), (1, False), (2, True)):
        ours, theirs = (state.layers[layer].tensors(70) for state in (exact, again))
        assert all(torch.equal(part, theirs[name]) for name, part in ours.items()) is same


def test_what_is_no_exact_state_of_a_bounded_cache_is_refused(directory, loaded, tmp_path):
    saved(loaded, tmp_path / "exact")
    quantise_state(tmp_path / "exact", 8, tmp_path / "coded")
    out = tmp_path / "out"
    with pytest.raises(StateError, match="coded: has format 'fathom-coded-state-1', want an exact state, 'fathom"):
        quantise_state(tmp_path / "coded", 4, out)
    full = loaded_with(directory, ())
    saved(full, tmp_path / "full")
    with pytest.raises(StateError, match=r"full: no layer has a bounded cache"):
        quantise_state(tmp_path / "full", 8, out)
    with pytest.raises(StateError, match="saved with format 'fathom-coded-state-1', this run has 'fathom-state-5'"):
        load_state(tmp_path / "coded", loaded.model.new_state(80, 16), loaded)
    with pytest.raises(StateError, match="saved with kv "):
        read_any_saved(tmp_path / "coded", loaded_with(directory, ("all=coda:window=7,exact=4,summary=4,block=8",)))
    assert not out.exists()


def test_a_state_of_v4_has_nothing_to_be_coded(tmp_path):
    write_checkpoint(tmp_path, tiny_config(), seed=11)
    loaded = load(tmp_path, RunOptions("deployed", "bf16", "cpu", 64, kv=("hca=coda:window=4",)))
    state = loaded.model.new_state(64, 64)
    prefill(loaded.model, state, list(range(2, 40)), lambda _: None)
    save_state(tmp_path / "state", state, loaded, None)
    with pytest.raises(StateError, match="no layer has a bounded cache of keys and values"):
        quantise_state(tmp_path / "state", 8, tmp_path / "out")
    assert load_any_state(tmp_path / "state", loaded.model.new_state(64, 64), loaded) is None


def test_rows_that_cannot_be_coded_are_refused(loaded, tmp_path):
    name = "layers.1.coda.values"
    saved(loaded, tmp_path / "exact")
    tensors, metadata = read_file(tmp_path / "exact")
    for part, says in (
        (torch.ones(2, 14, 12), "layers.1.coda.values is 12 wide; only rows whose width is a power of two"),
        (torch.ones(2, 14, 8, dtype=torch.int32), r"is \[2, 14, 8\] torch.int32, want rows"),
        (torch.full((2, 14, 8), 1e5), "has a row whose length float16 cannot hold"),
    ):
        write_file(tmp_path / "made", tensors | {name: part}, metadata)
        with pytest.raises(StateError, match=says):
            quantise_state(tmp_path / "made", 8, tmp_path / "out")


@pytest.mark.parametrize("what", ["codes", "norm", "bits", "missing", "more"])
def test_a_coded_file_with_another_form_is_refused_whatever_its_checksum(loaded, tmp_path, what):
    saved(loaded, tmp_path / "exact")
    quantise_state(tmp_path / "exact", 8, tmp_path / "coded")
    tensors, metadata = read_file(tmp_path / "coded")
    name = "layers.0.coda.keys"
    match what:
        case "codes":
            tensors[f"{name}.codes"] = tensors[f"{name}.codes"][:, :4].contiguous()
            says = r"'layers.0.coda.keys.codes' is \[28, 4\] torch.uint8, want \[28, 8\]"
        case "norm":
            tensors[f"{name}.norm"] = tensors[f"{name}.norm"].float()
            says = r"'layers.0.coda.keys.norm' is \[28\] torch.float32"
        case "bits":
            metadata["bits"], says = "9", "bits is '9', want 8 or 4"
        case "missing":
            del tensors[f"{name}.norm"]
            says = "holds other tensors than this model's state, 'layers.0.coda.keys.norm'"
        case "more":
            tensors["layers.0.coda.keys"], says = torch.ones(2, 14, 8), "holds other tensors"
    write_file(tmp_path / "made", tensors, metadata)
    with pytest.raises(StateError, match=says):
        load_any_state(tmp_path / "made", loaded.model.new_state(80, 16), loaded)


def test_a_flipped_bit_in_a_code_is_found(loaded, tmp_path):
    saved(loaded, tmp_path / "exact")
    quantise_state(tmp_path / "exact", 8, tmp_path / "coded")
    with safe_open(tmp_path / "coded", framework="pt") as file:
        metadata, tensors = dict(file.metadata()), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tensors["layers.2.coda.keys.codes"][3, 1] ^= 1
    save_file(tensors, tmp_path / "coded", metadata)
    with pytest.raises(StateError, match="does not match its checksum"):
        load_any_state(tmp_path / "coded", loaded.model.new_state(80, 16), loaded)
    assert metadata.pop("sha256") != digest(tensors, metadata)
    assert metadata["format"] != FORMAT
