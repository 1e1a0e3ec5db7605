"""What the pages say in words: no number that nothing keeps fresh, and in their list what stands in them."""

import argparse
import importlib
import importlib.util
import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from statistics import median

import pytest

from fathom.probes.catalogue import EXPERIMENTS, FULL
from fathom.runtime import report
from fathom.scripts.bench.turns import ratios

ROOT = Path(__file__).resolve().parents[1]
AUDITS = ROOT / "audits"
NAMES = re.compile(r"`[^`]*`|\b[A-Za-z]\w*\d\w*")  # FP4, bf16, E4M3, V4
FOOT = re.compile(r"\n## How this page was made\n\n```yaml\n(.*)\n```\n$", re.DOTALL)
ROW = re.compile(r"^\| \[(\S+?\.md)\]\((\S+?)\) \| .+ \| (.+) \|$", re.MULTILINE)
LISTED = ROW.findall((AUDITS / "README.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("probe", [*FULL, *EXPERIMENTS], ids=lambda probe: probe.name)
def test_what_was_noticed_is_told_in_words_and_stands_in_the_page(probe):
    """Numbers are those of findings and tables: nothing would change one that is typed into a text."""
    assert not re.search(r"\d", NAMES.sub("", probe.noticed))
    page = (AUDITS / f"{probe.name}.md").read_text(encoding="utf-8")
    assert not probe.noticed or f"## What surprised us\n\n{probe.noticed.strip()}\n\n" in page


def test_the_list_has_every_page_and_quotes_what_was_found():
    assert sorted(name for name, _, _ in LISTED) == sorted({path.name for path in AUDITS.glob("*.md")} - {"README.md"})
    for name, target, found in LISTED:
        assert name == target
        page = " ".join((AUDITS / name).read_text(encoding="utf-8").replace("**", "").split())
        assert found in page, f"{name} does not say: {found}"


def test_the_page_of_the_runtime_has_the_ratios_of_the_bench():
    """In the order of the cases: a token, its head, and calls, by Fathom and before, on one thread and on two."""
    rows = json.loads((AUDITS / "performance.json").read_text())["rows"]
    before = next(side for row in rows for side in row["sides"] if side.startswith("before"))
    readme = (ROOT / "runtime" / "README.md").read_text()
    told = re.findall(r"^\| (?:a|its) [^|]+, over [^|]+ \| (.+) \|$", readme, re.MULTILINE)
    measures = [("after 256 tokens", "token, ms"), ("after 256 tokens", "head, ms")]
    measures += [(f"a call of {n}", "call, s") for n in (64, 512, 4096)]
    for cells, (case, measure) in zip(told, measures, strict=True):
        cases = [row for row in rows if row["case"] == case and "layers" in row["table"]]
        of_threads = [next(row for row in cases if f", {n} thread" in row["table"]) for n in (1, 2)]
        found = [median(ratios(row, side, measure)) for side in ("Fathom", before) for row in of_threads]
        assert cells.split(" | ") == [f"{ratio:.2g}" for ratio in found]
    demo = next(row for row in rows if row["table"].startswith("The demo"))
    beside = next(row for row in rows if row["table"].startswith("Beside transformers"))
    longer = [median(ratios(demo, before, "token, ms")), median(ratios(beside, "transformers", "decode, ms/token"))]
    assert re.findall(r"(?:took|takes) ([\d.]+) times as\s+long", readme) == [f"{ratio:.2g}" for ratio in longer]


def test_every_page_says_the_commit_that_it_was_made_at():
    for path in AUDITS.glob("*.md"):
        if path.name != "README.md":
            facts = FOOT.search(path.read_text(encoding="utf-8"))
            assert facts is not None, path.name
            said = re.findall(r'^(?:commit|numbers committed in): "[0-9a-f]{12,40}"$', facts[1], re.MULTILINE)
            assert len(said) == 1, path.name


def test_every_page_names_a_command_that_is_there():
    """What it was `measured by`, where that has another name now, is beside it."""
    names = {probe.name for probe in (*FULL, *EXPERIMENTS)}
    for path in AUDITS.glob("*.md"):
        facts = FOOT.search(path.read_text(encoding="utf-8"))
        for name, rest in re.findall(
            r'^command: "python -m (scripts\.\w+)(.*)"$', facts[1] if facts else "", re.MULTILINE
        ):
            assert importlib.util.find_spec(name) is not None, f"{path.name}: {name}"
            assert name != "scripts.probe" or names & set(rest.split()) or "all" in rest.split(), f"{path.name}: {rest}"


PAGES = sorted(
    path for path in ROOT.glob("**/*.md") if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)
LINK = re.compile(r"\]\(<?(?!\w+:)([^)#>\s]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_page_leads_to_a_file(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert [link for link in LINK.findall(text) if not (page.parent / link).exists()] == []


COMMAND = re.compile(r"(?:-m scripts\.|\bfathom )(?P<name>[a-z][a-z_-]*)(?P<rest>[^\n`#]*)")


@cache
def flags_of(name: str) -> set[str]:
    """Flags that a command takes, those of its subcommands included."""
    module = "bench.command" if name == "bench" else name.replace("-", "_")
    parsers = [importlib.import_module(f"fathom.scripts.{module}").parser()]
    for action in parsers[0]._actions:
        if isinstance(action, argparse._SubParsersAction):
            parsers += action.choices.values()
    return {flag for parser in parsers for flag in parser._option_string_actions}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_of_a_page_is_there_and_has_its_flags(page):
    """How an audit was made is left out: `test_every_page_names_a_command_that_is_there` has that."""
    text = FOOT.sub("", page.read_text(encoding="utf-8"))
    for found in COMMAND.finditer(text):
        given = set(re.findall(r"(?<=\s)--[a-z][a-z0-9-]*", re.sub('"[^"]*"', "", found["rest"])))
        assert given <= flags_of(found["name"]), found[0]


def test_a_link_is_found_however_it_is_written():
    text = "[`a`](a.md), ![b](<b.svg>), [c](../c.md#part), [d](https://d.org/e.md), [top](#top)"
    assert LINK.findall(text) == ["a.md", "b.svg", "../c.md"]


def test_no_two_pages_have_one_title():
    titles = [
        next(line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# "))
        for path in AUDITS.glob("*.md")
    ]
    assert len(set(titles)) == len(titles)


def test_the_commit_is_that_of_the_code(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "ROOT", tmp_path)
    told = report.commit.__wrapped__
    assert str(told()) == "unknown (no git)"

    def git(*words):
        subprocess.run([shutil.which("git"), *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "--quiet")
    assert str(told()) == "unknown (no git)", "no commit yet"
    (tmp_path / "audits").mkdir()
    for name in ("code.py", "audits/page.md"):
        (tmp_path / name).write_text("as it was")
    git("add", ".")
    git("-c", "user.name=n", "-c", "user.email=e@x", "commit", "--quiet", "-m", "first")
    clean = str(told())
    assert re.fullmatch("[0-9a-f]{12}", clean)
    (tmp_path / "audits" / "page.md").write_text("made again")
    (tmp_path / "findings").write_text("a page of somebody's")
    assert str(told()) == clean
    (tmp_path / "code.py").write_text("changed")
    assert str(told()) == f"{clean} with local changes"
    monkeypatch.setattr(report.shutil, "which", lambda _: None)
    assert str(told()) == "unknown (no git)"
