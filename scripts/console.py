"""The console: tables and lines in which nothing that comes from a file or a flag is taken for markup."""

import contextlib
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import rich.console
from rich.table import Table
from rich.text import Text

from model.errors import one_line

WIDE = 1 << 16  # columns of what is no terminal: nothing is wrapped or cut


class Console(rich.console.Console):
    """Rich's console without markup, emoji codes and highlights; whoever closes its pipe ends the command."""

    def __init__(self, *, stderr: bool = False) -> None:
        stream = sys.stderr if stderr else sys.stdout
        width = None if stream.isatty() else WIDE
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False, width=width)

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
