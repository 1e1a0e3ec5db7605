"""llama.cpp: what its exporter does with nodes, ggml's rounding in the oracle, the page, and runs where there is one.

Slow tests run llama.cpp in the environment whose Python FATHOM_LLAMA_PYTHON names: pip install llama-cpp-python==0.3.36
into one of its own compiles it.
"""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file

from fathom.model.errors import ConfigError
from fathom.model.rounding import Rounding
from fathom.probes.judge.naming import tables
from fathom.probes.judge.oracle import BFLOAT16, HALF, Q8_0
from fathom.runtime.load import load
from fathom.runtime.options import DEMO, RunOptions
from fathom.scripts import compare
from tests import gguf_files as files
from tests.exporter import llama_cpp
from tests.probes import llama_page

AUDITS = Path(__file__).resolve().parents[2] / "audits"
PYTHON = os.environ.get("FATHOM_LLAMA_PYTHON")
needs_llama = pytest.mark.skipif(
    PYTHON is None, reason="FATHOM_LLAMA_PYTHON names no Python with llama-cpp-python: pip install llama-cpp-python"
)
ROUNDED = "linears=ggml,kv=f16,index=f16"


# --- the exporter


def test_a_strided_view_is_read_by_its_strides():
    whole = np.arange(24, dtype=np.int32).reshape(3, 8)  # of an argsort, whose first two columns are a view
    ne, nb = (2, 3, 1, 1), (4, 32, 96, 96)
    data = whole.tobytes()[: 4 + 1 * 4 + 2 * 32]
    assert llama_cpp.strided(data, 26, ne, nb).tolist() == [[whole[:, :2].tolist()]]
    bf16 = torch.randn(3, 4).bfloat16()
    read = llama_cpp.strided(bf16.view(torch.int16).numpy().tobytes(), llama_cpp.BF16, (4, 3, 1, 1), (2, 8, 24, 24))
    assert np.array_equal(read[0, 0], bf16.float().numpy())


def shown(kept, sizes, entries):
    """A graph of one CSA and one HCA layer: rows of a pass are their positions; behind entries come rows of -1."""
    done = 0
    for size, (csa, hca) in zip(sizes, entries, strict=True):

        def node(name, x):
            kept.note(name, lambda: np.asarray(x, np.float32))

        at = np.arange(done, done + size)
        node("embd", np.tile(at[:, None], (1, 1, 1, 3)).reshape(1, 1, size, 3))
        node("hc_pre-1", np.full((1, 1, size, 4), 0))
        for name, ratio, count in (("csa_state_compress-1", 4, csa), ("hca_state_compress-2", 128, hca)):
            closed = range(done // ratio, (done + size) // ratio)
            rows = np.array([*closed, *[-1] * (count - len(closed))])[:count].reshape(1, count, 1, 1)
            for step in range(5):
                node(name, np.tile(rows + step / 8, (1, 1, 1, 6)))
        node("hc_pre-1", np.full((1, 1, size, 4), 1))
        node("kv-1", np.full((1, size, 1, 6), 1 / 3))
        node("lid_state_compress_rot-1", np.full((1, csa, 1, 6), 1 / 3))
        width = 1 + done + size
        node("lid_top_k-1", np.tile(np.arange(width), (size, 1)).reshape(1, 1, size, width))
        node("norm-1", np.zeros((1, 1, size, 3)))
        done += size
    return llama_cpp.joined(kept.passes, kept.sizes)


def test_passes_are_joined_dummy_rows_dropped_and_nodes_of_one_name_told_apart():
    kept = llama_cpp.Kept()
    found = shown(kept, (130, 5, 1, 1), ((33, 2), (2, 1), (1, 1), (1, 1)))
    assert found["embd"][:, 0].tolist() == list(range(137))
    assert set(found["hc_pre-1#0"].flatten()) == {0}
    assert set(found["hc_pre-1#1"].flatten()) == {1}
    assert found["csa_state_compress-1"].shape == (137 // 4, 1, 6)
    assert found["csa_state_compress-1"][:, 0, 0].tolist() == [n + 0.5 for n in range(34)]
    assert found["csa_state_compress-1#2"][:, 0, 0].tolist() == [n + 0.25 for n in range(34)]
    assert found["hca_state_compress-2"][:, 0, 0].tolist() == [0.5]
    assert found["kv-1"].dtype == np.float32
    assert found["lid_state_compress_rot-1"].dtype == np.float16
    assert found["lid_state_compress_rot-1"].shape == (34, 1, 6)
    assert found["kv-1"].shape == (137, 1, 6)
    assert found["lid_top_k-1"].shape == (137, 138)
    assert found["lid_top_k-1"][0, 130:].tolist() == [0 + n for n in (130,)] + [-1] * 7
    assert "norm-1" not in found
    missing = kept.never()
    assert "attn_norm-{l}" in missing
    assert "kv-{l}" not in missing


def test_what_is_asked_for_is_of_the_layers_that_were_named():
    kept = llama_cpp.Kept({1}, "f32")
    asked = [
        n for n in ("embd", "q-1", "q-2", "q", "q (view)-1", "lid_q_rot-1", "result_norm") if kept.wanted(n) is not None
    ]
    assert asked == ["embd", "q-1"]


def test_a_pass_of_other_rows_ends_the_program():
    kept = llama_cpp.Kept()
    with pytest.raises(SystemExit, match=r"csa_state_compress-1.* want 2 rows"):
        shown(kept, (8,), ((1, 1),))


def test_every_name_that_is_kept_stands_in_the_table():
    table = tables()["llama_cpp"]
    for name in (*llama_cpp.EMBEDDED, *llama_cpp.IN_LAYERS, *llama_cpp.HEAD):
        assert any(rule.pattern.fullmatch(name.replace("{l}", "7")) for rule in table.rules), name


# --- ggml's rounding


def test_formats_are_those_of_ggml():
    x = torch.randn(40, 256, dtype=torch.float64) * torch.logspace(-7, 2, 40, dtype=torch.float64)[:, None]
    x = x.float().double()
    assert torch.equal(HALF.rounded(x), x.half().double())
    assert torch.equal(BFLOAT16.rounded(x), x.bfloat16().double())
    theirs = torch.from_numpy(dequantize(quantize(x.float().numpy(), Type.Q8_0), Type.Q8_0)).double()
    assert torch.allclose(Q8_0.rounded(x), theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("choice", ["linears=ggml,kv=none,index=none", "linears=none,kv=f16,index=none"])
def test_no_run_here_has_the_numerics_of_others(choice):
    assert Rounding.of(choice).foreign in choice.split(",")
    with pytest.raises(ConfigError, match=f"--rounding {choice}: no run here rounds so"):
        load(DEMO, RunOptions(numerics=choice))


def test_ggml_rounds_by_the_types_of_a_gguf(tmp_path):
    path = tmp_path / "run.safetensors"
    save_file({"tokens": torch.arange(4)}, path)
    with pytest.raises(ConfigError, match="want --gguf"):
        compare.main(["--recording", str(path), "--rounding", ROUNDED])


# --- the page, and llama.cpp


def test_the_page_says_what_was_found():
    said = json.loads((AUDITS / "llama-cpp.json").read_text(encoding="utf-8"))
    facts = {name: value for name, value in said.items() if name not in ("runs", "parts")}
    made = llama_page.page(said["runs"], facts)
    assert made.markdown() == (AUDITS / "llama-cpp.md").read_text(encoding="utf-8")
    assert [(run["name"], run["file"]) for run in said["runs"]] == [(case.name, case.kind) for case in llama_page.CASES]
    assert [run["name"] for run in said["runs"] if not run["right"]] == []
    assert said["version"] == llama_page.VERSION


@pytest.mark.slow
@needs_llama
@pytest.mark.parametrize("case", llama_page.CASES, ids=lambda case: f"{case.name}, {case.kind}")
def test_llama_cpp_is_judged_rightly_without_a_flag(case, tmp_path):
    assert llama_page.versions(PYTHON) == llama_page.VERSION
    found = llama_page.judged(case, tmp_path, PYTHON, files.stacks(DEMO, llama_page.CONFIG))
    assert found["right"], found
    if case.kind != llama_page.F32:
        assert found["numerics"] == ROUNDED
