"""Which op set a run gets, which it is refused, and that its report says where each op came from."""

import pytest

from kernels.fused.ops import FUSED
from kernels.ops import BLOCKED, REFERENCE, rooms
from model.config import ModelConfig
from model.errors import ConfigError
from model.llama.config import LlamaConfig
from runtime.load import DEMO
from runtime.op_sets import OP_SETS, op_set, usual
from runtime.options import RunOptions
from tests.llama_configs import LLAMA_3_1_8B

CONFIG = ModelConfig.from_file(DEMO / "config.json")


def test_each_name_is_its_op_set():
    assert op_set("reference", RunOptions(), CONFIG) is REFERENCE
    assert op_set("blocked", RunOptions(device="cuda"), CONFIG) is BLOCKED
    assert op_set("fused", RunOptions(device="cuda"), CONFIG) is FUSED
    assert [op_set(name, RunOptions(device="cuda"), CONFIG).name for name in OP_SETS] == list(OP_SETS)


def test_triton_is_the_usual_way_on_a_gpu_and_nowhere_else():
    assert (usual("cpu"), usual("cuda")) == ("blocked", "fused")
    with pytest.raises(ConfigError, match=r"--ops fused: .* --device cuda, not cpu"):
        op_set("fused", RunOptions(), CONFIG)


@pytest.mark.parametrize("rule", ["hca=coda", "csa=shard:bits=4"])
def test_forms_without_kernels_are_refused_before_anything_is_loaded(rule):
    options = RunOptions(device="cuda", kv=(rule,))
    with pytest.raises(ConfigError, match=f"--ops fused: does not run --kv {rule.split('=')[1]}"):
        op_set("fused", options, CONFIG)
    assert op_set("blocked", options, CONFIG) is BLOCKED


def test_variants_of_grouped_heads_and_adapters_are_refused_too():
    llama = LlamaConfig.from_json(LLAMA_3_1_8B, "as published")
    for options in (
        RunOptions("plain", device="cuda", kv=("all=coda",)),
        RunOptions("plain", device="cuda", kv=("all=shard:rank=16",)),
        RunOptions("plain", device="cuda", coda_adapters="adapters.safetensors"),
    ):
        with pytest.raises(ConfigError, match=r"--ops fused: does not run --(kv|coda-adapters)"):
            op_set("fused", options, llama)
    assert op_set("fused", RunOptions("plain", device="cuda"), llama) is FUSED


def test_a_report_names_the_room_of_every_op():
    assert set(rooms(REFERENCE).values()) == {"reference"}
    assert rooms(BLOCKED)["attend"] == "blocked"
    assert rooms(BLOCKED)["pool"] == "reference"
    assert rooms(FUSED)["attend"] == "fused"
    assert set(rooms(FUSED).values()) <= {"fused", "blocked", "reference"}
    assert rooms(BLOCKED._replace(select=test_each_name_is_its_op_set))["select"] == __name__
    assert rooms(BLOCKED).keys() == set(BLOCKED._fields) - {"name"}
