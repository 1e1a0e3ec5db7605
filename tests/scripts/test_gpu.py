"""`scripts.gpu` without a GPU: stand-ins for its stages, what is made of them, and what it asks of a machine."""

import argparse
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
import torch

from fathom.scripts import gpu as command
from fathom.scripts.bench import sass
from fathom.scripts.bench.command import GPU_PARTS
from fathom.scripts.bench.gpu import LAYERS, READING, WHOLE
from fathom.scripts.console import Console
from fathom.scripts.parts import gpu_stages as gpu
from fathom.scripts.parts.gpu_stages import ABSENT, FAILED, LATE, PASSED, Result, Stage
from tests.by_hand import ROOT


def python(text):
    return sys.executable, "-c", text


def stage(name, *texts, line=r"\d+ passed", limit=60.0, **more):
    return Stage(name, tuple(map(python, texts)), line, limit, **more)


def ran(folder, *stages, jobs=2):
    return {result.name: result for result in gpu.run_stages(stages, folder, Console(stderr=True), jobs)}


# --- stages


def test_a_stage_that_fails_or_hangs_or_is_not_there_stops_no_other(tmp_path):
    alive = tmp_path / "alive"
    child = f"import pathlib, time; time.sleep(4); pathlib.Path({str(alive)!r}).touch()"
    hangs = f"import subprocess, sys; print('1 passed', flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    began = time.monotonic()
    found = ran(
        tmp_path,
        stage("fails", "print('3 passed'); raise SystemExit(3)"),
        stage("leaves tests out", "print('1 passed'); raise SystemExit(124)"),
        stage("breaks", "raise ValueError('a kernel')"),
        stage("hangs", hangs, limit=1.5),
        stage("no program", "print('1 passed')", needs=("$no-such-program",)),
        stage("no package", "print('1 passed')", needs=("no_such_package", "os")),
        stage("says nothing", "print('done')"),
        stage("in steps", "print('1 passed')", "print('2 passed')"),
        stage("ends early", "raise SystemExit(1)", "print('2 passed')"),
        stage("alone", "print('7 passed')", alone=True),
    )
    assert {name: result.status for name, result in found.items()} == {
        "fails": FAILED, "leaves tests out": LATE, "breaks": FAILED, "hangs": LATE,
        "no program": ABSENT, "no package": ABSENT, "says nothing": FAILED, "in steps": PASSED,
        "ends early": FAILED, "alone": PASSED,
    }  # fmt: skip
    told = {name: result.told for name, result in found.items()}
    assert told["fails"] == "3 passed"
    assert told["breaks"] == "ValueError: a kernel"
    assert told["no program"] == "no no-such-program here"
    assert told["no package"] == "no no_such_package here"
    assert told["says nothing"] == "ended well, and did not say what it found: done"
    assert told["in steps"] == "2 passed"
    assert found["hangs"].seconds == pytest.approx(1.5, abs=1.4)
    time.sleep(max(0.0, 6 - (time.monotonic() - began)))
    assert not alive.exists(), "what it started was ended with it"


def test_what_runs_ends_with_an_interrupted_run(tmp_path):
    class Interrupted(Console):
        def say(self, *_):
            raise KeyboardInterrupt

    alive, began = tmp_path / "alive", time.monotonic()
    hangs = f"import pathlib, time; time.sleep(4); pathlib.Path({str(alive)!r}).touch()"
    made = [stage("ends", "print('1 passed')"), stage("hangs", hangs), stage("waits", hangs)]
    with pytest.raises(KeyboardInterrupt):
        gpu.run_stages(made, tmp_path, Interrupted(stderr=True), 2)
    assert time.monotonic() - began < 3.5
    time.sleep(max(0.0, 6 - (time.monotonic() - began)))
    assert not alive.exists()


def test_texts_must_be_the_same_and_be_texts(tmp_path):
    a = "import sys; print('some text'); print('12 tokens in 3 s', file=sys.stderr)"
    found = ran(
        tmp_path,
        stage("same", a, a.replace("3 s", "4 s"), line=r"\w", same=True),
        stage("other", a, a, a.replace("text", "next"), line=r"\w", same=True),
        stage("none", "pass", "pass", line=r"\w", same=True),
        stage("broken", a, "raise SystemExit('no graph')", line=r"\w", same=True),
    )
    assert (found["same"].status, found["same"].told) == (PASSED, "2 times the same 10 characters")
    assert (found["other"].status, found["other"].told) == (FAILED, "not the same text as the first command's")
    assert "next" in found["other"].command
    assert (found["none"].status, found["none"].told) == (FAILED, "no text")
    assert (found["broken"].status, found["broken"].told) == (FAILED, "no graph")


def test_what_is_timed_runs_with_nothing_beside_it(tmp_path):
    log = tmp_path / "log"
    text = f"import time; f = open({str(log)!r}, 'a'); f.write('+'); f.flush(); time.sleep(.3); f.write('-')"
    text += "; print('1 passed')"
    made = [stage(f"{n}", text, alone=n > 2) for n in range(5)]
    found = ran(tmp_path, made[3], made[0], made[4], made[1], made[2], jobs=3)
    assert list(found) == ["3", "0", "4", "1", "2"]  # in the order that was asked for
    assert log.read_text()[-4:] == "+-+-"


@pytest.mark.parametrize("quick", [True, False])
def test_every_command_is_one_that_there_is(quick, tmp_path):
    """Its own parser takes what it is given; files of tests are there; together they are what a GPU is asked."""
    made = gpu.stages(tmp_path, quick=quick)
    assert len({each.name for each in made}) == len(made)
    parts, seen, tested = [], set(), set()
    for words in (words for each in made for words in each.commands):
        at = words.index(sys.executable)
        assert at == 0 or words[0] == "compute-sanitizer"
        assert words[at + 1] == "-m"
        name, given = words[at + 2], words[at + 3 :]
        seen.add(name)
        if name == "pytest":
            tested |= {word for word in given if word.startswith("tests/")}
            continue
        module = importlib.import_module(f"fathom.{name}" + (".command" if name == "scripts.bench" else ""))
        args = module.parser().parse_args(given)
        if name == "scripts.bench":
            parts += args.only
    assert seen == {"pytest", *(f"scripts.{name}" for name in ("generate", "record", "compare", "probe", "bench"))}
    assert sorted(parts) == sorted([*GPU_PARTS, *([WHOLE] if quick else [])])  # of a small one too, where time is short
    ops = {
        "attention",
        "compress",
        "experts",
        "gate",
        "hyper",
        "indexer",
        "linear",
        "norm",
        "quantise",
        "rope",
        "swiglu",
    }
    assert {f"tests/kernels/test_{op}.py" for op in ops} <= tested
    assert all((ROOT / name).is_file() for name in tested)
    timed = [
        each for each in made if each.rows is not None and (LAYERS in each.commands[0] or WHOLE in each.commands[0])
    ]
    assert all(each.alone for each in (timed if quick else [each for each in made if each.rows is not None]))
    if quick:
        together = max(each.limit for each in made if not each.alone)
        assert together + sum(each.limit for each in made if each.alone) <= 4 * 60
    assert len(json.loads((tmp_path / "ids.json").read_text())) == gpu.IDS


# --- what a machine lacks


def test_what_is_lacking_is_told():
    installed = {"torch": "2.11.0+cu130", "triton": "3.5.1", "numba": "0.62.0rc1", "psutil": "10"}

    def version(name):
        if name not in installed:
            raise metadata.PackageNotFoundError
        return installed[name]

    wanted = ["torch>=2.10", "triton>=3.6; sys_platform == 'linux'", "numba>=0.62", "rich>=13.9", "psutil>=6"]
    assert command.lacking(wanted, version) == ["triton>=3.6 (3.5.1 is installed)", "rich>=13.9"]


def test_without_a_gpu_it_says_so_in_a_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.missing() == f"no GPU: torch {torch.__version__} finds no CUDA device"
    monkeypatch.setattr(command, "lacking", lambda _: ["rich>=13.9"])
    assert command.missing().startswith("want rich>=13.9: `")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "scripts.gpu"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_a_python_without_packages_says_which_it_wants_in_a_line():
    """Of no site: nothing but the standard library is there."""
    command = [sys.executable, "-S", "-m", "scripts.gpu", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
    assert done.stderr.startswith("scripts.gpu: want ")
    assert "rich>=" in done.stderr


# --- the page


def row(table, case, now, read=None, floor=None, *, same=True):
    sides = {"triton": now, READING: read, "floor": floor}
    sides = {side: {"us": value} for side, value in sides.items() if value is not None}
    return {
        "table": table, "case": case, "sides": list(sides), "compared": True, "asked": {}, "at most": {},
        "agreement": [{"same": same, "apart": [0.5], "bound": "1 of it"}], "rounds": [sides] if same else [],
    }  # fmt: skip


CHECKS = [
    Result("record and compare", "python -m scripts.compare", PASSED, 12.4, "AGREES: 102 sites agree"),
    Result("probes", "python -m scripts.probe all", FAILED, 99.6, "16 of 17"),
    Result("memcheck", "compute-sanitizer", ABSENT, 0.0, "no compute-sanitizer here"),
]
ROWS = [
    row("linear", "wq_b", 18.6, 12.0, 7.75),
    row("linear", "wo_b", 1.0, same=False),
    row("whole model", "1 token", 15474.0, None, 7000.0),
]


@pytest.fixture
def document():
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "command": "python -m scripts.gpu", "commit": {"hash": head.stdout.strip() or None, "dirty": False},
        "machine": {"gpu": "NVIDIA H200"}, "versions": {"triton": "3.6.0"}, "quick": True,
        "stages": [result._asdict() for result in CHECKS], "rows": ROWS,
    }  # fmt: skip


def test_the_page_of_a_run_says_what_is_right_before_how_fast(document):
    told = gpu.page(document).markdown()
    assert told.startswith(
        "# Fathom on a GPU\n\n**1 of 3 checks passed on one NVIDIA H200; NOT: probes (FAILED); not run: memcheck.**"
    )
    assert gpu.QUICK in told
    assert "| record and compare | `python -m scripts.compare` | passed: AGREES: 102 sites agree | 12 |" in told
    assert "| linear | wq_b | 18.6 | 12 | 7.75 | 1.55 | 2.4 |" in told
    assert "| linear | wo_b | differs |" in told
    assert "| whole model | 1 token | 15474 |  | 7000 |  | 2.21 |" in told
    heads = ["Right or not", "Kernels", "Whole layers, tokens and calls of a prompt", "Kernels that are newer"]
    places = [told.index(f"## {head}") for head in [*heads, *(table.title for table in gpu._by_hand())]]
    assert places == sorted(places)


def test_without_a_run_the_page_is_of_earlier_ones():
    told = gpu.page(None).markdown()
    assert told.startswith(f"# Fathom on a GPU\n\n**{gpu.NOTHING}.**")
    tables = gpu._by_hand()
    assert all(f"## {table.title}\n" in told for table in tables)
    broke = [table for table in tables if "what broke" in table.columns]
    assert len(broke) == 2
    for table in broke:
        named = re.findall(r"`(tests/[\w/]+\.py)`", json.dumps(table.rows))
        assert len(named) >= 7
        assert all((ROOT / name).is_file() for name in named)
    first = [table for table in tables if table.title.startswith("The first run")]
    assert first
    assert all(f"at commit {gpu._first_commit()}" in table.note for table in first)


def test_the_page_has_the_figures_that_are_recorded():
    """`python -m scripts.gpu --page` writes it anew."""
    written = (ROOT / "audits" / "gpu.md").read_text(encoding="utf-8")
    for figures in json.loads(sass.RECORDED.read_text(encoding="utf-8"))["3.6.0"].values():
        for cells in sass.rows(figures):
            assert f"| {' | '.join(cells)} |" in written


def test_kernels_that_are_newer_are_those_that_git_sees_change(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("no git here")

    def git(*words):
        mine = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(["git", *mine, *words], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    for name in ("a", "b"):
        (tmp_path / "kernels" / name).mkdir(parents=True)
        (tmp_path / "kernels" / name / "triton.py").write_text("@triton.jit\ndef _a(): ...\n")
    (tmp_path / "kernels" / "a" / "cpu.py").write_text("x = 1\n")
    (tmp_path / "kernels" / "a" / "launch.py").write_text("import triton\n")
    git("init", "--quiet")
    git("add", "."), git("commit", "--quiet", "-m", "measured")
    measured = git("rev-parse", "HEAD").strip()
    (tmp_path / "kernels" / "a" / "cpu.py").write_text("x = 2\n")
    assert "None of the 3 files" in gpu.newer(measured, tmp_path).text
    (tmp_path / "kernels" / "b" / "triton.py").write_text("@triton.jit\ndef _b(): ...\n\n\n")
    git("commit", "--quiet", "-a", "-m", "later")
    (tmp_path / "kernels" / "b" / "new.py").write_text("@triton.jit\ndef _c(): ...\n")
    git("add", ".")
    table = gpu.newer(measured, tmp_path)
    assert table.rows == [["`kernels/b/new.py`", "0", "2", "0"], ["`kernels/b/triton.py`", "1", "3", "1"]]
    assert table.note.startswith(f"2 of 4 files of kernels are newer than what was measured, at commit {measured[:12]}")
    for unknown in (None, "f" * 40):
        assert "git cannot tell" in gpu.newer(unknown, tmp_path).text


def test_a_run_ends_with_1_where_a_check_failed_and_keeps_what_it_found(tmp_path, monkeypatch):
    def stages(folder, *, quick):
        assert quick
        text = f"import json; json.dump({{'rows': {ROWS!r}, 'complete': False}}, open({str(folder / 'a.json')!r}, 'w'))"
        return [
            stage("checks", f"print('{outcome}')"),
            stage("bench", f"{text}; import time; time.sleep(60)", limit=2.0, rows=folder / "a.json"),
            stage("never", "1", rows=folder / "b.json", needs=("$no-such-program",)),
        ][: 1 if outcome == "1 passed" else 3]

    monkeypatch.setattr(gpu, "stages", stages)
    monkeypatch.setattr(gpu, "machine", lambda: {"gpu": "NVIDIA H200"})
    given = argparse.Namespace(page=False, quick=True, out=tmp_path / "out", logs=tmp_path / "logs.zip")
    outcome = "1 passed"
    assert gpu.run(given) == 0
    outcome = "broken"
    assert gpu.run(given) == 1
    kept = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert [each["status"] for each in kept["stages"]] == [FAILED, LATE, ABSENT]
    assert kept["rows"] == ROWS  # of a bench that did not come to its end
    assert zipped(tmp_path / "logs.zip") >= {"checks.0.out", "bench.0.err"}
    written = (tmp_path / "out" / "gpu.md").read_text()
    given = argparse.Namespace(page=True, quick=False, out=tmp_path / "out", logs=None)
    assert gpu.run(given) == 0
    assert (tmp_path / "out" / "gpu.md").read_text() == written


def zipped(path: Path) -> set[str]:
    import zipfile  # noqa: PLC0415

    return set(zipfile.ZipFile(io.BytesIO(path.read_bytes())).namelist())
