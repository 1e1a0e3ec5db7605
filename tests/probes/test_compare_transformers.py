"""`compare` on recordings of transformers, which nobody here wrote: healthy runs, and faults put into its modules.

The recordings are made by the exporter that users have, scripts/exporters/record_transformers.py.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fathom.probes.subject import Subject
from fathom.runtime.options import DEMO
from fathom.scripts import compare
from tests.exporter import exporter
from tests.probes.transformers_faults import KNOWN, UNKNOWN, Put

FAST = ("sink-dropped", "route-scale-dropped")  # the others are slow
TOKENS = 280  # two HCA windows; more CSA entries than are selected


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.tensor(Subject().tokens(TOKENS))


def compared(path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Without a word about how it rounds: whatever is wrong with it, it is found to round nothing."""
    out = path.with_suffix(".json")
    status = compare.main(["--recording", str(path), "--json", str(out), *flags])
    report = json.loads(out.read_text())
    assert report["numerics"] == "plain"
    return status, report


def recorded(model: Any, tokens: Tensor, path: Path, calls: list[int] | None = None) -> Path:
    save_file(exporter.record(model, tokens, calls or [len(tokens)]), path)
    return path


def check(put: Put, healthy: Any, tokens: Tensor, tmp_path: Path) -> dict[str, Any]:
    model = copy.deepcopy(healthy)
    put.put(model)
    status, report = compared(recorded(model, tokens, tmp_path / "r.safetensors"))
    assert status == 1
    assert report["verdict"] == "differs"
    first = report["first"]
    assert first["layer"] == put.layer
    assert first["site"].split(".")[0] == put.sublayer
    differing = {site["layer"] for site in report["sites"] if site["status"] == "differs"}
    assert differing == {put.layer}, "teacher forcing: no other layer is blamed"
    explain = [fault for fault in report["faults"] if fault["explains"]]
    named = explain[0] if explain else {"name": "none", "share": 0.0}
    where = "head" if put.layer is None else put.layer
    print(f"| {put.name or put.what} | {where} | {first['site']} | {named['name']} | {named['share']:.0%} |")
    return report


@pytest.mark.parametrize(
    "put", [pytest.param(put, id=put.name, marks=() if put.name in FAST else pytest.mark.slow) for put in KNOWN]
)
def test_a_fault_of_the_library_in_their_code_is_placed_and_named(put, healthy, tokens, tmp_path):
    report = check(put, healthy, tokens, tmp_path)
    assert (report["faults"][0]["name"], report["faults"][0]["explains"]) == (put.name, True)


@pytest.mark.slow
@pytest.mark.parametrize("put", [pytest.param(put, id=put.what) for put in UNKNOWN])
def test_a_fault_that_is_not_in_the_library_is_placed_and_not_named(put, healthy, tokens, tmp_path):
    assert not any(fault["explains"] for fault in check(put, healthy, tokens, tmp_path)["faults"])


@pytest.mark.slow
def test_two_faults_at_once_are_both_named(healthy, tokens, tmp_path):
    by_name = {put.name: put for put in KNOWN}
    model = copy.deepcopy(healthy)
    for name in ("sink-dropped", "route-scale-dropped"):  # in layers 3 and 1
        by_name[name].put(model)
    _, report = compared(recorded(model, tokens, tmp_path / "r.safetensors"))
    assert [(fault["layer"], fault["name"]) for fault in report["faults"]] == [
        (1, "route-scale-dropped"),
        (3, "sink-dropped"),
    ]


def test_the_exporter_as_a_command_of_its_own(tokens, tmp_path, monkeypatch):
    ids, out = tmp_path / "ids.json", tmp_path / "run.safetensors"
    ids.write_text(json.dumps(tokens[:150].tolist()))
    flags = ["--model", str(DEMO), "--tokens", str(ids), "--out", str(out), "--layers", "0,1", "--chunk", "64"]
    monkeypatch.setattr("sys.argv", ["record_transformers.py", *flags, "--decode-from", "140"])
    exporter.main()
    status, report = compared(out, "--prefill-chunk", "64", "--decode-from", "140")
    assert status == 0
    assert {site["layer"] for site in report["sites"]} == {None, 0, 1}


@pytest.mark.slow
def test_two_faults_at_one_site_are_named_together(healthy, tokens, tmp_path):
    by_name = {put.name: put for put in KNOWN}
    model = copy.deepcopy(healthy)
    for name in ("sink-dropped", "no-inverse-rotation"):  # both act between the queries and the first site after them
        by_name[name].put(model)
    _, report = compared(recorded(model, tokens, tmp_path / "r.safetensors"))
    assert (report["first"]["layer"], report["first"]["site"]) == (3, "attention.unrotated")
    assert set(report["faults"][0]["name"].split(" and ")) == {"sink-dropped", "no-inverse-rotation"}


@pytest.mark.parametrize(
    "calls",
    [
        [TOKENS],
        pytest.param([100, 37, TOKENS - 137], marks=pytest.mark.slow),
        pytest.param([260, *[1] * 20], marks=pytest.mark.slow),
    ],
    ids=["one call", "in chunks", "decoded"],
)
def test_a_healthy_run_in_bf16_agrees(calls, healthy, tokens, tmp_path):
    status, report = compared(recorded(healthy, tokens, tmp_path / "r.safetensors", calls))
    assert (status, report["verdict"], report["first"], report["faults"]) == (0, "agrees", None, [])
    assert len(report["sites"]) == 86
    assert all(site["rows"] == site["recorded"] and site["status"] == "agrees" for site in report["sites"])


@pytest.mark.slow
def test_a_healthy_run_in_fp32_agrees_and_is_judged_as_one(tokens, tmp_path, capsys):
    status, report = compared(recorded(exporter.load(DEMO, "fp32"), tokens, tmp_path / "r.safetensors"))
    assert status == 0
    out = capsys.readouterr().out
    assert "fp32 (as its numbers say)" in out
    print(out)
    by_site = {(site["layer"], site["site"]): site for site in report["sites"]}
    assert by_site[1, "attention.output"]["bound"] < 1e-5


@pytest.mark.slow
def test_a_healthy_run_of_which_streams_alone_are_recorded_agrees(healthy, tokens, tmp_path):
    path = recorded(healthy, tokens, tmp_path / "r.safetensors")
    kept = {name: x for name, x in load_file(path).items() if name.endswith("streams") and "attention" not in name}
    save_file(kept | {"tokens": tokens}, path)
    status, report = compared(path)
    assert status == 0
    assert [(site["layer"], site["site"]) for site in report["sites"]] == [(layer, "streams") for layer in range(4)]


def test_one_wrong_row_differs_and_is_the_row_that_is_told(healthy, tokens, tmp_path):
    path = recorded(healthy, tokens, tmp_path / "r.safetensors")
    tensors = load_file(path)
    output = tensors["layers.2.attention.output"]
    output[217] = output[216].clone()
    save_file(tensors, path)
    status, report = compared(path, "--layers", "2", "--no-identify")
    assert status == 1
    assert (report["first"]["layer"], report["first"]["site"], report["first"]["position"]) == (
        2,
        "attention.output",
        217,
    )
    assert report["faults"] == []
