"""`compare --gguf`: a run of quantised weights is judged by those, and files that are not what they should be."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fathom.model.checkpoint.names import Role, translate
from fathom.model.config import ModelConfig
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


def test_a_fault_in_a_run_of_quantised_weights_is_placed_and_named(written, tmp_path):
    path, held = written
    put = next(put for put in KNOWN if put.name == "sink-dropped")
    model = loaded(held)
    put.put(model)
    status, report = compared(recorded(model, tmp_path / "r.safetensors"), "--gguf", str(path))
    assert status == 1
    assert {site["layer"] for site in report["sites"] if site["status"] == "differs"} == {put.layer}
    assert report["faults"][0]["name"] == put.name
