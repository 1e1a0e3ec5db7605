"""`scripts.bench`: every name is there, JSON says what was run, and runs made apart are not compared."""

import json

import pytest

from model.errors import ConfigError
from scripts.bench import command, kernels, record
from scripts.bench.command import main
from scripts.bench.pairs import Pair
from scripts.cli import arguments, run
from scripts.paths import ROOT


def refused(capsys, *flags):
    """What argparse says as it ends with exit status 2."""
    with pytest.raises(SystemExit) as end:
        main(list(flags))
    assert end.value.code == 2
    return capsys.readouterr().err


def test_kernels_measures_what_is_asked_for_and_says_what_it_ran(tmp_path, monkeypatch, capsys):
    def never():
        raise AssertionError

    monkeypatch.setattr(kernels, "SECONDS", 0.0)
    calls = [lambda: None, lambda: None]
    monkeypatch.setattr(kernels, "BENCHES", {"attend": lambda: iter([Pair("a", "x", calls[0], "y", calls[1])])} | {
        "select": never
    })  # fmt: skip
    out = tmp_path / "out.json"
    assert main(["kernels", "--only", "attend", "--json", str(out)]) == 0
    data = json.loads(out.read_text(encoding="utf-8"))
    assert data["bench"] == "kernels"
    assert data["command"] == "python -m scripts.bench kernels --only attend --json out.json"
    assert data["settings"] == {"only": ["attend"]}
    assert data["complete"]
    assert len(data["results"]["attend"][0]["first_ms"]) == 15
    assert data["machine"]["cores"] > 0
    assert data["machine"]["memory_bytes"] > 1 << 28
    assert {"processor", "flags"} <= data["machine"].keys()
    assert data["versions"]["torch"]
    assert data["versions"]["python"].startswith("3.")
    assert len(data["commit"]["hash"] or 40 * "0") == 40
    assert str(tmp_path) not in out.read_text(encoding="utf-8")
    assert "15" in capsys.readouterr().out


def test_two_runs_have_two_ids_and_are_not_compared(tmp_path):
    parts = []
    for name in ("a", "b"):
        args = arguments(command.parser(), ["kernels", "--json", str(tmp_path / name)])
        one = record.Record(args)
        one.write([])
        parts.append((name, json.loads((tmp_path / name).read_text(encoding="utf-8"))))
    record.check_one_run([parts[0], parts[0]])
    with pytest.raises(ConfigError, match=r"^b and a were made apart: run .* within one run alone$"):
        record.check_one_run(parts)
    for field in ("commit", "machine"):
        other = parts[0][1] | {field: {"hash": "0", "processor": "another"}}
        with pytest.raises(ConfigError, match=f"made apart: {field}"):
            record.check_one_run([parts[0], ("c", other)])


def test_the_command_names_folders_of_this_repository_whole_and_others_by_their_last_part(tmp_path):
    for folder, told in ((ROOT / "model" / "demo", "model/demo"), (tmp_path / "mine", "mine")):
        args = arguments(command.parser(), ["gains", "--before", "x", "--checkpoint", str(folder)])
        assert record.settings(args)["checkpoint"] == told
        assert args.command_line == f"python -m scripts.bench gains --before x --checkpoint {told}"


def test_the_parts_that_can_be_asked_for_are_those_there_are():
    assert tuple(kernels.BENCHES) == command.KERNEL_PARTS


def test_bad_flags_are_refused(capsys, tmp_path):
    assert "NAME" in refused(capsys)
    assert "nothing" in refused(capsys, "nothing")
    assert "dances" in refused(capsys, "kernels", "--only", "dances")
    with pytest.raises(ConfigError, match="is a folder"):
        main(["kernels", "--json", str(tmp_path)])


def test_dispatch_alone_is_refused_in_one_line(capsys):
    assert run(lambda: main(["dispatch"])) == 2
    assert capsys.readouterr().err == "one rank alone dispatches nothing: start several, with torchrun\n"
