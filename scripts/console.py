"""The console: tables and lines in which nothing that comes from a file or a flag is taken for markup."""

import contextlib
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import rich.console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fathom.model.errors import one_line
from fathom.probes import finding

WIDE = 1 << 16  # columns of what is no terminal: nothing is wrapped or cut
QUIET: Final = 20  # seconds between lines of progress where there is no terminal to draw on


class Console(rich.console.Console):
    """Rich's console without markup, emoji codes and highlights; whoever closes its pipe ends the command."""

    def __init__(self, *, stderr: bool = False, record: bool = False) -> None:
        stream = sys.stderr if stderr else sys.stdout
        width = None if stream.isatty() else WIDE
        height = None if width is None else 25  # without it Rich takes 80 columns for what FORCE_COLOR calls a terminal
        super().__init__(
            stderr=stderr, markup=False, emoji=False, highlight=False, width=width, height=height, record=record
        )

    def say(self, *lines: str) -> None:
        """Print lines, each as one that a terminal can show: `model.errors.one_line`."""
        for line in lines:
            self.print(one_line(line), soft_wrap=True)

    def on_broken_pipe(self) -> None:
        """Let the command end as every command does whose output nobody reads, see `scripts.cli`."""
        raise BrokenPipeError

    @contextlib.contextmanager
    def loading(self, path: Path) -> Iterator[None]:
        """Say what is loaded while it is."""
        with self.status(Text(f"loading {path}"), spinner="line"):
            yield


def visible(text: str) -> str:
    """Text for a terminal: control characters escaped, but for ends of lines and tabs."""
    return "".join(c if c in "\n\t" or unicodedata.category(c) != "Cc" else ascii(c)[1:-1] for c in text)


def summary(rows: dict[str, str]) -> Table:
    """Two columns, a word and what there is to say of it; long values are continued below, nothing is cut."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for word, told in rows.items():
        table.add_row(word, told)
    return table


def grid(table: finding.Table) -> Table:
    """A page's table for the console: words to the left, numbers to the right."""
    shown = Table(box=None, pad_edge=False)
    for at, column in enumerate(table.columns):
        shown.add_column(column, justify="right" if at else "left")
    for row in table.rows:
        shown.add_row(
            *("" if cell is None else finding.number(cell) if isinstance(cell, float) else str(cell) for cell in row)
        )
    return shown


@contextlib.contextmanager
def progress(console: Console, total: int, unit: str = "tokens") -> Iterator[Callable[[int], None]]:
    """Yield what is called with how many are done: a bar on a terminal, a line now and then elsewhere."""
    done, last = 0, time.perf_counter()
    columns = (TextColumn(f"{{task.completed}} of {{task.total}} {unit}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)

        def advance(count: int) -> None:
            nonlocal done, last
            done += count
            bar.advance(task, count)
            if not console.is_terminal and time.perf_counter() - last > QUIET:
                last = time.perf_counter()
                console.say(f"{done} of {total} {unit}")

        yield advance
