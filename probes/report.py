"""Pages: what was found, as Markdown that reads on its own, with its pictures and its data as JSON beside it.

A page says its verdict in the first sentence, then shows its parts, each table once, and ends with how it was made:
commit, command and what else decides its numbers, as YAML. The bytes depend on the page's data alone. `of_run` is the
page of a probe; commands that measure something else fill in a `Page` themselves.
"""

import json
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Final

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from fathom.model.checkpoint.checkpoint import Checkpoint
from fathom.model.checkpoint.weights import fingerprint
from fathom.model.config import ModelConfig
from fathom.model.observe.sites import OF_V41
from fathom.probes.finding import (
    FAILURES,
    JSON,
    Finding,
    Findings,
    Part,
    Picture,
    Table,
    Text,
    finite,
    number,
    rows,
    worst_first,
)
from fathom.probes.probe import Probe, Run
from fathom.probes.subject import Subject
from fathom.runtime.options import DEMO

LONGEST_SLUG: Final = 60  # characters of a title in the name of a picture
QUANTITY: Final = re.compile(r"([-+]?[\d.,]+(e[-+]?\d+)?( ?(%|[A-Za-z]{1,3}))?( \(.*\))?|)")
MOST_EXPLAINED: Final = 12  # failures whose evidence the page spells out; the JSON has all of them


@dataclass(frozen=True, slots=True)
class Page:
    """A page, as data."""

    name: str  # audits/<name>.md
    title: str
    verdict: str  # what came out, in a few words: the first sentence, without its full stop
    summary: str  # the sentences after it, with the numbers at which a hurried reader stops; Markdown
    parts: Sequence[Part]
    facts: Mapping[str, JSON]  # commit, command, checkpoint, ...: what decides the numbers
    data: Mapping[str, JSON] | None  # audits/<name>.json, see `probes.finding.finite`; None: the page has none

    def files(self) -> dict[str, str]:
        """Every file of the page by name; the Markdown last, because it refers to the others."""
        drawn = {name: _drawn(self.name, part) for name, part in self._pictures() if isinstance(part, Picture)}
        data = {} if self.data is None else {f"{self.name}.json": _json(self.data, indent=1) + "\n"}
        return {**drawn, **data, f"{self.name}.md": self.markdown()}

    def markdown(self) -> str:
        """The page itself."""
        parts = [(part, name) for name, part in self._pictures()]
        return _template().render(page=self, parts=parts, most=MOST_EXPLAINED)

    def _pictures(self) -> Iterator[tuple[str, Part]]:
        """Each part with the name of its file, from its title; empty where it is no picture."""
        used = Counter[str]()
        for part in self.parts:
            if isinstance(part, Picture):
                slug = re.sub("[^a-z0-9]+", "-", part.title.lower())[:LONGEST_SLUG].strip("-")
                used[slug] += 1
                again = "" if used[slug] == 1 else f".{used[slug]}"  # no slug has a dot
                yield f"{self.name}-{slug}{again}.svg", part
            else:
                yield "", part


def write(page: Page, folder: Path) -> None:
    """Write a page's files into `folder`, and remove pictures of an earlier run that it does not have.

    Files are written beside their places and then renamed into them: an error leaves whole files of one run.
    """
    files = page.files()
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{page.name}-") as beside:
        for name, text in files.items():
            (Path(beside) / name).write_bytes(text.encode(errors="backslashreplace"))
        for name in files:
            (Path(beside) / name).replace(folder / name)
    mark = _mark(page.name).encode()
    for path in folder.glob(f"{page.name}-*.svg"):
        ours = path.read_bytes().startswith(mark)  # another page's name may begin like this one's
        if ours and path.name not in files:
            path.unlink()


def of_run(run: Run, subject: Subject, command: str) -> Page:
    """Return the page of a run: the first picture, what was found, what explains it, and what it does not show.

    Parameters
    ----------
    run, subject
        What was found, and on what.
    command
        The command line that makes this page again.

    """
    probe, report = run.probe, run.report
    first = next((part for part in report.parts if isinstance(part, Picture)), None)
    parts = [
        *_injected(subject),
        *([first] if first is not None else []),
        *_section("Background", probe.background),
        Findings(report.findings),
        *(part for part in report.parts if part is not first),
        *(_section("What surprised us", probe.noticed) if _as_noticed(probe, subject, command) else []),
        *_section("What this does not claim", report.not_claimed),
        *_section("What it watches", _watched(run, subject)),
    ]
    facts = facts_of(run, subject, command)
    data = {
        **facts,
        "question": probe.question,
        "summary": report.summary,
        "findings": [finding.to_json(probe.name) for finding in report.findings],
        "parts": [finite({"kind": type(part).__name__, **asdict(part)}) for part in report.parts],
    }
    return Page(probe.name, probe.question, run.headline, report.summary, parts, facts, data)


def facts_of(run: Run, subject: Subject, command: str) -> dict[str, JSON]:
    """What was run, and how."""
    loaded = subject.load_any()
    fault = {} if subject.fault is None else {"fault": subject.fault.name}
    return {
        "probe": run.probe.name,
        "verdict": run.report.verdict.value,
        "commit": run.commit,
        "command": command,
        "checkpoint": subject.directory.resolve().name,
        "config": loaded.model.config.fingerprint,
        "weights": loaded.weights_fingerprint,
        "prompt": subject.reads,
        "seed": subject.seed,
        **fault,
        "ops": subject.ops.name,
        **subject.options.to_json(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "seconds": round(run.seconds, 1),
    }


def _injected(subject: Subject) -> list[Part]:
    if subject.fault is None:
        return []
    what = subject.fault.what if subject.fault.what.endswith(".") else f"{subject.fault.what}."
    told = f"> **A fault was injected on purpose, `{subject.fault.name}`**: {what} What follows is about a runtime with"
    return [Text("", f"{told} that fault, and fails where this probe can see it.")]


def _section(title: str, text: str) -> list[Part]:
    return [Text(title, text)] if text.strip() else []


def _watched(run: Run, subject: Subject) -> str:
    config = subject.load_any().model.config
    of_v41 = isinstance(config, ModelConfig) and config.v41 is not None
    reads = [site for site in run.probe.reads if of_v41 or site not in OF_V41]
    sites = [f"- `{site.name}` [{', '.join(site.shape.split())}]: {site.what}" for site in reads]
    return "\n".join(["Sites of the model, see `model/observe/sites.py`:\n", *sites]) if sites else ""


def _as_noticed(probe: Probe, subject: Subject, command: str) -> bool:
    """Whether this is the model that `noticed` speaks of, run as it was then: the shipped demo, healthy, by default."""
    healthy = subject.fault is None and subject.options == probe.options and subject.prompt is None
    healthy = healthy and subject.seed == 0 and "--quick" not in command.split()
    return healthy and subject.load_any().weights_fingerprint == _demo_weights()


@cache
def _demo_weights() -> str:
    return fingerprint(Checkpoint.open(DEMO))


@cache
def _template() -> Template:
    environment = Environment(  # noqa: S701 -- Markdown, see `_cell`
        loader=PackageLoader("fathom.probes"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"cell": _cell, "grid": _grid, "failures": _failures, "json": _json}
    environment.tests["prose"] = lambda part: isinstance(part, Text)
    return environment.get_template("page.md.j2")


def _drawn(name: str, part: Picture) -> str:
    from fathom.probes.pictures import picture  # noqa: PLC0415 -- it brings matplotlib

    return _mark(name) + picture(part)


def _mark(name: str) -> str:
    """First line of a page's pictures."""
    return f"<!-- a picture of {name}.md -->\n"


def _json(value: JSON, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, allow_nan=False)


def _cell(cell: float | str | None) -> str:
    """Text that stays in its cell, and in its line."""
    if cell is None:
        return ""
    text = re.sub("[ \t\r\n]+", " ", cell if isinstance(cell, str) else number(cell)).strip()
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text).replace("|", "\\|")


def _grid(part: Table | Findings) -> list[Sequence[float | str | None]]:
    """The lines of a table: its heads, the marks that align its columns, its rows."""
    if isinstance(part, Table):
        marks = [_alignment(column) for column in zip(*part.rows, strict=True)] or [":--"] * len(part.columns)
        return [part.columns, marks, *part.rows]
    lines = rows(part.findings)
    first = 0 if any(row.layer for row in lines) else 1
    table = [("layer", "what", "measured", "bound", "verdict"), (":--", ":--", "--:", "--:", ":--")]
    for row in lines:
        bound = row.bound.replace(" ", "\u00a0", 1)  # no line ends between <= and its number
        stressed = f"**{row.verdict}**" if row.verdict in FAILURES else row.verdict.value
        table.append((row.layer, row.what, row.measured, bound, stressed))
    return [line[first:] for line in table]


def _alignment(column: Sequence[float | str | None]) -> str:
    """To the right where all cells are numbers, also as text with a unit or a second one in brackets."""
    return ":--" if any(isinstance(cell, str) and not QUANTITY.fullmatch(cell) for cell in column) else "--:"


def _failures(part: Part) -> list[Finding]:
    return [finding for finding in worst_first(part.findings) if finding.failed] if isinstance(part, Findings) else []
