"""`scripts.generate` and `scripts.logits` from argv to files: what they write, where they stop, what they refuse."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fathom.model.config import ModelConfig
from fathom.probes.subject import Subject
from fathom.runtime.conversation import Conversation, Format
from fathom.runtime.load import load
from fathom.runtime.memory_db import Memory
from fathom.runtime.options import DEMO, RunOptions
from fathom.runtime.statefile import read_file
from fathom.runtime.text.tokenizer import IdStream, Tokenizer
from fathom.scripts import evaluate, generate, logits
from fathom.scripts.calibrate_kv import _tokens as text_tokens
from fathom.scripts.cli import run
from fathom.scripts.flags import run_options
from fathom.scripts.parts.evaluate_text import Likelihood
from tests.by_hand import ROOT
from tests.make_checkpoint import tiny_config, write_checkpoint
from tests.transformers_model import our_logits

PLAIN = ("--numerics", "plain", "--dtype", "fp32")
SHARD = str(DEMO / "model-00001-of-00006.safetensors")  # a file of tensors, and no state


def generated(tmp_path, *flags):
    """Run `scripts.generate` on the demo checkpoint with --json and return what it wrote."""
    path = tmp_path / "run.json"
    assert generate.main(["--json", str(path), *flags]) == 0
    return json.loads(path.read_text())


def refused(script, capsys, *flags):
    """The one line on stderr with which a script refuses."""
    assert run(lambda: script.main(list(flags))) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    return lines[0]


def test_the_demo_answers_and_stops_at_eos(tmp_path, capsys):
    data = generated(tmp_path, "--prompt", "What is the capital of France?")
    assert "Paris" in data["text"]
    assert data["ended"] == "eos"
    assert data["message"]["content"] == data["text"]
    assert data["tokens"][-1] == ModelConfig.from_file(DEMO / "config.json").eos_token_id
    assert capsys.readouterr().out == data["text"] + "\n", "stdout holds the text and nothing else"


def test_a_raw_prompt_is_continued(tmp_path):
    data = generated(tmp_path, "--raw", "--prompt", "The capital of France is", "--max-new-tokens", "1")
    assert data["text"] == " Paris"
    assert data["prompt"][0] == ModelConfig.from_file(DEMO / "config.json").bos_token_id
    assert data["ended"] == "limit"


def test_the_report_says_what_ran(tmp_path):
    flags = ("--prompt", "What is the capital of Japan?", "--prefill-chunk", "4", "--max-context", "64")
    data = generated(tmp_path, *flags, "--max-new-tokens", "20", *PLAIN)
    assert data["options"] == {
        "numerics": "plain",
        "dtype": "fp32",
        "device": "cpu",
        "prefill_chunk": 4,
        "entry_format": "dtype",
        "key_format": "dtype",
        "index_scores": "exact",
        "rank_tokens": "auto",
        "kv": [],
        "coda_adapters": None,
        "draft": "off",
        "draft_tokens": 0,
        "draft_confidence": 0.0,
        "fp8_products": "auto",
        "experts": "auto",
    }
    assert data["fp8_products"] == "exact"
    assert data["drafts"] is None
    assert data["ops"] == "cpu"
    assert (data["decode"], data["decode_eager_because"]) == ("eager", "--device cpu: CUDA graphs are of CUDA devices")
    assert data["max_context"] == 64
    assert data["prompt_tokens"] == len(data["prompt"])
    assert data["new_tokens"] == len(data["tokens"])
    assert data["position"] == data["prompt_tokens"] + data["new_tokens"] - 1, "the last token is not run"
    assert data["peak_memory_bytes"] > sum(data["cache_bytes"].values()) > 0
    loaded = load(DEMO, RunOptions())
    assert data["weights_fingerprint"] == loaded.weights_fingerprint
    assert data["config_fingerprint"] == loaded.model.config.fingerprint


def test_narrow_caches_give_the_same_answer_in_fewer_bytes(tmp_path):
    words = "The old farmer carried a letter to the town. " * 10
    flags = ("--raw", "--prompt", words, "--max-new-tokens", "8", "--prefill-chunk", "67")
    wide = generated(tmp_path, *flags)
    narrow = generated(tmp_path, *flags, "--entry-format", "fp8", "--key-format", "fp4")
    assert narrow["tokens"] == wide["tokens"]
    assert (narrow["options"]["entry_format"], narrow["options"]["key_format"]) == ("fp8", "fp4")
    entries, keys = (narrow["cache_bytes"][name] / wide["cache_bytes"][name] for name in ("entries", "indexer_keys"))
    assert (entries, keys) == (200 / 256, 68 / 256)  # 64 + 2 * 64 + 1 + 7 of padding; 64 + 4


def test_each_of_three_roundings_is_chosen_by_itself(tmp_path, capsys):
    """`deployed` and `plain` are names for two combinations; a run says which it is, and its state goes on with it."""
    words, state = (
        ("--raw", "--prompt", "The old farmer carried a letter", "--max-new-tokens", "6"),
        str(tmp_path / "state"),
    )
    named = generated(tmp_path, *words)
    spelled = generated(tmp_path, *words, "--rounding", "linears=fp8,kv=fp8,index=fp4")
    assert spelled["options"]["numerics"] == named["options"]["numerics"] == "deployed"
    mixed = ("--rounding", "linears=none,kv=fp8,index=fp8")
    first = generated(tmp_path, *words, *mixed, "--save-state", state)
    assert first["options"]["numerics"] == "linears=none,kv=fp8,index=fp8"
    assert "numerics linears=none,kv=fp8,index=fp8" in capsys.readouterr().err
    more = ("--load-state", state, "--max-new-tokens", "3")
    assert generated(tmp_path, *more, *mixed)["position"] == first["position"] + 3
    capsys.readouterr()
    said = refused(generate, capsys, *more)
    assert "saved with numerics 'linears=none,kv=fp8,index=fp8', this run has 'deployed'" in said


def test_fp8_scores_are_said_where_they_are_asked_for(tmp_path, capsys):
    flags = ("--raw", "--prompt", "The old farmer", "--max-new-tokens", "4", "--key-format", "fp8")
    exact, told = generated(tmp_path, *flags), capsys.readouterr()
    assert "index scores" not in told.out + told.err
    narrow, told = generated(tmp_path, *flags, "--index-scores", "fp8"), capsys.readouterr()
    assert narrow["tokens"] == exact["tokens"], "deployed queries fit E4M3"
    assert (exact["options"]["index_scores"], narrow["options"]["index_scores"]) == ("exact", "fp8")
    assert "index scores fp8" in " ".join((told.out + told.err).split())


def test_a_seed_repeats_a_sampled_run(tmp_path):
    flags = ("--raw", "--prompt", "The", "--max-new-tokens", "8", "--temperature", "2", "--top-p", "0.95")
    one = generated(tmp_path, *flags, "--seed", "1")["tokens"]
    assert generated(tmp_path, *flags, "--seed", "1")["tokens"] == one
    assert generated(tmp_path, *flags, "--seed", "2")["tokens"] != one


@pytest.mark.parametrize("sampled", [(), ("--temperature", "0.3", "--seed", "2")], ids=["greedy", "sampled"])
def test_drafts_change_the_number_of_calls_and_nothing_else(tmp_path, capsys, sampled):
    flags = (
        "--raw",
        "--prompt",
        "The old farmer carried a letter to the town. " * 4,
        "--max-new-tokens",
        "60",
        *sampled,
    )
    state = tmp_path / "state"
    plain = generated(tmp_path, *flags, "--save-state", str(state))
    saved = read_file(state)
    drafted = generated(tmp_path, *flags, "--save-state", str(state), "--draft", "lookup", "--draft-tokens", "4")
    (own, said), (other, expected) = read_file(state), saved
    assert said == expected
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name].float(), part.float()) for name, part in other.items())
    assert (drafted["tokens"], drafted["text"]) == (plain["tokens"], plain["text"])
    told = drafted["drafts"]
    assert (plain["drafts"], told["drafter"], drafted["options"]["draft_tokens"]) == (None, "lookup", 4)
    assert told["calls"] + sum(told["accepted"]) + 1 == len(plain["tokens"])
    assert sum(told["accepted"]) > 0, "no draft was accepted: vacuous"
    assert len(told["drafted"]) == 4
    assert f"drafts  lookup, {told['calls']} calls, accepted {sum(told['accepted'])} of" in capsys.readouterr().err


@pytest.fixture
def mute(tmp_path):
    """The demo checkpoint without its tokenizer.json, and a file of token ids: of a text, without BOS."""
    folder = tmp_path / "mute"
    folder.mkdir()
    for path in DEMO.iterdir():
        if path.name != "tokenizer.json":
            (folder / path.name).symlink_to(path)
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(Tokenizer(DEMO, 1024).encode_text("The old farmer carried a letter to the town. " * 4)))
    return str(folder), str(ids)


def test_token_ids_are_run_as_they_are(mute, tmp_path, capsys):
    """The ids of a prompt say what the prompt says; those of `mute` begin without BOS, and none is put before them."""
    flags = ("--max-new-tokens", "8", "--logprobs", "1")
    text = generated(tmp_path, "--raw", "--prompt", "The old farmer", *flags)
    given = tmp_path / "given.json"
    given.write_text(json.dumps(text["prompt"]))
    capsys.readouterr()
    data = generated(tmp_path, "--tokens", str(given), *flags)
    assert capsys.readouterr().out == data["text"] + "\n"
    same = ("text", "tokens", "prompt", "logprobs", "position")
    assert {name: data[name] for name in same} == {name: text[name] for name in same}
    assert "message" not in data
    assert generated(tmp_path, "--tokens", mute[1], *flags)["prompt"] == json.loads(Path(mute[1]).read_text())


def test_a_model_without_a_tokenizer_answers_in_token_ids(mute, tmp_path, capsys):
    folder, ids = mute
    flags = ("--tokens", ids, "--max-new-tokens", "5", "--logprobs", "2")
    spoken = generated(tmp_path, *flags)
    capsys.readouterr()
    data = generated(tmp_path, "--model", folder, *flags)
    captured = capsys.readouterr()
    assert data["tokens"] == spoken["tokens"]
    assert captured.out == " ".join(map(str, data["tokens"])) + "\n"
    assert data["text"] is None
    assert "message" not in data
    assert [one["text"] for one in data["logprobs"]] == [None] * 5
    assert f" {data['tokens'][0]} " in captured.err, "the table of likelihoods names tokens by their ids"


def test_ids_come_one_by_one():
    decoder = IdStream()
    assert [decoder.push(7), decoder.push(12), decoder.push(0), decoder.finish()] == ["7", " 12", " 0", ""]


def test_token_ids_go_on_behind_a_saved_state_with_and_without_drafts(mute, tmp_path):
    """Cut anywhere they are one run: with no EOS between, and in the same tokens where lookup drafts them."""
    folder, ids = mute
    model = ("--model", folder)
    whole = generated(tmp_path, *model, "--tokens", ids, "--max-new-tokens", "24")["tokens"]
    assert len(whole) == 24, "an early end would make this test vacuous"
    drafted = generated(tmp_path, *model, "--tokens", ids, "--max-new-tokens", "24", "--draft", "lookup")
    assert drafted["tokens"] == whole
    assert sum(drafted["drafts"]["drafted"]) > 0, "nothing was drafted: vacuous"
    state, rest = str(tmp_path / "state"), tmp_path / "rest.json"
    first = generated(tmp_path, *model, "--tokens", ids, "--max-new-tokens", "4", "--save-state", state)["tokens"]
    assert first == whole[:4]
    assert generated(tmp_path, *model, "--load-state", state, "--max-new-tokens", "20")["tokens"] == whole[4:]
    rest.write_text(json.dumps(whole[4:7]))
    behind = generated(tmp_path, *model, "--load-state", state, "--tokens", str(rest), "--max-new-tokens", "17")
    assert behind["prompt"] == [first[-1], *whole[4:7]], "the pending token, and the ids as they are"
    assert behind["tokens"] == whole[7:]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--prompt", "a"), "tokenizer.json: No such file or directory"),
        (("--raw", "--prompt-file", __file__), "tokenizer.json: No such file or directory"),
        (("--messages", __file__), "tokenizer.json: No such file or directory"),
        (("--prompts-file", __file__, "--out", "answers"), "tokenizer.json: No such file or directory"),
        (("--tokens", "{ids}", "--prompt", "a"), "argument --prompt: not allowed with argument --tokens"),
        (("--tokens", "{ids}", "--prompt-file", __file__), "--prompt-file: not allowed with argument --tokens"),
        (("--tokens", "{ids}", "--messages", __file__), "--messages: not allowed with argument --tokens"),
        (("--tokens", "{ids}", "--prompts-file", __file__), "--prompts-file: not allowed with argument --tokens"),
        (("--tokens", __file__), "no JSON"),
    ],
)
def test_a_model_without_a_tokenizer_reads_no_text(mute, tmp_path, capsys, monkeypatch, flags, says):
    monkeypatch.chdir(tmp_path)
    folder, ids = mute
    assert says in refused(generate, capsys, "--model", folder, *(flag.format(ids=ids) for flag in flags))


def test_every_command_that_reads_a_text_begins_alike(tmp_path):
    """With BOS, which DeepSeek's encoder writes before every prompt: one rule, see `runtime.text.encoding`."""
    text = "The old farmer carried a letter to the town."
    path = tmp_path / "text"
    path.write_text(text)
    config = ModelConfig.from_file(DEMO / "config.json")
    tokenizer = Tokenizer(DEMO, config.vocab_size)
    ids = [config.bos_token_id, *tokenizer.encode_text(text)]
    assert generated(tmp_path, "--raw", "--prompt", text, "--max-new-tokens", "1")["prompt"] == ids
    assert generated(tmp_path, "--raw", "--prompt-file", str(path), "--max-new-tokens", "1")["prompt"] == ids
    subject = Subject(DEMO, RunOptions(), prompt=text)
    assert subject.tokens(2 * len(ids)) == [*ids, *ids[1:], ids[1]], "of --prompt-file, repeated without another BOS"
    args = evaluate.parser().parse_args(["--text", str(path)])
    assert list(Likelihood(args, config).windows[0].ids) == ids
    assert text_tokens(subject, path, len(ids)) == ids, "calibrate_kv"
    loaded, options = load(DEMO, RunOptions()), RunOptions()
    assert Memory(loaded, tokenizer, options)._ids(text, continued=False) == ids
    talk = Conversation(loaded, options, tokenizer, Format(raw=True), max_context=64)
    assert talk._encoded([{"role": "user", "content": text}], text) == ids


def test_stopping_saving_and_continuing_is_the_same_run(tmp_path):
    prompt = ("--raw", "--prompt", "The old farmer")
    straight = generated(tmp_path, *prompt, "--max-new-tokens", "12")["tokens"]
    state = str(tmp_path / "state")
    first = generated(tmp_path, *prompt, "--max-new-tokens", "7", "--save-state", state)["tokens"]
    rest = generated(tmp_path, "--load-state", state, "--max-new-tokens", "5")
    assert first + rest["tokens"] == straight
    assert "message" not in rest, "the rest of an answer is no whole message"
    assert len(straight) == 12, "an early end would make this test vacuous"


def test_a_loaded_state_takes_another_question(tmp_path):
    state = str(tmp_path / "state")
    generated(tmp_path, "--prompt", "What is the capital of France?", "--save-state", state)
    data = generated(tmp_path, "--load-state", state, "--prompt", "What is the capital of Japan?")
    config = ModelConfig.from_file(DEMO / "config.json")
    assert data["prompt"][0] == config.eos_token_id, "the answer's EOS was chosen, not run: it opens the continuation"
    assert data["position"] > len(data["prompt"]) + data["new_tokens"], "the first turn is still there"
    assert config.bos_token_id not in data["prompt"], "the saved state has its BOS already"


@pytest.mark.parametrize(
    ("flags", "culprit"),
    [
        ((), "--prompt"),
        (("--prompt", "a", "--max-context", "4"), "--max-context 4"),
        (("--prompt", "a", "--temperature", "-1"), "--temperature -1"),
        (("--prompt", "a", "--temperature", "nan"), "--temperature nan"),
        (("--prompt", "a", "--top-p", "0"), "--top-p 0"),
        (("--prompt", "a", "--seed", "-3"), "--seed -3"),
        (("--prompt", "a", "--effort", "preview:max"), "--effort"),
        (("--prompt", "a", "--think", "--effort", "max"), "--effort max"),
        (("--prompt", "a", "--raw", "--think"), "--raw"),
        (("--prompt", "a", "--numerics", "plain", "--entry-format", "fp8"), "--entry-format fp8"),
        (("--prompt", "a", "--numerics", "plain", "--key-format", "fp4"), "--key-format fp4"),
        (
            ("--prompt", "a", "--rounding", "linears=fp8,kv=none,index=fp4", "--entry-format", "fp8"),
            "--entry-format fp8",
        ),
        (("--prompt", "a", "--rounding", "linears=fp8,kv=fp8,index=fp8", "--key-format", "fp4"), "--key-format fp4"),
        (("--prompt", "a", "--rounding", "linears=fp8,kv=fp8"), "says nothing of index"),
        (("--prompt", "a", "--rounding", "linears=fp4,kv=fp8,index=fp4"), "linears is fp8 or ggml or none"),
        (("--prompt", "a", "--rounding", "weights=fp8"), "want linears="),
        (("--prompt", "a", "--rounding", "linears=fp8,kv=fp8,index=fp4", "--numerics", "plain"), "--numerics"),
        (("--prompt", "a", "--dtype", "fp32", "--entry-format", "fp8"), "--entry-format fp8"),
        (("--prompt", "a", "--fp8-products", "fp8"), "--fp8-products fp8: a GPU's"),
        (("--prompt", "a", "--graph"), "--graph: --device cpu"),
        (("--prompt", "a", "--draft", "lookup", "--draft-tokens", "8"), "--draft-tokens 8"),
        (("--prompt", "a", "--draft", "lookup", "--ops", "reference"), "--draft: ops reference"),
        (("--prompt", "a", "--draft", "lookup", "--kv", "2=coda"), "layer 2: coda"),
        (("--prompt", "a", "--model", "nowhere"), "nowhere"),
        (("--prompt-file", "nothing.txt"), "nothing.txt"),
        (("--messages", "nothing.json"), "nothing.json"),
        (("--prompt", "a", "--json", "no/such/folder/run.json"), "no/such/folder/run.json"),
        (("--prompt", "a", "--load-state", "nothing.state"), "nothing.state"),
        (("--prompt", "a", "--max-context", "99999999"), "99999999 positions"),
        (("--prompt", ""), "empty"),
        (("--raw", "--load-state", SHARD), "--load-state: --raw"),
        (("--load-state", SHARD, "--messages", __file__), "--load-state: excludes --messages"),
        (("--load-state", SHARD, "--prompt", "a", "--think", "--effort", "preview:max"), "--load-state: excludes"),
        (("--tokens", __file__, "--raw"), "--tokens: excludes --raw and --think"),
        (("--tokens", __file__, "--think", "--effort", "preview:max"), "--tokens: excludes --raw and --think"),
        (("--prompt", "a", "--json", "."), "folder"),
        (("--prompt", "a", "--save-state", "/proc/x.state"), "/proc/x.state"),
    ],
)
def test_bad_flags_name_the_culprit(flags, culprit, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert culprit in refused(generate, capsys, *flags)
    assert list(tmp_path.iterdir()) == []


def test_no_weight_is_read_for_a_graph_that_cannot_be(monkeypatch, capsys):
    monkeypatch.setattr("fathom.runtime.group.processes.watched_load_any", None)
    assert "--graph: --device cpu" in refused(generate, capsys, "--prompt", "a", "--graph")


@pytest.mark.parametrize(
    "flags",
    [("--max-new-tokens", "0"), ("--device", "tpu"), ("--entry-format", "fp4"), ("--prefill-chunk", "x"), ("--what",)],
)
def test_argparse_refuses_with_status_2(flags, capsys):
    assert flags[0] in refused(generate, capsys, "--prompt", "a", *flags)


def test_a_flag_that_is_nearly_one_is_told_with_it(capsys):
    said = refused(generate, capsys, "--promt", "a")
    assert said == "python -m scripts.generate: unrecognized arguments: --promt a (did you mean --prompt?)"
    assert refused(generate, capsys, "--zebra").endswith("arguments: --zebra")


def test_a_finished_answer_is_not_continued_without_a_prompt(tmp_path, capsys):
    state = str(tmp_path / "state")
    assert generated(tmp_path, "--prompt", "What is the capital of France?", "--save-state", state)["ended"] == "eos"
    capsys.readouterr()
    assert "finished" in refused(generate, capsys, "--load-state", state)


def test_an_answer_cut_short_is_closed_before_the_next_turn(tmp_path):
    state = str(tmp_path / "state")
    flags = ("--prompt", "What is the capital of France?", "--max-new-tokens", "3", "--save-state", state)
    first = generated(tmp_path, *flags)
    data = generated(tmp_path, "--load-state", state, "--prompt", "What is the capital of Japan?")
    eos = ModelConfig.from_file(DEMO / "config.json").eos_token_id
    assert data["prompt"][:2] == [first["tokens"][-1], eos]


def test_line_ends_of_a_prompt_file_are_kept(tmp_path):
    (tmp_path / "prompt").write_bytes(b"a\r\nb\rc")
    flags = ("--raw", "--max-new-tokens", "1")
    from_file = generated(tmp_path, "--prompt-file", str(tmp_path / "prompt"), *flags)["prompt"]
    assert from_file == generated(tmp_path, "--prompt", "a\r\nb\rc", *flags)["prompt"]


def test_a_nan_in_a_weight_trips_with_status_1(tmp_path, capsys):
    def poison(name, values):
        return values * float("nan") if name == "norm.weight" else values

    write_checkpoint(tmp_path, tiny_config(vocab_size=1024), seed=1, adjust=poison)
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    assert run(lambda: generate.main(["--model", str(tmp_path), "--raw", "--prompt", "a"])) == 1
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1
    assert error[0].startswith("tripwire: hidden at position 0: ")


def test_caches_beyond_the_machines_memory_are_refused_before_they_are_allocated(tmp_path, capsys):
    most = 2**31 - 1
    write_checkpoint(tmp_path, tiny_config(vocab_size=1024, max_position_embeddings=most), seed=1)
    shutil.copy(DEMO / "tokenizer.json", tmp_path)
    flags = ("--model", str(tmp_path), "--raw", "--prompt", "a", "--max-context", str(most))
    assert "GiB" in refused(generate, capsys, *flags)


def test_a_prompt_file_that_is_no_utf8(tmp_path, capsys):
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    assert "byte 3 is no UTF-8" in refused(generate, capsys, "--prompt-file", str(tmp_path / "latin"))


def test_a_conversation_with_nothing_left_to_say(tmp_path, capsys):
    path = tmp_path / "messages.json"
    path.write_text(json.dumps([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]))
    assert "asks for no answer" in refused(generate, capsys, "--messages", str(path))


def test_deployed_numerics_need_whole_groups(tmp_path, capsys):
    write_checkpoint(tmp_path, tiny_config(head_dim=72), seed=1)
    line = refused(
        logits, capsys, "--model", str(tmp_path), "--tokens", __file__, "--out", str(tmp_path.parent / "out")
    )
    assert "head_dim - qk_rope_head_dim is 56, no multiple of 64" in line


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(directory, tiny_config(), seed=4)
    return directory


@pytest.mark.parametrize("flags", [(), ("--prefill-chunk", "7"), ("--decode-from", "130"), ("--decode-from", "1")])
def test_logits_of_every_position(checkpoint, tmp_path, flags):
    tokens = torch.randint(2, 300, (140,), generator=torch.Generator().manual_seed(1))
    (tmp_path / "tokens.json").write_text(json.dumps(tokens.tolist()))
    out = tmp_path / "logits.safetensors"
    arguments = ["--model", str(checkpoint), "--tokens", str(tmp_path / "tokens.json"), "--out", str(out), *PLAIN]
    assert logits.main([*arguments, *flags]) == 0
    written = load_file(out)
    assert list(written) == ["logits"]
    assert written["logits"].dtype == torch.float32
    expected = our_logits(load(checkpoint, RunOptions("plain", "fp32")).model, tokens)
    # fp32, four layers, logits of unit scale: see BOUND in test_chunks.py
    assert (written["logits"] - expected).abs().max() < 2e-5
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(
    ("content", "culprit"),
    [
        ("[1, 2", "no JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "at least one"),
        ("{}", "list"),
        ("[1, true]", "entry 1"),
        ("[1, -1]", "entry 1"),
        ("[99999]", "99999"),
    ],
)
def test_bad_token_files(checkpoint, tmp_path, capsys, content, culprit):
    path = tmp_path / "tokens.json"
    path.write_text(content)
    out = tmp_path / "out"
    line = refused(logits, capsys, "--model", str(checkpoint), "--tokens", str(path), "--out", str(out))
    assert culprit in line
    assert str(path) in line
    assert not out.exists()


def test_logprobs_are_log_softmax_of_the_logits_before_temperature(tmp_path, capsys):
    """Both run one token a call, so that a row of logits comes out of the same product."""
    calls = (*PLAIN, "--prefill-chunk", "1")
    flags = ("--prompt", "What is the capital of France?", "--max-new-tokens", "6", "--temperature", "2")
    data = generated(tmp_path, *flags, *calls, "--logprobs", "3")
    said = capsys.readouterr().err
    ids, answer, out = tmp_path / "ids.json", data["tokens"], tmp_path / "logits.safetensors"
    ids.write_text(json.dumps(data["prompt"] + answer))
    assert logits.main(["--tokens", str(ids), "--out", str(out), *calls]) == 0
    rows = load_file(out)["logits"][len(data["prompt"]) - 1 :].double().log_softmax(-1)  # what each token came from
    for row, token, told in zip(rows, answer, data["logprobs"], strict=False):
        assert (told["token"], told["logprob"]) == (token, float(row[token]))
        best = row.topk(3)
        assert [one["token"] for one in told["top"]] == best.indices.tolist()
        assert [one["logprob"] for one in told["top"]] == best.values.tolist()
        assert f"{told['logprob']:.4f}" in said
        assert repr(told["text"]) in said
    assert "".join(one["text"] for one in data["logprobs"]).removesuffix("<｜end▁of▁sentence｜>") == data["text"]


def test_decode_from_beyond_the_end(checkpoint, tmp_path, capsys):
    (tmp_path / "t").write_text("[5, 6]")
    flags = ("--model", str(checkpoint), "--tokens", str(tmp_path / "t"), "--out", str(tmp_path / "o"))
    assert "--decode-from 3" in refused(logits, capsys, *flags, "--decode-from", "3")


PAGES = ("runtime/README.md", "model/variants/README.md")
BLOCKS = [
    pytest.param(block, id=f"{page} {number}")
    for page in PAGES
    for number, block in enumerate(
        re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    )
]


@pytest.mark.parametrize("block", BLOCKS)
def test_the_python_of_a_page_runs(block, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", block], check=True, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    if "streams.pt" in block:
        kept = torch.load(tmp_path / "streams.pt", weights_only=True)
        assert {tuple(streams.shape) for streams in kept.values()} == {(300, 4, 128)}
    if "judged" in block:
        assert ran.stdout.count(" agrees ") == len(ran.stdout.splitlines()) > 20


def test_every_page_of_the_api_has_its_python():
    assert len(BLOCKS) == 6


def test_every_option_of_a_run_has_a_flag_whose_default_is_the_options():
    given = vars(generate.parser().parse_args([]))
    assert {field.name for field in fields(RunOptions)} <= given.keys()
    assert run_options(argparse.Namespace(**given)) == RunOptions()
    others = argparse.Namespace(**given | {"experts": "rows", "rank_tokens": "all", "kv": ["all=shard"]})
    assert run_options(others) == RunOptions(experts="rows", rank_tokens="all", kv=("all=shard",))
