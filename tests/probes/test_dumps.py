"""Dumps of other runtimes, made from transformers' modules under those runtimes' names, judged without any map."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fathom.probes.subject import Subject
from fathom.runtime.options import DEMO
from fathom.scripts import compare
from tests import dumps
from tests.exporter import exporter

TOKENS = 150  # one HCA window


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.tensor(Subject().tokens(TOKENS))


@pytest.fixture(scope="module")
def healthy() -> Any:
    return exporter.load(DEMO, "bf16")


def made(form: str, model: Any, tokens: Tensor, tmp_path: Path, lengths: tuple[int, ...] = ()) -> list[str]:
    """A dump, and the flags that name it."""
    lengths = lengths or (len(tokens),)
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(tokens.tolist()))
    path = dumps.FORMS[form](
        tmp_path / f"{form}{'.safetensors' if form in dumps.ONE_CALL[::2] else ''}", dumps.run(model, tokens, lengths)
    )
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
