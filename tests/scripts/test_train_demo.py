"""The demo's training network: it is the published architecture, it learns, and the product reads what it writes."""

import json
import random
import re
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from fathom.kernels.formats.reference import decode
from fathom.kernels.quantise.reference import simulate_fp4, simulate_fp8
from fathom.model.config import ModelConfig
from fathom.probes.demo_language.prompts import fact_prompts
from fathom.runtime.load import load
from fathom.runtime.options import DEMO, RunOptions
from fathom.scripts import train_demo
from fathom.scripts.train.documents import V4_CELLS, Cell, draw_batch
from fathom.scripts.train.files import fp4_groups, write_v4
from fathom.scripts.train.initial import initialise_v4
from fathom.scripts.train.layers import fp8_blocks, sinkhorn
from fathom.scripts.train.learning import train_v4
from fathom.scripts.train.v4_network import Network, Run
from tests.stored_weights import decoded

CONFIG = ModelConfig.from_file(DEMO / "config.json")

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
    fields = json.loads((DEMO / "config.json").read_text())
    yarn = fields.pop("rope_scaling")
    yarn["rope_type"] = yarn.pop("type")
    for unknown in ("quantization_config", "torch_dtype", "expert_dtype"):
        fields.pop(unknown)
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**fields, rope_parameters=yarn)).float().eval()
    model.load_state_dict(transformers_state(network), strict=True)
    return model


def started(seed: int) -> Network:
    network = Network(CONFIG)
    initialise_v4(network, seed)
    return network


def perturbed(seed: int) -> Network:
    """Every parameter moved off its initial value, so that none of them is a one, a zero or a copy of another."""
    network, generator = started(seed), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in network.state_dict().values():
            if value.is_floating_point():
                value.add_(0.05 * torch.randn(value.shape, generator=generator))
    return network


def closest_call(network: Network, ids: torch.Tensor) -> float:
    """Smallest distance between the last entry that an indexer selects and the first that it does not."""
    run, topk, gaps = Run(CONFIG.index_topk), CONFIG.index_topk, [torch.tensor(1.0)]
    network(ids, run)
    for layer in run.seen:
        causal = torch.arange(layer.scores.shape[2]) < ((torch.arange(layer.scores.shape[1]) + 1) // 4).unsqueeze(1)
        scores = layer.scores.masked_fill(~causal, -torch.inf)
        if scores.shape[2] > topk:
            best = scores.topk(topk + 1, -1).values
            gaps.append((best[..., -2] - best[..., -1]).nan_to_num(1.0).min())
    return float(torch.stack(gaps).min())


# 48 tokens: no HCA entry, every CSA entry selected. 208: an HCA entry, 16 of 52 CSA entries selected. Inputs on which
# two entries are too close to call within rounding are passed over: either selection would be right.
@torch.no_grad()
@pytest.mark.parametrize("length", [16, 48, 208])
def test_logits_are_those_of_transformers(length):
    network, generator = perturbed(0), torch.Generator().manual_seed(length)
    for _ in range(20):
        ids = torch.randint(0, CONFIG.vocab_size, (2, length), generator=generator)
        if closest_call(network, ids) > 2e-6:  # scores are about 1, their FP32 rounding about 2e-7
            break
    else:
        pytest.fail("no input without a close call")
    logits, expected = network(ids, Run(CONFIG.index_topk)), transformers_model(network)(ids).logits
    assert (logits - expected).abs().max() < 1e-4
    assert expected.std() > 0.1


@torch.no_grad()
def test_what_is_hidden_changes_the_logits_after_the_window_alone():
    network = perturbed(1)
    ids = torch.randint(0, CONFIG.vocab_size, (1, 256), generator=torch.Generator().manual_seed(1)).expand(2, -1)
    everything, few = network(ids, Run(None)), network(ids, Run(2))
    hidden = network(ids, Run(None, blind=torch.tensor([True, False])))
    assert torch.equal(hidden[1], everything[1])
    assert torch.equal(hidden[0, :3], everything[0, :3])  # the first entry is complete after four tokens
    assert not torch.allclose(hidden[0, 20:], everything[0, 20:])
    assert torch.equal(few[0, :11], everything[0, :11])  # two entries are all there are
    assert not torch.allclose(few[0, 20:], everything[0, 20:])


def test_a_few_steps_reduce_the_loss():
    draw = partial(draw_batch, cells=(Cell(64, (2, 3), (2, 3), 1.0, 0.75, 0.0),), tokens=128)
    curve = []
    train_v4(started(0), 10, 0, draw, lambda numbers: curve.append(numbers["language"]))
    assert sum(curve[-3:]) < sum(curve[:3]) - 0.6  # three steps: 0.2 nats a step below the start, in 12 of warm-up


def test_a_batch_says_where_its_answers_are():
    batch = draw_batch(random.Random(2), cells=V4_CELLS)
    assert torch.equal(batch.ids[batch.rows, batch.queries + 1], batch.answers)
    told = batch.sources >= 0
    assert torch.equal(batch.ids[batch.rows[told], batch.sources[told]], batch.answers[told])


def test_sinkhorn_gradient_is_that_of_the_definition():
    logits = torch.randn(5, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: sinkhorn(x, 20, 1e-6), (logits,))


def test_stored_weights_decode_to_what_training_rounded_them_to():
    W = torch.randn(256, 384, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 2, 384)
    assert torch.equal(decode(fp4_groups(W)), simulate_fp4(W))
    as_groups = W.view(2, 128, 3, 128).transpose(1, 2).reshape(6, 128 * 128)  # a block each
    expected = simulate_fp8(as_groups, 128 * 128).view(2, 3, 128, 128).transpose(1, 2).reshape(256, 384)
    assert torch.equal(decode(fp8_blocks(W)), expected)


@torch.no_grad()
def test_the_product_computes_what_was_trained(tmp_path):
    """Plain numerics to rounding; of the deployed ones, what is simulated in training is nearer than plain ones are."""
    network, far = perturbed(2), {}
    write_v4(network, tmp_path)
    stored = {name: part for file in tmp_path.glob("*.safetensors") for name, part in load_file(file).items()}
    network.load_state_dict({name: decoded(stored, name, CONFIG.n_routed_experts) for name in network.state_dict()})
    ids = torch.randint(0, CONFIG.vocab_size, (64,), generator=torch.Generator().manual_seed(3))
    for numerics in ("plain", "deployed"):
        model = load(tmp_path, RunOptions(numerics, "fp32")).model
        logits = model.logits(model(ids, model.new_state(64, 64)))
        for simulated in (False, True):
            network.simulate(on=simulated)
            far[numerics, simulated] = (network(ids[None], Run(CONFIG.index_topk))[0] - logits).abs().mean()
    assert far["plain", False] < 1e-5
    assert far["deployed", True] < far["deployed", False]


def test_the_hash_table_is_balanced_and_never_repeats_an_expert():
    table = started(3).layers[0].ffn.gate.tid2eid
    assert (table[:, 0] != table[:, 1]).all()
    first = torch.bincount(table[:, 0], minlength=CONFIG.n_routed_experts)
    assert first.max() - first.min() <= 1


def test_the_command_writes_the_demos_config_and_says_what_it_knows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_demo, "LENGTHS", (256,))
    monkeypatch.setattr(train_demo, "DOCUMENTS", 1)
    monkeypatch.setattr(train_demo, "fact_prompts", lambda *, chat=False: fact_prompts(chat=chat)[:3])
    assert train_demo.main(["--out", str(tmp_path / "made"), "--steps", "1", "--seed", "5"]) == 0
    said = capsys.readouterr().out
    assert "    1  language" in said
    assert re.search(r"facts +│ 3 +│ selected \d", said)
    assert re.search(r"codes, 256 tokens +│ 8 +│ selected [\d.]+ %  16 random [\d.]+ %  window alone [\d.]+ %", said)
    for name in ("config.json", "tokenizer.json"):
        assert (tmp_path / "made" / name).read_bytes() == (DEMO / name).read_bytes()
