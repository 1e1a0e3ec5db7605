"""DeepSeek-V4.1: its config, its names, and the census of its published list of tensors."""

import gzip
import hashlib
import json
import math
from pathlib import Path

import pytest

from fathom.kernels.ops import CPU
from fathom.model.checkpoint.census import census
from fathom.model.checkpoint.mtp import Head, head_parameters
from fathom.model.checkpoint.names import parameters, vision_tensors
from fathom.model.config import LayerKind, ModelConfig
from fathom.model.errors import CheckpointError, ConfigError
from fathom.model.ranks.ranks import Group
from fathom.runtime.load import load
from fathom.runtime.options import RunOptions, checked_config
from fathom.scripts import inspect

PUBLISHED = Path(__file__).parent / "data" / "DeepSeek-V4.1-Flash.json"
SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "v41"  # 12 MB, not in the repository
LIST = SHARED / "expected_DeepSeek-V4.1-Flash.json.gz"


def published():
    return json.loads(PUBLISHED.read_text())


def changed(**fields):
    obj = published()
    for name, value in fields.items():
        obj["text_config"][name] = value
    return obj


def test_roles_of_the_published_layers():
    config = ModelConfig.from_file(PUBLISHED)
    layers = range(config.num_hidden_layers)
    assert [n for n in layers if config.makes_entries(n)] == [2, 8, 14, 20]
    assert [n for n in layers if config.selects(n)] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert [config.entry_source(n) for n in (2, 7, 8, 13, 19, 20, 39)] == [2, 2, 8, 8, 14, 20, 20]
    assert [config.selection_source(n) for n in (7, 20, 23, 24, 39)] == [2, 20, 20, 24, 36]
    assert {config.layer_kind(n) for n in (0, 1)} == {LayerKind.SWA}
    assert (config.rms_norm_eps, config.fp8_block, config.num_mtp_layers) == (1e-20, 32, 3)
    assert config.experts(0) == (384, 6)
    assert config.experts(config.num_hidden_layers) == (128, 3)
    assert config.v41.engram.columns == 24


@pytest.mark.parametrize(("wrong", "said"), [
    ({"rms_norm_eps": None}, "text_config.rms_norm_eps is None"),
    ({"hc_mult_typo": 1}, "text_config.hc_mult_typo: unknown field"),
    ({"kv_source_layer_ids": [2, 8, 14]}, "candidate_source_layer_id is 20, want the last KV source"),
    ({"kv_source_layer_ids": [1, 2, 8, 14, 20]}, "want layers with a compress ratio"),
    ({"kv_source_layer_ids": [8, 14, 20]}, "without layer 2"),
    ({"index_source_layer_ids": [2, 8, 20, 24, 28, 32, 36]}, "want each in index_source_layer_ids"),
    ({"index_source_layer_ids": [2, 4, 8, 14, 20]}, r"\[4\] lie before candidate_source_layer_id"),
    ({"compress_ratios": [0] * 2 + [4] * 41}, "want 0, 1 or 2 for each of 40 layers, and 0 for 3 mtp stages"),
    ({"engram_layer_ids": [1]}, "differ in length"),
    ({"engram_layer_ids": [1, 40]}, "beyond the last layer"),
    ({"model_type": "deepseek_v4"}, "text_config.model_type is 'deepseek_v4'"),
    ({"num_hash_layers": 3}, "text_config.num_hash_layers: unknown field"),
])  # fmt: skip
def test_a_config_that_contradicts_itself_is_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        ModelConfig.from_json(changed(**wrong), "here")


@pytest.mark.parametrize("field", sorted(published()["text_config"].keys() - {
    "attention_dropout", "initializer_range", "use_cache",
}))  # fmt: skip
def test_a_missing_field_is_named(field):
    obj = published()
    del obj["text_config"][field]
    with pytest.raises(ConfigError, match=field):
        ModelConfig.from_json(obj, "here")


def test_quantisation_is_of_its_own_blocks():
    obj = published()
    obj["quantization_config"]["weight_block_size"] = [128, 128]
    with pytest.raises(ConfigError, match=r"weight_block_size is \[128, 128\]; supported: \[32, 32\]"):
        ModelConfig.from_json(obj, "here")


def test_a_run_of_it_is_one_on_a_cpu(tmp_path):
    (tmp_path / "config.json").write_text(PUBLISHED.read_text())
    checked_config(tmp_path, RunOptions())
    with pytest.raises(ConfigError, match=r"--device cuda is not built for DeepSeek-V4\.1"):
        checked_config(tmp_path, RunOptions(device="cuda"))
    with pytest.raises(ConfigError, match=r"--key-format fp8 is not built for DeepSeek-V4\.1"):
        checked_config(tmp_path, RunOptions(key_format="fp8"))
    with pytest.raises(ConfigError, match=r"a run on 2 ranks is not built for DeepSeek-V4\.1"):
        load(tmp_path, RunOptions(), CPU, Group(0, 2, None))
    with pytest.raises(ConfigError, match=r"--ops triton is not built for DeepSeek-V4\.1"):
        load(tmp_path, RunOptions(), CPU._replace(name="triton"))


def summed(shapes):
    """Tensors, elements, and SHA-256 of the sorted lines `name 2x3`."""
    lines = sorted(f"{name} {'x'.join(map(str, shape))}\n" for name, shape in shapes.items())
    return len(shapes), sum(map(math.prod, shapes.values())), hashlib.sha256("".join(lines).encode()).hexdigest()


# Of the published list, as the test after this one computes them: every tensor but scales, with its logical shape.
ALL = (48_496, 763_205_315_794, "b22c85a973c3f523654faf84008aeab7a154d07969819afdcff8fca1a6e31878")


def test_the_config_demands_the_tensors_that_were_published():
    config = ModelConfig.from_file(PUBLISHED)
    demanded = parameters(config) | head_parameters(Head.DSPARK, config)
    assert summed({name: one.shape for name, one in demanded.items()} | vision_tensors(config)) == ALL


@pytest.mark.skipif(not LIST.is_file(), reason="the published tensor list is not beside this repository")
def test_the_golden_values_are_those_of_the_list():
    with gzip.open(LIST) as file:
        listed = json.load(file)
    assert (
        summed(
            {
                stored: [*shape[:-1], 2 * shape[-1]] if dtype == "I8" else shape  # two FP4 values in a byte
                for stored, (dtype, shape) in listed.items()
                if not stored.endswith(".scale")
            }
        )
        == ALL
    )


@pytest.mark.skipif(not LIST.is_file(), reason="the published tensor list is not beside this repository")
def test_census_of_the_published_list(capsys):
    """Totals as four publications give them: tensors and bytes, by dtype too."""
    listed = inspect.read_list(LIST)
    counted = census(listed, ModelConfig.from_file(PUBLISHED))
    assert (counted.tensors, counted.nbytes) == (96_085, 510_286_023_000)
    assert {name: (tally.tensors, tally.nbytes) for name, tally in counted.by_dtype.items()} == {
        "BF16": (520, 3_952_883_712),
        "F32": (387, 169_229_128),
        "F8_E4M3": (357, 204_015_223_296),
        "F8_E8M0": (47_589, 23_563_015_184),
        "I8": (47_232, 278_585_671_680),
    }
    assert (counted.mtp_stages, counted.mtp_head, len(counted.ignored)) == (3, Head.DSPARK, 2_667)
    for name, said in (
        ("layers.3.attn.compressor.wkv.weight", "not in this architecture"),
        ("layers.0.hc_head_fn", "unknown name"),
        ("vision.blocks.32.norm1.weight", "unknown name"),
    ):
        with pytest.raises(CheckpointError, match=said):
            census(listed | {name: ("BF16", (1,))}, ModelConfig.from_file(PUBLISHED))
    for name in ("vision.norm.weight", "layers.14.engram.k_weight", "layers.20.attn.indexer.wk.weight"):
        with pytest.raises(CheckpointError, match="missing"):
            census({one: what for one, what in listed.items() if one != name}, ModelConfig.from_file(PUBLISHED))
    assert inspect.main(["--config", str(PUBLISHED), "--tensors", str(LIST)]) == 0
    shown = capsys.readouterr().out
    assert "all 96,085 tensors accounted for" in shown
    assert "Engram, own entries, own selection" in shown
