"""`scripts.generate --prompts-file`: every prompt as if run alone, and nothing lost where a run is broken off."""

import json

import pytest

from fathom.runtime.generate import generate as real_generate
from fathom.runtime.options import DEMO
from fathom.scripts import generate
from fathom.scripts.cli import run

FRANCE, JAPAN = "What is the capital of France?", "What is the capital of Japan?"
LINES = (
    json.dumps({"prompt": FRANCE, "id": "first"}),
    "",
    json.dumps(JAPAN),
    json.dumps(
        [{"role": "system", "content": "You\u2028answer."}, {"role": "user", "content": FRANCE}], ensure_ascii=False
    ),
)


@pytest.fixture
def many(tmp_path, capsys):
    """Run these lines; returns the answers, or the line with which they are refused."""
    (tmp_path / "out.jsonl").unlink(missing_ok=True)

    def ran(*flags, lines=LINES, status=0):
        (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        files = ("--prompts-file", str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "out.jsonl"))
        assert run(lambda: generate.main([*files, "--max-new-tokens", "12", *map(str, flags)])) == status
        out, err = capsys.readouterr()
        assert out == ""
        if status:
            (line,) = err.splitlines()
            return line
        return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").split("\n")[:-1]]

    return ran


def test_each_prompt_is_answered_as_if_it_were_alone(many, tmp_path):
    answers = many("--temperature", 2, "--seed", 3, "--logprobs", 1)
    assert [(answer["line"], answer.get("id")) for answer in answers] == [(1, "first"), (3, None), (4, None)]
    flags = ("--max-new-tokens", "12", "--temperature", "2", "--seed", "3", "--logprobs", "1")
    (tmp_path / "messages.json").write_text(LINES[3], encoding="utf-8")
    alone = (("--prompt", FRANCE), ("--prompt", JAPAN), ("--messages", str(tmp_path / "messages.json")))
    for answer, prompt in zip(answers, alone, strict=True):
        assert generate.main([*prompt, *flags, "--json", str(tmp_path / "run.json")]) == 0
        one = json.loads((tmp_path / "run.json").read_text())
        same = ("prompt", "tokens", "text", "ended", "message", "logprobs")
        assert {name: answer[name] for name in same} == {name: one[name] for name in same}


def test_what_was_answered_stays_and_the_rest_follows(many, tmp_path, monkeypatch):
    whole = many()
    out = tmp_path / "out.jsonl"
    out.unlink()
    begun = []

    def interrupted(*args, **named):
        begun.append(args)
        if len(begun) == 3:
            raise KeyboardInterrupt
        return real_generate(*args, **named)

    with monkeypatch.context() as patch:
        patch.setattr("fathom.scripts.parts.generate_many.generate", interrupted)
        assert many(status=130) == "interrupted"
    assert len(out.read_text("utf-8").splitlines()) == 2
    with out.open("ab") as file:  # as if killed while writing, in the middle of a character
        file.write('{"text": "你'.encode()[:-1])
    calls = []
    monkeypatch.setattr(
        "fathom.scripts.parts.generate_many.generate",
        lambda *args, **named: calls.append(args) or real_generate(*args, **named),
    )
    again = many("--resume")
    assert len(calls) == 1, "what was answered is not run again"
    assert [answer["tokens"] for answer in again] == [answer["tokens"] for answer in whole]
    calls.clear()
    assert many("--resume") == again
    assert not calls


def test_a_file_of_answers_to_something_else_is_kept(many, tmp_path):
    kept = many(lines=LINES[:1])
    out = tmp_path / "out.jsonl"
    before = out.read_bytes()
    assert many(status=2) == f"--out {out}: is there; --resume goes on with it"
    assert many("--resume", lines=LINES[2:], status=2).startswith(f"{out}: line 1: is no answer to line 1 of ")
    assert "the answer to line 1 is of another model or other settings" in many("--resume", "--seed", 9, status=2)
    assert out.read_bytes() == before
    out.write_text(json.dumps(kept[0]) + "\n" + json.dumps(kept[0]) + "\n")
    assert "has 2 answers, " in many("--resume", lines=LINES[:1], status=2)
    out.write_text("{\n")
    assert "line 1: no JSON" in many("--resume", status=2)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (['"a"', "{"], "line 2: not JSON: "),
        (['"a"', "", '""'], "line 3: the prompt is empty"),
        (["3"], "line 1: 3; want a text, messages, or an object of them"),
        (['{"prompt": "a", "max": 3}'], "line 1: 'max' beside a prompt"),
        (['{"prompt": "a", "id": 1.5}'], "line 1: id is 1.5; want a text or a whole number"),
        (['[{"role": "user"}]'], "line 1: messages[0].content: missing"),
        (
            ['[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'],
            "line 1: the last message asks for no answer",
        ),
        (['{"messages": [{"role": "user", "content": "a"}], "tool": []}'], "line 1: top level: unknown field 'tool'"),
        ([""], "holds no prompt"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_loaded(many, tmp_path, monkeypatch, lines, says):
    monkeypatch.setattr("fathom.scripts.parts.generate_many.watched_load_any", None)
    assert many(lines=lines, status=2).startswith(f"{tmp_path}/prompts.jsonl: {says}")
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--raw",), "line 4: messages, which are of the chat format, with --raw"),
        (("--max-context", 20), "line 1: 11 prompt and 12 new tokens need 22, --max-context is 20"),
        (
            ("--load-state", str(DEMO / "model-00001-of-00006.safetensors")),
            "--prompts-file: excludes --load-state and --save-state",
        ),
        (("--logprobs", 1025), "--logprobs 1025: the vocabulary has 1024 tokens"),
    ],
)
def test_flags_that_the_prompts_do_not_go_with(many, flags, says):
    assert says in many(*flags, status=2)


@pytest.mark.parametrize("flags", [("--out", "x"), ("--resume",), ("--prompts-file", __file__)])
def test_flags_that_belong_together(flags, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(lambda: generate.main([*flags, *(() if flags[0] == "--prompts-file" else ("--prompt", "a"))])) == 2
    assert flags[0] in capsys.readouterr().err
