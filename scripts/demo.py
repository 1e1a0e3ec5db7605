"""`python -m scripts.demo`: what the demo checkpoint can do: a fact, a needle, a count. Needs no other file."""

import argparse
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path

from fathom.scripts.cli import arguments, run_alone

WIDTH = 74
QUESTION = "What is the capital of France?"
DOCUMENTS = (  # kind, tokens, what is asked
    (
        "needle",
        8000,
        "A needle: one sentence in a document of 8,000 tokens, drawn afresh; CSA layers must select it.",
    ),
    (
        "common",
        2000,
        "A count: the most common word of a whole document, which no small selection holds; HCA layers see it all.",
    ),
)
MORE = """\
What each part is needed for: audits/demo-checkpoint.md.
What is in the file: python -m scripts.inspect
To hold another runtime against this one: python -m scripts.compare, see README."""


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    return argparse.ArgumentParser(prog="python -m scripts.demo", description=__doc__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status, that of the first command that fails."""
    arguments(parser(), argv)
    try:
        _heading(f'A fact. $ python -m scripts.generate --prompt "{QUESTION}"')
        _run("generate", "--prompt", QUESTION)
        with tempfile.TemporaryDirectory() as folder:
            for kind, tokens, told in DOCUMENTS:
                _heading(told)
                _document(Path(folder) / f"{kind}.txt", kind, tokens)
    except subprocess.CalledProcessError as failed:
        return failed.returncode
    _heading('Your turn: python -m scripts.generate --prompt "What is the currency of Japan?"')
    print(MORE)
    return 0


def _document(path: Path, kind: str, tokens: int) -> None:
    """Ask for what a fresh document says, and tell the right answer."""
    made = _run("demo_document", kind, "--tokens", str(tokens), "--seed", "1", kept=True)
    path.write_text(made.stdout)
    lines = textwrap.wrap(made.stdout, WIDTH)
    print(f"  {lines[0]}...\n  ... {lines[-1]}", flush=True)
    _run("generate", "--prompt-file", str(path))
    print(made.stderr, end="", flush=True)


def _heading(text: str) -> None:
    print("", *textwrap.wrap(text, WIDTH), sep="\n", flush=True)


def _run(command: str, *words: str, kept: bool = False) -> subprocess.CompletedProcess[str]:
    module = [sys.executable, "-m", f"fathom.scripts.{command}"]
    return subprocess.run([*module, *words], check=True, text=True, capture_output=kept)  # noqa: S603 -- our own commands


if __name__ == "__main__":
    sys.exit(run_alone(main))
