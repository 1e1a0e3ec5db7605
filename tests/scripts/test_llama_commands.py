"""The commands over a Llama-family checkpoint, from argv to files: what they write, continue and refuse."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from fathom.model.llama.adapters import shapes
from fathom.runtime.errors import PromptError
from fathom.runtime.generate import prefill
from fathom.runtime.statefile import load_state, save_state
from fathom.runtime.text.tokenizer import Tokenizer
from fathom.scripts import generate, inspect, logits, plan
from fathom.scripts.cli import run
from tests.by_hand import ROOT
from tests.llama_configs import LLAMA_3_1_8B
from tests.llama_model import LLAMA3, load_ours, oracle, their_logits, write_tokenizer

PLAIN = ("--numerics", "plain", "--dtype", "fp32")
TOKENS = [5, 90, 33, 7, 7, 61, 12, 80, 2, 44, 19, 3, 71]


@pytest.fixture(scope="module")
def theirs():
    return oracle(vocab_size=264, rope=LLAMA3, bos_token_id=256, eos_token_id=[257, 100], num_hidden_layers=2)


@pytest.fixture(scope="module")
def directory(theirs, tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    theirs.save_pretrained(path)
    write_tokenizer(path)
    return path


def generated(directory, tmp_path, *flags):
    path = tmp_path / "run.json"
    assert generate.main(["--model", str(directory), "--json", str(path), *PLAIN, *flags]) == 0
    return json.loads(path.read_text())


def refused(script, capsys, *flags):
    """The one line on stderr with which a script refuses."""
    assert run(lambda: script.main([str(flag) for flag in flags])) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    return lines[0]


def test_logits_are_those_of_transformers(directory, theirs, tmp_path):
    tokens, out = tmp_path / "tokens.json", tmp_path / "logits.safetensors"
    tokens.write_text(json.dumps(TOKENS))
    flags = ["--model", str(directory), "--tokens", str(tokens), "--out", str(out), *PLAIN]
    wanted = their_logits(theirs, torch.tensor(TOKENS))
    for more in ([], ["--prefill-chunk", "3"], ["--decode-from", "4"]):
        assert logits.main(flags + more) == 0
        assert (load_file(out)["logits"] - wanted).abs().max() < 1e-5


def test_a_raw_prompt_is_continued_as_transformers_continues_it(directory, theirs, tmp_path, capsys):
    data = generated(directory, tmp_path, "--raw", "--prompt", "Héllo", "--max-new-tokens", "12")
    assert data["prompt"] == AutoTokenizer.from_pretrained(directory)("Héllo")["input_ids"]
    assert data["prompt"][0] == 256
    prompt = torch.tensor([data["prompt"]])
    greedy = theirs.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert data["tokens"] == greedy[0, prompt.shape[1] :].tolist()
    assert data["ended"] == "limit"
    assert "message" not in data
    assert capsys.readouterr().out.endswith(data["text"] + "\n")
    assert data["options"]["numerics"] == "plain"
    assert data["position"] == len(data["prompt"]) + 11
    assert data["cache_bytes"].keys() == {"keys", "values"}
    assert (
        sum(v for k, v in data["planned_bytes"].items() if k not in ("needed", "mapped_weights"))
        == (data["planned_bytes"]["needed"])
    )
    assert data["planned_bytes"]["caches"] == sum(data["cache_bytes"].values())


def test_every_eos_of_the_config_ends_an_answer(directory, tmp_path):
    """The token that greedy decoding chooses third becomes one of two that end it."""
    shutil.copytree(directory, tmp_path / "copy")
    free = generated(directory, tmp_path, "--raw", "--prompt", "Hello", "--max-new-tokens", "6")["tokens"]
    third = next(token for token in free[2:] if token not in free[:2])
    config = json.loads((directory / "config.json").read_text()) | {"eos_token_id": [257, third]}
    (tmp_path / "copy/config.json").write_text(json.dumps(config))
    data = generated(tmp_path / "copy", tmp_path, "--raw", "--prompt", "Hello", "--max-new-tokens", "6")
    assert data["tokens"] == free[: free.index(third) + 1]
    assert data["ended"] == "eos"


def test_a_saved_run_continues_as_if_it_had_not_stopped(directory, tmp_path):
    flags = ("--raw", "--prompt", "The quick brown fox", "--max-context", "64")
    whole = generated(directory, tmp_path, *flags, "--max-new-tokens", "14")["tokens"]
    state = ("--save-state", str(tmp_path / "state"))
    first = generated(directory, tmp_path, *flags, "--max-new-tokens", "6", *state)["tokens"]
    rest = generated(directory, tmp_path, "--load-state", str(tmp_path / "state"), "--max-new-tokens", "8")
    assert first + rest["tokens"] == whole
    assert rest["prompt"] == first[-1:]
    turn = generated(
        directory, tmp_path, "--load-state", str(tmp_path / "state"), "--raw", "--prompt", "xy", "--max-new-tokens", "1"
    )
    assert turn["prompt"] == [first[-1], *Tokenizer(directory, 264).encode_text("xy")], "no second BOS"


@pytest.mark.parametrize("variant", ["shard:rank=8,window=4", "coda:window=4,exact=2,summary=2"])
def test_a_variant_is_run_reported_saved_and_continued(directory, tmp_path, variant, capsys):
    kv = ("--kv", f"all={variant}")
    flags = ("--raw", "--prompt", "The quick brown fox jumps", "--max-context", "80", *kv)
    whole = generated(directory, tmp_path, *flags, "--max-new-tokens", "14")
    assert whole["options"]["kv"] == [f"all={variant}"]
    assert whole["cache_bytes"].keys() == {variant.partition(":")[0]}
    layers = [(told["layer"], told["ring_used"], told["total_evictions"]) for told in whole["banks"]]
    assert layers == ([(0, 4, whole["position"] - 4), (1, 4, whole["position"] - 4)] if "coda" in variant else [])
    assert ("evicted" in capsys.readouterr().err) == ("coda" in variant)
    state = tmp_path / "state"
    first = generated(directory, tmp_path, *flags, "--max-new-tokens", "6", "--save-state", str(state))["tokens"]
    more = ("--load-state", str(state), "--max-new-tokens")
    rest = generated(directory, tmp_path, *more, "8", *kv)["tokens"]
    assert first + rest == whole["tokens"]
    turn = generated(directory, tmp_path, *more, "1", "--raw", "--prompt", "xy", *kv)
    assert turn["position"] == 26 + 6 + 2


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["full", "shard:rank=8,window=4", "coda:window=4,exact=2,summary=2"])
def test_two_ranks_say_what_one_says_and_save_its_state(directory, tmp_path, kv):
    flags = ("--raw", "--prompt", "The quick brown fox jumps", "--max-context", "80", "--kv", f"all={kv}")
    whole = generated(directory, tmp_path, *flags, "--max-new-tokens", "14")["tokens"]
    state, out = tmp_path / "state", tmp_path / "both.json"
    command = ["--model", str(directory), *PLAIN, *flags, "--max-new-tokens", "6", "--save-state", str(state)]
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "scripts.generate", *command]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*words, "--json", str(out)], check=True, cwd=ROOT, env=environment, capture_output=True)
    both = json.loads(out.read_text())
    assert both["ranks"]["replicated"] == []
    assert sum(both["ranks"]["weight_bytes"]) < 1.02 * (directory / "model.safetensors").stat().st_size
    more = ("--load-state", str(state), "--max-new-tokens", "8", "--kv", f"all={kv}")
    assert both["tokens"] + generated(directory, tmp_path, *more)["tokens"] == whole


def test_a_state_of_another_variant_is_refused(directory, tmp_path, capsys):
    state = tmp_path / "state"
    flags = ("--raw", "--prompt", "Hello", "--max-new-tokens", "1", "--kv", "all=coda:window=4")
    generated(directory, tmp_path, *flags, "--save-state", str(state))
    capsys.readouterr()
    line = refused(generate, capsys, "--model", directory, *PLAIN, "--load-state", state, "--kv", "all=coda:window=5")
    saved = "coda:window=4,exact=64,summary=64,block=256"
    assert line.startswith(f"{state}: saved with kv '{saved} coda:")


def test_logits_after_the_prompt_come_from_the_compressed_form(directory, tmp_path):
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps(TOKENS))
    flags = ["--model", str(directory), "--tokens", str(tokens), *PLAIN, "--decode-from", "8"]
    found = []
    for kv in ([], ["--kv", "all=shard:rank=4,sinks=1,window=2"]):
        out = tmp_path / "logits.safetensors"
        assert logits.main([*flags, "--out", str(out), *kv]) == 0
        found.append(load_file(out)["logits"].clone())
    apart = (found[0] - found[1]).abs().amax(1)
    assert (apart[:8] < 1e-5).all()
    assert (apart[8:] > 1e-4).all()


def test_adapters_are_read_reported_and_bound_to_saved_states(directory, tmp_path, capsys):
    """Zeros for lambda's logit and theta: the noise is the query, and half of the signal is subtracted."""
    config = load_ours(directory).model.config
    made = {
        f"layer_{layer}.coda.{name}": torch.zeros(shape) for layer in range(2) for name, shape in shapes(config).items()
    }
    path, state = tmp_path / "coda_adapters.safetensors", tmp_path / "state"
    save_file(made, path)
    flags = ("--raw", "--prompt", "Hello", "--max-new-tokens", "2", "--save-state", str(state))
    data = generated(directory, tmp_path, *flags, "--coda-adapters", str(path), "--kv", "all=coda:window=4")
    assert data["options"]["coda_adapters"] == str(path)
    plain = generated(directory, tmp_path, *flags[:-2])
    assert data["weights_fingerprint"] != plain["weights_fingerprint"]
    capsys.readouterr()
    line = refused(generate, capsys, "--model", directory, *PLAIN, "--load-state", state, "--kv", "all=coda:window=4")
    assert line.startswith(f"{state}: saved with weights ")
    assert line.endswith("; adapters count as weights, see --coda-adapters")
    line = refused(generate, capsys, "--raw", "--prompt", "x", "--coda-adapters", path)
    assert line == "--coda-adapters: of Llama-family checkpoints; DeepSeek-V4's attention has none"
    missing = tmp_path / "none"
    line = refused(generate, capsys, "--model", directory, *PLAIN, "--raw", "--prompt", "x", "--coda-adapters", missing)
    assert str(missing) in line


@pytest.mark.parametrize("at", [1, 7, 12])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_loaded_state_continues_bit_by_bit(directory, tmp_path, at, dtype):
    loaded = load_ours(directory, dtype=dtype)
    state = loaded.model.new_state(32, 5)
    prefill(loaded.model, state, TOKENS[:at], lambda _: None)
    save_state(tmp_path / "state", state, loaded, None)
    again = loaded.model.new_state(20, 13)
    assert load_state(tmp_path / "state", again, loaded) is None
    assert again.position == at
    for token in TOKENS[at:]:
        step = torch.tensor([token])
        assert torch.equal(loaded.model(step, state), loaded.model(step, again))


def test_a_state_of_another_rotation_or_of_v4_is_refused(directory, tmp_path, capsys):
    state = tmp_path / "state"
    flags = ("--raw", "--prompt", "Hello", "--max-new-tokens", "1", "--save-state", str(state))
    generated(directory, tmp_path, *flags)
    shutil.copytree(directory, tmp_path / "copy")
    config = json.loads((directory / "config.json").read_text())
    config["rope_parameters"]["factor"] = 4.0
    capsys.readouterr()  # the text of the run
    (tmp_path / "copy/config.json").write_text(json.dumps(config))
    line = refused(generate, capsys, "--model", tmp_path / "copy", *PLAIN, "--load-state", state)
    assert line.startswith(f"{state}: saved with config ")
    line = refused(generate, capsys, *PLAIN, "--load-state", state)  # the demo checkpoint, which is V4
    assert line.startswith(f"{state}: saved with config ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--raw", "--prompt", "x", "--numerics", "deployed"), "--numerics deployed is DeepSeek-V4's"),
        (("--raw", "--prompt", "x"), "--numerics deployed is DeepSeek-V4's; run a llama model with --numerics plain"),
        (("--prompt", "x", *PLAIN), "no chat format of a llama model is read here, only --raw text"),
        (("--prompt", "x", "--think", *PLAIN), "no chat format of a llama model is read here, only --raw text"),
        (("--messages", "{messages}", *PLAIN), "no chat format of a llama model is read here, only --raw text"),
        (("--raw", "--prompt", "x", "--max-context", "257", *PLAIN), "max_position_embeddings is 256"),
    ],
)
def test_generate_refuses_in_one_line_what_is_not_there(directory, tmp_path, capsys, flags, message):
    messages = tmp_path / "messages.json"
    messages.write_text('[{"role": "user", "content": "Hello"}]')
    flags = [flag.format(messages=messages) for flag in flags]
    assert message in refused(generate, capsys, "--model", directory, *flags)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "rope_type is 'yarn'"),
        ({"attention_bias": True}, "attention_bias is True; supported: False"),
        ({"architectures": ["LlamaModel"]}, "architectures is ['LlamaModel']"),
        ({"num_hidden_layers": 3}, "missing (9): model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, "unknown name (9): 'model.layers.1."),
        ({"intermediate_size": 57}, "misshapen (6): "),
    ],
)
def test_a_checkpoint_at_fault_is_one_line_and_status_2(directory, tmp_path, capsys, change, message):
    shutil.copytree(directory, tmp_path / "copy")
    config = json.loads((directory / "config.json").read_text()) | change
    (tmp_path / "copy/config.json").write_text(json.dumps(config))
    (tmp_path / "tokens.json").write_text("[1]")
    flags = ("--model", tmp_path / "copy")
    said = refused(logits, capsys, *flags, *PLAIN, "--tokens", tmp_path / "tokens.json", "--out", tmp_path / "out")
    assert message in said
    assert message in refused(generate, capsys, *flags, *PLAIN, "--raw", "--prompt", "x")
    assert message in refused(inspect, capsys, *flags)


def planned(tmp_path, *flags, status=0):
    out = tmp_path / "plan.json"
    assert plan.main(["--device", "cpu", "--json", str(out), *map(str, flags)]) == status
    return json.loads(out.read_text())


def cached(data):
    return sum(data["caches"]["attention"].values())


def test_the_plan_is_that_of_the_run(directory, tmp_path, capsys):
    kv = ("--kv", "all=coda:window=4,exact=2,summary=2")
    data = planned(tmp_path, "--model", directory, "--context", "40", *PLAIN, *kv)
    run_data = generated(
        directory, tmp_path, "--raw", "--prompt", "x", "--max-new-tokens", "1", "--max-context", "40", *kv
    )
    assert cached(data) == sum(run_data["cache_bytes"].values())
    assert data["needed"] == run_data["planned_bytes"]["needed"]
    assert data["fits"]
    assert data["largest_context"] == 256
    assert "caches: all=coda:window=4,exact=2,summary=2" in capsys.readouterr().out


def test_a_config_alone_is_planned_as_published(tmp_path):
    """Llama-3.1-8B at 128K positions: the article's 16.8 GB of cache, and what each variant makes of it."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_3_1_8B))
    flags = ("--config", config, "--numerics", "plain", "--context", "128000", "--memory-gib", "24")
    full = planned(tmp_path, *flags, "--device", "cuda", status=1)
    assert cached(full) == 32 * 2 * 8 * 128 * 2 * 128000 == 16_777_216_000
    held = {name: sum(part[name] for part in full["weights"].values()) for name in ("mapped", "own")}
    assert held == {"mapped": 0, "own": 2 * 8_030_261_248 + 2 * 65 * 4096 + 4 * 64}
    coda = planned(tmp_path, *flags, "--device", "cuda", "--kv", "all=coda")
    assert cached(coda) == 32 * (2 * 8 * 384 * 128 * 2 + 384 + 4 * 256 + 8 * 64 + 8 * 128 * 4), "1.506 MiB a layer"
    assert coda["largest_context"] == 131072
    on_eight = planned(tmp_path, *flags, "--device", "cuda", "--ranks", "8")
    assert (cached(on_eight), on_eight["not_split"]) == (cached(full) // 8, [])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--rank-tokens", "own", *PLAIN), "--rank-tokens own: each rank of a llama model has all tokens"),
        (("--numerics", "deployed"), "--numerics deployed is DeepSeek-V4's"),
        (("--context", "257", *PLAIN), "--context 257: beyond the model's max_position_embeddings 256"),
        (("--kv", "csa=shard", *PLAIN), "--kv csa=shard: 'csa' names no layers"),
    ],
)
def test_the_plan_refuses_what_the_run_refuses(directory, capsys, flags, message):
    assert message in refused(plan, capsys, "--model", directory, "--context", "10", *flags)


@pytest.mark.parametrize("form", ["safetensors", "pt"])
def test_the_plan_takes_adapters_of_the_model_alone(directory, tmp_path, capsys, form):
    """By names, shapes and dtypes: no value is read."""
    config = load_ours(directory).model.config
    path = tmp_path / f"coda_adapters.{form}"

    def written(**changes):
        parts = {name: torch.full(shape, torch.nan) for name, shape in shapes(config).items()} | changes
        held = {f"layer_{layer}": {f"coda.{name}": part for name, part in parts.items()} for layer in range(2)}
        if form == "pt":
            torch.save(held, path)
        else:
            save_file({f"{layer}.{name}": part.clone() for layer in held for name, part in held[layer].items()}, path)

    flags = ("--model", directory, "--context", "10", *PLAIN, "--coda-adapters", path)
    written()
    assert planned(tmp_path, *flags)["fits"]
    capsys.readouterr()
    written(theta=torch.zeros(4, 5))
    line = refused(plan, capsys, *flags)
    assert line == f"{path}: tensor 'layer_0.coda.theta' is [4, 5] torch.float32, want [4, 4]"
    written(theta=torch.zeros(4, 4, dtype=torch.int64))
    assert refused(plan, capsys, *flags).startswith(f"{path}: tensor 'layer_0.coda.theta' is ")
    written(more=torch.zeros(1))
    assert "'layer_0.coda.more' is no adapter's of a model with 2 layers" in refused(plan, capsys, *flags)
    parts = {"layer_0.coda.theta": torch.zeros(4, 4)}
    save_file(parts, path)
    assert refused(plan, capsys, *flags).startswith(f"{path}: layer_0 lacks coda.q_proj.weight")
    assert str(tmp_path / "none") in refused(plan, capsys, *flags[:-1], tmp_path / "none")


def test_inspect_shows_layers_and_census(directory, tmp_path, capsys):
    out = tmp_path / "inspect.json"
    assert inspect.main(["--model", str(directory), "--json", str(out)]) == 0
    data, shown = json.loads(out.read_text()), capsys.readouterr().out
    assert data["tensors"] == data["parameters"] == 21
    assert data["weights"] == 264 * 32 * 2 + 32 + 2 * (2 * 32 + 2 * 32 * 32 + 2 * 16 * 32 + 3 * 56 * 32)
    assert data["config_fingerprint"] == load_ours(directory).model.config.fingerprint
    wanted = {"layer": 1, "kind": "gqa", "heads": 4, "kv_heads": 2, "window": None, "rope_base": 10000.0}
    assert data["layers"][1] == wanted | {"rope_scaling": LLAMA3}
    assert "llama3 x8" in shown
    assert "every parameter filled" in shown


@pytest.mark.parametrize(
    ("processor", "wanted"),
    [
        (None, []),
        (processors.ByteLevel(), []),
        (processors.TemplateProcessing("<|begin|> $A", "$A $B", [("<|begin|>", 256)]), ["<|begin|>"]),
        (processors.TemplateProcessing("$A", "$A $B", []), []),
        (processors.TemplateProcessing("$A <|end|>", "$A $B", [("<|end|>", 257)]), None),
        (processors.TemplateProcessing("<|begin|> $A", "$A $B", [("<|begin|>", 7)]), None),
        (processors.RobertaProcessing(("<|end|>", 257), ("<|begin|>", 256)), None),
    ],
)
def test_what_stands_before_a_text_is_read_off_the_tokenizer(tmp_path, processor, wanted):
    write_tokenizer(tmp_path)
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    made.post_processor = processor
    made.save(str(tmp_path / "tokenizer.json"))
    if wanted is None:
        with pytest.raises(PromptError, match="post_processor is not a template"):
            Tokenizer(tmp_path, 264)
        return
    tokenizer = Tokenizer(tmp_path, 264)
    assert [control.name for control in tokenizer.before_text()] == wanted
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    ids = [*tokenizer.encode(tokenizer.before_text()), *tokenizer.encode_text("a b")]
    assert ids == theirs("a b")["input_ids"]
