"""Dumps of other runtimes, made from transformers' modules under those runtimes' names, judged without any map."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fathom.model.config import ModelConfig
from fathom.probes.judge.recording import Recording
from fathom.probes.subject import Subject
from fathom.runtime.options import DEMO
from fathom.scripts import compare
from tests import dumps
from tests.exporter import exporter
from tests.probes.transformers_faults import KNOWN

TOKENS = 150  # one HCA window


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.tensor(Subject().tokens(TOKENS))


@pytest.fixture(scope="module")
def healthy() -> Any:
    return exporter.load(DEMO, "bf16")


def made(form: str, model: Any, tokens: Tensor, tmp_path: Path, lengths: tuple[int, ...] = ()) -> list[str]:
    """A dump, and the flags that name it."""
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(tokens.tolist()))
    path = dumps.FORMS[form](tmp_path / form, dumps.run(model, tokens, lengths or (len(tokens),)))
    return ["--recording", str(path), *(["--tokens", str(ids)] if form in dumps.WITHOUT_TOKENS else [])]


def compared(flags: list[str], tmp_path: Path) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "verdict.json"
    status = compare.main([*flags, "--json", str(out)])
    return status, json.loads(out.read_text())


# How many sites of the demo each form has, at least: of SWA, CSA, HCA, CSA, and of the whole model.
SITES = {"huggingface": 118, "debugger": 60, "msprobe": 100, "sglang": 80, "atom": 40, "ds4": 70, "llama_cpp": 60}


@pytest.mark.parametrize("form", list(dumps.FORMS))
def test_a_healthy_dump_agrees(form, healthy, tokens, tmp_path):
    status, report = compared(made(form, healthy, tokens, tmp_path), tmp_path)
    assert report["verdict"] == "agrees"
    assert status == 0
    assert report["counts"]["differs"] == report["counts"]["not judged"] == 0
    assert len(report["sites"]) >= SITES[form]


CHUNKS = (70, 62, 1, 1, 16)  # no multiples of a window; two tokens alone


@pytest.mark.parametrize("form", [form for form in dumps.FORMS if form not in dumps.ONE_CALL])
def test_calls_of_a_prompt_are_put_together(form, healthy, tokens, tmp_path):
    status, report = compared(made(form, healthy, tokens, tmp_path, CHUNKS), tmp_path)
    assert (status, report["verdict"], report["tokens"]) == (0, "agrees", TOKENS)
    assert len(report["sites"]) >= SITES[form] - 8  # weights of the softmax have other columns in several calls


def test_ranks_are_put_together(healthy, tokens, tmp_path):
    path = dumps.sglang(tmp_path / "two", dumps.run(healthy, tokens, (100, 50)), ranks=2)
    status, report = compared(["--recording", str(path)], tmp_path)
    assert (status, report["verdict"], report["tokens"]) == (0, "agrees", TOKENS)
    assert len(report["sites"]) >= SITES["sglang"] - 8


def test_numpy_and_torch_files_of_hugging_faces_names(healthy, tokens, tmp_path):
    calls = dumps.run(healthy, tokens, (TOKENS,))
    torch.save({"input_ids": tokens[None], **calls[0].hooks}, tmp_path / "run.pt")
    dumps.numpy_file(tmp_path / "run.npz", calls)
    config = ModelConfig.from_file(DEMO / "config.json")
    known = [
        set(Recording(path, config).tensors)
        for path in (tmp_path / "run.npz", tmp_path / "run.pt", dumps.huggingface(tmp_path / "run.safetensors", calls))
    ]
    assert known[0] == known[1] == known[2]
    assert len(known[0]) == SITES["huggingface"]


@pytest.mark.parametrize("form", ["huggingface", "sglang", "ds4"])
@pytest.mark.parametrize("name", ["compressed-keys-unrotated", "route-scale-dropped"])
def test_a_fault_in_a_dump_is_named(form, name, healthy, tmp_path):
    tokens = torch.tensor(Subject().tokens(280))  # a second HCA entry, whose rotation turns
    put = next(put for put in KNOWN if put.name == name)
    model = copy.deepcopy(healthy)
    put.put(model)
    status, report = compared(made(form, model, tokens, tmp_path), tmp_path)
    assert status == 1
    assert (report["first"]["layer"], report["first"]["site"].split(".")[0]) == (put.layer, put.sublayer)
    assert (report["faults"][0]["name"], report["faults"][0]["explains"]) == (name, True)
