"""Runs on the console: tables for a terminal, short lines for a pipe, and a bar while probes run."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from probes.finding import Finding, Verdict
from probes.probe import Probe, Progress, Run
from probes.wording import bound, evidence, headline, measured, rows, verdict, where, worst_first

COLOURS = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.VACUOUS: "bold yellow", Verdict.MEASURED: "dim"}


@contextmanager
def watched(console: Console, probe: Probe, at: int, total: int) -> Iterator[Progress]:
    """Yield what a probe reports its progress to; on a terminal a bar shows it, and is gone afterwards.

    Parameters
    ----------
    console
        Where the bar is drawn.
    probe, at, total
        The probe that runs, the `at`-th of `total`, counted from 1.

    """
    columns = (
        TextColumn(f"{at}/{total} {probe.name}", style="bold", markup=False),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda share, what: bar.update(task, completed=share, description=what)


def findings(run: Run) -> RenderableType:
    """A run for a terminal: its findings, worst first, what is known about failures, and the summary."""
    title = Text.assemble((run.probe.name, "bold"), f": {run.probe.question}")
    table = Table("layer", "what")
    for column in ("measured", "bound"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for row in rows(run.report.findings, shared=True):
        table.add_row(*map(Text, row[:-1]), _verdict(row.verdict))
    failures = [Text(line) for finding in _failures(run) for line in _told(finding)]
    head = Text.assemble((f"{headline(run)}. ", COLOURS[verdict(run.report)]), run.report.summary)
    return Group(title, table, *failures, head, "")


def lines(run: Run) -> list[str]:
    """A run for a pipe: one line, and those of findings that failed."""
    summary = " ".join(run.report.summary.split())
    out = [f"{verdict(run.report).value:8} {run.probe.name:14} {run.seconds:7.1f} s  {summary}"]
    return out + [f"    {line}" for finding in _failures(run) for line in _told(finding)]


def closing(runs: Sequence[Run]) -> Table:
    """All probes that ran, a line each."""
    table = Table("probe", "verdict", expand=True)
    table.add_column("seconds", justify="right")
    table.add_column("summary", no_wrap=True, overflow="ellipsis", ratio=1)  # what the others leave
    for run in runs:
        summary = Text(" ".join(run.report.summary.split()))
        table.add_row(Text(run.probe.name), _verdict(verdict(run.report)), f"{run.seconds:.1f}", summary)
    return table


def total(runs: Sequence[Run]) -> str:
    """How it came out, in one line."""
    failed = [f"{run.probe.name} ({verdict(run.report)})" for run in runs if run.report.failed]
    seconds = sum(run.seconds for run in runs)
    passed = f"{len(runs) - len(failed)} of {len(runs)} probes passed in {seconds:.1f} s"
    return f"{passed}; not: {', '.join(failed)}" if failed else passed


def listing(title: str, entries: Mapping[str, str]) -> Table:
    """Names and what each is, for a terminal."""
    table = Table("name", "what", title=title, title_justify="left")
    for name, what in entries.items():
        table.add_row(Text(name, style="bold"), Text(what))
    return table


def _failures(run: Run) -> list[Finding]:
    return [finding for finding in worst_first(run.report.findings) if finding.failed]


def _told(finding: Finding) -> Iterator[str]:
    """A failure in a line, and its evidence in the next."""
    wanted = f", want {bound(finding)}" if finding.bound is not None else ""
    value = f": {measured(finding)}{wanted}" if finding.measured is not None else ""
    yield f"{finding.verdict.value}: {where(finding)}{finding.what}{value}"
    if finding.evidence:
        yield "    " + "; ".join(f"{name}: {told}" for name, told in evidence(finding))


def _verdict(value: Verdict) -> Text:
    return Text(value.value, style=COLOURS[value])
