"""Our side alone: prefill, decode and load say where the time goes, every repetition of it."""

import contextlib
import io
import json
import sys

import pytest

from kernels.ops import CPU
from runtime.options import DEMO
from scripts.bench import load
from scripts.bench.clock import OTHER, Clock, component
from scripts.bench.command import main
from scripts.cli import run


@pytest.mark.parametrize(
    ("name", "more", "tokens"),
    [("prefill", [], {150, 70}), ("decode", ["--steps", "3"], {3})],
    ids=["prefill", "decode"],
)
def test_components_are_all_of_the_time_in_every_repetition(name, more, tokens, tmp_path, capsys):
    out = tmp_path / "out.json"
    flags = ["--context", "150", "70", "--repetitions", "2", "--prefill-chunk", "64", "--json", str(out), *more]
    assert main([name, *flags]) == 0
    data = json.loads(out.read_text(encoding="utf-8"))
    rows = data["results"]
    assert sorted((row["context"], row["repetition"]) for row in rows) == [(70, 0), (70, 1), (150, 0), (150, 1)]
    assert {row["tokens"] for row in rows} == tokens
    for row in rows:
        assert {"linear", "attend, SWA", "attend, CSA", "attend, HCA", "select", OTHER} <= row["components"].keys()
        assert min(row["components"].values()) >= 0
    assert data["settings"]["numerics"] == "deployed"
    assert data["settings"]["model"] == "model/demo"
    assert data["command"].startswith(f"python -m scripts.bench {name} --context 150 70 --repetitions 2")
    assert "--model" not in data["command"]
    shown = capsys.readouterr().out
    assert "tokens/s" in shown
    assert "attend, CSA" in shown


def test_the_clock_tells_ops_and_kinds_of_layer_apart_and_what_is_none_of_them(monkeypatch):
    now = iter([0.0, 1.0, 4.0, 10.0, 12.0, 20.0, 21.0, 30.0])
    clock = Clock()
    monkeypatch.setattr(clock, "_now", lambda: next(now))
    ops = clock.watch(CPU._replace(hadamard=lambda x: x, pool=lambda x: -x))
    clock.start()
    assert (ops.hadamard(1), ops.pool(1), ops.hadamard(2)) == (1, -1, 2)
    assert clock.stop() == {"hadamard": 4.0, "pool": 2.0, OTHER: 24.0}
    assert ops.name == "cpu"
    q = object()
    assert component("attend", (q, q, 0, 1, None, 1, None, q)) == "attend, SWA"
    assert component("attend", (q, q, 0, 1, q, 128, None, q)) == "attend, HCA"
    assert component("attend", (q, q, 0, 1, q, 4, q, q)) == "attend, CSA"
    assert component("linear", (q, q)) == "linear"


def test_load_is_timed_cold_and_warm_beside_reading_the_files(tmp_path, monkeypatch, capsys):
    def here(told):
        """What a child does, in this process."""
        out = io.StringIO()
        monkeypatch.setattr(sys, "argv", ["load", told])
        with contextlib.redirect_stdout(out):
            assert load.main() == 0
        return json.loads(out.getvalue())

    forgotten, size = [], sum(path.stat().st_size for path in DEMO.iterdir())
    monkeypatch.setattr(load, "_child", here)
    monkeypatch.setattr(load, "forget", forgotten.append)
    out = tmp_path / "out.json"
    assert main(["load", "--repetitions", "2", "--json", str(out)]) == 0
    rows = json.loads(out.read_text(encoding="utf-8"))["results"]
    ways = [(state, way) for state in ("cold", "warm") for way in ("ours", "safetensors", "bytes")]
    assert [(row["state"], row["way"]) for row in rows] == 2 * ways
    assert all(row["seconds"] > 0 and row["bytes"] == size for row in rows)
    assert forgotten == [DEMO.resolve()] * 6
    assert capsys.readouterr().out.count("safetensors") == 2


def test_what_cannot_be_loaded_is_refused_in_one_line(tmp_path, capsys):
    for name in ("load", "prefill", "decode"):
        assert run(lambda name=name: main([name, "--model", str(tmp_path / "none")])) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "none" in line
    with pytest.raises(SystemExit) as end:
        main(["prefill", "--repetitions", "0"])
    assert end.value.code == 2
