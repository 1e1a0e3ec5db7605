"""Runs on the console: a line for each of many, tables of a few on a terminal, and a bar while probes run.

What comes from files (names of tensors, paths) is shown as it is: no markup is read in it, and what cannot be printed
is escaped.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from fathom.model.errors import one_line
from fathom.probes.finding import Verdict, rows, worst_first

if TYPE_CHECKING:
    from fathom.probes.probe import Probe, Progress, Run

QUIET = 20  # seconds between lines of progress where there is no terminal to draw on
COLOURS = {
    Verdict.PASS: "green",
    Verdict.FAIL: "bold red",
    Verdict.VACUOUS: "bold yellow",
    Verdict.ERROR: "bold magenta",
    Verdict.MEASURED: "dim",
}


def plain(text: str, style: str = "") -> Text:
    """Text that a terminal shows letter by letter, see `model.errors.one_line`; nothing in it is markup or emoji."""
    return Text(one_line(text), style)


@contextmanager
def watched(console: Console, probe: "Probe", at: int, total: int) -> "Iterator[Progress]":
    """Yield what a probe reports its progress to: a bar on a terminal, gone afterwards; elsewhere a line now and then.

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
        task, said = bar.add_task("", total=1.0), time.perf_counter()

        def told(share: float, what: str) -> None:
            nonlocal said
            bar.update(task, completed=share, description=plain(what).plain)
            if not console.is_terminal and time.perf_counter() - said > QUIET:
                said = time.perf_counter()
                console.print(plain(f"{probe.name} {share:.0%}: {what}"), soft_wrap=True)

        yield told


def findings(run: "Run") -> RenderableType:
    """A run for a terminal: its findings, worst first, what is known about failures, and the summary."""
    title = Text.assemble((run.probe.name, "bold"), f": {run.probe.question}")
    table = Table("layer", "what")
    for column in ("measured", "bound"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for row in rows(run.report.findings):
        table.add_row(*map(plain, row[:-1]), _verdict(row.verdict))
    told = [plain(line) for failure in _failures(run) for line in failure]
    head = plain(f"{run.headline}. ", COLOURS[run.report.verdict]) + plain(_summary(run))
    return Group(title, table, *told, head, "")


def lines(run: "Run") -> list[Text]:
    """A run in one line, and what failed in lines of its own."""
    count = f"{len(run.report.findings)} finding{'' if len(run.report.findings) == 1 else 's'}"
    head = f"{run.probe.name:14} {count:>12} {run.seconds:7.1f} s  {_summary(run)}"
    told = [plain(f"    {line}") for failure in _failures(run) for line in failure]
    return [plain(f"{run.report.verdict.value:8} ", COLOURS[run.report.verdict]) + plain(head), *told]


def failures(runs: "Sequence[Run]") -> list[Text]:
    """What failed in all runs, each in one line."""
    return [plain(f"{run.probe.name}: {failure[0]}") for run in runs for failure in _failures(run)]


def _summary(run: "Run") -> str:
    return " ".join(run.report.summary.split())


def closing(runs: "Sequence[Run]") -> Table:
    """All probes that ran, a row each."""
    table = Table("probe", "verdict", expand=True)
    table.add_column("seconds", justify="right")
    table.add_column("summary", ratio=1)  # what the others leave
    for run in runs:
        table.add_row(run.probe.name, _verdict(run.report.verdict), f"{run.seconds:.1f}", plain(_summary(run)))
    return table


def total(runs: "Sequence[Run]") -> str:
    """How it came out, in one line."""
    failed = [f"{run.probe.name} ({run.report.verdict})" for run in runs if run.report.failed]
    seconds = sum(run.seconds for run in runs)
    passed = f"{len(runs) - len(failed)} of {len(runs)} probes passed in {seconds:.1f} s"
    return f"{passed}; not: {', '.join(failed)}" if failed else passed


def listing(title: str, entries: Mapping[str, str]) -> Table:
    """Names and what each is, for a terminal."""
    table = Table("name", "what", title=title, title_justify="left")
    for name, what in entries.items():
        table.add_row(plain(name, "bold"), plain(what))
    return table


def _failures(run: "Run") -> Iterator[list[str]]:
    """Each failure in a line, and its evidence in the next."""
    failed = [finding for finding in worst_first(run.report.findings) if finding.failed]
    if run.report.failed and not failed:
        yield [run.headline]
    for finding in failed:
        wanted = f", want {finding.wanted}" if finding.wanted else ""
        value = f": {finding.shown}{wanted}" if finding.shown else ""
        known = "; ".join(f"{name}: {text}" for name, text in finding.known)
        yield [f"{finding.verdict.value}: {finding.place}{finding.what}{value}", *([f"    {known}"] if known else [])]


def _verdict(value: Verdict) -> Text:
    return Text(value.value, style=COLOURS[value])
