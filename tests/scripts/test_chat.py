"""`scripts.chat`: lines in, answers out, and what becomes of a line that cannot be answered."""

import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from fathom.runtime.options import DEMO
from fathom.runtime.text.encoding import encode_messages
from fathom.runtime.text.messages import check_messages
from fathom.runtime.text.tokenizer import Tokenizer
from fathom.scripts import chat, generate
from fathom.scripts.cli import run
from tests.by_hand import ROOT

FRANCE, JAPAN = "What is the capital of France?", "What is the capital of Japan?"
PARIS, TOKYO = "The capital of France is Paris.", "The capital of Japan is Tokyo."


@pytest.fixture
def talk(monkeypatch, capsys, tmp_path):
    """Run the command over these lines; returns what it wrote to stdout, the lines on stderr, and its JSON."""

    def talked(*lines, flags=(), status=0):
        text = b"".join(line if isinstance(line, bytes) else f"{line}\n".encode() for line in lines)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))
        out = tmp_path / "chat.json"
        assert run(lambda: chat.main(["--json", str(out), *map(str, flags)])) == status
        said = capsys.readouterr()
        return said.out, said.err.splitlines(), json.loads(out.read_text()) if out.exists() else None

    return talked


def test_a_piped_conversation(talk, tmp_path):
    state = tmp_path / "talk.state"
    (tmp_path / "question.txt").write_text(JAPAN)
    lines = (
        FRANCE,
        "",
        "/sve x",
        "/save",
        "/reset now",
        "/what",
        f"/save {state}",
        f"/read {tmp_path / 'question.txt'}",
    )
    out, err, data = talk(*lines, "/load nowhere", f"/save {DEMO}/x", "/help", f"/load {state}", f"{JAPAN}")
    assert out == f"{PARIS}\n{TOKYO}\n{TOKYO}\n"
    for told in (
        "no command /sve: did you mean /save? a message that begins with / is typed with //",
        "/save: which file?",
        "/reset: takes nothing after it",
        "no command /what: /help lists them; a message that begins with / is typed with //",
        f"{state}: 19 tokens saved",
        "nowhere: No such file or directory",
        f"/save {DEMO}/x: lies in the model's directory {DEMO}, which stays as it is",
        "/reset      forget the conversation",
        f"{state}: 19 tokens loaded",
    ):
        assert err.count(told) == 1, told
    assert [turn["content"] for turn in data["turns"]] == [FRANCE, PARIS, JAPAN, TOKYO]
    assert (data["prompt_tokens"], data["new_tokens"], data["ended"]) == (33, 24, "eos")
    assert data["position"] == len(data["tokens"]) - 1
    assert err[-1].startswith("ran on"), "the report comes last, as generate's"
    tokenizer = Tokenizer(DEMO, 1024)
    asked = encode_messages(check_messages(data["turns"][:-1]), thinking=False)
    assert data["tokens"][: len(tokenizer.encode(asked))] == tokenizer.encode(asked)


def test_generate_goes_on_where_a_chat_was_saved(talk, tmp_path, capsys):
    talk(FRANCE, f"/save {tmp_path / 'talk'}")
    assert generate.main(["--load-state", str(tmp_path / "talk"), "--prompt", JAPAN]) == 0
    assert capsys.readouterr().out == f"{TOKYO}\n"


def test_a_message_may_begin_with_a_slash_and_must_be_text(talk):
    _, err, data = talk("//hello", b"caf\xe9\n", "/quit", FRANCE, flags=["--max-new-tokens", "2"])
    assert data["turns"][0]["content"] == "/hello"
    assert len(data["turns"]) == 2, "nothing is read behind /quit"
    assert "byte 3 of the line is no UTF-8" in err
    assert any("2 written" in line and "ended by limit" in line for line in err)


def test_a_context_that_is_full_is_one_line_and_reset_empties_it(talk, tmp_path):
    state = tmp_path / "full"
    lines = (FRANCE, JAPAN, f"/save {state}", "/reset", JAPAN)
    out, err, _ = talk(*lines, flags=["--max-context", "20"])
    assert out == f"{PARIS}\n{TOKYO}\n"
    (told,) = (line for line in err if line.startswith("the context of 20 tokens has no room for this message: "))
    assert told.endswith("; /save it for a chat with a larger --max-context, or /reset")
    assert talk(f"/load {state}", JAPAN)[0] == f"{TOKYO}\n"
    out, err, _ = talk(FRANCE, flags=["--max-context", "14"])
    assert any("ended by the end of the context; 14 of 14 in the context" in line for line in err)
    assert len(out) < len(PARIS)


def test_thinking_is_shown_and_not_carried_on(talk):
    out, _, data = talk(FRANCE, JAPAN, flags=["--think", "--system", "You answer."])
    assert out.splitlines()[1].endswith(f"</think>{TOKYO}")
    assert [turn["role"] for turn in data["turns"]] == ["system", "user", "assistant", "user", "assistant"]
    text = Tokenizer(DEMO, 1024).decode(data["tokens"])
    assert (text.count("<think>"), text.count("</think>")) == (1, 2), "of the first answer only its end"


def test_a_chat_of_nothing(talk):
    assert talk() == ("", [f"{DEMO}: a context of 8,192 tokens; /help lists the commands"], {
        "turns": [], "tokens": [], "sampling": {"temperature": 0.0, "top_p": 1.0, "seed": 0}
    })  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--raw", "--system", "x"), "--raw: excludes --system"),
        (("--raw", "--think"), "--raw: excludes --think"),
        (("--effort", "preview:max"), "--effort: means nothing without --think"),
        (("--graph",), "--graph: --device cpu"),
        (("--max-context", "2M"), "a context of 2097152 positions, max_position_embeddings is 1048576"),
        (("--top-p", "2"), "--top-p 2.0"),
    ],
)
def test_refusals(talk, flags, says):
    _, err, _ = talk(FRANCE, flags=flags, status=2)
    assert len(err) == 1
    assert says in err[0]


ENDLESS = ("--raw", "--temperature", "5")


def test_an_interrupt_ends_an_answer_and_two_at_the_prompt_the_chat(tmp_path):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "err").open("wb") as err:
        command = [sys.executable, "-m", "scripts.chat", *ENDLESS]
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=err, env=env
        )
    signal.signal(signal.SIGINT, before)

    def until(text, times=1):
        deadline = time.monotonic() + 60
        while (tmp_path / "err").read_text().count(text) < times:
            assert time.monotonic() < deadline, (tmp_path / "err").read_text()
            assert process.poll() is None
            time.sleep(0.05)

    try:
        for count in (1, 2):
            process.stdin.write(b"The\n")
            process.stdin.flush()
            assert len(process.stdout.read(40)) == 40
            process.send_signal(signal.SIGINT)
            until("ended by interrupt", count)
        process.stdin.write(f"/save {tmp_path / 'talk'}\n".encode())
        process.stdin.flush()
        until("tokens saved")
        process.send_signal(signal.SIGINT)
        until("Ctrl-C once more ends the chat")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.stdin.close()
        process.stdout.close()
    assert (tmp_path / "err").read_text().splitlines()[-1] == "interrupted"
    assert (tmp_path / "talk").exists()


@pytest.mark.slow
def test_several_ranks_answer_as_one_and_wait_for_their_user(tmp_path):
    """The user is longer silent than a rank may be."""
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "scripts.chat", "--rank-timeout", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=env, text=True, **pipes)
    process.stdin.write(f"{FRANCE}\n/save {tmp_path / 'talk'}\n")
    process.stdin.flush()
    assert process.stdout.readline() == f"{PARIS}\n"
    time.sleep(5)
    out, err = process.communicate(f"/load {tmp_path / 'none'}\n/reset\n/load {tmp_path / 'talk'}\n{JAPAN}\n")
    assert (process.returncode, out) == (0, f"{TOKYO}\n")
    assert "none: No such file or directory" in err
    assert "19 tokens loaded" in err
