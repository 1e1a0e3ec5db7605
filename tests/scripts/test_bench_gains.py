"""Profiles of two commits: the table's numbers, a commit that is none, and one profile of this folder."""

import argparse
import json
import subprocess

import pytest

from scripts.bench import command, gains
from scripts.bench.record import Record
from scripts.cli import arguments, run_alone
from scripts.paths import ROOT


def row(pair, side, **prefill):
    return {"pair": pair, "side": side, "prefill": prefill, "decode": {"other": 1.0}}


def test_a_table_has_medians_and_the_ratios_of_pairs():
    rows = [
        row(0, "after", linear=2.0, attend=1.0, tiny=0.001),
        row(0, "before", linear=4.0, attend=1.0, tiny=0.001),
        row(1, "before", linear=9.0, attend=3.0, gone=1.0),
        row(1, "after", linear=3.0, attend=1.0),
        row(2, "before", linear=3.0, attend=2.0, gone=1.0),
        row(2, "after", linear=3.0, attend=1.0),
    ]
    assert gains.table(rows, "prefill", 10.0) == [
        ("linear", "40", "30", "2.00", "1.00 .. 3.00"),
        ("attend", "20", "10", "2.00", "1.00 .. 3.00"),
        ("gone", "10", "0", "inf", "inf .. inf"),
        ("all", "60", "40", "1.67", "1.50 .. 3.25"),
    ]


def test_the_page_begins_with_what_was_found():
    rows = [row(0, "before", linear=4.0), row(0, "after", linear=2.0)]
    args = arguments(command.parser(), ["gains", "--before", "x", "--context", "1000", "--decode", "10"])
    assert gains.verdict("prefill", rows, args) == (
        "Prefill, 1000 tokens: ms per 1000: 4000 before, 2000 after, 2.00 times as fast (2.00 .. 2.00)."
    )
    same = [row(pair, side, linear=ms) for pair, ms in ((0, 4.0), (1, 5.0)) for side in ("before", "after")]
    assert gains.verdict("prefill", same, args).endswith(
        "4500 before, 4500 after, no change beyond the spread, 1.00 times as fast (1.00 .. 1.00)."
    )
    told = gains.page(Record(args), rows, "c" * 40, args)
    line = told.split("# Where the time goes, before and after, in plain numerics\n\n")[1].splitlines()[0]
    assert line == f"**{gains.verdict('prefill', rows, args)} {gains.verdict('decode', rows, args)}**"


def test_a_commit_that_git_does_not_know_is_one_line(capsys, tmp_path):
    flags = ["gains", "--before", "no-such-commit", "--checkpoint", str(tmp_path)]
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(run_alone(lambda: command.main(flags)))
    assert ended.value.code == 2
    assert capsys.readouterr().err.strip() == "--before no-such-commit: git knows no such commit here"


def test_a_profile_covers_the_whole_run():
    asked = argparse.Namespace(context=40, decode=2, chunk=32, threads=1, numerics="deployed", seed=0)
    found = gains.profile(asked, ROOT / "model" / "demo", ROOT)
    for kind in gains.KINDS:
        assert {"linear", "attend, CSA", "attend, HCA", "select", "checks", "other"} <= found[kind].keys()
        assert all(seconds > 0 for seconds in found[kind].values())


def test_a_worktree_has_the_files_of_its_commit_and_goes_again():
    with gains.worktree("HEAD") as (folder, commit):
        assert (folder / "model" / "config.py").is_file()
        assert len(commit) == 40
    assert not folder.exists()
    listed = subprocess.run(["git", "worktree", "list"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert str(folder) not in listed


def test_a_profile_that_fails_says_why(tmp_path):
    asked = argparse.Namespace(context=4, decode=1, chunk=4, threads=1, numerics="plain", seed=0)
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(RuntimeError, match=r"config\.json"):
        gains.profile(asked, tmp_path, ROOT)
