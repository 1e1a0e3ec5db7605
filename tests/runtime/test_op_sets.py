"""Which op set a run gets, which it is refused, and that its report says where each op came from."""

import inspect
import re
from dataclasses import replace

import pytest
import torch

from fathom.kernels.ops import CPU, REFERENCE, Ops, backend, noted
from fathom.kernels.triton_ops import TRITON
from fathom.model.choices import OP_SETS
from fathom.model.config import ModelConfig
from fathom.model.errors import ConfigError
from fathom.model.llama.config import LlamaConfig
from fathom.model.variants.choice import Coda, GroupedCoda, GroupedShard, Shard
from fathom.runtime.load import load
from fathom.runtime.op_sets import op_set, planned, unread
from fathom.runtime.options import DEMO, RunOptions, usual
from tests.llama_configs import LLAMA_3_1_8B

LLAMA = LlamaConfig.from_json(LLAMA_3_1_8B, "as published")
CONFIG = ModelConfig.from_file(DEMO / "config.json")


def test_each_name_is_its_op_set():
    assert op_set("reference", RunOptions(), CONFIG) is REFERENCE
    assert op_set("reference", RunOptions(device="cuda"), CONFIG) is REFERENCE
    assert op_set("cpu", RunOptions(), CONFIG) is CPU
    assert op_set("triton", RunOptions(device="cuda"), CONFIG) is TRITON
    assert set(OP_SETS) == {"reference", "cpu", "triton"}


def test_each_device_has_its_usual_op_set_and_refuses_the_others():
    assert (usual("cpu"), usual("cuda")) == ("cpu", "triton")
    with pytest.raises(ConfigError, match=r"--ops triton: .* --device cuda, not cpu"):
        op_set("triton", RunOptions(), CONFIG)
    with pytest.raises(ConfigError, match=r"--ops cpu: .* --device cuda has triton"):
        op_set("cpu", RunOptions(device="cuda"), CONFIG)


def test_no_op_of_a_gpu_is_compiled_for_a_cpu():
    """What torch runs in tiles asks where its tensors are; nothing else of the backend `cpu` is there."""
    tiled = [name for name, op in TRITON._asdict().items() if name != "name" and backend(op) == "cpu"]
    assert tiled == ["open_blocks", "select_open", "attend_grouped"]


@pytest.mark.parametrize("rule", ["hca=coda", "csa=shard:bits=4", "all=shard"])
def test_variants_of_v4_are_read_by_the_same_kernels(rule):
    assert op_set("triton", RunOptions(device="cuda", kv=(rule,)), CONFIG) is TRITON


def test_variants_of_grouped_heads_and_adapters_run_too():
    llama = LLAMA
    for rule in ("all=coda", "all=shard", "all=shard:rank=32,bits=3"):
        assert op_set("triton", RunOptions("plain", device="cuda", kv=(rule,)), llama) is TRITON
    adapted = RunOptions("plain", device="cuda", coda_adapters="adapters.safetensors")
    for options in (adapted, RunOptions("plain", device="cuda")):
        assert op_set("triton", options, llama) is TRITON


REFUSED = {
    "all=shard:dp=1": r"shard:.*dp=1.*: components have bits by group",
    "all=shard:qjl=1": r"shard:.*qjl=1: the error of keys is sketched",
    "all=shard:rank=30": r"shard:rank=30.*: 30 components, .* want 32 at least",
}


@pytest.mark.parametrize("rule", REFUSED)
def test_what_no_kernel_reads_is_refused_by_name(rule):
    llama, options = LLAMA, RunOptions("plain", device="cuda", kv=(rule,))
    with pytest.raises(ConfigError, match=rf"^--ops triton: no kernel for --kv {REFUSED[rule]}"):
        op_set("triton", options, llama)
    assert op_set("cpu", replace(options, device="cpu"), llama) is CPU


def test_heads_too_narrow_for_a_product_are_refused():
    narrow = replace(CONFIG, head_dim=8, index_head_dim=8, qk_rope_head_dim=4)
    for variant, config, refused in (
        (Shard(), CONFIG, None),
        (Shard(), narrow, "rotated rows of 8 columns"),
        (Coda(), narrow, None),
        (GroupedCoda(), replace(LLAMA, head_dim=48), "heads of 48, want a power of two"),
        (GroupedCoda(), replace(LLAMA, head_dim=8), "heads of 8, want a power of two"),
        (GroupedShard(), replace(LLAMA, head_dim=16), "16 columns of a head, .* want 32"),
        (GroupedShard(), LLAMA, None),
    ):
        why = unread(variant, config)
        assert why is None if refused is None else re.match(refused, why), why


@pytest.mark.parametrize("rule", ["all=coda", "all=shard:rank=16"])
def test_the_reference_has_no_attention_to_banks_or_codes(rule):
    llama, options = LLAMA, RunOptions("plain", kv=(rule,))
    with pytest.raises(ConfigError, match=r"--ops reference: has no attention of its own for --kv (coda|shard)"):
        op_set("reference", options, llama)
    assert op_set("cpu", options, llama) is CPU
    assert op_set("reference", RunOptions(kv=("all=shard",)), CONFIG) is REFERENCE  # V4's entries it decodes


@pytest.mark.parametrize("ops", [REFERENCE, CPU, TRITON], ids=lambda ops: ops.name)
def test_every_op_has_the_parameters_that_the_protocol_names(ops):
    """In their order; what a model passes by name is the same on every backend."""
    for name, op in ops._asdict().items():
        if name != "name":
            wanted = [word for word in inspect.signature(getattr(Ops, name)).parameters if word != "self"]
            found = inspect.signature(op).parameters.values()
            taken = [word.name for word in found if word.name in wanted or word.default is inspect.Parameter.empty]
            assert taken == wanted, name


def test_every_op_has_a_backend():
    assert {backend(op) for op in REFERENCE[1:-2]} == {"reference"}
    assert backend(CPU.attend) == "cpu"
    assert backend(CPU.rotate_halves) == "reference"
    assert backend(TRITON.attend) == "triton"
    assert backend(TRITON.attend_banks) == backend(TRITON.attend_codes) == "triton"
    assert {backend(op) for op in TRITON[1:]} <= {"triton", "cpu", "reference"}
    assert backend(test_each_name_is_its_op_set) == __name__


def test_ops_note_that_they_ran_and_stay_equal_to_what_they_were():
    ran = {}
    ops = noted(CPU, ran)
    assert ops == CPU
    assert ops._replace(select=TRITON.select) != CPU
    ops.rms_norm(torch.ones(1, 4), None, 1e-6)
    ops.rotate_halves(torch.ones(1, 1, 4), torch.ones(1, 2), torch.zeros(1, 2))
    assert ran == {"rms_norm": "cpu", "rotate_halves": "reference"}
    noted(ops._replace(swiglu=lambda *_: None), more := {}).swiglu()
    assert more == {"swiglu": __name__}
    assert "swiglu" not in ran


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_a_run_reports_what_ran_and_nothing_else(name):
    options = RunOptions(prefill_chunk=16)
    model = load(DEMO, options, op_set(name, options, CONFIG)).model
    assert model.arithmetic.ran == {}
    model(torch.arange(16), model.new_state(16, 16))
    assert model.arithmetic.ran["attend"] == name
    assert not {"attend_grouped", "attend_banks", "attend_codes", "rotate_halves"} & model.arithmetic.ran.keys()


def test_a_plan_is_of_the_ops_that_would_run(monkeypatch):
    assert planned(RunOptions()) == "cpu"
    assert planned(RunOptions(device="cuda")) == planned(RunOptions(device="cuda", kv=("all=shard",))) == "triton"
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"^--device cuda: its plan is of Triton's kernels, and there is no Triton$"):
        planned(RunOptions(device="cuda"))
