"""`load`: how long a checkpoint takes to load, beside what reading its files takes, from the disk and from memory.

Each time is of a process of its own, imports not counted. *ours* is all that `generate` does before the first token:
config, census, checks, a model. *safetensors* opens every tensor of the files, and like ours maps them without reading.
*bytes* reads all of the files and does nothing with them. For *cold* the system is asked to forget the files first;
what came from the disk is counted, because it need not comply.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from model.errors import ConfigError
from runtime.load import load_any
from runtime.options import RunOptions
from scripts.bench.children import warm
from scripts.bench.comparison import Spread
from scripts.bench.record import Record, rendered
from scripts.cli import run_alone
from scripts.console import Console
from scripts.paths import ROOT

STATES = ("cold", "warm")


def run(args: argparse.Namespace, record: Record, console: Console) -> int:
    """Run the bench; returns the exit status."""
    model, rows = args.model.resolve(), list[dict[str, Any]]()
    if not model.is_dir():
        raise ConfigError(f"{args.model}: no such folder")
    for repetition in range(args.repetitions):
        for state in STATES:
            for way in WAYS:
                size = warm(model)
                if state == "cold":
                    forget(model)
                told = json.dumps({"way": way, "model": str(model), "numerics": args.numerics})
                found = _child(told)
                rows.append({"way": way, "state": state, "repetition": repetition, "bytes": size, **found})
    record.write(rows)
    console.print(rendered("load", ("way", "files", "s, median (from .. to)", "MB from disk"), cells(rows)))
    return 0


def forget(folder: Path) -> None:
    """Ask the system to drop a checkpoint's files from the page cache."""
    for path in folder.iterdir():
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _child(told: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "scripts.bench.load", told]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode == 2:
        raise ConfigError(done.stderr.strip())
    if done.returncode:
        raise RuntimeError(f"loading ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def cells(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Rows of the table."""
    out: list[tuple[str, ...]] = []
    for state in STATES:
        for way in WAYS:
            some = [row for row in rows if row["way"] == way and row["state"] == state]
            disk = Spread.of([row["disk_bytes"] / 1e6 for row in some])
            out.append((way, state, str(Spread.of([row["seconds"] for row in some])), f"{disk.median:.3g}"))
    return out


def _ours(model: Path, numerics: str) -> object:
    return load_any(model, RunOptions(numerics))


def _safetensors(model: Path, _: str) -> object:
    return [load_file(path) for path in sorted(model.glob("*.safetensors"))]


def _bytes(model: Path, _: str) -> object:
    return warm(model)


WAYS: dict[str, Callable[[Path, str], object]] = {"ours": _ours, "safetensors": _safetensors, "bytes": _bytes}


def _from_disk() -> int:
    """Bytes that this process has had read from storage."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def main() -> int:
    """Load in the way that the first argument asks for, as a process of its own; returns the exit status."""
    asked = json.loads(sys.argv[1])
    before, began = _from_disk(), time.perf_counter()
    held = WAYS[asked["way"]](Path(asked["model"]), asked["numerics"])
    took = time.perf_counter() - began
    print(json.dumps({"seconds": took, "disk_bytes": _from_disk() - before}))
    del held
    return 0


if __name__ == "__main__":
    sys.exit(run_alone(main))
