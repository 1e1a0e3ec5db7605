"""Healthy runs of drawn models are judged, moved rows are found, and a false alarm is a failure that is told."""

import json

import pytest

from fathom.scripts import false_alarms
from fathom.scripts.parts import healthy_runs as task


@pytest.mark.parametrize("seed", [1, 7])
def test_a_healthy_run_is_judged_row_by_row(seed, monkeypatch):
    monkeypatch.setattr(task, "TOKENS", (60, 70))
    monkeypatch.setattr(task, "ROWS_KEPT", 0.0)
    monkeypatch.setattr(task, "SITES_KEPT", 0.0)
    (numerics, dtype), tally = task.judged(seed)
    assert (numerics, dtype) == {1: ("plain", "bf16"), 7: ("plain", "fp16")}[seed]
    assert tally.rows > 3000
    assert (tally.alarms, dict(tally.runs)) == ([], {task.WHOLE: 1})
    assert dict(tally.moved) == dict.fromkeys(task.TIMES, 1)
    assert all(tally.seen[times] for times in (3.0, 5.0)), "an error of three bounds is seen"


@pytest.mark.parametrize(("kept", "rows", "sites"), [("rows of some positions", 1.0, 0.0), ("some tensors", 0.0, 1.0)])
def test_a_healthy_run_of_which_not_all_was_kept_agrees(kept, rows, sites, monkeypatch):
    monkeypatch.setattr(task, "TOKENS", (60, 70))
    monkeypatch.setattr(task, "ROWS_KEPT", rows)
    monkeypatch.setattr(task, "SITES_KEPT", sites)
    _, tally = task.judged(2)
    assert (tally.alarms, dict(tally.runs), dict(tally.moved)) == ([], {kept: 1}, {})
    assert tally.rows > 1000


def test_the_page_counts_what_was_judged(tmp_path, capsys):
    page = tmp_path / "alarms.md"
    assert false_alarms.main(["--out", str(page), "--count", "1", "--seed", "4"]) == 0
    data = json.loads(page.with_suffix(".json").read_text())
    (tally,) = [data[name] for name in data if "," in name]
    told = page.read_text()
    assert f"0 of {tally['rows']:,} healthy rows were called wrong" in told
    assert f"wrote {page}" in capsys.readouterr().err


def test_an_alarm_fails_the_page():
    healthy, wrong = task.Tally(rows=10), task.Tally(rows=7, alarms=[{"seed": 3}])
    page = false_alarms._page("alarms", {("plain", "bf16"): healthy, ("deployed", "fp32"): wrong}, {"commit": "0" * 12})
    assert page.verdict == "Fail: 1 of 17 healthy rows were called wrong"
    assert page.facts["verdict"] == "fail"
