"""What is compiled before a run is all that the run calls, and the first run says what it waits for."""

from types import SimpleNamespace

import pytest
import torch
from numba import types

from fathom.kernels import compiled
from fathom.kernels.formats.cpu import FORMS
from fathom.kernels.linear.cpu import KINDS
from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.runtime import loops
from fathom.runtime.load import _census, load_any, read_any_config
from fathom.runtime.options import DEMO, RunOptions

F32 = types.float32[::1]


def ready():
    return {one.name: len(one.missing) for one in compiled._ALL}


@pytest.mark.parametrize(("numerics", "dtype"), [("deployed", "bf16"), ("plain", "fp32")])
@pytest.mark.parametrize("formats", [{}, {"entry_format": "fp8", "key_format": "fp4"}])
def test_nothing_is_compiled_after_the_load(numerics, dtype, formats, monkeypatch):
    """Functions that other tests have compiled count as not ready."""
    if formats and numerics == "plain":
        formats = {}
    for one in compiled._ALL:
        monkeypatch.setattr(one, "missing", list(one.signatures))
        monkeypatch.setattr(one, "code", None)
    model = load_any(DEMO, RunOptions(numerics, dtype, **formats)).model
    before = ready()
    state = model.new_state(400, 300)
    tokens = torch.arange(340) % model.config.vocab_size
    for part in (tokens[:300], *tokens[300:304].split(2), *tokens[304:].split(1)):
        model.logits(model(part, state)[-1:])
    assert ready() == before
    assert 0 < sum(before.values()) < sum(len(one.signatures) for one in compiled._ALL)


def test_what_a_run_in_bfloat16_may_multiply_in_fp32_is_compiled_too():
    """The router and the compressors are given fp32; scales in fp32 may be no powers of two."""
    mapping = SimpleNamespace(form=SimpleNamespace(name="FP8_F32"))
    census = SimpleNamespace(mappings={"layers.0.ffn.experts.0.w1.weight": mapping})
    for dtype, kinds in (("bf16", {kind for form, kind in KINDS if form == FORMS["FP8_F32"]}), ("fp32", {F32})):
        wants = loops.wanted(census, dtype)
        for name in ("fathom.kernels.linear.cpu._linear", "fathom.kernels.experts.cpu._experts"):
            wanted = [signature for signature in compiled.signatures(name) if wants(name, signature)]
            assert {signature[-1] for signature in wanted} == kinds
            assert all(FORMS["FP8_F32"] in signature for signature in wanted)


def test_a_first_run_says_what_it_does_and_a_second_does_not(tmp_path, monkeypatch, capfd):
    census = _census(Checkpoint.open(DEMO), read_any_config(DEMO, RunOptions()), "demo")
    monkeypatch.setattr(compiled, "folder", lambda: tmp_path)
    monkeypatch.setattr(compiled, "_compile_in_processes", lambda _: None)
    monkeypatch.setattr(compiled.Compiled, "compile", lambda *_: None)
    loops.prepare_loops(census, "bf16", say=True)
    assert capfd.readouterr().err.startswith("compiling loops for this processor")
    loops.prepare_loops(census, "bf16", say=True)
    assert capfd.readouterr().err == ""
    loops.prepare_loops(census, "fp32", say=False)
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(compiled, "folder", lambda: None)
    loops.prepare_loops(census, "bf16", say=True)
    assert "anew in each run" in capfd.readouterr().err
