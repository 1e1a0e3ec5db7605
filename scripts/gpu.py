"""`python -m scripts.gpu`: everything that needs a GPU, on this machine's, with the packages that are installed.

Ops on the device, text by a graph against text without one, recordings under `compare`, the probes, the benches, a
whole V4-Flash of as many layers as fit, and memcheck: each in a process of its own with a time limit; one that fails
stops none of the others. It writes ``audits/gpu.md``. Exit status 1 when a check failed, or did not end in its time.

With --page nothing is run: the page is written anew from the last run that was kept, and the state of the files.
"""

import argparse
import re
import sys
import tomllib
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

PYPROJECT: Final = Path(__file__).resolve().parents[1] / "pyproject.toml"


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    from fathom.scripts.paths import AUDITS, Fills, Writes

    p = argparse.ArgumentParser(prog="python -m scripts.gpu", description=__doc__)
    p.add_argument("--quick", action="store_true", help="four minutes at most: fewer timings, side by side with checks")
    p.add_argument("--page", action="store_true", help="run nothing: write the page anew")
    p.add_argument("--out", action=Fills, default=AUDITS, help="folder for gpu.md and gpu.json (default audits)")
    p.add_argument("--logs", action=Writes, metavar="F.zip", help="an archive of what each stage printed")
    return p


def lacking(requirements: Sequence[str], version: Callable[[str], str] = metadata.version) -> list[str]:
    """Of requirements as pyproject.toml writes them those that are not installed, or too old."""
    found = []
    for requirement in requirements:
        wanted = re.fullmatch(r"([\w-]+)>=([\d.]+)(?:;.*)?", requirement)
        assert wanted is not None, f"{requirement} is not of the kind name>=version"
        try:
            there = version(wanted[1])
        except metadata.PackageNotFoundError:
            found.append(f"{wanted[1]}>={wanted[2]}")
            continue
        numbers = [list(map(int, re.match(r"[\d.]*\d", text)[0].split("."))) for text in (there, wanted[2])]  # type: ignore[index]
        if numbers[0] < numbers[1]:
            found.append(f"{wanted[1]}>={wanted[2]} ({there} is installed)")
    return found


def packages() -> str | None:
    """Which packages this Python lacks, in one line; None: none. Not one is imported."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    if found := lacking(project["dependencies"]):
        return f"want {', '.join(found)}: `{sys.executable} -m pip install` brings them, or PYTHON=... names another"
    return None


def missing() -> str | None:
    """What this machine lacks, in one line; None: nothing. Of packages nothing but torch is imported."""
    if (what := packages()) is not None:
        return what
    import torch

    if not torch.cuda.is_available():
        return f"no GPU: torch {torch.__version__} finds no CUDA device"
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    from fathom.scripts.cli import arguments

    args = arguments(parser(), argv)
    if not args.page and (what := missing()) is not None:
        print(f"scripts.gpu: {what}", file=sys.stderr)
        return 2
    from fathom.scripts.parts.gpu_stages import run

    return run(args)


if __name__ == "__main__":
    if (lacks := packages()) is not None:  # before anything is imported that needs them
        print(f"scripts.gpu: {lacks}", file=sys.stderr)
        sys.exit(2)
    from fathom.scripts.cli import run_alone

    sys.exit(run_alone(main))
