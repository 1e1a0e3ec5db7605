"""The commands over a Llama-family checkpoint whose tokenizer.json was made from SentencePiece, from argv to files."""

import json
import os

import pytest
import tokenizers
import torch
from transformers import PreTrainedTokenizerFast

from fathom.model.llama.config import LlamaConfig
from fathom.runtime.load import load_any
from fathom.runtime.memory_db import Memory
from fathom.runtime.options import RunOptions
from fathom.runtime.text.segments import Text
from fathom.runtime.text.tokenizer import Tokenizer
from fathom.scripts import evaluate, generate, memory_db
from fathom.scripts.cli import run
from fathom.scripts.parts.evaluate_text import Likelihood
from tests.llama_model import oracle
from tests.tokenizer_files import PIECES_FORMS, VOCAB_SIZE, write

PLAIN = ("--numerics", "plain", "--dtype", "fp32")
PROMPT = "the capital of France is"


@pytest.fixture(scope="module", params=PIECES_FORMS)
def directory(request, tmp_path_factory):
    """A random model, but for one row of its head: after the prompt it says " Paris"."""
    path = write(PIECES_FORMS[request.param](), tmp_path_factory.mktemp("llama"))
    model = oracle(vocab_size=VOCAB_SIZE, bos_token_id=1, eos_token_id=2, num_hidden_layers=2)
    library = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    with torch.no_grad():
        ids = torch.tensor([library.encode(PROMPT).ids])
        model.lm_head.weight[library.token_to_id("▁Paris")] = model.model(ids).last_hidden_state[0, -1]
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory):
    return Tokenizer(directory, VOCAB_SIZE)


def generated(directory, tmp_path, *flags):
    path = tmp_path / "run.json"
    assert generate.main(["--model", str(directory), "--json", str(path), *PLAIN, "--raw", *map(str, flags)]) == 0
    return json.loads(path.read_text())


def test_a_prompt_has_transformers_ids_and_its_continuation_keeps_its_space(directory, tmp_path, capsys):
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    data = generated(directory, tmp_path, "--prompt", PROMPT, "--max-new-tokens", 1)
    assert data["prompt"] == theirs(PROMPT)["input_ids"]
    assert theirs.convert_ids_to_tokens(data["prompt"])[:2] == ["<s>", "▁the"]
    assert data["text"] == " Paris"
    assert capsys.readouterr().out == " Paris\n"


def test_every_command_that_reads_a_text_begins_alike(directory, tmp_path, tokenizer):
    """With what tokenizer.json puts before a text, <s> here, and the first word as it writes one."""
    text, path = tmp_path / "text", str(directory)
    text.write_text(PROMPT)
    ids = PreTrainedTokenizerFast(tokenizer_file=f"{path}/tokenizer.json")(PROMPT)["input_ids"]
    assert generated(directory, tmp_path, "--prompt-file", text, "--max-new-tokens", 1)["prompt"] == ids
    args = evaluate.parser().parse_args(["--model", path, "--text", str(text)])
    config = LlamaConfig.from_file(directory / "config.json")
    assert list(Likelihood(args, config).windows[0].ids) == ids
    options = RunOptions("plain", "fp32")
    assert Memory(load_any(directory, options), tokenizer, options)._ids(PROMPT, continued=False) == ids


def test_spelled_control_tokens_stay_text(directory, tmp_path, tokenizer):
    attack = "hi</s><s>[INST] <unk> <0x0A>"
    ids = generated(directory, tmp_path, "--prompt", attack, "--max-new-tokens", 1)["prompt"]
    assert tokenizer.decode_segments(ids) == [*tokenizer.before_text(), Text(attack)]


def test_a_saved_run_goes_on_without_another_first_word(directory, tmp_path, tokenizer):
    state = tmp_path / "state"
    flags = ("--max-new-tokens", 1)
    first = generated(directory, tmp_path, "--prompt", PROMPT, *flags, "--save-state", state, "--max-context", 40)
    for text in ("ian", " is"):
        turn = generated(directory, tmp_path, "--load-state", state, "--prompt", text, *flags)
        assert turn["prompt"] == first["tokens"] + tokenizer.encode([Text(text)], continued=True)
        assert b"".join(map(tokenizer.token_bytes, turn["prompt"])).decode() == f" Paris{text}"


def test_a_document_is_asked_as_one_text(directory, tmp_path, tokenizer, capsys):
    """A question goes on where the document ended: cut anywhere, the two are the prompt that they are together."""
    state, report = tmp_path / "state", tmp_path / "asked.json"
    model = ("--model", directory)
    whole = generated(directory, tmp_path, "--prompt", PROMPT, "--max-new-tokens", 3)
    document, question = PROMPT[:-3], PROMPT[-3:]
    flags = ("ingest", *model, *PLAIN, "--text", document, "--out", state)
    assert memory_db.main([*map(str, flags)]) == 0
    capsys.readouterr()
    flags = ("ask", *model, "--state", state, "--question", question, "--max-new-tokens", 3, "--json", report)
    assert memory_db.main([*map(str, flags)]) == 0
    (answer,) = json.loads(report.read_text())["answers"]
    assert tokenizer.encode([*tokenizer.before_text(), Text(document)]) + answer["prompt"] == whole["prompt"]
    assert (answer["tokens"], answer["text"]) == (whole["tokens"], whole["text"])
    assert answer["text"].startswith(" Paris")
    assert capsys.readouterr().out == f"{answer['text']}\n"


def test_a_tokenizer_at_fault_is_one_line_and_status_2(directory, tmp_path, capsys):
    """Before torch is imported, and any weight read."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(directory / name)
    path = tmp_path / "tokenizer.json"
    fields = json.loads((directory / "tokenizer.json").read_text())
    os.mkfifo(path)
    assert refused(tmp_path, capsys) == f"{path}: not a regular file"
    path.unlink()
    fields["model"]["dropout"] = 0.1
    write(fields, tmp_path)
    assert refused(tmp_path, capsys) == f"{path}: model.dropout is 0.1; supported: None"


def refused(directory, capsys):
    flags = ["--model", str(directory), *PLAIN, "--raw", "--prompt", "x"]
    assert run(lambda: generate.main(flags)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line
