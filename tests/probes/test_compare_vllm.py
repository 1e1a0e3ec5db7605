"""`compare` on vLLM's CPU engine: a recording that was kept, new ones where there is a vLLM, and the page of them.

Slow tests run the engine in the environment whose Python FATHOM_VLLM_PYTHON names.
"""

import argparse
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from fathom.model.checkpoint.config_json import read_json
from fathom.model.errors import ConfigError
from fathom.scripts import compare, compare_vllm, make_checkpoint
from fathom.scripts.compare_vllm import CASES, CLAMP, PUBLISHED, SMALL, Case, Done
from tests.exporter import vllm_cpu

AUDITS = Path(__file__).resolve().parents[2] / "audits"
KEPT = Path(__file__).parents[2].parent / "shared" / "data" / "vllm" / "vllm-cpu-0.32-400.safetensors"  # 20 MB
VERSION = "0.32.0"
PYTHON = os.environ.get("FATHOM_VLLM_PYTHON")
needs_engine = pytest.mark.skipif(PYTHON is None, reason="FATHOM_VLLM_PYTHON names no Python with vllm-cpu")
RUN = ("healthy", "clamp", "sinks-ignored", "ape-shifted")  # of `CASES`, in the slow tests


# --- a recording that was kept


@pytest.mark.skipif(not KEPT.is_file(), reason="the recording is not beside this repository")
def test_a_recording_of_the_engine_agrees_and_its_rounding_is_found(tmp_path):
    """It has no index keys, and its prompt selects all entries: how index keys are rounded is not to be found."""
    config, small = tmp_path / "config.json", dict(read_json(PUBLISHED)) | dict(SMALL)
    small["rope_scaling"] |= {"original_max_position_embeddings": 4096}  # of that run
    config.write_text(json.dumps(small))
    model, out = tmp_path / "model", tmp_path / "report.json"
    assert make_checkpoint.main(["--config", str(config), "--layers", "4", "--out", str(model)]) == 0
    flags = ["--model", str(model), "--recording", str(KEPT), "--rows", "12", "--no-identify", "--json", str(out)]
    assert compare.main(flags) == 0
    report = json.loads(out.read_text())
    with safe_open(KEPT, "pt") as file:
        recorded = set(file.keys()) - {"tokens"}
    assert report["verdict"] == "agrees"
    assert report["counts"] == {"agrees": len(recorded), "differs": 0, "not judged": 0}
    assert (report["rounding"]["linears"], report["rounding"]["kv"]) == ("none", "fp8")
    assert report["rounding_rests_on"]["index"].startswith("assumed")
    assert "the clamp of routed experts" in " ".join(one["what"] for one in report["not_exercised"])


# --- caches


def paged(rows, slots, block, width, tail):
    """A cache [blocks, block, width] of bytes, a block's rows first and then its tails; as a loop, byte by byte."""
    cache = torch.full((2 + max(slots) // block, block * width + 64), 255, dtype=torch.uint8)  # 64: padding of a block
    for slot, row, more in zip(slots, rows, tail, strict=True):
        page, at = divmod(slot, block)
        cache[page, at * len(row) : (at + 1) * len(row)] = row
        start = block * len(row) + at * len(more)
        cache[page, start : start + len(more)] = more
    return cache[:, : block * width].unflatten(1, (block, width))


def stored(numbers):
    return numbers.contiguous().view(torch.uint8)


def test_kv_and_entries_are_read_out_of_a_paged_cache():
    generator, slots = torch.Generator().manual_seed(0), [70, 3, 0, 64, 5]
    nope = torch.randn(5, 448, generator=generator).to(torch.float8_e4m3fn)
    rope = torch.randn(5, 64, generator=generator).bfloat16()
    exponents = torch.randint(-9, 9, (5, 7), generator=generator)
    scales = torch.cat(((exponents + 127).byte(), torch.zeros(5, 1, dtype=torch.uint8)), 1)
    cache = paged(torch.cat((stored(nope), stored(rope)), 1), slots, 64, 584, scales)
    wanted = torch.cat((nope.float() * 2.0 ** exponents.repeat_interleave(64, 1), rope.float()), 1)
    assert torch.equal(vllm_cpu.kv_rows(cache, torch.tensor(slots)), wanted)


def test_index_keys_are_read_out_of_a_paged_cache():
    generator, slots = torch.Generator().manual_seed(0), [70, 3, 0, 64]
    keys = torch.randn(4, 128, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(4, 1, generator=generator)
    cache = paged(stored(keys), slots, 64, 132, stored(scales))
    assert torch.equal(vllm_cpu.index_rows(cache, torch.tensor(slots)), keys.float() * scales)


@pytest.mark.parametrize("supported", [True, False])
def test_a_cpu_without_amx_is_allowed(monkeypatch, supported):
    def told():
        return supported

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", told)
    vllm_cpu.allow_other_cpus()
    assert torch.cpu._is_amx_tile_supported() is True
    assert (torch.cpu._is_amx_tile_supported is told) == supported


# --- the engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    assert compare_vllm._versions(PYTHON)["vllm-cpu"] == VERSION
    return argparse.Namespace(python=PYTHON, rows=32), tmp_path_factory.mktemp("vllm")


def one(name):
    return next(case for case in CASES if name in (case.kind, case.fault))


@pytest.mark.slow
@needs_engine
@pytest.mark.parametrize("name", RUN)
def test_the_engine_is_judged_rightly_without_a_flag(engine, name):
    args, work = engine
    done = compare_vllm._done(args, one(name), work)
    print(name, done.recorder, *done.told, f"{done.record_seconds:.0f} s and {done.compare_seconds:.0f} s", sep="\n")
    assert done.right
    assert done.report["numerics"] == "linears=none,kv=fp8,index=fp8"
    assert len(done.report["sites"]) == 86
    assert done.recorder[1] == "hooked, and nothing came: layers.1.indexer.selected, layers.3.indexer.selected"
    if name not in ("healthy", "clamp"):
        assert {site["layer"] for site in done.sites("differs")} == {done.case.layer}, "no other layer is blamed"


@pytest.mark.slow
@needs_engine
def test_the_engine_serves_nothing_as_it_is_installed(engine):
    args, work = engine
    assert compare_vllm._raised(args.python, "layer-types", work) == "KeyError: 'c1a'"


# --- the page


def test_every_case_of_the_page_came_out_right():
    data = json.loads((AUDITS / "vllm.json").read_text())
    assert data["vllm's environment"]["vllm-cpu"] == VERSION
    told = {(case["kind"], case["name"]): case for case in data["cases"]}
    assert list(told) == [(case.kind, case.name) for case in CASES]
    assert [name for name, case in told.items() if not case["right"]] == []
    assert {case["numerics"] for case in told.values()} == {"linears=none,kv=fp8,index=fp8"}


def site(layer, name, status):
    return {"layer": layer, "site": name, "status": status, "rows": 32, "worst": 1.0, "bound": 4.0}


def done_with(case, first=None, faults=(), verdict="differs"):
    first = first and {"layer": first[0], "site": first[1]}
    sites = [site(0, "streams", "agrees"), *([site(first["layer"], first["site"], "differs")] if first else [])]
    report = {"sites": sites, "first": first, "verdict": verdict, "faults": list(faults), "numerics": "n",
        "rounding_rests_on": {}, "counts": {}, "not_exercised": []}  # fmt: skip
    return Done(case, report, ["Rounding, found from the recording: said"], ["recorded"], 1.0, 2.0)


def explained(name, share=1.0):
    return {"layer": 0, "site": "experts.output", "name": name, "share": share, "explains": share >= 0.9}


@pytest.mark.parametrize(
    ("first", "faults", "right"),
    [
        ((0, "experts.output"), [explained(CLAMP)], True),
        ((0, "experts.output"), [explained("sink-dropped"), explained(CLAMP)], False),
        ((0, "experts.output"), [explained(CLAMP, 0.8)], False),
        ((0, "experts.output"), [], False),
        ((1, "experts.output"), [explained(CLAMP)], False),
        (None, [], False),
    ],
)
def test_a_fault_is_right_where_it_is_placed_and_named(first, faults, right):
    assert done_with(one("clamp"), first, faults).right == right
    page = compare_vllm._page("vllm", [done_with(one("clamp"), first, faults)], {}, {})
    assert page.verdict.endswith(f"in {int(right)} of 1 runs that reach it")


def test_the_page_has_all_that_compare_said_and_how_many_rows_were_judged():
    recording = Path("work/run.safetensors")
    printed = f"{recording}: 86 sites of 400 tokens; 34 s\nRounding, found: fp8\nAGREES: 1 site\n| a |\nworst: of it\n"
    assert compare_vllm._sentences(printed, recording) == ["Rounding, found: fp8", "AGREES: 1 site"]
    page = compare_vllm._page("vllm", [done_with(one("healthy"), verdict="agrees")], {}, {}).markdown()
    assert "```\nRounding, found from the recording: said\n```" in page
    (row,) = (line for line in page.splitlines() if line.startswith("| FP4 experts |"))
    assert row.startswith("| FP4 experts | 400 | 32 | 1 | 1 | 0 |")


def test_a_healthy_run_is_right_where_it_agrees():
    assert done_with(one("healthy"), verdict="agrees").right
    assert not done_with(one("healthy"), (0, "streams")).right
    unnamed = Case("faults", "x", 4, (), "x", 0, "experts.output", None)
    assert done_with(unnamed, (0, "experts.output")).right
    assert not done_with(unnamed, (0, "experts.output"), [explained(CLAMP)]).right


@pytest.mark.parametrize(
    ("python", "why"), [("python-that-is-not-there", "No such file or directory"), ("no-vllm", "No package metadata")]
)
def test_an_environment_without_vllm_is_refused(tmp_path, python, why):
    path = tmp_path / "no-vllm"
    path.write_text("#!/bin/sh\necho 'PackageNotFoundError: No package metadata was found for vllm-cpu' >&2\nexit 1\n")
    path.chmod(0o755)
    with pytest.raises(ConfigError, match=why):
        compare_vllm.main(["--python", str(tmp_path / python), "--out", str(tmp_path / "page.md")])


def test_a_kind_that_is_none_is_refused(capsys):
    with pytest.raises(SystemExit):
        compare_vllm.parser().parse_args(["--python", "p", "--only", "healthy,ill"])
    assert "'ill' is none of healthy, long, clamp" in capsys.readouterr().err
