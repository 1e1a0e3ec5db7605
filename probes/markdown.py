"""A run as a page: Markdown that reads on its own, its plots as SVG beside it, and the same as JSON.

The bytes depend on the run alone: two runs of the same command on the same machine differ in seconds and in what was
measured. No page names a path of the machine.
"""

import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

from model.checkpoint.checkpoint import Checkpoint
from model.checkpoint.weights import fingerprint
from probes import svg
from probes.finding import FAILURES, JSON, Finding, HeatMap, Part, Plot, Table, Text, number
from probes.probe import Run
from probes.subject import Subject
from probes.wording import Row, bound, evidence, finite, headline, measured, rows, verdict, where, worst_first
from runtime.options import DEMO, RunOptions

LONGEST_SLUG = 60  # characters of a title in the name of a picture
MOST_EXPLAINED = 12  # failures whose evidence the page spells out; the JSON has all of them


@dataclass(frozen=True, slots=True)
class Page:
    """A page and the files beside it, by name."""

    name: str
    markdown: str
    data: dict[str, JSON]
    pictures: dict[str, str]  # SVG by file name

    def files(self) -> dict[str, str]:
        """Every file of the page; the Markdown last, because it refers to the others."""
        data = json.dumps(self.data, indent=1, allow_nan=False) + "\n"
        return {**self.pictures, f"{self.name}.json": data, f"{self.name}.md": self.markdown}


def page(run: Run, subject: Subject, command: str) -> Page:
    """Return the page of a run.

    Parameters
    ----------
    run, subject
        What was found, and on what.
    command
        The command line that makes this page again.

    """
    facts = front_matter(run, subject, command)
    names = _picture_names(run)
    pictures = {
        name: f"{_mark(run.probe.name)}{svg.heat_map(part) if isinstance(part, HeatMap) else svg.plot(part)}"
        for part, name in zip(run.report.parts, names, strict=True)
        if isinstance(part, Plot | HeatMap)
    }
    sections = [
        "\n".join(["---", *(f"{key}: {json.dumps(value)}" for key, value in facts.items()), "---"]),
        f"# {run.probe.question}",
        f"**{headline(run)}.** {run.report.summary}",
        *_injected(subject),
        *_section("Background", run.probe.background),
        *_findings(run.report.findings),
        *(section for part, name in zip(run.report.parts, names, strict=True) for section in _part(part, name)),
        *(_section("What surprised us", run.probe.noticed) if _as_noticed(subject, command) else []),
        *_section("What this does not claim", run.report.not_claimed),
        *_section("What it watches", _watched(run)),
        *_section("How to run it again", f"```\n{command}\n```"),
    ]
    return Page(run.probe.name, "\n\n".join(sections) + "\n", to_json(run, subject, command), pictures)


def front_matter(run: Run, subject: Subject, command: str) -> dict[str, JSON]:
    """What was run, in the order in which the page begins with it."""
    loaded = subject.load()
    fault = {} if subject.fault is None else {"fault": subject.fault.name}
    return {
        "probe": run.probe.name,
        "verdict": verdict(run.report).value,
        "checkpoint": subject.directory.resolve().name,
        "config": loaded.model.config.fingerprint,
        "weights": loaded.weights_fingerprint,
        "ops": subject.ops.name,
        **subject.options.to_json(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": run.commit,
        "seed": subject.seed,
        "prompt": subject.reads,
        **fault,
        "command": command,
        "seconds": round(run.seconds, 1),
    }


def to_json(run: Run, subject: Subject, command: str) -> dict[str, JSON]:
    """The same run for programs: what was run, the summary, findings, and the data behind tables and plots."""
    return {
        **front_matter(run, subject, command),
        "question": run.probe.question,
        "summary": run.report.summary,
        "findings": [finite(finding.to_json(run.probe.name)) for finding in run.report.findings],
        "parts": [finite({"kind": type(part).__name__, **asdict(part)}) for part in run.report.parts],
    }


def write(page: Page, folder: Path) -> None:
    """Write a page's files into `folder`, and remove pictures of an earlier run that it does not have.

    Files are written beside their places and then renamed into them: an error leaves whole files of one run.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{page.name}-") as beside:
        for name, text in page.files().items():
            (Path(beside) / name).write_bytes(text.encode(errors="backslashreplace"))
        for name in page.files():
            (Path(beside) / name).replace(folder / name)
    mark = _mark(page.name).encode()
    for path in folder.glob(f"{page.name}-*.svg"):
        ours = path.read_bytes().startswith(mark)  # another page's name may begin like this one's
        if ours and path.name not in page.pictures:
            path.unlink()


def _mark(name: str) -> str:
    """First line of a page's pictures."""
    return f"<!-- a picture of {name}.md -->\n"


def _picture_names(run: Run) -> list[str]:
    """A file name for each part, from its title; empty where it is no picture."""
    names, used = [], Counter[str]()
    for part in run.report.parts:
        if not isinstance(part, Plot | HeatMap):
            names.append("")
            continue
        slug = re.sub("[^a-z0-9]+", "-", part.title.lower())[:LONGEST_SLUG].strip("-")
        used[slug] += 1
        again = "" if used[slug] == 1 else f".{used[slug]}"  # no slug has a dot
        names.append(f"{run.probe.name}-{slug}{again}.svg")
    return names


def _injected(subject: Subject) -> list[str]:
    if subject.fault is None:
        return []
    told = f"> **A fault was injected on purpose, `{subject.fault.name}`**: {_sentence(subject.fault.what)}"
    return [f"{told} What follows is about a runtime with that fault, and fails where this probe can see it."]


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."


def _section(title: str, text: str) -> list[str]:
    return [f"## {title}", text.strip()] if text.strip() else []


def _findings(findings: Sequence[Finding]) -> list[str]:
    few, each = rows(findings, shared=True), rows(findings, shared=False)
    out = ["## Findings", _findings_table(few)]
    failures = [finding for finding in worst_first(findings) if finding.failed]
    if failures:
        out += ["### What failed", "\n".join(_explained(failures[:MOST_EXPLAINED]))]
    if (more := len(failures) - MOST_EXPLAINED) > 0:
        out.append(f"And {more} more, in the JSON beside this page.")
    if len(each) > len(few):
        out.append(f"<details><summary>Each of the {len(each)} findings in a row of its own</summary>")
        out += [_findings_table(each), "</details>"]
    return out


def _findings_table(lines: Sequence[Row]) -> str:
    layered = any(row.layer for row in lines)
    heads = ["layer"] * layered + ["what", "measured", "bound", "verdict"]
    cells = []
    for row in lines:
        joined = row.bound.replace(" ", "\u00a0", 1)  # no line ends between <= and its number
        stressed = f"**{row.verdict}**" if _bad(row) else row.verdict
        cells.append([*[row.layer] * layered, row.what, row.measured, joined, stressed])
    return _table(heads, cells, [":--"] * (layered + 1) + ["--:", "--:", ":--"])


def _bad(row: Row) -> bool:
    return row.verdict in FAILURES


def _explained(failures: Sequence[Finding]) -> Iterator[str]:
    for finding in failures:
        told = "" if finding.measured is None else f": {measured(finding)}"
        wanted = f", want {bound(finding)}" if finding.bound is not None else ""
        yield f"- **{_cell(where(finding) + finding.what)}**{_cell(told + wanted)}"
        for name, value in evidence(finding):
            yield f"  - {_cell(name)}: {_cell(value)}"


def _part(part: Part, picture: str) -> list[str]:
    out = [f"## {part.title}"]
    if isinstance(part, Text):
        return [*out, part.text.strip()]
    if isinstance(part, Table):
        marks = ["--:" if _numeric(column) else ":--" for column in zip(*part.rows, strict=True)]
        out.append(_table(part.columns, part.rows, marks or [":--"] * len(part.columns)))
    else:
        out.append(f"![{_cell(part.title)}]({picture})")
    return [*out, part.note] if part.note else out


def _numeric(column: Sequence[float | str | None]) -> bool:
    return not any(isinstance(cell, str) for cell in column)


def _table(heads: Sequence[str], lines: Sequence[Sequence[float | str | None]], marks: Sequence[str]) -> str:
    out = [heads, list(marks), *lines]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in out)


def _cell(cell: float | str | None) -> str:
    """Text that stays in its cell, and in its line."""
    if cell is None:
        return ""
    text = re.sub("[ \t\r\n]+", " ", cell if isinstance(cell, str) else number(cell)).strip()
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text).replace("|", "\\|")


def _watched(run: Run) -> str:
    sites = [f"- `{site.name}` [{', '.join(site.shape.split())}]: {site.what}" for site in run.probe.reads]
    return "\n".join(["Sites of the model, see `model/observe/sites.py`:\n", *sites]) if sites else ""


def _as_noticed(subject: Subject, command: str) -> bool:
    """Whether this is the model that `noticed` speaks of, run as it was then: the shipped demo, healthy, by default."""
    healthy = subject.fault is None and subject.options == RunOptions() and subject.prompt is None
    healthy = healthy and subject.seed == 0 and "--quick" not in command.split()
    return healthy and subject.load().weights_fingerprint == _demo_weights()


@cache
def _demo_weights() -> str:
    return fingerprint(Checkpoint.open(DEMO))
