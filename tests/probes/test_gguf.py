"""`compare --gguf`: a run of quantised weights is judged by those, and files that are not what they should be."""

import contextlib
import json
import random
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file

from fathom.model.checkpoint.names import Role, translate
from fathom.model.config import ModelConfig
from fathom.model.errors import CheckpointError, ConfigError
from fathom.probes.judge.gguf import open_gguf
from fathom.probes.subject import Subject
from fathom.runtime.options import DEMO
from fathom.scripts import compare
from tests import gguf_files as files
from tests.exporter import exporter
from tests.probes.transformers_faults import KNOWN

TOKENS = 150  # an HCA window; more CSA entries than are selected
CONFIG = ModelConfig.from_file(DEMO / "config.json")
KINDS = {"llama.cpp": files.llama_cpp, "ds4": files.ds4}


@pytest.fixture(scope="module")
def stacks() -> dict[str, Any]:
    return files.stacks(DEMO, CONFIG)


@pytest.fixture(scope="module", params=KINDS)
def written(request, stacks, tmp_path_factory) -> tuple[Any, dict[str, Any]]:
    path = tmp_path_factory.mktemp(request.param) / "model.gguf"
    return path, files.write(path, stacks, files.keys(CONFIG), KINDS[request.param])


def loaded(held: dict[str, Any]) -> Any:
    """transformers' model in fp32 with these weights, by official name."""
    model = exporter.load(DEMO, "fp32")
    left = set(held)
    for name, old in model.state_dict().items():
        if (meaning := translate(name)) is None:
            continue
        parts = [meaning.parameter]
        if meaning.role is not Role.WEIGHT:
            leaves = ("w1", "w3") if meaning.role is Role.STACKED_GATE_UP else ("w2",)
            parts = [f"{meaning.parameter}.{e}.{leaf}.weight" for e in range(len(old)) for leaf in leaves]
        left -= set(parts)
        old.copy_(torch.from_numpy(np.concatenate([held[part] for part in parts])).reshape(old.shape))
    assert not left
    return model


def compared(path: Any, *flags: str) -> tuple[int, dict[str, Any]]:
    out = path.with_suffix(".json")
    status = compare.main(["--recording", str(path), "--json", str(out), *flags])
    return status, json.loads(out.read_text())


def recorded(model: Any, path: Any) -> Any:
    tokens = torch.tensor(Subject().tokens(TOKENS))
    save_file(exporter.record(model, tokens, [TOKENS]), path)
    return path


def test_parameters_are_what_the_package_dequantises(written):
    path, held = written
    read = open_gguf(path, CONFIG)
    assert read.tensors.keys() == held.keys()
    for name, want in held.items():
        got = read.read(name)
        assert tuple(got.shape) == read.tensors[name].shape
        assert np.array_equal(got.numpy(), want), name
    ids = torch.tensor([3, 1023, 3])
    assert np.array_equal(read.rows("embed.weight", ids).numpy(), held["embed.weight"][ids])


def test_a_healthy_run_agrees_with_its_own_weights_and_not_with_the_official_ones(written, tmp_path, capsys):
    path, held = written
    recording = recorded(loaded(held), tmp_path / "r.safetensors")
    status, report = compared(recording, "--gguf", str(path))
    assert (status, report["verdict"], report["numerics"]) == (0, "agrees", "plain")
    assert all(site["status"] == "agrees" for site in report["sites"])
    assert "model.gguf in float64; plain numerics" in " ".join(capsys.readouterr().out.split())
    status, report = compared(recording, "--no-identify")
    assert (status, report["verdict"]) == (1, "differs")


@pytest.mark.parametrize("written", ["llama.cpp"], indirect=True)
def test_a_fault_in_a_run_of_quantised_weights_is_placed_and_named(written, tmp_path):
    path, held = written
    put = next(put for put in KNOWN if put.name == "sink-dropped")
    model = loaded(held)
    put.put(model)
    status, report = compared(recorded(model, tmp_path / "r.safetensors"), "--gguf", str(path), "--layers", "3")
    assert status == 1
    assert {site["layer"] for site in report["sites"] if site["status"] == "differs"} == {put.layer}
    assert report["faults"][0]["name"] == put.name


def test_types_that_the_package_reads_alone_are_read_an_expert_at_a_time(tmp_path):
    """Those of ds4's experts, by bytes of no file: nothing here can quantise to them."""
    config = replace(CONFIG, hidden_size=256, moe_intermediate_size=256)
    parts = {"w1": Type.IQ2_XXS, "w3": Type.Q4_K, "w2": Type.Q2_K}
    rng, weights = np.random.default_rng(0), files.zeros(config)

    def kinds(name: str) -> Type:
        return parts[name.split(".")[-2]] if ".experts." in name else files.ds4(name)

    for name in weights:
        if ".experts." in name:
            size = GGML_QUANT_SIZES[kinds(name)][1]
            weights[name] = rng.integers(0, 60, (config.n_routed_experts, 256, size), dtype=np.uint8)  # finite scales
    held = files.write(tmp_path / "m.gguf", weights, files.keys(config), kinds)
    read = open_gguf(tmp_path / "m.gguf", config)
    for name in (f"layers.1.ffn.experts.{e}.{part}.weight" for e in (0, 5, 7) for part in parts):
        got = read.read(name).numpy()
        assert got.any()
        assert np.array_equal(got, held[name]), name


# --- files that are not what they should be


def f32(name: str) -> Type:
    return Type.I32 if "tid2eid" in name else Type.F32


@pytest.fixture(scope="module")
def plain(stacks, tmp_path_factory) -> tuple[Any, bytes]:
    """A good file without quantised types, and its bytes."""
    path = tmp_path_factory.mktemp("plain") / "m.gguf"
    files.write(path, stacks, files.keys(CONFIG), f32)
    open_gguf(path, CONFIG)
    return path, path.read_bytes()


def without(stacks: dict[str, Any], name: str) -> dict[str, Any]:
    return {other: value for other, value in stacks.items() if other != name}


def refused(path: Any, error: type[Exception], *parts: str) -> None:
    with pytest.raises(error) as info:
        open_gguf(path, CONFIG)
    assert "\n" not in str(info.value)
    assert str(path.parent) in str(info.value)
    for part in parts:
        assert part in str(info.value)


@pytest.mark.parametrize("share", [0.0, 1e-6, 1e-4, 3e-4, 0.5, 0.999])
def test_a_file_that_was_cut_short(share, plain, tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(plain[1][: int(share * len(plain[1]))])
    refused(path, CheckpointError, "cut.gguf", "cut short")


def test_a_file_of_flipped_bytes_is_opened_or_refused_in_a_line(plain, tmp_path):
    rng = random.Random(0)
    path, opened = tmp_path / "flipped.gguf", 0
    head = plain[1].index(b"blk.1.")
    for _ in range(150):
        data = bytearray(plain[1])
        for _ in range(rng.choice((1, 8))):
            data[rng.randrange(head)] = rng.choice((0, 1, 0x7F, 0xFF, rng.randrange(256)))
        path.write_bytes(data)
        with contextlib.suppress(CheckpointError, ConfigError):
            open_gguf(path, CONFIG)
            opened += 1
    assert opened < 75


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda s: without(s, "layers.1.attn.wq_a.weight"), ["'blk.1.attn_q_a.weight'", "missing"]),
        (lambda s: without(s, "layers.2.ffn.experts.w3.weight"), ["'blk.2.ffn_up_exps.weight'", "missing"]),
        (lambda s: s | {"layers.0.attn.wo_a.weight": s["layers.0.attn.wo_a.weight"].T.copy()}, ["is [256, 128], want"]),
        (lambda s: s | {"layers.1.ffn.experts.w2.weight": s["layers.1.ffn.experts.w2.weight"][:7]}, ["want [8, 128"]),
        (lambda s: s | {"layers.0.attn.compressor.ape": np.ones((4, 8), np.float32)}, ["of no parameter"]),
        (lambda s: s | {"layers.0.ffn.gate.tid2eid": s["layers.0.ffn.gate.tid2eid"] + 1}, ["outside the 8"]),
    ],
    ids=["missing", "missing stack", "transposed", "an expert too few", "too much", "expert ids"],
)
def test_tensors_that_are_not_those_of_the_model(change, parts, stacks, tmp_path):
    files.write(tmp_path / "m.gguf", change(stacks), files.keys(CONFIG), f32)
    refused(tmp_path / "m.gguf", CheckpointError, "m.gguf", *parts)


def test_a_table_in_place_of_numbers(stacks, tmp_path):
    def kinds(name: str) -> Type:
        return Type.I32 if name == "embed.weight" else f32(name)

    table = np.zeros((1024, 128), np.int32)
    files.write(tmp_path / "m.gguf", stacks | {"embed.weight": table}, files.keys(CONFIG), kinds)
    refused(tmp_path / "m.gguf", CheckpointError, "'token_embd.weight' is I32, want")


def test_a_number_that_is_not_finite_is_found_when_it_is_read(stacks, tmp_path):
    bad = stacks["norm.weight"].copy()
    bad[3] = np.nan
    files.write(tmp_path / "m.gguf", stacks | {"norm.weight": bad}, files.keys(CONFIG), f32)
    read = open_gguf(tmp_path / "m.gguf", CONFIG)
    with pytest.raises(CheckpointError, match=r"m\.gguf: tensor 'output_norm\.weight', norm\.weight: .* not finite"):
        read.read("norm.weight")


def test_another_architecture(stacks, tmp_path):
    files.write(tmp_path / "m.gguf", stacks, files.keys(CONFIG), f32, architecture="deepseek2")
    refused(tmp_path / "m.gguf", CheckpointError, "general.architecture is 'deepseek2', want 'deepseek4'")


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("block_count", 5, "num_hidden_layers"),
        ("attention.compress_ratios", [0, 4, 128, 128], "compress_ratios"),
        ("rope.freq_base", 10001.0, "rope_theta"),
        ("rope.scaling.type", "none", "rope_scaling"),
        ("rope.scaling.factor", 8.0, "rope_scaling.factor"),
        ("swiglu_clamp_exp", [10.0, 10.0, 10.0, 7.0], "swiglu_limit"),
        ("expert_gating_func", 2, "scoring_func"),
        ("hyper_connection.epsilon", "small", "hc_eps"),
    ],
)
def test_a_key_that_contradicts_the_config(key, value, name, tmp_path):
    files.write(tmp_path / "m.gguf", {}, files.keys(CONFIG) | {key: value}, f32)
    refused(tmp_path / "m.gguf", ConfigError, f"deepseek4.{key} is ", f"and {name} of config.json is")


def test_a_split_file_is_read_from_any_part_and_needs_all(stacks, tmp_path):
    held = files.write(tmp_path / "m.gguf", stacks, files.keys(CONFIG), f32, tensors=60)
    parts = sorted(tmp_path.iterdir())
    assert [part.name for part in parts] == [f"m-{n:05d}-of-00003.gguf" for n in (1, 2, 3)]
    for part in parts:
        assert np.array_equal(open_gguf(part, CONFIG).read("head.weight").numpy(), held["head.weight"])
    parts[2].write_bytes(parts[1].read_bytes())
    refused(parts[0], CheckpointError, parts[2].name, "is in", parts[1].name)
    parts[2].unlink()
    refused(parts[0], CheckpointError, parts[2].name)


def test_without_the_package_one_line_says_what_to_install(plain, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf.gguf_reader", None)
    refused(plain[0], ConfigError, "pip install gguf")


def test_numerics_that_no_run_of_a_gguf_has(plain, tmp_path):
    recording = tmp_path / "r.safetensors"
    save_file({"tokens": torch.arange(4), "embedded": torch.zeros(4, 128)}, recording)
    flags = ["--recording", str(recording), "--gguf", str(plain[0])]
    for more in (["--numerics", "deployed"], ["--rounding", "linears=fp8,kv=fp8,index=none"]):
        with pytest.raises(ConfigError, match="no run rounds inputs of its linears to FP8"):
            compare.main([*flags, *more])
    assert compare.main([*flags, "--rounding", "linears=none,kv=fp8,index=fp4"]) == 1
