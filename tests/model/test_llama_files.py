"""What a Llama-family config.json and checkpoint must say: published ones are read, hostile ones refused by name."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from fathom.model.architectures import config_from_file
from fathom.model.errors import CapacityError, CheckpointError, ConfigError
from fathom.model.llama.census import census, parameters
from fathom.model.llama.config import LlamaConfig
from fathom.runtime.load import load_any
from fathom.runtime.options import RunOptions
from tests.llama_configs import LLAMA_2_7B, LLAMA_3_1_8B, LLAMA_3_2_1B, MISTRAL_7B_V1, SMOLLM2_135M
from tests.llama_model import LLAMA3, load_ours, oracle
from tests.make_checkpoint import tiny_config


@pytest.mark.parametrize(
    ("published", "weights", "tensors", "head_dim"),
    [
        (LLAMA_2_7B, 6_738_415_616, 291, 128),
        (LLAMA_3_1_8B, 8_030_261_248, 291, 128),
        (LLAMA_3_2_1B, 1_235_814_400, 146, 64),
        (SMOLLM2_135M, 134_515_008, 272, 64),
        (MISTRAL_7B_V1, 7_241_732_096, 291, 128),
    ],
    ids=["Llama-2-7b", "Llama-3.1-8B", "Llama-3.2-1B", "SmolLM2-135M", "Mistral-7B-v0.1"],
)
def test_published_configs_demand_the_published_weights(published, weights, tensors, head_dim):
    config = LlamaConfig.from_json(published, "config.json")
    demanded = parameters(config)
    assert sum(math.prod(parameter.shape) for parameter in demanded.values()) == weights
    assert len(demanded) == tensors
    assert config.head_dim == head_dim


def test_what_absence_means():
    old = LlamaConfig.from_json({k: v for k, v in LLAMA_2_7B.items() if k not in ABSENT}, "")
    assert old == LlamaConfig.from_json(LLAMA_2_7B, "")
    assert (old.rope_theta, old.num_key_value_heads, old.tie_word_embeddings) == (10000.0, 32, False)
    assert (old.rope_scaling, old.sliding_window, old.head_dim) == (None, None, 128)
    assert LlamaConfig.from_json(MISTRAL_7B_V1, "").sliding_window == 4096
    assert LlamaConfig.from_json(MISTRAL_7B_V1 | {"sliding_window": None}, "").sliding_window is None
    assert LlamaConfig.from_json(LLAMA_3_1_8B, "").eos_token_ids == (128001, 128008, 128009)


ABSENT = ("num_key_value_heads", "rope_scaling", "tie_word_embeddings")


def test_both_spellings_of_the_rotation_have_one_fingerprint():
    scaling = LLAMA_3_1_8B["rope_scaling"]
    new = {k: v for k, v in LLAMA_3_1_8B.items() if k not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = scaling | {"rope_theta": 500000.0}
    ours = LlamaConfig.from_json(LLAMA_3_1_8B, "")
    assert LlamaConfig.from_json(new, "").fingerprint == ours.fingerprint
    doubled = LLAMA_3_1_8B | {"rope_scaling": scaling | {"type": "llama3"}}
    assert LlamaConfig.from_json(doubled, "") == ours
    other = LLAMA_3_1_8B | {"rope_scaling": scaling | {"factor": 16.0}}
    assert LlamaConfig.from_json(other, "").fingerprint != ours.fingerprint
    other_kind = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert LlamaConfig.from_json(LLAMA_3_1_8B | other_kind, "").fingerprint != ours.fingerprint


GONE = object()


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (LLAMA_2_7B, {"attention_bias": True}, "attention_bias is True; supported: False"),
        (LLAMA_2_7B, {"mlp_bias": True}, "mlp_bias is True; supported: False"),
        (LLAMA_2_7B, {"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'"),
        (LLAMA_2_7B, {"rope_interleaved": True}, "rope_interleaved is True; supported: False"),
        (LLAMA_2_7B, {"architectures": ["LlamaForSequenceClassification"]}, "architectures is ["),
        (LLAMA_2_7B, {"architectures": ["MistralForCausalLM"]}, "supported: ['LlamaForCausalLM']"),
        (LLAMA_2_7B, {"architectures": GONE}, "architectures: missing"),
        (LLAMA_2_7B, {"hidden_size": GONE}, "hidden_size: missing"),
        (LLAMA_2_7B, {"rms_norm_eps": GONE}, "rms_norm_eps: missing"),
        (LLAMA_2_7B, {"eos_token_id": []}, "eos_token_id is []"),
        (LLAMA_2_7B, {"eos_token_id": [2, 32000]}, "eos_token_id holds [32000], outside the vocabulary"),
        (LLAMA_2_7B, {"bos_token_id": 32000}, "bos_token_id is 32000, outside the vocabulary"),
        (LLAMA_2_7B, {"sliding_window": 4096}, "sliding_window: unknown field"),
        (LLAMA_2_7B, {"logit_scale": 2}, "logit_scale: unknown field"),
        (
            LLAMA_2_7B,
            {"hidden_size": GONE, "hidden_sise": 4096},
            "hidden_sise: unknown field (did you mean hidden_size?)",
        ),
        (LLAMA_2_7B, {"quantization_config": {"quant_method": "awq"}}, "quantization_config: quantised checkpoints"),
        (LLAMA_2_7B, {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; want true or false"),
        (LLAMA_2_7B, {"num_key_value_heads": 5}, "not a multiple of num_key_value_heads 5"),
        (LLAMA_2_7B, {"head_dim": 127}, "head_dim is 127, want an even number"),
        (LLAMA_2_7B, {"num_attention_heads": 24}, "hidden_size is 4096, no multiple of num_attention_heads 24"),
        (LLAMA_2_7B, {"num_hidden_layers": 5000}, "num_hidden_layers is 5000, more than 4096"),
        (LLAMA_2_7B, {"rope_theta": 1.0}, "rope_theta is 1, want more than 1"),
        (LLAMA_2_7B, {"rope_scaling": {"factor": 2.0}}, "rope_scaling.rope_type: missing"),
        (LLAMA_2_7B, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type is 'dynamic'"),
        (
            LLAMA_2_7B,
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "supported: 'default', 'linear', 'llama3'",
        ),
        (LLAMA_2_7B, {"rope_scaling": {"type": "linear", "rope_type": "llama3"}}, "type says something else"),
        (LLAMA_2_7B, {"rope_scaling": LLAMA3 | {"mscale": 1}}, "rope_scaling.mscale: unknown field"),
        (LLAMA_2_7B, {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "low_freq_factor is 1, want less than"),
        (LLAMA_2_7B, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor: missing"),
        (LLAMA_3_1_8B, {"rope_parameters": LLAMA3}, "want one of them"),
        (LLAMA_2_7B, {"rope_parameters": {"rope_type": "default"}}, "rope_parameters.rope_theta: missing"),
        (
            LLAMA_2_7B,
            {"rope_parameters": {"rope_type": "default", "rope_theta": 100, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5",
        ),
        (
            LLAMA_2_7B,
            {"rope_theta": 99, "rope_parameters": {"rope_type": "default", "rope_theta": 100}},
            "rope_theta is 99, but rope_parameters.rope_theta is 100",
        ),
        (MISTRAL_7B_V1, {"sliding_window": GONE}, "sliding_window: missing"),
        (MISTRAL_7B_V1, {"sliding_window": 0}, "sliding_window is 0; want an integer from 1"),
        (MISTRAL_7B_V1, {"rope_theta": GONE}, "rope_theta: missing"),
        (MISTRAL_7B_V1, {"num_key_value_heads": GONE}, "num_key_value_heads: missing"),
    ],
)
def test_a_config_that_is_not_implemented_is_refused_in_one_line(base, changes, message, tmp_path):
    config = {name: value for name, value in (base | changes).items() if value is not GONE}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError) as error:
        config_from_file(path)
    told = str(error.value)
    assert told.startswith(f"{path}: ")
    assert message in told
    assert "\n" not in told


def test_each_architecture_is_told_by_its_model_type(tmp_path):
    path = tmp_path / "config.json"
    for kind, known in (("deepseek_v4", True), ("gemma", False), (["llama"], False)):
        path.write_text(json.dumps(tiny_config() | {"model_type": kind}))
        if known:
            assert type(config_from_file(path)).__name__ == "ModelConfig"
        else:
            with pytest.raises(ConfigError, match="model_type is"):
                config_from_file(path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    oracle(num_hidden_layers=2).save_pretrained(directory)
    return directory


def changed(saved, tmp_path, change, config=None):
    """A copy of the checkpoint whose tensors went through `change`."""
    tensors = load_file(saved / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    said = json.loads((saved / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | (config or {})))
    return tmp_path


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q), f"missing (1): {Q}"),
        (lambda t: t.pop("lm_head.weight"), "missing (1): lm_head.weight"),
        (lambda t: t.update({Q: torch.zeros(32, 31)}), f"misshapen (1): '{Q}' is [32, 31], want [32, 32]"),
        (lambda t: t.update({Q: torch.zeros(32, 32, dtype=torch.int8)}), f"wrong type (1): '{Q}' is I8, want BF16 or"),
        (lambda t: t.update({Q: torch.zeros(32, 32).to(torch.float8_e4m3fn)}), "is F8_E4M3, want BF16 or F16 or F32"),
        (lambda t: t.update({Q.replace("weight", "bias"): torch.zeros(32)}), "unknown name (1): 'model.layers.1.self_"),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(1)}),
            "unknown name (1): 'model.layers.2",
        ),
        (lambda t: t.update({"model.layers.2.self_attn.rotary_emb.inv_freq": torch.zeros(4)}), "unknown name (1)"),
        (lambda t: t.update({"layers.0.mlp.up_proj.weight": torch.zeros(56, 32)}), "unknown name (1): 'layers.0.mlp"),
    ],
)
def test_a_checkpoint_with_other_tensors_is_refused_by_name(saved, tmp_path, change, message):
    directory = changed(saved, tmp_path, change)
    with pytest.raises(CheckpointError) as error:
        load_ours(directory)
    assert str(error.value).startswith(f"{directory}: ")
    assert message in str(error.value)


def test_a_tied_head_is_absent_or_the_embedding(saved, tmp_path):
    def tie(t):
        t["lm_head.weight"] = t["model.embed_tokens.weight"].clone()

    def one_bit(t):
        tie(t)
        t["lm_head.weight"].view(torch.int32)[70, 3] ^= 1

    def sign_of_zero(t):
        t["model.embed_tokens.weight"][5, 0] = 0.0
        tie(t)
        t["lm_head.weight"][5, 0] = -0.0

    def another_type(t):
        t["lm_head.weight"] = t["model.embed_tokens.weight"].half()

    tied = {"tie_word_embeddings": True}
    alone = load_ours(changed(saved, tmp_path, lambda t: t.pop("lm_head.weight"), tied))
    both = load_ours(changed(saved, tmp_path, tie, tied))
    assert list(both.census.ignored) == ["lm_head.weight"]
    hidden = torch.randn(2, 32)
    assert torch.equal(alone.model.logits(hidden), both.model.logits(hidden))
    for change, message in (
        (one_bit, "row 70 is not the embedding's"),
        (sign_of_zero, "row 5 is not the embedding's"),
        (another_type, "it is F16 [96, 32]"),
    ):
        with pytest.raises(CheckpointError) as error:
            load_ours(changed(saved, tmp_path, change, tied))
        assert message in str(error.value)
        assert "'lm_head.weight'" in str(error.value)


def test_the_census_counts_everything(saved):
    loaded = load_ours(saved)
    assert loaded.census.tensors == 21
    assert loaded.census.weights == sum(t.numel() for t in load_file(saved / "model.safetensors").values())
    assert loaded.census.nbytes == 4 * loaded.census.weights == sum(loaded.held.values())
    again = census({name: ("F16", p.shape) for name, p in loaded.census.demanded.items()}, loaded.model.config)
    assert again.nbytes == 2 * loaded.census.weights


def test_options_that_the_family_does_not_have_are_refused(saved):
    with pytest.raises(
        ConfigError, match="--numerics deployed is DeepSeek-V4's; run a llama model with --numerics plain"
    ):
        load_any(saved, RunOptions())
    with pytest.raises(ConfigError, match="--rank-tokens own: each rank of a llama model has all tokens"):
        load_any(saved, RunOptions("plain", rank_tokens="own"))
    with pytest.raises(CapacityError, match="a context of 257 positions, max_position_embeddings is 256"):
        load_any(saved, RunOptions("plain"), context=257)
