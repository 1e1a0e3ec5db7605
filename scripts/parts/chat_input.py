"""What the user of `scripts.chat` types: messages and commands, line by line, on the rank that has the input."""

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from fathom.model.errors import ConfigError, StateError
from fathom.model.files import read_text, regular_file_size
from fathom.runtime.errors import PromptError
from fathom.scripts.console import Console
from fathom.scripts.paths import MAX_TEXT_BYTES, check_output

if TYPE_CHECKING:
    from fathom.runtime.group.watchdog import Watch

SAY, READ, SAVE, LOAD, RESET, HELP, QUIT = "say", "read", "save", "load", "reset", "help", "quit"
OF_FILES: Final = (READ, SAVE, LOAD)
KNOWN: Final = (*OF_FILES, RESET, HELP, QUIT)
COMMANDS: Final = {
    f"/{READ} FILE": "send the text of a file as a message",
    f"/{SAVE} FILE": "write conversation and caches to a file",
    f"/{LOAD} FILE": "go on with a conversation from such a file, in place of this one",
    f"/{RESET}": "forget the conversation",
    f"/{QUIT}": "end the chat, as the end of the input does",
    f"/{HELP}": "say this",
    "//...": "a message that begins with /",
}


class Entry(NamedTuple):
    """What the user wants."""

    kind: str  # SAY, or a command
    text: str = ""  # the message, or the command's file


class User:
    """Whoever types, at a terminal or into a pipe."""

    def __init__(self, args: argparse.Namespace, console: Console, watch: "Watch | None") -> None:
        self.args, self.console, self.watch = args, console, watch
        self.interrupts = 0  # since the last line: the second one, at the prompt, ends the chat

    def entries(self) -> Iterator[Entry]:
        """Yield what the user wants until they want no more: the first rank reads, and tells the others."""
        from fathom.runtime.group.processes import leads

        number = 0
        while True:
            if leads(self.watch):
                entry = self._next()
                if self.watch is not None:
                    self.watch.tell(f"entry {number}", json.dumps(entry))
            else:
                assert self.watch is not None, "of one process"
                entry = Entry(*json.loads(self.watch.hear(f"entry {number}")))
            if entry.kind == QUIT:
                return
            yield entry
            number += 1

    def _next(self) -> Entry:
        """Read lines until one can be carried out; a line for each that cannot."""
        while True:
            try:
                line = _line()
                self.interrupts = 0
                entry = Entry(QUIT) if line is None else entered(line)
                if entry is not None and (entry := self._ready(entry)) is not None:
                    return entry
            except KeyboardInterrupt:
                self.interrupts += 1
                if self.watch is not None or self.interrupts > 1:
                    raise
                self.console.say("", "Ctrl-C once more ends the chat")
            except UnicodeDecodeError as error:
                self.console.say(f"byte {error.start} of the line is no UTF-8")
            except (ConfigError, StateError, PromptError) as error:
                self.console.say(str(error))

    def _ready(self, entry: Entry) -> Entry | None:
        """Look at the file of a command; what the others must not wait for is done here, and nothing is left of it."""
        path = Path(entry.text)
        match entry.kind:
            case "help":
                self.console.say(*(f"{command:11} {what}" for command, what in COMMANDS.items()))
                return None
            case "read":
                return Entry(SAY, read_text(path, MAX_TEXT_BYTES, PromptError))
            case "save":
                check_output(self.args, f"/{SAVE}", path)
            case "load":
                regular_file_size(path, StateError)
        return entry


def entered(line: str) -> Entry | None:
    """Return what a line says, None for nothing at all; PromptError for a command that there is not."""
    if not line.startswith("/") or line.startswith("//"):
        text = line.removeprefix("/")
        return Entry(SAY, text) if text.strip() else None
    word, _, name = line[1:].partition(" ")
    name = name.strip()
    if word not in KNOWN:
        close = get_close_matches(word, KNOWN, n=1)
        hint = f"did you mean /{close[0]}?" if close else f"/{HELP} lists them;"
        raise PromptError(f"no command /{word}: {hint} a message that begins with / is typed with //")
    if (word in OF_FILES) != bool(name):
        raise PromptError(f"/{word}: {'which file?' if word in OF_FILES else 'takes nothing after it'}")
    return Entry(word, name)


def _line() -> str | None:
    """Return the next line of the input without its end; None where there is none.

    UnicodeDecodeError for one that is no UTF-8.
    """
    if sys.stdin.isatty() and sys.stdout.isatty():
        with contextlib.suppress(ImportError):  # a line can be edited where there is a readline
            import readline  # noqa: F401
        try:
            return input("> ")
        except EOFError:
            print()
            return None
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    data = sys.stdin.buffer.readline()
    return data.decode().rstrip("\r\n") if data else None
