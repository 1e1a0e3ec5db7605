import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.config import ModelConfig
from fathom.model.errors import CapacityError, CheckpointError, ConfigError, StateError
from fathom.runtime.errors import PromptError
from fathom.runtime.options import DEMO
from fathom.scripts.cli import run
from fathom.scripts.inspect import main
from tests.make_checkpoint import micro_config, tiny_config, write_checkpoint

ROOT = Path(__file__).parents[2]
GZIPPED = gzip.compress(b"{}", mtime=0)  # a time stamp would make a test id that no two workers share


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(directory, tiny_config(), seed=0)
    return directory


def refused(argv, capsys):
    assert run(lambda: main([str(arg) for arg in argv])) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1, err
    return err


def test_json_tells_what_the_files_hold(checkpoint, tmp_path, capsys):
    out = tmp_path / "report.json"
    assert main(["--model", str(checkpoint), "--json", str(out)]) == 0
    data = json.loads(out.read_text())
    config, files = ModelConfig.from_file(checkpoint / "config.json"), Checkpoint.open(checkpoint)
    assert data["config"] == config.to_json()
    assert data["config_fingerprint"] == config.fingerprint
    assert data["tensors"] == len(files.tensors)
    # bytes of the data, and the 8 bytes and the header before it, are each whole file
    headers = sum(min(t.start for t in shard.tensors.values()) for shard in files.shards)
    assert data["bytes"] + headers == sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    for table in ("by_form", "by_kind", "by_dtype"):
        assert sum(tally["nbytes"] for tally in data[table].values()) == data["bytes"], table
    # the same weights whether FP4 pairs are counted as one (stored) or two (meant)
    pairs = data["by_form"]["FP4, E8M0 scales"]["elements"] // 2
    stored = sum(tally["elements"] for kind, tally in data["by_kind"].items() if kind != "scale")
    assert data["weights"] == stored + pairs
    assert capsys.readouterr().err == ""


def test_layers_are_described(checkpoint, tmp_path):
    out = tmp_path / "report.json"
    assert main(["--model", str(checkpoint), "--json", str(out)]) == 0
    layers = json.loads(out.read_text())["layers"]
    told = [(row["kind"], row["ratio"], row["rope_base"], row["yarn"] is not None, row["experts"]) for row in layers]
    assert told == [
        ("swa", 0, 10000, False, "by token id"),
        ("csa", 4, 160000, True, "by score"),
        ("hca", 128, 160000, True, "by score"),
        ("csa", 4, 160000, True, "by score"),
    ]


def test_a_bare_list_gives_the_same_as_the_checkpoint(checkpoint, tmp_path, capsys):
    listing = {name: [dtype, list(shape)] for name, (dtype, shape) in Checkpoint.open(checkpoint).shapes().items()}
    for path in (tmp_path / "list.json", tmp_path / "list.json.gz"):
        path.write_bytes((gzip.compress if path.suffix == ".gz" else bytes)(json.dumps(listing).encode()))
        assert main(["--config", str(checkpoint / "config.json"), "--tensors", str(path)]) == 0
    from_lists = capsys.readouterr().out
    main(["--model", str(checkpoint)])
    assert from_lists == 2 * capsys.readouterr().out


def test_no_weight_is_read(checkpoint, monkeypatch):
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("a weight was read"))
    assert main(["--model", str(checkpoint)]) == 0


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ("mtp.0.e_proj.weight", "draft head, not run: preview MTP, stages: 1"),
        ("mtp.2.attn.attn_sink", "draft head, not run: DSpark, stages: 3"),
        ("model.rotary_emb.inv_freq", "ignored, 1 tensors: rotary buffer"),
    ],
)
def test_what_is_ignored_is_told(checkpoint, tmp_path, capsys, extra, told):
    listing = Checkpoint.open(checkpoint).shapes() | {extra: ("F32", (2,))}
    if "DSpark" in told:
        listing |= dict.fromkeys(("mtp.0.main_proj.weight", "mtp.1.attn.attn_sink"), ("F32", (2,)))
    (tmp_path / "list.json").write_text(json.dumps(listing))
    assert main(["--config", str(checkpoint / "config.json"), "--tensors", str(tmp_path / "list.json")]) == 0
    assert told in capsys.readouterr().out


def test_the_demo_is_the_default_and_the_exit_status_reaches_the_shell(tmp_path):
    out = tmp_path / "report.json"
    command = [sys.executable, "-m", "scripts.inspect"]
    subprocess.run([*command, "--json", out], cwd=ROOT, check=True, capture_output=True)
    assert json.loads(out.read_text())["config"] == ModelConfig.from_file(DEMO / "config.json").to_json()
    wrong = subprocess.run([*command, "--model", tmp_path], cwd=ROOT, check=False, capture_output=True, text=True)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == f"{tmp_path}/config.json: No such file or directory\n"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"{}", "missing (82): embed.weight; "),
        (b"[]", "want a JSON object, name -> [dtype, shape]"),
        (b"{", "damaged JSON"),
        (b'{"a": 1, "a": 2}', "duplicate key 'a'"),
        (b'{"a": ["F32"]}', "tensor 'a': want [dtype, shape]"),
        (b'{"a": ["F32", [-1]]}', "tensor 'a': want [dtype, shape]"),
        (b'{"a": ["F32", [true]]}', "tensor 'a': want [dtype, shape]"),
        (b'{"a": [3, [1]]}', "tensor 'a': want [dtype, shape]"),
        (b'{"a": "F32"}', "tensor 'a': want [dtype, shape]"),
    ],
)
def test_a_bad_list_is_named(content, complaint, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(micro_config()))
    (tmp_path / "list.json").write_bytes(content)
    line = refused(["--config", tmp_path / "config.json", "--tensors", tmp_path / "list.json"], capsys)
    assert line.startswith(f"{tmp_path}/list.json: ")
    assert line.count("list.json") == 1
    assert complaint in line


@pytest.mark.parametrize(
    "content", [b"no gzip", GZIPPED[:-1], GZIPPED[:12] + b"\xff" * 9], ids=["other", "cut", "damaged"]
)
def test_a_damaged_gzip_file_is_named(content, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(micro_config()))
    (tmp_path / "list.json.gz").write_bytes(content)
    line = refused(["--config", tmp_path / "config.json", "--tensors", tmp_path / "list.json.gz"], capsys)
    assert line.startswith(f"{tmp_path}/list.json.gz: damaged gzip file")


def test_a_gzip_file_that_unpacks_to_too_much_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fathom.scripts.inspect.MAX_LIST_BYTES", 1000)
    (tmp_path / "config.json").write_text(json.dumps(micro_config()))
    (tmp_path / "list.json.gz").write_bytes(gzip.compress(b" " * 1001))
    line = refused(["--config", tmp_path / "config.json", "--tensors", tmp_path / "list.json.gz"], capsys)
    assert "list.json.gz: more than 1000 bytes" in line


@pytest.mark.parametrize("given", [["config"], ["tensors"], ["config", "tensors", "model"]])
def test_flags_that_contradict_each_other_are_named(given, tmp_path, capsys):
    argv = [part for name in given for part in (f"--{name}", DEMO if name == "model" else tmp_path)]
    assert refused(argv, capsys) == "--config and --tensors go together, and without --model\n"


def test_a_missing_list_and_a_missing_folder_of_the_report_are_named(checkpoint, tmp_path, capsys):
    config, lost = checkpoint / "config.json", tmp_path / "lost.json"
    assert refused(["--config", config, "--tensors", lost], capsys) == f"{lost}: No such file or directory\n"
    report = tmp_path / "nowhere" / "report.json"
    assert str(report) in refused(["--model", checkpoint, "--json", report], capsys)


# scripts.cli


@pytest.mark.parametrize("kind", [ConfigError, CheckpointError, CapacityError, StateError, PromptError])
def test_an_error_of_the_outside_world_is_one_line(kind, capsys):
    def main():
        raise kind("first\nsecond")

    assert run(main) == 2
    assert capsys.readouterr() == ("", "first; second\n")


@pytest.mark.parametrize("error", [ValueError("x"), AssertionError("x"), KeyError("x")])
def test_an_error_of_the_code_keeps_its_traceback(error):
    def main():
        raise error

    with pytest.raises(type(error)):
        run(main)


def test_an_error_of_the_system_that_names_no_file_is_one_line_too(capsys):
    def main():
        raise OSError(24, "Too many open files")

    assert run(main) == 2
    assert capsys.readouterr().err == "[Errno 24] Too many open files\n"


@pytest.mark.parametrize("status", [0, 1])
def test_the_status_of_the_script_is_kept(status):
    assert run(lambda: status) == status
