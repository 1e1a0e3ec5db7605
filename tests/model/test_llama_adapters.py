"""CoDA-GQA-L adapters over a Llama model: logits are the package's, with a full cache and with a bounded one."""

import re
import struct
import zipfile
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.checkpoint.weights import fingerprint
from fathom.model.errors import CheckpointError, ConfigError
from fathom.model.llama.adapters import check_adapters, read_adapters
from fathom.model.llama.config import LlamaConfig
from fathom.model.llama.trained import Trained
from fathom.runtime.kv import variants
from fathom.runtime.load import load_any
from fathom.runtime.options import RunOptions
from fathom.runtime.sharding import sharding_plan
from tests.coda_adapters import BLOCK, SIZES, adapted, write_pt, write_safetensors
from tests.transformers_model import our_logits

TOKENS = torch.randint(96, (61,), generator=torch.Generator().manual_seed(2))
BOUND = 1e-4  # of logits of unit scale, after two layers; the cache alone is held to 2e-5 by test_coda_parity
BOUNDED = f"all=coda:window={SIZES['window']},exact=6,summary=5,block={BLOCK},published=1"
CPU = torch.device("cpu")


def ours(directory, adapters, *kv):
    return load_any(
        directory, RunOptions("plain", "fp32", kv=kv, coda_adapters=None if adapters is None else str(adapters))
    )


@torch.no_grad()
def theirs(model, calls):
    """Logits of the package's stateful model: it knows positions and past by itself."""
    return torch.cat([model(part[None], use_cache=False).logits[0] for part in calls])


@pytest.mark.parametrize("norm", ["identity", "full"])
@pytest.mark.parametrize("write", [write_pt, write_safetensors])
def test_unbounded_logits_are_the_packages(tmp_path, norm, write):
    model, adapters = adapted(tmp_path, bounded=False, norm=norm)
    write(tmp_path / "coda_adapters", adapters)
    loaded = ours(tmp_path, tmp_path / "coda_adapters")
    wanted = theirs(model, [TOKENS])
    assert 0.2 < wanted.std() < 3
    assert (our_logits(loaded.model, TOKENS) - wanted).abs().max() < BOUND
    plain = our_logits(ours(tmp_path, None).model, TOKENS)
    assert (plain - wanted).abs().max() > 0.5, "the adapters matter"


@pytest.mark.parametrize("lengths", [[61], [40] + [1] * 21, [1] * 61, [7, 1, 30, 1, 1, 21]])
def test_bounded_logits_are_the_packages(tmp_path, lengths):
    model, adapters = adapted(tmp_path, bounded=True)
    write_safetensors(tmp_path / "coda_adapters.safetensors", adapters)
    loaded = ours(tmp_path, tmp_path / "coda_adapters.safetensors", BOUNDED)
    state = loaded.model.new_state(61, 61)
    for adapter, cache in zip(adapters, state.layers, strict=True):
        start = adapter.init_inference_state(1, CPU, torch.float32)
        cache.coda.settings = replace(cache.coda.settings, candidate_order="unsorted")  # the package's own, undefined
        cache.coda.keys.copy_(start.k_buf[0])  # the slots' random content
        cache.coda.values.copy_(start.v_buf[0])
        for bank in (cache.coda.exact, cache.coda.summary):
            bank.targets.refresh(torch.arange(bank.size))
    calls = TOKENS.split(lengths)
    wanted = theirs(model, calls)
    found = torch.cat([loaded.model.logits(loaded.model(part, state)) for part in calls])
    assert (found - wanted).abs().max() < BOUND
    whole = our_logits(ours(tmp_path, tmp_path / "coda_adapters.safetensors").model, TOKENS)
    assert (whole - wanted)[30:].abs().max() > 0.05, "the bounded cache forgets something"
    metrics = state.layers[0].coda.metrics()
    assert metrics["total_evictions"] == 49
    assert metrics["summary_updates"] + metrics["summary_inserts"] > 0


def test_learnt_rates_reach_the_summary_bank(tmp_path):
    _, adapters = adapted(tmp_path, bounded=True)
    write_pt(tmp_path / "coda_adapters.pt", adapters)
    state = ours(tmp_path, tmp_path / "coda_adapters.pt", BOUNDED).model.new_state(20, 20)
    for adapter, cache in zip(adapters, state.layers, strict=True):
        assert torch.equal(cache.coda.summary.eta, adapter.coda.summary_eta_logit.sigmoid())


def test_a_file_of_the_first_phase_gates_all_tokens_alike(tmp_path):
    """It has neither gate nor rates: the package leaves both as initialised."""
    _, adapters = adapted(tmp_path, bounded=False)
    write_pt(tmp_path / "phase1.pt", adapters)
    loaded = ours(tmp_path, tmp_path / "phase1.pt", BOUNDED)
    state = loaded.model.new_state(20, 20)
    loaded.model(TOKENS[:15], state)
    coda = state.layers[1].coda
    assert torch.allclose(coda.gates, torch.full((12,), 0.11920292), atol=1e-7)
    assert torch.allclose(coda.summary.eta, torch.full((2,), 0.04742587), atol=1e-7)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """A checkpoint, and adapters that say what they were trained over and for."""
    directory = tmp_path_factory.mktemp("trained")
    _, adapters = adapted(directory, bounded=True)
    config, weights = LlamaConfig.from_file(directory / "config.json"), fingerprint(Checkpoint.open(directory))
    trained_for = Trained(config.fingerprint, weights, BOUNDED.removeprefix("all="))

    def write(**changes):
        path = directory / "adapters.safetensors"
        save_file(changed(adapters, lambda _: None), path, trained_for.metadata() | changes)
        return directory, path

    return write


KV, UNTOLD = BOUNDED.removeprefix("all="), BOUNDED.removeprefix("all=").removesuffix(",published=1")


@pytest.mark.parametrize("kv", [(), (BOUNDED,), ("0=full", "1=shard:rank=4"), (f"all={UNTOLD},untrained=1",)])
def test_adapters_run_with_the_cache_they_were_trained_for_or_where_it_is_asked_for(told, kv):
    directory, path = told()
    assert len(ours(directory, path, *kv).model.adapters) == 2


@pytest.mark.parametrize(
    ("changes", "kv", "words"),
    [
        ({}, f"all={UNTOLD}", f"trained for {KV}, layer 0 has {UNTOLD}; untrained=1 runs it all the same"),
        ({}, f"1={UNTOLD}", f"trained for {KV}, layer 1 has {UNTOLD}; untra"),
        ({"kv": "full"}, BOUNDED, f"trained for full, layer 0 has {KV}"),
        ({"weights": "0" * 64}, "all=full", f"trained over weights '{'0' * 64}', the model has "),
        ({"config": "no"}, "all=full", "trained over config 'no', the model has "),
        ({"fathom": "fathom-coda-adapters-9"}, "all=full", "metadata is of 'fathom-coda-adapters-9', want 'fathom-"),
        ({"kv": "\n"}, "all=full", "metadata is of 'fathom-coda-adapters-1', want"),
    ],
)
def test_adapters_that_were_trained_for_something_else_are_refused(told, changes, kv, words):
    directory, path = told(**changes)
    with pytest.raises(CheckpointError) as refused:
        ours(directory, path, kv)
    assert str(refused.value).startswith(f"{path}: {words}")
    if "weights" not in changes:  # which a plan does not read
        config = LlamaConfig.from_file(directory / "config.json")
        with pytest.raises(CheckpointError, match=re.escape(words)):
            check_adapters(path, config, variants([kv], config))


def test_settings_that_would_have_no_effect_are_refused(told):
    directory, path = told(kv="coda:window=12,exact=6,summary=5,block=8,eta_logit=-2.0")
    with pytest.raises(ConfigError, match=r"layer 0 has eta_logit=-2.0, the adapters have learnt theirs"):
        ours(directory, path, f"all={UNTOLD},eta_logit=-2")
    with pytest.raises(ConfigError, match="layer 0 has gated=0, and without --coda-adapters no token has a gate"):
        ours(directory, None, f"all={UNTOLD},gated=0")


def changed(adapters, change):
    """The safetensors names of what `adapted` made, with one change."""
    flat = {f"layer_{i}.{name}": part for i, one in enumerate(adapters) for name, part in one.state_dict().items()}
    change(flat)
    return flat


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("layer_1.coda.theta"), "layer_1 lacks coda.theta"),
        (lambda t: t.pop("layer_0.coda.write_proj.bias"), "layer_0 lacks coda.write_proj.bias"),
        (lambda t: t.update({"layer_2.coda.theta": torch.zeros(4, 4)}), "'layer_2.coda.theta' is no adapter's of a"),
        (lambda t: t.update({"layer_0.coda.gate": torch.zeros(1)}), "'layer_0.coda.gate' is no adapter's of a"),
        (lambda t: t.update({"layer_0.coda.theta": torch.zeros(4, 5)}), "[4, 5] torch.float32, want [4, 4]"),
        (lambda t: t.update({"layer_0.coda.theta": torch.zeros(4, 4, dtype=torch.int64)}), "is I64, want"),
        (lambda t: t["layer_1.coda.theta"].fill_(torch.nan), "'layer_1.coda.theta' has a value that is not finite"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path, change, words):
    _, adapters = adapted(tmp_path, bounded=True)
    path = tmp_path / "a.safetensors"
    save_file(changed(adapters, change), path)
    with pytest.raises(CheckpointError) as refused:
        ours(tmp_path, path)
    assert str(refused.value).startswith(f"{path}: ")
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def made(path, theta):
    """A file with one tensor, of any kind."""
    torch.save({"layer_0": {"coda.theta": theta}}, path)


def test_parameters_are_taken_as_their_numbers(tmp_path):
    _, adapters = adapted(tmp_path, bounded=False)
    path = tmp_path / "a.pt"
    states = {f"layer_{i}": dict(one.named_parameters()) for i, one in enumerate(adapters)}
    assert all(part.requires_grad for part in states["layer_0"].values())
    torch.save(states, path)
    config = ours(tmp_path, None).model.config
    read = read_adapters(path, config, CPU, sharding_plan(config, 1).ranks[0])
    assert torch.equal(read[1].lambda_bias, adapters[1].coda.lambda_proj.bias)
    assert not any(isinstance(part, torch.Tensor) and part.requires_grad for one in read for part in one)


def test_a_damaged_pickle_is_one_line(tmp_path):
    """A byte of the pickle changed, each in turn: whatever it then says, no traceback."""
    _, adapters = adapted(tmp_path, bounded=False)
    config, path = ours(tmp_path, None).model.config, tmp_path / "a.pt"
    write_pt(path, adapters)
    with zipfile.ZipFile(path) as whole:
        parts = {name: whole.read(name) for name in whole.namelist()}
    (pickled,) = (name for name in parts if name.endswith("data.pkl"))
    refused = []
    for at in range(0, len(parts[pickled]), 5):
        content = bytearray(parts[pickled])
        content[at] ^= 1 << at % 7
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as damaged:
            for name, part in parts.items():
                damaged.writestr(name, bytes(content) if name == pickled else part)
        try:
            read_adapters(path, config, CPU, sharding_plan(config, 1).ranks[0])
        except CheckpointError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert not any("\n" in line for line in refused)


@pytest.mark.parametrize("kind", [struct.error, IndexError, TypeError, AttributeError])
def test_what_torch_may_raise_is_one_line(tmp_path, monkeypatch, kind):
    _, adapters = adapted(tmp_path, bounded=False)
    config, path = ours(tmp_path, None).model.config, tmp_path / "a.pt"
    write_pt(path, adapters)

    def load(*_, **__):
        raise kind("of a made-up pickle")

    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(CheckpointError, match=r"cannot be read as tensors alone \(of a made-up pickle\)"):
        read_adapters(path, config, CPU, sharding_plan(config, 1).ranks[0])


class Call:
    """A pickle that would call something."""

    def __reduce__(self):
        return print, ("called",)


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lambda path: path.write_bytes(b"nothing"), "neither safetensors nor a .pt archive"),
        (lambda path: path.write_bytes(b"PK\x03\x04 and no more"), "cannot be read as tensors alone"),
        (lambda path: torch.save({"layer_0": Call()}, path), "cannot be read as tensors alone"),
        (lambda path: torch.save({"layer_0": torch.zeros(2)}, path), "want layer_<i>, each a dict of tensors"),
        (lambda path: torch.save({"layer_0": {"coda.theta": 3}}, path), "want layer_<i>, each a dict of tensors"),
        (lambda path: torch.save([1, 2], path), "layer_0 lacks coda.q_proj.weight"),
        (lambda path: torch.save({}, path), "layer_0 lacks coda.q_proj.weight"),
        (lambda path: torch.save({torch.zeros(2): {}}, path), "layer_0 lacks coda.q_proj.weight"),
        (lambda path: torch.save({3: {"coda.theta": torch.zeros(4, 4)}}, path), "dict of tensors; 'int' is none"),
        (
            lambda path: made(path, torch.zeros(4, 4).to_sparse()),
            "is torch.sparse_coo torch.float32 on cpu, want dense",
        ),
        (lambda path: made(path, torch.eye(4).to_sparse_csr()), "is torch.sparse_csr torch.float32 on cpu, want dense"),
        (lambda path: made(path, torch.zeros(4, 4, device="meta")), "is torch.strided torch.float32 on meta, want"),
        (
            lambda path: made(path, torch.quantize_per_tensor(torch.zeros(4, 4), 0.1, 0, torch.quint8)),
            "is torch.strided torch.quint8 on cpu, want dense",
        ),
    ],
)
def test_a_file_that_is_none_is_refused_and_nothing_in_it_is_run(tmp_path, content, words, capsys):
    adapted(tmp_path, bounded=False)
    path = tmp_path / "a.pt"
    content(path)
    config = ours(tmp_path, None).model.config
    capsys.readouterr()
    with pytest.raises(CheckpointError) as refused:
        read_adapters(path, config, CPU, sharding_plan(config, 1).ranks[0])
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert capsys.readouterr().out == ""
