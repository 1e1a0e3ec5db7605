"""Layers that `scripts.make_checkpoint` wrote, through `scripts.logits`, against transformers on the same files.

The oracle's weights are read with the safetensors library and decoded here, experts one at a time: whole, two layers of
V4-Flash take 52 GB in fp32. At true dimensions it takes ten minutes of one core, 12 GB of disk and 11 GB of memory.
"""

import json
import random
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import embedding, linear, softplus
from transformers import AutoConfig, DeepseekV4ForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

from fathom.model.checkpoint.names import Role, translate
from fathom.runtime.report import peak_memory
from fathom.scripts import compare, logits, make_checkpoint
from tests.exporter import exporter
from tests.make_checkpoint import tiny_config

FLASH = Path(__file__).parents[2] / "model" / "published" / "DeepSeek-V4-Flash.json"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E2M1_PAIRS = torch.stack([E2M1.repeat(16), E2M1.repeat_interleave(16)], 1)  # the low nibble is the even column


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("flash")
    yield path
    shutil.rmtree(path)  # pytest would keep 10 GB of it


class Stored:
    """The tensors of a checkpoint in fp32, by official name."""

    def __init__(self, directory):
        index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
        files = {file: safe_open(directory / file, "pt") for file in set(index.values())}
        self.raw = lambda name: files[index[name]].get_tensor(name)
        self.names = index

    def __call__(self, name):
        W = self.raw(name)
        if (scale := name.removesuffix(".weight") + ".scale") not in self.names or scale == name:
            return W if W.dtype == torch.int64 else W.float()
        s = self.raw(scale).float()
        if W.dtype == torch.int8:
            values = embedding(W.view(torch.uint8).int(), E2M1_PAIRS).flatten(1)
            return (values.unflatten(1, (-1, 32)) * s[..., None]).flatten(1)
        blocks = s.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return W.float() * blocks[: W.shape[0], : W.shape[1]]


class Experts:
    """Stands for one of transformers' stacked parameters: `stack[expert]` reads that expert."""

    def __init__(self, stored, layer, *parts):
        self.stored, self.prefix, self.parts = stored, f"layers.{layer}.ffn.experts", parts

    def __getitem__(self, expert):
        return torch.cat([self.stored(f"{self.prefix}.{int(expert)}.{part}.weight") for part in self.parts])


class Embedding(nn.Module):
    """Rows of the table as they are asked for."""

    def __init__(self, stored):
        super().__init__()
        self.stored = stored

    def forward(self, ids):
        return embedding(ids, self.stored.raw("embed.weight")).float()


def oracle(directory, stored):
    """transformers' model with every parameter but embedding and head, which are read row by row outside."""
    config = AutoConfig.from_pretrained(directory, attn_implementation="eager", experts_implementation="eager")
    with torch.device("meta"):
        model = DeepseekV4ForCausalLM(config).eval()
    inner = model.model
    for name, module in list(inner.named_modules()):
        if isinstance(module, DeepseekV4RotaryEmbedding):  # its frequencies are computed, not stored
            inner.set_submodule(name, DeepseekV4RotaryEmbedding(config))
    del inner.embed_tokens
    inner.embed_tokens = Embedding(stored)
    del model.lm_head
    for layer, block in enumerate(inner.layers):
        del block.mlp.experts.gate_up_proj, block.mlp.experts.down_proj
        block.mlp.experts.gate_up_proj = Experts(stored, layer, "w1", "w3")
        block.mlp.experts.down_proj = Experts(stored, layer, "w2")
    for theirs in model.state_dict():
        meaning = translate(theirs)
        assert meaning.role is Role.WEIGHT, theirs
        owner, _, leaf = theirs.rpartition(".")
        module, values = model.get_submodule(owner), stored(meaning.parameter)
        assert values.shape == getattr(module, leaf).shape, theirs
        setattr(module, leaf, values if leaf in module._buffers else nn.Parameter(values, requires_grad=False))
    return inner


def worst(ours, hidden, stored):
    """Largest difference of any logit at each position [t]; the head is decoded in parts."""
    head, errors = stored.raw("head.weight"), torch.zeros(len(hidden))
    for start in range(0, len(head), 8192):
        part = slice(start, start + 8192)
        errors = torch.maximum(errors, (ours[:, part] - linear(hidden, head[part].float())).abs().amax(1))
    return errors


def compared(folder, config_file, layers, prompt, decoded, seed=0):
    """Make a checkpoint, run both, and check the selection; differences [t], and each token's margin of experts [t].

    The margin is how far the last expert that is taken is ahead of the first that is not, in the scored layer.
    """
    model, tokens, out = folder / "model", folder / "tokens.json", folder / "logits.safetensors"
    config, drawn = json.loads(config_file.read_text()), random.Random(seed)
    ids = [drawn.randrange(config["vocab_size"]) for _ in range(prompt + decoded)]
    tokens.write_text(json.dumps(ids))
    assert make_checkpoint.main(["--config", str(config_file), "--layers", layers, "--out", str(model)]) == 0
    flags = ("--numerics", "plain", "--dtype", "fp32", "--decode-from", str(prompt), "--prefill-chunk", "512")
    assert logits.main(["--model", str(model), "--tokens", str(tokens), "--out", str(out), *flags]) == 0

    stored, seen = Stored(model), {}
    theirs = oracle(model, stored)
    csa, hca = theirs.layers
    hca.mlp.gate.register_forward_hook(lambda _module, _given, o: seen.update(scores=softplus(o[0]).sqrt()))
    csa.self_attn.compressor.indexer.register_forward_hook(lambda _module, _given, o: seen.update(selected=o[0]))
    with torch.inference_mode():
        hidden = theirs(torch.tensor(ids)[None], use_cache=False).last_hidden_state[0]
        errors = worst(load_file(out)["logits"], hidden, stored)
    # Entries are left out, but for the first tokens.
    most = config["index_topk"]
    assert len(ids) // 4 > most
    assert (seen["selected"] >= 0).sum(1).tolist() == [min(most, (t + 1) // 4) for t in range(len(ids))]
    chosen = config["num_experts_per_tok"]
    ordered = (seen["scores"] + hca.mlp.gate.e_score_correction_bias).sort(1, descending=True).values
    return errors, ordered[:, chosen - 1] - ordered[:, chosen]


# A sum of 8192 products of unit scale is off by 2^-24 * sqrt(8192) = 5e-6 of itself, a dozen of them in a row by 2e-5,
# and the largest logits are five times unit scale.
BOUND = 1e-4
TIED = 1e-5  # a margin within which rounding may choose another expert


def test_tiny_layers_agree_with_transformers(tmp_path):
    config = tiny_config(compress_ratios=[0, 4, 128], num_hidden_layers=3, num_hash_layers=2, index_n_heads=32)
    (tmp_path / "config.json").write_text(json.dumps(config | {"expert_dtype": "fp4"}))
    errors, margin = compared(tmp_path, tmp_path / "config.json", "1,2", 590, 5)
    assert margin.min() > TIED
    assert errors.max() < BOUND


@pytest.mark.slow
def test_two_layers_of_flash_agree_with_transformers(folder):
    if (free := shutil.disk_usage(folder).free) < 12e9:
        pytest.skip(f"takes 12 GB of disk, {free / 1e9:.1f} GB are free")
    torch.set_num_threads(1)
    errors, margin = compared(folder, FLASH, "2,3", 2304, 8)  # 578 entries of 4 tokens, of which 512 are selected
    tied = margin < TIED
    print(f"largest difference {errors.max():.1e}, median {errors.median():.1e}; {int(tied.sum())} tokens at a tie")
    assert tied.sum() < 10
    assert errors[~tied].max() < BOUND


@pytest.mark.slow
def test_compare_judges_layers_of_flash_and_names_a_fault(folder):
    """transformers' run in fp32, no sinks in the second layer.

    `folder` is what the test before has left there.
    """
    if not (folder / "model").exists():
        pytest.skip("the test before was not run, or found no room")
    torch.set_num_threads(1)
    model, ids = folder / "model", json.loads((folder / "tokens.json").read_text())
    theirs = oracle(model, Stored(model))
    theirs.layers[1].self_attn.sinks.data.fill_(-1e9)
    recording, report = folder / "recording.safetensors", folder / "report.json"
    recorder = exporter.Recorder(SimpleNamespace(model=theirs), [0, 1])
    with torch.inference_mode():
        theirs(torch.tensor(ids)[None], use_cache=False)
    save_file({"tokens": torch.tensor(ids), **recorder.tensors()}, recording)
    began = time.perf_counter()
    flags = ("--recording", str(recording), "--numerics", "plain", "--json", str(report))
    assert compare.main(["--model", str(model), *flags]) == 1
    print(f"{time.perf_counter() - began:.0f} s, peak {peak_memory('cpu') / 1e9:.1f} GB")
    found = json.loads(report.read_text())
    assert {site["status"] for site in found["sites"] if site["layer"] == 0} == {"agrees"}
    assert (found["first"]["layer"], found["first"]["site"]) == (1, "attention.unrotated")
    assert found["faults"][0]["name"] == "sink-dropped"
