"""The training network: it is the published architecture, it learns, and its export decodes to what was rounded."""

import json
import random
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from probes.demo_language.language import Answer
from probes.demo_language.prompts import Prompt
from scripts.demo.curriculum import Cell, draw_batch
from scripts.demo.export import deployed_copy, fp4_decoded, fp4_stored, fp8_decoded, fp8_stored, write_checkpoint
from scripts.demo.initial import initialise
from scripts.demo.measure import right_answers
from scripts.demo.network import Network, Run
from scripts.demo.rounding import fp4_groups, fp8_blocks, hadamard, power_of_two_scale, round_e2m1
from scripts.demo.shape import config_json, demo_shape
from scripts.demo.streams import sinkhorn
from scripts.demo.training import train

MODULES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "hc_attn": "attn_hc",
    "hc_ffn": "ffn_hc",
    "attn": "self_attn",
    "attn_sink": "sinks",
    "ffn": "mlp",
    "wq_a": "q_a_proj",
    "wq_b": "q_b_proj",
    "wkv": "kv_proj",
    "wgate": "gate_proj",
    "wo_a": "o_a_proj",
    "wo_b": "o_b_proj",
    "q_norm": "q_a_norm",
    "ape": "position_bias",
    "weights_proj": "scorer.weights_proj",
}
SHARED = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def transformers_name(name: str) -> str:
    top = {
        "embed.weight": "model.embed_tokens.weight",
        "head.weight": "lm_head.weight",
        "norm.weight": "model.norm.weight",
    }
    if name in top:
        return top[name]
    if name.startswith("hc_head."):
        return "model.hc_head.hc_" + name.removeprefix("hc_head.")
    name = name.replace("indexer.compressor.", "compressor.indexer.").replace(
        "attn.indexer.", "attn.compressor.indexer."
    )
    parts = name.split(".")
    if "compressor" in parts:
        parts = ["kv_norm" if part == "norm" else part for part in parts]
    table = MODULES | SHARED if "shared_experts" in parts else MODULES
    renamed = ".".join(table.get(part, part) for part in parts)
    return "model." + renamed.replace("gate.bias", "gate.e_score_correction_bias")


def transformers_state(network: Network) -> dict[str, torch.Tensor]:
    state = {}
    for name, value in network.state_dict().items():
        if name.endswith("ffn.w1"):
            up = network.state_dict()[name.replace("w1", "w3")]
            state[f"model.{name[:-6]}mlp.experts.gate_up_proj"] = torch.cat([value, up], 1)
        elif name.endswith("ffn.w2"):
            state[f"model.{name[:-6]}mlp.experts.down_proj"] = value
        elif not name.endswith("ffn.w3"):
            state[transformers_name(name)] = value
    return state


def transformers_model(network: Network) -> DeepseekV4ForCausalLM:
    fields = config_json(network.shape)
    yarn = fields.pop("rope_scaling")
    yarn["rope_type"] = yarn.pop("type")
    for unknown in ("quantization_config", "torch_dtype", "expert_dtype"):
        fields.pop(unknown)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**fields, rope_parameters=yarn)).float().eval()
    model.load_state_dict(transformers_state(network), strict=True)
    return model


def perturbed(seed: int) -> Network:
    """Every parameter moved off its initial value, so that none of them is a one, a zero or a copy of another."""
    network = Network(demo_shape())
    initialise(network, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in [*network.named_parameters(), *network.named_buffers()]:
            if value.is_floating_point() and not name.endswith("indexer.H"):
                value.add_(0.05 * torch.randn(value.shape, generator=generator))
    return network


def closest_call(network: Network, ids: torch.Tensor) -> float:
    """Smallest distance between the last entry that an indexer selects and the first that it does not."""
    _, seen = network(ids, Run(record=True))
    gaps = [torch.tensor(1.0)]
    for layer in seen:
        causal = torch.arange(layer.scores.shape[2]) < ((torch.arange(layer.scores.shape[1]) + 1) // 4).unsqueeze(1)
        scores = layer.scores.masked_fill(~causal, -torch.inf)
        if scores.shape[2] > network.shape.index_topk:
            best = scores.topk(network.shape.index_topk + 1, -1).values
            gaps.append((best[..., -2] - best[..., -1]).nan_to_num(1.0).min())
    return float(torch.stack(gaps).min())


# 40 tokens: no HCA entry, every CSA entry selected. 200: an HCA entry, 16 of 50 CSA entries selected. Inputs on which
# two entries are too close to call within rounding are passed over: either selection would be right.
@pytest.mark.parametrize("length", [16, 40, 200])
def test_logits_are_those_of_transformers(length):
    network = perturbed(0)
    generator = torch.Generator().manual_seed(length)
    with torch.no_grad():
        for _ in range(20):
            ids = torch.randint(0, network.shape.vocab, (1, length), generator=generator)
            if closest_call(network, ids) > 2e-6:  # scores are about 1, their FP32 rounding about 2e-7
                break
        else:
            pytest.fail("no input without a close call")
        logits, _ = network(ids, Run())
        expected = transformers_model(network)(ids).logits
    assert (logits - expected).abs().max() < 1e-4
    assert expected.std() > 0.1


def test_what_is_hidden_changes_the_logits_after_the_window_alone():
    network = perturbed(1)
    ids = torch.randint(0, network.shape.vocab, (1, 256), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        full, none, no_hca = (network(ids, run)[0][0] for run in (Run(), Run(csa="none"), Run(hca=False)))
    assert torch.equal(full[:3], none[:3])  # the first entry is complete after four tokens
    assert not torch.allclose(full[20:], none[20:])
    torch.testing.assert_close(full[:127], no_hca[:127], rtol=0, atol=0)  # the first HCA entry after 128
    assert not torch.allclose(full[200:], no_hca[200:])


def test_a_few_steps_reduce_the_loss():
    cells = (Cell(64, (2, 3), (2, 3), 1.0, 0.75, 0.0),)
    network = Network(demo_shape())
    initialise(network, 0)
    curve = []
    train(network, 10, 0, lambda report: curve.append(report.language), lambda rng: draw_batch(rng, cells, 128))
    assert sum(curve[-3:]) < sum(curve[:3]) - 0.6  # three steps: 0.2 nats a step below the start, in 12 of warm-up


def test_a_batch_says_where_its_answers_are():
    batch = draw_batch(random.Random(2))
    assert torch.equal(batch.ids[batch.rows, batch.queries + 1], batch.answers)
    told = batch.sources >= 0
    assert torch.equal(batch.ids[batch.rows[told], batch.sources[told]], batch.answers[told])


def test_sinkhorn_gradient_is_that_of_the_definition():
    logits = torch.randn(5, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: sinkhorn(x, 20, 1e-6), (logits,))


def test_scale_is_the_smallest_power_of_two_that_fits():
    amax = torch.tensor([448.0, 448.1, 224.0, 6.0, 1e-4, 447.9])
    scale = power_of_two_scale(amax, 448.0)
    assert scale.tolist()[:3] == [1.0, 2.0, 0.5]
    assert ((amax / scale <= 448) & (amax / scale > 224)).all()


def test_e2m1_rounds_to_the_nearest_and_ties_to_even():
    x = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, -0.2, -5.5, 4.9])
    assert round_e2m1(x).tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -0.0, -6.0, 4.0]


def test_hadamard_is_orthogonal():
    H = hadamard(128)
    torch.testing.assert_close(H @ H.T, torch.eye(128), rtol=0, atol=1e-6)


def test_stored_weights_decode_to_what_training_rounded_them_to():
    W = torch.randn(256, 384, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 2, 384)
    assert torch.equal(fp8_decoded(*fp8_stored(W)), fp8_blocks(W))
    assert torch.equal(fp4_decoded(*fp4_stored(W)), fp4_groups(W))


def test_the_written_checkpoint_holds_the_deployed_weights(tmp_path):
    network = perturbed(2)
    write_checkpoint(network, tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    stored = {}
    for file in sorted(set(index["weight_map"].values())):
        part = load_file(tmp_path / file)
        assert all(index["weight_map"][name] == file for name in part)
        stored |= part
    assert set(stored) == set(index["weight_map"])
    deployed_copy(network)
    state = network.state_dict()
    name = "layers.1.attn.indexer.wq_b"
    assert torch.equal(fp8_decoded(stored[f"{name}.weight"], stored[f"{name}.scale"]), state[f"{name}.weight"])
    name = "layers.3.ffn.experts.5.w2"
    assert torch.equal(fp4_decoded(stored[f"{name}.weight"], stored[f"{name}.scale"]), state["layers.3.ffn.w2"][5])
    assert torch.equal(
        stored["layers.2.attn.compressor.wkv.weight"].float(), state["layers.2.attn.compressor.wkv.weight"]
    )
    assert torch.equal(stored["layers.0.hc_attn_fn"], state["layers.0.hc_attn.fn"])
    assert stored["layers.0.ffn.gate.tid2eid"].dtype == torch.int64


def test_the_hash_table_is_balanced_and_never_repeats_an_expert():
    network = Network(demo_shape())
    initialise(network, 3)
    table = network.layers[0].ffn.gate.tid2eid
    assert (table[:, 0] != table[:, 1]).all()
    first = torch.bincount(table[:, 0], minlength=network.shape.experts)
    assert first.max() - first.min() <= 1


def test_an_answer_counts_as_right_when_its_token_is_the_likeliest():
    network = Network(replace(demo_shape(), ratios=(0,)))
    initialise(network, 0)
    ids = tuple(range(100, 140))
    with torch.no_grad():
        likeliest = network(torch.tensor([ids]), Run())[0][0].argmax(-1).tolist()
    answers = (Answer(5, likeliest[5]), Answer(39, (likeliest[39] + 1) % network.shape.vocab))
    assert right_answers(network, [Prompt("any", ids, answers)], Run()) == [True, False]
