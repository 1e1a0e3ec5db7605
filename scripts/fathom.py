"""`fathom COMMAND ...`: the same as `python -m scripts.COMMAND ...`, from any folder.

Commands:
{commands}

`fathom COMMAND --help` says what each takes.
"""

import runpy
import sys
import textwrap
from collections.abc import Sequence
from difflib import get_close_matches

from fathom.scripts.paths import ROOT

INNER = ("cli", "console", "fathom", "flags", "hub", "launch", "paths", "prompts")  # modules beside the commands


def commands() -> list[str]:
    """Names of all commands, as they are typed."""
    files = (ROOT / "scripts").glob("*.py")
    packages = (path.parent for path in (ROOT / "scripts").glob("*/__main__.py"))
    names = {path.stem for path in (*files, *packages)} - {"__init__", *INNER}
    return sorted(name.replace("_", "-") for name in names)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    name, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    known, name = commands(), name.replace("_", "-")  # as the file is called, or as the command is
    if name in ("-h", "--help"):
        listed = textwrap.fill(", ".join(known), 78)
        print(str(__doc__).format(commands=listed).rstrip())
        return 0
    if name not in known:
        close = get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
        print(f"fathom: no command {name!r}; {hint}", file=sys.stderr)
        return 2
    sys.argv = [f"fathom {name}", *rest]
    runpy.run_module(f"fathom.scripts.{name.replace('-', '_')}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
