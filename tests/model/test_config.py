import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom.model.config import LayerKind, ModelConfig, Yarn
from fathom.model.errors import ConfigError
from fathom.model.rope import layer_frequencies
from tests.make_checkpoint import tiny_config

PUBLISHED = Path(__file__).parents[2] / "model" / "published"


def transformers_config(**overrides):
    """What transformers 5.23 saves for the same model as `tiny_config` (the next test shows that it does)."""
    ours = tiny_config()
    for name in ("compress_ratios", "num_hash_layers", "rope_scaling", "topk_method", "torch_dtype"):
        del ours[name]
    factor = ours["qk_rope_head_dim"] / ours["head_dim"]
    yarn = {"factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
    return ours | {
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        "mlp_bias": False,
        "partial_rotary_factor": factor,
        "rope_parameters": {
            "main": {"partial_rotary_factor": factor, "rope_theta": 10000, "rope_type": "default"},
            "compress": {
                "attention_factor": 1.0,
                "partial_rotary_factor": factor,
                "rope_theta": 160000,
                "rope_type": "yarn",
                "type": "yarn",
                **yarn,
            },
        },
        **overrides,
    }


def read(obj):
    return ModelConfig.from_json(obj, "config.json")


def changed(obj, path, value):
    """A deep copy with one field changed; `path` is dotted."""
    copy = json.loads(json.dumps(obj))
    *parents, last = path.split(".")
    target = copy
    for name in parents:
        target = target[name]
    if value is KeyError:
        del target[last]
    else:
        target[last] = value
    return copy


@pytest.mark.parametrize(
    ("name", "layers", "mtp", "heads"),
    [
        ("Flash", [0, 0] + [4, 128] * 20 + [4], 1, 64),
        ("Flash-0731", [0, 0] + [4, 128] * 20 + [4], 3, 64),
        ("Flash-Base", [0, 0] + [4, 128] * 20 + [4], 1, 64),
        ("Pro", [128, 128] + [4, 128] * 29 + [4], 1, 128),
        ("Pro-0813", [128, 128] + [4, 128] * 29 + [4], 3, 128),
    ],
)
def test_published_configs(name, layers, mtp, heads):
    config = ModelConfig.from_file(PUBLISHED / f"DeepSeek-V4-{name}.json")
    assert list(config.compress_ratios) == layers
    kind_of = {0: LayerKind.SWA, 4: LayerKind.CSA, 128: LayerKind.HCA}
    assert config.layer_kinds == tuple(kind_of[ratio] for ratio in layers)
    assert [config.is_hash(layer) for layer in range(4)] == [True, True, True, False]
    assert (config.num_mtp_layers, config.num_attention_heads, config.o_groups) == (mtp, heads, heads // 8)
    assert config.rope_scaling == Yarn(16, 65536, 32, 1)


def test_fingerprint_is_of_the_architecture_and_not_of_the_release():
    prints = {
        name: ModelConfig.from_file(PUBLISHED / f"DeepSeek-V4-{name}.json").fingerprint
        for name in ("Flash", "Flash-0731", "Flash-Base", "Pro", "Pro-0813")
    }
    assert prints["Flash"] == prints["Flash-0731"] == prints["Flash-Base"]
    assert prints["Pro"] == prints["Pro-0813"] != prints["Flash"]


def test_transformers_dialect_gives_the_same_config(tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.DeepseekV4Config.from_dict(tiny_config()).save_pretrained(tmp_path)
    saved = ModelConfig.from_file(tmp_path / "config.json")
    assert saved == read(tiny_config()) == read(transformers_config())
    assert saved.fingerprint == read(tiny_config()).fingerprint


def test_transformers_defaults_are_read(tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.DeepseekV4Config().save_pretrained(tmp_path)
    saved = ModelConfig.from_file(tmp_path / "config.json")
    assert saved.rope_scaling is None  # no YaRN unless asked for
    assert saved.layer_kinds[:4] == (LayerKind.HCA, LayerKind.HCA, LayerKind.HCA, LayerKind.CSA)
    assert (saved.num_hash_layers, saved.qk_rope_head_dim) == (3, 64)


def test_compress_rates_decide_the_ratios():
    rates = {"compressed_sparse_attention": 8, "heavily_compressed_attention": 32}
    assert read(transformers_config(compress_rates=rates)).compress_ratios == (0, 8, 32, 8)


ARCHITECTURE = sorted(tiny_config().keys() - {
    "architectures", "attention_dropout", "initializer_range", "torch_dtype", "use_cache",
})  # fmt: skip


@pytest.mark.parametrize("field", ARCHITECTURE)
def test_a_missing_field_is_named(field):
    with pytest.raises(ConfigError, match=rf"^config\.json: {field}: missing$"):
        read(changed(tiny_config(), field, KeyError))


@pytest.mark.parametrize(
    "field",
    [
        "layer_types",
        "mlp_layer_types",
        "compress_rates",
        "compress_rates.compressed_sparse_attention",
        "rope_parameters",
        "rope_parameters.main",
        "rope_parameters.compress.factor",
        "rope_parameters.compress.partial_rotary_factor",
        "rope_parameters.main.rope_theta",
        "partial_rotary_factor",
        "qk_rope_head_dim",
        "mlp_bias",
    ],
)
def test_a_missing_field_of_transformers_is_named(field):
    # without layer_types the file is read as DeepSeek's, and its other fields are unknown
    with pytest.raises(
        ConfigError, match=r"unknown field|topk_method" if field == "layer_types" else rf"{field}: missing$"
    ):
        read(changed(transformers_config(), field, KeyError))


@pytest.mark.parametrize("field", ["engram_layers", "rope_scaling.mscale", "quantization_config.zero_point"])
@pytest.mark.parametrize("value", [1, None])
def test_an_unknown_field_is_named(field, value):
    base = tiny_config(quantization_config={"quant_method": "fp8"})
    with pytest.raises(ConfigError, match=rf"^config\.json: {field}: unknown field$"):
        read(changed(base, field, value))


def test_an_unknown_field_of_transformers_is_named():
    with pytest.raises(ConfigError, match=r"rope_parameters\.main\.factor: unknown field"):
        read(changed(transformers_config(), "rope_parameters.main.factor", 2))


INTEGERS = ("vocab_size", "num_hidden_layers", "head_dim", "index_topk", "hc_mult", "sliding_window", "o_groups")
NUMBERS = ("rms_norm_eps", "hc_eps", "swiglu_limit", "rope_theta", "compress_rope_theta", "routed_scaling_factor")


@pytest.mark.parametrize(
    ("field", "typo"),
    [("hidden_size", "hiden_size"), ("q_lora_rank", "q_lora_ranks"), ("compress_ratios", "compression_ratios")],
)
def test_a_field_that_is_nearly_the_missing_one_is_told(field, typo):
    obj = tiny_config()
    obj[typo] = obj.pop(field)
    with pytest.raises(ConfigError, match=rf"^config\.json: {typo}: unknown field \(did you mean {field}\?\)$"):
        read(obj)


@pytest.mark.parametrize("field", INTEGERS)
@pytest.mark.parametrize("value", [True, 0, -1, 4.0, "4", None, [4], 2**31, 10**400])
def test_integers_are_checked(field, value):
    with pytest.raises(ConfigError, match=rf"^config\.json: {field} is .*want an integer"):
        read(changed(tiny_config(), field, value))


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", [True, 0, 1e-320, -1.0, math.nan, math.inf, "1", None, [1], 10**400])
def test_numbers_are_checked(field, value):
    with pytest.raises(ConfigError, match=rf"^config\.json: {field} is .*want a positive number"):
        read(changed(tiny_config(), field, value))


@pytest.mark.parametrize(
    ("field", "value", "supported"),
    [
        ("scoring_func", "softmax", "'sqrtsoftplus'"),
        ("norm_topk_prob", False, "True"),
        ("norm_topk_prob", 1, "True"),
        ("tie_word_embeddings", True, "False"),
        ("attention_bias", True, "False"),
        ("hidden_act", "gelu", "'silu'"),
        ("n_shared_experts", 2, "1"),
        ("num_key_value_heads", 4, "1"),
        ("topk_method", "greedy", "'noaux_tc'"),
        ("model_type", "deepseek_v3", "'deepseek_v4'"),
        ("model_type", ["deepseek_v4"], "'deepseek_v4'"),
        ("rope_scaling.type", "linear", "'yarn'"),
        ("compress_ratios", [0, 2, 128, 4], "0 (SWA), 4 (CSA), more (HCA)"),
        ("compress_ratios", [0, 4, 128, 4, 4], "0"),
        ("quantization_config", {"quant_method": "compressed-tensors"}, "'fp8'"),
        ("quantization_config", {"quant_method": "fp8", "weight_block_size": [32, 32]}, "[128, 128]"),
        ("quantization_config", {"quant_method": "fp8", "scale_fmt": "float"}, "'ue8m0'"),
    ],
)
def test_what_is_not_implemented_is_refused_and_the_supported_value_named(field, value, supported):
    base = tiny_config(num_nextn_predict_layers=1)
    with pytest.raises(ConfigError) as caught:
        read(changed(base, field, value))
    message = str(caught.value)
    assert "\n" not in message
    assert field.partition(".")[0] in message
    assert f"supported: {supported}" in message


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        ({"num_hidden_layers": 5}, "compress_ratios has 4 entries; want num_hidden_layers 5"),
        (
            {"compress_ratios": [0, 4, 128, 4, 0]},
            "compress_ratios has 5 entries; want num_hidden_layers 4, or 4 with 0",
        ),
        ({"compress_ratios": [0, 4, True, 4]}, r"compress_ratios\[2\] is True"),
        ({"compress_ratios": "0,4"}, "compress_ratios is '0,4'"),
        ({"num_hash_layers": 5}, "num_hash_layers is 5, more than 4"),
        ({"qk_rope_head_dim": 96}, "qk_rope_head_dim is 96, more than head_dim 80"),
        ({"qk_rope_head_dim": 48}, "qk_rope_head_dim is 48, more than index_head_dim 32"),
        ({"qk_rope_head_dim": 15}, "qk_rope_head_dim is 15, want an even number"),
        ({"o_groups": 3}, "num_attention_heads is 4, not a multiple of o_groups 3"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, more than n_routed_experts 8"),
        ({"bos_token_id": 512}, "bos_token_id is 512, outside the vocabulary"),
        ({"eos_token_id": -1}, "eos_token_id is -1; want an integer from 0"),
        ({"eos_token_id": [1, 2]}, r"eos_token_id is \[1, 2\]"),
        ({"rope_theta": 1}, "rope_theta is 1, want more than 1"),
        ({"compress_rope_theta": 1}, "compress_rope_theta is 1, want more than 1"),
        ({"compress_rope_theta": 0.5}, "compress_rope_theta is 0.5, want more than 1"),
        ({"sliding_window": 2**20 + 1}, "sliding_window is 1048577, more than max_position_embeddings 1048576"),
        ({"sliding_window": 17, "max_position_embeddings": 16}, "sliding_window is 17, more than max_position"),
        ({"sliding_window": 2**31 - 1, "max_position_embeddings": 2**31 - 1}, "sliding_window is 2147483647, more"),
        ({"hc_sinkhorn_iters": 1001}, "hc_sinkhorn_iters is 1001, more than 1000"),
        ({"hc_sinkhorn_iters": 2**31 - 1}, "hc_sinkhorn_iters is 2147483647, more than 1000"),
        ({"n_routed_experts": 2_000_000}, "n_routed_experts is 2000000 in each of 4 layers"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; want an object"),
        ({"quantization_config": {}}, "quantization_config.quant_method: missing"),
        ({"layer_types": []}, "compress_ratios and layer_types both describe the layers"),
        ({"dspark_target_layer_ids": 3}, "dspark_target_layer_ids is 3"),
    ],
)
def test_contradictions_are_named(overrides, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        read(tiny_config(**overrides))
    assert str(caught.value).startswith("config.json: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("layer_types", ["sliding_attention"] * 3, "want a list of num_hidden_layers 4"),
        ("layer_types", ["full_attention"] * 4, r"layer_types\[0\] is 'full_attention'; supported"),
        ("mlp_layer_types", ["moe", "hash_moe", "moe", "moe"], "hash_moe after moe"),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor is 0.5, but qk_rope_head_dim 16 of 80"),
        ("rope_parameters.main.rope_theta", 160000, "main.rope_theta is 160000, but rope_theta is 10000"),
        ("rope_parameters.compress.rope_theta", 10000, "rope_theta is 10000, but compress_rope_theta is 160000"),
        ("rope_parameters.compress.attention_factor", 1.277, "attention_factor is 1.277; supported: 1"),
        ("rope_parameters.main.rope_type", "yarn", "main.rope_type is 'yarn'; supported: 'default'"),
        ("compress_rates.compressed_sparse_attention", 1, "compress_rates holds 1"),
        ("topk_method", "greedy", "supported: 'noaux_tc'"),
    ],
)
def test_contradictions_of_transformers_are_named(field, value, complaint):
    with pytest.raises(ConfigError, match=complaint):
        read(changed(transformers_config(), field, value))


@pytest.mark.parametrize(
    "change",
    [
        {"compress_rope_theta": math.nextafter(1, 2)},
        {"rope_theta": math.nextafter(1, 2)},
        {"compress_rope_theta": 1e30},
        {"rope_scaling.beta_slow": 1e-30},
        {"rope_scaling.beta_fast": 1e30},
        {"rope_scaling.factor": 1e30},
        {"rope_scaling.original_max_position_embeddings": 2**31 - 1, "rope_scaling.beta_slow": 1e-30},
        {"rope_scaling.original_max_position_embeddings": 1},
    ],
)
def test_every_config_that_is_read_has_finite_frequencies(change):
    obj = tiny_config()
    for path, value in change.items():
        obj = changed(obj, path, value)
    for kind in LayerKind:
        assert layer_frequencies(read(obj), kind).isfinite().all()


def test_mtp_stages_may_or_may_not_have_ratios():
    ratios = [0, 4, 128, 4]
    for tail in ([], [0, 0, 0]):
        config = read(tiny_config(compress_ratios=ratios + tail, dspark_target_layer_ids=[1, 2, 3]))
        assert (config.num_mtp_layers, config.compress_ratios) == (3, tuple(ratios))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b'{"a": 1, "a": 1}', "duplicate key 'a'"),
        (b'{"a": {"b": 1, "b": 2}}', "duplicate key 'b'"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": 1e999}', "the number 1e999 is beyond float64"),
        (b'{"a": 1', "damaged JSON"),
        (b"", "damaged JSON"),
        (b"[1]", "want a JSON object"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "4300 digits"),
    ],
)
def test_damaged_files_are_named(tmp_path, text, complaint):
    path = tmp_path / "config.json"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=complaint) as caught:
        ModelConfig.from_file(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json: No such file"):
        ModelConfig.from_file(tmp_path / "config.json")


def test_to_json_is_json_and_complete():
    data = json.loads(json.dumps(read(tiny_config()).to_json()))
    assert data["layer_kinds"] == ["swa", "csa", "hca", "csa"]
    assert data.keys() == set(ModelConfig.__dataclass_fields__) - {"v41"}  # of a V4


@pytest.mark.parametrize(
    "field", sorted(ModelConfig.__dataclass_fields__.keys() & {*INTEGERS, *NUMBERS} - {"num_hidden_layers", "o_groups"})
)
def test_fingerprint_depends_on_each_architecture_field(field):
    base = tiny_config()
    assert read(changed(base, field, 2 * base[field])).fingerprint != read(base).fingerprint


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from([tiny_config(), transformers_config()]), st.data(), JSON)
def test_any_value_in_any_field_is_read_or_refused(base, data, value):
    field = data.draw(st.sampled_from(sorted(base)))
    try:
        config = read(base | {field: value})
    except ConfigError as error:
        complaint = str(error)
    else:
        complaint = ""
        assert config == read(config_again(config))
    assert "\n" not in complaint


def config_again(config):
    """The same architecture in DeepSeek's dialect, from nothing but the parsed fields."""
    data = config.to_json()
    yarn = data.pop("rope_scaling")
    kinds, stages = data.pop("layer_kinds"), data.pop("num_mtp_layers")
    drafts = {f"dspark_{name}": value for name, value in (data.pop("dspark") or {}).items()}
    assert kinds == [{0: "swa", 4: "csa"}.get(ratio, "hca") for ratio in data["compress_ratios"]]
    fixed = {
        name: tiny_config()[name]
        for name in (
            "attention_bias", "hidden_act", "model_type", "norm_topk_prob", "num_key_value_heads", "scoring_func",
            "tie_word_embeddings", "topk_method",
        )
    }  # fmt: skip
    return (
        data | fixed | drafts | {"rope_scaling": yarn and yarn | {"type": "yarn"}, "num_nextn_predict_layers": stages}
    )
