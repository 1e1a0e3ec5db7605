"""What commands write: whole or not at all, never over what they read, and nothing raw on the console."""

import argparse
import errno
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fathom.model.config import ModelConfig
from fathom.model.errors import ConfigError, one_line
from fathom.model.llama.config import LlamaConfig
from fathom.model.llama.trained import Trained
from fathom.runtime.options import DEMO
from fathom.runtime.output import making, replacing, write_text
from fathom.runtime.tensorfile import write_safetensors
from fathom.scripts import (
    cli,
    demo_document,
    evaluate,
    fault_matrix,
    generate,
    inspect,
    logits,
    memory_db,
    paths,
    plan,
    train_coda,
    train_demo,
    train_draft,
    train_llama,
)
from fathom.scripts.bench import command as bench
from fathom.scripts.console import visible
from fathom.scripts.train import v4_network as demo
from fathom.scripts.train.coda_network import adapted
from fathom.scripts.train.files import LLAMA, write_adapters
from fathom.scripts.train.llama_network import Network
from fathom.scripts.train.recipe import Recipe
from tests.full_disk import small_files
from tests.grids import on_demand

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = sorted(path.stem for path in (ROOT / "scripts").glob("*.py") if "def parser(" in path.read_text())
OWN = DEMO / "config.json"
PROMPT = ("--raw", "--prompt", "The capital of France is", "--max-new-tokens", "2")
PRINTING = {
    "inspect": (),
    "plan": ("--context", "1000"),
    "generate": PROMPT,
    "probe": ("--list",),
    "demo_document": ("needle",),
}


def command(name, *flags, out=subprocess.PIPE):
    """Run a command as its own process; one that waits is ended."""
    words = [sys.executable, "-m", f"scripts.{name}", *map(str, flags)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    given = {"stdout": out, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT, "env": env}
    return subprocess.run(words, **given, check=False, timeout=99)


def refused(main, capsys, *flags):
    """The one line of a command that refuses its command line."""
    assert cli.run(lambda: main([str(flag) for flag in flags])) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A folder of inputs, as the working directory; every one must be as it was afterwards."""
    held = {"ids": json.dumps([0, 3, 5] * 20), "prompt": "The old farmer", "messages": "[]", "old": "what was there"}
    held["read.json"] = "{}"
    for name, text in held.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "link").symlink_to("ids")
    os.link(tmp_path / "prompt", tmp_path / "twin")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert {name: (tmp_path / name).read_text() for name in held} == held
    assert {path.name for path in tmp_path.iterdir()} == {*held, "link", "twin"}


@pytest.mark.parametrize(
    ("main", "flags", "says"),
    [
        (generate, (*PROMPT, "--json", "x", "--save-state", "x"), "--json x: --save-state writes it too"),
        (generate, (*PROMPT, "--json", "x", "--save-state", "../{}/x"), "--json x: --save-state writes it too"),
        (generate, ("--prompt-file", "prompt", "--json", "prompt"), "--json prompt: is what --prompt-file reads"),
        (generate, ("--prompt-file", "prompt", "--json", "twin"), "--json twin: is what --prompt-file reads"),
        (generate, ("--messages", "messages", "--json", "messages"), "--json messages: is what --messages reads"),
        (generate, ("--load-state", "old", "--save-state", "old"), "--save-state old: is what --load-state reads"),
        (generate, (*PROMPT, "--save-state", DEMO / "config.json"), f"lies in the model's directory {DEMO}"),
        (generate, (*PROMPT, "--json", DEMO / "new"), f"lies in the model's directory {DEMO}"),
        (generate, (*PROMPT, "--kv", "all=shard:bits=6,basis=old", "--json", "old"), "--json old: is what --kv reads"),
        (generate, (*PROMPT, "--coda-adapters", "old", "--json", "old"), "--json old: is what --coda-adapters reads"),
        (logits, ("--tokens", "ids", "--out", "ids"), "--out ids: is what --tokens reads, and stays as it is"),
        (logits, ("--tokens", "ids", "--out", "link"), "--out link: is what --tokens reads"),
        (logits, ("--tokens", "ids", "--out", DEMO / "x"), f"lies in the model's directory {DEMO}"),
        (logits, ("--tokens", "ids", "--out", "/dev/null"), "/dev/null: not a regular file"),
        (logits, ("--tokens", "ids", "--out", "none/x"), "none/x: cannot be written there (No such file or directory)"),
        (logits, ("--tokens", "ids", "--out", "."), ".: is a folder"),
        (inspect, ("--json", DEMO / "config.json"), f"lies in the model's directory {DEMO}"),
        (inspect, ("--config", "old", "--tensors", "ids", "--json", "ids"), "--json ids: is what --tensors reads"),
        (plan, ("--config", "old", "--context", "9", "--json", "old"), "--json old: is what --config reads"),
        (memory_db, ("ingest", "--document", "prompt", "--out", "prompt"), "--out prompt: is what --document reads"),
        (memory_db, ("ingest", "--text", "x", "--out", DEMO / "x"), f"lies in the model's directory {DEMO}"),
        (
            bench,
            ("compare-transformers", "--checkpoint", DEMO, "--json", DEMO / "config.json"),
            "the model's directory",
        ),
        (evaluate, ("--text", "prompt", "--json", DEMO / "config.json"), f"lies in the model's directory {DEMO}"),
        (evaluate, ("--text", "prompt", "--json", "prompt"), "--json prompt: is what --text reads"),
        (
            evaluate,
            ("--text", "prompt", "--run", "--coda-adapters old", "--json", "old"),
            "--json old: is what --coda-adapters reads",
        ),
        (plan, ("--config", OWN, "--context", "9", "--json", DEMO / "tokenizer.json"), f"the model's directory {DEMO}"),
        (inspect, ("--config", OWN, "--tensors", "ids", "--json", DEMO / "x"), f"the model's directory {DEMO}"),
        (fault_matrix, ("--out", "page.json"), "--out page.json: is the name of the JSON that goes beside the page"),
        (train_llama, ("--out", "."), ".: exists and is not empty"),
        (train_demo, ("--out", "."), ".: exists and is not empty"),
        (train_draft, ("mtp", "--out", "."), ".: exists and is not empty"),
        (train_draft, ("mtp", "--out", DEMO / "x"), f"the model's directory {DEMO}"),
        (train_coda, (DEMO, "--out", "."), ".: exists and is not empty"),
        (train_coda, (DEMO, "--out", "x", "--page", "y"), "--page y: want a name that ends in .md"),
        (bench, ("compare-transformers", "--checkpoint", "."), ".: exists and is not empty"),
    ],
)
def test_no_output_is_an_input_another_output_or_in_the_models_directory(files, capsys, main, flags, says):
    assert says in refused(main.main, capsys, *(str(flag).format(files.name) for flag in flags))


def parsers():
    """The command line of every command and subcommand."""
    for name in [*COMMANDS, "bench.command"]:
        whole = importlib.import_module(f"scripts.{name}").parser()
        split = [action for action in whole._actions if isinstance(action, argparse._SubParsersAction)]
        yield from split[0].choices.values() if split else [whole]


READ, WRITTEN = paths.ACTIONS[:3], paths.ACTIONS[3:]
PAIRS = [
    pytest.param(parser, read, written, id=f"{parser.prog.split('scripts.')[1]} {read.dest} {written.dest}")
    for parser in parsers()
    for read in parser._actions
    for written in parser._actions
    if isinstance(read, READ) and isinstance(written, WRITTEN)
]


def test_every_path_says_what_is_done_with_it():
    for parser in parsers():
        for action in parser._actions:
            assert action.type is not Path or isinstance(action, paths.ACTIONS), f"{parser.prog} {action.dest}"
    assert {"bench compare-transformers checkpoint json", "evaluate text out", "plan config json"} <= {
        pair.id for pair in PAIRS
    }


def refusal(parser, *given):
    """What is said of flags and their paths, whatever else the command needs."""
    args = argparse.Namespace(**{action.dest: action.default for action in parser._actions})
    for action, path in given:
        value = action.type(path)
        action(parser, args, [value] if action.nargs else value, None)
    with pytest.raises(ConfigError) as caught:
        paths.check(args)
    return str(caught.value)


@pytest.mark.parametrize(("parser", "read", "written"), PAIRS)
def test_no_flag_writes_what_another_one_reads(parser, read, written, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "other"):
        (model / name).write_text("{}")
    (tmp_path / "link").symlink_to(model / "other")
    if isinstance(read, paths.Reads):
        for path in (model / "other", tmp_path / "link"):
            assert "stays as it is" in refusal(parser, (read, model / "other"), (written, path))
        refused = refusal(parser, (read, model / "config.json"), (written, model / "tokenizer.md"))
        assert refused.endswith(f"lies in the model's directory {model}, which stays as it is")
    else:
        for path in (model / "config.md", model / "other", model, tmp_path / "link"):
            refused = refusal(parser, (read, model), (written, path))
            assert refused.endswith(f"lies in the model's directory {model}, which stays as it is")


def test_a_config_alone_is_no_models_directory(tmp_path):
    (tmp_path / "config.json").write_bytes(OWN.read_bytes())
    flags = ["--config", str(tmp_path / "config.json"), "--context", "9", "--json", str(tmp_path / "plan.json")]
    assert plan.main(flags) == 0


def test_a_file_that_a_link_in_the_models_directory_leads_to_is_the_models(tmp_path, capsys):
    blobs, model = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    model.mkdir()
    for path in DEMO.iterdir():
        (blobs / path.name).write_bytes(path.read_bytes())
        (model / path.name).symlink_to(blobs / path.name)
    flags = ("--model", model, *PROMPT, "--json", blobs / "config.json")
    assert "lies in the model's directory" in refused(generate.main, capsys, *flags)
    assert (blobs / "config.json").read_bytes() == (DEMO / "config.json").read_bytes()


def test_a_report_may_go_to_a_pipe():
    done = command("inspect", "--json", "/dev/stderr")
    assert done.returncode == 0
    assert json.loads(done.stderr)["tensors"] > 0
    assert Path("/dev/null").is_char_device()
    assert command("inspect", "--json", "/dev/null").returncode == 0
    assert Path("/dev/null").is_char_device()


# --- a disk without room


def test_logits_on_a_full_disk_are_one_line_before_anything_is_computed(tmp_path, capsys):
    (tmp_path / "ids").write_text(json.dumps([5] * 2000))
    out = tmp_path / "logits"
    out.write_text("what was there")
    started = time.perf_counter()
    with small_files(1 << 20):
        assert refused(logits.main, capsys, "--tokens", tmp_path / "ids", "--out", out) == f"{out}: File too large"
    assert time.perf_counter() - started < 20
    assert out.read_text() == "what was there"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ids", "logits"]


@pytest.mark.parametrize(("flag", "limit"), [("--json", 200), ("--save-state", 2000)])
def test_a_report_or_state_without_room_leaves_what_was_there(tmp_path, capsys, flag, limit):
    out = tmp_path / "out"
    out.write_text("what was there")
    with small_files(limit):
        assert cli.run(lambda: generate.main([*PROMPT, flag, str(out)])) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"{out}: ")
    assert "ile too large" in last
    assert out.read_text() == "what was there"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("limit", [1000, 20_000, 600_000])  # not even a tokenizer; not all weights
def test_a_checkpoint_without_room_is_one_line_and_no_folder(tmp_path, capsys, monkeypatch, limit):
    llama = Network(LlamaConfig.from_json(LLAMA, "config.json"))
    monkeypatch.setattr("fathom.scripts.train_llama.trained", lambda *_: llama)
    untrained = demo.Network(ModelConfig.from_file(OWN))
    monkeypatch.setattr("fathom.scripts.train_demo.trained", lambda *_: untrained)
    for main in (train_llama.main, train_demo.main):
        with small_files(limit):
            assert cli.run(lambda: main(["--out", str(tmp_path / "out")])) == 2  # noqa: B023 -- called at once
        assert capsys.readouterr().err == f"{tmp_path / 'out'}: File too large\n"
        assert list(tmp_path.iterdir()) == []


def test_adapters_without_room_are_told_by_their_name(tmp_path):
    network = adapted(Network(LlamaConfig.from_json(LLAMA, "config.json")), 0, Recipe())
    with small_files(1000), pytest.raises(OSError, match="File too large") as caught:
        write_adapters(network, Trained("", "", "full"), tmp_path)
    assert caught.value.filename == str(tmp_path / "coda_adapters.safetensors")
    assert list(tmp_path.iterdir()) == []


# A command without torch and one with it; the others end by the same function.
@pytest.mark.parametrize("name", ["inspect", "generate", *on_demand("plan", "probe", "demo_document")])
def test_a_standard_output_without_room_is_named(name):
    with Path("/dev/full").open("w") as full:
        done = command(name, *PRINTING[name], out=full)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, "standard output: No space left on device")
    assert "Traceback" not in done.stderr


# --- inputs that never end


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("bench", ("performance", "--out", "{0}", "--saved", "{0}/{1}")),
        ("plan", ("--config", "{0}/{1}")),
    ],
)
def test_a_file_that_never_ends_is_refused(tmp_path, name, flags):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "long").touch()
    os.truncate(tmp_path / "long", 1 << 40)
    for file, why in (("pipe", "not a regular file"), ("long", f"{1 << 40} bytes, more than the")):
        done = command(name, *(flag.format(tmp_path, file) for flag in flags))
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"{tmp_path / file}: {why}")


def test_a_prompt_that_never_ends_is_refused_and_one_from_a_pipe_is_read(tmp_path):
    done = command("probe", "rope", "--prompt-file", "/dev/zero")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("/dev/zero: more than the ")
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(
        target=(tmp_path / "pipe").write_text,
        args=[
            "The old farmer",
        ],
    )
    writer.start()
    done = command("probe", "load", "--quick", "--prompt-file", tmp_path / "pipe")
    writer.join()
    assert done.stdout.split()[:2] == ["pass", "load"]


def test_an_error_of_the_disk_names_the_file(tmp_path):
    with pytest.raises(OSError, match="No space left") as caught, replacing(tmp_path / "x"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == str(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_a_file_keeps_its_mode_its_links_and_its_content_until_the_new_one_is_whole(tmp_path):
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_text("old")
    path.chmod(0o640)
    link.symlink_to(path)
    with replacing(link) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert link.is_symlink()
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o640
    with pytest.raises(ZeroDivisionError), replacing(path) as partial:
        partial.write_text(str(1 // 0))
    assert path.read_text() == "new"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "link"]


def test_a_new_file_has_the_mode_of_any_other(tmp_path):
    (tmp_path / "usual").touch()
    write_text(tmp_path / "ours", "x")
    write_safetensors(tmp_path / "tensors", {"x": torch.zeros(1)})
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "usual").stat().st_mode
    assert (tmp_path / "tensors").stat().st_mode == (tmp_path / "usual").stat().st_mode
    (tmp_path / "tensors").chmod(0o640)
    write_safetensors(tmp_path / "tensors", {"x": torch.zeros(1)}, {"more": "said"})
    assert (tmp_path / "tensors").stat().st_mode & 0o777 == 0o640


def test_a_folder_is_there_whole_or_not_at_all(tmp_path):
    with making(tmp_path / "new" / "folder") as folder:
        (folder / "file").write_text("x")
        assert not (tmp_path / "new" / "folder").exists()
    assert [path.name for path in (tmp_path / "new" / "folder").iterdir()] == ["file"]
    with pytest.raises(OSError, match="not empty") as caught, making(tmp_path / "new"):
        pass
    assert caught.value.filename == str(tmp_path / "new")
    with pytest.raises(ZeroDivisionError), making(tmp_path / "failed") as folder:
        (folder / "file").write_text(str(1 // 0))
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, *on_demand(signal.SIGHUP)])
def test_a_run_that_is_ended_leaves_nothing(tmp_path, number):
    (tmp_path / "ids").write_text(json.dumps([5] * 60_000))
    words = [sys.executable, "-m", "scripts.logits", "--tokens", str(tmp_path / "ids"), "--out", str(tmp_path / "out")]
    # Under nohup, or in the background of some shells, the child would inherit that the signal is ignored.
    heard = {"preexec_fn": partial(signal.signal, number, signal.SIG_DFL)}
    with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True, **heard) as run:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".fathom-*.partial")) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert list(tmp_path.glob(".fathom-*.partial"))
        run.send_signal(number)
        told = run.communicate(timeout=30)[1]
    assert (run.returncode, told) == ((130, "interrupted\n") if number == signal.SIGINT else (143, "terminated\n"))
    assert [path.name for path in tmp_path.iterdir()] == ["ids"]


# --- the console


def test_a_model_whose_path_looks_like_markup(tmp_path, capsys):
    folder = tmp_path / "a[/x]b[red]"
    folder.mkdir(parents=True)
    for path in DEMO.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    state = str(tmp_path / "s[y]")
    assert cli.run(lambda: generate.main(["--model", str(folder), *PROMPT, "--save-state", state])) == 0
    assert capsys.readouterr().out == " Paris.\n"
    assert cli.run(lambda: generate.main(["--model", str(folder), "--load-state", state])) in (0, 2)
    assert cli.run(lambda: inspect.main(["--model", str(folder)])) == 0
    capsys.readouterr()
    said = refused(inspect.main, capsys, "--model", tmp_path / "[/z]")
    assert said == f"{tmp_path}/[/z]/config.json: No such file or directory"


def test_what_a_file_says_reaches_the_terminal_escaped_and_cut(tmp_path, capsys):
    path = tmp_path / "made\x1b[2J"
    save_file({"x" * 300_000: torch.zeros(1)}, path, {"format": "\x1b]0;title\x07" + "y" * 300_000})
    line = refused(generate.main, capsys, "--load-state", path)
    assert "\x1b" not in line
    assert line.isprintable()
    assert len(line) < 3000


def test_one_line_of_anything():
    assert one_line("a\nb\x1b[0m\x00é\u202e") == "a; b\\x1b[0m\\x00é\\u202e"
    assert one_line("x" * 400) == "x" * 400
    assert one_line(f"{'x' * 3000}/y: why") == f"{'x' * 200}... (3003 characters) ...{'x' * 197}/y: why"
    many = one_line("begins " + "name " * 1000 + "ends")
    assert many.startswith("begins name ")
    assert many.endswith(" name ends")
    assert len(many) < 2100


def test_text_for_a_terminal_keeps_its_lines_and_nothing_else_that_steers():
    assert visible("a\n\tb\x1b[2J\x07\x9bé") == "a\n\tb\\x1b[2J\\x07\\x9bé"


def test_a_table_in_a_pipe_is_neither_wrapped_nor_cut():
    done = command("generate", *PROMPT)
    lines = done.stderr.splitlines()
    assert [line.split()[0] for line in lines] == ["prompt", "answer", "memory", "ran"]
    assert "indexer frontier" in lines[2]
    assert "1 threads" in lines[3]


@pytest.mark.parametrize("name", ["inspect", "generate", *on_demand("plan", "probe", "demo_document")])
def test_a_pipe_that_nobody_reads_ends_every_command_alike(name):
    words = [sys.executable, "-m", f"scripts.{name}", *PRINTING[name]]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        run.stdout.close()
        told = run.stderr.read()
        assert run.wait(60) == 141
    assert "rror" not in told


# --- before torch

NO_JSON = "config/config.json: damaged JSON"
# Every command that reads a model, its flags up to where the model is named.
MODEL_TAKEN = {
    "bench": ("prefill", "--model"),
    "calibrate_kv": ("--out", "{bad}/x"),
    "chat": ("--model",),
    "compare": ("--recording", "README.md", "--model"),
    "evaluate": ("--text", "README.md", "--model"),
    "fault_matrix": ("--model",),
    "generate": ("--prompt", "a", "--model"),
    "inspect": ("--model",),
    "logits": ("--tokens", "README.md", "--out", "{bad}/x", "--model"),
    "memory_db": ("ingest", "--text", "a", "--out", "{bad}/x", "--model"),
    "plan": ("--model",),
    "probe": ("rope", "--model"),
    "record": ("--tokens", "README.md", "--out", "{bad}/x", "--model"),
    "train_coda": ("--out", "{bad}/x"),
    "train_draft": ("mtp", "--out", "{bad}/x", "--model"),
}


def test_every_command_that_reads_a_model_is_among_them():
    found = {p.prog.split()[2] for p in parsers() if any(isinstance(a, paths.Models) for a in p._actions)}
    assert {name.removeprefix("scripts.") for name in found} == set(MODEL_TAKEN)


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    """A folder of damaged files, and of models whose config.json, index or header of a shard is damaged."""
    folder, shard = tmp_path_factory.mktemp("bad"), "model-00003-of-00006.safetensors"
    header = bytearray((DEMO / shard).read_bytes())
    header[30] = 7  # a control character in the header's JSON
    damaged = {
        "config": ("config.json", b'{"a": '),
        "index": ("model.safetensors.index.json", b'{"weight_map": '),
        "header": (shard, header),
    }
    for name, (file, content) in damaged.items():
        (folder / name).mkdir()
        for path in DEMO.iterdir():
            if path.name != file:
                (folder / name / path.name).symlink_to(path)
        (folder / name / file).write_bytes(content)
    files = {"list.json": b"[1, 2", "ids.json": b"[0, 5000]", "latin": b"caf\xe9", "empty": b"", "torn": header}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_every_command_is_looked_at():
    assert {"generate", "logits", "inspect", "plan", "probe", "memory_db", "make_checkpoint"} < set(COMMANDS)


BEFORE_TORCH = [
    ("generate", ("--prompt", "a", "--model", "nowhere"), "nowhere/config.json: No such file or directory"),
    ("generate", ("--prompt", "", "--temperature", "0"), "the prompt is empty"),
    ("generate", ("--prompt", "a", "--temperature", "-1"), "--temperature -1.0: want a number >= 0"),
    ("generate", ("--prompt", "a", "--json", "model/demo/config.json"), "lies in the model's directory"),
    ("logits", ("--tokens", "nowhere", "--out", "{bad}/x"), "nowhere: No such file or directory"),
    ("inspect", ("--config", "README.md"), "--config and --tensors go together"),
    ("generate", ("--prompt", "a", "--coda-adapters", "nowhere"), "nowhere: No such file or directory"),
    ("generate", ("--prompt", "a", "--kv", "all=shard:basis=nowhere"), "nowhere: No such file or directory"),
    ("probe", ("rope", "--prompt-file", "nowhere"), "nowhere: No such file or directory"),
    ("bench", ("prefill", "--model", "nowhere"), "nowhere/config.json: No such file or directory"),
    ("bench", ("performance", "--saved", "nowhere"), "nowhere: No such file or directory"),
    ("evaluate", ("--text", "nowhere"), "nowhere: No such file or directory"),
    ("evaluate", (), "--text FILE is needed, or --needle"),
    ("evaluate", ("--needle", "--stride", "9"), "--stride: not with --needle"),
    ("evaluate", ("--text", "README.md", "--needles", "9"), "--needles: means nothing without --needle"),
    ("evaluate", ("--needle", "--needles", "67"), "--needles 67: there are 66 names of people to give a code to"),
    ("evaluate", ("--text", "README.md", "--run", "--kvx 1"), '--run "--kvx 1": unrecognized arguments: --kvx 1'),
    ("calibrate_kv", ("nowhere", "--out", "{bad}/x"), "nowhere/config.json: No such file or directory"),
    ("train_coda", ("nowhere", "--out", "{bad}/x"), "nowhere/config.json: No such file or directory"),
    ("probe", ("needle", "--model", "/dev/null"), "/dev/null/config.json: cannot be read: Not a directory"),
    ("memory_db", ("ask", "--state", "nowhere", "--question", "?"), "nowhere: No such file or directory"),
    ("train_llama", ("--out", "model/demo"), "model/demo: exists and is not empty"),
    ("train_demo", ("--out", "model/demo"), "model/demo: exists and is not empty"),
    ("train_draft", ("dspark", "--model", "nowhere", "--out", "{bad}/x"), "nowhere/config.json: No such file"),
    ("demo_document", ("needle", "--tokens", "3"), "--tokens 3: a document of this kind has at least 64"),
    ("demo_document", ("common", "--tokens", "191"), "--tokens 191: a document of this kind has at least 192"),
    *((name, (*flags, "{bad}/config"), NO_JSON) for name, flags in MODEL_TAKEN.items()),
    *((name, (*flags, "{bad}/index"), "index.json: damaged JSON") for name, flags in MODEL_TAKEN.items()),
    *((name, (*flags, "{bad}/header"), "06.safetensors: header") for name, flags in MODEL_TAKEN.items()),
    ("logits", ("--out", "{bad}/x", "--tokens", "{bad}/list.json"), "list.json: no JSON (damaged JSON"),
    (
        "record",
        ("--out", "{bad}/x", "--tokens", "{bad}/ids.json"),
        "entry 1 is 5000, want a token id from 0 to 1023",
    ),
    ("generate", ("--tokens", "{bad}/ids.json"), "entry 1 is 5000, want a token id"),
    ("generate", ("--messages", "{bad}/list.json"), "list.json: not JSON: damaged JSON"),
    ("generate", ("--prompt-file", "{bad}/latin"), "latin: byte 3 is no UTF-8"),
    ("generate", ("--out", "{bad}/x", "--prompts-file", "{bad}/latin"), "latin: byte 3 is no UTF-8"),
    (
        "generate",
        ("--prompt", "a", "--load-state", "{bad}/latin"),
        "latin: header of 3915800931 bytes",
    ),
    ("generate", ("--prompt", "a", "--coda-adapters", "{bad}/torn"), "torn: header: damaged JSON"),
    ("generate", ("--prompt", "a", "--kv", "all=shard:basis={bad}/torn"), "torn: header: damaged JSON"),
    ("probe", ("rope", "--prompt-file", "{bad}/latin"), "latin: byte 3 is no UTF-8"),
    ("probe", ("rope", "--prompt-file", "/dev/null", "--model", "{bad}/config"), NO_JSON),
    ("evaluate", ("--text", "{bad}/latin"), "latin: byte 3 is no UTF-8"),
    ("evaluate", ("--text", "{bad}/empty"), "empty: the text is empty"),
    ("evaluate", ("--needle", "--text", "{bad}/latin"), "latin: byte 3 is no UTF-8"),
    ("evaluate", ("--text", "README.md", "--run", "--kv all=shard:basis={bad}/torn"), "torn: header: damaged JSON"),
    ("calibrate_kv", ("model/demo", "--out", "{bad}/x", "--text", "{bad}/latin"), "latin: byte 3 is no UTF-8"),
    ("train_coda", ("model/demo", "--out", "{bad}/x", "--text", "{bad}/latin"), "latin: byte 3 is no UTF-8"),
    ("memory_db", ("ingest", "--out", "{bad}/x", "--document", "{bad}/latin"), "latin: byte 3 is no UTF-8"),
    ("memory_db", ("ask", "--question", "?", "--state", "{bad}/torn"), "torn: header: damaged JSON"),
    ("memory_db", ("quantise", "{bad}/torn", "--bits", "8", "--out", "{bad}/x"), "torn: header: damaged JSON"),
    ("inspect", ("--config", OWN, "--tensors", "{bad}/list.json"), "list.json: damaged JSON"),
    ("plan", ("--config", "{bad}/list.json"), "list.json: damaged JSON"),
    (
        "make_checkpoint",
        ("--layers", "1", "--out", "{bad}/x", "--config", "{bad}/list.json"),
        "list.json: damaged JSON",
    ),
]
# All command lines in one process, each as a program of its own: what each says, its status, and what it imported.
PROGRAM = """
import contextlib, io, json, runpy, sys
told, heavy = [], {"torch", "transformers", "triton"}
for name, *flags in json.loads(sys.argv[1]):
    sys.argv, before = [name, *flags], heavy & sys.modules.keys()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            runpy.run_module(f"scripts.{name}", run_name="__main__")
            code = None
        except SystemExit as end:
            code = end.code
    told.append([code, said.getvalue(), sorted(heavy & sys.modules.keys() - before)])
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def before_torch(bad):
    """What each of the command lines says that end before torch is imported."""
    lines = [(name, flag) for name in COMMANDS for flag in ("--help", "--no-such-flag")]
    lines += [(name, *(str(flag).format(bad=bad) for flag in flags)) for name, flags, _ in BEFORE_TORCH]
    words = [sys.executable, "-c", PROGRAM, json.dumps(lines)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True, timeout=99)
    return dict(zip(lines, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(("flag", "status"), [("--help", 0), ("--no-such-flag", 2)])
def test_a_command_line_is_read_without_torch(before_torch, name, flag, status):
    code, said, imported = before_torch[name, flag]
    assert (code or 0, imported) == (status, []), said


@pytest.mark.parametrize(("name", "flags", "says"), BEFORE_TORCH)
def test_bad_files_and_values_are_told_without_torch_too(bad, before_torch, name, flags, says):
    code, said, imported = before_torch[name, *(str(flag).format(bad=bad) for flag in flags)]
    assert (code, imported) == (2, []), said
    (line,) = said.splitlines()
    assert says in line


def test_ingesting_a_few_words_imports_no_compiler(tmp_path):
    program = f"""
import runpy, sys
sys.argv = ["x", "ingest", "--text", "a b", "--out", {str(tmp_path / "s")!r}]
try:
    runpy.run_module("scripts.memory_db", run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
slow = {{"torch._dynamo", "sympy"}} & sys.modules.keys()
assert not slow, slow
"""
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("kind", ["needle", "common"])
def test_documents_of_the_least_length_can_be_made(kind, capsys):
    for seed in range(30):
        assert demo_document.main([kind, "--tokens", str(demo_document.SHORTEST[kind]), "--seed", str(seed)]) == 0
    assert capsys.readouterr().out


def test_logits_are_those_of_the_calls_in_order(tmp_path):
    (tmp_path / "ids").write_text(json.dumps([0, *range(5, 150)]))
    flags = ["--tokens", str(tmp_path / "ids"), "--numerics", "plain", "--dtype", "fp32", "--out"]
    assert logits.main([*flags, str(tmp_path / "one")]) == 0
    assert logits.main([*flags, str(tmp_path / "many"), "--prefill-chunk", "64", "--decode-from", "140"]) == 0
    one, many = (load_file(tmp_path / name)["logits"] for name in ("one", "many"))
    assert one.shape == many.shape == (146, 1024)
    assert (one - many).abs().max() < 2e-4
